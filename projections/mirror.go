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
	// Bus is where events come from. Required.
	Bus Bus
	// Topic is a compacted topic. Required.
	Topic string
	// Snapshot, if not "", is the topic of its snapshots (see Compactor). Those with a KeySource or BatchKeys are not used.
	Snapshot string
	// MaxKeys ("mirror_keys") is the most keys that are held: default 1,000,000. Those beyond are read from the bus each
	// time they are asked for.
	MaxKeys int
	// Changed, if not nil, is told of each event that becomes the newest of its key, tombstones included. It must not call
	// the Mirror. A panic is logged, and the Mirror goes on.
	Changed func(*jetstream.Event)
	// Observer is told when MaxKeys is reached. Default: nobody.
	Observer Observer
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
}

// Mirror holds the newest event of each key of a compacted topic in memory: warmed from the snapshots, then brought up to
// date from where they end, and kept so. No key ever goes back in time. Its methods may be called concurrently.
type Mirror struct {
	cfg   MirrorConfig
	ready chan struct{} // closed when it has caught up for the first time
	once  sync.Once

	mu       sync.RWMutex
	held     map[string]*jetstream.Event
	overflow bool // there are, or were, keys that are not held
}

// NewMirror makes a mirror. Run fills it.
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

// Ready is closed once everything that was stored when Run began is in the mirror.
func (m *Mirror) Ready() <-chan struct{} { return m.ready }

// Run fills the mirror and follows the topic until ctx ends; then it returns nil. Failures of the bus are logged and tried
// again; an error is returned only for a topic that cannot be mirrored, or when the bus is closed. Call it once.
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
			m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "the snapshots are not all of the topic; reading its bucket", slog.String("topic", m.cfg.Topic))
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
		return nil //nolint:nilerr // being asked to end is no failure
	}
	return err
}

// follow goes on behind from, which it moves. What the topic has dropped, its bucket has.
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
			return m.cfg.Bus.Keys(m.cfg.Topic).Watch(ctx, nil, m.take) // a new topic: Watch makes it
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

// readBucket brings the mirror up to the topic's bucket, and returns where that ends. It trails behind the topic, by less
// than the topic keeps.
func (m *Mirror) readBucket(ctx context.Context) (snapshotPosition, error) {
	missing := m.living()
	to, err := eachInBucket(ctx, m.cfg.Bus, m.cfg.Topic, func(e *jetstream.Event) error {
		if old := missing[e.Key]; old != nil && old.Stream == e.Stream && old.Sequence > e.Sequence {
			return nil // the bucket is being filled anew, or the topic was made anew: looked at below
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
		case errors.Is(err, jetstream.ErrNotFound): // the tombstone is gone as well
			m.forget(old)
		case err != nil:
			return snapshotPosition{}, err
		default:
			m.see(e)
		}
	}
	return to, nil
}

// living are the events that are held and no tombstones.
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

// forget removes the key of an event that was held until now.
func (m *Mirror) forget(old *jetstream.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held[old.Key] != old {
		return
	}
	delete(m.held, old.Key)
	m.changed(&jetstream.Event{Topic: old.Topic, Key: old.Key, Tombstone: true, TS: old.TS, Stream: old.Stream, Sequence: old.Sequence, StoredAt: old.StoredAt})
}

// changed tells of an event. mu is held.
func (m *Mirror) changed(e *jetstream.Event) {
	if m.cfg.Changed != nil {
		panics.Run(m.cfg.Logger, "Changed", func() { m.cfg.Changed(e) })
	}
}

// see takes an event in, unless a newer one of its key is there.
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
			m.cfg.Logger.Warn("a topic has more keys than a mirror holds", slog.String("topic", m.cfg.Topic), slog.Int("max", m.cfg.MaxKeys))
		}
	} else {
		// A tombstone is held too: it keeps an older snapshot of the key from coming back.
		m.held[e.Key] = e
	}
	m.changed(e)
}

// Get returns the newest event of a key that the mirror knows, or jetstream.ErrNotFound. The event is shared: it must not be
// changed.
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

// Len is the number of keys that are held, removed ones included.
func (m *Mirror) Len() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.held)
}

// errPartial is returned for snapshots that are not of all keys, or of others than those of the events.
var errPartial = &jetstream.Error{
	Code: jetstream.CodeBadOptions, Msg: "the topic's snapshots have key_source or batch_keys, and are not all of its state: leave Snapshot out",
}

// eachSnapshot calls f with the snapshots of a topic as the events that they were made from, and returns how far they are.
// What it returns was read first: the snapshots are that far, or farther. Of a key there may be several, the newest last.
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
				return nil // it was removed since
			}
			if err != nil {
				return err
			}
			e = newest
		}
		return f(e)
	})
}

// eachNewest calls f with the newest event of each key of a compacted topic, and perhaps with older ones of it before, up to
// what is stored at the moment of the call. The bucket alone may trail behind that.
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

// eachInBucket calls f with all that is in the bucket of a compacted topic, tombstones included, and returns from where on
// the topic itself has what is missing. It returns jetstream.ErrNotFound when the topic does not exist.
func eachInBucket(ctx context.Context, bus Bus, topic string, f func(*jetstream.Event) error) (snapshotPosition, error) {
	var to snapshotPosition
	first, _, err := bus.History(topic).Bounds(ctx) // what lies before is in the bucket, or was removed from it
	if err != nil {
		return to, err
	}
	_, err = bus.Keys(topic).EachSince(ctx, jetstream.BucketPosition{}, func(e *jetstream.Event) error {
		to.Stream, to.Sequence = e.Stream, e.Sequence
		return f(e)
	})
	if err != nil {
		return snapshotPosition{}, err // a position says that all before it was read
	}
	to.Sequence = max(to.Sequence, first-1)
	return to, nil
}

// warm applies the snapshots of the topic, unless the group exists, and returns where the group begins then.
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
		// The snapshots are of a stream that was removed since: everything in the new one is behind them.
		return jetstream.FromEarliest, err
	}
	h, err := eachSnapshot(ctx, a.bus, a.p.Topic, a.p.Snapshot, func(e *jetstream.Event) error {
		key := e.Key
		if a.p.Key != nil {
			var kerr error
			if key, _, kerr = a.key(ctx, e, func() {}); ctx.Err() != nil {
				return ctx.Err()
			} else if kerr != nil || key == "" {
				return nil //nolint:nilerr // what has no key is passed over here as well
			}
		}
		return a.apply(ctx, key, e, 0, func() {})
	})
	if err != nil || h.Stream == "" {
		return from, err
	}
	return jetstream.FromAfterID(Position{h.Stream, h.Sequence}.String()), nil
}
