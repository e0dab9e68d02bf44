package reading

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Position is a starting point in a topic. The zero value is its end.
type Position struct {
	Kind Kind
	At   time.Time // of AtTime
	ID   string    // of AtID
}

// Kind is the kind of a Position.
type Kind int

// The kinds of positions.
const (
	AtLatest   Kind = iota // only events that are stored from now on
	AtEarliest             // the oldest event that the topic still holds
	AtTime                 // the first event stored at or after At
	AtID                   // behind the event with the ID
	AtGroup                // to a group: for nobody who reads
)

// Validate returns a bad_options *Error for what no topic has.
func (p Position) Validate() error {
	switch {
	case p.Kind == AtGroup:
		return event.BadOptions("this position is relative to a group: only a group can be moved to it")
	case p.Kind == AtTime && p.At.Before(time.Unix(0, 0)):
		return event.BadOptions("opts.ts is %d: it is epoch milliseconds, 0 or more", p.At.UnixMilli())
	case p.Kind == AtID && (p.ID == "" || len(p.ID) > native.MaxObjectName+native.MaxID):
		return event.BadOptions("opts.afterId has %d bytes: an event's id is needed", len(p.ID))
	}
	return nil
}

// Resolve turns a position into the sequence of the first event after it. It is never beyond the
// end: a start beyond the end would skip events that are stored later. A search for an id counts
// for the client.
func (r *Reads) Resolve(ctx context.Context, t *streams.Topic, at Position, state natsjs.StreamState, client string) (uint64, error) {
	end := state.LastSeq + 1
	switch at.Kind {
	case AtEarliest:
		return 1, nil
	case AtTime:
		return r.FirstSince(ctx, t, streams.Farthest(at.At), end)
	case AtID:
		seq, err := r.Find(ctx, t, at.ID, state, client)
		if err != nil {
			return 0, err
		}
		return min(seq+1, end), nil
	default:
		return end, nil
	}
}

// FirstSince is the sequence of the first event stored at or after since, or end.
func (r *Reads) FirstSince(ctx context.Context, t *streams.Topic, since time.Time, end uint64) (uint64, error) {
	m, err := r.NextStored(ctx, t, 0, since)
	if err != nil || m == nil {
		return end, err
	}
	return min(m.Seq, end), nil
}

// applyWait is how long a read waits before it asks again for an event that the stream's leader
// does not have yet.
const applyWait = 10 * time.Millisecond

// BySequence reads one event that was stored. It returns ErrNotFound when the event was removed. A
// consumer's leader may deliver an event that the stream's leader, another server, has not applied
// yet: then bySequence waits for it.
func (r *Reads) BySequence(ctx context.Context, t *streams.Topic, seq uint64) (*event.Event, error) {
	m, err := r.Conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": seq})
	for errors.Is(err, event.ErrNotFound) {
		info, infoErr := r.Conn.FindStream(ctx, t.Stream.Name)
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
		if m, err = r.Conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": seq}); applied {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	e := t.Event(m)
	if t.Stream.Family && !t.PutBack { // the subject of a copy names its queue
		e.Topic, _, _ = native.ParseSubject(m.Subject)
	}
	return e, nil
}

// ErrStop ends a reading without an error.
var ErrStop = errors.New("stop")

// Walk is Messages.Walk for the stored messages of a topic; for those with the subjects of the
// query, if it names any.
func (r *Reads) Walk(ctx context.Context, t *streams.Topic, q Query, f func(*conn.StoredMsg) error) error {
	if q.Subjects == nil {
		q.Subjects = t.Filters()
	}
	return r.Messages.Walk(ctx, t.Stream.Name, q, f)
}

// NextStored asks the leader for the first message of a topic from a sequence on, or stored since a
// moment where from is 0. It is nil when there is none.
func (r *Reads) NextStored(ctx context.Context, t *streams.Topic, from uint64, since time.Time) (*conn.StoredMsg, error) {
	if since.IsZero() {
		from = max(from, 1)
	}
	m, err := r.Messages.LeaderNext(ctx, t.Stream.Name, from, since, t.Filters())
	if err != nil {
		return nil, r.Conn.Unavailable(err)
	}
	return m, nil
}

// ScanOptions selects the events that Scan reads, as History.Scan has it.
type ScanOptions struct {
	From        Position
	Until       time.Time
	Limit       int
	Key         string
	LatestByKey bool
}

// Scan is History.Scan.
func (r *Reads) Scan(ctx context.Context, topic string, opts *ScanOptions, f func(*event.Event) error) error {
	limit := cmp.Or(max(opts.Limit, 0), 1_000)
	if err := opts.From.Validate(); err != nil {
		return err
	}
	t, err := r.Streams.Existing(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	q := Query{Max: limit, LatestPerSubject: opts.LatestByKey, Batch: min(limit, 1_000)}
	switch {
	case opts.Key != "":
		q.Subjects = []string{native.Subject(t.Name, opts.Key)}
	case opts.LatestByKey:
		q.Subjects = []string{native.KeyedPattern(t.Name)}
	}
	if !opts.Until.IsZero() {
		q.Until = streams.Farthest(time.UnixMilli(opts.Until.UnixMilli()).Add(time.Millisecond - 1))
	}
	switch {
	case opts.LatestByKey:
	case opts.From.Kind == AtTime:
		q.Since = streams.Farthest(opts.From.At)
	case opts.From.Kind == AtID:
		info, err := r.Conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return r.Conn.Unavailable(err)
		}
		if q.From, err = r.Resolve(ctx, t, opts.From, info.State, ""); err != nil {
			return err
		}
	}
	return r.Walk(ctx, t, q, func(m *conn.StoredMsg) error { return f(t.Event(m)) })
}
