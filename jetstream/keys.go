package jetstream

import (
	"context"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/reading"
)

// Keys reads the newest event of each key of a topic. Most of its methods need a topic with
// compaction, and return a bad_topic *Error for other topics. A Keys is a small value that costs
// nothing to create, and creating one checks nothing. Its methods may be called concurrently. They
// return an internal *Error when NATS fails to answer properly, and ErrClosed. The receiver of an
// event owns it.
type Keys struct {
	reads *reading.Reads
	topic string
}

// Keys gives access to the newest event of each key of a topic.
func (b *Bus) Keys(topic string) Keys { return Keys{b.reads, topic} }

// Get returns the newest event of a key. It asks the leader of the topic's stream and, if the
// stream has no event of the key left, the leader of the bucket. Get therefore sees every publish
// that was confirmed before the call. The event is a Tombstone when the key was removed. Get
// returns ErrNotFound when the key is unknown or the topic does not exist.
func (k Keys) Get(ctx context.Context, key string) (*event.Event, error) {
	return k.reads.Get(ctx, k.topic, key)
}

// GetMany returns the newest event of each given key, without unknown and removed keys. It reads a
// single key as Get does, and then sees every publish that was confirmed before. It reads several
// keys from the bucket of a compacted topic, or from the stream of another topic, at any replica.
// Such reads may lag, usually by less than a millisecond (RELIABILITY.md). The topic need not be
// compacted. A topic that does not exist has no keys.
func (k Keys) GetMany(ctx context.Context, keys []string) (map[string]*event.Event, error) {
	return k.reads.GetMany(ctx, k.topic, keys)
}

// GetConsistent is GetMany, but reads every key as Get does. It costs one request to the leader per
// key.
func (k Keys) GetConsistent(ctx context.Context, keys []string) (map[string]*event.Event, error) {
	return k.reads.GetConsistent(ctx, k.topic, keys)
}

// Each calls f with the newest event of every key of a compacted topic, the oldest first,
// tombstones included. A key that is written meanwhile may come twice, the newer event later. Each
// ends when it has caught up with the writers. It stops when f returns an error, and returns that
// error. A topic that does not exist has no keys.
func (k Keys) Each(ctx context.Context, f func(*event.Event) error) error {
	return k.reads.Each(ctx, k.topic, f)
}

// BucketPosition is a position in the bucket of a compacted topic. The zero value is the beginning
// of the bucket.
type BucketPosition struct {
	// Created is when the bucket was created. The position has no meaning in another bucket.
	Created time.Time `json:"made"`
	// Sequence is the last entry that was read.
	Sequence uint64 `json:"sequence"`
}

// EachSince is Each for the keys that changed since an earlier call, which returned since. It reads
// up to the end of the bucket at the moment of the call, so a key that is written meanwhile may be
// left for the next call. It returns the position for the next call.
func (k Keys) EachSince(ctx context.Context, since BucketPosition, f func(*event.Event) error) (BucketPosition, error) {
	next, err := k.reads.EachSince(ctx, k.topic, reading.BucketPosition(since), f)
	return BucketPosition(next), err
}

// Snapshot calls f with the newest event of every key of a compacted topic, as Each does, and
// returns the sequence of the topic's stream up to which that is the present state: every key that
// changed later has an event behind it.
func (k Keys) Snapshot(ctx context.Context, f func(*event.Event) error) (upTo uint64, err error) {
	return k.reads.Snapshot(ctx, k.topic, f)
}

// Page returns up to limit (1..1,000) events of a compacted topic, one per key, the newest first.
// It skips the offset newest events, and all removed keys. A key that changes meanwhile moves to
// the front. A topic that does not exist has no events. A page ends early, but not before its first
// event, when its events exceed 32 MiB; the next page then begins at offset plus the number of
// events returned. Keys that are written or removed between two calls change the offsets of other
// keys, so a series of pages may omit keys that exist throughout. To read all keys, use List or
// Each.
//
// As long as the sum of offset and limit is at most 10,000, removed keys do not count in the
// offset. Beyond that they do, and an event may then be in two pages; while nothing is written, no
// event is omitted.
//
// A page takes a few milliseconds as long as each key was written once. Otherwise the server counts
// keys for each page, which takes about 0.1 s for 1,000,000 keys. Page returns an *Error
// (overloaded) when more than 20,000 of the newest keys were removed; List passes over them, a part
// on each page.
func (k Keys) Page(ctx context.Context, offset, limit int) ([]*event.Event, error) {
	return k.reads.Page(ctx, k.topic, offset, limit)
}

// ListOptions selects the page of a listing that Keys.List returns.
type ListOptions struct {
	// Next is Listing.Next of the previous page; "" begins a listing.
	Next string
	// Limit is the most events: 1..1,000.
	Limit int
	// Bytes is the approximate size limit of all events of the page in memory; a single event may
	// exceed it. Default 32 MiB.
	Bytes int
}

// Listing is a page of a listing.
type Listing struct {
	// Events has one event per key, in no particular order.
	Events []*event.Event
	// Next is the ListOptions.Next of the next page, or "" at the end.
	Next string
	// Cut is set when the page ended because of ListOptions.Bytes.
	Cut bool
}

// List lists the newest events of all keys of a compacted topic, page by page. A key that exists
// from the first call to the last comes exactly once, whatever is written and removed meanwhile,
// and whichever hubs serve the pages. A key that is created or removed meanwhile comes at most
// once. A page before the end may have fewer events than Limit, or none. A page may be requested
// again. A topic that does not exist has no events.
//
// A listing may take an hour. List returns an *Error when it cannot continue the listing, because
// the listing took longer, or because its bucket or the records of its pages were removed. Begin a
// new listing then.
func (k Keys) List(ctx context.Context, opts ListOptions) (Listing, error) {
	page, err := k.reads.List(ctx, k.topic, reading.ListOptions(opts))
	return Listing(page), err
}

// Watch first calls f with the newest event of each given key of a compacted topic, without removed
// keys. It then calls f once with nil, and then with every change, tombstones included. Without
// keys, Watch covers all keys; at most 1,000 keys may be given, with 256 KiB of names. Watch ends
// when ctx ends or f returns an error, and returns the error.
//
// The nil comes when f has caught up with the writers. Changes during the first reading may come
// before the nil, tombstones included, and so may tombstones of a bucket with several copies. Watch
// omits no change, except that the newest of several changes in close succession may stand for all
// of them. No key ever goes back in time. Watch continues by itself after a lost connection, and
// after the removal of the bucket. It creates the topic if it does not exist.
//
// Watch calls f from the goroutine of its caller. A slow f delays nobody else.
func (k Keys) Watch(ctx context.Context, keys []string, f func(*event.Event) error) error {
	return k.reads.Watch(ctx, k.topic, keys, f)
}
