package jetstream

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Bounds of a Watch.
const (
	watchKeys   = 1_024           // keys it may name
	watchHidden = 1_024           // keys whose entry in the bucket is not the topic's
	watchCatch  = 5 * time.Second // how long it may trail behind what it found at first until that counts as delivered
)

// Watch calls f with the newest event of each of keys (none: of all keys; 1,024 at most) of a compacted topic, tombstones
// left out; then once with nil; and then with every change, tombstones included, until ctx ends or f returns an error, which
// it returns. Nothing is left out between the two, and no key ever goes back in time: of changes that follow each other
// closely, the newest may stand for all. A lost connection, or a bucket that was removed, is no end: it goes on by itself.
// The topic is made when it does not exist yet.
//
// f is called from the goroutine that called Watch, and holds up nobody else.
func (b *Bus) Watch(ctx context.Context, topic string, keys []string, f func(*Event) error) error {
	if len(keys) > watchKeys {
		return badOptions("a watch has %d keys, at most %d are allowed: watch all", len(keys), watchKeys)
	}
	w := &watch{bus: b, name: topic, keys: keys, f: f}
	return b.keepReading(ctx, topic, w.follow, func() uint64 { return w.bucketSeq })
}

// watch is where one Watch is.
type watch struct {
	bus   *Bus
	name  string
	topic *topicInfo
	keys  []string
	f     func(*Event) error

	source    time.Time // when the topic's stream was made
	created   time.Time // of the bucket that is read
	bucketSeq uint64    // the last entry that was read
	present   uint64    // entries up to this one are what the bucket held at first
	told      bool      // f(nil) was called
	trailing  time.Time // since when all that was there at first has been read, but there is newer

	// ident and seq say what the newest event was that was handed on: what is older than that, and of the same stream, was
	// handed on already. Only a repair brings such entries.
	origin
	// hidden are the keys whose entry was a foreign one, with the newest event of them that was seen since: a repair brings
	// their events back, which are older than others.
	hidden map[string]uint64
}

// follow reads the bucket until something ends it.
func (w *watch) follow(ctx context.Context) error {
	info, err := w.find(ctx)
	if err != nil {
		return err
	}
	if made := w.topic.stream.created; !made.Equal(w.source) {
		if w.source = made; w.ident == "" { // what was handed on is of another, whose entries do not say so
			w.origin = origin{}
		}
	}
	switch {
	case w.created.IsZero():
		w.created, w.present = info.Created, info.State.LastSeq
	case !info.Created.Equal(w.created) || info.State.LastSeq < w.bucketSeq:
		if !w.told && w.bucketSeq > 0 {
			// What is missing of the old one nobody knows.
			return stopped(w.bus.unavailable(errors.New("jetstream: the bucket was made anew while a watch read it for the first time")))
		}
		w.created, w.bucketSeq = info.Created, 0
		if !w.told {
			w.present = info.State.LastSeq
		}
	}
	feed, pending, err := w.bus.openFeed(ctx, w.topic.bucket.stream, w.consumer(info))
	if err != nil {
		return err
	}
	defer feed.close(ctx)
	for {
		if pending == 0 || !w.trailing.IsZero() && time.Since(w.trailing) > watchCatch {
			if err := w.tell(); err != nil {
				return err
			}
		}
		patience := time.Duration(0)
		if !w.told {
			patience = feedBeat
		}
		m, left, err := feed.next(ctx, patience)
		if errors.Is(err, errIdle) {
			if pending, err = feed.pending(ctx); err != nil {
				return err
			}
			continue // what was counted may have been removed meanwhile
		}
		if err != nil {
			return err
		}
		if err := w.take(m); err != nil {
			return err
		}
		if pending = left; !w.told && m.seq >= w.present && w.trailing.IsZero() {
			w.trailing = time.Now()
		}
	}
}

// find makes what is missing, and returns the bucket's stream.
func (w *watch) find(ctx context.Context) (info *natsjs.StreamInfo, err error) {
	for range 3 {
		if w.topic, err = w.bus.topic(ctx, w.name, ""); err != nil {
			return nil, err
		}
		if w.topic.bucket == nil {
			return nil, notCompacted(w.name)
		}
		if info, err = w.bus.findStream(ctx, w.topic.bucket.stream); !errors.Is(err, ErrNotFound) {
			break
		}
		w.bus.forgetBucket(w.topic)
	}
	return info, err
}

func (w *watch) consumer(info *natsjs.StreamInfo) natsjs.ConsumerConfig {
	var cfg natsjs.ConsumerConfig
	for _, key := range w.keys {
		cfg.FilterSubjects = append(cfg.FilterSubjects, w.topic.bucket.subject(key))
	}
	switch {
	case w.bucketSeq > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = natsjs.DeliverByStartSequencePolicy, w.bucketSeq+1
	case len(w.keys) == 0 && info.Config.MaxMsgsPerSubject == 1:
		cfg.DeliverPolicy = natsjs.DeliverAllPolicy // the same, and the server need not look for it
	default:
		cfg.DeliverPolicy = natsjs.DeliverLastPerSubjectPolicy
	}
	return cfg
}

// tell says once that all there was has been handed on.
func (w *watch) tell() error {
	if w.told {
		return nil
	}
	w.told, w.trailing = true, time.Time{}
	return stopped(w.f(nil))
}

// take hands an entry on unless it is older than what was.
func (w *watch) take(m *storedMsg) error {
	w.bucketSeq = m.seq
	e, at, ok := w.topic.entry(m)
	if !ok {
		return w.hide(m)
	}
	old := at.seq <= w.seq && (at.ident == w.ident || at.ident == "" || w.ident == "")
	if seq, hidden := w.hidden[e.Key]; hidden {
		if old && at.seq <= seq {
			return nil
		}
		if w.hidden[e.Key] = at.seq; !old {
			delete(w.hidden, e.Key)
		}
	} else if old && (w.told || m.seq > w.present) {
		return nil
	}
	if !old {
		w.origin = at
	}
	if e.Tombstone && !w.told {
		return nil
	}
	return stopped(w.f(e))
}

// hide remembers a key whose entry a native client wrote.
func (w *watch) hide(m *storedMsg) error {
	if len(m.subject) <= len(w.topic.bucket.prefix) {
		return nil
	}
	key := tokenKey(m.subject[len(w.topic.bucket.prefix):])
	if _, known := w.hidden[key]; known {
		return nil
	}
	if len(w.hidden) == watchHidden {
		return stopped(w.bus.unavailable(errors.New("jetstream: native clients wrote too many keys to the bucket: repair it")))
	}
	if w.hidden == nil {
		w.hidden = make(map[string]uint64)
	}
	w.hidden[key] = 0
	return nil
}
