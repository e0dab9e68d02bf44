package facade

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// modelOp is an operation and what a test knows about it.
type modelOp struct {
	*operation
	number      int
	begun, done bool
}

// meets reports whether two frames are about one subscription, by a reading of the rules of its
// own.
func (m *modelOp) meets(other *modelOp) bool {
	if string(m.frame.group) != string(other.frame.group) {
		return false
	}
	for _, t := range m.all() {
		if slices.Contains(other.all(), t) {
			return true
		}
	}
	return false
}

func (m *modelOp) all() []string { return append([]string{string(m.frame.topic)}, m.topics...) }

// mustFollow is the order that the protocol asks for: whether m may not begin before the other,
// sent earlier, has ended.
func (m *modelOp) mustFollow(earlier *modelOp) bool {
	a, b := earlier.frame.op, m.frame.op
	switch {
	case a == opPublish && b == opPublish:
		return string(earlier.frame.topic) == string(m.frame.topic)
	case a == opPublish:
		return b == opSubscribe
	case b == opPublish:
		return a == opSubscribe && slices.Contains(earlier.all(), string(m.frame.topic))
	}
	return m.meets(earlier)
}

func randomOp(rnd *rand.Rand, number int) *modelOp {
	letters := []string{"a", "b", "c", "d"}
	topic := func() string { return letters[rnd.IntN(len(letters))] }
	o := &operation{}
	o.frame.op = []op{opSubscribe, opUnsubscribe, opPause, opResume, opAck, opNack, opPublish, opPublish, opSubscribe}[rnd.IntN(9)]
	o.frame.topic = []byte(topic())
	if o.frame.op != opPublish {
		o.frame.group = []byte("g" + strconv.Itoa(rnd.IntN(3)))
	}
	if o.frame.op == opSubscribe && rnd.IntN(2) == 0 {
		o.topics = []string{topic(), topic()}
	}
	return &modelOp{operation: o, number: number}
}

// TestPipelineKeepsTheOrder runs random operations that end in a random order. What belongs
// together begins in the order in which it was sent, one after the other; what does not is never
// held up by what has ended; and all of it ends.
func TestPipelineKeepsTheOrder(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(8, seed))
		var p pipeline
		var all []*modelOp
		var running []*modelOp
		model := make(map[*operation]*modelOp)
		publishing := 0
		begin := func(o *operation) bool {
			m := model[o]
			if m.begun {
				t.Fatalf("seed %d: operation %d began twice", seed, m.number)
			}
			for _, earlier := range all[:m.number] {
				if !earlier.done && m.mustFollow(earlier) {
					t.Fatalf("seed %d: operation %d began before the end of %d", seed, m.number, earlier.number)
				}
			}
			m.begun = true
			switch o.frame.op {
			case opPublish:
				if publishing++; publishing > 1 {
					t.Fatalf("seed %d: two publishes at once", seed)
				}
			case opAck, opNack, opResume:
				m.done = true
				return true
			default:
				if rnd.IntN(10) == 0 { // refused at once
					m.done = true
					return true
				}
			}
			o.running = true
			running = append(running, m)
			return false
		}
		end := func() {
			i := rnd.IntN(len(running))
			m := running[i]
			if m.frame.op == opSubscribe && !m.flushed {
				m.flushed = true
				p.advance(begin)
				return
			}
			running = slices.Delete(running, i, i+1)
			m.done = true
			if m.frame.op == opPublish {
				publishing--
			}
			p.remove(m.operation)
			p.advance(begin)
		}
		for len(all) < 200 || len(p) > 0 {
			if len(all) < 200 && rnd.IntN(3) > 0 {
				m := randomOp(rnd, len(all))
				all, model[m.operation] = append(all, m), m
				if p.blocked(m.operation) || !begin(m.operation) {
					p = append(p, m.operation)
				}
			} else if len(running) > 0 {
				end()
			}
			if len(p) > 0 && len(running) == 0 {
				t.Fatalf("seed %d: %d operations wait for nothing", seed, len(p))
			}
			for _, o := range p {
				if !o.running && !p.blocked(o) {
					t.Fatalf("seed %d: operation %d waits for nothing", seed, model[o].number)
				}
			}
		}
		for _, m := range all {
			if !m.done {
				t.Fatalf("seed %d: operation %d never ended", seed, m.number)
			}
		}
	}
}

// idleSession is a session with a socket that nobody reads, and without a bus.
func idleSession(t *testing.T) *session {
	t.Helper()
	s := hotSession(t)
	s.wire = s.out.wire
	s.wire.arrived = time.Now()
	s.srv.log = slog.New(slog.DiscardHandler)
	s.srv.unauthenticated = newUnauthenticated(10)
	s.srv.connections = headcount{byKey: make(map[string]int)}
	s.ctx, s.cancel = context.WithCancel(t.Context())
	t.Cleanup(s.cancel)
	return s
}

// said is what was queued for the client since the last call.
func (s *session) said() string {
	b, _, _ := s.out.take()
	var text []byte
	arena := b.arena
	for _, it := range b.items {
		text = append(append(text, arena[2:it.size]...), '\n') // replies of less than 126 bytes
		arena = arena[it.size:]
	}
	s.out.replies -= len(b.arena)
	putBatch(b)
	return string(text)
}

// TestAuthDoesNotPassOperations has an operation that does not end in time. The AUTH behind it is
// refused, and what the operation was about to make is not allowed any more.
func TestAuthDoesNotPassOperations(t *testing.T) {
	s := idleSession(t)
	stuck := &operation{running: true}
	stuck.frame.op, stuck.frame.topic, stuck.frame.group = opSubscribe, []byte("t"), []byte("g")
	s.pending = pipeline{stuck}
	s.joining = 1
	s.wire.arrived = time.Now().Add(-callTimeout - authGrace)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.auth(&frame{op: opAuth, corr: []byte("1")})
	if got := s.said(); got != `{"op":"ERR","code":"overloaded","msg":"The frames before it took too long: AUTH again.","corr":1}`+"\n" {
		t.Fatal(got)
	}
	if s.principal != nil || s.due.Load() == nil {
		t.Fatal("the connection is still authenticated")
	}
	if fail := s.mayJoin(newSubscription(&stuck.frame, maxLease)); fail == nil || fail.code != codeUnauthorized {
		t.Fatal(fail)
	}
}

// TestNoRoomForOperations answers a frame that finds no room in its time.
func TestNoRoomForOperations(t *testing.T) {
	s := idleSession(t)
	s.srv.cfg.Limits.Operations = 1
	stuck := &operation{running: true}
	stuck.frame.op, stuck.frame.topic, stuck.frame.group = opSubscribe, []byte("t"), []byte("g")
	s.pending = pipeline{stuck}
	s.wire.arrived = time.Now().Add(-callTimeout)
	s.mu.Lock()
	defer s.mu.Unlock()
	for frame, want := range map[string]string{
		`{"op":"SUBSCRIBE","topic":"u","group":"g","corr":1}`:    "subscribe_failed",
		`{"op":"PUBLISH","topic":"u","corr":1}`:                  "publish_failed",
		`{"op":"ACK","topic":"t","group":"g","id":"x","corr":1}`: "ack_failed",
		`{"op":"PAUSE","topic":"t","group":"g","corr":1}`:        "overloaded",
	} {
		s.execute([]byte(frame))
		b, _, _ := s.out.take()
		if got := string(b.arena); codeIn(got) != want {
			t.Errorf("%s: %q", frame, got)
		}
		s.out.replies = 0
		putBatch(b)
	}
	if len(s.pending) != 1 {
		t.Error(len(s.pending))
	}
}

// codeIn returns the code of an ERR frame.
func codeIn(text string) string {
	_, after, _ := strings.Cut(text, `"code":"`)
	c, _, _ := strings.Cut(after, `"`)
	return c
}

// TestTurns answers frames with and without a corr in a random order. Those without one come in the
// order of their frames, those with one at once.
func TestTurns(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(9, seed))
		o := newWriter(newWire(time.Second), 1<<20, time.Second)
		s := &session{out: o}
		type waiting struct {
			to replyTo
			id string
		}
		var open []waiting
		var want, got []string
		answer := func(w waiting) {
			if rnd.IntN(2) == 0 {
				o.ok(w.to, w.id)
			} else {
				o.err(w.to, code(w.id), "", false)
			}
		}
		for i := range 300 {
			w := waiting{id: strconv.Itoa(i)}
			switch rnd.IntN(4) {
			case 0: // with a corr
				w.to = o.replyTo([]byte("1"))
				open = append(open, w)
			case 1: // ready at once
				want = append(want, w.id)
				answer(w)
			default:
				want = append(want, w.id)
				w.to = o.replyTo(nil)
				open = append(open, w)
			}
			for len(open) > 0 && (rnd.IntN(3) == 0 || i == 299) {
				k := rnd.IntN(len(open))
				answer(open[k])
				open = slices.Delete(open, k, k+1)
			}
			if o.queue == nil {
				continue
			}
			got = append(got, s.withoutCorr()...)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d: got %v, want %v", seed, got, want)
		}
		if o.turns.waiting() || o.replies != 0 {
			t.Fatalf("seed %d: %+v, %d bytes", seed, o.turns, o.replies)
		}
	}
}

// withoutCorr returns the ids and codes of the replies without a corr that were queued.
func (s *session) withoutCorr() (ids []string) {
	for line := range strings.Lines(s.said()) {
		id, ok := strings.CutPrefix(strings.TrimSpace(line), `{"op":"OK","id":"`)
		switch {
		case strings.Contains(line, `"corr"`):
		case ok:
			ids = append(ids, strings.TrimSuffix(id, `"}`))
		default:
			ids = append(ids, codeIn(line))
		}
	}
	return ids
}

// TestTurnsEndWithTheConnection ends a connection that owes an answer. The answers behind it are
// not sent, because the client would take them for that one, and whoever waits for them is let go.
func TestTurnsEndWithTheConnection(t *testing.T) {
	o := newWriter(newWire(time.Second), 1<<20, time.Second)
	near, far := net.Pipe()
	defer func() { _ = errors.Join(near.Close(), far.Close()) }()
	o.wire.Conn = near
	s := &session{out: o}
	o.ok(o.replyTo(nil), "0")
	first, second := o.replyTo(nil), o.replyTo(nil)
	o.ok(second, "2")
	o.ok(replyTo{}, "3")
	o.ok(replyTo{corr: []byte("1")}, "4")
	sent := o.sent(first)
	if sent == nil || o.sent(second) == nil || o.sent(replyTo{corr: []byte("1")}) != nil {
		t.Fatal("somebody is told too early")
	}
	o.shut(websocket.StatusGoingAway)
	<-sent
	if got, want := s.said(), "{\"op\":\"OK\",\"id\":\"0\"}\n{\"op\":\"OK\",\"corr\":1,\"id\":\"4\"}\n"; got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
	o.ok(first, "1")
	if o.replies != 0 || o.queue != nil {
		t.Fatal(o.replies)
	}
}
