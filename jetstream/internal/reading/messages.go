package reading

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

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
func OwnError(err error) (ok bool, own error) {
	stop, ok := errors.AsType[*stopError](err)
	if !ok {
		return false, nil
	}
	return true, stop.err
}

// stopError is an error of a reader's own function.
type stopError struct{ err error }

func (e *stopError) Error() string { return e.err.Error() }

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
