package reading

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/pacedlog"
)

// Messages reads the stored messages of streams, whatever they are. Its methods may be called
// concurrently.
type Messages struct {
	Conn  *conn.Pool
	Often *pacedlog.Log
}

// tries bounds how often a read that does not come forward begins again.
const tries = 5

// Through calls f for all messages of a stream from a sequence on, up to its end at the moment
// of the call. What is cut off goes on where it was.
func (r *Messages) Through(ctx context.Context, stream string, from uint64, headersOnly bool, f func(*conn.StoredMsg) error) error {
	info, err := r.Conn.FindStream(ctx, stream)
	if err != nil {
		return err
	}
	return r.readTo(ctx, stream, from, info.State.LastSeq, headersOnly, f)
}

// readTo is readThrough to a given end.
func (r *Messages) readTo(ctx context.Context, stream string, from, end uint64, headersOnly bool, f func(*conn.StoredMsg) error) error {
	for failed := 0; from <= end; {
		next, err := r.readOn(ctx, stream, from, end, headersOnly, f)
		if err == nil && next <= end {
			next, err = r.readRest(ctx, stream, next, end, f)
		}
		if err == nil && next <= end { // a replica has no more: what does the leader say?
			var left *conn.StoredMsg
			if left, err = r.LeaderNext(ctx, stream, next, time.Time{}, nil); left != nil && left.Seq <= end {
				err = ErrBehind
			}
		}
		switch own, stops := errors.AsType[*stopError](err); {
		case err == nil:
			return nil
		case stops:
			return own.err
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, natsjs.ErrStreamNotFound):
			return event.ErrNotFound
		}
		if failed++; next > from {
			failed = 0
		}
		if from = next; failed == tries {
			return err
		}
		if err := r.Conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// readRest reads by direct gets from a sequence on, until a replica has no more or is beyond end.
// It returns the sequence to go on with. Unlike a consumer's count of what is pending, the end of a
// direct get is exact.
func (r *Messages) readRest(ctx context.Context, stream string, from, end uint64, f func(*conn.StoredMsg) error) (next uint64, err error) {
	for more := true; more && from <= end; {
		var got conn.DirectEnd
		if from, got, err = r.readBatch(ctx, stream, conn.DirectQuery{Seq: from}, end, f); err != nil {
			break
		}
		more = got.Pending > 0
	}
	return from, err
}

// readBatch is one direct get. next is the sequence to go on with: of given subjects, one beyond
// all that the replica had, if it had any of them.
func (r *Messages) readBatch(ctx context.Context, stream string, q conn.DirectQuery, end uint64, f func(*conn.StoredMsg) error) (next uint64, got conn.DirectEnd, err error) {
	if next = q.Seq; q.MultiLast == nil && q.Batch == 0 {
		q.Batch = conn.MaxDirect
	}
	got, err = r.Conn.Direct(ctx, stream, &q, func(m *conn.StoredMsg, _ uint64) error {
		if m.Seq > end {
			return ErrStop
		}
		if err := f(m); err != nil {
			return &stopError{err}
		}
		next = m.Seq + 1
		return nil
	})
	switch {
	case errors.Is(err, ErrStop):
		return end + 1, conn.DirectEnd{}, nil
	case err == nil && got.Pending == 0:
		next = max(next, got.UpTo+1)
	}
	return max(next, got.Last+1), got, err // last: that of a message that cannot be read
}

// Own marks an error as the caller's own, which is to be returned as it is.
func Own(err error) error {
	if err == nil {
		return nil
	}
	return &stopError{err}
}

// OwnError returns the error that Own has marked, if there is one.
func OwnError(err error) (own error, ok bool) {
	stop, ok := errors.AsType[*stopError](err)
	if !ok {
		return nil, false
	}
	return stop.err, true
}

// stopError is an error of a reader's own function.
type stopError struct{ err error }

func (e *stopError) Error() string { return e.err.Error() }

// readOn reads through a consumer, from a sequence on, and returns the one to go on with: beyond
// end when nothing is left up to there. It is not when the server's count said that nothing is
// left: that takes off what is replaced at once, and adds what replaces it a little later, so it
// may be too low for a moment.
func (r *Messages) readOn(ctx context.Context, stream string, from, end uint64, headersOnly bool, f func(*conn.StoredMsg) error) (uint64, error) {
	feed, pending, err := r.Conn.OpenFeed(ctx, stream, natsjs.ConsumerConfig{
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: max(from, 1), HeadersOnly: headersOnly,
	})
	if err != nil {
		return from, err
	}
	defer feed.Close(ctx)
	for pending > 0 && from <= end {
		m, left, err := feed.Next(ctx, conn.FeedHeartbeat)
		if errors.Is(err, conn.ErrIdle) {
			if pending, err = feed.Pending(ctx); err != nil {
				return from, err
			}
			continue // what was counted may have been removed meanwhile
		}
		if err != nil {
			return from, err
		}
		if m.Seq > end {
			return end + 1, nil
		}
		if err := f(m); err != nil {
			return from, &stopError{err}
		}
		from, pending = m.Seq+1, left
	}
	return from, nil
}

// Follow calls follow again and again, until ctx or the bus ends, or what it returns is no
// passing failure: a reader's own error, one that a client may be told, or one of final. reached
// says how far it came.
func (r *Messages) Follow(ctx context.Context, topic string, follow func(context.Context) error, reached func() uint64, final ...error) error {
	if r.Conn.Closing() {
		return event.ErrClosed
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.Conn.Ctx, cancel)() //nolint:contextcheck // the end of the bus ends the reading too
	const first, longest = 50 * time.Millisecond, 2 * time.Second
	for wait := first; ; {
		came := reached()
		err := follow(ctx)
		own, stops := errors.AsType[*stopError](err)
		known, isKnown := errors.AsType[*event.Error](err)
		switch {
		case stops:
			return own.err
		case slices.ContainsFunc(final, func(end error) bool { return errors.Is(err, end) }):
			return err
		case r.Conn.Ctx.Err() != nil:
			return event.ErrClosed
		case ctx.Err() != nil:
			return ctx.Err()
		case isKnown && known.Code != event.CodeInternal:
			return err
		}
		if wait = min(2*wait, longest); reached() > came {
			wait = first
		}
		r.Often.Log(ctx, slog.LevelWarn, "a reader was cut off and goes on", topic, slog.String("topic", topic), slog.Any("error", err))
		_ = r.Conn.Pause(ctx, wait) // why it ended is looked at above
	}
}
