//go:build unix && !race

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"eventhub/acl"
)

// relay passes TCP connections on, unless the network is off.
type relay struct {
	listener net.Listener
	target   string

	mu    sync.Mutex
	off   bool
	conns map[net.Conn]struct{}
	pipes sync.WaitGroup
}

func startRelay(t *testing.T, target string) *relay {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: listener, target: target, conns: make(map[net.Conn]struct{})}
	r.pipes.Go(r.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		r.turn(true)
		r.pipes.Wait()
	})
	return r
}

func (r *relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return // the test is over
		}
		hub, err := net.Dial("tcp", r.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		r.mu.Lock()
		if r.off {
			_, _ = client.Close(), hub.Close()
		} else {
			for from, to := range map[net.Conn]net.Conn{client: hub, hub: client} {
				r.conns[from] = struct{}{}
				r.pipes.Go(func() { r.pipe(from, to) })
			}
		}
		r.mu.Unlock()
	}
}

func (r *relay) pipe(from, to net.Conn) {
	_, _ = io.Copy(to, from)
	_, _ = from.Close(), to.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, from)
}

// turn turns the network off or on.
func (r *relay) turn(off bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = off
	if off {
		for c := range r.conns {
			_ = c.Close()
		}
	}
}

// sdkPage shows each event of a topic in a line of its own.
const sdkPage = `<!doctype html>
<meta charset="utf-8">
<title>Events</title>
<section id="shown"></section>
<script type="module">
  import { createClient } from "/sdk/index.js";
  const token = async () => (await fetch("/token")).text();
  const client = (window.client = createClient(%q, { token, minPauseMs: 50, maxPauseMs: 500 }));
  window.breaks = 0;
  client.on("state", (state) => { if (state === "waiting") window.breaks++; });
  // What fails prints the text of the page, which a shadow tree does not belong to.
  const list = (window.list = document.getElementById("shown").attachShadow({ mode: "open" }).appendChild(document.createElement("ol")));
  window.seen = new Set();
  window.numbers = 0;
  let sinceTick = 0;
  window.mostSinceTick = 0;
  setInterval(() => { sinceTick = 0; }, 10);
  client.subscribe("page.events", "tab", ({ payload }) => {
    window.mostSinceTick = Math.max(window.mostSinceTick, ++sinceTick);
    if (typeof payload === "number" && !window.seen.has(payload)) window.numbers++;
    window.seen.add(payload);
    const line = document.createElement("li");
    line.textContent = payload;
    list.append(line);
  }, { groupTtlMs: 600000 }).then(() => { window.subscribed = true; }, (error) => { document.title = error.message; });
</script>
`

// testTypeScriptClientInAPage runs the compiled client in a page, without a bundler.
func testTypeScriptClientInAPage(t *testing.T, dist string) {
	t.Helper()
	hub := startNode(t, "--jwt-secret-file="+secretFile(t))
	at, err := url.Parse(hub.url)
	if err != nil {
		t.Fatal(err)
	}
	wire := startRelay(t, at.Host)
	var tokens atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, sdkPage, "ws://"+wire.listener.Addr().String())
	})
	mux.HandleFunc("GET /token", func(w http.ResponseWriter, _ *http.Request) {
		n := tokens.Add(1)
		token, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: "page", ID: strconv.FormatInt(n, 10), Scopes: []string{"*:page.**"}, TTL: 15 * time.Second})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = io.WriteString(w, token)
	})
	mux.HandleFunc("GET /tokens", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strconv.FormatInt(tokens.Load(), 10))
	})
	mux.Handle("GET /sdk/", http.StripPrefix("/sdk/", http.FileServer(http.Dir(dist))))
	site := httptest.NewServer(mux)
	t.Cleanup(site.Close)

	b := openBrowser(t)
	b.do(chromedp.Navigate(site.URL + "/"))
	b.until("the page has subscribed", "window.subscribed")
	c := hub.dial()
	const topic = "page.events"

	b.eval(`client.publish("page.events", "from the page")`)
	publishTo(t, c, topic, `"from elsewhere"`)
	b.until("both events are shown", `seen.has("from the page") && seen.has("from elsewhere") && list.innerText.includes("from elsewhere")`)

	// The tab is in the background, and so far back that the browser freezes it.
	lifecycle := func(state page.SetWebLifecycleStateState) {
		t.Helper()
		if _, err := chromedp.Call(b.ctx, page.SetWebLifecycleState, page.SetWebLifecycleStateParams{State: state}); err != nil {
			t.Fatal(err)
		}
	}
	lifecycle(page.SetWebLifecycleStateStateFrozen)
	for i := range 50 {
		publishTo(t, c, topic, fmt.Sprintf(`"hidden %d"`, i))
	}
	lifecycle(page.SetWebLifecycleStateStateActive)
	b.until("all events came when the tab was looked at again", `[...seen].filter((p) => String(p).startsWith("hidden")).length === 50`)

	// The network goes, and comes back.
	turn := func(off bool) {
		t.Helper()
		wire.turn(off)
		conditions := network.OverrideNetworkStateParams{Offline: off, DownloadThroughput: -1, UploadThroughput: -1}
		if _, err := chromedp.Call(b.ctx, network.OverrideNetworkState, conditions); err != nil {
			t.Fatal(err)
		}
	}
	turn(true)
	b.until("the client has noticed", `client.state !== "ready"`)
	b.eval(`window.waiting = client.publish("page.events", "published without a network").then(() => { window.waited = true; }); 0`)
	publishTo(t, c, topic, `"meanwhile"`)
	turn(false)
	b.until("what waited has gone both ways", `window.waited && seen.has("published without a network") && seen.has("meanwhile")`)

	// Tokens are replaced, and the connection stays.
	had := tokens.Load()
	breaks := b.eval("breaks")
	b.until("a fresh token", fmt.Sprintf(`fetch("/tokens").then((r) => r.text()).then((n) => Number(n) > %d)`, had))
	b.eval(`client.publish("page.events", "with a fresh token")`)
	if got := b.eval("breaks"); got != breaks {
		t.Errorf("the connection broke when its token was replaced: %s breaks, and %s before", got, breaks)
	}

	// Many events do not keep the page from doing anything else.
	const many = 20_000
	b.eval("mostSinceTick = 0")
	b.eval(fmt.Sprintf(`window.sent = client.publishMany("page.events", Array.from({ length: %d }, (_, payload) => ({ payload }))).then(() => { window.done = true; }, (e) => { document.title = e.message; }); 0`, many))
	for n := 1000; n <= many; n += 1000 {
		b.until(fmt.Sprintf("%d events are shown", n), fmt.Sprintf("numbers >= %d", n))
	}
	b.until("all publishes are answered", "window.done")
	most, err := strconv.Atoi(b.eval("mostSinceTick"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("at most %d events between two ticks of a timer, of %d", most, many)
	if most > many/10 {
		t.Errorf("%d events were handled before anything else could happen", most)
	}
	b.eval("client.close()")
}
