package projections

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonpointer"
	"eventhub/jetstream/panics"
)

// snapshotsBucket holds the snapshot position of each compacted topic.
const snapshotsBucket = "eventhub_snapshots"

const (
	snapshotBytes = 8 << 20 // approximate maximum size of the events that a Compactor holds
	snapshotBatch = 500     // maximum number of snapshots being published at a time
)

// headerSnapshot is the header with the source of a snapshot, as <stream>@<sequence>.
const headerSnapshot = "snapshot-source"

// headerOmitted marks a snapshot whose payload was omitted because it would be too large. A payload
// from a native client need not be JSON, and its JSON form is larger.
const headerOmitted = "snapshot-payload-omitted"

// CompactorConfig configures a Compactor.
type CompactorConfig struct {
	// Bus is the source of events and the target of snapshots. Required.
	Bus Bus
	// Topic is the topic to compact, and Snapshot the topic for its state. Both must be compacted
	// topics; see KeySource for an exception. Required.
	Topic, Snapshot string
	// KeySource is a JSON pointer (RFC 6901) to the key in the payload, which must be a string or a
	// number. With KeySource, Topic need not be compacted, but must retain its events for longer
	// than the interval between runs. Events without a key at that place are skipped. A tombstone
	// removes the snapshot of the event's own key. After a change of KeySource, the snapshots under
	// the former keys remain. By default, the event's own key is used.
	KeySource string
	// BatchKeys restricts the snapshots to these keys. If empty, there is no restriction.
	BatchKeys []string
	// Every is the interval between runs. Defaults to 30 seconds.
	Every time.Duration
	// Written, if not nil, receives the number of keys written by each run.
	Written func(keys int)
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger
}

// Compactor writes the state of a topic to a topic of snapshots: an event {key, payload, ts} for
// each key, and a tombstone for each removed key. Each run writes only what changed since the
// previous run. A reader without state reads the snapshots first and then the topic from the
// position where the snapshots end; see Mirror. This works only if KeySource and BatchKeys are
// empty.
//
// Any number of hubs may run the same Compactor concurrently, because a snapshot only ever replaces
// an older one of its key.
type Compactor struct {
	cfg    CompactorConfig
	source jsonpointer.Pointer // parsed KeySource
	only   map[string]bool     // BatchKeys as a set; nil means all keys
	rule   string              // hash of KeySource and BatchKeys; "" if both are empty
	wrong  error               // the configuration error, if any
}

// NewCompactor returns a Compactor that does nothing until Run or Compact is called. Both report an
// invalid configuration.
func NewCompactor(cfg CompactorConfig) *Compactor {
	if cfg.Every <= 0 {
		cfg.Every = 30 * time.Second
	}
	if cfg.Written == nil {
		cfg.Written = func(int) {}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Compactor{cfg: cfg}
	if c.source, c.wrong = jsonpointer.Parse(cfg.KeySource); c.wrong != nil {
		c.wrong = fmt.Errorf("projections: compactor of %s: key source %q is not a JSON pointer: %w", cfg.Topic, cfg.KeySource, c.wrong)
	}
	for _, key := range cfg.BatchKeys {
		if c.only == nil {
			c.only = make(map[string]bool, len(cfg.BatchKeys))
		}
		c.only[key] = true
	}
	if c.source != nil || c.only != nil {
		text, _ := json.Marshal([]any{cfg.KeySource, slices.Sorted(slices.Values(cfg.BatchKeys))}) //nolint:errchkjson // strings always marshal
		sum := sha256.Sum256(text)
		c.rule = hex.EncodeToString(sum[:8])
	}
	return c
}

// Run compacts immediately and then every interval until ctx ends. Failures are logged and retried
// at the next interval. Run returns an error only if the configuration is invalid or the bus is
// closed.
func (c *Compactor) Run(ctx context.Context) error {
	if c.wrong != nil {
		return c.wrong
	}
	tick := time.NewTicker(c.cfg.Every)
	defer tick.Stop()
	for {
		_, err := c.Compact(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, jetstream.ErrClosed):
			return fmt.Errorf("compactor of %s: %w", c.cfg.Topic, err)
		case err != nil:
			c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to compact a topic; retrying", slog.String("topic", c.cfg.Topic), slog.Any("error", err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// snapshotPosition is how far the snapshots of a topic are: for every event up to Sequence of
// Stream, the snapshot of its key is from that event or a later one. Bucket is the corresponding
// position in the topic's bucket.
type snapshotPosition struct {
	Stream   string                   `json:"stream"`
	Sequence uint64                   `json:"sequence"`
	Bucket   jetstream.BucketPosition `json:"mark"`
	// StoredAt is when the event at Sequence was stored, in epoch nanoseconds. It is set only when
	// the topic itself was read instead of its bucket.
	StoredAt int64 `json:"stored_at,omitempty"`
	// Rule is Compactor.rule. A different rule may require new snapshots of unchanged events.
	Rule string `json:"rule,omitempty"`
}

func readSnapshotPosition(ctx context.Context, bus Bus, topic string) (snapshotPosition, *jetstream.Entry, Collection, error) {
	var h snapshotPosition
	c, err := bus.Collections().Open(ctx, snapshotsBucket)
	if err != nil {
		return h, nil, nil, err
	}
	e, err := c.Get(ctx, topic)
	if err != nil {
		return h, nil, nil, err
	}
	if e.Value != nil {
		if err := json.Unmarshal(e.Value, &h); err != nil {
			return h, nil, nil, fmt.Errorf("projections: entry %s of bucket %s is unreadable; delete it to write all snapshots again: %w", topic, snapshotsBucket, err)
		}
	}
	return h, e, c, nil
}

// Compact writes what changed since the last run and returns the number of keys written. It may be
// called concurrently, also while Run runs.
func (c *Compactor) Compact(ctx context.Context) (written int, err error) {
	if c.wrong != nil {
		return 0, c.wrong
	}
	h, entry, names, err := readSnapshotPosition(ctx, c.cfg.Bus, c.cfg.Topic)
	if err != nil {
		return 0, err
	}
	if h.Rule != c.rule {
		h = snapshotPosition{Rule: c.rule}
	}
	defer func() { panics.Run(c.cfg.Logger, "Written", func() { c.cfg.Written(written) }) }()
	keyless := 0
	var newest newestEvents
	flush := func() (err error) {
		for some := range slices.Chunk(newest.events, snapshotBatch) {
			if err == nil {
				n, failed := c.write(ctx, some)
				written += n
				err = failed
			}
		}
		newest = newestEvents{}
		return err
	}
	next, err := c.changes(ctx, h, func(e *jetstream.Event) error {
		key := c.keyOf(e)
		if key == "" {
			keyless++
		} else if c.only == nil || c.only[key] {
			newest.add(key, e)
		}
		if newest.bytes < snapshotBytes {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if keyless > 0 {
		c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "skipped events without a key", slog.String("topic", c.cfg.Topic),
			slog.String("key_source", c.cfg.KeySource), slog.Int("events", keyless))
	}
	if err != nil || next == h {
		return written, err
	}
	value, err := json.Marshal(next)
	if err != nil {
		return written, err
	}
	if _, err := names.Put(ctx, c.cfg.Topic, value, nil, entry.Revision); err != nil && !errors.Is(err, jetstream.ErrKeyChanged) {
		return written, err // a changed key means that another hub has recorded the same progress
	}
	return written, nil
}

// changes calls f with the events stored since h: for a compacted topic with the newest event of
// each key, otherwise with every event. It returns the position reached.
func (c *Compactor) changes(ctx context.Context, h snapshotPosition, f func(*jetstream.Event) error) (next snapshotPosition, err error) {
	next = h
	next.Bucket, err = c.cfg.Bus.Keys(c.cfg.Topic).EachSince(ctx, h.Bucket, func(e *jetstream.Event) error {
		next.Stream, next.Sequence = e.Stream, e.Sequence
		return f(e)
	})
	if c.source == nil || !errors.Is(err, jetstream.ErrNotCompacted) {
		return next, err
	}
	at := Checkpoint{Position{h.Stream, h.Sequence}, h.StoredAt}
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: math.MaxInt}
	if h.StoredAt > 0 {
		opts.From = jetstream.FromTime(time.Unix(0, h.StoredAt).Add(-scanOverlap))
	}
	next = h
	err = c.cfg.Bus.History(c.cfg.Topic).Scan(ctx, opts, func(e *jetstream.Event) error {
		if at.covers(e) {
			return nil
		}
		next.Stream, next.Sequence, next.StoredAt = e.Stream, e.Sequence, e.StoredAt
		return f(e)
	})
	return next, err
}

// keyOf returns the key for the snapshot of an event, or "" if there is none.
func (c *Compactor) keyOf(e *jetstream.Event) string {
	if c.source == nil || e.Tombstone {
		return e.Key
	}
	value, ok := c.source.Find(e.Payload)
	if !ok {
		return ""
	}
	var key string
	if json.Unmarshal(value, &key) != nil {
		var number json.Number
		if json.Unmarshal(value, &number) != nil {
			return ""
		}
		key = number.String()
	}
	if len(key) > jetstream.MaxKey {
		return ""
	}
	return key
}

// newestEvents holds the newest event of each key, in the order in which the keys first occurred.
type newestEvents struct {
	events []*jetstream.Event
	at     map[string]int
	bytes  int
}

// add records an event under the given key, replacing an earlier event of that key.
func (n *newestEvents) add(key string, e *jetstream.Event) {
	if key != e.Key {
		keyed := *e
		keyed.Key = key
		e = &keyed
	}
	if i, ok := n.at[key]; ok {
		n.bytes += len(e.Payload) - len(n.events[i].Payload)
		n.events[i] = e
		return
	}
	if n.at == nil {
		n.at = make(map[string]int)
	}
	n.at[key] = len(n.events)
	n.events = append(n.events, e)
	n.bytes += keyOverhead + len(key) + len(e.Payload)
}

// write publishes snapshots of events, at most one per key, unless an existing snapshot is as new.
func (c *Compactor) write(ctx context.Context, events []*jetstream.Event) (written int, err error) {
	if len(events) == 0 {
		return 0, nil
	}
	keys := make([]string, len(events))
	for i, e := range events {
		keys[i] = e.Key
	}
	there, err := c.cfg.Bus.Keys(c.cfg.Snapshot).GetMany(ctx, keys)
	if err != nil {
		return 0, err
	}
	type result struct {
		e   *jetstream.Event
		err error
	}
	results := make(chan result, len(events))
	pub := c.cfg.Bus.NewPublisher()
	sent := 0
	for _, e := range events {
		old := there[e.Key]
		if old != nil && newer(old, e) {
			continue
		}
		if err := c.publish(ctx, pub, e, old, func(_ jetstream.Receipt, err error) { results <- result{e, err} }); err != nil {
			results <- result{e, err}
		}
		sent++
	}
	var errs []error
	for range sent {
		r := <-results // each publish completes within 10 seconds
		wrote := r.err == nil
		if errors.Is(r.err, jetstream.ErrKeyChanged) {
			wrote, r.err = c.replace(ctx, r.e)
		}
		if r.err != nil {
			errs = append(errs, r.err)
		}
		if wrote {
			written++
		}
	}
	return written, errors.Join(errs...)
}

// newer reports whether the snapshot was made from e or from a later event.
func newer(snapshot, e *jetstream.Event) bool {
	from := parsePosition(snapshot.Headers[headerSnapshot])
	return from.Stream == e.Stream && from.Sequence >= e.Sequence && e.StoredAt <= snapshot.StoredAt+int64(remadeAfter)
}

// publish replaces the snapshot old by a snapshot of e. old is nil if there is none.
func (c *Compactor) publish(ctx context.Context, pub Publisher, e, old *jetstream.Event, done func(jetstream.Receipt, error)) error {
	var expected uint64
	if old != nil && !old.Gone {
		expected = old.Sequence
	}
	opts := jetstream.PublishOptions{
		Key: e.Key, ExpectKeySequence: &expected, Tombstone: e.Tombstone, Wrapper: true,
		Headers: map[string]string{headerSnapshot: positionOf(e).String()},
	}
	var payload []byte
	if !e.Tombstone {
		payload = appendSnapshot(nil, e)
	}
	err := pub.PublishAsync(ctx, c.cfg.Snapshot, payload, opts, done)
	if errors.Is(err, jetstream.ErrTooLarge) {
		opts.Headers[headerOmitted] = "true"
		bare := jetstream.Event{Key: e.Key, TS: e.TS}
		err = pub.PublishAsync(ctx, c.cfg.Snapshot, appendSnapshot(nil, &bare), opts, done)
	}
	return err
}

// replace publishes a snapshot of e after a conflict, based on the current snapshot of the key.
func (c *Compactor) replace(ctx context.Context, e *jetstream.Event) (wrote bool, err error) {
	pub := c.cfg.Bus.NewPublisher()
	for {
		old, err := c.cfg.Bus.Keys(c.cfg.Snapshot).Get(ctx, e.Key)
		if errors.Is(err, jetstream.ErrNotFound) {
			old, err = nil, nil
		}
		if err != nil {
			return false, err
		}
		if old != nil && newer(old, e) {
			return false, nil
		}
		answer := make(chan error, 1)
		if err := c.publish(ctx, pub, e, old, func(_ jetstream.Receipt, err error) { answer <- err }); err != nil {
			return false, err
		}
		if err := <-answer; !errors.Is(err, jetstream.ErrKeyChanged) {
			return err == nil, err
		}
	}
}

// appendSnapshot appends {key, payload, ts}. The payload is copied byte for byte.
func appendSnapshot(dst []byte, e *jetstream.Event) []byte {
	key, _ := json.Marshal(e.Key) //nolint:errchkjson // a string always marshals
	dst = append(append(dst, `{"key":`...), key...)
	dst = e.AppendPayload(append(dst, `,"payload":`...))
	dst = strconv.AppendInt(append(dst, `,"ts":`...), e.TS, 10)
	return append(dst, '}')
}

// Snapshot is the payload of an event in a snapshot topic.
type Snapshot struct {
	Key     string          `json:"key"`
	Payload json.RawMessage `json:"payload"`
	TS      int64           `json:"ts"`
}

// readSnapshot reconstructs the source event from a snapshot, as far as the snapshot contains it.
func readSnapshot(topic string, e *jetstream.Event) (*jetstream.Event, bool) {
	from := parsePosition(e.Headers[headerSnapshot])
	var s Snapshot
	if from.Stream == "" || !e.Tombstone && (json.Unmarshal(e.Payload, &s) != nil || s.Key != e.Key) {
		return nil, false // not a snapshot: any client may publish to the topic
	}
	return &jetstream.Event{
		ID: from.String(), TS: s.TS, Topic: topic, Key: e.Key, Payload: s.Payload, Tombstone: e.Tombstone,
		Stream: from.Stream, Sequence: from.Sequence, StoredAt: e.StoredAt,
	}, true
}
