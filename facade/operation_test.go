package facade_test

import (
	"encoding/json"
	"flag"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// frameSeeds is larger for the long form.
var frameSeeds = flag.Uint64("frames.seeds", 4, "connections that send random frames")

// TestRandomFramesKeepTheOrder pipelines random frames, with and without a corr, and compares each
// answer with that of a model which carries them out one after the other.
func TestRandomFramesKeepTheOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		unthrottled(cfg)
		cfg.Limits.Operations = 8 // so that the reader has to wait now and then
	})
	const perRound = 150
	for seed := range *frameSeeds {
		rnd := rand.New(rand.NewPCG(3, seed))
		c := dialRaw(t, r.ws.URL)
		c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`)
		subscribed := make(map[string]bool)
		var frames []string
		want := make(map[int]string) // of frames with a corr
		var inOrder []string         // of those without
		for i := range perRound {
			topic := "r" + strconv.FormatUint(seed, 10) + pick(rnd, "a", "b", "c")
			group := pick(rnd, "g", "h")
			key := topic + "::" + group
			about := `,"topic":"` + topic + `","group":"` + group + `"`
			outcome := "OK"
			var frame string
			needs := func(op, more string) {
				frame = `{"op":"` + op + `"` + about + more
				if !subscribed[key] {
					outcome = "not_subscribed"
				}
			}
			switch rnd.IntN(9) {
			case 0, 1:
				frame = `{"op":"SUBSCRIBE"` + about
				if subscribed[key] {
					outcome = "already_subscribed"
				}
				subscribed[key] = true
			case 2:
				needs("UNSUBSCRIBE", "")
				delete(subscribed, key)
			case 3:
				needs(pick(rnd, "PAUSE", "RESUME"), "")
			case 4, 5:
				needs(pick(rnd, "ACK", "NACK"), `,"id":"none"`)
			case 6:
				frame, outcome = `{"op":"LEAVE"`, "unknown_op"
			case 7:
				frame = `{"op":"AUTH","token":"` + rigToken + `"`
			default:
				id := strconv.FormatUint(seed, 10) + "-" + strconv.Itoa(i)
				frame, outcome = `{"op":"PUBLISH","topic":"`+topic+`","opts":{"id":"`+id+`"}`, "OK "+id
			}
			if rnd.IntN(2) == 0 {
				frame += `,"corr":` + strconv.Itoa(i)
				want[i] = outcome
			} else {
				inOrder = append(inOrder, outcome)
			}
			frames = append(frames, frame+"}")
		}
		for _, got := range c.timed(seed%2 == 0, frames...) {
			outcome := strings.TrimSpace(got.outcome() + " " + got.ID)
			corr, has := got.Corr.(float64)
			expected := want[int(corr)]
			if !has {
				expected, inOrder = inOrder[0], inOrder[1:]
			}
			if outcome != expected {
				t.Fatalf("seed %d, corr %v: %s %s, want %s", seed, got.Corr, outcome, got.Msg, expected)
			}
		}
	}
	if r.seen.count("limit operations") == 0 {
		t.Error("the reader never had to wait")
	}
}

// TestFramesBeyondTheLimitAreAnsweredInTime sends more frames than may wait for NATS at a time,
// many after the reader has stopped reading.
func TestFramesBeyondTheLimitAreAnsweredInTime(t *testing.T) {
	t.Parallel()
	r, proxy := stallingRig(t, func(cfg *facade.Config) { cfg.Limits.Operations = 4 })
	c := dialRaw(t, r.ws.URL)
	c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`, `{"op":"PUBLISH","topic":"live"}`)
	proxy.freeze()
	var frames []string
	pad := strings.Repeat(" ", 3000) // more than one read of the socket takes
	for i := range 30 {
		frames = append(frames, `{"op":"SUBSCRIBE","topic":"t`+strconv.Itoa(i)+`",`+pad+`"group":"g"}`, `{"op":"PUBLISH","topic":"live"}`)
	}
	for i, got := range c.timed(false, frames...) {
		if got.Op != "ERR" {
			t.Errorf("answer %d: %+v", i, got)
		}
	}
	if r.seen.count("limit operations") == 0 {
		t.Error("the limit was not counted")
	}
	proxy.heal()
	eventually(t, "the hub works again", func() bool {
		return c.timed(true, `{"op":"SUBSCRIBE","topic":"again","group":"g"}`)[0].outcome() != "subscribe_failed"
	})
}

// TestSubscribeDoesNotStarve subscribes beside a client's own publishes, which never pause.
func TestSubscribeDoesNotStarve(t *testing.T) {
	t.Parallel()
	r := newRig(t, unthrottled)
	c := dialRaw(t, r.ws.URL)
	c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`, `{"op":"PUBLISH","topic":"busy"}`)
	publishes := make([]string, 200)
	for i := range publishes {
		publishes[i] = `{"op":"PUBLISH","topic":"busy","corr":"p"}`
	}
	frames := append(publishes[:100:100], `{"op":"SUBSCRIBE","topic":"other","group":"g","corr":"s"}`)
	for i, got := range c.timed(true, append(frames, publishes...)...) {
		if got.Op != "OK" {
			t.Fatal(got)
		}
		if got.Corr == "s" && i < 100 {
			t.Errorf("the SUBSCRIBE was answered before %d publishes that were sent before it", 100-i)
		}
	}
}

// TestConnectionEndsDuringSubscribe loses a client whose SUBSCRIBE is under way. The subscription
// ends with it: events go to others, whatever became of the SUBSCRIBE.
func TestConnectionEndsDuringSubscribe(t *testing.T) {
	t.Parallel()
	r, proxy := stallingRig(t, nil)
	other := r.login(t)
	other.send(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`)
	other.want(`{"op":"OK"}`)
	var lost []*rawConn
	for range 5 {
		c := dialRaw(t, r.ws.URL)
		c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`)
		lost = append(lost, c)
	}
	before := r.seen.count("op SUBSCRIBE")
	proxy.freeze()
	for _, c := range lost {
		c.send(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`, `{"op":"SUBSCRIBE","topic":"u","group":"g"}`, `{"op":"ACK","topic":"t","group":"g","id":"x"}`)
	}
	r.seen.await(t, "op SUBSCRIBE", before+2*len(lost))
	for _, c := range lost {
		_ = c.ws.CloseNow()
	}
	for range lost {
		r.wantClosed(t, 1006)
	}
	proxy.heal()
	const events = 20
	for i := range events {
		if _, err := r.bus.Publish(t.Context(), "t", []byte(strconv.Itoa(i)), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	seen := make(map[string]bool)
	for len(seen) < events {
		got := other.next("EVENT", "")
		seen[string(got.Event.Payload)] = true
		if got.Ctx.Attempt != 1 {
			t.Errorf("%s was given to somebody before", got.Event.Payload)
		}
	}
}

// TestCloseDuringSubscribe closes the hub while SUBSCRIBEs wait for NATS. Close waits for their
// goroutines.
func TestCloseDuringSubscribe(t *testing.T) {
	t.Parallel()
	r, proxy := stallingRig(t, nil)
	c := dialRaw(t, r.ws.URL)
	c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`)
	proxy.freeze()
	c.send(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`, `{"op":"SUBSCRIBE","topic":"u","group":"g"}`, `{"op":"PUBLISH","topic":"u"}`)
	r.seen.await(t, "op PUBLISH", 1)
	begun := time.Now()
	if err := r.srv.Close(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took > 8*time.Second {
		t.Errorf("Close took %v", took)
	}
	for m := range c.messages {
		var got reply
		if err := json.Unmarshal([]byte(m), &got); err != nil || got.Op != "ERR" {
			t.Error(m)
		}
	}
	if got := c.closed(); got.Code != 4000 {
		t.Error(got)
	}
}

// TestNarrowerPolicyDuringSubscribe authenticates with fewer rights while a SUBSCRIBE is under way.
// It does not outlive the AUTH behind it.
func TestNarrowerPolicyDuringSubscribe(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r, proxy := stallingRig(t, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	wide, narrow := grant(t, "a", "subscribe:**", "publish:**"), grant(t, "a", "subscribe:u", "publish:**")
	p := r.as(t, wide)
	p.send(`{"op":"SUBSCRIBE","topic":"u","group":"g"}`)
	p.want(`{"op":"OK"}`)
	proxy.freeze()
	p.send(`{"op":"SUBSCRIBE","topic":"t","group":"g","corr":1}`, `{"op":"AUTH","token":"`+narrow+`","corr":2}`,
		`{"op":"SUBSCRIBE","topic":"t","group":"h","corr":3}`, `{"op":"PUBLISH","topic":"t","corr":4}`)
	r.seen.await(t, "op AUTH", 2)
	proxy.heal()
	p.want(`{"op":"OK","corr":1}`)
	if got := p.next("ERR", "forbidden"); !strings.Contains(got.Msg, "t::g") {
		t.Fatal(got)
	}
	p.want(`{"op":"OK","corr":2}`)
	if got := p.next("ERR", "forbidden"); got.Corr != 3.0 {
		t.Fatal(got)
	}
	if got := p.next("OK", ""); got.Corr != 4.0 {
		t.Fatal(got)
	}
	p.send(`{"op":"ACK","topic":"t","group":"g","id":"x","corr":5}`, `{"op":"ACK","topic":"u","group":"g","id":"x","corr":6}`)
	p.next("ERR", "not_subscribed")
	p.want(`{"op":"OK","corr":6}`)
}

// TestDrainDuringSubscribe drains the hub while a SUBSCRIBE is under way: it is refused, and the
// connection is told to go.
func TestDrainDuringSubscribe(t *testing.T) {
	t.Parallel()
	r, proxy := stallingRig(t, nil)
	c := dialRaw(t, r.ws.URL)
	c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`)
	proxy.freeze()
	c.send(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`, `{"op":"ACK","topic":"t","group":"g","id":"x"}`)
	r.seen.await(t, "op ACK", 1)
	drained := make(chan error, 1)
	go func() { drained <- r.srv.Drain(t.Context()) }()
	eventually(t, "the hub drains", func() bool {
		conn, status := r.try(t, nil)
		if conn != nil {
			_ = conn.CloseNow()
		}
		return status == 503
	})
	proxy.heal()
	for i, want := range []string{"overloaded", "not_subscribed"} {
		var got reply
		if err := json.Unmarshal([]byte(c.next()), &got); err != nil || got.Code != want {
			t.Errorf("reply %d is %+v (%v), want %s", i, got, err, want)
		}
	}
	if got := c.closed(); got.Code != 4000 {
		t.Error(got)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
}
