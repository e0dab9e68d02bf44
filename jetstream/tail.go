package jetstream

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// ErrDropped is returned by Tail when events that come next are not in the stream any more. The caller has been told nothing
// of what lies behind the hole.
var ErrDropped = errors.New("jetstream: the stream has dropped events behind that place")

// Tail calls f with every event of a topic behind a sequence of its stream ("": of whichever it has), in order; once with nil, when it has handed on
// all that was stored when Tail was called; and then with what comes, until ctx ends or f returns an error, which it
// returns. It is no member of any group. A lost connection is no end: it goes on where it was, or returns ErrDropped if that
// cannot be, and also when the topic's bounds overtake it (but not in the stream of a family). It returns ErrNotFound when
// the topic does not exist. f is called from the goroutine that called Tail.
func (b *Bus) Tail(ctx context.Context, topic, stream string, after uint64, f func(*Event) error) error {
	t := &tail{bus: b, name: topic, stream: stream, after: after, f: f}
	return b.keepReading(ctx, topic, t.follow, func() uint64 { return t.after }, ErrDropped, ErrNotFound)
}

// tail is where one Tail is.
type tail struct {
	bus     *Bus
	name    string
	stream  string
	created time.Time
	after   uint64
	present uint64 // the last event that was there at first
	told    bool   // f(nil) was called
	f       func(*Event) error
}

func (t *tail) follow(ctx context.Context) error {
	topic, state, err := t.bus.freshExisting(ctx, t.name)
	if err != nil {
		return err
	}
	switch {
	case t.stream != "" && topic.stream.name != t.stream, state.LastSeq < t.after, state.FirstSeq > t.after+1,
		!t.created.IsZero() && !t.created.Equal(topic.stream.created):
		return ErrDropped
	case t.created.IsZero():
		t.created, t.present = topic.stream.created, state.LastSeq
	}
	feed, pending, err := t.bus.openFeed(ctx, topic.stream.name, natsjs.ConsumerConfig{
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: t.after + 1, FilterSubjects: topic.filters(),
	})
	if err != nil {
		return err
	}
	defer feed.close(ctx)
	for {
		if !t.told && (pending == 0 || t.after >= t.present) {
			t.told = true
			if err := t.f(nil); err != nil {
				return stopped(err)
			}
		}
		patience := time.Duration(0)
		if !t.told {
			patience = time.Second
		}
		m, left, err := feed.next(ctx, patience)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			if pending, err = feed.pending(ctx); err != nil {
				return err
			}
			continue // what was counted may have been removed meanwhile
		}
		if err != nil {
			return err
		}
		if m.seq > t.after+1 && !topic.stream.family {
			if err := t.overtaken(ctx); err != nil {
				return err
			}
		}
		if err := t.f(topic.event(m)); err != nil {
			return stopped(err)
		}
		t.after, pending = m.seq, left
	}
}

// overtaken returns ErrDropped when the stream has dropped what comes next. Other holes in it are none.
func (t *tail) overtaken(ctx context.Context) error {
	topic, state, err := t.bus.freshExisting(ctx, t.name)
	if err != nil {
		return err
	}
	if state.FirstSeq > t.after+1 || !t.created.Equal(topic.stream.created) {
		return ErrDropped
	}
	return nil
}

// Bounds are the sequences of the first event that is left in the topic's stream and of the last one that was stored, other
// topics of a family included; 1 and 0 in a stream that never had any. It returns ErrNotFound when the topic does not exist.
func (b *Bus) Bounds(ctx context.Context, topic string) (first, last uint64, err error) {
	_, state, err := b.freshExisting(ctx, topic)
	return max(state.FirstSeq, 1), state.LastSeq, err
}

// Mark is a place in the bucket of a compacted topic. The zero Mark is its beginning.
type Mark struct {
	// Made is when the bucket was made: in another one the place says nothing.
	Made time.Time `json:"made"`
	// Sequence is the last entry that was read.
	Sequence uint64 `json:"sequence"`
}

// EachLatestSince is EachLatest for the keys that changed since an earlier call, which returned mark, up to the end at the
// moment of the call: a key that is written meanwhile may be left for the next one. It returns the mark to go on with.
func (b *Bus) EachLatestSince(ctx context.Context, topic string, mark Mark, f func(*Event) error) (Mark, error) {
	t, err := b.compacted(ctx, topic)
	if errors.Is(err, ErrNotFound) {
		return Mark{}, nil
	}
	if err != nil {
		return mark, b.readFailed(err)
	}
	info, err := b.findStream(ctx, t.bucket.stream)
	if errors.Is(err, ErrNotFound) {
		return Mark{}, nil
	}
	if err != nil {
		return mark, b.unavailable(err)
	}
	if !mark.Made.Equal(info.Created) || info.State.LastSeq < mark.Sequence {
		mark = Mark{Made: info.Created}
	}
	err = b.readThrough(ctx, t.bucket.stream, mark.Sequence+1, false, func(m *storedMsg) error {
		if e, _, ok := t.entry(m); ok {
			if err := f(e); err != nil {
				return &stopError{err}
			}
		}
		mark.Sequence = m.seq
		return nil
	})
	if own := (*stopError)(nil); errors.As(err, &own) {
		return mark, own.err
	}
	return mark, b.readFailed(err)
}
