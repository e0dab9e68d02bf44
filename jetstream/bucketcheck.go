package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// Bounds of looking after buckets.
const (
	bucketCheckEvery = time.Minute
	// without a sign of life from the source, which beats every second
	bucketQuiet   = 10 * time.Second
	bucketBehind  = 10_000 // events that the bucket does not have yet
	bucketReaders = 8      // buckets that are looked at at a time
)

// BucketReport is the state of the bucket of a compacted topic.
type BucketReport struct {
	// Topic is the topic. Bucket is the name of its KV bucket.
	Topic, Bucket string
	// Entries is the number of keys in the bucket, tombstones included.
	Entries uint64
	// Lag is the number of events of the topic's stream that the bucket does not have yet.
	Lag uint64
	// Faults are the reasons why the bucket may not hold the newest event of each key. A sound
	// bucket has none.
	Faults []string
	// Foreign are the entries that did not come from the topic, the oldest first and at most
	// 10,000. Only RepairBucket searches for them. ForeignTotal is their total number.
	Foreign      []ForeignEntry
	ForeignTotal int
}

// CheckBuckets checks the buckets of all compacted topics that exist on the server, whether or not
// this hub has used them. It changes nothing. The reports have no order.
func (a Admin) CheckBuckets(ctx context.Context) ([]BucketReport, error) {
	b := a.bus
	var found []*streams.Topic
	streams := b.conn.JS.ListStreams(ctx)
	for info := range streams.Info() {
		for _, subject := range info.Config.Subjects {
			topic := subjectTopic(subject)
			if ValidTopic(topic) != nil {
				continue
			}
			rule := b.rules.Of(topic)
			if !rule.Compaction || rule.StreamName(topic) != info.Config.Name {
				continue
			}
			if t, err := b.streams.NewTopic(topic, info, rule, false); err == nil {
				found = append(found, t)
			}
			break // the other subject is that of events with a key
		}
	}
	if err := streams.Err(); err != nil {
		return nil, b.conn.Unavailable(err)
	}
	reports, err := b.admin.checkBuckets(ctx, found)
	if err != nil {
		return nil, b.conn.Unavailable(err)
	}
	return reports, nil
}

// checkBuckets looks at buckets, a few at a time.
func (a *admin) checkBuckets(ctx context.Context, topics []*streams.Topic) ([]BucketReport, error) {
	reports := make([]BucketReport, len(topics))
	errs := make([]error, len(topics))
	var readers sync.WaitGroup
	slots := make(chan struct{}, bucketReaders)
	for i, t := range topics {
		slots <- struct{}{}
		readers.Go(func() {
			defer func() { <-slots }()
			reports[i], errs[i] = a.checkBucket(ctx, t)
		})
	}
	readers.Wait()
	return reports, errors.Join(errs...)
}

// checkBucket looks at one bucket, and again a moment later if its source says nothing: one that
// just begins does not either.
func (a *admin) checkBucket(ctx context.Context, t *streams.Topic) (BucketReport, error) {
	r := BucketReport{Topic: t.Name, Bucket: strings.TrimPrefix(t.Bucket.Stream, "KV_")}
	for again := false; ; again = true {
		info, err := a.conn.FindStream(ctx, t.Bucket.Stream)
		if errors.Is(err, event.ErrNotFound) {
			r.Faults = []string{"it is gone"}
			return r, nil
		}
		if err != nil {
			return r, err
		}
		r.Entries, r.Lag, r.Faults = info.State.Msgs, 0, nil
		if t.Bucket.Foreign(t.Name, t.Stream.Name, info) {
			r.Faults = []string{"a stream of its name exists that is not the event bus's"}
			return r, nil
		}
		r.Faults = t.Bucket.Faults(t.Name, t.Stream.Name, info)
		quiet := false
		for _, s := range info.Sources {
			r.Lag += s.Lag
			quiet = quiet || s.Active < 0 || s.Active > bucketQuiet
		}
		switch {
		case quiet && !again && len(r.Faults) == 0:
			if err := a.conn.Pause(ctx, 2*time.Second); err != nil {
				return r, err
			}
			continue
		case quiet:
			r.Faults = append(r.Faults, "its source gives no sign of life: is the stream of the topic there, and has it a leader?")
		case r.Lag > bucketBehind:
			r.Faults = append(r.Faults, fmt.Sprintf("it is %d events behind", r.Lag))
		}
		fault, err := a.staleSource(ctx, t)
		if fault != "" {
			r.Faults = append(r.Faults, fault)
		}
		return r, err
	}
}

// staleSource says what keeps servers before 2.15 from filling the bucket of a topic whose stream
// was removed and made again: they go on behind the last event that came from the old one, and take
// the new one's for known.
func (a *admin) staleSource(ctx context.Context, t *streams.Topic) (string, error) {
	m, err := a.conn.LastBySubject(ctx, t.Bucket.Stream, t.Bucket.Prefix+">")
	if errors.Is(err, event.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	at, ours := t.EntryOrigin(m)
	if !ours || at.Ident != "" { // no need to ask
		return "", nil
	}
	source, err := a.conn.FindStream(ctx, t.Stream.Name)
	if errors.Is(err, event.ErrNotFound) || err == nil && !at.Beyond(source.State.LastSeq) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("the stream of the topic was created again, and this server takes nothing of it before event %d: delete the bucket and repair it, which fills it from the new stream", at.Seq+1), nil
}

// lookAfterBuckets checks the buckets of the topics that this hub has met.
//
// Tombstones stay. To remove them would bring their keys back: a server that is killed builds its
// index anew from what is on disk, and there lies, without a mark, every value that a newer one of
// its key replaced (nats-server issue 8505).
func (a *admin) lookAfterBuckets() {
	check := time.NewTicker(a.cfg.bucketCheck)
	defer check.Stop()
	known := make(map[string]string) // faults, by topic; of topics that the hub knows
	a.obs.Gauge(event.GaugeBucketsBroken, 0)
	a.obs.Gauge(event.GaugeKeysRemoved, 0)
	for {
		select {
		case <-a.conn.Ctx.Done():
			return
		case <-check.C:
			if err := a.reportBuckets(a.conn.Ctx, known); err != nil && a.conn.Ctx.Err() == nil {
				a.log.Warn("the buckets of compacted topics could not be checked", slog.Any("error", err))
			}
		}
	}
}

// compactedTopics are those that this hub knows.
func (a *admin) compactedTopics() []*streams.Topic {
	return slices.DeleteFunc(a.streams.Met(), func(t *streams.Topic) bool { return t.Bucket == nil })
}

// reportBuckets logs what has become of buckets since the last time, and sets the gauge.
func (a *admin) reportBuckets(ctx context.Context, known map[string]string) error {
	reports, err := a.checkBuckets(ctx, a.compactedTopics())
	if err != nil {
		return err
	}
	broken, removed := 0, 0
	met := make(map[string]bool, len(reports))
	for _, r := range reports {
		met[r.Topic] = true
		if t := a.streams.Known(r.Topic); t != nil {
			removed += a.publishers.KeysLooked(t, r.Entries)
		}
		faults := strings.Join(r.Faults, "; ")
		switch before := known[r.Topic]; {
		case faults != "" && before != faults:
			a.log.WarnContext(ctx, "the bucket of a compacted topic is not as it should be: repair it", slog.String("topic", r.Topic),
				slog.String("bucket", r.Bucket), slog.String("faults", faults))
		case faults == "" && before != "":
			a.log.InfoContext(ctx, "the bucket of a compacted topic is right again", slog.String("topic", r.Topic), slog.String("bucket", r.Bucket))
		}
		delete(known, r.Topic)
		if faults != "" {
			known[r.Topic] = faults
			broken++
		}
	}
	for topic := range known {
		if !met[topic] {
			delete(known, topic)
		}
	}
	a.obs.Gauge(event.GaugeBucketsBroken, float64(broken))
	a.obs.Gauge(event.GaugeKeysRemoved, float64(removed))
	return nil
}
