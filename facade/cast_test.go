package facade_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// castRejoins is larger for the long form.
var castRejoins = flag.Int("broadcast.rejoins", 60, "how often a client reconnects to a broadcast at a random place")

// castFrame is what tests look at in the frames of a broadcast.
type castFrame struct {
	Op, Topic, Code, Msg, Pos, Reason, From, To string
	Recovered                                   bool
	Missed                                      int
	Event                                       struct {
		ID, Key string
		Payload json.RawMessage
	}
	Ctx struct {
		Pos       string
		Tombstone bool
	}
}

// follow begins a broadcast, with options without mode.
func (p *peer) follow(topic, opts string) castFrame {
	p.t.Helper()
	if opts != "" {
		opts = "," + opts
	}
	p.send(`{"op":"SUBSCRIBE","topic":"` + topic + `","opts":{"mode":"broadcast"` + opts + `},"corr":1}`)
	return p.castNext("OK")
}

// castNext reads a frame of this op.
func (p *peer) castNext(op string) castFrame {
	p.t.Helper()
	return p.castNextOf(op)
}

// castNextOf reads a frame of one of these ops.
func (p *peer) castNextOf(ops ...string) (f castFrame) {
	p.t.Helper()
	text := p.read()
	if err := json.Unmarshal([]byte(text), &f); err != nil || !slices.Contains(ops, f.Op) {
		p.t.Fatalf("got %.300s, want %s", text, ops)
	}
	return f
}

// A snapshot ends with a SNAPSHOT for those that ask, also one without keys, and a client goes on
// behind it. A tombstone is marked.
func TestBroadcastSnapshotEnds(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "state", Compaction: true}}}, nil)
	first := r.login(t)
	plain := r.login(t)
	plain.follow("state", `"snapshot":true`)
	first.follow("state", `"snapshot":true,"snapshotEnd":true`)
	first.castNext("SNAPSHOT")
	r.put(t, "state", "null", "Event-Key", "a")
	r.put(t, "state", "2", "Event-Key", "b")
	r.put(t, "state", "null", "Event-Key", "a", "Event-Tombstone", "true")
	for _, gone := range []bool{false, false, true} {
		if e := first.castNext("EVENT"); e.Ctx.Tombstone != gone || e.Ctx.Pos == "" {
			t.Errorf("got %+v", e)
		}
	}
	plain.wantEvents("null", "2", "null") // it did not ask for a SNAPSHOT
	eventually(t, "the snapshot has all events", func() bool {
		upTo, err := r.bus.Keys("state").Snapshot(t.Context(), func(*jetstream.Event) error { return nil })
		return err == nil && upTo == 3
	})
	second := r.login(t)
	second.follow("state", `"snapshot":true,"snapshotEnd":true`)
	second.wantEvents("2")
	end := second.castNext("SNAPSHOT")
	r.put(t, "state", "4", "Event-Key", "c")
	second.wantEvents("4")
	third := r.login(t)
	if ok := third.follow("state", `"from":"pos","pos":"`+end.Pos+`"`); !ok.Recovered || ok.Pos != end.Pos {
		t.Errorf("got %+v", ok)
	}
	third.wantEvents("4")
}

// wantEvents reads events with these payloads, and returns the last one.
func (p *peer) wantEvents(payloads ...string) (last castFrame) {
	p.t.Helper()
	for _, want := range payloads {
		if last = p.castNext("EVENT"); string(last.Event.Payload) != want {
			p.t.Fatalf("got event %s, want %s", last.Event.Payload, want)
		}
	}
	return last
}

func span(from, to int) (list []string) {
	for i := from; i <= to; i++ {
		list = append(list, strconv.Itoa(i))
	}
	return list
}

func (r *rig) puts(t *testing.T, topic string, payloads ...string) {
	t.Helper()
	for _, p := range payloads {
		r.put(t, topic, p)
	}
}

// All sockets of a broadcast get the same bytes, from the SUBSCRIBE on, in order and without
// leases.
func TestBroadcast(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.puts(t, "prices", span(1, 3)...)
	first, second := r.login(t), r.login(t)
	for _, p := range []*peer{first, second} {
		if ok := p.follow("prices", ""); !ok.Recovered || ok.Pos == "" || ok.Reason != "" {
			t.Errorf("got %+v", ok)
		}
	}
	r.puts(t, "prices", span(4, 50)...)
	r.put(t, "prices", `"`+strings.Repeat("x", 100_000)+`"`)
	for range 48 {
		if a, b := first.read(), second.read(); a != b {
			t.Fatalf("one socket got %.200s, and another %.200s", a, b)
		}
	}
	first.send(`{"op":"UNSUBSCRIBE","topic":"prices","opts":{"mode":"broadcast"},"corr":2}`)
	first.want(`{"op":"OK","corr":2}`)
	first.send(`{"op":"UNSUBSCRIBE","topic":"prices","opts":{"mode":"broadcast"},"corr":3}`)
	first.next("ERR", "not_subscribed")
	r.put(t, "prices", "52")
	second.wantEvents("52")
	first.send(`{"op":"ACK","topic":"prices","group":"g","id":"x","corr":4}`)
	first.next("ERR", "not_subscribed") // and no event
}

// A broadcast that begins at the end has nothing that was stored before its SUBSCRIBE, also when
// the hub has not received that yet.
func TestBroadcastBeginsAtTheEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.put(t, "prices", "0")
	keeps, p := r.login(t), r.login(t)
	keeps.follow("prices", "") // the hub goes on following the topic
	for i := 1; i < 120; i += 2 {
		r.put(t, "prices", strconv.Itoa(i))
		p.follow("prices", "")
		r.put(t, "prices", strconv.Itoa(i+1))
		p.wantEvents(strconv.Itoa(i + 1))
		p.send(`{"op":"UNSUBSCRIBE","topic":"prices","opts":{"mode":"broadcast"},"corr":2}`)
		p.want(`{"op":"OK","corr":2}`)
	}
}

// A broadcast begins where the client says.
func TestBroadcastBegins(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	var ids []string
	for _, p := range span(1, 20) {
		ids = append(ids, r.put(t, "t", p))
	}
	stored := r.stored(t, "t")
	login := func() *peer { return r.login(t) }
	p := login()
	p.follow("t", `"history":3`)
	at := p.wantEvents(span(18, 20)...)
	r.puts(t, "t", span(21, 25)...)
	p.wantEvents(span(21, 25)...)
	newest := 25
	for _, test := range []struct {
		opts  string
		first int // of the events that come at once; -1: none
	}{
		{`"history":0,"from":"latest"`, -1},
		{`"history":5`, 21},
		{`"history":1000`, 1},
		{`"from":"afterId","afterId":"` + ids[9] + `"`, 11},
		{`"from":"ts","ts":` + strconv.FormatInt(stored[17].StoredAt/1e6, 10), 18},
		{`"from":"pos","pos":"` + at.Ctx.Pos + `"`, 21},
	} {
		p := login()
		ok := p.follow("t", test.opts)
		if !ok.Recovered {
			t.Errorf("%s: %+v", test.opts, ok)
		}
		first := test.first
		switch {
		case first < 0:
			first = newest + 1
		case strings.HasPrefix(test.opts, `"history":5`):
			first = newest - 4
		case strings.Contains(test.opts, `"ts"`): // several events may share a millisecond
			e := p.castNext("EVENT")
			n, err := strconv.Atoi(string(e.Event.Payload))
			if err != nil || n > first {
				t.Fatalf("%s: begins with %s", test.opts, e.Event.Payload)
			}
			first = n + 1
		}
		p.wantEvents(span(first, newest)...)
		// The pos of the OK is the place before the first event.
		q := login()
		q.follow("t", `"from":"pos","pos":"`+ok.Pos+`"`)
		if strings.Contains(test.opts, `"ts"`) {
			q.wantEvents(strconv.Itoa(first - 1))
		}
		q.wantEvents(span(first, newest)...)
		newest++
		r.put(t, "t", strconv.Itoa(newest))
		p.wantEvents(strconv.Itoa(newest))
		q.wantEvents(strconv.Itoa(newest))
	}
}

// What a client asks for wrongly is refused, and nothing begins.
func TestBroadcastRefusals(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.Subscriptions = 2 })
	p := r.login(t)
	for _, test := range []struct{ frame, code string }{
		{`"topic":"t","group":"g","opts":{"mode":"broadcast"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"queue"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":7}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","history":1001}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","history":1,"snapshot":true}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","from":"earliest"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","from":"pos"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","from":"pos","pos":"1"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","from":"pos","pos":"-1-1"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","from":"afterId"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","slow":"stop"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","conflate":"id"}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","minIntervalMs":60001}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","presence":1}`, "bad_options"},
		{`"topic":"t","opts":{"mode":"broadcast","snapshot":true}`, "bad_topic"},
		{`"topic":"a..b","opts":{"mode":"broadcast"}`, "bad_topic"},
		{`"topic":"t","opts":{}`, "bad_frame"},
		{`"topic":"t","opts":{"mode":"broadcast","from":"afterId","afterId":"nobody"}`, "unknown_id"},
	} {
		p.send(`{"op":"SUBSCRIBE",` + test.frame + `,"corr":1}`)
		if got := p.any(); got.Op != "ERR" || got.Code != test.code {
			t.Errorf("%s: %+v, want %s", test.frame, got, test.code)
		}
	}
	p.follow("t", "")
	p.send(`{"op":"SUBSCRIBE","topic":"t","opts":{"mode":"broadcast"},"corr":1}`)
	p.next("ERR", "already_subscribed")
	p.follow("u", "")
	p.send(`{"op":"SUBSCRIBE","topic":"v","opts":{"mode":"broadcast"},"corr":1}`)
	p.next("ERR", "overloaded")
}

// The newest event of each key comes first, then every change, without a gap between them.
func TestBroadcastSnapshot(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "state", Compaction: true}}}, nil)
	const keys = 20
	put := func(i int) {
		r.put(t, "state", strconv.Itoa(i), "Event-Key", "k"+strconv.Itoa(i%keys))
	}
	for i := range 4 * keys {
		put(i)
	}
	var writing sync.WaitGroup
	writing.Go(func() {
		for i := 4 * keys; i < 8*keys; i++ {
			put(i)
		}
	})
	defer writing.Wait()
	p := r.login(t)
	p.follow("state", `"snapshot":true,"snapshotEnd":true`)
	last := make(map[string]int)
	seen := 0
	ended := 0
	for done := 0; done < keys; {
		e := p.castNextOf("EVENT", "SNAPSHOT")
		if e.Op == "SNAPSHOT" {
			// The bucket may have had fewer keys then: the others come as changes.
			if ended++; e.Topic != "state" || e.Pos == "" {
				t.Errorf("after %d keys: %+v", len(last), e)
			}
			continue
		}
		n, err := strconv.Atoi(string(e.Event.Payload))
		if err != nil {
			t.Fatal(err)
		}
		if before, known := last[e.Event.Key]; known && n <= before {
			t.Fatalf("key %s goes back from %d to %d", e.Event.Key, before, n)
		}
		if last[e.Event.Key] = n; n >= 7*keys {
			done++
		}
		seen++
	}
	if seen < keys || len(last) != keys || ended != 1 {
		t.Errorf("%d events of %d keys, and %d ends of the snapshot", seen, len(last), ended)
	}
}

// smallWindow has connections of a client take little that is not read.
func smallWindow(transport *http.Transport) {
	transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		if tcp, ok := conn.(*net.TCPConn); err == nil && ok {
			err = tcp.SetReadBuffer(256 << 10)
		}
		return conn, err
	}
}

// loginNarrow is login with a connection that takes little that is not read.
func (r *rig) loginNarrow(t *testing.T) *peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
	defer cancel()
	transport := new(http.Transport)
	smallWindow(transport)
	conn, res, err := websocket.Dial(ctx, r.ws.URL, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}})
	if err != nil {
		t.Fatal(err)
	}
	if res.Body != nil {
		_ = res.Body.Close()
	}
	conn.SetReadLimit(-1)
	t.Cleanup(func() { _ = conn.CloseNow() })
	p := &peer{t: t, conn: conn, frames: apitest.NewFrames(t)}
	p.send(`{"op":"AUTH","token":"` + rigToken + `"}`)
	p.want(`{"op":"OK"}`)
	return p
}

// A socket that does not read loses what the ring drops, and is told which events those are. It can
// read them afterwards.
func TestBroadcastSlow(t *testing.T) {
	t.Parallel()
	for _, slow := range []string{"skip", "catchup", "close"} {
		t.Run(slow, func(t *testing.T) {
			t.Parallel()
			// The socket is not read until everything is published, however long that takes.
			r := newRig(t, func(cfg *facade.Config) {
				l := &cfg.Limits
				l.RingFrames, l.WriteStall, l.PingInterval = 16, 10*time.Minute, 10*time.Minute
			})
			r.put(t, "t", "0")
			p := r.loginNarrow(t)
			p.follow("t", `"slow":"`+slow+`"`)
			const n = 120 // more than the kernel and the ring hold
			fill := strings.Repeat("x", 75_000)
			for i := 1; i <= n; i++ {
				r.put(t, "t", fmt.Sprintf(`{"n":%d,"fill":%q}`, i, fill))
			}
			next, gaps := 1, 0
			for next <= n {
				if slow == "close" && next > 1 && r.seen.count("limit ring") > 0 {
					p.wantClose(4001)
					return
				}
				text := p.read()
				var f castFrame
				var payload struct{ N int }
				if err := json.Unmarshal([]byte(text), &f); err != nil {
					t.Fatal(err)
				}
				switch f.Op {
				case "GAP":
					gaps++
					q := r.login(t)
					q.follow("t", `"from":"pos","pos":"`+f.From+`"`)
					for i := range f.Missed {
						e := q.castNext("EVENT")
						_ = json.Unmarshal(e.Event.Payload, &payload)
						if payload.N != next+i || i == f.Missed-1 && e.Ctx.Pos != f.To {
							t.Fatalf("the event %d of the gap is %d at %s, want %d to %s", i, payload.N, e.Ctx.Pos, next+i, f.To)
						}
					}
					next += f.Missed
				case "EVENT":
					_ = json.Unmarshal(f.Event.Payload, &payload)
					if payload.N != next {
						t.Fatalf("got event %d, want %d", payload.N, next)
					}
					next++
				default:
					t.Fatalf("got %.200s", text)
				}
			}
			if (gaps > 0) != (slow == "skip") || r.seen.count("limit ring") == 0 {
				t.Errorf("%d gaps, and the ring dropped %d times what was next", gaps, r.seen.count("limit ring"))
			}
			got := r.srv.Broadcasts()
			if got.Topics != 1 || got.Sockets == 0 || got.RingBytes == 0 || got.Gaps != uint64(gaps) || (got.Missed > 0) != (gaps > 0) || (got.CaughtUp == 0) != (gaps == 0 && slow != "catchup") {
				t.Errorf("%d gaps, and %+v", gaps, got)
			}
		})
	}
}

// The broadcasts of one principal that are behind read streams at the rate of the limit. One that
// waits ends at once.
func TestBroadcastCatchesUpAtARate(t *testing.T) {
	t.Parallel()
	const n, burst, rate = 400, 100, 200
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.CatchUpRate, cfg.Limits.CatchUpBurst = rate, burst })
	fill := strings.Repeat("x", 1000)
	for i := range n {
		r.put(t, "t", fmt.Sprintf(`[%d,%q]`, i, fill))
	}
	p, other := r.login(t), r.login(t)
	began := time.Now()
	p.follow("t", `"from":"ts","ts":0`)
	for i := range n {
		e := p.castNext("EVENT")
		if !strings.HasPrefix(string(e.Event.Payload), fmt.Sprintf("[%d,", i)) {
			t.Fatalf("got event %.20s, want %d", e.Event.Payload, i)
		}
	}
	// What is read together with the last events has its turn later.
	if took, least := time.Since(began), time.Second*(n-burst-100)/rate; took < least || r.seen.count("limit catch_up_rate") == 0 {
		t.Errorf("%d events were read in %v, want at least %v; the limit was reached %d times", n, took, least, r.seen.count("limit catch_up_rate"))
	}
	waits := r.seen.count("limit catch_up_rate")
	other.follow("t", `"from":"ts","ts":0`)
	r.seen.await(t, "limit catch_up_rate", waits+1)
	other.send(`{"op":"UNSUBSCRIBE","topic":"t","opts":{"mode":"broadcast"},"corr":2}`)
	for {
		if f := other.read(); strings.Contains(f, `"op":"OK"`) {
			break
		}
	}
}

// A newer event of a key replaces those that a socket was not sent yet.
func TestBroadcastConflates(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	p := r.login(t)
	p.follow("t", `"conflate":"key","minIntervalMs":1000`)
	r.put(t, "t", "0", "Event-Key", "first")
	p.wantEvents("0")
	const n = 200
	began := time.Now()
	for i := 1; i <= n; i++ {
		r.put(t, "t", strconv.Itoa(i), "Event-Key", "k"+strconv.Itoa(i%5))
	}
	r.put(t, "t", "-1")
	r.put(t, "t", "-2")
	last, seen := make(map[string]int), 0
	for {
		e := p.castNext("EVENT")
		i, err := strconv.Atoi(string(e.Event.Payload))
		if err != nil {
			t.Fatal(err)
		}
		if seen++; e.Event.Key == "" && i == -2 {
			break
		}
		if i <= last[e.Event.Key] && e.Event.Key != "" {
			t.Fatalf("key %s goes back to %d", e.Event.Key, i)
		}
		last[e.Event.Key] = i
	}
	for k := range 5 {
		if got := last["k"+strconv.Itoa(k)]; got <= n-5 {
			t.Errorf("the last event of k%d is %d", k, got)
		}
	}
	// Events are sent once a second, and at most one of each key.
	if took := time.Since(began); seen > 5*(int(took/time.Second)+2)+2 {
		t.Errorf("%d events of %d were sent in %v", seen, n+2, took)
	}
}

// Clients that reconnect at random places get every event once when the hub says recovered, and one
// GAP with the right number otherwise.
func TestBroadcastRecovers(t *testing.T) {
	t.Parallel()
	const kept, catchUp = 90, 60
	rule := topics.Rule{Pattern: "short", MaxMsgs: kept}
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{rule}}, func(cfg *facade.Config) {
		cfg.Limits.RingFrames, cfg.Limits.CatchUp = 20, catchUp
	})
	var pos []string // of the events 0, 1, ...
	listener := r.login(t)
	listener.follow("short", "")
	for i := range 2 * kept {
		r.put(t, "short", strconv.Itoa(i))
		pos = append(pos, listener.castNext("EVENT").Ctx.Pos)
	}
	for range *castRejoins {
		from := rand.IntN(len(pos))
		p := r.login(t)
		ok := p.follow("short", `"from":"pos","pos":"`+pos[from]+`"`)
		next := from + 1
		behind := len(pos) - next
		switch {
		case behind > kept:
			if ok.Recovered || ok.Reason != "truncated" && ok.Reason != "too_far" {
				t.Fatalf("from %d of %d: %+v", from, len(pos), ok)
			}
		case behind > catchUp:
			if ok.Recovered || ok.Reason != "too_far" {
				t.Fatalf("from %d of %d: %+v", from, len(pos), ok)
			}
		case !ok.Recovered:
			t.Fatalf("from %d of %d: %+v", from, len(pos), ok)
		}
		if !ok.Recovered {
			gap := p.castNext("GAP")
			if gap.From != pos[from] || gap.To != ok.Pos {
				t.Errorf("from %d: %+v, %+v", from, gap, ok)
			}
			next += gap.Missed
		}
		p.wantEvents(span(next, len(pos)-1)...)
		r.put(t, "short", strconv.Itoa(len(pos)))
		p.wantEvents(strconv.Itoa(len(pos)))
		pos = append(pos, listener.castNext("EVENT").Ctx.Pos)
		_ = p.conn.CloseNow()
	}
}

// A topic that is deleted ends its broadcasts. Created again, it has other places.
func TestBroadcastOfADeletedTopic(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	p := r.login(t)
	p.follow("t", "")
	r.put(t, "t", "1")
	at := p.wantEvents("1").Ctx.Pos
	if err := r.bus.Admin().Topic("t").Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := p.next("ERR", "not_subscribed"); got.Msg != "t" {
		t.Errorf("got %+v", got)
	}
	r.put(t, "t", "2")
	if ok := p.follow("t", `"from":"pos","pos":"`+at+`"`); ok.Recovered || ok.Reason != "stream_changed" {
		t.Errorf("got %+v", ok)
	}
	r.put(t, "t", "3")
	p.wantEvents("3")
}

// A topic that is deleted and created again at once does not go on in a broadcast of the first one.
func TestBroadcastOfATopicMadeAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for round := range 2 {
		p := r.login(t)
		p.follow("t", "")
		r.put(t, "t", "1")
		at := p.wantEvents("1").Ctx.Pos
		if err := r.bus.Admin().Topic("t").Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		r.puts(t, "t", "2", "3")
		if got := p.next("ERR", "not_subscribed"); got.Msg != "t" {
			t.Errorf("round %d: %+v", round, got)
		}
		if ok := p.follow("t", `"from":"pos","pos":"`+at+`"`); ok.Recovered || ok.Reason != "stream_changed" {
			t.Errorf("round %d: %+v", round, ok)
		}
		r.put(t, "t", "4")
		p.wantEvents("4")
	}
}

// A topic that cannot be made is refused with the reason, at once.
func TestBroadcastOfATopicTooMany(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Limits: jetstream.Limits{Topics: 1}}, nil)
	p := r.login(t)
	p.follow("a", "")
	begun := time.Now()
	p.send(`{"op":"SUBSCRIBE","topic":"b","opts":{"mode":"broadcast"},"corr":1}`)
	if got := p.any(); got.Op != "ERR" || got.Code != "overloaded" {
		t.Errorf("got %+v", got)
	}
	if took := time.Since(begun); took > 8*time.Second {
		t.Errorf("the answer took %v", took)
	}
}

// Connections that end while a broadcast begins leave nothing behind.
func TestBroadcastsEndWithTheirConnections(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	keeper := r.login(t)
	keeper.follow("t", "")
	for i := range 30 {
		p := r.login(t)
		p.send(`{"op":"SUBSCRIBE","topic":"t","opts":{"mode":"broadcast","history":` + strconv.Itoa(i%3) + `},"corr":1}`)
		_ = p.conn.CloseNow()
	}
	eventually(t, "only one broadcast is left", func() bool { return r.srv.Broadcasts().Sockets == 1 })
	r.put(t, "t", "1")
	keeper.wantEvents("1")
}

// A hub has a bounded number of broadcast topics, and each principal a part of them.
func TestBroadcastTopicsAreBounded(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.Tails, cfg.Limits.PrincipalTails = 3, 2 })
	p := r.login(t)
	p.follow("a", "")
	p.follow("b", "")
	p.send(`{"op":"SUBSCRIBE","topic":"c","opts":{"mode":"broadcast"},"corr":1}`)
	p.next("ERR", "rate_limited")
	if r.seen.count("limit principal_tails") == 0 {
		t.Error("the limit was not counted")
	}
	q := r.login(t)
	q.follow("a", "") // is there
	p.send(`{"op":"UNSUBSCRIBE","topic":"b","opts":{"mode":"broadcast"},"corr":2}`)
	p.want(`{"op":"OK","corr":2}`)
	p.follow("c", "") // nobody listens to b
	r.put(t, "c", "1")
	p.wantEvents("1")
}
