package eventhub

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"
	"unicode/utf8"

	"eventhub/sdk/go/wire"
)

const (
	// ackBatch is how many acknowledgements one frame carries at most.
	ackBatch = 1_000
	// maxHandled is how many handled events are remembered whose acknowledgement may be lost.
	maxHandled = 20_000
	// maxReason is the longest reason, in bytes, that is sent to the hub.
	maxReason = 300
)

var (
	errLeaseLost = errors.New("eventhub: the lease has ended")
	errGoexit    = errors.New("the handler ended its goroutine")
)

// PanicError is what Options.OnError receives when a handler panicked. Its event was refused; that
// of a broadcast, which has no Group, counts as handled.
type PanicError struct {
	Topic, Group, ID string
	Value            any
	Stack            []byte
}

// Error returns the value with which the handler panicked.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// key names an event within the subscription.
func (s *Subscription) key(e *Event) string {
	if len(s.opts.Topics) > 0 {
		return e.Topic + "/" + e.ID
	}
	return e.ID
}

// deliver takes an event from the connection.
func (s *Subscription) deliver(generation uint64, raw wire.Event) {
	d := newDelivery(s, raw)
	key := s.key(&d.Event)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over || s.draining || s.generation != generation {
		return // UNSUBSCRIBE, or the end of the connection, gives the event back
	}
	if held := s.held[key]; held != nil {
		if held.phase != open {
			// Its handler still runs, and is not started beside itself: what becomes of it settles
			// this delivery, too.
			if held.acked {
				s.acknowledge(d) // the acknowledgement was late, or lost
			} else {
				held.again = d
			}
			return
		}
		held.lose() // nobody settled it in time
		delete(s.held, key)
	}
	if attempt, ok := s.handled.take(key); ok && d.Attempt > attempt {
		s.acknowledge(d) // the acknowledgement was lost with its connection
		return
	}
	s.hold(key, d)
}

// hold takes a delivery into the queue for a handler. mu is held.
func (s *Subscription) hold(key string, d *Delivery) {
	now := time.Now()
	d.due = now.Add(d.Deadline.Sub(now) / 2)
	d.until = now.Add(s.opts.MaxLease)
	s.held[key] = d
	s.queue = append(s.queue, d)
	s.start()
}

// start starts handlers for what waits. mu is held.
func (s *Subscription) start() {
	// One goroutine more handles an event after the other until none waits.
	if !s.over && !s.paused && len(s.queue) > 0 && s.active < s.opts.Concurrency {
		s.active++
		s.client.work.Go(s.work)
	}
}

// work handles events until none waits.
func (s *Subscription) work() {
	defer func() { // a handler may end its goroutine
		s.mu.Lock()
		s.active--
		s.start()
		s.tellQuiet()
		s.mu.Unlock()
	}()
	for {
		s.mu.Lock()
		if s.paused || s.over || len(s.queue) == 0 {
			s.mu.Unlock()
			return
		}
		d := s.queue[0]
		s.queue[0] = nil
		s.queue = s.queue[1:]
		if len(s.queue) == 0 {
			s.queue = nil
		} else {
			s.start() // one more, while there is room for more
		}
		d.phase = running
		ctx, cancel := context.WithCancelCause(s.ctx)
		d.cancel = cancel
		s.mu.Unlock()
		s.handle(ctx, d)
	}
}

// handle runs the handler and settles its event.
func (s *Subscription) handle(ctx context.Context, d *Delivery) {
	err := errGoexit
	var panicked *PanicError
	defer func() {
		s.finished(d, err)
		if panicked != nil {
			s.client.report(panicked)
		}
	}()
	func() {
		defer func() {
			if value := recover(); value != nil {
				panicked = &PanicError{Topic: d.Topic, Group: d.Group, ID: d.ID, Value: value, Stack: debug.Stack()}
				err = panicked
			}
		}()
		err = s.handler(ctx, d)
	}()
}

// finished settles the event of a handler that is done.
func (s *Subscription) finished(d *Delivery, err error) {
	if err != nil {
		s.nack(d, err.Error(), DefaultBackoff)
	} else if !s.opts.Manual {
		s.ack(d)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.until = time.Time{} // the lease is prolonged no more
	if d.settled || d.lost || s.over {
		s.letGo(d)
		return
	}
	d.phase = open // until the user settles it
}

// letGo forgets a delivery that is over. What came after it was refused is handled now. mu is held.
func (s *Subscription) letGo(d *Delivery) {
	if d.cancel != nil {
		d.cancel(context.Canceled)
	}
	key := s.key(&d.Event)
	if s.held[key] != d {
		return
	}
	delete(s.held, key)
	if again := d.again; again != nil && !again.settled && !s.over && !s.draining {
		s.hold(key, again)
	}
	s.tellQuiet()
}

func (s *Subscription) ack(d *Delivery) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.settled {
		return false
	}
	d.settled, d.acked = true, true
	again := d.again
	if again != nil {
		again.settled = true
	}
	if d.phase != running { // else a second handler could start beside the first
		s.letGo(d)
	}
	switch {
	case !d.lost:
		s.acknowledge(d)
	case again != nil:
		s.acknowledge(again)
	case !s.over:
		s.handled.add(s.key(&d.Event), d.Attempt) // it comes again, and is acknowledged then
	}
	return !d.lost || again != nil
}

func (s *Subscription) nack(d *Delivery, reason string, delay time.Duration) bool {
	s.mu.Lock()
	if d.settled {
		s.mu.Unlock()
		return false
	}
	d.settled = true
	current := d
	if d.lost {
		current = d.again
	}
	if d.again != nil {
		d.again.settled = true
	}
	if d.phase != running {
		s.letGo(d)
	}
	s.mu.Unlock()
	if current == nil {
		return false
	}
	return current.raw.NackAsync(shorten(reason), delay, ignore) == nil
}

// shorten cuts a reason at the end of a character.
func shorten(reason string) string {
	if len(reason) <= maxReason {
		return reason
	}
	end := maxReason
	for !utf8.RuneStart(reason[end]) {
		end--
	}
	return reason[:end]
}

func (s *Subscription) extend(d *Delivery, by time.Duration) bool {
	now := time.Now()
	s.mu.Lock()
	if d.settled || d.lost {
		s.mu.Unlock()
		return false
	}
	d.due = now.Add(by / 2)
	d.ends = now.Add(max(by, minLease))
	s.mu.Unlock()
	return s.modAck(d, d, by)
}

// modAck prolongs the lease of current, which is that of held or of the same event delivered anew.
func (s *Subscription) modAck(held, current *Delivery, by time.Duration) bool {
	return current.raw.ModAckAsync(by, func(err error) {
		if err == nil || lost(err) || fromWire(err).Code != "unknown_id" {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if current.settled {
			return
		}
		current.lose()
		if current != held && held.again == current {
			held.again = nil
		}
	}) == nil
}

// prolong prolongs the leases that are due, and forgets open deliveries whose lease has ended.
func (s *Subscription) prolong(now time.Time) {
	type lease struct{ held, current *Delivery }
	var due []lease
	s.mu.Lock()
	for key, held := range s.held {
		current := held
		if held.lost {
			current = held.again
		}
		switch {
		case held.phase == open:
			if now.After(held.ends) {
				held.lose()
				delete(s.held, key)
				s.tellQuiet()
			}
		case current != nil && now.Before(held.until) && !now.Before(held.due):
			held.due = now.Add(s.opts.AckTimeout / 2)
			current.ends = now.Add(s.opts.AckTimeout)
			due = append(due, lease{held, current})
		}
	}
	s.mu.Unlock()
	for _, l := range due {
		s.modAck(l.held, l.current, s.opts.AckTimeout)
	}
}

// acknowledge sends an acknowledgement together with others. mu is held.
func (s *Subscription) acknowledge(d *Delivery) {
	d.settled = true
	s.acks = append(s.acks, d)
	if !s.flushing {
		s.flushing = true
		s.client.work.Go(func() {
			for {
				runtime.Gosched() // handlers that are about to end join this frame
				if !s.flush() {
					return
				}
			}
		})
	}
}

// flush sends the acknowledgements that wait, in one frame, and reports whether there were any.
func (s *Subscription) flush() bool {
	s.acking.Lock()
	defer s.acking.Unlock()
	s.mu.Lock()
	n := min(len(s.acks), ackBatch)
	if n == 0 {
		s.flushing = false
		s.mu.Unlock()
		return false
	}
	acks, member := s.acks[:n:n], s.member
	if s.acks = s.acks[n:]; len(s.acks) == 0 {
		s.acks = nil
	}
	s.asked++
	s.mu.Unlock()
	ids := make([]string, n)
	for i, d := range acks {
		ids[i] = d.ID
	}
	answered := func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.asked--
		if err != nil && !s.over {
			for _, d := range acks {
				s.handled.add(s.key(&d.Event), d.Attempt)
			}
		}
		s.tellQuiet()
	}
	if member == nil {
		answered(errLeaseLost)
	} else if err := member.AckManyAsync(ids, answered); err != nil {
		answered(err)
	}
	return true
}

// handled remembers events that were handled, and whose acknowledgement the hub may not have, with
// the attempt. The oldest entries make room for new ones.
type handled struct {
	attempts map[string]int
	order    []string // oldest first; may name keys that were taken
}

func (h *handled) add(key string, attempt int) {
	if h.attempts == nil {
		h.attempts = make(map[string]int)
	}
	if _, ok := h.attempts[key]; !ok {
		h.order = append(h.order, key)
	}
	h.attempts[key] = attempt
	for len(h.order) > maxHandled {
		delete(h.attempts, h.order[0])
		h.order = h.order[1:]
	}
}

func (h *handled) take(key string) (attempt int, ok bool) {
	if len(h.attempts) == 0 {
		return 0, false
	}
	attempt, ok = h.attempts[key]
	delete(h.attempts, key)
	if len(h.attempts) == 0 {
		h.order = nil
	}
	return attempt, ok
}
