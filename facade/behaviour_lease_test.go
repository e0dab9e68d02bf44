package facade_test

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// leaseHeld is almost 30 s, the default length, in the long form.
var leaseHeld = flag.Duration("lease.held", 2*time.Second, "how long leases of the default length are held")

// expiryNoticed is how soon after its end a lease that ran out must be given again (protocol.md,
// section 3).
const expiryNoticed = 250 * time.Millisecond

func ackWait(d time.Duration) func(*jetstream.Config) {
	return func(cfg *jetstream.Config) { cfg.AckWait = d }
}

func TestExpiredLeaseComesAgainAtOnce(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	never := 0
	in := hub.subscribe(c, topic, "g", wire.SubscribeOptions{AckTimeoutMS: 1000, MaxAttempts: &never})
	hub.publish(c, topic, "1")
	e := in.next()
	// A busy machine may delay what this test sees, but not for five times in a row.
	best := time.Hour
	for range 5 {
		again := in.next()
		late := time.Since(e.Deadline)
		if again.ID != e.ID || again.Attempt != e.Attempt+1 {
			t.Fatalf("after attempt %d of %s came attempt %d of %s", e.Attempt, e.ID, again.Attempt, again.ID)
		}
		if late < -100*time.Millisecond { // the hub starts to count when it hands the frame over
			t.Fatalf("a lease was ended %v early", -late)
		}
		best = min(best, late)
		e = again
		if best <= expiryNoticed {
			break
		}
	}
	if best > expiryNoticed {
		t.Errorf("leases come again %v after their end, at best", best)
	}
	in.ack(e)
	hub.publish(c, topic, `"marker"`)
	if e := in.next(); string(e.Payload) != `"marker"` {
		t.Errorf("instead of the marker came %s", e.Payload)
	}
}

// A lease may be used to its last moment: the server, which has a clock of its own, gives nothing
// away before. And MODACK holds a lease for as long as it is sent, well beyond what the server
// itself would wait.
//
// All cases wait at the same time, each on a bus of its own. On a machine that is so busy that a
// hub stands still, that hub gives its leases up, as it must. If the server stands still, the
// server hears of no lease, and a test that comes late has no lease. Such a case says nothing, and
// is tried again with twice the times. No other test of the package runs meanwhile.
func TestLeaseIsGoodToItsEnd(t *testing.T) {
	leasesAreGoodToTheirEnds(t,
		leaseCase{name: "a lease as long as AckWait", ackWait: 2 * time.Second, leaseMS: 2000, used: 1700 * time.Millisecond},
		leaseCase{name: "three times AckWait", ackWait: time.Second, leaseMS: 3000, used: 2700 * time.Millisecond},
		leaseCase{name: "MODACK for four times AckWait", ackWait: time.Second, leaseMS: 1000, used: 4 * time.Second, beat: 400 * time.Millisecond},
		leaseCase{name: "one MODACK of four times AckWait", ackWait: time.Second, leaseMS: 1000, used: 3700 * time.Millisecond, once: 4 * time.Second})
}

// By default, a lease is as long as AckWait, which is what the first case of
// TestLeaseIsGoodToItsEnd has. The long form waits for the end of such a lease as well. It is long
// enough for other tests to run meanwhile.
func TestDefaultLeaseIsGoodToItsEnd(t *testing.T) {
	t.Parallel()
	leasesAreGoodToTheirEnds(t, leaseCase{name: "both by default", used: *leaseHeld})
}

func leasesAreGoodToTheirEnds(t *testing.T, cases ...leaseCase) {
	t.Helper()
	for round := 1; len(cases) > 0; round++ {
		var again []leaseCase
		var trials []*heldLeases
		for _, c := range cases {
			h := &heldLeases{leaseCase: c}
			h.start(t)
			trials = append(trials, h)
		}
		slices.SortFunc(trials, func(a, b *heldLeases) int { return a.from.Add(a.used).Compare(b.from.Add(b.used)) })
		for _, h := range trials {
			<-time.After(time.Until(h.from.Add(h.used)))
			h.finish(t)
			switch {
			case len(h.faults) == 0:
			case h.stalled.Load() && round < 4:
				again = append(again, h.slower())
			default:
				t.Errorf("%s: %q", h.name, h.faults)
			}
		}
		cases = again
	}
}

type leaseCase struct {
	name    string
	ackWait time.Duration // 0: the default
	leaseMS int64         // 0: the default
	used    time.Duration // how long the leases are held
	beat    time.Duration // how often MODACK prolongs them by as much as they were long
	once    time.Duration // by how much MODACK prolongs them at the start
}

// slower is the case with twice the times.
func (c leaseCase) slower() leaseCase {
	if c.ackWait == 0 {
		c.ackWait = 30 * time.Second
	}
	c.ackWait, c.leaseMS, c.used, c.beat, c.once = 2*c.ackWait, 2*c.leaseMS, 2*c.used, 2*c.beat, 2*c.once
	return c
}

// stallLog is the log of a hub that may stand still.
type stallLog struct {
	stalled atomic.Bool
}

func (*stallLog) Enabled(context.Context, slog.Level) bool { return true }
func (l *stallLog) WithAttrs([]slog.Attr) slog.Handler     { return l }
func (l *stallLog) WithGroup(string) slog.Handler          { return l }
func (l *stallLog) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "the process stood still") {
		l.stalled.Store(true)
	}
	return nil
}

// heldLeases are twenty events that one member holds, while another waits for them.
type heldLeases struct {
	leaseCase
	stallLog // stalled: the hub or the server has stood still, or the test was too late

	hub       *testHub
	in, other *inbox
	topic     string
	held      []wire.Event
	ends      []time.Time // the lease of each ends no earlier
	from      time.Time
	stop      chan struct{}
	stopped   sync.WaitGroup

	mu     sync.Mutex
	faults []string
}

func (h *heldLeases) fault(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = append(h.faults, fmt.Sprintf(format, args...))
}

func (h *heldLeases) start(t *testing.T) {
	t.Helper()
	server := natstest.Embed(t, t.TempDir())
	h.hub = startHub(t, openBus(t, ackWait(h.ackWait), func(cfg *jetstream.Config) { cfg.Server, cfg.Logger = server, slog.New(&h.stallLog) }))
	h.topic, h.stop = freshTopic(), make(chan struct{})
	a, b := h.hub.dial(), h.hub.dial()
	for i := range 20 {
		h.hub.publish(a, h.topic, strconv.Itoa(i))
	}
	h.from = time.Now()
	h.in = h.hub.subscribe(a, h.topic, "g", wire.SubscribeOptions{From: "earliest", AckTimeoutMS: h.leaseMS})
	h.held = h.in.take(20)
	h.other = h.hub.subscribe(b, h.topic, "g", wire.SubscribeOptions{})
	lease := cmp.Or(time.Duration(h.leaseMS)*time.Millisecond, 30*time.Second)
	h.ends = slices.Repeat([]time.Time{h.from.Add(lease)}, len(h.held))
	for i := range h.held {
		if d := h.held[i].Deadline; d.Before(h.ends[i].Add(-time.Second)) || d.After(time.Now().Add(lease)) {
			t.Errorf("%s: the lease of event %d ends %v after it was asked for, want %v", h.name, i, d.Sub(h.from), lease)
		}
	}
	if h.once > 0 {
		for i := range h.held {
			h.modAck(t, i, h.once)
		}
	}
	if h.beat > 0 {
		h.stopped.Go(func() { h.prolong(t) })
	}
	url, opts := server.Connection()
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	h.stopped.Go(func() { h.watch(t, nc) })
}

// watch asks the server about the group's consumer until the case ends. The server stood still if
// an answer took a sixth of AckWait, half the time by which the hub is ahead of the server.
func (h *heldLeases) watch(t *testing.T, nc *nats.Conn) {
	t.Helper()
	defer nc.Close()
	ackWait := cmp.Or(h.ackWait, 30*time.Second)
	config := fmt.Appendf(nil, `"ack_wait":%d,`, ackWait)
	limit := ackWait / 6
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		began := time.Now()
		msg, err := nc.Request("$JS.API.CONSUMER.LIST."+h.topic, nil, waitLimit)
		if err != nil || !bytes.Contains(msg.Data, config) {
			h.fault("list of consumers: %v, %v", msg, err)
			return
		}
		if time.Since(began) > limit {
			h.stalled.Store(true)
		}
		select {
		case <-h.stop:
			return
		case <-tick.C:
		}
	}
}

func (h *heldLeases) prolong(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(h.beat)
	defer tick.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-tick.C:
			for i := range h.held {
				if !h.modAck(t, i, time.Duration(h.leaseMS)*time.Millisecond) {
					return
				}
			}
		}
	}
}

// modAck prolongs a lease.
func (h *heldLeases) modAck(t *testing.T, i int, by time.Duration) (ok bool) {
	t.Helper()
	began := time.Now()
	err := h.held[i].ModAckWait(t.Context(), by)
	h.checkLate(h.ends[i])
	h.ends[i] = began.Add(by)
	if err != nil {
		h.fault("MODACK: %v", err)
	}
	return err == nil
}

// checkLate notes that the test itself may have come after the end of a lease.
func (h *heldLeases) checkLate(end time.Time) {
	if time.Now().After(end) {
		h.stalled.Store(true)
	}
}

func (h *heldLeases) finish(t *testing.T) {
	t.Helper()
	close(h.stop)
	h.stopped.Wait()
	first := slices.MinFunc(h.ends, time.Time.Compare)
	h.checkLate(first)
	if n := len(h.in.events) + len(h.other.events); n > 0 {
		h.fault("%d events came again while they were leased", n)
		return
	}
	h.in.ack(h.held...)
	if err := h.in.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.checkLate(first) // the hub had the ACKs before that was answered
	h.hub.publish(h.hub.dial(), h.topic, `"marker"`)
	if e := h.other.next(); string(e.Payload) != `"marker"` || e.Attempt != 1 {
		h.fault("instead of the marker came %s, attempt %d: its ACK was in time", e.Payload, e.Attempt)
	}
}

// What comes late for a lease that has ended does nothing to the lease that another member holds.
func TestLateFramesDoNotTouchAnothersLease(t *testing.T) {
	t.Parallel()
	first, second := twoHubs(t)
	for _, test := range []struct {
		name  string
		other *testHub
	}{{"on the same hub", first}, {"on another hub", second}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			topic := freshTopic()
			a, b := first.dial(), test.other.dial()
			in := first.subscribe(a, topic, "g", wire.SubscribeOptions{AckTimeoutMS: 1000})
			first.publish(a, topic, "1")
			old := in.next()
			if err := in.sub.Pause(t.Context()); err != nil { // it shall get nothing more
				t.Fatal(err)
			}
			other := test.other.subscribe(b, topic, "g", wire.SubscribeOptions{AckTimeoutMS: 3000})
			e := other.next()
			if e.ID != old.ID || e.Attempt != 2 {
				t.Fatalf("the other member got %s, attempt %d", e.Payload, e.Attempt)
			}
			in.ack(old)
			if err := old.NackWait(t.Context(), "late", 0); err != nil {
				t.Error(err)
			}
			if err := old.ModAckWait(t.Context(), 60*time.Second); err == nil {
				t.Error("MODACK of a lease that has ended was answered OK")
			}
			// Had the ACK settled it, it would not come again; had the NACK ended the lease, it
			// would come before its end; had the MODACK prolonged it, it would come long after.
			again := other.next()
			early, late := e.Deadline.Add(-500*time.Millisecond), e.Deadline.Add(5*time.Second)
			if now := time.Now(); again.ID != e.ID || again.Attempt != 3 || now.Before(early) || now.After(late) {
				t.Errorf("then came %s, attempt %d, %v after the end of the lease", again.Payload, again.Attempt, time.Since(e.Deadline))
			}
			other.ack(again)
			first.publish(a, topic, `"marker"`)
			if e := other.next(); string(e.Payload) != `"marker"` {
				t.Errorf("instead of the marker came %s", e.Payload)
			}
		})
	}
}

// A hub that is cut off from NATS for longer than AckWait loses its leases: nothing of what its
// clients say about them reaches the events, which are another hub's by then.
//
// If the other hub stands still on a busy machine, it gives its leases up, too. That says nothing,
// and the test is tried again with twice the times.
func TestHubCutOffSettlesNothing(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		sever func(*tcpProxy)
	}{
		{"connections end", (*tcpProxy).cut},
		{"packets are lost", (*tcpProxy).freeze},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			for wait := time.Second; ; wait *= 2 {
				faults, stalled := settledCutOff(t, wait, test.sever)
				if len(faults) > 0 && stalled && wait < 8*time.Second {
					continue
				}
				for _, fault := range faults {
					t.Error(fault)
				}
				return
			}
		})
	}
}

// settledCutOff has a client settle what it holds while its hub is cut off, with this AckWait. It
// returns what was wrong, and whether the other hub stood still.
func settledCutOff(t *testing.T, wait time.Duration, sever func(*tcpProxy)) (faults []string, stalled bool) {
	t.Helper()
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	url := startNATS(t)
	proxy := newTCPProxy(t, url)
	var log stallLog
	cutOff := startHub(t, openBus(t, ackWait(wait), at(proxy.url())))
	fine := startHub(t, openBus(t, ackWait(wait), at(url), func(cfg *jetstream.Config) { cfg.Logger = slog.New(&log) }))
	a, b := cutOff.dial(), fine.dial()
	topic := freshTopic()
	never := 0
	opts := wire.SubscribeOptions{MaxAttempts: &never, AckTimeoutMS: 4 * wait.Milliseconds()}
	in := cutOff.subscribe(a, topic, "g", opts)
	for i := range 10 {
		fine.publish(b, topic, strconv.Itoa(i))
	}
	old := in.take(10)
	// what comes again shall go to the other hub
	if err := in.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := fine.subscribe(b, topic, "g", opts)
	sever(proxy)
	cutAt := time.Now()
	// The client goes on meanwhile, and is answered.
	in.ack(old[:3]...)
	for i := 3; i < 6; i++ {
		if err := old[i].NackWait(t.Context(), "cut off", 0); err != nil {
			t.Fatal(err)
		}
	}
	for i := 6; i < 9; i++ {
		_ = old[i].ModAck(time.Minute)
	}
	held := other.take(10)
	for _, e := range held {
		if e.Attempt != 2 {
			fault("event %s has attempt %d", e.Payload, e.Attempt)
		}
	}
	waitUntil(t, "twice AckWait", func() bool { return time.Since(cutAt) > 2*wait })
	proxy.cut() // what a broken network held back is lost with its connections
	proxy.heal()
	waitUntil(t, "the hub is back", func() bool { return ready(t, cutOff.bus) })
	in.ack(old...)
	for i := range old {
		_ = old[i].Nack("late", 0)
	}

	// The other hub's leases are whole: half of them are settled, the other half come again after
	// their end.
	other.ack(held[:5]...)
	left := map[string]bool{}
	for _, e := range held[5:] {
		left[e.ID] = true
	}
	for len(left) > 0 && len(faults) == 0 {
		e := other.next()
		if !left[e.ID] || e.Attempt != 3 || time.Now().Before(held[5].Deadline.Add(-500*time.Millisecond)) {
			fault("event %s came, attempt %d, %v before the end of its lease", e.Payload, e.Attempt, time.Until(held[5].Deadline))
		}
		delete(left, e.ID)
		other.ack(e)
	}
	fine.publish(b, topic, `"marker"`)
	if len(faults) == 0 {
		if e := other.next(); string(e.Payload) != `"marker"` {
			fault("instead of the marker came %s", e.Payload)
		}
	}
	return faults, log.stalled.Load()
}
