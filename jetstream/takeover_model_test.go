package jetstream

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/natstest"
)

// The long form:
//
//	go test ./jetstream -run TestRepairsFollowTheModel -repairs.for 60s
var repairsFor = flag.Duration("repairs.for", 2*time.Second, "how long TestRepairsFollowTheModel repairs groups")

// repairsModel is what a group must do that is repaired again and again.
type repairsModel struct {
	t *testing.T

	work sync.RWMutex // held for reading while a member has an event and decides
	mu   sync.Mutex
	// by sequence
	settled map[uint64]bool // NATS has surely taken an acknowledgement
	acked   map[uint64]bool // a hub has taken it
	attempt map[uint64]int  // the newest
	doomed  map[uint64]bool // a hub that was killed may have had it
	last    uint64
	leases  int
	repeats int
}

// leased takes a lease that was given.
func (m *repairsModel) leased(d *Delivery) {
	m.mu.Lock()
	defer m.mu.Unlock()
	seq := d.Event.Sequence
	m.leases++
	if m.settled[seq] {
		m.t.Errorf("event %d came again, attempt %d from %s, and was settled", seq, d.Attempt, d.group.consumer)
	}
	if m.acked[seq] {
		m.repeats++ // the acknowledgement met the repair
		delete(m.acked, seq)
	}
	if d.Attempt <= m.attempt[seq] && !m.doomed[seq] {
		m.t.Errorf("event %d came with attempt %d from %s after attempt %d", seq, d.Attempt, d.group.consumer, m.attempt[seq])
	}
	m.attempt[seq] = d.Attempt
}

// left returns the events that no hub has acknowledged.
func (m *repairsModel) left() (left []uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for seq := uint64(1); seq <= m.last; seq++ {
		if !m.acked[seq] && !m.settled[seq] {
			left = append(left, seq)
		}
	}
	return left
}

// hub starts a hub with two members, which do what they like with events.
func (m *repairsModel) hub(b *Bus, topic string, seed uint64) *movesHub {
	h := &movesHub{bus: b, end: func() {}}
	if b == nil {
		return h
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.end = cancel
	for i := range uint64(2) {
		random := rand.New(rand.NewPCG(seed, i))
		came := make(chan *Held, 1_000)
		opts := SubscribeOptions{MaxInFlight: 1 + random.IntN(20), MaxAttempts: NeverGiveUp, AckTimeout: time.Second}
		_, err := b.Subscribe(ctx, topic, "g", opts, func(h *Held) {
			select {
			case came <- h:
			case <-ctx.Done():
			}
		})
		if err != nil {
			m.t.Error(err)
			return h
		}
		h.wg.Go(func() {
			for {
				select {
				case held := <-came:
					m.settle(held, random)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return h
}

// settle does something with an event.
func (m *repairsModel) settle(held *Held, random *rand.Rand) {
	m.work.RLock()
	defer m.work.RUnlock()
	d, ok := held.Begin()
	if !ok {
		return
	}
	m.leased(d)
	switch random.IntN(10) {
	case 0:
		_ = d.Nack("no", DefaultBackoff)
	case 1:
		_ = d.Nack("later", time.Duration(random.IntN(5_000))*time.Millisecond)
	case 2: // the lease expires
	default:
		if d.Ack() == nil {
			m.mu.Lock()
			m.acked[d.Event.Sequence] = true
			m.mu.Unlock()
		}
	}
}

// confirm has members stop, waits until NATS has worked off what they said, and notes what is
// settled. m.work is held.
func (m *repairsModel) confirm(hubs []*movesHub) {
	sure := true
	for _, h := range hubs {
		h.bus.groups.eachGroup(func(g *group) {
			for _, l := range h.bus.conn.Links {
				ctx, cancel := context.WithTimeout(context.Background(), wait)
				if _, err := l.Request(ctx, g.keepAliveSubject(), conn.InProgress); err != nil {
					sure = false
				}
				cancel()
			}
			for i := range g.paths {
				sure = sure && !g.paths[i].keeps()
			}
		})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for seq := range m.acked {
		if sure {
			m.settled[seq] = true
		}
	}
}

// forget notes that nobody knows the attempts of events: a hub was killed, or did not answer.
func (m *repairsModel) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for seq := uint64(1); seq <= m.last; seq++ {
		m.doomed[seq] = true
	}
}

// TestRepairsFollowTheModel repairs a group of two hubs again and again, while its members settle,
// refuse and keep events, and hubs are killed. What was settled before a repair never comes again,
// everything else does, and attempts rise.
func TestRepairsFollowTheModel(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	url := natstest.Run(t).ClientURL()
	var wg sync.WaitGroup
	for i := range uint64(3) {
		wg.Go(func() { repairsRun(t, url, fmt.Sprint("mended.", i), rand.New(rand.NewPCG(seed, i))) })
	}
	wg.Wait()
}

func repairsRun(t *testing.T, url, topic string, random *rand.Rand) {
	t.Helper()
	m := &repairsModel{t: t, settled: make(map[uint64]bool), acked: make(map[uint64]bool), attempt: make(map[uint64]int), doomed: make(map[uint64]bool)}
	var book logBook
	open := func() *Bus {
		b, err := Open(t.Context(), Config{URL: url, AckWait: 3 * time.Second, Logger: book.logger()})
		if err != nil {
			t.Error(err)
		}
		return b
	}
	operator := open()
	if operator == nil {
		return
	}
	defer func() { _ = operator.Close() }()
	g := operator.Group(topic, "g")
	if err := g.Seek(t.Context(), FromEarliest); err != nil {
		t.Error(err)
		return
	}
	hubs := []*movesHub{m.hub(open(), topic, random.Uint64()), m.hub(open(), topic, random.Uint64())}
	defer func() {
		for _, h := range hubs {
			h.close()
		}
	}()
	rounds, inexact, answered := 0, 0, 0
	for end := time.Now().Add(*repairsFor); (rounds == 0 || time.Now().Before(end)) && !t.Failed(); rounds++ {
		for range 20 + random.IntN(60) {
			r, err := operator.Publish(t.Context(), topic, []byte("1"), PublishOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			m.mu.Lock()
			m.last = r.Sequence
			m.mu.Unlock()
		}
		<-time.After(time.Duration(random.IntN(500)) * time.Millisecond)
		m.work.Lock()
		m.confirm(hubs)
		if random.IntN(3) == 0 { // a hub is killed
			i := random.IntN(2)
			m.forget()
			for _, l := range hubs[i].bus.conn.Links {
				l.NC.Close()
			}
			m.work.Unlock()
			hubs[i].close()
			hubs[i] = m.hub(open(), topic, random.Uint64())
		} else {
			m.work.Unlock()
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		did, err := g.Move(ctx, InPlace)
		cancel()
		if err != nil {
			t.Errorf("repair: %v", err)
			return
		}
		if n := len(book.lines("group=g hubs=2 ")); n == answered {
			t.Log("a hub did not answer in time")
			m.forget()
		} else {
			answered = n
		}
		if did.AtMost {
			inexact++
		}
	}
	deadline := time.Now().Add(time.Minute)
	for left := m.left(); len(left) > 0 && !t.Failed(); left = m.left() {
		if time.Now().After(deadline) {
			info, err := g.Info(context.Background())
			t.Errorf("%d events never came: %v; the group: %+v, %v", len(left), left[:min(len(left), 20)], info, err)
		}
		<-time.After(5 * time.Millisecond)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	t.Logf("%s: %d events, %d repairs, %d not exact, %d leases, %d came again during a repair", topic, m.last, rounds, inexact, m.leases, m.repeats)
	if inexact > 0 {
		t.Errorf("%d of %d repairs were not exact", inexact, rounds)
	}
	if highest := slices.Max(append([]int{0}, values(m.attempt)...)); highest < 2 && rounds > 1 {
		t.Errorf("no event had a second attempt: %d", highest)
	}
}

func values(of map[uint64]int) (all []int) {
	for _, n := range of {
		all = append(all, n)
	}
	return all
}
