package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/streams"
)

// Bounds of a repair.
const (
	maxForeign    = 10_000           // foreign entries that one repair looks into
	restoreAtOnce = 64               // keys whose events are read again at a time: a source each
	restoreWait   = 15 * time.Second // for the source to do so
)

// RepairOptions configures RepairBucket.
type RepairOptions struct {
	// RemoveForeign removes the foreign entries of keys that have no event in the topic's stream.
	// The content of these entries is lost.
	RemoveForeign bool
}

// ForeignEntry is an entry of a bucket that came from a native client and not from the topic.
type ForeignEntry struct {
	Key      string
	Sequence uint64 // in the bucket
	StoredAt int64  // epoch nanoseconds
	// Outcome is what the repair did.
	Outcome ForeignOutcome
}

// ForeignOutcome is the outcome of the repair of a foreign entry.
type ForeignOutcome string

// The outcomes for foreign entries.
const (
	ForeignRestored ForeignOutcome = "restored" // the key's newest event stands in its place
	// the topic holds no event of the key; RepairOptions.RemoveForeign
	ForeignRemoved ForeignOutcome = "removed"
	ForeignKept    ForeignOutcome = "kept" // the topic holds no event of the key
)

// RepairBucket repairs the bucket of a compacted topic, or creates the bucket if it is gone, and
// reports what it found. The server then adds the events that the bucket missed, as far as the
// topic's stream still holds them. The newest event of a key replaces an entry that a native client
// wrote. If the stream has no event of the key left, the entry is reported, and stays unless opts
// says otherwise.
//
// While foreign entries are replaced, the bucket may show an older event of such a key for a
// moment; Watch does not. RepairBucket may be called again, and by several hubs at once. It returns
// ErrNotFound when the topic does not exist. It returns a bad_topic *Error when the stream with the
// bucket's name belongs to somebody else, or may do so because it has no source and holds nothing
// of the topic.
func (a Admin) RepairBucket(ctx context.Context, topic string, opts RepairOptions) (BucketReport, error) {
	b := a.bus
	t, err := b.reads.Compacted(ctx, topic)
	if err != nil {
		return BucketReport{Topic: topic}, b.messages.Failed(err)
	}
	r := repair{admin: b.admin, topic: t, opts: opts}
	if r.report, err = b.admin.checkBucket(ctx, t); err == nil {
		err = r.run(ctx)
	}
	if err != nil {
		return r.report, b.messages.Failed(err)
	}
	b.log.InfoContext(ctx, "the bucket of a compacted topic was repaired", slog.String("topic", topic), slog.String("bucket", r.report.Bucket),
		slog.String("faults", strings.Join(r.report.Faults, "; ")), slog.Int("foreign_entries", r.report.ForeignTotal))
	return r.report, nil
}

// repair is one RepairBucket.
type repair struct {
	admin  *admin
	topic  *streams.Topic
	opts   RepairOptions
	report BucketReport
	cfg    natsjs.StreamConfig // of the bucket, as it should be
}

func (r *repair) run(ctx context.Context) error {
	source, err := r.admin.conn.FindStream(ctx, r.topic.Stream.Name)
	if err != nil {
		return err
	}
	if err := r.admin.streams.EnsureBucket(ctx, r.topic, &source.Config); err != nil {
		return err
	}
	info, err := r.admin.conn.FindStream(ctx, r.topic.Bucket.Stream)
	if err != nil {
		return err
	}
	if err := r.claim(ctx, info); err != nil {
		return err
	}
	// What cannot be changed stays, and what does no harm.
	have := &info.Config
	r.cfg = r.topic.Bucket.Config(r.topic.Name, &source.Config)
	r.cfg.Storage, r.cfg.Replicas, r.cfg.Placement, r.cfg.Compression = have.Storage, have.Replicas, have.Placement, have.Compression
	r.cfg.DenyPurge, r.cfg.DenyDelete = have.DenyPurge, r.cfg.DenyDelete || have.DenyDelete
	r.cfg.AllowRollup = !have.DenyPurge
	if have.Duplicates == streams.MinWindow {
		r.cfg.Duplicates = streams.MinWindow
	}
	if len(r.topic.Bucket.Faults(r.topic.Name, r.topic.Stream.Name, info)) > 0 || have.Metadata[streams.BucketTopic] != r.topic.Name {
		if err := r.update(ctx, nil); err != nil {
			return err
		}
	}
	if err := r.awaitSource(ctx); err != nil {
		return err
	}
	if fault, err := r.admin.staleSource(ctx, r.topic); err != nil || fault != "" {
		return cmp.Or(err, error(&event.Error{Code: event.CodeBadTopic, Msg: "bucket " + r.report.Bucket + ": " + fault}))
	}
	return r.foreign(ctx)
}

// claim refuses a bucket that may be somebody else's: one that does not say whose it is, as after a
// native CreateOrUpdateKeyValue, and holds entries of which none came from the topic.
func (r *repair) claim(ctx context.Context, info *natsjs.StreamInfo) error {
	if _, named := info.Config.Metadata[streams.BucketTopic]; named || len(info.Config.Sources) > 0 || info.State.Msgs == 0 {
		return nil
	}
	ours := false
	err := r.admin.messages.Through(ctx, r.topic.Bucket.Stream, reading.Query{HeadersOnly: true}, func(m *conn.StoredMsg) error {
		_, found := r.topic.EntryOrigin(m)
		if found {
			ours = true
			return reading.ErrStop
		}
		return nil
	})
	if err == nil && !ours {
		err = &event.Error{Code: event.CodeBadTopic, Msg: "bucket " + r.report.Bucket + " holds nothing that came from this topic, so it may be somebody else's: nothing was changed; when it can go, delete it, and repair again"}
	}
	return err
}

// update gives the bucket its configuration, with sources beside the one that belongs there.
func (r *repair) update(ctx context.Context, beside []*natsjs.StreamSource) error {
	cfg := r.cfg
	cfg.Sources = append([]*natsjs.StreamSource{r.topic.Bucket.Source(r.topic.Name, r.topic.Stream.Name)}, beside...)
	if _, err := r.admin.conn.JS.UpdateStream(ctx, cfg); err != nil {
		return fmt.Errorf("jetstream: update bucket %s for topic %s: %w", cfg.Name, r.topic.Name, err)
	}
	return nil
}

// awaitSource waits until the source has caught up: that alone may replace foreign entries. When it
// takes long the repair goes on, for what the source brings later replaces them too.
func (r *repair) awaitSource(ctx context.Context) error {
	return r.poll(ctx, func() (bool, error) {
		info, err := r.admin.conn.FindStream(ctx, r.topic.Bucket.Stream)
		if err != nil {
			return false, err
		}
		for _, s := range info.Sources {
			if s.Active < 0 || s.Lag > 0 {
				return false, nil
			}
		}
		return true, nil
	})
}

// poll asks until the answer is yes, for as long as restoreWait.
func (r *repair) poll(ctx context.Context, f func() (bool, error)) error {
	deadline := time.Now().Add(restoreWait)
	for time.Now().Before(deadline) {
		if done, err := f(); done || err != nil {
			return err
		}
		if err := r.admin.conn.Pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// foreignKey is a foreign entry on its way.
type foreignKey struct {
	entry   *ForeignEntry
	subject string // in the bucket
	event   string // subject in the topic's stream; "": the topic can have no such key
	seq     uint64 // of the newest event
}

// foreign finds and replaces what native clients wrote.
func (r *repair) foreign(ctx context.Context) error {
	var found []*foreignKey
	err := r.admin.messages.Through(ctx, r.topic.Bucket.Stream, reading.Query{HeadersOnly: true}, func(m *conn.StoredMsg) error {
		token, inside := strings.CutPrefix(m.Subject, r.topic.Bucket.Prefix)
		if _, ours := r.topic.EntryOrigin(m); ours || !inside {
			return nil
		}
		if r.report.ForeignTotal++; len(found) == maxForeign {
			return nil
		}
		k := &foreignKey{subject: m.Subject, entry: &ForeignEntry{Key: tokenKey(token), Sequence: m.Seq, StoredAt: m.Time.UnixNano(), Outcome: ForeignKept}}
		if !strings.Contains(token, ".") {
			k.event = "keyed." + token + "." + r.topic.Name
		}
		found = append(found, k)
		return nil
	})
	if err != nil {
		return err
	}
	var again []*foreignKey
	for _, k := range found {
		if err := r.judge(ctx, k); err != nil {
			return err
		}
		if k.seq > 0 {
			again = append(again, k)
		}
	}
	for len(again) > 0 {
		n := min(len(again), restoreAtOnce)
		if err := r.restore(ctx, again[:n]); err != nil {
			return err
		}
		again = again[n:]
	}
	for _, k := range found {
		r.report.Foreign = append(r.report.Foreign, *k.entry)
	}
	return nil
}

// judge looks whether the topic has an event of the key, and removes the entry if it has none and
// the caller wants it.
func (r *repair) judge(ctx context.Context, k *foreignKey) error {
	if k.event != "" {
		m, err := r.admin.conn.LastBySubject(ctx, r.topic.Stream.Name, k.event)
		if err == nil {
			k.seq = m.Seq
			return nil
		}
		if !errors.Is(err, event.ErrNotFound) {
			return err
		}
	}
	if !r.opts.RemoveForeign {
		return nil
	}
	handle, err := r.admin.conn.JS.Stream(ctx, r.topic.Bucket.Stream)
	if err != nil {
		return err
	}
	if err := handle.Purge(ctx, natsjs.WithPurgeSubject(k.subject), natsjs.WithPurgeSequence(k.entry.Sequence+1)); err != nil {
		return fmt.Errorf("jetstream: remove a foreign entry from bucket %s: %w", r.topic.Bucket.Stream, err)
	}
	k.entry.Outcome = ForeignRemoved
	return nil
}

// restore has the newest events of keys sourced once more. The server goes on with a source where
// it was, so each key gets one of its own for the moment, which begins at its newest event: nothing
// older comes back.
func (r *repair) restore(ctx context.Context, keys []*foreignKey) error {
	beside := make([]*natsjs.StreamSource, len(keys))
	for i, k := range keys {
		beside[i] = &natsjs.StreamSource{
			Name: r.topic.Stream.Name, OptStartSeq: k.seq,
			SubjectTransforms: []natsjs.SubjectTransformConfig{{Source: k.event, Destination: k.subject}},
		}
	}
	if err := r.update(ctx, beside); err != nil {
		return err
	}
	came := r.awaitKeys(ctx, keys, false)
	// Whatever happened, the sources go: they would bring each later event twice.
	off, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	if err := r.update(off, nil); err != nil {
		return err
	}
	if came != nil {
		return came
	}
	// A key that changed meanwhile may have got its events in the wrong order.
	return r.awaitKeys(ctx, keys, true)
}

// awaitKeys waits until the entries of keys are events of the topic, and those of newest its newest
// ones.
func (r *repair) awaitKeys(ctx context.Context, keys []*foreignKey, newest bool) error {
	for _, k := range keys {
		right := false
		err := r.poll(ctx, func() (_ bool, err error) {
			right, err = r.right(ctx, k, newest)
			return right, err
		})
		if err != nil {
			return err
		}
		if !right {
			return fmt.Errorf("jetstream: repair bucket %s: the newest event of a key did not come back in %v; repair the bucket again", r.topic.Bucket.Stream, restoreWait)
		}
		if newest {
			k.entry.Outcome = ForeignRestored
		}
	}
	return nil
}

func (r *repair) right(ctx context.Context, k *foreignKey, newest bool) (bool, error) {
	var newestSeq uint64
	if newest {
		m, err := r.admin.conn.LastBySubject(ctx, r.topic.Stream.Name, k.event)
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return false, err
		}
		if err == nil {
			newestSeq = m.Seq
		}
	}
	m, err := r.admin.conn.LastBySubject(ctx, r.topic.Bucket.Stream, k.subject)
	if errors.Is(err, event.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	at, ours := r.topic.EntryOrigin(m)
	return ours && at.Seq >= newestSeq, nil
}
