package projections

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// MirrorConfig configures a Mirror.
type MirrorConfig struct {
	// Bus is the source of the events. Required.
	Bus Bus
	// Topic is the compacted topic to mirror. Required.
	Topic string
	// Snapshot is the topic with snapshots of Topic; see Compactor. Snapshots of a Compactor with
	// KeySource or BatchKeys are not used. Optional.
	Snapshot string
	// MaxKeys ("mirror_keys") is the maximum number of keys held in memory. Further keys are read
	// from the bus at every access. Defaults to 1,000,000.
	MaxKeys int
	// Changed, if not nil, receives each event that becomes the newest of its key, including
	// tombstones. It must not call the Mirror. A panic of Changed is logged and otherwise ignored.
	Changed func(*jetstream.Event)
	// Observer is notified when MaxKeys is reached. Optional.
	Observer Observer
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger
}

// Mirror holds the newest event of each key of a compacted topic in memory. It starts with the
// snapshots, continues with the topic from the position where they end, and then follows the topic.
// A key never reverts to an older event. The methods of Mirror may be called concurrently.
type Mirror struct {
	cfg   MirrorConfig
	ready chan struct{} // closed when the mirror is current for the first time
	once  sync.Once

	mu       sync.RWMutex
	held     map[string]*jetstream.Event
	overflow bool // some keys are, or were, not held
}

// NewMirror returns an empty Mirror. Run fills it.
func NewMirror(cfg MirrorConfig) *Mirror {
	if cfg.MaxKeys <= 0 {
		cfg.MaxKeys = 1_000_000
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Observer = guardObserver(cfg.Observer, cfg.Logger)
	return &Mirror{cfg: cfg, ready: make(chan struct{}), held: make(map[string]*jetstream.Event)}
}

// Ready returns a channel that is closed once the mirror contains everything that was stored when
// Run began.
func (m *Mirror) Ready() <-chan struct{} { return m.ready }

// Run fills the mirror and follows the topic until ctx ends, then returns nil. Failures of the bus
// are logged and retried. Run returns an error only if the topic cannot be mirrored or the bus is
// closed. It may be called only once.
func (m *Mirror) Run(ctx context.Context) error {
	var from snapshotPosition
	if m.cfg.Snapshot != "" {
		err := insist(ctx, m.cfg.Logger, "read the snapshots", func(ctx context.Context) (err error) {
			from, err = eachSnapshot(ctx, m.cfg.Bus, m.cfg.Topic, m.cfg.Snapshot, func(e *jetstream.Event) error {
				m.see(e)
				return nil
			})
			return err
		})
		if errors.Is(err, errPartial) {
			m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "snapshots do not cover the whole topic; reading its bucket", slog.String("topic", m.cfg.Topic))
		} else if err != nil {
			return m.end(ctx, err)
		}
	}
	return m.end(ctx, insist(ctx, m.cfg.Logger, "follow the topic", func(ctx context.Context) error {
		return m.follow(ctx, &from)
	}))
}

func (m *Mirror) end(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end of ctx is a normal stop
	}
	return err
}

// follow follows the topic from the given position and advances the position. Events that the topic
// has dropped are read from its bucket.
func (m *Mirror) follow(ctx context.Context, from *snapshotPosition) error {
	for {
		if from.Stream != "" {
			err := m.tail(ctx, from)
			if !errors.Is(err, jetstream.ErrDropped) && !errors.Is(err, jetstream.ErrNotFound) {
				return err
			}
		}
		var err error
		switch *from, err = m.readBucket(ctx); {
		case errors.Is(err, jetstream.ErrNotFound):
			// Watch creates a topic that does not exist
			return m.cfg.Bus.Keys(m.cfg.Topic).Watch(ctx, nil, m.take)
		case err != nil:
			return err
		case from.Stream == "":
			if err := m.tail(ctx, from); !errors.Is(err, jetstream.ErrDropped) {
				return err
			}
		}
	}
}

func (m *Mirror) tail(ctx context.Context, from *snapshotPosition) error {
	return m.cfg.Bus.History(m.cfg.Topic).Tail(ctx, from.Stream, from.Sequence, func(e *jetstream.Event) error {
		if e != nil {
			from.Stream, from.Sequence = e.Stream, e.Sequence
		}
		return m.take(e)
	})
}

func (m *Mirror) take(e *jetstream.Event) error {
	if e == nil {
		m.once.Do(func() { close(m.ready) })
		return nil
	}
	m.see(e)
	return nil
}

// readBucket applies the topic's bucket to the mirror and returns the position where the bucket
// ends. The bucket lags behind the topic, but by less than the topic retains.
func (m *Mirror) readBucket(ctx context.Context) (snapshotPosition, error) {
	missing := m.living()
	to, err := eachInBucket(ctx, m.cfg.Bus, m.cfg.Topic, func(e *jetstream.Event) error {
		if old := missing[e.Key]; old != nil && old.Stream == e.Stream && old.Sequence > e.Sequence {
			return nil // the bucket is being refilled, or the topic was recreated: checked below
		}
		delete(missing, e.Key)
		m.see(e)
		return nil
	})
	if err != nil {
		return snapshotPosition{}, err
	}
	for key, old := range missing {
		e, err := m.cfg.Bus.Keys(m.cfg.Topic).Get(ctx, key)
		switch {
		case errors.Is(err, jetstream.ErrNotFound): // removed, and its tombstone has expired
			m.forget(old)
		case err != nil:
			return snapshotPosition{}, err
		default:
			m.see(e)
		}
	}
	return to, nil
}

// living returns the held events that are not tombstones.
func (m *Mirror) living() map[string]*jetstream.Event {
	m.mu.RLock()
	defer m.mu.RUnlock()
	living := make(map[string]*jetstream.Event, len(m.held))
	for key, e := range m.held {
		if !e.Tombstone {
			living[key] = e
		}
	}
	return living
}

// forget removes the key of old, unless the key has a newer event by now.
func (m *Mirror) forget(old *jetstream.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held[old.Key] != old {
		return
	}
	delete(m.held, old.Key)
	m.changed(&jetstream.Event{Topic: old.Topic, Key: old.Key, Tombstone: true, TS: old.TS, Stream: old.Stream, Sequence: old.Sequence, StoredAt: old.StoredAt})
}

// changed calls Changed. The caller holds mu.
func (m *Mirror) changed(e *jetstream.Event) {
	if m.cfg.Changed != nil {
		panics.Run(m.cfg.Logger, "Changed", func() { m.cfg.Changed(e) })
	}
}

// see records an event unless the mirror holds a newer one of its key.
func (m *Mirror) see(e *jetstream.Event) {
	if e.Key == "" {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	old, held := m.held[e.Key]
	if held && old.Stream == e.Stream && old.Sequence >= e.Sequence && e.StoredAt <= old.StoredAt+int64(remadeAfter) {
		return
	}
	if !held && len(m.held) >= m.cfg.MaxKeys {
		if !m.overflow {
			m.overflow = true
			m.cfg.Observer.LimitReached("mirror_keys")
			m.cfg.Logger.Warn("topic has more keys than the mirror can hold", slog.String("topic", m.cfg.Topic), slog.Int("max", m.cfg.MaxKeys))
		}
	} else {
		// Tombstones are held too, so that an older snapshot of the key is not taken for new.
		m.held[e.Key] = e
	}
	m.changed(e)
}

// Get returns the newest known event of a key, or jetstream.ErrNotFound. The event is shared; the
// caller must not modify it.
func (m *Mirror) Get(ctx context.Context, key string) (*jetstream.Event, error) {
	m.mu.RLock()
	e, held := m.held[key]
	overflow := m.overflow
	m.mu.RUnlock()
	if !held && overflow {
		var err error
		if e, err = m.cfg.Bus.Keys(m.cfg.Topic).Get(ctx, key); err != nil {
			return nil, err
		}
	}
	if e == nil || e.Tombstone {
		return nil, jetstream.ErrNotFound
	}
	return e, nil
}

// Len returns the number of held keys, including removed ones.
func (m *Mirror) Len() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.held)
}

// errPartial is returned if the snapshots do not cover all keys, or use keys other than those of
// the events.
var errPartial = &jetstream.Error{
	Code: jetstream.CodeBadOptions, Msg: "snapshots with key_source or batch_keys do not hold the whole state of the topic; leave Snapshot out",
}

// eachSnapshot calls f with each snapshot of a topic, converted back to its source event. It
// returns the snapshot position, which it reads first, so the snapshots cover at least that
// position. A key may occur more than once, with its newest snapshot last.
func eachSnapshot(ctx context.Context, bus Bus, topic, snapshots string, f func(*jetstream.Event) error) (snapshotPosition, error) {
	h, _, _, err := readSnapshotPosition(ctx, bus, topic)
	if err != nil || h.Stream == "" {
		return h, err
	}
	if h.Rule != "" {
		return snapshotPosition{}, errPartial
	}
	return h, eachNewest(ctx, bus, snapshots, func(s *jetstream.Event) error {
		e, ok := readSnapshot(topic, s)
		if !ok {
			return nil
		}
		if s.Headers[headerOmitted] != "" {
			newest, err := bus.Keys(topic).Get(ctx, e.Key)
			if errors.Is(err, jetstream.ErrNotFound) {
				return nil // the key was removed since
			}
			if err != nil {
				return err
			}
			e = newest
		}
		return f(e)
	})
}

// eachNewest calls f with the newest event of each key of a compacted topic, as of the call. Older
// events of a key may precede the newest. Reading the bucket alone would not suffice, because the
// bucket can lag behind the topic.
func eachNewest(ctx context.Context, bus Bus, topic string, f func(*jetstream.Event) error) error {
	for {
		at, err := eachInBucket(ctx, bus, topic, f)
		if errors.Is(err, jetstream.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		err = bus.History(topic).Tail(ctx, at.Stream, at.Sequence, func(e *jetstream.Event) error {
			if e == nil {
				return errFar
			}
			return f(e)
		})
		if errors.Is(err, errFar) {
			return nil
		}
		if !errors.Is(err, jetstream.ErrDropped) {
			return err
		}
	}
}

// eachInBucket calls f with every event in the bucket of a compacted topic, including tombstones.
// It returns the position from which the topic itself contains everything that the bucket lacks, or
// jetstream.ErrNotFound if the topic does not exist.
func eachInBucket(ctx context.Context, bus Bus, topic string, f func(*jetstream.Event) error) (snapshotPosition, error) {
	var to snapshotPosition
	// earlier events are in the bucket, or were removed from it
	first, _, err := bus.History(topic).Bounds(ctx)
	if err != nil {
		return to, err
	}
	_, err = bus.Keys(topic).EachSince(ctx, jetstream.BucketPosition{}, func(e *jetstream.Event) error {
		to.Stream, to.Sequence = e.Stream, e.Sequence
		return f(e)
	})
	if err != nil {
		return snapshotPosition{}, err // no position, because the bucket was not read completely
	}
	to.Sequence = max(to.Sequence, first-1)
	return to, nil
}

// warm applies the snapshots of the topic, unless the group exists already. It returns the position
// at which a new group must start.
func (a *applier) warm(ctx context.Context, group string, from jetstream.Position) (jetstream.Position, error) {
	_, err := a.bus.Group(a.p.Topic, group).Backlog(ctx)
	if !errors.Is(err, jetstream.ErrNotFound) {
		return from, err
	}
	_, last, err := a.bus.History(a.p.Topic).Bounds(ctx)
	if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		return from, err
	}
	if there, _, _, err := readSnapshotPosition(ctx, a.bus, a.p.Topic); err != nil || there.Sequence > last {
		// The snapshots are from a deleted stream, so every event of the new stream is newer.
		return jetstream.FromEarliest, err
	}
	h, err := eachSnapshot(ctx, a.bus, a.p.Topic, a.p.Snapshot, func(e *jetstream.Event) error {
		key := e.Key
		if a.p.Key != nil {
			var kerr error
			if key, _, kerr = a.key(ctx, e, func() {}); ctx.Err() != nil {
				return ctx.Err()
			} else if kerr != nil || key == "" {
				return nil //nolint:nilerr // an event without a key is skipped, as in normal operation
			}
		}
		return a.apply(ctx, key, e, 0, func() {})
	})
	if err != nil || h.Stream == "" {
		return from, err
	}
	return jetstream.FromAfterID(Position{h.Stream, h.Sequence}.String()), nil
}
