package jetstream

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"
	"time"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

const (
	// Fewer events than fewReturned are given back with a note for each.
	fewReturned = 8
	// returnBatch is how many events are given back before the consumer is asked whether it has
	// worked that off, so that what others say does not wait behind thousands.
	returnBatch = 256
	// maxSparedRuns bounds the entry about many events: about 100 KiB.
	maxSparedRuns = 4096
)

// returns are events that the hub gives back for one client: those that nobody had, behind one note
// for each group, and those of which the client was lost. They go a few at a time, one group after
// the other.
type returns struct {
	rate int // events a second; 0: no limit

	mu     sync.Mutex
	unread []returned // bounded by what was held
	lost   []returned // likewise; these can wait for the others
	busy   bool
}

// returned are events of one group that one subscription held.
type returned struct {
	s    *Subscription
	g    *group
	ds   []*Delivery // in the order of the stream
	left func(n int) // is called when some are given back
}

// add has events given back. It does not block.
func (r *returns) add(b *Bus, back returned, lost bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if lost {
		r.lost = append(r.lost, back)
	} else {
		r.unread = append(r.unread, back)
	}
	if !r.busy {
		r.busy = true
		b.conn.Apart(func() { r.run(b) })
	}
}

// run gives back what waits.
func (r *returns) run(b *Bus) {
	for {
		next, lost, ok := r.next()
		if !ok {
			return
		}
		if !lost {
			b.noteMany(next)
		}
		r.send(b, next)
	}
}

// next takes what is to be given back next: all unread events of a group, or a batch of lost ones.
func (r *returns) next() (next returned, lost, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case len(r.unread) > 0:
		next, r.unread = r.unread[0], r.unread[1:]
		return next, false, true
	case len(r.lost) > 0:
		next = r.lost[0]
		n := min(len(next.ds), returnBatch)
		next.ds, r.lost[0].ds = next.ds[:n], next.ds[n:]
		if len(r.lost[0].ds) == 0 {
			r.lost = r.lost[1:]
		}
		return next, true, true
	}
	r.unread, r.lost, r.busy = nil, nil, false
	return next, false, false
}

// send gives back events, and waits after each batch until the consumer has worked that off and the
// rate allows more. Nothing waits when the bus closes.
func (r *returns) send(b *Bus, back returned) {
	for ds := range slices.Chunk(back.ds, returnBatch) {
		var pause <-chan time.Time
		if r.rate > 0 {
			pause = time.After(time.Duration(len(ds)) * time.Second / time.Duration(r.rate))
		}
		for _, d := range ds {
			d.sendInTime(conn.NakNow)
		}
		ctx, cancel := context.WithTimeout(b.conn.Ctx, records.NoteWait)
		// An error is no answer in time; then others need not wait for longer.
		_, _ = back.s.link.Request(ctx, back.g.keepAliveSubject(), conn.InProgress)
		cancel()
		back.left(len(ds))
		if pause != nil {
			select {
			case <-pause:
			case <-b.conn.Ctx.Done():
			}
		}
	}
}

// plain reports whether the note about d is a number that is no less than 0, so that it fits into
// the entry about many. The subscription's mu is held.
func (d *Delivery) plain() bool {
	return !d.begun && d.loan == nil && d.resolved && !d.bounced && d.knows != forgotten && d.spared >= 0 && d.failed == nil && d.until == 0
}

// giveBackMany is spare for plain deliveries of one group that are given back.
func (s *Subscription) giveBackMany(g *group, ds []*Delivery) {
	b := s.bus
	full := false
	g.mu.Lock()
	for _, d := range ds {
		g.track.addUnsettled(d.seq)
		full = g.known.spare(d.seq, d.delivered, d.spared, b.limits.AttemptsKnown) || full
	}
	g.mu.Unlock()
	if full {
		b.obs.LimitReached("attempts_known")
	}
	h := s.opts.Holder
	h.count(len(ds))
	for range ds {
		s.returning.TryAcquire(maxReturning)
	}
	h.queue(b).add(b, returned{s, g, ds, func(n int) {
		h.count(-n)
		for range n {
			s.returning.Release()
		}
	}}, false)
}

// giveBackLost gives back events of one group whose client was lost. Nobody waits for that.
func (s *Subscription) giveBackLost(g *group, ds []*Delivery) {
	h := s.opts.Holder
	h.occupy(len(ds))
	h.queue(s.bus).add(s.bus, returned{s, g, ds, func(n int) { h.occupy(-n) }}, true)
}

// sparedSubject is where the deliveries of many events of the group are noted.
func (g *group) sparedSubject() string {
	return records.NoteSubject(g.topic.Stream.Name, g.consumer, g.created, 0)
}

// noteMany notes that no client had the events, before they are given back. While the bucket does
// not answer and the events are still the hub's, they wait.
func (b *Bus) noteMany(back returned) {
	var err error
	for began := b.clock.Now(); ; {
		var left []*Delivery
		if left, err = b.tryNoteMany(back); err == nil {
			for _, d := range left {
				b.records.NoteSpared(back.s.link, records.SpareNote{Subject: d.attemptsSubject(), Note: records.Note{Spared: d.spared + 1}}, func(bool) {})
			}
			return
		}
		if !back.ds[0].patient(began) || !back.ds[0].inTime() {
			break
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-b.conn.Ctx.Done():
			return
		}
	}
	b.log.Debug("failed to note deliveries that no client had", slog.Any("error", err))
	for _, d := range back.ds {
		b.records.KeepNote(records.SpareNote{Subject: d.attemptsSubject(), Note: records.Note{Spared: d.spared + 1}})
	}
}

// tryNoteMany adds the events to the entry about many, unless another hub does so at this moment.
// It returns those for which the entry has no room.
func (b *Bus) tryNoteMany(back returned) (left []*Delivery, err error) {
	g := back.g
	err = b.records.ChangeRuns(back.s.link, g.sparedSubject(), func(runs native.SparedRuns) native.SparedRuns {
		g.mu.Lock()
		floor := g.track.floor
		g.mu.Unlock()
		runs, left = addSpared(runs, back.ds, floor)
		return runs
	})
	return left, err
}

// addSpared adds one delivery more of each event, which are in order, to the runs, and drops what
// is settled: up to floor. It returns the events for which there is no room.
func addSpared(runs native.SparedRuns, ds []*Delivery, floor uint64) (all native.SparedRuns, left []*Delivery) {
	all = make(native.SparedRuns, 0, len(runs)+1)
	add := func(first, last, spared uint64) {
		if first = max(first, floor+1); first > last {
			return
		}
		if n := len(all) - 1; n >= 0 && all[n][1]+1 == first && all[n][2] == spared {
			all[n][1] = last
			return
		}
		all = append(all, [3]uint64{first, last, spared})
	}
	for _, d := range ds {
		for len(runs) > 0 && runs[0][0] < d.seq { // what is before it
			add(runs[0][0], min(runs[0][1], d.seq-1), runs[0][2])
			if runs[0][1] >= d.seq {
				runs[0][0] = d.seq
				break
			}
			runs = runs[1:]
		}
		if len(runs) > 0 && runs[0][0] == d.seq { // what it replaces
			if runs[0][0]++; runs[0][0] > runs[0][1] {
				runs = runs[1:]
			}
		}
		if len(all)+len(runs) >= maxSparedRuns {
			left = append(left, d)
			continue
		}
		add(d.seq, d.seq, uint64(d.spared+1)) //nolint:gosec // it is no less than 0
	}
	for _, run := range runs {
		add(run[0], run[1], run[2])
	}
	return all, left
}

// sparedLook are the questions for the entry about many. One is under way at a time: its answer is
// for those who waited when it was asked.
type sparedLook struct {
	waiting []func(native.SparedRuns, error) // bounded by what is held
	busy    bool
}

// readSpared reads the entry about many events of the group, as it is now or later, and calls then.
// It does not block.
func (g *group) readSpared(l *conn.Link, then func(native.SparedRuns, error)) {
	g.mu.Lock()
	g.looking.waiting = append(g.looking.waiting, then)
	first := !g.looking.busy
	g.looking.busy = true
	g.mu.Unlock()
	if first {
		g.lookForSpared(l)
	}
}

func (g *group) lookForSpared(l *conn.Link) {
	g.mu.Lock()
	waiting := g.looking.waiting
	g.looking.waiting, g.looking.busy = nil, len(waiting) > 0
	g.mu.Unlock()
	if len(waiting) == 0 {
		return
	}
	g.bus.records.AskNote(l, g.sparedSubject(), func(value []byte, err error) {
		var runs native.SparedRuns
		if err == nil && len(value) > 0 {
			_ = json.Unmarshal(value, &runs) // what cannot be read says nothing
		}
		for _, then := range waiting {
			then(runs, err)
		}
		g.lookForSpared(l)
	})
}
