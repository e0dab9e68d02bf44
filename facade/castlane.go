package facade

import (
	"context"
	"slices"
	"sync"
)

// laneBytes is how many bytes of events that were cast may wait for the flusher.
const laneBytes = flushSize

// castLane casts events of a connection that take long, in order, beside the flusher, so that
// replies do not wait for them. writer.mu guards the first four fields.
type castLane struct {
	waiting []item // bounded by the credit of subscriptions, and pruned of what was given back
	running bool
	// left counts the events in the lane, and those that were cast and are not written yet. While
	// there are any, further events that may have to be cast go into the lane, too.
	left int
	cast int // bytes of those that were cast

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// mayWrite reports whether an event that may have to be cast can be written now. Else the event was
// dropped, because it cannot be cast, or went into the lane.
func (o *writer) mayWrite(it *item) bool {
	l := &o.lane
	o.mu.Lock()
	defer o.mu.Unlock()
	if it.cast {
		l.leaveLocked(it)
		o.below.Broadcast()
		return true
	}
	tried := l.left == 0
	if tried {
		o.mu.Unlock()
		ok, long := it.held.CastBriefly()
		o.mu.Lock()
		if !long {
			return ok
		}
	}
	if len(l.waiting) == cap(l.waiting) { // before it grows, what was given back goes
		l.waiting = slices.DeleteFunc(l.waiting, func(it item) bool {
			ended := !it.held.Valid()
			if ended {
				l.left--
			}
			return ended
		})
	}
	l.waiting = append(l.waiting, item{held: it.held, sub: it.sub, tried: tried})
	l.left++
	if !l.running {
		l.running = true
		l.wg.Go(o.runLane)
	}
	return false
}

// leaveLocked counts an event that was cast as written or dropped.
func (l *castLane) leaveLocked(it *item) {
	l.left--
	l.cast -= it.size
}

// runLane casts what waits, and queues it.
func (o *writer) runLane() {
	l := &o.lane
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(l.waiting) > 0 && !o.closing {
		it := l.waiting[0]
		l.waiting[0] = item{}
		l.waiting = l.waiting[1:]
		o.mu.Unlock()
		ok, err := false, error(nil)
		switch {
		case !it.held.Valid():
		case it.tried:
			ok, err = it.held.CastSlowly(l.ctx)
		default:
			ok, err = it.held.Cast(l.ctx)
		}
		o.mu.Lock()
		if !ok || err != nil || o.closing {
			l.left--
			continue
		}
		it.cast, it.size = true, itemCost+len(it.held.Event.Payload)
		l.cast += it.size
		o.deliverLocked(it)
		for l.cast >= laneBytes && !o.closing {
			o.below.Wait()
		}
	}
	l.waiting, l.running = nil, false
}
