package reading

import (
	"context"
	"errors"
	"slices"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Bounds of a Watch.
const (
	watchKeys   = conn.MaxDirect // keys it may name
	watchHidden = 1_024          // keys whose entry in the bucket is not the topic's
)

// Watch is Keys.Watch.
func (r *Reads) Watch(ctx context.Context, topic string, keys []string, f func(*event.Event) error) error {
	size := 0
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	for _, key := range keys {
		if key == "" || len(key) > native.MaxKey {
			return event.BadOptions("a key has 1 to %d bytes, not %d", native.MaxKey, len(key))
		}
		size += len(native.KeyToken(key))
	}
	if len(keys) > watchKeys || size > keysBytes {
		return event.BadOptions("a watch has %d keys, whose names have %d bytes in NATS; at most %d and %d are allowed: watch all", len(keys), size, watchKeys, keysBytes)
	}
	w := &watch{reads: r, name: topic, keys: keys, f: f}
	return r.Messages.Follow(ctx, topic, w.follow, func() uint64 { return w.bucketSeq })
}

// watch is where one Watch is.
type watch struct {
	reads *Reads
	name  string
	topic *streams.Topic
	keys  []string
	f     func(*event.Event) error

	source    time.Time // when the topic's stream was made
	created   time.Time // of the bucket that is read
	bucketSeq uint64    // the last entry that was read
	present   uint64    // entries up to this one are what the bucket held at first
	told      bool      // f(nil) was called
	// the bucket has one entry a key, the same for all who read: a tombstone at first replaces
	// nothing that was seen
	single bool

	// ident and seq say what the newest event was that was handed on: what is older than that, and
	// of the same stream, was handed on already. Only a repair brings such entries.
	streams.Origin
	// hidden are the keys whose entry was a foreign one, with the newest event of them that was
	// seen since: a repair brings their events back, which are older than others.
	hidden map[string]uint64
}

// follow reads the bucket until something ends it.
func (w *watch) follow(ctx context.Context) error {
	info, err := w.find(ctx)
	if err != nil {
		return err
	}
	if made := w.topic.Stream.Created; !made.Equal(w.source) {
		// what was handed on is of another, whose entries do not say so
		if w.source = made; w.Ident == "" {
			w.Origin = streams.Origin{}
		}
	}
	w.single = info.Config.MaxMsgsPerSubject == 1 && info.Config.Replicas == 1
	switch {
	case w.created.IsZero():
		w.created, w.present = native.StreamMade(info), info.State.LastSeq
	case !native.StreamMade(info).Equal(w.created) || info.State.LastSeq < w.bucketSeq:
		if !w.told && w.bucketSeq > 0 {
			// What is missing of the old one nobody knows.
			return Own(w.reads.Conn.Unavailable(errors.New("jetstream: watch: the bucket was replaced during the first reading")))
		}
		w.created, w.bucketSeq = native.StreamMade(info), 0
		if !w.told {
			w.present = info.State.LastSeq
		}
	}
	if !w.told {
		if err := w.readPresent(ctx); err != nil {
			return err
		}
	}
	feed, _, err := w.reads.Conn.OpenFeed(ctx, w.topic.Bucket.Stream, natsjs.ConsumerConfig{
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: w.bucketSeq + 1, FilterSubjects: w.subjects(),
	})
	if err != nil {
		return err
	}
	defer feed.Close(ctx)
	if info, err = w.reads.Conn.FindStream(ctx, w.topic.Bucket.Stream); err != nil {
		return err
	}
	if !native.StreamMade(info).Equal(w.created) {
		return errAnew // a feed that begins behind the end of another stream is silent
	}
	for {
		m, _, err := feed.Next(ctx, 0)
		if err != nil {
			return err
		}
		if err := w.take(ctx, m); err != nil {
			return err
		}
	}
}

// readPresent hands on what is there, and says so.
func (w *watch) readPresent(ctx context.Context) error {
	next, err := w.reads.Messages.All(ctx, w.topic.Bucket.Stream, w.created, w.bucketSeq+1, w.subjects(), func(m *conn.StoredMsg) error { return w.take(ctx, m) })
	if err != nil {
		return err
	}
	w.bucketSeq = next - 1
	w.told = true
	return Own(w.f(nil))
}

// find makes what is missing, and returns the bucket's stream.
func (w *watch) find(ctx context.Context) (info *natsjs.StreamInfo, err error) {
	for range 3 {
		if w.topic, err = w.reads.Streams.Topic(ctx, w.name, ""); err != nil {
			return nil, err
		}
		if w.topic.Bucket == nil {
			return nil, notCompacted(w.name)
		}
		if info, err = w.reads.Conn.FindStream(ctx, w.topic.Bucket.Stream); !errors.Is(err, event.ErrNotFound) {
			break
		}
		w.reads.Streams.ForgetBucket(w.topic)
	}
	return info, err
}

// subjects are those of the keys in the bucket; none: all.
func (w *watch) subjects() []string {
	var subjects []string
	for _, key := range w.keys {
		subjects = append(subjects, w.topic.Bucket.Subject(key))
	}
	return subjects
}

// take hands an entry on unless it is older than what was.
func (w *watch) take(ctx context.Context, m *conn.StoredMsg) error {
	w.bucketSeq = m.Seq
	e, at, ok := w.topic.Entry(m)
	if !ok {
		return w.hide(m)
	}
	old := at.Seq <= w.Seq && (at.Ident == w.Ident || at.Ident == "" || w.Ident == "")
	if seq, hidden := w.hidden[e.Key]; hidden {
		if old && at.Seq <= seq {
			return nil
		}
		if w.hidden[e.Key] = at.Seq; !old {
			delete(w.hidden, e.Key)
		}
	} else if old && w.told {
		return nil
	} else if old && m.Seq > w.present {
		// A repair has put it there, perhaps for a foreign entry that was never seen: the newest is
		// right in any case.
		var err error
		if e, err = w.reads.Latest(ctx, w.topic, e.Key); errors.Is(err, event.ErrNotFound) {
			return nil
		} else if err != nil {
			return err
		}
	}
	if !old {
		w.Origin = at
	}
	if e.Tombstone && !w.told && w.single && m.Seq <= w.present {
		return nil
	}
	return Own(w.f(e))
}

// hide remembers a key whose entry a native client wrote.
func (w *watch) hide(m *conn.StoredMsg) error {
	if len(m.Subject) <= len(w.topic.Bucket.Prefix) {
		return nil
	}
	key := native.ParseKeyToken(m.Subject[len(w.topic.Bucket.Prefix):])
	if _, known := w.hidden[key]; known {
		return nil
	}
	if len(w.hidden) == watchHidden {
		return Own(w.reads.Conn.Unavailable(errors.New("jetstream: watch: native clients wrote too many keys to the bucket; repair the bucket")))
	}
	if w.hidden == nil {
		w.hidden = make(map[string]uint64)
	}
	w.hidden[key] = 0
	return nil
}
