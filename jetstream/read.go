package jetstream

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"strconv"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// ReadOptions selects the events of a Range.
type ReadOptions struct {
	// From is the starting point: FromEarliest, FromTime or FromAfterID. FromLatest, the zero
	// value, counts as FromEarliest.
	From Position
	// Since, if not zero, is the earliest time of storage, in addition to From.
	Since time.Time
	// Until, if not zero, is the latest time of storage. Its whole millisecond is included.
	Until time.Time
	// Limit is the maximum number of events. Defaults to all.
	Limit int
	// Key, if not "", selects the events of that key.
	Key string
	// Headers, if not empty, selects the events whose headers have these values. Names are
	// compared in any case.
	Headers map[string]string
	// CountFor names the client for which a search for an id (FromAfterID) counts, as in
	// SubscribeOptions. Defaults to the program itself.
	CountFor string
}

// Range is a range of the stored events of a topic: from a sequence of its stream to another. It
// is fixed when it is made, so events that are stored later do not belong to it, and events that
// share a millisecond are never torn apart. Making a Range reads no event, and it needs no Close.
// A Range may be read several times, also concurrently.
type Range struct {
	// Truncated reports that the topic's bounds may have removed events from the beginning of the
	// range. For a time, that is so when the stream has dropped events and the oldest that is left
	// was stored after that time; in the stream of a family, the dropped ones may be events of
	// other topics. For an id, the event after it is gone. The range of FromEarliest begins with
	// the oldest event that is left, and is never truncated.
	Truncated bool
	// FirstID is the id of the oldest event that the topic holds, if Truncated; "" when it holds
	// none.
	FirstID string
	// LastID is the id of the newest event that the topic holds; "" when it holds none.
	LastID string

	reads *reads
	topic *streams.Topic // nil: the topic does not exist
	opts  ReadOptions
	first uint64 // the first sequence of the range
	last  uint64 // the last one
	loose bool   // the range begins with whatever is left
}

// Before returns the native id of the place before the first event of the range, for FromAfterID:
// unlike the id of an event, it is found however old it is. It returns "" for the beginning of a
// stream, and for a topic that does not exist.
func (r *Range) Before() string {
	if r.topic == nil || r.first <= 1 {
		return ""
	}
	return r.topic.Stream.Name + "@" + strconv.FormatUint(r.first-1, 10)
}

// Bounds returns the first and the last sequence of the range. They are 0 for a topic that does not
// exist, and first is greater than last when no event belongs to the range.
func (r *Range) Bounds() (first, last uint64) { return r.first, r.last }

// Read returns the events of a range in the order of the stream. It is Range and Range.Events in
// one; a Range also tells what the stream has dropped.
func (h History) Read(ctx context.Context, opts ReadOptions) iter.Seq2[*event.Event, error] {
	return func(yield func(*event.Event, error) bool) {
		r, err := h.Range(ctx, opts)
		if err != nil {
			yield(nil, err)
			return
		}
		r.Events(ctx)(yield)
	}
}

// Range finds a range of stored events. A topic that does not exist has an empty one. Errors:
// bad_topic, bad_options, unknown_id (FromAfterID).
func (h History) Range(ctx context.Context, opts ReadOptions) (*Range, error) {
	b := h.reads
	if err := opts.From.validate(); err != nil {
		return nil, err
	}
	r := &Range{reads: b, opts: opts}
	t, state, err := b.streams.FreshExisting(ctx, h.topic)
	if errors.Is(err, event.ErrNotFound) {
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	r.topic, r.last = t, state.LastSeq
	left := max(state.FirstSeq, 1)
	since := opts.Since
	switch opts.From.kind {
	case atTime:
		if opts.From.at.After(since) {
			since = opts.From.at
		}
	case atID:
		if r.first, err = b.resolve(ctx, t, opts.From, state, opts.CountFor); err != nil {
			return nil, err
		}
		// Only an id that tells its place is found when its event is gone.
		_, _, native := nativeID(opts.From.id)
		r.Truncated = r.first < left || r.first == left && left > 1 && !native
	default:
		r.loose = since.IsZero()
	}
	if !since.IsZero() {
		at, err := b.firstSince(ctx, t, streams.Farthest(since), state.LastSeq+1)
		if err != nil {
			return nil, err
		}
		if at > r.first {
			r.first = at
			r.Truncated = left > 1 && (state.Msgs == 0 && !state.LastTime.Before(since) || state.Msgs > 0 && state.FirstTime.After(since))
		}
	}
	r.first, r.loose = max(r.first, left), r.loose || r.Truncated
	if !opts.Until.IsZero() {
		beyond := streams.Farthest(time.UnixMilli(opts.Until.UnixMilli()).Add(time.Millisecond))
		at, err := b.firstSince(ctx, t, beyond, state.LastSeq+1)
		if err != nil {
			return nil, err
		}
		r.last = min(r.last, at-1)
	}
	return r, r.name(ctx)
}

// name fills in FirstID and LastID.
func (r *Range) name(ctx context.Context) error {
	b, t := r.reads, r.topic
	subjects := t.Filters()
	if r.Truncated {
		m, err := b.messages.leaderNext(ctx, t.Stream.Name, 1, time.Time{}, subjects)
		if err != nil {
			return b.conn.Unavailable(err)
		}
		if m != nil {
			r.FirstID = t.Event(m).ID
		}
	}
	if subjects == nil {
		subjects = []string{">"}
	}
	var newest *conn.StoredMsg
	for _, subject := range subjects {
		m, err := b.conn.LastBySubject(ctx, t.Stream.Name, subject)
		switch {
		case errors.Is(err, event.ErrNotFound):
		case err != nil:
			return b.conn.Unavailable(err)
		case newest == nil || m.Seq > newest.Seq:
			newest = m
		}
	}
	if newest != nil {
		r.LastID = t.Event(newest).ID
	}
	return nil
}

// Events returns the events of the range in the order of the stream. The hub holds at most 1.5 MiB
// of them, or one event if that is larger, however slowly they are taken. The iteration ends with
// an error when the events cannot be read; it goes on by itself after a lost connection. It ends
// with ErrDropped when the topic's bounds overtake the reader (but not for a Key, nor in the stream
// of a family): no event from behind the gap has been returned then, and a new Range after the last
// event says that it is truncated. The caller owns the events. Events reads through a consumer of
// its own, which joins no group and is removed at the end.
func (r *Range) Events(ctx context.Context) iter.Seq2[*event.Event, error] {
	return func(yield func(*event.Event, error) bool) {
		if r.topic == nil || r.first > r.last {
			return
		}
		read := rangeRead{Range: r, next: r.first, left: r.opts.Limit, loose: r.loose}
		if err := read.run(ctx, yield); err != nil {
			yield(nil, err)
		}
	}
}

// rangeRead is where one reader of a Range is.
type rangeRead struct {
	*Range
	next  uint64 // the sequence to go on with
	left  int    // events still to be returned; 0: all, where Limit is
	loose bool   // what comes first is the beginning
}

// errRangeEnded ends the reading of a range: all is read, or nobody wants more.
var errRangeEnded = errors.New("jetstream: a range was read")

// run reads the range, and begins again where it was when it is cut off.
func (r *rangeRead) run(ctx context.Context, yield func(*event.Event, error) bool) error {
	if r.reads.conn.Closing() {
		return event.ErrClosed
	}
	for failed := 0; ; {
		began := r.next
		err := r.readOn(ctx, yield)
		switch {
		case errors.Is(err, errRangeEnded):
			return nil
		case errors.Is(err, ErrDropped):
			return ErrDropped
		case ctx.Err() != nil:
			return ctx.Err()
		case r.reads.conn.Ctx.Err() != nil:
			return event.ErrClosed
		}
		if failed++; r.next > began {
			failed = 1
		}
		if failed == readAgain {
			return r.reads.conn.Unavailable(err)
		}
		if err := r.reads.conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		if err := r.same(ctx); err != nil {
			return err
		}
	}
}

// same returns ErrDropped when the stream was created again since the range was found.
func (r *rangeRead) same(ctx context.Context) error {
	info, err := r.reads.conn.FindStream(ctx, r.topic.Stream.Name)
	if errors.Is(err, event.ErrNotFound) || err == nil && !native.StreamMade(info).Equal(r.topic.Stream.Created) {
		return ErrDropped
	}
	return nil // what else is wrong, the next try tells
}

// readOn reads through one consumer until that has no more. It returns errRangeEnded at the end of
// the range.
func (r *rangeRead) readOn(ctx context.Context, yield func(*event.Event, error) bool) error {
	subjects := r.topic.Filters()
	if r.opts.Key != "" {
		subjects = []string{keyedSubject(r.topic.Name, r.opts.Key)}
	}
	batch := pullBatch
	if len(r.opts.Headers) == 0 && r.opts.Limit > 0 {
		batch = min(batch, r.left)
	}
	err := r.reads.readWindows(ctx, r.topic.Stream.Name, &r.next, r.last, subjects, batch, func(window []*conn.StoredMsg) error {
		whole, err := r.whole(ctx, subjects, window)
		if err != nil {
			return err
		}
		if err := r.give(window[:whole], yield); err != nil {
			return err
		}
		if whole < len(window) {
			return ErrDropped
		}
		return nil
	})
	return cmp.Or(err, errRangeEnded)
}

// whole returns how many messages come before the first gap that the stream's bounds may have torn.
// Other gaps are none: what was deleted on its own lies behind the stream's first message.
func (r *rangeRead) whole(ctx context.Context, subjects []string, window []*conn.StoredMsg) (int, error) {
	if subjects != nil {
		return len(window), nil
	}
	first, known := uint64(0), false
	for i, next := 0, r.next; i < len(window); i++ {
		m := window[i]
		if m.Seq > next && !r.loose {
			if !known {
				info, err := r.reads.conn.FindStream(ctx, r.topic.Stream.Name)
				if err != nil {
					return 0, err
				}
				first, known = info.State.FirstSeq, true
			}
			if first > next {
				return i, nil
			}
		}
		next, r.loose = m.Seq+1, false
	}
	return len(window), nil
}

// give returns messages that belong to the range and have its headers to the caller.
func (r *rangeRead) give(window []*conn.StoredMsg, yield func(*event.Event, error) bool) error {
	for _, m := range window {
		if m.Seq > r.last {
			return errRangeEnded
		}
		r.next = m.Seq + 1
		if e := r.topic.Event(m); hasHeaders(e, r.opts.Headers) {
			if !yield(e, nil) {
				return errRangeEnded
			}
			if r.left--; r.left == 0 {
				return errRangeEnded
			}
		}
		if m.Seq == r.last {
			return errRangeEnded
		}
	}
	return nil
}
