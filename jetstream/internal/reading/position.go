package reading

import (
	"cmp"
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

// Position is a starting point in a topic. The zero value is its end.
type Position struct {
	Kind Kind
	At   time.Time // of AtTime
	ID   string    // of AtID
}

// Kind is the kind of a Position.
type Kind int

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
	m, err := r.NextStored(ctx, t, &WalkOptions{Since: since}, 0)
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

// WalkOptions say what walk reads.
type WalkOptions struct {
	Start       uint64    // first sequence; or
	Since       time.Time // stored at or after
	Until       time.Time // stop behind this moment of storage; zero: none
	Max         int       // messages to look at; 0: all
	HeadersOnly bool
	LatestByKey bool
	Key         string // only events of it
	Batch       int    // messages asked for at a time; 0: 1,000
}

// ErrStop ends a walk without an error.
var ErrStop = errors.New("stop")

// Walk calls f for the stored messages of a topic in order, up to the end of the stream at its
// beginning: as its leader knows it, whichever replica is read.
func (r *Reads) Walk(ctx context.Context, t *streams.Topic, opts WalkOptions, f func(*conn.StoredMsg) error) error {
	info, err := r.Conn.FindStream(ctx, t.Stream.Name)
	if err != nil {
		return r.Conn.Unavailable(err)
	}
	end := info.State.LastSeq
	for failed := 0; ; {
		last, ended, err := r.walkOn(ctx, t, &opts, f)
		if err != nil || ended || last >= end {
			return err
		}
		next, err := r.NextStored(ctx, t, &opts, last)
		if err != nil || next == nil || next.Seq > end || opts.beyond(next.Time) {
			return err
		}
		// The replica that was read did not have it yet.
		if failed++; last > 0 {
			failed = 1
		}
		if failed == tries || opts.LatestByKey {
			return r.Conn.Unavailable(ErrBehind)
		}
		opts.Start, opts.Since = next.Seq, time.Time{}
		if err := r.Conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// beyond says that what was stored then does not belong to the walk.
func (o *WalkOptions) beyond(at time.Time) bool { return !o.Until.IsZero() && at.After(o.Until) }

// filters are the subjects of a walk in the stream of a topic; none: all.
func (o *WalkOptions) filters(t *streams.Topic) []string {
	switch {
	case o.Key != "":
		return []string{native.Subject(t.Name, o.Key)}
	case o.LatestByKey:
		return []string{native.KeyedPattern(t.Name)}
	default:
		return t.Filters()
	}
}

// NextStored asks the leader for the first message of a walk behind a sequence (0: from the walk's
// start on). It is nil when there is none.
func (r *Reads) NextStored(ctx context.Context, t *streams.Topic, opts *WalkOptions, last uint64) (*conn.StoredMsg, error) {
	seq := max(last+1, opts.Start)
	if last == 0 && opts.Start == 0 && !opts.Since.IsZero() {
		seq = 0
	}
	m, err := r.Messages.LeaderNext(ctx, t.Stream.Name, seq, opts.Since, opts.filters(t))
	if err != nil {
		return nil, r.Conn.Unavailable(err)
	}
	return m, nil
}

// MakeWait is how long the server may take to make the consumer of a walk.
const MakeWait = 5 * time.Second

// walkOn reads through an ephemeral consumer without acks, which the server forgets by itself when
// the hub dies. It returns the last sequence that it read, 0 for none. ended says that there is no
// more to read: f or a bound of the walk has ended it. Else the replica that was read had no more.
func (r *Reads) walkOn(ctx context.Context, t *streams.Topic, opts *WalkOptions, f func(*conn.StoredMsg) error) (last uint64, ended bool, err error) {
	cfg := natsjs.ConsumerConfig{
		AckPolicy:         natsjs.AckNonePolicy,
		FilterSubjects:    opts.filters(t),
		HeadersOnly:       opts.HeadersOnly,
		MemoryStorage:     true,
		InactiveThreshold: 30 * time.Second,
		Replicas:          1,
	}
	switch {
	case opts.LatestByKey:
		cfg.DeliverPolicy = natsjs.DeliverLastPerSubjectPolicy
	case opts.Start > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = natsjs.DeliverByStartSequencePolicy, opts.Start
	case !opts.Since.IsZero():
		since := opts.Since
		cfg.DeliverPolicy, cfg.OptStartTime = natsjs.DeliverByStartTimePolicy, &since
	}
	failed := func(err error) (uint64, bool, error) {
		return last, false, r.Conn.Unavailable(fmt.Errorf("jetstream: read of stream %s: %w", t.Stream.Name, err))
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
		_ = r.Conn.JS.DeleteConsumer(ctx, t.Stream.Name, cfg.Name)
	}()
	pulls, err := r.Conn.NewPuller(t.Stream.Name, cfg.Name)
	if err != nil {
		return failed(err)
	}
	defer pulls.Close()
	making, made := context.WithTimeout(context.WithoutCancel(ctx), MakeWait)
	defer made()
	c, err := r.Conn.JS.CreateConsumer(making, t.Stream.Name, cfg)
	if err != nil {
		return failed(err)
	}
	batch := conn.MaxPull
	if opts.Batch > 0 {
		batch = opts.Batch
	}
	var seen uint64
	for left := c.CachedInfo().NumPending; left > 0; {
		if opts.Max > 0 {
			batch = min(batch, opts.Max)
		}
		got, err := pulls.Pull(ctx, int(min(left, uint64(batch))), func(m *nats.Msg, meta conn.DeliveryMeta, pending uint64) error { //nolint:gosec // at most batch
			// without acks nothing is sent twice: a hole would stay one
			if seen++; meta.Order != seen {
				return fmt.Errorf("message %d of it was lost on the way", seen)
			}
			at := time.Unix(0, meta.StoredAt)
			if opts.beyond(at) {
				return ErrStop
			}
			switch err := f(&conn.StoredMsg{Subject: m.Subject, Seq: meta.StreamSeq, Header: m.Header, Data: m.Data, Time: at}); {
			case errors.Is(err, ErrStop):
				return err
			case err != nil:
				return &stopError{err}
			}
			last = meta.StreamSeq
			if left--; pending == 0 {
				left = 0
			}
			if opts.Max--; opts.Max == 0 {
				return ErrStop
			}
			return nil
		})
		own, stops := errors.AsType[*stopError](err)
		switch {
		case errors.Is(err, ErrStop):
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
	walk := WalkOptions{Max: limit, LatestByKey: opts.LatestByKey, Key: opts.Key, Batch: min(limit, 1_000)}
	if !opts.Until.IsZero() {
		walk.Until = streams.Farthest(time.UnixMilli(opts.Until.UnixMilli()).Add(time.Millisecond - 1))
	}
	switch {
	case opts.LatestByKey:
	case opts.From.Kind == AtTime:
		walk.Since = streams.Farthest(opts.From.At)
	case opts.From.Kind == AtID:
		info, err := r.Conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return r.Conn.Unavailable(err)
		}
		if walk.Start, err = r.Resolve(ctx, t, opts.From, info.State, ""); err != nil {
			return err
		}
	}
	return r.Walk(ctx, t, walk, func(m *conn.StoredMsg) error { return f(t.Event(m)) })
}
