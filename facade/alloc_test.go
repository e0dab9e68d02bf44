package facade

import (
	"testing"
	"time"

	"eventhub/jetstream"
)

// maxAllocs is how many allocations of ours a published, or a delivered, event may cost.
const maxAllocs = 4

// hotSession is a session that has authenticated, and has neither a socket nor a bus.
func hotSession(tb testing.TB) *session {
	tb.Helper()
	var limits Limits
	if err := limits.validate(1 << 20); err != nil {
		tb.Fatal(err)
	}
	limits.TopicRate, limits.TopicBurst, limits.PrincipalRate, limits.PrincipalBurst = 1e9, 1e9, 1e9, 1e9
	limits.FrameRate = 1e9
	srv := &Server{cfg: Config{Observer: nopObserver{}, Limits: limits}, started: time.Now()}
	srv.frames, srv.settles = newPace(limits.FrameRate, limits.FrameBurst), newPace(limits.SettleRate, limits.SettleBurst)
	srv.byTopic, srv.byPrincipal = srv.newQuota(1e9, 1e9), srv.newQuota(1e9, 1e9)
	s := &session{srv: srv, principal: someone("static:x"), out: newWriter(newWire(time.Second), 1<<20, time.Second)}
	return s
}

// publishHot does what a session does for a PUBLISH around the call of the bus.
func publishHot(tb testing.TB, s *session, msg []byte) {
	tb.Helper()
	f := &s.frame
	if fail := f.cut(msg); fail != nil {
		tb.Fatal(fail)
	}
	if !s.frames.take(s.srv.frames, time.Since(s.srv.started)) {
		tb.Fatal("refused")
	}
	if fail := f.decode(); fail != nil {
		tb.Fatal(fail)
	}
	topic, fail := s.publishTopic(f.topic)
	if fail == nil {
		fail = s.srv.throttle(s.principal, topic.name)
	}
	if fail != nil {
		tb.Fatal(fail)
	}
	r := s.newReceipt("t", s.out.replyTo(f.corr))
	r.answer(jetstream.Receipt{ID: "0190a1b2-c3d4-7e5f-8a9b-0123456789ab"}, nil)
}

// flushed does what the flusher does around the socket.
func (o *writer) flushed(sub *subscription) {
	b, _, _ := o.take()
	for i := range b.items {
		if h := b.items[i].held; h != nil {
			b.out = sub.appendEvent(b.out[:0], h)
		}
	}
	o.replies = 0
	putBatch(b)
}

func TestAllocationsOfTheHotPath(t *testing.T) {
	s := hotSession(t)
	msg := []byte(`{"op":"PUBLISH","topic":"heartbeat.received","payload":{"pid":1,"host":"a"},"corr":"12"}`)
	sub := newSubscription(&frame{topic: []byte("heartbeat.received"), group: []byte("g")}, maxLease)
	removal := []byte(`{"op":"PUBLISH","topic":"heartbeat.received","payload":{"pid":1,"host":"a"},"opts":{"tombstone":false},"corr":"12"}`)
	optioned := testing.AllocsPerRun(1000, func() {
		publishHot(t, s, removal)
		s.out.flushed(sub)
	})
	published := testing.AllocsPerRun(1000, func() {
		publishHot(t, s, msg)
		s.out.flushed(sub)
	})
	h := &jetstream.Held{Attempt: 1}
	h.Event = jetstream.Event{ID: "0190a1b2-c3d4-7e5f-8a9b-0123456789ab", Topic: "heartbeat.received", Payload: []byte(`{"pid":1}`)}
	delivered := testing.AllocsPerRun(1000, func() {
		s.out.deliver(h, sub)
		s.out.flushed(sub)
	})
	t.Logf("allocations: %v of a publish, %v of a delivery", published, delivered)
	if optioned > published {
		t.Errorf("opts.tombstone costs %v allocations", optioned-published)
	}
	if published > maxAllocs || delivered > maxAllocs {
		t.Errorf("more than %d", maxAllocs)
	}
}
