package jetstream

import (
	"context"
	"sync"

	"eventhub/jetstream/panics"
)

// workers run the handlers of Consume.
type workers struct {
	wg    sync.WaitGroup
	mu    sync.Mutex
	work  sync.Cond
	queue []*Held // bounded: by what can be out, and compacted of what has ended
	limit int
	ended bool
}

// push never waits: a delivery must be stamped when it arrives, not when a handler has time.
func (w *workers) push(h *Held) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) >= w.limit {
		kept := w.queue[:0]
		for _, h := range w.queue {
			if h.Valid() {
				kept = append(kept, h)
			}
		}
		clear(w.queue[len(kept):])
		w.queue = kept
	}
	w.queue = append(w.queue, h)
	w.work.Signal()
}

// pop returns nil at the end.
func (w *workers) pop() *Held {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) == 0 && !w.ended {
		w.work.Wait()
	}
	if w.ended {
		return nil
	}
	h := w.queue[0]
	w.queue[0] = nil
	w.queue = w.queue[1:]
	return h
}

// stop waits for the handlers that run.
func (w *workers) stop() {
	w.mu.Lock()
	w.ended = true
	w.work.Broadcast()
	w.mu.Unlock()
	w.wg.Wait()
}

// Consume creates the group if it does not exist, joins it, and runs handler for each event,
// opts.Workers at a time (default 1). Events arrive at once, perhaps before Consume returns; with
// opts.Paused, they wait for Resume.
//
// Consume acknowledges the event when handler returns nil. When handler returns an error, Consume
// refuses the event (Nack with the error's text and DefaultBackoff). The event is then redelivered,
// or goes to dlq.<topic> if the attempt was the last one (opts.MaxAttempts). A panic counts as an
// error: the log has the stack, and the reason only says that the handler panicked. A handler may
// also settle the delivery itself. The context of the handler ends with the lease or the
// subscription, whichever ends first.
//
// Drain lets running handlers finish; Stop gives their events back at once. Both wait for the
// handlers, so a handler must not call either of them. Errors are those of Subscribe.
func (b *Bus) Consume(ctx context.Context, topic, group string, opts SubscribeOptions, handler func(context.Context, *Delivery) error) (*Subscription, error) {
	if handler == nil {
		return nil, badOptions("the handler is missing")
	}
	if err := opts.validate(); err != nil {
		return nil, err
	}
	w := &workers{limit: opts.MaxInFlight + len(opts.Topics) + 1}
	w.work.L = &w.mu
	for range max(opts.Workers, 1) {
		w.wg.Go(func() { //nolint:contextcheck // a handler's context ends with the subscription, and not with ctx
			for h := w.pop(); h != nil; h = w.pop() {
				h.run(handler)
			}
		})
	}
	s, err := b.subscribe(ctx, topic, group, opts, w.push, w)
	if err != nil {
		w.stop()
		return nil, err
	}
	return s, nil
}

// run gives the event to handler and settles it by the outcome.
func (h *Held) run(handler func(context.Context, *Delivery) error) {
	s := h.m.sub
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.mu.Lock()
	h.cancel = cancel
	s.mu.Unlock()
	d, ok := h.Begin()
	if !ok {
		return
	}
	err := panics.Call(d.m.sub.bus.log, "handler", func() error { return handler(ctx, d) })
	// ErrNotLeased means that the handler settled it, or that it comes again anyway.
	if err != nil {
		_ = d.Nack(err.Error(), DefaultBackoff)
	} else {
		_ = d.Ack()
	}
}
