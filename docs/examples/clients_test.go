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
	h := &greetingsHub{t: t, dir: t.TempDir(), ws: freeAddress(t), http: freeAddress(t)}
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

// freeAddress returns an address of loopback that nobody listens at.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
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
	// The second has the packages of the system.
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(python, "-c", "import websockets").Run() == nil {
			testGreetings(t, "hello from Python", python, clientFile(t, "greetings.py"))
			return
		}
	}
	t.Fatal("no python3 has the package websockets: run .ci/setup, or pip install websockets")
}

// TestGreetingsOnAWebPage needs Chromium. The page is opened as a file, as a newcomer does.
func TestGreetingsOnAWebPage(t *testing.T) {
	hub := startGreetingsHub(t)
	text, err := os.ReadFile(clientFile(t, "greetings.html"))
	if err != nil {
		t.Fatal(err)
	}
	const here = "127.0.0.1:8090"
	if strings.Count(string(text), here) != 1 {
		t.Fatalf("the page does not name %s once", here)
	}
	file := filepath.Join(t.TempDir(), "greetings.html")
	if err := os.WriteFile(file, []byte(strings.Replace(string(text), here, hub.ws, 1)), 0o600); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := chromedp.NewContext(t.Context(), chromedp.WithAllocatorOptions(chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir())),
		chromedp.WithLogf(t.Logf), chromedp.WithErrorf(t.Logf))
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, patience)
	defer cancel()
	// Somebody answers the prompt with the token.
	if _, err := chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
		Source: "prompt = () => " + strconv.Quote(hub.token),
	}); err != nil {
		t.Fatalf("Chromium (is it installed? run .ci/setup): %v", err)
	}
	place := &url.URL{Scheme: "file", Path: file}
	if err := chromedp.Do(ctx, chromedp.Navigate(place.String())); err != nil {
		t.Fatal(err)
	}
	shows := func(greeting string) {
		t.Helper()
		if _, err := chromedp.Run(ctx, chromedp.Poll[bool]("list.textContent.includes("+strconv.Quote(greeting)+")",
			chromedp.WithPollingInterval(20*time.Millisecond), chromedp.WithPollingTimeout(patience))); err != nil {
			t.Fatalf("the page does not show %q: %v", greeting, err)
		}
	}
	shows("hello from a web page")
	hub.greet("good morning")
	shows("good morning")
	list, err := chromedp.Run(ctx, chromedp.Evaluate[string]("list.textContent"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "hello from a web page\ngood morning\n"; list != want {
		t.Errorf("the page shows %q, want %q", list, want)
	}
	if err := chromedp.Cancel(ctx); err != nil {
		t.Error(err)
	}
}
