package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"eventhub/jetstream/event"
	"eventhub/jetstream/panics"
)

// workers run the handlers of Consume.
type workers struct {
	log   *slog.Logger // of panics
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

// serve runs handler until the end. A handler that ends its goroutine (runtime.Goexit, as the
// FailNow of a test does) ends serve too, and then another goroutine takes over.
func (w *workers) serve(handler func(context.Context, *Delivery) error) {
	ended := false
	defer func() {
		if !ended {
			w.wg.Go(func() { w.serve(handler) })
		}
	}()
	for h := w.pop(); h != nil; h = w.pop() {
		h.run(w.log, handler)
	}
	ended = true
}

// errGoexit is the outcome of a handler that ended its goroutine.
var errGoexit = errors.New("handler ended its goroutine")

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
// The event is acknowledged when handler returns nil. When handler returns an error, the event is
// refused (Nack with the error's text and DefaultBackoff): it comes again, and goes to dlq.<topic>
// when its attempt was the last one (opts.MaxAttempts). A panic counts as an error: the log has its
// stack, and the text only says that the handler panicked. So does runtime.Goexit, which the
// FailNow of a test calls. A handler may also settle the delivery itself. Its context ends when the
// lease does, or the subscription.
//
// Drain lets the handlers that run finish; Stop gives their events back at once. Both wait for the
// handlers, so neither may be called by one. Errors are those of Subscribe.
//
// The end of ctx ends Consume, and not the subscription. A new group starts at the end of the
// topic, and has nothing of what was published before, unless opts.From says otherwise.
func (b *Bus) Consume(ctx context.Context, topic, group string, opts SubscribeOptions, handler func(context.Context, *Delivery) error) (*Subscription, error) {
	if handler == nil {
		return nil, event.BadOptions("the handler is missing")
	}
	if err := opts.validate(); err != nil {
		return nil, err
	}
	log := b.often.By("topic", "group", "func").With(slog.String("topic", topic), slog.String("group", group))
	w := &workers{limit: opts.MaxInFlight + len(opts.Topics) + 1, log: log}
	w.work.L = &w.mu
	for range max(opts.Workers, 1) {
		w.wg.Go(func() { w.serve(handler) }) //nolint:contextcheck // a handler's context ends with the subscription, and not with ctx
	}
	s, err := b.subscribe(ctx, topic, group, opts, w.push, w)
	if err != nil {
		w.stop()
		return nil, err
	}
	return s, nil
}

// run gives the event to handler and settles it by the outcome.
func (h *Held) run(log *slog.Logger, handler func(context.Context, *Delivery) error) {
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
	err := errGoexit
	defer func() {
		// ErrNotLeased means that the handler settled it, or that it comes again anyway.
		if err != nil {
			_ = d.Nack(err.Error(), DefaultBackoff)
		} else {
			_ = d.Ack()
		}
	}()
	ctx = d.Context(ctx)
	err = panics.Call(log, "handler", func() error { return handler(ctx, d) })
}
