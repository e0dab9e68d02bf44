package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// proxy is a reverse proxy in front of a hub, configured as docs/operations.md shows.
type proxy struct {
	t   *testing.T
	at  string // its address
	tls *tls.Config
}

// substitution replaces what cannot be the same in a test: addresses, paths, and times.
type substitution struct{ from, to string }

// exampleOf returns the only code block of docs/operations.md in a language, with substitutions.
// Each must apply.
func exampleOf(t *testing.T, language string, subs []substitution) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "```"+language+"\n")
	text, rest, ended := strings.Cut(text, "```\n")
	if !found || !ended || strings.Contains(rest, "```"+language+"\n") {
		t.Fatalf("docs/operations.md has not one block of %s", language)
	}
	for _, s := range subs {
		if !strings.Contains(text, s.from) {
			t.Fatalf("the block of %s has no %q", language, s.from)
		}
		text = strings.ReplaceAll(text, s.from, s.to)
	}
	return text
}

func hostPort(url string) string {
	_, at, _ := strings.Cut(url, "://")
	return at
}

// start runs a proxy until the end of the test, and waits until it listens. stop ends the proxy and
// its workers at once.
func (p *proxy) start(cmd *exec.Cmd, stop os.Signal, logs ...string) {
	p.t.Helper()
	var out lockedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	p.t.Cleanup(func() {
		_ = cmd.Process.Signal(stop)
		<-ended
		if p.t.Failed() {
			for _, name := range logs {
				text, _ := os.ReadFile(name)
				_, _ = out.Write(text)
			}
			p.t.Logf("%s said:\n%s", cmd.Path, out.String())
		}
	})
	eventually(p.t, cmd.Path+" listens", func() bool {
		select {
		case <-ended:
			p.t.Fatalf("%s has ended:\n%s", cmd.Path, out.String())
		default:
		}
		conn, err := net.DialTimeout("tcp", p.at, time.Second)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}

// nginx starts Debian's nginx in front of a hub. It gives up connections that are silent for a
// second, and takes 8 connections from an address, unless changes say otherwise.
func nginx(t *testing.T, hub *node, changes ...substitution) *proxy {
	t.Helper()
	path, err := exec.LookPath("nginx")
	if err != nil {
		path = "/usr/sbin/nginx" // which is not in the PATH of other users than root
	}
	files, dir := newPairFiles(t), t.TempDir()
	p := &proxy{t: t, at: natstest.FreeAddress(t), tls: &tls.Config{RootCAs: files.roots}}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	failures := filepath.Join(dir, "error.log")
	conf := exampleOf(t, "nginx", append([]substitution{
		{"user www-data;", "user " + me.Username + ";"},
		{"/run/nginx.pid", filepath.Join(dir, "pid")},
		{"/var/log/nginx/error.log", failures},
		{"/var/log/nginx/access.log", filepath.Join(dir, "access.log")},
		{"worker_rlimit_nofile 65536;", ""},
		{"worker_connections 32768;", "worker_connections 512;"},
		{"\nhttp {\n", "\nhttp {\nclient_body_temp_path " + dir + "/b; proxy_temp_path " + dir + "/p; fastcgi_temp_path " + dir + "/f; uwsgi_temp_path " + dir + "/u; scgi_temp_path " + dir + "/s;\n"},
		{"127.0.0.1:8090", hostPort(hub.url)},
		{"127.0.0.1:8081", hostPort(hub.http)},
		{"listen 443 ssl", "listen " + p.at + " ssl"},
		{"/etc/ssl/hub.example.com/fullchain.pem", files.cert},
		{"/etc/ssl/hub.example.com/privkey.pem", files.key},
		{"proxy_read_timeout 75s;", "proxy_read_timeout 1s;"},
		{"limit_conn clients 200;", "limit_conn clients 8;"},
	}, changes...))
	name := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(name, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	p.start(exec.Command(path, "-e", failures, "-p", dir, "-c", name, "-g", "daemon off;"), os.Interrupt, failures)
	return p
}

// caddy starts Debian's Caddy in front of a hub.
func caddy(t *testing.T, hub *node, changes ...substitution) *proxy {
	t.Helper()
	files, dir := newPairFiles(t), t.TempDir()
	p := &proxy{t: t, at: natstest.FreeAddress(t), tls: &tls.Config{RootCAs: files.roots}}
	conf := exampleOf(t, "caddy", append([]substitution{
		// HTTP/3 would listen at the UDP port, which natstest holds
		{"{\n\tservers {\n", "{\n\tadmin off\n\tauto_https disable_redirects\n\tservers {\n\t\tprotocols h1 h2\n"},
		{"hub.example.com {\n", "https://" + p.at + " {\n\ttls " + files.cert + " " + files.key + "\n"},
		{"127.0.0.1:8090", hostPort(hub.url)},
		{"127.0.0.1:8081", hostPort(hub.http)},
	}, changes...))
	name := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(name, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("caddy", "run", "--config", name, "--adapter", "caddyfile")
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	p.start(cmd, os.Kill)
	return p
}

// client returns an HTTP client that connects from an address of this host.
func (p *proxy) client(from string) *http.Client {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	transport := &http.Transport{DialContext: dialer.DialContext, TLSClientConfig: p.tls, ForceAttemptHTTP2: true}
	p.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// request makes a request with a token and a forged address.
func (p *proxy) request(ctx context.Context, method, path, token string, body io.Reader) *http.Request {
	p.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, "https://"+p.at+path, body)
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("X-Forwarded-For", "203.0.113.9")
	return req
}

func (p *proxy) dial() *wire.Conn {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	c, err := wire.Dial(ctx, "wss://"+p.at+"/ws", wire.Options{Token: nodeToken, TLS: p.tls})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(c.Abort)
	return c
}

// testProxy uses a hub through a proxy.
func testProxy(t *testing.T, front func(*testing.T, *node, ...substitution) *proxy) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	hub := startNode(t, "--trusted-proxies=127.0.0.1", "--limit-ping-interval=200ms")
	p := front(t, hub)

	// Events over a WebSocket, which stays though nobody says anything for long.
	c := p.dial()
	events := subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{})
	publishNumbers(t, c, "orders", 100)
	ackAll(t, events.take(100))
	select {
	case <-c.Done():
		t.Fatalf("the proxy ended a silent connection: %v", c.Err())
	case <-time.After(3 * time.Second): // the interval under test
	}
	publishTo(t, c, "orders", "100")
	ackAll(t, events.take(1))

	// A batch is answered line by line while it is sent.
	read, write := io.Pipe()
	defer context.AfterFunc(ctx, func() { _ = read.CloseWithError(ctx.Err()) })()
	defer func() { _ = write.Close() }()
	req := p.request(ctx, http.MethodPost, "/publish/orders", nodeToken, read)
	req.Header.Set("Content-Type", "application/x-ndjson")
	lines := make(chan error, 1)
	go func() {
		_, err := io.WriteString(write, `{"payload":101}`+"\n")
		lines <- err
	}()
	resp, err := p.client("127.0.0.1").Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if err := <-lines; err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status, err)
	}
	answers := bufio.NewReader(resp.Body)
	for n := 102; n < 105; n++ {
		if line, err := answers.ReadString('\n'); err != nil || !strings.HasPrefix(line, `{"id":"`) {
			t.Fatalf("the batch was answered %q, %v", line, err)
		}
		if _, err := io.WriteString(write, `{"payload":`+strconv.Itoa(n)+"}\n"); err != nil {
			t.Fatal(err)
		}
	}
	_ = write.Close()
	if rest, err := io.ReadAll(answers); err != nil || bytes.Count(rest, []byte("\n")) != 1 {
		t.Errorf("the batch ended with %q, %v", rest, err)
	}

	// An export is whole.
	resp, err = p.client("127.0.0.1").Do(p.request(ctx, http.MethodGet, "/export?topic=orders&ndjson=1", nodeToken, http.NoBody))
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if n := bytes.Count(body, []byte("\n")); err != nil || n != 105 {
		t.Errorf("the export has %d events, %v", n, err)
	}
	if resp.Header.Get("Strict-Transport-Security") == "" {
		t.Error("the answer has no Strict-Transport-Security")
	}

	// The hub knows the address of the client, which the client cannot make up.
	resp, err = p.client("127.0.0.2").Do(p.request(ctx, http.MethodGet, "/replay?topic=orders", "guessed", http.NoBody))
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("a bad token got %s", resp.Status)
	}
	p.guess(ctx, "127.0.0.3")
	for _, want := range []string{"remote=127.0.0.2 over=http", "remote=127.0.0.3 over=websocket"} {
		eventually(t, want, func() bool { return strings.Contains(hub.log.String(), want) })
	}
}

// guess sends a bad token over a WebSocket.
func (p *proxy) guess(ctx context.Context, from string) {
	p.t.Helper()
	conn, resp, err := websocket.Dial(ctx, "wss://"+p.at+"/ws", &websocket.DialOptions{
		HTTPClient: p.client(from), HTTPHeader: http.Header{"X-Forwarded-For": {"203.0.113.9"}},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	if resp.Body != nil {
		_ = resp.Body.Close()
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(ctx, websocket.MessageText, []byte(`{"op":"AUTH","token":"guessed"}`)); err != nil {
		p.t.Fatal(err)
	}
	if _, answer, err := conn.Read(ctx); err != nil || !strings.Contains(string(answer), "bad_token") {
		p.t.Errorf("a bad token got %s, %v", answer, err)
	}
}

func TestBehindNginx(t *testing.T) {
	t.Parallel()
	testProxy(t, nginx)
}

func TestBehindCaddy(t *testing.T) {
	t.Parallel()
	testProxy(t, caddy)
}

// The time limit of nginx on silent connections is what the pings of the hub keep away, and its
// limit of connections holds.
func TestLimitsOfNginx(t *testing.T) {
	t.Parallel()
	p := nginx(t, startNode(t, "--limit-ping-interval=10m"))
	c := p.dial()
	select {
	case <-c.Done():
	case <-time.After(patience):
		t.Error("nginx did not end a silent connection")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var open []*websocket.Conn
	defer func() {
		for _, conn := range open {
			_ = conn.CloseNow()
		}
	}()
	for range 9 {
		conn, resp, err := websocket.Dial(ctx, "wss://"+p.at+"/ws", &websocket.DialOptions{HTTPClient: p.client("127.0.0.4")})
		if err == nil {
			open = append(open, conn)
		}
		if resp == nil {
			t.Fatal(err)
		}
		if resp.Body != nil {
			_ = resp.Body.Close()
		}
		switch want := len(open) <= 8 && err == nil; {
		case want:
		case resp.StatusCode != http.StatusTooManyRequests || len(open) != 8:
			t.Errorf("connection %d got %s", len(open)+1, resp.Status)
		default:
			return
		}
	}
	t.Error("nginx takes more connections from an address than its limit")
}
