//go:build unix

package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"eventhub/sdk/go/wire"
)

var dashboardShots = flag.String("dashboard.shots", "", "directory for the pictures of each view of the dashboard; by default none are kept")

// browser is a page in Chromium.
type browser struct {
	t   *testing.T
	ctx context.Context
}

// chromium is the browser whose tabs the tests share. It lives until all tests have ended.
var chromium struct {
	mu   sync.Mutex
	ctx  context.Context
	stop context.CancelFunc
}

// sharedChromium starts the browser for the first test that asks.
func sharedChromium() (context.Context, error) {
	chromium.mu.Lock()
	defer chromium.mu.Unlock()
	if chromium.ctx != nil {
		return chromium.ctx, nil
	}
	ctx, stop := chromedp.NewContext(context.Background(), chromedp.WithAllocatorOptions(chromedp.NoSandbox))
	if err := chromedp.Do(ctx); err != nil {
		stop()
		return nil, err
	}
	chromium.ctx, chromium.stop = ctx, stop //nolint:fatcontext // the first is kept
	return ctx, nil
}

// stopChromium ends the browser, if there is one.
func stopChromium() error {
	chromium.mu.Lock()
	defer chromium.mu.Unlock()
	if chromium.ctx == nil {
		return nil
	}
	defer chromium.stop()
	return chromedp.Cancel(chromium.ctx)
}

// openBrowser opens a tab in a window and a profile of its own. With options, it is one of another
// Chromium.
func openBrowser(t *testing.T, opts ...chromedp.ExecAllocatorOption) *browser {
	t.Helper()
	var ctx context.Context
	var cancel context.CancelFunc
	if len(opts) == 0 {
		shared, err := sharedChromium()
		if err != nil {
			t.Fatalf("Chromium (is it installed? run .ci/setup): %v", err)
		}
		ctx, cancel = chromedp.NewContext(shared, chromedp.WithNewBrowserContext())
	} else {
		opts = append(opts, chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()))
		ctx, cancel = chromedp.NewContext(context.WithoutCancel(t.Context()), chromedp.WithAllocatorOptions(opts...),
			chromedp.WithLogf(t.Logf), chromedp.WithErrorf(t.Logf))
	}
	t.Cleanup(cancel)
	b := &browser{t, ctx}
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(1280, 900)); err != nil {
		t.Fatalf("Chromium (is it installed? run .ci/setup): %v", err)
	}
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *browser) do(step chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, step); err != nil {
		b.t.Fatal(err)
	}
}

// open shows a view of the dashboard.
func (b *browser) open(base, view string) {
	b.t.Helper()
	b.do(chromedp.Navigate(base + "/#/" + view))
}

// eval evaluates an expression.
func (b *browser) eval(expression string) string {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[json.RawMessage](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return string(value)
}

// until waits until an expression is true.
func (b *browser) until(what, expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	poll := chromedp.Poll[bool]("Boolean("+expression+")", chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(patience))
	if _, err := chromedp.Run(ctx, poll); err != nil {
		b.t.Fatalf("%s: %v; the page shows:\n%s", what, err, b.eval("document.body.innerText"))
	}
}

// shows waits until the page, or what covers it, shows a text.
func (b *browser) shows(text string) {
	b.t.Helper()
	b.until("the page shows "+text, "document.body.innerText.includes("+strconv.Quote(text)+")")
}

// click clicks the first button or link with a text, as a mouse does.
func (b *browser) click(text string) {
	b.t.Helper()
	b.clickAt(xpath(fmt.Sprintf("//*[self::button or self::a][normalize-space()=%s]", strconv.Quote(text))))
}

// choose clicks a button of the dialog.
func (b *browser) choose(text string) {
	b.t.Helper()
	b.until("the dialog is open", "document.getElementById('dialog').open")
	b.clickAt(xpath(fmt.Sprintf("//dialog//button[normalize-space()=%s]", strconv.Quote(text))))
}

// xpath is an expression for the first element that a path leads to.
func xpath(path string) string {
	return "document.evaluate(" + strconv.Quote(path) + ", document, null, XPathResult.FIRST_ORDERED_NODE_TYPE, null).singleNodeValue"
}

// selector is an expression for the first element that a CSS selector finds.
func selector(css string) string { return "document.querySelector(" + strconv.Quote(css) + ")" }

// clickAt clicks an element, as a mouse does: the left button goes down and up at its middle. A
// page may move while the mouse is on its way. A click that meets something else is kept from it,
// and the mouse aims again.
func (b *browser) clickAt(element string) {
	b.t.Helper()
	aim := `(() => {
		const wanted = () => ` + element + `;
		const e = wanted();
		if (!e || !e.checkVisibility({ visibilityProperty: true })) return null;
		e.scrollIntoView({ block: "center", behavior: "instant" });
		window.aimed?.abort();
		window.aimed = new AbortController();
		window.landed = false;
		addEventListener("click", (event) => {
			window.landed = event.isTrusted && (wanted()?.contains(event.target) ?? false);
			if (window.landed) return;
			event.preventDefault();
			event.stopImmediatePropagation();
		}, { capture: true, once: true, signal: window.aimed.signal });
		const at = e.getBoundingClientRect();
		return [at.x + at.width / 2, at.y + at.height / 2];
	})()`
	for end := time.Now().Add(patience); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		var at []float64
		if err := json.Unmarshal([]byte(b.eval(aim)), &at); err != nil {
			b.t.Fatal(err)
		}
		if at == nil {
			continue
		}
		b.do(chromedp.MouseClickXY(at[0], at[1]))
		if b.eval("window.aimed.abort(), window.landed") == "true" {
			return
		}
		b.t.Logf("a click missed %s", element)
	}
	b.t.Fatalf("no click reaches %s; the page shows:\n%s", element, b.eval("document.body.innerText"))
}

func (b *browser) set(css, value string) {
	b.t.Helper()
	b.until(css, selector(css))
	b.eval(selector(css) + ".value = " + strconv.Quote(value))
}

// axeFinds is what axe, with its options, finds in the page that keeps people from using it, if at
// least so many of its rules pass.
const axeFinds = `axe.run(%s).then((r) => r.passes.length < %d ? ["axe did not look"] : r.violations.filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => v.id + ": " + v.nodes.map((n) => n.target.join(" ")).join(", ")))`

// The dashboard in Chromium: plots move, a dead letter is redriven, a group is moved, a connection
// is closed. Text with markup stays text, and nobody needs a mouse or
// good eyes.
func TestDashboard(t *testing.T) {
	t.Parallel()
	const markup = `<img src=x onerror="window.harmed=1">`
	data := t.TempDir()
	box := "sqlite:" + filepath.Join(t.TempDir(), "outbox.db")
	park(t, box, "first", "second")
	hub := startNode(t, "--data="+data, "--demo", "--outbox-dsn="+box)
	c := hub.dial()
	publish := func(topic, key string) {
		t.Helper()
		payload := fmt.Appendf(nil, `{"note":%q}`, markup)
		if _, err := c.Publish(t.Context(), topic, payload, wire.PublishOptions{Key: key, Headers: map[string]string{"x-note": markup}}); err != nil {
			t.Fatal(err)
		}
	}
	once := 1
	came := make(chan wire.Event, 100)
	join := func(group string) {
		t.Helper()
		if _, err := c.Subscribe(t.Context(), "orders.placed", group, wire.SubscribeOptions{From: "earliest", MaxAttempts: &once}, func(e wire.Event) { came <- e }); err != nil {
			t.Fatal(err)
		}
	}
	next := func() *wire.Event {
		t.Helper()
		select {
		case e := <-came:
			return &e
		case <-time.After(patience):
			t.Fatal("no event came")
			return nil
		}
	}

	b := openBrowser(t)
	b.open(hub.ops, "")
	b.shows("Overview")
	b.until("the checks are shown", `[...document.querySelectorAll(".tile")].some((t) => t.innerText.includes("bus") && t.innerText.includes("ok"))`)
	b.until("the plot moves", `[...document.querySelectorAll(".tile")].some((t) => t.innerText.startsWith("published") && parseFloat(t.querySelector("dd").innerText) > 0)`)
	b.until("the plot is drawn", `document.querySelectorAll("canvas").length === 2`)
	if got := b.eval(`document.querySelectorAll("canvas")[0].width > 100`); got != "true" {
		t.Errorf("the plot is not wide: %s", got)
	}

	// Events need a token.
	b.open(hub.ops, "topics")
	b.shows("This view needs a token.")
	b.click("Set the token")
	b.set("dialog[open] input[name=token]", "wrong")
	b.choose("Use")
	b.until("the wrong token is refused", `document.getElementById("main").innerText.includes("This view needs a token.") && !document.getElementById("dialog").open`)
	b.click("Token")
	b.set("dialog[open] input[name=token]", nodeToken)
	b.choose("Use")
	b.shows("heartbeat.received")

	// A dead letter is redriven by clicking.
	join(markup)
	publish("orders.placed", markup)
	if err := next().NackWait(t.Context(), markup, 0); err != nil {
		t.Fatal(err)
	}
	b.open(hub.ops, "dead-letters")
	b.until("the dead letter is shown", `document.querySelectorAll(".wide tbody tr").length >= 2 && document.getElementById("main").innerText.includes("1 dead letter in all")`)
	b.click("Redrive all…")
	b.choose("Redrive")
	b.shows("Put back 1 of 1.")
	again := next()
	if err := again.AckWait(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.shows("0 dead letters in all")

	// A group is moved back.
	for range 4 {
		publish("orders.placed", "k")
		if err := next().AckWait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	b.open(hub.ops, "groups/orders.placed/"+url.PathEscape(markup))
	b.until("the group is settled", `[...document.querySelectorAll(".tile")].some((t) => t.innerText.startsWith("pending") && t.querySelector("dd").innerText === "0 events")`)
	b.click("Move…")
	b.set("dialog[open] select[name=to]", "earliest")
	b.choose("Look")
	b.shows("5 events are delivered again, and 0 skipped.")
	b.choose("Move")
	b.shows("Moved ")
	for range 5 {
		if err := next().AckWait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	b.click("Pause")
	b.shows("no member gets further events")
	b.click("Resume")
	b.shows("Resumed ")

	// The group's members have a principal, a kind and an address.
	if got := b.eval(`[...document.querySelectorAll("[aria-label='Members on this hub, table'] tbody td")].slice(0, 3).map((c) => c.innerText)`); !strings.Contains(got, `"static:`) || !strings.Contains(got, `"websocket"`) || !strings.Contains(got, `127.0.0.1:`) {
		t.Errorf("the member of the group is shown as %s", got)
	}

	// An event is published and shown.
	b.open(hub.ops, "events/orders.placed")
	b.shows("onerror")
	b.set("textarea[name=payload]", `{"from":"the page"}`)
	b.click("Publish")
	b.shows("Published ")
	b.until("the published event is shown", `document.querySelector("tbody").innerText.includes("the page")`)
	if e := next(); string(e.Payload) != `{"from":"the page"}` {
		t.Errorf("the page published %s", e.Payload)
	} else if err := e.AckWait(t.Context()); err != nil {
		t.Fatal(err)
	}

	// An event is found by its id, and shown.
	id := strings.Trim(b.eval(`[...document.querySelectorAll("td.id")].at(-1).innerText`), `"`)
	b.eval(`(() => { const s = document.querySelector("select[name=from]"); s.value = "id"; s.dispatchEvent(new Event("change", { bubbles: true })); })()`)
	b.set("input[name=id]", id)
	b.clickAt(xpath("//form//button[normalize-space()='Show']"))
	b.until("only that event is shown", `document.querySelectorAll("tbody tr").length === 1 && document.querySelector("td.id").innerText === `+strconv.Quote(id))
	b.clickAt(xpath("//td//button[normalize-space()='Show']"))
	b.until("its payload is shown", `document.querySelector("dialog[open] pre").innerText.includes("the page")`)
	b.choose("Close")

	// A topic is followed: what was stored is shown, and each event as it comes.
	b.set("select[name=from]", "live")
	b.clickAt(xpath("//form//button[normalize-space()='Show']"))
	b.until("the newest event is shown", `document.querySelector("#live tbody")?.innerText.includes("the page")`)
	b.eval(`document.querySelector("#live").kept = true`)
	publish("orders.placed", "k")
	b.until("a new event is shown first, without a new view", `document.querySelector("#live")?.kept && document.querySelector("#live tbody tr td.id").innerText === `+strconv.Quote(next().ID))
	b.open(hub.ops, "events/gone")
	b.until("the view of the other topic is shown", `document.querySelector("input[name=topic]").value === "gone"`)
	b.set("select[name=from]", "live")
	b.clickAt(xpath("//form//button[normalize-space()='Show']"))
	b.shows("There is no such topic.")

	views := map[string]string{
		"overview": "", "topics": "topics", "topic": "topics/orders.placed", "groups": "groups",
		"group": "groups/orders.placed/" + url.PathEscape(markup), "dead-letters": "dead-letters", "events": "events/orders.placed",
		"state": "state", "connections": "connections", "outbox": "outbox/database", "projections": "projections", "nats": "nats",
	}
	axe, err := os.ReadFile(filepath.Join("testdata", "axe", "axe.min.js"))
	if err != nil {
		t.Fatal(err)
	}
	b.eval(`document.getElementById("said").replaceChildren(); 0`)
	b.eval(string(axe) + "; 0")
	for _, look := range []struct {
		name, scheme  string
		width, height int64
		rules         string // what axe looks at: the dark page has the elements of the light one
		passes        int    // that axe has at least
	}{
		{"light", "light", 1280, 900, "{}", 10},
		{"dark", "dark", 1280, 900, `{ runOnly: ["color-contrast", "link-in-text-block"] }`, 1},
		// It has the colors of the light one.
		{"phone", "light", 390, 844, `{ rules: { "color-contrast": { enabled: false } } }`, 10},
	} {
		b.do(chromedp.EmulateViewport(look.width, look.height))
		media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: look.scheme}}}
		if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, media); err != nil {
			t.Fatal(err)
		}
		for _, name := range slices.Sorted(maps.Keys(views)) {
			b.eval(`performance.clearMarks("shown")`)
			b.open(hub.ops, views[name])
			b.until(name+" is shown", `performance.getEntriesByName("shown").length > 0 && document.querySelector("main h1") && !document.getElementById("main").ariaBusy && document.querySelector("main .tile, main td")`)
			if got := b.eval("document.documentElement.scrollWidth <= innerWidth"); got != "true" {
				t.Errorf("%s is wider than the screen in %s: %s", name, look.name, b.eval("document.documentElement.scrollWidth"))
			}
			b.picture(name + "-" + look.name)
			if found := b.eval(fmt.Sprintf(axeFinds, look.rules, look.passes)); found != "[]" {
				t.Errorf("%s in %s is hard to use: %s", name, look.name, found)
			}
		}
	}
	if got := b.eval("String(window.harmed) + document.querySelectorAll('main img').length"); got != `"undefined0"` {
		t.Errorf("markup of an event became part of the page: %s", got)
	}

	// The keyboard reaches every view.
	b.open(hub.ops, "")
	b.shows("Events per second")
	reached := b.eval(`[...document.querySelectorAll("nav a, header button, main button, main a")].every((e) => { e.focus(); return document.activeElement === e; })`)
	if reached != "true" {
		t.Error("the keyboard does not reach every control")
	}

	// A connection is closed.
	b.open(hub.ops, "connections")
	b.shows("orders.placed")
	b.click("Close…")
	b.choose("Close the connection")
	b.shows("Closed the connection of ")
	select {
	case <-c.Done():
	case <-time.After(patience):
		t.Fatal("the connection lives on")
	}
}

// Parked records of an outbox are tried again and discarded by clicking. The page outlives its hub.
func TestDashboardOfAnOutbox(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	box := "sqlite:" + filepath.Join(t.TempDir(), "outbox.db")
	park(t, box, "first", "second")
	hub := startNode(t, "--data="+data, "--outbox-dsn="+box)
	at, err := url.Parse(hub.ops)
	if err != nil {
		t.Fatal(err)
	}
	b := openBrowser(t)
	b.open(hub.ops, "")
	b.eval(`sessionStorage.setItem("token", "` + nodeToken + `")`)

	// A record is discarded once its id is typed.
	b.open(hub.ops, "outbox/database")
	b.until("the parked records are shown", `document.querySelectorAll("td.id").length === 2`)
	b.click("Retry all parked…")
	b.choose("Retry")
	b.shows("2 records of database will be published again.")
	// the page may show them still as they were before
	eventually(t, "they are parked again", func() bool {
		var parked struct{ Count int }
		hub.getJSON("/outboxes/database?status=error", &parked)
		return parked.Count == 2
	})
	b.clickAt(xpath(`//tr[td[@class="id"][normalize-space()="first"]]//button[normalize-space()="Discard…"]`))
	b.shows("Removes the record first ")
	b.choose("Discard")
	b.until("an id that was not typed keeps the record", `document.querySelector("dialog[open] input:invalid")`)
	b.do(chromedp.SendKeys(chromedp.CSS("dialog[open] input"), "first"))
	b.choose("Discard")
	b.shows("Removed 1 record of database.")
	b.until("the other record stays", `document.querySelectorAll("td.id").length === 1 && document.querySelector("td.id").innerText === "second"`)

	// The hub stops and comes back.
	hub.terminate()
	b.shows("The hub does not answer.")
	back := startNode(t, "--data="+data, "--ops-port="+at.Port())
	b.shows("The hub answers again.")
	b.until("the banner is gone", `document.getElementById("gone").hidden`)
	back.signal(syscall.SIGTERM)
}

// A first visitor with an empty hub sees what to do, as commands with the visitor's own token and
// the hub's own addresses. The steps go away with the first event.
func TestDashboardOfAnEmptyHub(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--data="+t.TempDir())
	b := openBrowser(t)
	b.open(hub.ops, "")
	b.shows("This hub is empty.")
	b.shows("cat eventhub-data/token")
	commands := func() string {
		return b.eval(`[...document.querySelectorAll(".command pre")].map((p) => p.innerText).join("\n")`)
	}
	if got := commands(); strings.Contains(got, nodeToken) || !strings.Contains(got, hub.url) {
		t.Errorf("without a token, the commands are %s", got)
	}
	b.picture("first-light")
	b.do(chromedp.EmulateViewport(390, 844))
	b.picture("first-phone")
	b.click("Set the token")
	b.set("dialog[open] input[name=token]", nodeToken)
	b.choose("Use")
	b.until("the commands have the token", `[...document.querySelectorAll(".command pre")].length === 3`)
	got := commands()
	for _, want := range []string{"EVENTHUB_TOKEN=" + nodeToken + " eventhub sub hello --group=me --url=" + hub.url, "Authorization: Bearer " + nodeToken, hub.http + "/publish/hello"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in the commands:\n%s", want, got)
		}
	}
	if _, err := hub.dial().Publish(t.Context(), "hello", []byte("1"), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	b.until("the steps are gone", `!document.querySelector(".steps") && document.querySelectorAll("canvas").length === 2`)
}

// park makes an outbox with records that nothing can publish: their topic is none.
func park(t *testing.T, dsn string, ids ...string) {
	t.Helper()
	call(t, "outbox", "migrate", "--dsn="+dsn)
	db, err := sql.Open("sqlite", strings.TrimPrefix(dsn, "sqlite:"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for _, id := range ids {
		if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES (?, 'no topic', ?, '1')", id, id); err != nil {
			t.Fatal(err)
		}
	}
}

// picture keeps a picture of the page with -dashboard.shots.
func (b *browser) picture(name string) {
	b.t.Helper()
	if *dashboardShots == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(*dashboardShots, strings.ReplaceAll(name, "/", "_")+".png"), b.screenshot(), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// screenshot returns a picture of the page, a PNG.
func (b *browser) screenshot() []byte {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	image, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.t.Fatal(err)
	}
	return image
}
