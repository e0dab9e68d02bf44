package reading

import (
	"context"
	"errors"
	"iter"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// RangeOptions selects the events of a Range, as History.Range has it.
type RangeOptions struct {
	From         Position
	Since, Until time.Time
	Limit        int
	Key          string
	Headers      map[string]string
	CountFor     string
}

// Range is a range of the stored events of a topic. Its fields are those of the Range of the bus.
type Range struct {
	Truncated       bool
	FirstID, LastID string

	reads *Reads
	topic *streams.Topic // nil: the topic does not exist
	opts  *RangeOptions
	first uint64 // the first sequence of the range
	last  uint64 // the last one
	loose bool   // the range begins with whatever is left
}

// Before is Range.Before of the bus.
func (r *Range) Before() string {
	if r.topic == nil || r.first <= 1 {
		return ""
	}
	return r.topic.Stream.Name + "@" + strconv.FormatUint(r.first-1, 10)
}

// Bounds is Range.Bounds of the bus.
func (r *Range) Bounds() (first, last uint64) { return r.first, r.last }

// Range is History.Range.
func (r *Reads) Range(ctx context.Context, topic string, opts *RangeOptions) (*Range, error) {
	if err := opts.From.Validate(); err != nil {
		return nil, err
	}
	found := &Range{reads: r, opts: opts}
	t, state, err := r.Streams.FreshExisting(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return found, nil
	}
	if err != nil {
		return nil, err
	}
	found.topic, found.last = t, state.LastSeq
	left := max(state.FirstSeq, 1)
	since := opts.Since
	switch opts.From.Kind {
	case AtTime:
		if opts.From.At.After(since) {
			since = opts.From.At
		}
	case AtID:
		if found.first, err = r.Resolve(ctx, t, opts.From, state, opts.CountFor); err != nil {
			return nil, err
		}
		// Only an id that tells its place is found when its event is gone.
		_, _, native := native.ParsePlace(opts.From.ID)
		found.Truncated = found.first < left || found.first == left && left > 1 && !native
	default:
		found.loose = since.IsZero()
	}
	if !since.IsZero() {
		at, err := r.FirstSince(ctx, t, streams.Farthest(since), state.LastSeq+1)
		if err != nil {
			return nil, err
		}
		if at > found.first {
			found.first = at
			found.Truncated = left > 1 && (state.Msgs == 0 && !state.LastTime.Before(since) || state.Msgs > 0 && state.FirstTime.After(since))
		}
	}
	found.first, found.loose = max(found.first, left), found.loose || found.Truncated
	if !opts.Until.IsZero() {
		beyond := streams.Farthest(time.UnixMilli(opts.Until.UnixMilli()).Add(time.Millisecond))
		at, err := r.FirstSince(ctx, t, beyond, state.LastSeq+1)
		if err != nil {
			return nil, err
		}
		found.last = min(found.last, at-1)
	}
	return found, found.name(ctx)
}

// name fills in FirstID and LastID.
func (r *Range) name(ctx context.Context) error {
	b, t := r.reads, r.topic
	subjects := t.Filters()
	if r.Truncated {
		m, err := b.Messages.LeaderNext(ctx, t.Stream.Name, 1, time.Time{}, subjects)
		if err != nil {
			return b.Conn.Unavailable(err)
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
		m, err := b.Conn.LastBySubject(ctx, t.Stream.Name, subject)
		switch {
		case errors.Is(err, event.ErrNotFound):
		case err != nil:
			return b.Conn.Unavailable(err)
		case newest == nil || m.Seq > newest.Seq:
			newest = m
		}
	}
	if newest != nil {
		r.LastID = t.Event(newest).ID
	}
	return nil
}

// Events is Range.Events of the bus.
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

// errRangeEnded ends the reading of a range of which nobody wants more.
var errRangeEnded = errors.New("jetstream: a range was read")

// run reads the range, and begins again where it was when it is cut off.
func (r *rangeRead) run(ctx context.Context, yield func(*event.Event, error) bool) error {
	if r.reads.Conn.Closing() {
		return event.ErrClosed
	}
	q := Query{From: r.next, Last: r.last, Subjects: r.topic.Filters(), Again: r.same}
	if r.opts.Key != "" {
		q.Subjects = []string{native.Subject(r.topic.Name, r.opts.Key)}
	}
	if len(r.opts.Headers) == 0 && r.opts.Limit > 0 {
		q.Batch = min(pullBatch, r.opts.Limit)
	}
	err := r.reads.Messages.Windows(ctx, r.topic.Stream.Name, q, func(window []*conn.StoredMsg) error {
		whole, err := r.whole(ctx, q.Subjects, window)
		if err != nil {
			return err
		}
		if err := r.give(window[:whole], yield); err != nil {
			return Own(err)
		}
		if whole < len(window) {
			return Own(ErrDropped)
		}
		return nil
	})
	if errors.Is(err, errRangeEnded) {
		return nil
	}
	if err != nil || q.Subjects != nil || r.loose || r.next > r.last {
		return err
	}
	return r.torn(ctx)
}

// torn returns ErrDropped when the stream's bounds have removed the end of the range, which no
// message from behind the range tells any more.
func (r *rangeRead) torn(ctx context.Context) error {
	info, err := r.reads.Conn.FindStream(ctx, r.topic.Stream.Name)
	switch {
	case errors.Is(err, event.ErrNotFound):
		return ErrDropped
	case err != nil:
		return r.reads.Conn.Unavailable(err)
	case info.State.Msgs > 0 && info.State.FirstSeq > r.next:
		return ErrDropped
	}
	return nil
}

// same returns ErrDropped when the stream was created again since the range was found.
func (r *rangeRead) same(ctx context.Context) error {
	info, err := r.reads.Conn.FindStream(ctx, r.topic.Stream.Name)
	if errors.Is(err, event.ErrNotFound) || err == nil && !native.StreamMade(info).Equal(r.topic.Stream.Created) {
		return ErrDropped
	}
	return nil // what else is wrong, the next try tells
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
				info, err := r.reads.Conn.FindStream(ctx, r.topic.Stream.Name)
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
		r.next = m.Seq + 1
		if e := r.topic.Event(m); hasHeaders(e, r.opts.Headers) {
			if !yield(e, nil) {
				return errRangeEnded
			}
			if r.left--; r.left == 0 {
				return errRangeEnded
			}
		}
	}
	return nil
}

// hasHeaders reports whether the event's headers have all these values. Names are compared in any
// case.
func hasHeaders(e *event.Event, wanted map[string]string) bool {
	for name, value := range wanted {
		if got, ok := e.Headers[name]; ok && got == value {
			continue
		}
		found := false
		for have, got := range e.Headers {
			found = found || got == value && strings.EqualFold(have, name)
		}
		if !found {
			return false
		}
	}
	return true
}
