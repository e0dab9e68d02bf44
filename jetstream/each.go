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
		_, err = b.readAll(ctx, t.bucket.stream, 1, nil, func(m *storedMsg) error {
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

// readAll calls f for every message, from a sequence on, of a stream that keeps one a subject, until it has caught up with
// those who write; of given subjects only, if there are any (directMost at most). What replaces a message lies behind all
// others: so no subject is left out, however often it is written meanwhile, and f may get one twice, the newer one later. It
// returns the sequence behind which everything is new.
//
// It has caught up when one direct get has reached the end of a replica that has all that the leader had when it was asked
// before: what was passed earlier and is not replaced was there then.
func (b *Bus) readAll(ctx context.Context, stream string, from uint64, subjects []string, f func(*storedMsg) error) (uint64, error) {
	for failed := 0; ; {
		info, err := b.findStream(ctx, stream)
		if err != nil {
			return from, err
		}
		began, end, caughtUp := from, info.State.LastSeq, false
		if most := uint64(2 * directMost); subjects == nil && info.State.Msgs > most && end > from+most { // one consumer costs less than many counts
			from, err = b.readOn(ctx, stream, from, math.MaxUint64-1, false, f)
		}
		if err == nil && from == began {
			var more bool
			from, more, err = b.readBatch(ctx, stream, directQuery{Seq: from, MultiLast: subjects}, math.MaxUint64, f)
			caughtUp = !more && from > end
			if err == nil && from == began && !caughtUp { // that replica is behind, or the last message is not replaced but gone
				caughtUp, err = b.nothingFrom(ctx, stream, from, subjects)
			}
		}
		var own *stopError
		switch {
		case err == nil && caughtUp:
			return from, nil
		case errors.As(err, &own):
			return from, own.err
		case ctx.Err() != nil:
			return from, ctx.Err()
		case from > began:
			failed = 0
			continue
		}
		if failed++; failed == readAgain {
			return from, cmp.Or(err, errBehind)
		}
		if err := b.pause(ctx, 100*time.Millisecond); err != nil {
			return from, err
		}
	}
}

// nothingFrom asks whether a stream has no message from a sequence on: its leader, or, about given subjects, any replica.
func (b *Bus) nothingFrom(ctx context.Context, stream string, seq uint64, subjects []string) (bool, error) {
	if subjects != nil {
		got, err := b.direct(ctx, stream, &directQuery{Seq: seq, MultiLast: subjects, Batch: 1}, func(*storedMsg, uint64) error { return nil })
		return got.got == 0 && !got.garbled, err
	}
	_, err := b.getMsg(ctx, stream, map[string]any{"seq": seq, "next_by_subj": ">"})
	if errors.Is(err, ErrNotFound) {
		return true, nil
	}
	return false, err
}
