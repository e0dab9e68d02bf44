package jetstream

import (
	"context"
	"iter"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/reading"
)

// History reads the stored events of a topic, without a group. A History is a small value that
// costs nothing to create, and creating one checks nothing. Its methods may be called concurrently.
// Except for Place, they create no topic. They return a bad_topic *Error for an invalid name, an
// internal *Error when NATS fails to answer properly, and ErrClosed.
type History struct {
	reads *reading.Reads
	topic string
}

// History gives access to the stored events of a topic.
func (b *Bus) History(topic string) History { return History{b.reads, topic} }

// ByID returns the event with an id. It returns ErrNotFound when there is no such event. Ids that
// are not UUIDv7s are searched among the last 100,000 events. The search counts for the client, as
// in ReadOptions.
func (h History) ByID(ctx context.Context, id, client string) (*event.Event, error) {
	return h.reads.ByID(ctx, h.topic, id, client)
}

// NextOfKey returns the first event of a key after a sequence of the topic's stream, read at the
// stream's leader. It returns ErrNotFound when there is no such event or the topic does not exist.
// A leader that was elected a moment ago may lack the newest events; Bounds tells how far it is.
func (h History) NextOfKey(ctx context.Context, key string, after uint64) (*event.Event, error) {
	return h.reads.NextOfKey(ctx, h.topic, key, after)
}

// Bounds returns the sequences of the oldest event that the topic's stream still holds and of the
// last event stored, other topics of a family included. It returns 1 and 0 for a stream that never
// had an event. It returns ErrNotFound when the topic does not exist.
func (h History) Bounds(ctx context.Context) (first, last uint64, err error) {
	return h.reads.Bounds(ctx, h.topic)
}

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

// Read returns the events of a range in the order of the stream. It is Range and Range.Events in
// one; a Range also tells what the stream has dropped.
func (h History) Read(ctx context.Context, opts ReadOptions) iter.Seq2[*event.Event, error] {
	r, err := h.Range(ctx, opts)
	if err != nil {
		return func(yield func(*event.Event, error) bool) { yield(nil, err) }
	}
	return r.Events(ctx)
}

// Range finds a range of stored events. A topic that does not exist has an empty one. Errors:
// bad_topic, bad_options, unknown_id (FromAfterID).
func (h History) Range(ctx context.Context, opts ReadOptions) (*Range, error) {
	found, err := h.reads.Range(ctx, h.topic, &reading.RangeOptions{
		From: opts.From.start(), Since: opts.Since, Until: opts.Until, Limit: opts.Limit, Key: opts.Key, Headers: opts.Headers, CountFor: opts.CountFor,
	})
	if err != nil {
		return nil, err
	}
	return &Range{Truncated: found.Truncated, FirstID: found.FirstID, LastID: found.LastID, found: found}, nil
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

	found *reading.Range
}

// Before returns the native id of the place before the first event of the range, for FromAfterID:
// unlike the id of an event, it is found however old it is. It returns "" for the beginning of a
// stream, and for a topic that does not exist.
func (r *Range) Before() string { return r.found.Before() }

// Bounds returns the first and the last sequence of the range. They are 0 for a topic that does not
// exist, and first is greater than last when no event belongs to the range.
func (r *Range) Bounds() (first, last uint64) { return r.found.Bounds() }

// Events returns the events of the range in the order of the stream. The hub holds at most 1.5 MiB
// of them, or one event if that is larger, however slowly they are taken. The iteration ends with
// an error when the events cannot be read; it goes on by itself after a lost connection. It ends
// with ErrDropped when the topic's bounds overtake the reader (but not for a Key, nor in the stream
// of a family): no event from behind the gap has been returned then, and a new Range after the last
// event says that it is truncated. The caller owns the events. Events reads through a consumer of
// its own, which joins no group and is removed at the end.
func (r *Range) Events(ctx context.Context) iter.Seq2[*event.Event, error] {
	return r.found.Events(ctx)
}

// ScanOptions selects the events that Scan reads.
type ScanOptions struct {
	// From is the starting point: FromEarliest, FromTime or FromAfterID. FromLatest, the zero
	// value, counts as FromEarliest.
	From Position
	// Until, if not zero, is the latest time of storage. Its whole millisecond is included.
	Until time.Time
	// Limit is the maximum number of events: default 1,000.
	Limit int
	// Key, if not "", reads only the events of that key.
	Key string
	// LatestByKey reads only the newest event of each key.
	LatestByKey bool
}

// Scan calls f for the stored events of a topic in order, up to the topic's end at the moment of
// the call. It stops when f returns an error, and returns that error. A topic that does not exist
// has no events. f owns its event. Errors: bad_topic, bad_options, unknown_id (FromAfterID).
func (h History) Scan(ctx context.Context, opts ScanOptions, f func(*event.Event) error) error {
	return h.reads.Scan(ctx, h.topic, &reading.ScanOptions{
		From: opts.From.start(), Until: opts.Until, Limit: opts.Limit, Key: opts.Key, LatestByKey: opts.LatestByKey,
	}, f)
}

// ErrDropped is returned by Tail when the stream no longer holds the next events. The caller has
// received no event from behind the gap.
var ErrDropped = reading.ErrDropped

// Tail calls f, in order, with every event of a topic after a sequence of its stream ("" for
// whichever stream the topic has). It calls f once with nil when f has received everything that was
// stored at the call of Tail, and then with new events. Tail ends when ctx ends or f returns an
// error, and returns the error. Tail joins no group. After a lost connection, Tail continues at its
// position. It returns ErrDropped if the next events are gone, also when the topic's bounds
// overtake the reader (but not in the stream of a family). It returns ErrNotFound when the topic
// does not exist. Tail calls f from the goroutine of its caller.
func (h History) Tail(ctx context.Context, stream string, after uint64, f func(*event.Event) error) error {
	return h.reads.Tail(ctx, h.topic, stream, after, f)
}

// MaxNewest is the maximum number of events that History.Newest returns.
const MaxNewest = reading.MaxNewest

// Newest returns the newest events of a topic, oldest first: limit events, from 1 to MaxNewest. It
// returns fewer if their payloads take more than 8 MiB, or if the topic has fewer among the last 64
// × limit messages of its stream, as a topic of a family may. A topic that does not exist has no
// events. Newest creates no topic.
func (h History) Newest(ctx context.Context, limit int) ([]*event.Event, error) {
	return h.reads.Newest(ctx, h.topic, limit)
}

// Place is a place in the stream of a topic.
type Place struct {
	// Stream is the name of the stream, and Made when it was created: a stream of the same name
	// that is created later is another one.
	Stream string
	Made   time.Time
	// First is the sequence of the oldest event that the stream holds, and Last that of the newest
	// one it ever held. A stream that never had an event has 1 and 0.
	First, Last uint64
	// Family reports that the stream holds other topics, too: sequences do not count the events of
	// the topic.
	Family bool
}

// Place returns where the topic is. It returns ErrNotFound when the topic does not exist. With a
// client, it creates the topic instead, if the client may create one more.
func (h History) Place(ctx context.Context, client string) (Place, error) {
	place, err := h.reads.Place(ctx, h.topic, client)
	return Place(place), err
}

// Back returns the sequence after which at most n events of the topic come, up to the sequence of
// place.Last. It looks at the last 100,000 events of the stream.
func (h History) Back(ctx context.Context, place Place, n int) (uint64, error) {
	return h.reads.Back(ctx, h.topic, reading.Place(place), n)
}

// IDSearch configures FindIDs.
type IDSearch struct {
	// Key, if not "", restricts the search to the events of that key, which are few. By default,
	// the search covers all events of the topic.
	Key string
	// IDs are the ids to search for, as given in PublishOptions.ID.
	IDs []string
	// Since is the earliest time of storage.
	Since time.Time
	// Max is the maximum number of events examined: default 100,000.
	Max int
}

// FindIDs reports which of the given ids occur among the events of a topic that were stored from
// s.Since up to the call. It reads the headers of events only.
//
// complete is true when the answer is certain for every id: all ids were found, or every event
// since then was examined. It is false when there were more events than Max, or when the limits of
// the stream may have removed events of that time. Events that a native client purged count as
// never stored. A topic that does not exist has no events, with certainty. FindIDs returns an error
// when it could not read as far as the stream's leader.
func (h History) FindIDs(ctx context.Context, s IDSearch) (found map[string]bool, complete bool, err error) {
	return h.reads.FindIDs(ctx, h.topic, reading.IDSearch(s))
}

// DuplicateWindow returns how long the topic's stream remembers the ids of events. A publish with a
// remembered id stores nothing. It returns ErrNotFound when the topic does not exist.
func (h History) DuplicateWindow(ctx context.Context) (time.Duration, error) {
	return h.reads.DuplicateWindow(ctx, h.topic)
}
