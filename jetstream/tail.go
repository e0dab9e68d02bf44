package jetstream

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// ErrDropped is returned by Tail when events that come next are not in the stream any more. The
// caller has been told nothing of what lies behind the hole.
var ErrDropped = errors.New("jetstream: the stream has dropped events behind that position")

// Tail calls f with every event of a topic behind a sequence of its stream ("": of whichever it
// has), in order; once with nil, when it has handed on all that was stored when Tail was called;
// and then with what comes, until ctx ends or f returns an error, which it returns. It is no member
// of any group. A lost connection is no end: it goes on where it was, or returns ErrDropped if that
// cannot be, and also when the topic's bounds overtake it (but not in the stream of a family). It
// returns ErrNotFound when the topic does not exist. f is called from the goroutine that called
// Tail.
func (h History) Tail(ctx context.Context, stream string, after uint64, f func(*Event) error) error {
	t := &tail{bus: h.bus, name: h.topic, stream: stream, after: after, f: f}
	return h.bus.keepReading(ctx, h.topic, t.follow, func() uint64 { return t.after }, ErrDropped, ErrNotFound)
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

// overtaken returns ErrDropped when the stream has dropped what comes next. Other holes in it are
// none.
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
