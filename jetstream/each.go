package jetstream

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"
)

// stopped marks an error as the caller's own, which is to be returned as it is.
func stopped(err error) error {
	if err == nil {
		return nil
	}
	return &stopError{err}
}

// EachLatest calls f with the newest event of every key of a compacted topic, the oldest first, tombstones included. A key
// that is written meanwhile may come twice, the newer event later; it ends when it has caught up with those who write. It
// stops when f returns an error, and returns that. A topic that does not exist has no keys.
func (b *Bus) EachLatest(ctx context.Context, topic string, f func(*Event) error) error {
	t, err := b.compacted(ctx, topic)
	if err == nil {
		err = b.readAll(ctx, t.bucket.stream, func(m *storedMsg) error {
			if e, _, ok := t.entry(m); ok {
				return stopped(f(e))
			}
			return nil
		})
	}
	var own *stopError
	if errors.As(err, &own) {
		return own.err
	}
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return b.readFailed(err)
}

// readAll calls f for every message of a stream that keeps one a subject, until it has caught up with those who write. What
// replaces a message lies behind all others: so no subject is left out, however often it is written meanwhile, and f may
// get one twice, the newer one later.
//
// It has caught up when one direct get has reached the end of a replica that has all that the leader had when it was asked
// before: what was passed earlier and is not replaced was there then.
func (b *Bus) readAll(ctx context.Context, stream string, f func(*storedMsg) error) error {
	next := uint64(1)
	for failed := 0; ; {
		info, err := b.findStream(ctx, stream)
		if err != nil {
			return err
		}
		began, end, caughtUp := next, info.State.LastSeq, false
		if most := uint64(2 * directMost); info.State.Msgs > most && end > next+most { // one consumer costs less than many counts
			err = b.readTo(ctx, stream, next, end, false, func(m *storedMsg) error {
				if err := f(m); err != nil {
					return &stopError{err}
				}
				next = m.seq + 1
				return nil
			})
		}
		if err == nil && next == began {
			var more bool
			next, more, err = b.readBatch(ctx, stream, next, math.MaxUint64, f)
			caughtUp = !more && next > end
			if err == nil && next == began && !caughtUp { // that replica is behind, or the last message is not replaced but gone
				caughtUp, err = b.nothingFrom(ctx, stream, next)
			}
		}
		var own *stopError
		switch {
		case err == nil && caughtUp:
			return nil
		case errors.As(err, &own):
			return own.err
		case ctx.Err() != nil:
			return ctx.Err()
		case next > began:
			failed = 0
			continue
		}
		if failed++; failed == readAgain {
			return cmp.Or(err, errBehind)
		}
		if err := b.pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// nothingFrom asks the leader of a stream whether it has no message from a sequence on.
func (b *Bus) nothingFrom(ctx context.Context, stream string, seq uint64) (bool, error) {
	_, err := b.getMsg(ctx, stream, map[string]any{"seq": seq, "next_by_subj": ">"})
	if errors.Is(err, ErrNotFound) {
		return true, nil
	}
	return false, err
}
