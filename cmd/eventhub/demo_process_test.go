//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/coder/websocket"

	"eventhub/docs/apitest"
	"eventhub/sdk/go/wire"
)

var demoPicture = flag.String("demo.picture", "", "file for the picture of the demo; by default none is made")

// The cards of members show their lines, those that came for the first time, and those that wait
// for the visitor.
const (
	demoLines = `[...document.querySelectorAll(".card")].map((c) => [...c.querySelectorAll("li")])`
	demoFirst = demoLines + `.map((all) => all.filter((li) => !li.innerText.includes("attempt")).length)`
)

// The demo in Chromium: processes that change without a click, publishing, and members of groups
// that share events, refuse them and are too late. Text with markup stays text, nothing comes from
// elsewhere, and nobody needs a mouse or good eyes. The page outlives its hub.
func TestDemo(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	hub := startNode(t, "--data="+data, "--demo")
	b := openBrowser(t)
	b.do(chromedp.EmulateViewport(1240, 1040))
	// Leases last for as long as the test says: on a slow machine, one of the page could end before
	// the visitor has acknowledged.
	leases := page.AddScriptToEvaluateOnNewDocumentParams{Source: `{
		window.lease = 600_000;
		const send = WebSocket.prototype.send;
		WebSocket.prototype.send = function (frame) { send.call(this, frame.replace('"ackTimeoutMs":15000', '"ackTimeoutMs":' + window.lease)); };
	}`}
	if _, err := chromedp.Call(b.ctx, page.AddScriptToEvaluateOnNewDocument, leases); err != nil {
		t.Fatal(err)
	}
	b.do(chromedp.Navigate(strings.TrimSuffix(hub.demo, "/")))

	// The lines of members have marks as well, which are no status of the member.
	const status = `[...document.querySelectorAll(".card .mark[role=status]")]`
	const connected = status + `.length >= 3 && ` + status + `.every((mark) => mark.classList.contains("good")) && document.querySelector("header .mark.good")`
	b.until("three members have joined", `document.querySelectorAll(".card").length === 3 && `+connected)
	b.until("processes are shown", `document.querySelectorAll("#processes .mark.good").length >= 2`)
	came := `Number(document.getElementById("rate").innerText.split(" ")[0])`
	b.until("they change", came+" > 2 * "+b.eval(came))

	// Ten events go to both groups, and each event to one member of each. All members ask for
	// events by then: else one may take all of the ten, or miss them.
	membersWait(t, hub, 3)
	b.click("Publish 10")
	b.until("ten events have come", demoFirst+`[2] >= 10 && `+demoFirst+`.slice(0, 2).reduce((a, n) => a + n) >= 10`)
	if got := b.eval(`(([a, b, c]) => a + b === 10 && c === 10 && a > 0 && b > 0)(` + demoFirst + `)`); got != "true" {
		t.Errorf("the members have %s events, want the first two to share ten and the third to have all", b.eval(demoFirst))
	}
	if *demoPicture != "" {
		b.keepDemoPicture()
	}

	// An event that is refused comes again.
	markup := `<img src=x onerror="window.harmed=1">`
	payload, err := json.Marshal(map[string]string{"note": markup})
	if err != nil {
		t.Fatal(err)
	}
	b.set("#publish textarea", string(payload))
	b.set("#publish input[name=key]", markup)
	b.clickAt(selector("#publish button.main"))
	b.until("the event is stored", `document.querySelector("#published li")?.innerText.includes("onerror")`)
	b.until("the third member has acknowledged", demoLines+`[2].some((li) => li.innerText.includes("onerror") && li.innerText.includes("acknowledged"))`)
	b.clickAt(xpath(`//li[contains(., "onerror")]//button[.="Nack"]`))
	again := demoLines + `.flat().find((li) => li.innerText.includes("onerror") && li.innerText.includes("attempt 2"))`
	b.until("a second attempt", again)
	b.do(chromedp.SendKeys(chromedp.Search(`//li[contains(., "onerror") and contains(., "attempt 2")]//button[.="Ack"]`), "\r"))
	b.until("the event is acknowledged by the keyboard", again+`.innerText.includes("acknowledged")`)
	if got := b.eval(`document.activeElement.closest(".card") !== null`); got != "true" {
		t.Error("the focus is lost when its button goes")
	}

	// A fourth member lets its lease end, which is short.
	b.eval("window.lease = 2_000")
	b.set("#subscribe input[name=group]", markup)
	b.click("Join")
	b.until("a fourth member has joined", `document.querySelectorAll(".card")[3]?.querySelector(".mark.good")`)
	membersWait(t, hub, 4)

	// The page names each mistake.
	b.set("#publish textarea", "no JSON")
	b.clickAt(selector("#publish button.main"))
	b.shows("The payload is not JSON")
	b.set("#publish textarea", "1")
	b.set("#publish input[name=topic]", "orders.placed")
	b.clickAt(selector("#publish button.main"))
	b.shows("forbidden: The policy does not allow to publish to orders.placed.")
	b.set("#publish input[name=topic]", "demo.greetings")
	b.set("#publish textarea", `"left to the lease"`)
	b.clickAt(selector("#publish button.main"))
	b.until("the fourth member has it", demoLines+`[3].some((li) => li.innerText.includes("left to the lease"))`)
	b.set("#publish textarea", "1")

	axe, err := os.ReadFile(filepath.Join("testdata", "axe", "axe.min.js"))
	if err != nil {
		t.Fatal(err)
	}
	for _, look := range []struct {
		name, scheme  string
		width, height int64
	}{{"light", "light", 1280, 900}, {"dark", "dark", 1280, 900}, {"phone", "light", 390, 844}, {"phone-dark", "dark", 320, 700}} {
		b.do(chromedp.EmulateViewport(look.width, look.height))
		media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: look.scheme}}}
		if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, media); err != nil {
			t.Fatal(err)
		}
		if got := b.eval("document.documentElement.scrollWidth <= innerWidth"); got != "true" {
			t.Errorf("the page is wider than the screen in %s: %s", look.name, b.eval("document.documentElement.scrollWidth"))
		}
		b.picture("demo-" + look.name)
		b.eval(string(axe) + "; 0")
		if found := b.eval(`axe.run().then((r) => r.passes.length < 10 ? ["axe did not look"] : r.violations.filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => v.id + ": " + v.nodes.map((n) => n.target.join(" ")).join(", ")))`); found != "[]" {
			t.Errorf("the page in %s is hard to use: %s", look.name, found)
		}
	}
	reached := b.eval(`[...document.querySelectorAll("button, input, textarea, .wide")].every((e) => { e.focus(); return e.closest("[hidden]") || document.activeElement === e; })`)
	if reached != "true" {
		t.Error("the keyboard does not reach every control")
	}
	if got := b.eval("String(window.harmed) + document.querySelectorAll('img').length"); got != `"undefined0"` {
		t.Errorf("markup of an event became part of the page: %s", got)
	}
	if got := b.eval(`performance.getEntriesByType("resource").map((e) => e.name).filter((name) => !name.startsWith(location.origin + "/demo/"))`); got != "[]" {
		t.Errorf("the page loaded %s", got)
	}
	b.until("what nobody acknowledged has come again", demoLines+`[3].some((li) => li.innerText.includes("not acknowledged in time")) && `+
		demoLines+`[3].some((li) => li.innerText.includes("attempt 2"))`)

	// The hub stops and comes back, with another token for the page.
	at, err := url.Parse(hub.url)
	if err != nil {
		t.Fatal(err)
	}
	hub.terminate()
	b.until("the page says that there is no connection", `document.querySelector("header .mark.bad")`)
	startNode(t, "--data="+data, "--demo", "--ws-port="+at.Port())
	b.until("the members are back", connected)
	b.clickAt(selector("#publish button.main"))
	b.until("an event comes to the third member", demoLines+`[2].some((li) => li.innerText.startsWith("1"))`)
	b.eval(`document.querySelectorAll(".card button").forEach((b) => b.innerText === "Leave" && b.click())`)
	b.until("all have left", `document.querySelectorAll(".card").length === 0`)
}

// membersWait waits until n members of groups of the demo's topic ask for events.
func membersWait(t *testing.T, hub *node, n int) {
	t.Helper()
	eventually(t, "each member waits for events", func() bool {
		_, body := request(t, http.MethodGet, hub.ops+"/groups?topic=demo.greetings", nodeToken)
		var listed struct {
			Groups []struct{ Members, Waiting int }
		}
		if err := json.Unmarshal([]byte(body), &listed); err != nil {
			t.Fatalf("%v: %s", err, body)
		}
		members, waiting := 0, 0
		for _, g := range listed.Groups {
			members, waiting = members+g.Members, waiting+g.Waiting
		}
		return members == n && waiting == n
	})
}

// Beyond loopback the page asks for a token. Its own address is an origin that may connect.
func TestDemoAsksForAToken(t *testing.T) {
	t.Parallel()
	const token = "a token that others cannot guess"
	hub := startNodeWith(t, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "WS_TOKEN="+token) }, "--demo", "--bind=0.0.0.0")
	at, err := url.Parse(hub.demo)
	if err != nil {
		t.Fatal(err)
	}
	b := openBrowser(t)
	b.do(chromedp.Navigate("http://127.0.0.1:" + at.Port() + "/demo/"))
	b.shows("This page needs a token")
	give := func(token string) {
		b.set("#ask input", token)
		b.clickAt(selector("#ask button"))
	}
	give("wrong")
	b.shows("The token is not valid.")
	b.until("the page asks again", `!document.getElementById("ask").hidden`)
	give(token)
	b.until("the members have joined", `document.querySelectorAll(".card .mark.good").length === 3`)
}

// What the hub gives to whom: the page to all, its token to pages of its own on this host, and that
// token grants nothing but the demo.
func TestDemoToken(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--demo", "--nats-listen=127.0.0.1:0")
	described := apitest.Transport(t, apitest.WebSocket, http.DefaultTransport)
	ask := func(by http.RoundTripper, url string, header http.Header) (status int, answered http.Header, text string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		req.Header, req.Host = header, header.Get("Host")
		res, err := by.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, res.Header, string(body)
	}
	web := strings.Replace(hub.url, "ws://", "http://", 1)
	for _, c := range []struct {
		header string
		status int
	}{
		{"", 200},
		{"Sec-Fetch-Site: same-origin", 200},
		{"Sec-Fetch-Site: same-site", 403}, // a page of another port of this host
		{"Sec-Fetch-Site: cross-site", 403},
		{"Sec-Fetch-Site: none", 403}, // typed into the address bar
		{"Host: rebound.example", 403},
		{"Host: localhost:1", 200},
		{"X-Forwarded-For: 192.0.2.1", 403},
		{"Forwarded: for=192.0.2.1", 403},
	} {
		header := make(http.Header)
		if name, value, ok := strings.Cut(c.header, ": "); ok {
			header.Set(name, value)
		}
		if status, _, text := ask(described, web+"/demo/token", header); status != c.status {
			t.Errorf("with %q, the token is answered with %d %s", c.header, status, text)
		}
	}
	for path, want := range map[string]int{"/demo": 301, "/demo/": 200, "/demo/eventhub.js": 200, "/demo/style.css": 200, "/demo/icon.svg": 200, "/demo/none": 404} {
		status, answered, text := ask(described, web+path, http.Header{})
		if status != want {
			t.Errorf("GET %s: %d %.100s, want %d", path, status, text, want)
		}
		if policy := answered.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
			t.Errorf("GET %s has the policy %q", path, policy)
		}
	}
	for _, path := range []string{"/", "/demonstration"} {
		if status, _, _ := ask(http.DefaultTransport, web+path, http.Header{}); status != http.StatusUpgradeRequired {
			t.Errorf("GET %s: %d, want 426", path, status)
		}
	}

	_, _, text := ask(described, web+"/demo/token", http.Header{})
	var given struct{ Token string }
	if err := json.Unmarshal([]byte(text), &given); err != nil {
		t.Fatal(err)
	}
	c := hub.dialWith(given.Token)
	publishTo(t, c, "demo.mine", "1")
	for _, topic := range []string{"orders.placed", "heartbeat.received", "process.state", "demo.a.b", "demo"} {
		if _, err := c.Publish(t.Context(), topic, []byte("1"), wire.PublishOptions{}); err == nil {
			t.Errorf("the token may publish to %s", topic)
		}
	}
	for _, at := range [][2]string{{"process.state", "mine"}, {"process.state", "demo-x"}, {"heartbeat.received", "demo-x"}, {"heartbeat.received", "process-projector"}, {"dlq.demo.mine", "demo-x"}} {
		if _, err := c.Subscribe(t.Context(), at[0], at[1], wire.SubscribeOptions{}, func(wire.Event) {}); err == nil {
			t.Errorf("the token may join %s of %s", at[1], at[0])
		}
	}
	native := dialPlain(t, hub.nats, given.Token)
	if native.publish("event.demo.mine", "", "") {
		t.Error("a native client with the token may not publish to demo.mine")
	}
	for _, subject := range []string{"event.orders.placed", "$JS.API.STREAM.LIST", "$JS.API.STREAM.PURGE.orders=2Eplaced"} {
		if !native.publish(subject, "", "") {
			t.Errorf("a native client with the token may publish to %s", subject)
		}
	}
	bearer := http.Header{"Authorization": {"Bearer " + given.Token}}
	for path, want := range map[string]int{
		"/events?topic=process.state": 200, "/events?topic=heartbeat.received": 403, "/connections": 403, "/nats": 403, "/topics/heartbeat.received": 403,
	} {
		if status, _, text := ask(http.DefaultTransport, hub.ops+path, bearer); status != want {
			t.Errorf("GET %s with the token: %d %.100s, want %d", path, status, text, want)
		}
	}

	// Without the demo there is no page, and behind a proxy no token.
	plain := startNode(t)
	if status, _, _ := ask(http.DefaultTransport, strings.Replace(plain.url, "ws://", "http://", 1)+"/demo/", http.Header{}); status != http.StatusUpgradeRequired {
		t.Errorf("a hub without --demo answers /demo/ with %d", status)
	}
	proxied := startNode(t, "--demo", "--trusted-proxies=10.0.0.7")
	if status, _, text := ask(described, strings.Replace(proxied.url, "ws://", "http://", 1)+"/demo/token", http.Header{}); status != http.StatusForbidden {
		t.Errorf("behind a proxy, the token is answered with %d %s", status, text)
	}
	// The page's own address may connect, and no other: neither another origin, nor a name that
	// somebody has made resolve to this host.
	port := strings.TrimPrefix(proxied.url, "ws://127.0.0.1")
	for _, c := range []struct {
		host, origin string
		opens        bool
	}{
		{"127.0.0.1" + port, "http://127.0.0.1" + port, true},
		{"127.0.0.1" + port, "http://127.0.0.1", false},
		{"127.0.0.1" + port, "https://evil.example", false},
		{"evil.example" + port, "http://evil.example" + port, false},
	} {
		conn, _, err := websocket.Dial(t.Context(), proxied.url+"/demo/", &websocket.DialOptions{Host: c.host, HTTPHeader: http.Header{"Origin": {c.origin}}}) //nolint:bodyclose // has none
		if opens := err == nil; opens != c.opens {
			t.Errorf("a page of %s at %s: %v", c.origin, c.host, err)
		}
		if conn != nil {
			_ = conn.CloseNow()
		}
	}
}

// keepDemoPicture settles some events, and keeps the picture that README.md begins with. It has few
// colors, which makes it a third as large.
func (b *browser) keepDemoPicture() {
	b.t.Helper()
	b.eval(`[...document.querySelectorAll(".card")].slice(0, 2).forEach((c, i) => [...c.querySelectorAll("li button")].filter((b) => b.innerText === "Ack").slice(0, 1 + i).forEach((b) => b.click()))`)
	b.eval("document.activeElement.blur(); scrollTo(0, 0)")
	full, err := png.Decode(bytes.NewReader(b.screenshot()))
	if err != nil {
		b.t.Fatal(err)
	}
	bounds := full.Bounds()
	count := make(map[color.Color]int)
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			count[full.At(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(count), func(a, b color.Color) int { return count[b] - count[a] })
	few := image.NewPaletted(bounds, colors[:min(128, len(colors))])
	draw.Draw(few, bounds, full, bounds.Min, draw.Src)
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, few); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(*demoPicture, out.Bytes(), 0o644); err != nil {
		b.t.Fatal(err)
	}
}
