package jetstream

import (
	"context"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
)

// Loss says that events were removed from a topic before a group was given them: by a bound of the
// topic's rule (age, bytes, messages), or because a native client narrowed or purged the stream.
type Loss struct {
	Topic string
	// Events is the number of events that were lost since the last report, at least 1.
	Events uint64
	// Since is when the last event before them was stored, as far as it is known; else zero. The
	// lost events were stored at that time or later.
	Since time.Time
}

// sight is what this hub sees of the order in which the server gives out the events of a group. The
// server numbers all deliveries of a group (order). While nothing is removed, each delivery that is
// not a redelivery brings the next sequence, whichever hub gets it: so seq - order + redeliveries
// stays the same, and a rise says how many events were left out. Guarded by the group's mu.
//
// Redeliveries to other hubs are not seen here and let the sum fall. After settleSight, when all
// that came out of order has arrived, the lower sum is the new base.
type sight struct {
	off   bool // the stream has other topics too: sequences say nothing
	cut   bool // the server may count from another number since
	base  int64
	dipAt int64 // since when the sum is below base; 0: it is not

	order, seq uint64 // the highest of a delivery, and of an event
	orderAt    int64  // when that delivery came
	seqOrder   uint64 // the order of that event
	stored     int64  // when the event was
	again      uint64 // redeliveries
	clean      place  // where the sum was base
}

// place is a point in the order of deliveries.
type place struct {
	order, seq uint64
	stored     int64 // 0: unknown
}

// gap says that up to lost events were left out between two deliveries.
type gap struct {
	after place
	order uint64
	seq   uint64 // of the first event behind it
	lost  uint64
}

// settleSight is how long deliveries over several connections may arrive out of order.
const settleSight = time.Second

// newSight begins where the consumer stands. When nothing is in flight, the ack floor says more: a
// consumer that met the end of an emptied stream shows that end as delivered.
func newSight(t *streams.Topic, info *natsjs.ConsumerInfo) sight {
	s := sight{off: t.Stream.Family, order: info.Delivered.Consumer, seq: info.Delivered.Stream}
	if n := info.AckFloor.Consumer; n > 0 && n == info.Delivered.Consumer && info.NumAckPending == 0 && info.AckFloor.Stream < s.seq {
		s.seq = info.AckFloor.Stream
	}
	// A server that leads the consumer no longer answers with 0.
	s.seq = max(s.seq, max(info.Config.OptStartSeq, 1)-1)
	s.rest()
	return s
}

func (s *sight) sum() int64 { return int64(s.seq) - int64(s.order) + int64(s.again) } //nolint:gosec // far below 2^63

// rest makes the present sum the base.
func (s *sight) rest() {
	s.base, s.dipAt, s.clean = s.sum(), 0, place{s.order, s.seq, s.stored}
}

// arrived takes a delivery, and returns the gap before it if there is one.
func (s *sight) arrived(p *conn.DeliveryMeta, now int64) (gap, bool) {
	if s.off {
		return gap{}, false
	}
	if s.dipAt > 0 && now-s.dipAt > int64(settleSight) {
		s.rest()
	}
	late, first := p.Order <= s.order, p.Delivered == 1 && p.StreamSeq > s.seq
	// The server counts from another number. A new leader may not know of the last deliveries: then
	// a later event comes under the number of one of them.
	renumbered := first && (p.Order <= s.seqOrder || p.Order == s.order)
	// An event that was passed before says nothing: its delivery may have stood in a connection.
	if late && first && (s.cut || now-s.orderAt > int64(settleSight) || renumbered) {
		s.orderAt = now
		return s.recount(p)
	}
	if !late {
		s.cut, s.order, s.orderAt = false, p.Order, now
	}
	switch {
	case first:
		s.seq, s.seqOrder, s.stored = p.StreamSeq, p.Order, p.StoredAt
	case p.Delivered > 1 || !late: // also one that a killed server has forgotten
		s.again++
	}
	switch sum := s.sum(); {
	case sum > s.base:
		g := gap{after: s.clean, order: s.order, seq: s.seq, lost: uint64(sum - s.base)} //nolint:gosec // positive
		s.rest()
		return g, true
	case sum == s.base:
		s.rest()
	case s.dipAt == 0:
		s.dipAt = now
	}
	return gap{}, false
}

// recount begins again with the first delivery of an event whose number is not comparable with
// those before.
func (s *sight) recount(p *conn.DeliveryMeta) (g gap, found bool) {
	g = gap{after: place{s.order, s.seq, s.stored}, order: p.Order, seq: p.StreamSeq, lost: p.StreamSeq - s.seq - 1}
	s.cut, s.order, s.seq, s.seqOrder, s.stored, s.again = false, p.Order, p.StreamSeq, p.Order, p.StoredAt, 0
	s.rest()
	return g, g.lost > 0
}

// lossWait bounds how long events wait until it is known how many were lost before them.
const lossWait = 5 * time.Second

// found is what is to be looked at: a gap, or events that members had been given and had given
// back, and that were removed before they came again.
type found struct {
	gap      gap
	returned []uint64
}

// check has this hub find out how many events were lost, one thing after the other, and tell its
// members. Deliveries that arrive meanwhile wait. g.mu is held.
func (g *group) check(f found) {
	g.found = append(g.found, f)
	if g.checking {
		return
	}
	g.checking = true
	g.bus.conn.Apart(g.checkAll)
}

func (g *group) checkAll() {
	for {
		g.mu.Lock()
		if len(g.found) == 0 {
			waiting := g.waiting
			g.waiting, g.checking = nil, false
			g.mu.Unlock()
			for _, d := range waiting {
				d.goOn()
			}
			return
		}
		f := g.found[0]
		g.found = g.found[1:]
		g.mu.Unlock()
		g.report(f)
	}
}

// report notes a loss, unless another hub has, and tells the members on this hub.
func (g *group) report(f found) {
	b := g.bus
	ctx, cancel := context.WithTimeout(b.conn.Ctx, lossWait)
	defer cancel()
	losses, err := g.noteLoss(ctx, f)
	if err != nil && b.conn.Ctx.Err() == nil {
		b.often.Log(ctx, slog.LevelWarn, "failed to note that a group has lost events; this hub reports them by itself", g.source(),
			slog.String("topic", g.topic.Name), slog.String("group", g.name), slog.Any("error", err))
	}
	for _, l := range losses {
		b.often.Log(ctx, slog.LevelWarn, "events were removed before a group was given them", g.source(), slog.String("topic", l.Topic), slog.String("group", g.name),
			slog.Uint64("events", l.Events), slog.Time("since", l.Since))
		for _, s := range b.groups.membersOf(g) {
			s.lose(l)
		}
	}
}

// lose tells the subscriber of a loss. One that has not resumed yet has missed nothing.
func (s *Subscription) lose(l Loss) {
	s.mu.Lock()
	resumed := s.resumed
	s.mu.Unlock()
	if s.opts.OnLost == nil || !resumed {
		return
	}
	s.deliver.Lock()
	defer s.deliver.Unlock()
	if !s.ended.Load() {
		s.opts.OnLost(l)
	}
}

// await makes a delivery wait until it is known what was lost before it.
func (g *group) await(d *Delivery) {
	d.m.sub.returning.TryAcquire(maxReturning) // until goOn
	g.mu.Lock()
	if g.checking {
		g.waiting = append(g.waiting, d)
		g.mu.Unlock()
		return
	}
	g.mu.Unlock()
	d.goOn()
}

// goOn hands a delivery on that has waited.
func (d *Delivery) goOn() {
	s := d.m.sub
	defer s.returning.Release()
	s.mu.Lock()
	d.looking = false
	if d.knows != known {
		s.mu.Unlock()
		d.resolve()
		return
	}
	d.resolved = true
	ended, nak := d.unseen, d.unseenNak
	s.mu.Unlock()
	if ended {
		s.spare(d, nak)
	}
	s.advance()
}

// noteLoss counts what was found, and returns what the members on this hub are to be told of it. On
// an error, the hub counts by itself. The metric counts on the hub that was first to note.
func (g *group) noteLoss(ctx context.Context, f found) ([]Loss, error) {
	r := g.bus.records.Retention
	if f.returned != nil {
		n, err := r.NoteReturned(ctx, g.topic, g.name, f.returned)
		if n == 0 {
			return nil, err
		}
		g.countLost(n)
		return []Loss{{Topic: g.topic.Name, Events: n}}, err
	}
	w := records.Gap{After: f.gap.after.seq, Since: f.gap.after.stored, Order: f.gap.order, Seq: f.gap.seq, Lost: f.gap.lost}
	n, gaps, err := r.NoteLoss(ctx, g.topic, g.name, g.consumer, w)
	if n > 0 {
		g.countLost(n)
	}
	if err != nil {
		return []Loss{lossOf(records.BookedGap{Lost: n, Since: w.Since}, g.topic.Name)}, err
	}
	return g.untold(gaps, w), nil
}

// countLost is the metric of a loss.
func (g *group) countLost(n uint64) {
	o := g.bus.obs.Group(g.topic.Name, g.name, g.timeToLive() > 0)
	o.Lost(n)
	o.Close()
}

// untold is what the members on this hub have not been told of a gap: what the book has of it,
// whichever hub has noted it.
func (g *group) untold(gaps []records.BookedGap, w records.Gap) (losses []Loss) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, booked := range gaps {
		if booked.Before > g.told && booked.After < w.Seq && booked.Before > w.After {
			losses = append(losses, lossOf(booked, g.topic.Name))
			g.told = booked.Before
		}
	}
	return losses
}

func lossOf(g records.BookedGap, topic string) Loss {
	l := Loss{Topic: topic, Events: g.Lost}
	if g.Since > 0 {
		l.Since = time.Unix(0, g.Since)
	}
	return l
}
