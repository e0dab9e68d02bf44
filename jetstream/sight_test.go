package jetstream

import (
	"math/rand/v2"
	"testing"
	"time"

	"eventhub/jetstream/internal/conn"
)

// sightModel is a group at random: events are stored and removed, given to this hub or lost on the
// way, given back and given again. Deliveries over two connections change places.
type sightModel struct {
	rnd         *rand.Rand
	first, last uint64 // of the stream
	next        uint64 // to be given for the first time
	order       uint64
	unsettled   map[uint64]int // how often they were given
	lost        uint64

	sight sight
	found uint64
	late  *conn.DeliveryMeta
	now   int64
}

func (m *sightModel) give(seq uint64, arrives bool) {
	m.order++
	m.unsettled[seq]++
	p := &conn.DeliveryMeta{Delivered: m.unsettled[seq], StreamSeq: seq, Order: m.order, StoredAt: int64(seq)}
	switch {
	case !arrives:
	case m.late == nil && m.rnd.IntN(4) == 0:
		m.late = p
	default:
		m.arrive(p)
	}
}

func (m *sightModel) arrive(p *conn.DeliveryMeta) {
	late := m.late
	m.late = nil
	for _, p := range []*conn.DeliveryMeta{p, late} {
		if p == nil {
			continue
		}
		m.now += int64(time.Millisecond)
		if g, ok := m.sight.arrived(p, m.now); ok {
			m.found += g.lost
		}
	}
}

func (m *sightModel) step() {
	switch m.rnd.IntN(6) {
	case 0:
		m.last += m.rnd.Uint64N(20)
	case 1: // retention
		m.first = min(m.first+m.rnd.Uint64N(20), m.last+1)
		for seq := range m.unsettled {
			if seq < m.first {
				delete(m.unsettled, seq)
			}
		}
	case 2, 3:
		if m.next > m.last || m.first > m.last {
			return
		}
		if m.first > m.next {
			m.lost += m.first - m.next
			m.next = m.first
		}
		m.give(m.next, m.rnd.IntN(10) > 0)
		m.next++
	default:
		for seq := range m.unsettled {
			if m.rnd.IntN(2) == 0 {
				delete(m.unsettled, seq) // acknowledged
			} else {
				m.give(seq, true)
			}
			break
		}
	}
}

func TestSightCountsEveryLoss(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2_000) {
		m := &sightModel{rnd: rand.New(rand.NewPCG(seed, 1)), first: 1, next: 1, unsettled: make(map[uint64]int)}
		m.sight.rest()
		for range 300 {
			m.step()
		}
		// the end: one more event arrives, in order
		m.last++
		for m.next <= m.last {
			if m.first > m.next {
				m.lost += m.first - m.next
				m.next = m.first
			}
			m.give(m.next, true)
			m.next++
		}
		if m.late != nil {
			m.arrive(m.late)
		}
		if m.found != m.lost {
			t.Fatalf("seed %d: %d are found, %d were lost", seed, m.found, m.lost)
		}
	}
}
