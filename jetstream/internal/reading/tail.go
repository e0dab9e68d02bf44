package reading

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// ErrDropped is returned by Tail when the stream no longer holds the next events. The caller has
// received no event from behind the gap.
var ErrDropped = errors.New("jetstream: the stream has dropped events behind that position")

// Tail is History.Tail.
func (r *Reads) Tail(ctx context.Context, topic string, stream string, after uint64, f func(*event.Event) error) error {
	t := &tail{reads: r, name: topic, stream: stream, after: after, f: f}
	return r.Messages.Follow(ctx, topic, t.follow, func() uint64 { return t.after }, ErrDropped, event.ErrNotFound)
}

// tail is where one Tail is.
type tail struct {
	reads   *Reads
	name    string
	stream  string
	created time.Time
	after   uint64
	present uint64 // the last event that was there at first
	told    bool   // f(nil) was called
	f       func(*event.Event) error
}

func (t *tail) follow(ctx context.Context) error {
	topic, state, err := t.reads.Streams.FreshExisting(ctx, t.name)
	if err != nil {
		return err
	}
	switch {
	case t.stream != "" && topic.Stream.Name != t.stream, state.LastSeq < t.after, state.FirstSeq > t.after+1,
		!t.created.IsZero() && !t.created.Equal(topic.Stream.Created):
		return ErrDropped
	case t.created.IsZero():
		t.created, t.present = topic.Stream.Created, state.LastSeq
	}
	feed, pending, err := t.reads.Conn.OpenFeed(ctx, topic.Stream.Name, natsjs.ConsumerConfig{
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: t.after + 1, FilterSubjects: topic.Filters(),
	})
	if err != nil {
		return err
	}
	defer feed.Close(ctx)
	for {
		if !t.told && (pending == 0 || t.after >= t.present) {
			t.told = true
			if err := t.f(nil); err != nil {
				return Own(err)
			}
		}
		patience := time.Duration(0)
		if !t.told {
			patience = time.Second
		}
		m, left, err := feed.Next(ctx, patience)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			if pending, err = feed.Pending(ctx); err != nil {
				return err
			}
			continue // what was counted may have been removed meanwhile
		}
		if err != nil {
			return err
		}
		if m.Seq > t.after+1 && !topic.Stream.Family {
			if err := t.overtaken(ctx); err != nil {
				return err
			}
		}
		if err := t.f(topic.Event(m)); err != nil {
			return Own(err)
		}
		t.after, pending = m.Seq, left
	}
}

// overtaken returns ErrDropped when the stream has dropped what comes next. Other holes in it are
// none.
func (t *tail) overtaken(ctx context.Context) error {
	topic, state, err := t.reads.Streams.FreshExisting(ctx, t.name)
	if err != nil {
		return err
	}
	if state.FirstSeq > t.after+1 || !t.created.Equal(topic.Stream.Created) {
		return ErrDropped
	}
	return nil
}
