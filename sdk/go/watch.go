package eventhub

import (
	"context"
	"fmt"
	"time"
)

// Change is a key of a watched topic that has a new value, or was removed.
type Change struct {
	// Event is the newest event of the key. It has only Topic and Key when the key was found to be
	// gone, after changes were missed.
	Event

	// Deleted reports that the key was removed.
	Deleted bool
}

// WatchHandler handles a change. Changes of a key come in order, and one change at a time. A panic
// is recovered, and goes to Options.OnError as a *PanicError. ctx ends with the watch.
type WatchHandler func(ctx context.Context, c *Change)

// WatchOptions configure a watch. Zero fields take the defaults.
type WatchOptions struct {
	// MaxKeys is the most keys that the topic may have. One more ends the watch with
	// CodeBufferFull. Defaults to 100,000.
	MaxKeys int
	// MinInterval is the least time between two moments in which the hub sends changes, at most a
	// minute.
	MinInterval time.Duration
	// OnCurrent, if not nil, is told when the handler was given the present state, at the beginning
	// and after each reset. OnReset, if not nil, is told that changes were missed, and that the
	// state comes again. Both are called on the goroutine of the handler.
	OnCurrent func()
	OnReset   func(Reset)
}

// Watch gives the present value of each key of a compacted topic to handler, and then each change,
// until ctx ends or until Unsubscribe of the Broadcast. It returns when the hub has accepted it.
//
// A watch is a broadcast with a snapshot. When changes were missed, after a reconnect or because
// the client was slow, it takes a new snapshot: the handler is given all values again, and a Change
// with Deleted for each key that has gone. If a key changes faster than the handler is, the handler
// gets the newest value only. For that, a watch keeps all keys, and events without a key are left
// out.
func (c *Client) Watch(ctx context.Context, topic string, opts WatchOptions, handler WatchHandler) (*Broadcast, error) {
	keys := opts.MaxKeys
	if keys == 0 {
		keys = DefaultMaxKeys
	}
	return c.broadcast(ctx, topic, BroadcastOptions{
		Snapshot: true, Slow: SlowSkip, ConflateByKey: true, MinInterval: opts.MinInterval,
		QueueEvents: min(keys, maxQueueEvents), QueueBytes: maxSnapshotBytes, MaxKeys: keys,
	}, nil, &watch{opts: opts, max: keys, handler: handler, keys: make(map[string]struct{})})
}

// watch is the state of a watch. The goroutine of the handler owns it.
type watch struct {
	opts    WatchOptions
	max     int
	handler WatchHandler
	keys    map[string]struct{} // that the handler knows
	fresh   map[string]struct{} // of the snapshot that comes, after a reset; nil otherwise
}

func (w *watch) handle(b *Broadcast, item *castItem) {
	switch item.kind {
	case castEvent:
		w.event(b, item.event)
	case castReset:
		w.fresh = make(map[string]struct{})
		if w.opts.OnReset != nil {
			w.opts.OnReset(item.reset)
		}
	case castSnapshot:
		w.current(b)
	case castGap, castPresence: // a watch takes a snapshot instead, and has no presence
	}
}

func (w *watch) event(b *Broadcast, e *BroadcastEvent) {
	if e.Key == "" {
		return
	}
	if e.Tombstone {
		if _, known := w.keys[e.Key]; !known {
			return
		}
		delete(w.keys, e.Key)
	} else {
		if w.fresh != nil {
			w.fresh[e.Key] = struct{}{}
		}
		if w.keys[e.Key] = struct{}{}; len(w.keys) > w.max && (w.fresh == nil || len(w.fresh) > w.max) {
			b.mu.Lock()
			b.fail(newError(CodeBufferFull, fmt.Sprintf("%s has more than %d keys; raise MaxKeys", b.topic, w.max), nil))
			b.mu.Unlock()
			return
		}
	}
	w.handler(b.ctx, &Change{Event: e.Event, Deleted: e.Tombstone})
}

// current tells the handler which keys are gone, at the end of a snapshot.
func (w *watch) current(b *Broadcast) {
	fresh := w.fresh
	w.fresh = nil
	if fresh != nil {
		for key := range w.keys {
			if _, there := fresh[key]; there {
				continue
			}
			if b.ctx.Err() != nil {
				return
			}
			delete(w.keys, key)
			w.gone(b, key)
		}
	}
	if w.opts.OnCurrent != nil {
		w.opts.OnCurrent()
	}
}

// gone hands on that a key is gone. A panic of the handler must not keep the others back.
func (w *watch) gone(b *Broadcast, key string) {
	defer b.recovered("")
	w.handler(b.ctx, &Change{Event: Event{Topic: b.topic, Key: key}, Deleted: true})
}
