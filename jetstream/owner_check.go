package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/ordered"
)

// look looks at what only time changes.
func (w *owner) look() broken {
	now := w.bus.clock.Now()
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
		w.bus.often.Log(w.bus.conn.Ctx, slog.LevelWarn, "one key fills the window of an ordered group: other keys wait", w.group.source(), slog.String("topic", w.group.topic.Name), slog.String("group", w.group.name), slog.Int("events", most))
		w.bus.often.Log(w.bus.conn.Ctx, slog.LevelDebug, "the key that fills the window", w.group.source(), slog.String("group", w.group.name), slog.String("key", key))
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
	ctx, cancel := context.WithTimeout(w.bus.conn.Ctx, settleWait)
	defer cancel()
	e, err := w.bus.owners.write(ctx, w.o.key, w.entry)
	switch {
	case err == nil:
		w.entry = e
	case errors.Is(err, records.ErrMoved):
		return brokenLost
	}
	return brokenNot
}

// missEvery is how often the owner looks for events that do not arrive again, and missBatch how
// many it asks about each time, beside those that the ends of the stream and of the group tell of.
const (
	missEvery = 5 * time.Second
	missBatch = 256
)

// missed looks for events that are to arrive again and never will, because they were removed from
// the stream, or settled by somebody else: they must not keep their keys for ever.
func (w *owner) missed(now int64) {
	if now < w.missAt {
		return
	}
	w.missAt = now + int64(missEvery)
	late := w.late(now)
	if len(late) == 0 || w.group.letters.Load() > 0 {
		return // some may wait for their dead letters
	}
	ctx, cancel := context.WithTimeout(w.bus.conn.Ctx, settleWait)
	defer cancel()
	info, err := w.bus.records.Consumer(ctx, w.group.topic, w.group.consumer)
	if err != nil {
		return
	}
	stream, err := w.bus.conn.FindStream(ctx, w.group.topic.Stream.Name)
	if err != nil {
		return
	}
	over := make([]bool, len(late))
	var ask []int
	for i, item := range late {
		seq := item.Pos() &^ mainPlace
		over[i] = item.Pos()&mainPlace != 0 && (seq <= info.AckFloor.Stream || seq < stream.State.FirstSeq)
		if !over[i] && len(ask) < missBatch {
			ask = append(ask, i)
		}
	}
	_ = concurrently(len(ask), func(n int) error {
		pos := late[ask[n]].Pos()
		name := putBackStream
		if pos&mainPlace != 0 {
			name = w.group.topic.Stream.Name
		}
		_, err := w.bus.conn.GetMsg(ctx, name, map[string]any{"seq": pos &^ mainPlace})
		over[ask[n]] = errors.Is(err, event.ErrNotFound)
		return nil
	})
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	for i, item := range late {
		if over[i] && w.locks.Find(item.Pos()) == item && item.Body == nil {
			w.locks.Settle(item)
		}
	}
	w.waited.Store(int64(w.locks.Awaited()))
}

// late returns events that have been missed for longer than missEvery.
func (w *owner) late(now int64) (late []*ordered.Item[*Delivery]) {
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
	for pos, item := range awaited {
		if since, known := w.overdue[pos]; !known {
			w.overdue[pos] = now
		} else if now-since >= int64(missEvery) {
			late = append(late, item)
		}
	}
	return late
}
