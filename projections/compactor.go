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

// snapshotsBucket says, for each compacted topic, how far its snapshots are.
const snapshotsBucket = "eventhub_snapshots"

const (
	snapshotBytes = 8 << 20 // about what the events take that a Compactor holds
	snapshotBatch = 500     // snapshots that are on their way at a time
)

// headerSnapshot names, as <stream>@<sequence>, the event that a snapshot was made from.
const headerSnapshot = "snapshot-source"

// headerOmitted says that a snapshot is without its payload, which would not fit: what native clients publish need not be
// JSON, and grows when it becomes that.
const headerOmitted = "snapshot-payload-omitted"

// CompactorConfig configures a Compactor.
type CompactorConfig struct {
	// Bus is where events come from and snapshots go to. Required.
	Bus Bus
	// Topic is a compacted topic, Snapshot where its state is written to. Required. Snapshot must be a compacted topic too.
	Topic, Snapshot string
	// KeySource, if not "", is a JSON pointer (RFC 6901) to the key in the payload of an event, a string or a number. Topic
	// need not be compacted then, but its events must stay for longer than a run takes to come. Events without a key there
	// are left out, and a tombstone removes the snapshot of its own key. When KeySource changes, the snapshots under the
	// former keys stay.
	KeySource string
	// BatchKeys, if not empty, are the only keys that snapshots are made of.
	BatchKeys []string
	// Every is the interval. Default 30 s.
	Every time.Duration
	// Written, if not nil, is told how many keys were written each time.
	Written func(keys int)
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
}

// Compactor writes the state of a topic to a topic of snapshots: an event {key, payload, ts} for each key, and a tombstone
// for each key that was removed. Each run writes only what has changed since the last one. Readers that start cold read the
// snapshots, and then the topic from where they end: see Mirror. They do so only while KeySource and BatchKeys are empty.
//
// Any number of hubs may run it side by side: a snapshot replaces only an older one of its key.
type Compactor struct {
	cfg    CompactorConfig
	source jsonpointer.Pointer // of KeySource
	only   map[string]bool     // BatchKeys; nil: all keys
	rule   string              // names KeySource and BatchKeys; "" when both are empty
	wrong  error               // with the configuration
}

// NewCompactor makes a compactor. Run starts it.
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
		c.wrong = fmt.Errorf("projections: compactor of %s: key source %q is no JSON pointer: %w", cfg.Topic, cfg.KeySource, c.wrong)
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

// Run compacts at once and then on the interval, until ctx ends. Failures are logged and tried again at the next turn; an
// error is returned only when the configuration is wrong or the bus is closed.
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

// snapshotPosition is how far the snapshots of a topic are: every event up to Sequence of Stream is
// in them, or a later one of its key is behind it. Bucket is the same as a position in the topic's
// bucket.
type snapshotPosition struct {
	Stream   string                   `json:"stream"`
	Sequence uint64                   `json:"sequence"`
	Bucket   jetstream.BucketPosition `json:"mark"`
	// StoredAt is when that event was stored, in epoch nanoseconds, where the topic itself was read.
	StoredAt int64 `json:"stored_at,omitempty"`
	// Rule is the Compactor's: under another one, what did not change may need another snapshot.
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
			return h, nil, nil, fmt.Errorf("projections: the entry of %s in bucket %s is unreadable: delete it to write all snapshots again: %w", topic, snapshotsBucket, err)
		}
	}
	return h, e, c, nil
}

// Compact writes what has changed since the last run, and returns how many keys that were. It may be called at any time,
// beside Run too.
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
		c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "events without a key are in no snapshot", slog.String("topic", c.cfg.Topic),
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
		return written, err // when it has changed, another hub has done the same
	}
	return written, nil
}

// changes calls f with what was stored since h: of a compacted topic with the newest event of each key, else with every event.
// It returns how far it came.
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

// keyOf is the key that the snapshot of an event goes by, or "" when it has none.
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

// newestEvents are the newest events of keys, in the order in which the keys came.
type newestEvents struct {
	events []*jetstream.Event
	at     map[string]int
	bytes  int
}

// add takes an event in, as one of the key, in place of an earlier one.
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

// write writes the snapshots of events, one a key, that are newer than those that are there.
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
		r := <-results // each is answered within 10 s
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

// newer reports whether the snapshot is made from e or from a later event.
func newer(snapshot, e *jetstream.Event) bool {
	from := parsePosition(snapshot.Headers[headerSnapshot])
	return from.Stream == e.Stream && from.Sequence >= e.Sequence && e.StoredAt <= snapshot.StoredAt+int64(remadeAfter)
}

// publish replaces the snapshot old (nil: none) by one of e.
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

// replace is publish for a key whose snapshot is another one than was thought.
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

// appendSnapshot appends {key, payload, ts}; the payload is spliced in as a record's is.
func appendSnapshot(dst []byte, e *jetstream.Event) []byte {
	key, _ := json.Marshal(e.Key) //nolint:errchkjson // a string always marshals
	dst = append(append(dst, `{"key":`...), key...)
	dst = e.AppendPayload(append(dst, `,"payload":`...))
	dst = strconv.AppendInt(append(dst, `,"ts":`...), e.TS, 10)
	return append(dst, '}')
}

// Snapshot is the payload of a snapshot.
type Snapshot struct {
	Key     string          `json:"key"`
	Payload json.RawMessage `json:"payload"`
	TS      int64           `json:"ts"`
}

// readSnapshot turns a snapshot back into the event that it was made from, as far as it says.
func readSnapshot(topic string, e *jetstream.Event) (*jetstream.Event, bool) {
	from := parsePosition(e.Headers[headerSnapshot])
	var s Snapshot
	if from.Stream == "" || !e.Tombstone && (json.Unmarshal(e.Payload, &s) != nil || s.Key != e.Key) {
		return nil, false // anyone may publish to the topic
	}
	return &jetstream.Event{
		ID: from.String(), TS: s.TS, Topic: topic, Key: e.Key, Payload: s.Payload, Tombstone: e.Tombstone,
		Stream: from.Stream, Sequence: from.Sequence, StoredAt: e.StoredAt,
	}, true
}
