package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"eventhub/jetstream/ordered"
)

// look looks at what only time changes.
func (w *owner) look() broken {
	now := w.bus.clock.now()
	w.o.mu.Lock()
	guests := make([]*guest, 0, len(w.guests))
	for _, g := range w.guests {
		guests = append(guests, g)
	}
	events, awaited := w.locks.Len(), w.locks.Awaited()
	key, most := "", 0
	if events >= w.bus.limits.OrderedWindow {
		key, most = w.locks.Longest()
	}
	w.o.mu.Unlock()
	for _, g := range guests {
		g.look(now)
	}
	if most > w.bus.limits.OrderedWindow/2 {
		w.bus.obs.LimitReached("ordered_window")
		if now > w.hotAt {
			w.hotAt = now + int64(hotLogEvery)
			w.bus.log.Warn("one key fills the window of an ordered group: other keys wait", slog.String("topic", w.group.topic.name), slog.String("group", w.group.name), slog.Int("events", most))
			w.bus.log.Debug("the key that fills the window", slog.String("group", w.group.name), slog.String("key", key))
		}
	}
	if awaited > 0 && !w.gathering {
		w.missed(now)
	}
	if now-w.written > int64(ownersAge)/4 {
		w.written = now
		return w.rewrite()
	}
	return brokenNot
}

// rewrite keeps the entry of the group from ageing.
func (w *owner) rewrite() broken {
	ctx, cancel := context.WithTimeout(w.bus.ctx, settleWait)
	defer cancel()
	e, err := w.bus.owners.write(ctx, w.o.key, w.entry)
	switch {
	case err == nil:
		w.entry = e
	case errors.Is(err, errGroupMoved):
		return brokenLost
	}
	return brokenNot
}

// missEvery is how often the owner looks for events that do not arrive again, and missBatch how
// many it asks about each time.
const (
	missEvery = 5 * time.Second
	missBatch = 16
)

// missed looks for events that are to arrive again and never will, because they were removed from
// the stream, or settled by somebody else: they must not keep their keys for ever.
func (w *owner) missed(now int64) {
	if now < w.missAt {
		return
	}
	w.missAt = now + int64(missEvery)
	awaited := make(map[uint64]*ordered.Item[*Delivery])
	w.o.mu.Lock()
	w.locks.Each(func(i *ordered.Item[*Delivery]) {
		if i.Body == nil {
			awaited[i.Pos()] = i
		}
	})
	w.o.mu.Unlock()
	for pos := range w.overdue {
		if awaited[pos] == nil {
			delete(w.overdue, pos)
		}
	}
	var late []uint64
	for pos := range awaited {
		since, known := w.overdue[pos]
		if !known {
			w.overdue[pos] = now
		} else if now-since > int64(missEvery) && len(late) < missBatch {
			late = append(late, pos)
		}
	}
	if len(late) == 0 || w.group.letters.Load() > 0 {
		return // some may wait for their dead letters
	}
	ctx, cancel := context.WithTimeout(w.bus.ctx, settleWait)
	defer cancel()
	info, err := w.bus.consumer(ctx, w.group.topic, w.group.consumer)
	if err != nil {
		return
	}
	for _, pos := range late {
		stream, seq := putBackStream, pos
		if pos&mainPlace != 0 {
			stream, seq = w.group.topic.stream.name, pos&^mainPlace
		}
		settled := pos&mainPlace != 0 && info.AckFloor.Stream >= seq
		if !settled {
			_, err := w.bus.getMsg(ctx, stream, map[string]any{"seq": seq})
			settled = errors.Is(err, ErrNotFound)
		}
		if !settled {
			continue
		}
		w.o.mu.Lock()
		if i := awaited[pos]; w.locks.Find(pos) == i && i.Body == nil {
			w.locks.Settle(i)
		}
		w.waited.Store(int64(w.locks.Awaited()))
		w.o.mu.Unlock()
	}
}
