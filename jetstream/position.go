package jetstream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Position is a starting point in a topic: FromLatest (the zero value), FromEarliest, FromTime or
// FromAfterID; for Group.Move also Back, AtBookmark or InPlace.
type Position struct {
	kind positionKind
	at   time.Time
	id   string // or the name of a bookmark
	back int
}

type positionKind int

const (
	atLatest positionKind = iota
	atEarliest
	atTime
	atID
	atBack
	atBookmark
	atPlace
)

var (
	// FromLatest is the end of the topic: only events that are stored from now on.
	FromLatest = Position{kind: atLatest}
	// FromEarliest is the oldest event that the topic still holds.
	FromEarliest = Position{kind: atEarliest}
	// InPlace is where the group is. A Move there repairs a group to which the server gives no
	// events any more: see Group.Move. It is for Group.Move only.
	InPlace = Position{kind: atPlace}
)

// FromTime begins with the first event that was stored at or after a time, which must not be before
// 1970. A time in the future is the end of the topic. PublishOptions.TS has no influence.
func FromTime(at time.Time) Position { return Position{kind: atTime, at: at} }

// FromAfterID begins right after the event with the given id. If the id is a UUIDv7 that is older
// than the oldest stored event, it begins at that event. For any other id that is not found, the
// call that uses the position returns an unknown_id *Error. Ids that are not UUIDv7s are searched
// among the last 100,000 events.
func FromAfterID(id string) Position { return Position{kind: atID, id: id} }

// Back is n events before the position of a group: before the oldest event that the group has not
// settled. It is for Group.Move only.
func Back(n int) Position { return Position{kind: atBack, back: n} }

// AtBookmark is a position that was stored by Bookmarks.Put. It is for Group.Move only.
func AtBookmark(name string) Position { return Position{kind: atBookmark, id: name} }

// validate returns a bad_options *Error for what no topic has.
func (p Position) validate() error {
	switch {
	case p.kind == atBack || p.kind == atBookmark || p.kind == atPlace:
		return event.BadOptions("this position is relative to a group: only a group can be moved to it")
	case p.kind == atTime && p.at.Before(time.Unix(0, 0)):
		return event.BadOptions("opts.ts is %d: it is epoch milliseconds, 0 or more", p.at.UnixMilli())
	case p.kind == atID && (p.id == "" || len(p.id) > native.MaxObjectName+maxIDLen):
		return event.BadOptions("opts.afterId has %d bytes: an event's id is needed", len(p.id))
	}
	return nil
}

// resolve turns a position into the sequence of the first event after it. It is never beyond the
// end: a start beyond the end would skip events that are stored later. A search for an id counts
// for the client.
func (r *reads) resolve(ctx context.Context, t *streams.Topic, at Position, state natsjs.StreamState, client string) (uint64, error) {
	end := state.LastSeq + 1
	switch at.kind {
	case atEarliest:
		return 1, nil
	case atTime:
		return r.firstSince(ctx, t, streams.Farthest(at.at), end)
	case atID:
		seq, err := r.ids.find(ctx, t, at.id, state, client)
		if err != nil {
			return 0, err
		}
		return min(seq+1, end), nil
	default:
		return end, nil
	}
}

// firstSince is the sequence of the first event stored at or after since, or end.
func (r *reads) firstSince(ctx context.Context, t *streams.Topic, since time.Time, end uint64) (uint64, error) {
	m, err := r.nextStored(ctx, t, &walkOptions{since: since}, 0)
	if err != nil || m == nil {
		return end, err
	}
	return min(m.Seq, end), nil
}

// applyWait is how long a read waits before it asks again for an event that the stream's leader
// does not have yet.
const applyWait = 10 * time.Millisecond

// bySequence reads one event that was stored. It returns ErrNotFound when the event was removed. A
// consumer's leader may deliver an event that the stream's leader, another server, has not applied
// yet: then bySequence waits for it.
func (r *reads) bySequence(ctx context.Context, t *streams.Topic, seq uint64) (*event.Event, error) {
	m, err := r.conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": seq})
	for errors.Is(err, event.ErrNotFound) {
		info, infoErr := r.conn.FindStream(ctx, t.Stream.Name)
		if infoErr != nil {
			return nil, infoErr
		}
		applied := info.State.LastSeq >= seq
		if !applied {
			select {
			case <-time.After(applyWait):
			case <-ctx.Done():
				return nil, fmt.Errorf("jetstream: read stream %s: event %d is not there yet: %w", t.Stream.Name, seq, ctx.Err())
			}
		}
		if m, err = r.conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": seq}); applied {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	e := t.Event(m)
	if t.Stream.Family && !t.PutBack { // the subject of a copy names its queue
		e.Topic = subjectTopic(m.Subject)
	}
	return e, nil
}

// walkOptions say what walk reads.
type walkOptions struct {
	start       uint64    // first sequence; or
	since       time.Time // stored at or after
	until       time.Time // stop behind this moment of storage; zero: none
	max         int       // messages to look at; 0: all
	headersOnly bool
	latestByKey bool
	key         string // only events of it
	batch       int    // messages asked for at a time; 0: 1,000
}

// errStopWalk ends a walk without an error.
var errStopWalk = errors.New("stop")

// walk calls f for the stored messages of a topic in order, up to the end of the stream at its
// beginning: as its leader knows it, whichever replica is read.
func (r *reads) walk(ctx context.Context, t *streams.Topic, opts walkOptions, f func(*conn.StoredMsg) error) error {
	info, err := r.conn.FindStream(ctx, t.Stream.Name)
	if err != nil {
		return r.conn.Unavailable(err)
	}
	end := info.State.LastSeq
	for failed := 0; ; {
		last, ended, err := r.walkOn(ctx, t, &opts, f)
		if err != nil || ended || last >= end {
			return err
		}
		next, err := r.nextStored(ctx, t, &opts, last)
		if err != nil || next == nil || next.Seq > end || opts.beyond(next.Time) {
			return err
		}
		// The replica that was read did not have it yet.
		if failed++; last > 0 {
			failed = 1
		}
		if failed == readAgain || opts.latestByKey {
			return r.conn.Unavailable(errBehind)
		}
		opts.start, opts.since = next.Seq, time.Time{}
		if err := r.conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// beyond says that what was stored then does not belong to the walk.
func (o *walkOptions) beyond(at time.Time) bool { return !o.until.IsZero() && at.After(o.until) }

// filters are the subjects of a walk in the stream of a topic; none: all.
func (o *walkOptions) filters(t *streams.Topic) []string {
	switch {
	case o.key != "":
		return []string{keyedSubject(t.Name, o.key)}
	case o.latestByKey:
		return []string{keyedPattern(t.Name)}
	default:
		return t.Filters()
	}
}

// nextStored asks the leader for the first message of a walk behind a sequence (0: from the walk's
// start on). It is nil when there is none.
func (r *reads) nextStored(ctx context.Context, t *streams.Topic, opts *walkOptions, last uint64) (*conn.StoredMsg, error) {
	seq := max(last+1, opts.start)
	if last == 0 && opts.start == 0 && !opts.since.IsZero() {
		seq = 0
	}
	m, err := r.messages.leaderNext(ctx, t.Stream.Name, seq, opts.since, opts.filters(t))
	if err != nil {
		return nil, r.conn.Unavailable(err)
	}
	return m, nil
}

// walkMakes is how long the server may take to make the consumer of a walk.
const walkMakes = 5 * time.Second

// walkOn reads through an ephemeral consumer without acks, which the server forgets by itself when
// the hub dies. It returns the last sequence that it read, 0 for none. ended says that there is no
// more to read: f or a bound of the walk has ended it. Else the replica that was read had no more.
func (r *reads) walkOn(ctx context.Context, t *streams.Topic, opts *walkOptions, f func(*conn.StoredMsg) error) (last uint64, ended bool, err error) {
	cfg := natsjs.ConsumerConfig{
		AckPolicy:         natsjs.AckNonePolicy,
		FilterSubjects:    opts.filters(t),
		HeadersOnly:       opts.headersOnly,
		MemoryStorage:     true,
		InactiveThreshold: 30 * time.Second,
		Replicas:          1,
	}
	switch {
	case opts.latestByKey:
		cfg.DeliverPolicy = natsjs.DeliverLastPerSubjectPolicy
	case opts.start > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = natsjs.DeliverByStartSequencePolicy, opts.start
	case !opts.since.IsZero():
		since := opts.since
		cfg.DeliverPolicy, cfg.OptStartTime = natsjs.DeliverByStartTimePolicy, &since
	}
	failed := func(err error) (uint64, bool, error) {
		return last, false, r.conn.Unavailable(fmt.Errorf("jetstream: read of stream %s: %w", t.Stream.Name, err))
	}
	if err := ctx.Err(); err != nil {
		return failed(err)
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind: so it is
	// made under a context of its own, and under a name that is known before.
	cfg.Name = rand.Text()
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		// else the server drops it in 30 s
		_ = r.conn.JS.DeleteConsumer(ctx, t.Stream.Name, cfg.Name)
	}()
	pulls, err := r.conn.NewPuller(t.Stream.Name, cfg.Name)
	if err != nil {
		return failed(err)
	}
	defer pulls.Close()
	making, made := context.WithTimeout(context.WithoutCancel(ctx), walkMakes)
	defer made()
	c, err := r.conn.JS.CreateConsumer(making, t.Stream.Name, cfg)
	if err != nil {
		return failed(err)
	}
	batch := conn.MaxPull
	if opts.batch > 0 {
		batch = opts.batch
	}
	var seen uint64
	for left := c.CachedInfo().NumPending; left > 0; {
		if opts.max > 0 {
			batch = min(batch, opts.max)
		}
		got, err := pulls.Pull(ctx, int(min(left, uint64(batch))), func(m *nats.Msg, meta conn.DeliveryMeta, pending uint64) error { //nolint:gosec // at most batch
			// without acks nothing is sent twice: a hole would stay one
			if seen++; meta.Order != seen {
				return fmt.Errorf("message %d of it was lost on the way", seen)
			}
			at := time.Unix(0, meta.StoredAt)
			if opts.beyond(at) {
				return errStopWalk
			}
			switch err := f(&conn.StoredMsg{Subject: m.Subject, Seq: meta.StreamSeq, Header: m.Header, Data: m.Data, Time: at}); {
			case errors.Is(err, errStopWalk):
				return err
			case err != nil:
				return &stopError{err}
			}
			last = meta.StreamSeq
			if left--; pending == 0 {
				left = 0
			}
			if opts.max--; opts.max == 0 {
				return errStopWalk
			}
			return nil
		})
		own, stops := errors.AsType[*stopError](err)
		switch {
		case errors.Is(err, errStopWalk):
			return last, true, nil
		case stops:
			return last, true, own.err
		case ctx.Err() != nil:
			return last, false, ctx.Err()
		case err != nil:
			return failed(err)
		case got == 0:
			return last, false, nil // what was counted has been removed meanwhile
		}
	}
	return last, false, nil
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
	r, topic := h.reads, h.topic
	if opts.Limit <= 0 {
		opts.Limit = 1_000
	}
	if err := opts.From.validate(); err != nil {
		return err
	}
	t, err := r.streams.Existing(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	walk := walkOptions{max: opts.Limit, latestByKey: opts.LatestByKey, key: opts.Key, batch: min(opts.Limit, 1_000)}
	if !opts.Until.IsZero() {
		walk.until = streams.Farthest(time.UnixMilli(opts.Until.UnixMilli()).Add(time.Millisecond - 1))
	}
	switch {
	case opts.LatestByKey:
	case opts.From.kind == atTime:
		walk.since = streams.Farthest(opts.From.at)
	case opts.From.kind == atID:
		info, err := r.conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return r.conn.Unavailable(err)
		}
		if walk.start, err = r.resolve(ctx, t, opts.From, info.State, ""); err != nil {
			return err
		}
	}
	return r.walk(ctx, t, walk, func(m *conn.StoredMsg) error { return f(t.Event(m)) })
}
