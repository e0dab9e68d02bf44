package examples

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"eventhub/jetstream/natstest"
)

// greetingsHub is a hub that can be started again at the same ports.
type greetingsHub struct {
	t     *testing.T
	dir   string
	ws    string // HOST:PORT of the WebSocket
	http  string // of HTTP
	token string
	*program
}

// startGreetingsHub starts a hub that makes its own token, as at the first start of a newcomer's.
func startGreetingsHub(t *testing.T) *greetingsHub {
	t.Helper()
	h := &greetingsHub{t: t, dir: t.TempDir(), ws: natstest.FreeAddress(t), http: natstest.FreeAddress(t)}
	h.start()
	token, err := os.ReadFile(filepath.Join(h.dir, "eventhub-data", "token"))
	if err != nil {
		t.Fatal(err)
	}
	h.token = strings.TrimSpace(string(token))
	return h
}

func (h *greetingsHub) start() {
	h.t.Helper()
	port := func(address string) string { return address[strings.LastIndex(address, ":")+1:] }
	h.program = start(h.t, h.dir, nil, filepath.Join(bin, "eventhub"), "serve",
		"--ws-port="+port(h.ws), "--http-port="+port(h.http), "--ops-port=0")
	h.line("token") // the last line
}

// greet publishes a greeting over HTTP.
func (h *greetingsHub) greet(text string) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+h.http+"/publish/greetings", strings.NewReader(strconv.Quote(text)))
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+h.token)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusOK {
		h.t.Fatalf("publishing a greeting: %s", res.Status)
	}
}

// refuse takes the place of a stopped hub, and closes the first connection that a client makes.
func (h *greetingsHub) refuse() {
	h.t.Helper()
	address, err := net.ResolveTCPAddr("tcp", h.ws)
	if err != nil {
		h.t.Fatal(err)
	}
	l, err := net.ListenTCP("tcp", address)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := l.SetDeadline(time.Now().Add(patience)); err != nil {
		h.t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		h.t.Fatalf("the client does not reconnect: %v", err)
	}
	_ = c.Close()
}

// testGreetings runs a client in the hub's directory. The client greets, prints greetings of
// others, and reconnects after a restart of the hub and a failed attempt.
func testGreetings(t *testing.T, hello, name string, args ...string) {
	t.Helper()
	hub := startGreetingsHub(t)
	client := start(t, hub.dir, []string{"EVENTHUB_URL=ws://" + hub.ws}, name, args...)
	client.dies = true
	if line := client.line("hello"); line != hello {
		t.Errorf("the client prints %q, want %q", line, hello)
	}
	hub.greet("good morning")
	client.line("good morning")
	hub.stop()
	hub.refuse()
	hub.start()
	hub.greet("good evening")
	client.line("good evening")
}

// clientFile is the path of an example.
func clientFile(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("clients", name))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestGreetingsInNode needs node, 20 or newer.
func TestGreetingsInNode(t *testing.T) {
	t.Parallel()
	args := []string{clientFile(t, "greetings.mjs")}
	version, err := call(t, ".", "node", "--version")
	if err != nil {
		t.Fatalf("node --version: %v: %s", err, version)
	}
	major, err := strconv.Atoi(strings.Split(strings.TrimPrefix(version, "v"), ".")[0])
	if err != nil {
		t.Fatalf("node is %q", version)
	}
	if major < 22 { // as the README says
		args = append([]string{"--experimental-websocket"}, args...)
	}
	testGreetings(t, "hello from Node", "node", args...)
}

// TestGreetingsInPython needs a python3 with the package websockets.
func TestGreetingsInPython(t *testing.T) {
	t.Parallel()
	// The second has the packages of the system.
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(python, "-c", "import websockets").Run() == nil {
			testGreetings(t, "hello from Python", python, clientFile(t, "greetings.py"))
			return
		}
	}
	t.Fatal("no python3 has the package websockets: run .ci/setup, or pip install websockets")
}

// TestGreetingsInAShell needs curl and jq. The group outlives the script, and a restart of the hub.
func TestGreetingsInAShell(t *testing.T) {
	t.Parallel()
	hub := startGreetingsHub(t)
	shell := start(t, hub.dir, []string{"EVENTHUB_HTTP=http://" + hub.http}, "sh", clientFile(t, "greetings.sh"))
	shell.dies = true
	shell.line("hello from a shell")
	hub.greet("good morning")
	shell.line("good morning")
	hub.stop()
	hub.start()
	hub.greet("good evening")
	shell.line("good evening")
}

// TestGreetingsOnAWebPage needs Chromium. The page is opened as a file, as a newcomer does.
func TestGreetingsOnAWebPage(t *testing.T) {
	t.Parallel()
	hub := startGreetingsHub(t)
	p := openPage(t, hub, "greetings.html", "127.0.0.1:8090", hub.ws)
	p.shows("hello from a web page")
	hub.greet("good morning")
	p.shows("good morning")
	p.wantOnly("hello from a web page\ngood morning\n")
}

// TestGreetingsOverHTTPOnAWebPage needs Chromium. The page opens its stream again after a restart
// of the hub.
func TestGreetingsOverHTTPOnAWebPage(t *testing.T) {
	t.Parallel()
	hub := startGreetingsHub(t)
	p := openPage(t, hub, "greetings-http.html", "127.0.0.1:8081", hub.http)
	p.shows("hello over HTTP")
	hub.greet("good morning")
	p.shows("good morning")
	p.wantOnly("hello over HTTP\ngood morning\n")
	hub.stop()
	hub.start()
	hub.greet("good evening")
	p.shows("good evening")
}

// webPage is an example that is open in a browser.
type webPage struct {
	t   *testing.T
	ctx context.Context
}

// openPage opens an example that names an address, with the address of a hub instead.
func openPage(t *testing.T, hub *greetingsHub, name, named, address string) *webPage {
	t.Helper()
	text, err := os.ReadFile(clientFile(t, name))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(text), named) != 1 {
		t.Fatalf("the page does not name %s once", named)
	}
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(strings.Replace(string(text), named, address, 1)), 0o600); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := chromedp.NewContext(context.Background(), chromedp.WithAllocatorOptions(chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir())),
		chromedp.WithLogf(t.Logf), chromedp.WithErrorf(t.Logf))
	t.Cleanup(cancel)
	ctx, cancel = context.WithTimeout(ctx, 2*patience)
	t.Cleanup(cancel)
	// Somebody answers the prompt with the token.
	if _, err := chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
		Source: "prompt = () => " + strconv.Quote(hub.token),
	}); err != nil {
		t.Fatalf("Chromium (is it installed? run .ci/setup): %v", err)
	}
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil {
			t.Error(err)
		}
	})
	place := &url.URL{Scheme: "file", Path: file}
	if err := chromedp.Do(ctx, chromedp.Navigate(place.String())); err != nil {
		t.Fatal(err)
	}
	return &webPage{t, ctx}
}

func (p *webPage) shows(greeting string) {
	p.t.Helper()
	if _, err := chromedp.Run(p.ctx, chromedp.Poll[bool]("list.textContent.includes("+strconv.Quote(greeting)+")",
		chromedp.WithPollingInterval(20*time.Millisecond), chromedp.WithPollingTimeout(patience))); err != nil {
		p.t.Fatalf("the page does not show %q: %v", greeting, err)
	}
}

func (p *webPage) wantOnly(want string) {
	p.t.Helper()
	list, err := chromedp.Run(p.ctx, chromedp.Evaluate[string]("list.textContent"))
	if err != nil {
		p.t.Fatal(err)
	}
	if list != want {
		p.t.Errorf("the page shows %q, want %q", list, want)
	}
}
