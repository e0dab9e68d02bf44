package jetstream

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// The long form:
//
//	go test ./jetstream -run TestMovesFollowTheModel -moves.for 60s
var movesFor = flag.Duration("moves.for", 3*time.Second, "how long TestMovesFollowTheModel moves groups")

// movesModel is what a group must do. A move begins and ends at known moments. Between them, events
// of both positions may come.
type movesModel struct {
	t  *testing.T
	mu sync.Mutex
	// epoch counts the moves that were answered. moving says that one is under way.
	epoch    int
	moving   bool
	consumer string              // what the group was when the last move was answered
	early    map[string][]uint64 // leased from other consumers during a move
	from     uint64              // nothing before it may be leased in this epoch
	never    map[uint64]bool     // nor these, which the bookmark had surely settled
	past     map[uint64]bool     // what the bookmark may have settled
	need     map[uint64]bool     // must be delivered in this epoch, and settled
	// by consumer: what may be settled, and what surely is
	tried, acked map[string]map[uint64]bool
	last         uint64 // the newest event
	marks        map[string]marked
	leases       int
	did          map[string]int
}

// marked is a bookmark as the model knows it: of what was delivered, what may have been settled,
// and what surely was.
type marked struct {
	floor       uint64
	may, surely map[uint64]bool
}

// leased takes a lease that was given: at once, with the epoch from before it was.
func (m *movesModel) leased(epoch int, consumer string, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leases++
	if epoch == m.epoch && !m.moving && consumer != m.consumer {
		m.t.Errorf("epoch %d: event %d was leased from %s, and the group is %s", m.epoch, seq, consumer, m.consumer)
	}
	if m.moving && consumer != m.consumer {
		// perhaps the group has been moved, and that is not answered yet
		m.early[consumer] = append(m.early[consumer], seq)
	}
	if consumer == m.consumer {
		m.allowed(seq)
	}
	delete(m.acked[consumer], seq) // the ack was lost with a hub
}

// allowed checks an event that was leased from the present consumer. m.mu is held.
func (m *movesModel) allowed(seq uint64) {
	if seq < m.from {
		m.t.Errorf("epoch %d: event %d was leased, and the group was moved to %d", m.epoch, seq, m.from)
	}
	if m.never[seq] {
		m.t.Errorf("epoch %d: event %d was leased, which the bookmark had settled", m.epoch, seq)
	}
}

// now returns the epoch, -1 while a move is under way.
func (m *movesModel) now() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.moving {
		return -1
	}
	return m.epoch
}

// try notes that an event is about to be settled.
func (m *movesModel) try(consumer string, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	add(m.tried, consumer, seq)
}

// settled takes an ack that the hub took.
func (m *movesModel) settled(consumer string, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	add(m.acked, consumer, seq)
	if consumer == m.consumer {
		delete(m.need, seq)
	}
}

func add(to map[string]map[uint64]bool, consumer string, seq uint64) {
	if to[consumer] == nil {
		to[consumer] = make(map[uint64]bool)
	}
	to[consumer][seq] = true
}

// follow takes over what the group is now. m.mu is held.
func (m *movesModel) follow(g Group) {
	_, ptr, err := g.pointer(context.Background())
	if err != nil {
		m.t.Error(err)
		return
	}
	m.consumer = ptr.Consumer
	for _, seq := range m.early[m.consumer] {
		m.allowed(seq)
	}
	clear(m.early)
	for _, of := range []map[string]map[uint64]bool{m.acked, m.tried} {
		maps.DeleteFunc(of, func(consumer string, _ map[uint64]bool) bool { return consumer != m.consumer })
	}
}

// movesHub is a hub with members of the group, which settle what they get, mostly.
type movesHub struct {
	bus *Bus
	end context.CancelFunc
	wg  sync.WaitGroup
}

// TestMovesFollowTheModel moves a group of two hubs at random, to all kinds of positions, while its
// members settle, refuse and keep events, hubs are killed, and hubs hear late of moves. In each
// epoch between two moves, every event from the position on is delivered and settled, and none
// before it is leased.
func TestMovesFollowTheModel(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	const groups = 4
	url := natstest.Run(t).ClientURL()
	var wg sync.WaitGroup
	for i := range groups {
		wg.Go(func() { movesRun(t, url, i, rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	wg.Wait()
}

func movesRun(t *testing.T, url string, n int, random *rand.Rand) {
	t.Helper()
	topic := fmt.Sprintf("moves.%d", n)
	m := &movesModel{t: t, from: 1, need: make(map[uint64]bool), acked: make(map[string]map[uint64]bool), tried: make(map[string]map[uint64]bool), early: make(map[string][]uint64), marks: make(map[string]marked), did: make(map[string]int)}
	open := func() *Bus {
		b, err := Open(t.Context(), Config{URL: url, AckWait: 3 * time.Second})
		if err != nil {
			t.Error(err)
			return nil
		}
		return b
	}
	operator := open()
	if operator == nil {
		return
	}
	defer func() { _ = operator.Close() }()
	ids := []string{""} // by sequence
	times := []time.Time{{}}
	publishOne := func(k int) bool {
		for range k {
			r, err := operator.Publish(t.Context(), topic, []byte("1"), PublishOptions{})
			if err != nil {
				t.Error(err)
				return false
			}
			m.mu.Lock()
			m.last = r.Sequence
			if !m.acked[m.consumer][r.Sequence] { // it may have come at once
				m.need[r.Sequence] = true
			}
			m.mu.Unlock()
			ids, times = append(ids, r.ID), append(times, time.Now())
		}
		return true
	}
	if !publishOne(20) {
		return
	}
	g := operator.Group(topic, "g")
	if err := g.Seek(t.Context(), FromEarliest); err != nil {
		t.Error(err)
		return
	}
	m.follow(g)
	hubs := []*movesHub{m.hub(open(), topic, random.Uint64()), m.hub(open(), topic, random.Uint64())}
	defer func() {
		for _, h := range hubs {
			h.close()
		}
	}()
	for end := time.Now().Add(*movesFor); time.Now().Before(end) && !t.Failed(); {
		if !publishOne(random.IntN(20)) {
			return
		}
		switch k := random.IntN(10); {
		case k == 0: // a hub is killed: it says nothing, and another takes its place
			m.did["kill"]++
			i := random.IntN(2)
			hubs[i].kill()
			m.mu.Lock()
			clear(m.acked) // acks may be lost with it
			m.mu.Unlock()
			hubs[i] = m.hub(open(), topic, random.Uint64())
		case k == 1 && len(m.marks) < 5:
			m.mark(g, fmt.Sprint("m", random.IntN(5)))
		case k == 2:
			m.did["pause"]++
			if err := errors.Join(g.Pause(t.Context()), g.Resume(t.Context())); err != nil {
				t.Error(err)
			}
		default:
			if random.IntN(2) == 0 {
				m.quiet(g)
			}
			var deaf *Bus
			if random.IntN(2) == 0 {
				// who watches the generations cannot tell the hub's subscriptions
				m.did["deaf"]++
				deaf = hubs[random.IntN(2)].bus
				deaf.subscriptions.mu.Lock()
				// Then members are full: a pull that waits would tell of a move.
				if full := publishOne(60); !full {
					deaf.subscriptions.mu.Unlock()
					return
				}
			}
			m.move(g, random, ids, times)
			if deaf != nil {
				<-time.After(200 * time.Millisecond)
				deaf.subscriptions.mu.Unlock()
			}
		}
	}
	m.quiet(g)
	m.mu.Lock()
	defer m.mu.Unlock()
	t.Logf("%s: %d events, %d moves, %d leases, %v", topic, m.last, m.epoch, m.leases, m.did)
}

// hub starts a hub with two members.
func (m *movesModel) hub(b *Bus, topic string, seed uint64) *movesHub {
	h := &movesHub{bus: b, end: func() {}}
	if b == nil {
		return h
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.end = cancel
	for i := range uint64(2) {
		random := rand.New(rand.NewPCG(seed, i))
		came := make(chan *Held, 1_000)
		_, err := b.Subscribe(ctx, topic, "g", SubscribeOptions{MaxInFlight: 1 + random.IntN(20), MaxAttempts: NeverGiveUp, AckTimeout: time.Second}, func(h *Held) {
			select {
			case came <- h:
			default: // given back when it is not taken
			}
		})
		if err != nil {
			m.t.Error(err)
			return h
		}
		h.wg.Go(func() {
			for {
				var held *Held
				select {
				case held = <-came:
				case <-ctx.Done():
					return
				}
				if random.IntN(8) == 0 { // it waits for a while before it is taken
					select {
					case <-time.After(time.Duration(random.IntN(500)) * time.Millisecond):
					case <-ctx.Done():
						return
					}
				}
				epoch := m.now()
				d, ok := held.Begin()
				if !ok {
					continue
				}
				m.leased(epoch, d.group.consumer, d.Event.Sequence)
				switch k := random.IntN(20); k {
				case 0:
					_ = d.Nack("no", DefaultBackoff)
				case 1: // the lease expires
				default:
					if k < 6 {
						select {
						case <-time.After(time.Duration(random.IntN(100)) * time.Millisecond):
						case <-ctx.Done():
							return
						}
					}
					m.try(d.group.consumer, d.Event.Sequence)
					if d.Ack() == nil {
						m.settled(d.group.consumer, d.Event.Sequence)
					}
				}
			}
		})
	}
	return h
}

func (h *movesHub) close() {
	h.end()
	h.wg.Wait()
	if h.bus != nil {
		_ = h.bus.Close()
	}
}

// kill ends a hub without a word: its connections are cut first.
func (h *movesHub) kill() {
	for _, l := range h.bus.conn.Links {
		l.NC.Close()
	}
	h.close()
}

// quiet waits until all that must come in this epoch was settled.
func (m *movesModel) quiet(g Group) {
	deadline := time.Now().Add(time.Minute)
	for {
		m.mu.Lock()
		left := slices.Sorted(maps.Keys(m.need))
		m.mu.Unlock()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			info, err := g.Info(context.Background())
			m.t.Errorf("epoch %d: %d events never came: %v; the group: %+v, %v", m.now(), len(left), left[:min(len(left), 20)], info, err)
			return
		}
		<-time.After(5 * time.Millisecond)
	}
}

// move moves the group somewhere.
func (m *movesModel) move(g Group, random *rand.Rand, ids []string, times []time.Time) {
	last := len(ids) - 1
	at := 1 + random.IntN(last)
	var to Position
	var start uint64
	var may, surely map[uint64]bool
	kind := []string{"earliest", "latest", "id", "time", "back", "bookmark"}[random.IntN(6)]
	switch kind {
	case "earliest":
		to, start = FromEarliest, 1
	case "latest":
		to, start = FromLatest, uint64(last)+1
	case "id":
		to, start = FromAfterID(ids[at]), uint64(at)+1
	case "time":
		// the events' own times are not known to the millisecond
		to, start = FromTime(times[at].Add(time.Hour)), uint64(last)+1
	case "back":
		m.quiet(g) // so that the position is known
		info, err := g.Info(context.Background())
		if err != nil {
			m.t.Error(err)
			return
		}
		n := 1 + random.IntN(last)
		if info.InFlight+info.Pending > 0 {
			kind = "back, vaguely"
		}
		to = Back(n)
		start = max(info.Floor+1, uint64(n)+1) - uint64(n)
	case "bookmark":
		names := slices.Sorted(maps.Keys(m.marks))
		if len(names) == 0 {
			return
		}
		name := names[random.IntN(len(names))]
		mark := m.marks[name]
		to, start, may, surely = AtBookmark(name), mark.floor+1, mark.may, mark.surely
	}
	m.mu.Lock()
	m.moving = true
	m.did[kind]++
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := g.Move(ctx, to); err != nil {
		m.t.Errorf("move to %s: %v", kind, err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moving = false
	m.epoch++
	m.from, m.never, m.past = start, surely, may
	if strings.HasSuffix(kind, "vaguely") {
		m.from, start = 0, m.last+1
	}
	m.follow(g)
	m.need = make(map[uint64]bool)
	for seq := start; seq <= m.last; seq++ {
		if !may[seq] && !m.acked[m.consumer][seq] {
			m.need[seq] = true
		}
	}
}

// mark makes a bookmark.
func (m *movesModel) mark(g Group, name string) {
	m.mu.Lock()
	surely := maps.Clone(m.acked[m.consumer])
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	made, err := g.Bookmarks().Put(ctx, name)
	if err != nil {
		m.t.Errorf("bookmark: %v", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	mark := marked{floor: made.Floor}
	m.did["rough bookmark"]++
	if made.Exact {
		m.did["rough bookmark"]--
		m.did["exact bookmark"]++
		mark.may, mark.surely = maps.Clone(m.tried[m.consumer]), surely
		if mark.may == nil {
			mark.may = make(map[uint64]bool)
		}
		maps.Copy(mark.may, m.past)
		behind := func(seq uint64, _ bool) bool { return seq > made.Newest }
		maps.DeleteFunc(mark.may, behind)
		maps.DeleteFunc(mark.surely, behind)
	}
	m.marks[name] = mark
}
