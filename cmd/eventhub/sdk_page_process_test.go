//go:build unix && !race

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"eventhub/acl"
	"eventhub/sdk/go/wire"
)

// sdkPage shows each event of a topic in a line of its own. The client asks for an answer only when
// the browser gives it a reason.
const sdkPage = `<!doctype html>
<meta charset="utf-8">
<title>Events</title>
<section id="shown"></section>
<script type="module">
  import { createClient } from "/sdk/index.js";
  const token = async () => (await fetch("/token")).text();
  const client = (window.client = createClient(%q, { token, minPauseMs: 50, maxPauseMs: 500, pingMs: 3600000, tokenTimeoutMs: 5000 }));
  window.breaks = 0;
  client.on("state", (state) => { if (state === "waiting") window.breaks++; });
  // What fails prints the text of the page, which a shadow tree does not belong to.
  const list = (window.list = document.getElementById("shown").attachShadow({ mode: "open" }).appendChild(document.createElement("ol")));
  window.seen = new Set();
  window.numbers = new Set();
  let sinceTick = 0;
  window.mostSinceTick = 0;
  setInterval(() => { sinceTick = 0; }, 10);
  window.pause = 0; // the longest between two frames
  let last = performance.now();
  requestAnimationFrame(function frame(now) {
    window.pause = Math.max(window.pause, now - last);
    last = now;
    requestAnimationFrame(frame);
  });
  window.longest = 0;
  new PerformanceObserver((tasks) => { for (const { duration } of tasks.getEntries()) window.longest = Math.max(window.longest, duration); }).observe({ type: "longtask" });
  client.subscribe("page.events", "tab", ({ payload }) => {
    window.mostSinceTick = Math.max(window.mostSinceTick, ++sinceTick);
    if (typeof payload === "number") window.numbers.add(payload);
    else window.seen.add(payload);
    const line = document.createElement("li");
    line.textContent = payload;
    list.append(line);
  }, { groupTtlMs: 600000 }).then(() => { window.subscribed = true; }, (error) => { document.title = error.message; });
</script>
`

// promPage has the older client of browsers do what it can.
const promPage = `<!doctype html>
<meta charset="utf-8">
<title>PromClient</title>
<script type="module">
  import { PromClient } from "/sdk/compat.js";
  const token = await (await fetch("/token")).text();
  const client = new PromClient(%q, token);
  const codeOf = (promise) => promise.then(() => "OK", (error) => error.code);
  await client.connect();
  const attempts = [];
  await client.subscribe("page.prom", "g", ({ payload }, { attempt }) => {
    attempts.push([payload, attempt]);
    if (attempt === 1) throw new Error("at once");
  }, { maxInFlight: 1 });
  await client.publish("page.prom", { x: 1 }, { key: "k" });
  while (attempts.length < 2) await new Promise((resolve) => setTimeout(resolve, 10));
  const codes = [await codeOf(client.publish("a..b", 1)), await codeOf(client.publish("other", 1)), await codeOf(client.subscribe("page.prom", "g", () => {}))];
  await client.unsubscribe("page.prom", "g");
  codes.push(await codeOf(client.unsubscribe("page.prom", "g")), await codeOf(new PromClient(%q, "wrong").connect()));
  client.close();
  window.did = JSON.stringify([attempts, codes]);
</script>
`

// pageRig is a page with the compiled client, a hub, and the wire between them.
type pageRig struct {
	*browser
	hub    *node
	wire   *relay
	tokens atomic.Int64 // that the page was given
	ttl    atomic.Int64 // of the next
}

// testTypeScriptClientInAPage runs the compiled client in a page, without a bundler.
func testTypeScriptClientInAPage(t *testing.T, dist string) {
	t.Helper()
	r := &pageRig{hub: startNode(t, "--jwt-secret-file="+secretFile(t))}
	r.ttl.Store(int64(time.Minute))
	at, err := url.Parse(r.hub.url)
	if err != nil {
		t.Fatal(err)
	}
	r.wire = startRelay(t, at.Host)
	mux := http.NewServeMux()
	for path, page := range map[string]string{"/{$}": sdkPage, "/prom": promPage} {
		address := "ws://" + r.wire.listener.Addr().String()
		text := strings.ReplaceAll(page, "%q", strconv.Quote(address))
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, text)
		})
	}
	mux.HandleFunc("GET /token", func(w http.ResponseWriter, _ *http.Request) {
		n := r.tokens.Add(1)
		token, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: "page", ID: strconv.FormatInt(n, 10), Scopes: []string{"*:page.**"}, TTL: time.Duration(r.ttl.Load())})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = io.WriteString(w, token)
	})
	mux.Handle("GET /sdk/", http.StripPrefix("/sdk/", http.FileServer(http.Dir(dist))))
	site := httptest.NewServer(mux)
	t.Cleanup(site.Close)

	// By default, tabs in tests are as fast in the background as in front.
	r.browser = openBrowser(t, chromedp.Flag("disable-background-timer-throttling", false))
	r.do(chromedp.Navigate(site.URL + "/"))
	r.until("the page has subscribed", "window.subscribed")
	c := r.hub.dial()

	r.eval(`client.publish("page.events", "from the page")`)
	publishTo(t, c, pageTopic, `"from elsewhere"`)
	r.until("both events are shown", `seen.has("from the page") && seen.has("from elsewhere") && list.innerText.includes("from elsewhere")`)

	r.behind(func() { r.slowTimers(c) })
	r.behind(func() { r.frozen(c) })
	r.withoutANetwork(c)
	r.onADeadNetwork(c)
	r.tokensAreReplaced()
	r.manyEvents()
	r.eval("client.close()")

	r.do(chromedp.Navigate(site.URL + "/prom"))
	r.until("PromClient has done all", "window.did")
	if got := r.eval("JSON.parse(did)"); got != `[[[{"x":1},1],[{"x":1},2]],["bad_topic","forbidden","already_subscribed","not_subscribed","bad_token"]]` {
		t.Errorf("PromClient did %s", got)
	}
}

const pageTopic = "page.events"

// settled waits until the hub has all acknowledgements of the page.
func (r *pageRig) settled() {
	r.t.Helper()
	eventually(r.t, "the page has acknowledged all events", func() bool {
		res, err := http.Get(r.hub.ops + "/lag?topic=" + pageTopic + "&group=tab")
		if err != nil {
			r.t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		var lag struct{ Pending, Inflight int }
		return json.NewDecoder(res.Body).Decode(&lag) == nil && lag.Pending == 0 && lag.Inflight == 0
	})
}

// behind runs what is to happen while another tab is in front of the page.
func (r *pageRig) behind(run func()) {
	r.t.Helper()
	ctx, cancel := chromedp.NewContext(r.ctx, chromedp.WithNewWindow(false))
	defer cancel()
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil {
		r.t.Fatal(err)
	}
	if _, err := chromedp.Call(ctx, page.BringToFront, cdp.Empty{}); err != nil {
		r.t.Fatal(err)
	}
	r.until("the page is hidden", "document.hidden")
	run()
	if _, err := chromedp.Call(r.ctx, page.BringToFront, cdp.Empty{}); err != nil {
		r.t.Fatal(err)
	}
	r.until("the page is shown", "!document.hidden")
}

// slowTimers has events come while the page's timers are slow, because the page is hidden. They are
// handled and acknowledged all the same.
func (r *pageRig) slowTimers(c *wire.Conn) {
	t := r.t
	t.Helper()
	took := r.eval("new Promise((resolve) => { const began = performance.now(); let n = 0; const tick = () => (++n === 3 ? resolve(performance.now() - began) : setTimeout(tick, 10)); tick(); })")
	t.Logf("two timers of 10 ms took %s ms in the background", took)
	if ms, err := strconv.ParseFloat(took, 64); err != nil || ms < 500 {
		t.Errorf("the timers of the page are not slow: %s", took)
	}
	publishNumbers(t, c, pageTopic, 300)
	r.until("all events came", "numbers.size === 300")
	r.settled()
	r.eval(`client.publish("page.events", "from the background")`)
	r.until("an event of its own came", `seen.has("from the background")`)
	r.eval("numbers.clear()")
}

// frozen has the browser freeze the page for so long that the hub ends its connection, because its
// token has expired.
func (r *pageRig) frozen(c *wire.Conn) {
	t := r.t
	t.Helper()
	r.ttl.Store(int64(2 * time.Second))
	r.newConnection()
	lifecycle := func(state page.SetWebLifecycleStateState) {
		t.Helper()
		if _, err := chromedp.Call(r.ctx, page.SetWebLifecycleState, page.SetWebLifecycleStateParams{State: state}); err != nil {
			t.Fatal(err)
		}
	}
	lifecycle(page.SetWebLifecycleStateStateFrozen)
	publishNumbers(t, c, pageTopic, 25)
	eventually(t, "the hub has ended the connection", func() bool {
		r.wire.mu.Lock()
		defer r.wire.mu.Unlock()
		return len(r.wire.conns) == 0
	})
	r.ttl.Store(int64(time.Minute))
	for n := range 25 {
		publishTo(t, c, pageTopic, strconv.Itoa(25+n))
	}
	lifecycle(page.SetWebLifecycleStateStateActive)
	r.until("all events came when the page went on", "numbers.size === 50")
	r.settled()
	r.eval("numbers.clear()")
}

// newConnection has the client connect again, with another token.
func (r *pageRig) newConnection() {
	r.t.Helper()
	had, breaks := r.tokens.Load(), r.eval("breaks")
	r.wire.cut(true)
	r.until("the connection is gone", "breaks > "+breaks)
	r.wire.cut(false)
	r.until("there is another", `client.state === "ready"`)
	if r.tokens.Load() == had {
		r.t.Error("a new connection was made without asking for a token")
	}
}

// online says to the browser whether there is a network.
func (r *pageRig) online(is bool) {
	r.t.Helper()
	state := network.OverrideNetworkStateParams{Offline: !is, DownloadThroughput: -1, UploadThroughput: -1}
	if _, err := chromedp.Call(r.ctx, network.OverrideNetworkState, state); err != nil {
		r.t.Fatal(err)
	}
}

// withoutANetwork takes the network away, and brings it back.
func (r *pageRig) withoutANetwork(c *wire.Conn) {
	r.t.Helper()
	r.wire.cut(true)
	r.online(false)
	r.until("the client has noticed", `client.state !== "ready"`)
	r.eval(`client.publish("page.events", "without a network").then(() => seen.add("stored")); 0`)
	publishTo(r.t, c, pageTopic, `"meanwhile"`)
	r.wire.cut(false)
	r.online(true)
	r.until("what waited has gone both ways", `seen.has("stored") && seen.has("without a network") && seen.has("meanwhile")`)
	r.settled()
}

// onADeadNetwork is withoutANetwork where no connection ends: nothing arrives any more, and the
// browser says that it is offline.
func (r *pageRig) onADeadNetwork(c *wire.Conn) {
	r.t.Helper()
	r.wire.stick(true)
	r.online(false)
	r.until("the client has noticed that nothing arrives", `client.state !== "ready"`)
	r.eval(`client.publish("page.events", "on a dead network").then(() => seen.add("stored again")); 0`)
	publishTo(r.t, c, pageTopic, `"all the while"`)
	r.wire.stick(false)
	r.online(true)
	r.until("what waited has gone both ways", `seen.has("stored again") && seen.has("on a dead network") && seen.has("all the while")`)
	r.settled()
}

// tokensAreReplaced waits for two fresh tokens, with which the connection stays.
func (r *pageRig) tokensAreReplaced() {
	r.t.Helper()
	// The clock of the page is ahead, so it sees three seconds of a minute, and asks in time even
	// if this machine is slow.
	r.eval("window.now = Date.now; Date.now = () => now.call(Date) + 57000; 0")
	defer r.eval("Date.now = now; 0")
	r.newConnection()
	had, breaks := r.tokens.Load(), r.eval("breaks")
	eventually(r.t, "the page asks for another token", func() bool { return r.tokens.Load() > had })
	r.eval(`client.publish("page.events", "with a fresh token")`)
	r.until("its event comes", `seen.has("with a fresh token")`)
	if got := r.eval("breaks"); got != breaks {
		r.t.Errorf("the connection broke when its token was replaced: %s breaks, and %s before", got, breaks)
	}
	r.ttl.Store(int64(time.Hour))
	r.newConnection()
}

var manyPageEvents = flag.Int("page.events", 8_000, "how many events a page of the TypeScript client shows at once")

// Bounds on how long a page may be busy without a break while many events come. On a slow machine
// all takes longer, so a share of the time of the round is allowed as well. The figure of a machine
// that stands still is no figure of the page, so the best of several rounds counts.
const (
	longestTask  = 500 // milliseconds
	longestShare = 10  // of the time of a round: a tenth
	taskRounds   = 4
)

// manyEvents has the page show many events. All the while the browser can do something else.
func (r *pageRig) manyEvents() {
	t := r.t
	t.Helper()
	events := *manyPageEvents
	for round := 1; ; round++ {
		r.eval("mostSinceTick = 0; longest = 0; pause = 0; numbers.clear(); list.replaceChildren(); window.done = false; window.began = performance.now(); 0")
		r.eval(fmt.Sprintf(`client.publishMany("page.events", Array.from({ length: %d }, (_, payload) => ({ payload }))).then(() => { window.done = true; }, (e) => { document.title = e.message; }); 0`, events))
		for n := 1000; n <= events; n += 1000 {
			r.until(fmt.Sprintf("%d events are shown", n), fmt.Sprintf("numbers.size >= %d", n))
		}
		took, err := strconv.ParseFloat(r.eval("performance.now() - began"), 64)
		if err != nil {
			t.Fatal(err)
		}
		r.until("all publishes are answered", "window.done")
		most, err := strconv.Atoi(r.eval("mostSinceTick"))
		if err != nil {
			t.Fatal(err)
		}
		longest, err := strconv.ParseFloat(r.eval("longest"), 64)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d events published and shown in %.0f ms: the longest task took %.0f ms (0: less than 50), the longest pause between two frames %s ms, and at most %d events came between two ticks of a timer",
			events, took, longest, r.eval("Math.round(pause)"), most)
		if most > events/10 {
			t.Errorf("%d events were handled before anything else could happen", most)
		}
		if longest <= max(longestTask, took/longestShare) {
			return
		}
		if round == taskRounds {
			t.Errorf("in each of %d rounds, the page did nothing else for more than %d ms and a share of 1/%d", round, longestTask, longestShare)
			return
		}
	}
}
