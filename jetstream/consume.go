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
	queue []*Delivery // bounded: by what can be out, and compacted of what has ended
	limit int
	ended bool
}

// push never waits: a delivery must be stamped when it arrives, not when a handler has time.
func (w *workers) push(d *Delivery) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) >= w.limit {
		kept := w.queue[:0]
		for _, d := range w.queue {
			if d.Held() {
				kept = append(kept, d)
			}
		}
		clear(w.queue[len(kept):])
		w.queue = kept
	}
	w.queue = append(w.queue, d)
	w.work.Signal()
}

// pop returns nil at the end.
func (w *workers) pop() *Delivery {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) == 0 && !w.ended {
		w.work.Wait()
	}
	if w.ended {
		return nil
	}
	d := w.queue[0]
	w.queue[0] = nil
	w.queue = w.queue[1:]
	return d
}

// stop waits for the handlers that run.
func (w *workers) stop() {
	w.mu.Lock()
	w.ended = true
	w.work.Broadcast()
	w.mu.Unlock()
	w.wg.Wait()
}

// Consume subscribes and runs handler for each event, up to the given number at a time (at least 1), after Start. The
// event is acknowledged when handler returns nil, and refused (Nack with the error's text) when it returns an error; a
// handler may also settle the delivery itself. A panic counts as an error: the log has its stack, and the text only says that
// the handler panicked. handler's context ends when the lease does.
// Stop waits for the handlers that run. Errors are those of Subscribe.
func (b *Bus) Consume(ctx context.Context, topic, group string, opts SubscribeOptions, parallel int, handler func(context.Context, *Delivery) error) (*Subscription, error) {
	if err := opts.prepare(); err != nil {
		return nil, err
	}
	w := &workers{limit: opts.MaxInFlight + len(opts.Topics) + 1}
	w.work.L = &w.mu
	s, err := b.Subscribe(ctx, topic, group, opts, w.push)
	if err != nil {
		return nil, err
	}
	s.workers = w
	for range max(parallel, 1) {
		w.wg.Go(func() {
			for d := w.pop(); d != nil; d = w.pop() {
				d.run(s.ctx, handler)
			}
		})
	}
	return s, nil
}

// run gives the delivery to handler and settles it by the outcome.
func (d *Delivery) run(ctx context.Context, handler func(context.Context, *Delivery) error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d.m.sub.mu.Lock()
	d.cancel = cancel
	d.m.sub.mu.Unlock()
	if !d.Begin() {
		return
	}
	err := panics.Call(d.m.sub.bus.log, "handler", func() error { return handler(ctx, d) })
	// ErrNotLeased means that the handler settled it, or that it comes again anyway.
	if err != nil {
		_ = d.Nack(err.Error(), -1)
	} else {
		_ = d.Ack()
	}
}
