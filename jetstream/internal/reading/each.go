package reading

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

// Each is Keys.Each.
func (r *Reads) Each(ctx context.Context, topic string, f func(*event.Event) error) error {
	t, err := r.Compacted(ctx, topic)
	if err == nil {
		_, err = r.Messages.All(ctx, t.Bucket.Stream, time.Time{}, 1, nil, func(m *conn.StoredMsg) error {
			if e, _, ok := t.Entry(m); ok {
				return Own(f(e))
			}
			return nil
		})
	}
	if ok, own := OwnError(err); ok {
		return own
	}
	if errors.Is(err, event.ErrNotFound) {
		return nil
	}
	return r.Messages.Failed(err)
}

// BucketPosition is a position in a bucket, as the BucketPosition of the bus.
type BucketPosition struct {
	Created  time.Time `json:"made"`
	Sequence uint64    `json:"sequence"`
}

// EachSince is Keys.EachSince.
func (r *Reads) EachSince(ctx context.Context, topic string, since BucketPosition, f func(*event.Event) error) (BucketPosition, error) {
	t, err := r.Compacted(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return BucketPosition{}, nil
	}
	if err != nil {
		return since, r.Messages.Failed(err)
	}
	info, err := r.Conn.FindStream(ctx, t.Bucket.Stream)
	if errors.Is(err, event.ErrNotFound) {
		return BucketPosition{}, nil
	}
	if err != nil {
		return since, r.Conn.Unavailable(err)
	}
	if !since.Created.Equal(native.StreamMade(info)) || info.State.LastSeq < since.Sequence {
		since = BucketPosition{Created: native.StreamMade(info)}
	}
	err = r.Messages.Through(ctx, t.Bucket.Stream, Query{From: since.Sequence + 1}, func(m *conn.StoredMsg) error {
		if e, _, ok := t.Entry(m); ok {
			if err := f(e); err != nil {
				return err
			}
		}
		since.Sequence = m.Seq
		return nil
	})
	return since, err
}

// All calls f for every message, from a sequence on, of a stream that keeps one a subject,
// until it has caught up with those who write; of given subjects only, if there are any (at most
// conn.MaxDirect). What replaces a message lies behind all others: so no subject is left out,
// however often it is written meanwhile, and f may get one twice, the newer one later. It returns
// the sequence behind which everything is new. It fails when the stream is not the one that was
// made at a moment (zero: whichever there is), or is created again meanwhile.  It has caught up
// when one direct get has reached the end of a replica that has all that the leader had when it
// was asked before: what was passed earlier and is not replaced was there then.
func (r *Messages) All(ctx context.Context, stream string, created time.Time, from uint64, subjects []string, f func(*conn.StoredMsg) error) (uint64, error) {
	all := allRead{messages: r, stream: stream, created: created, subjects: subjects, f: f, from: from}
	return all.run(ctx)
}

func (r *allRead) run(ctx context.Context) (uint64, error) {
	for failed := 0; ; {
		began := r.from
		done, err := r.round(ctx)
		switch own, stops := errors.AsType[*stopError](err); {
		case done:
			return r.from, nil
		case stops:
			return r.from, own.err
		case ctx.Err() != nil:
			return r.from, ctx.Err()
		case errors.Is(err, event.ErrNotFound), errors.Is(err, errAnew), errors.Is(err, errNoDirectReads):
			return r.from, err
		case r.from > began:
			failed = 0
			continue
		}
		if failed++; failed == tries {
			return r.from, cmp.Or(err, ErrBehind)
		}
		if err := r.messages.Conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return r.from, err
		}
	}
}

var (
	errAnew          = errors.New("jetstream: a stream was replaced while it was read")
	errNoDirectReads = &event.Error{Code: event.CodeBadTopic, Msg: "the topic's bucket does not allow direct reads: repair it (eventhub topics repair)"}
)

// allRead is where one All is.
type allRead struct {
	messages *Messages
	stream   string
	subjects []string
	f        func(*conn.StoredMsg) error

	from    uint64
	created time.Time
	little  bool // what is left is little enough for direct gets
	few     bool // it always is, and each message comes once: those with such a header do not
	batch   int  // messages of a direct get; 0: conn.MaxDirect
}

// round reads on, and reports whether it has caught up.
func (r *allRead) round(ctx context.Context) (done bool, err error) {
	info, err := r.messages.Conn.FindStream(ctx, r.stream) // the leader answers
	if err != nil {
		return false, err
	}
	end := info.State.LastSeq
	switch {
	case r.created.IsZero():
		r.created = native.StreamMade(info)
	case !native.StreamMade(info).Equal(r.created):
		return false, errAnew
	}
	const many = 2 * conn.MaxDirect // one consumer costs less than so many counts
	switch {
	case end+1 < r.from:
		return false, ErrBehind // a new leader may be, for a moment
	case !info.Config.AllowDirect:
		return false, errNoDirectReads
	case r.subjects == nil && !r.little && !r.few && info.State.Msgs > many && end > r.from+many:
		r.little = true
		return false, r.pull(ctx, math.MaxUint64-1)
	}
	next, got, err := r.messages.readBatch(ctx, r.stream, conn.DirectQuery{Seq: r.from, MultiLast: r.subjects, Batch: r.batch}, math.MaxUint64, r.f)
	began := r.from
	// a consumer hands on what has a header that no client can read
	if err == nil && got.Garbled && r.subjects == nil && !r.few {
		err = r.pull(ctx, next-1)
	}
	if err == nil || next > began && !got.Garbled {
		r.from, r.little = next, got.Pending <= many
	}
	switch {
	case err != nil || got.Pending > 0:
		return false, err
	case next > end:
		return true, nil
	case got.UpTo > 0 || next > began:
		return false, nil // that replica is behind, or just a little
	}
	// That replica has nothing. Perhaps there is nothing: the last message may not be replaced but
	// gone.
	left, err := r.messages.LeaderNext(ctx, r.stream, r.from, time.Time{}, r.subjects)
	return err == nil && left == nil, err
}

// allBatch and allBytes are what is asked for at a time of a whole bucket. Fewer requests read it
// sooner, and a reader that holds still costs the hub three of them at most.
const (
	allBatch = 8_192
	allBytes = 2 << 20
)

// pull reads through a consumer, up to a sequence or until the consumer has no more.
func (r *allRead) pull(ctx context.Context, last uint64) error {
	q := Query{From: r.from, Last: last, Batch: allBatch, Bytes: allBytes}
	err := r.messages.pullAll(ctx, r.stream, &q, func(window []*conn.StoredMsg) error {
		for _, m := range window {
			if err := r.f(m); err != nil {
				return Own(err)
			}
			r.from = m.Seq + 1
		}
		return nil
	})
	if errors.Is(err, errPulled) {
		return nil
	}
	return err
}

// LeaderNext asks the leader of a stream for the first message from a sequence on, or since a
// moment of storage where seq is 0; of given subjects if there are any. It is nil when there is
// none.
func (r *Messages) LeaderNext(ctx context.Context, stream string, seq uint64, since time.Time, subjects []string) (first *conn.StoredMsg, err error) {
	if subjects == nil {
		subjects = []string{">"}
	}
	for _, subject := range subjects {
		query := map[string]any{"next_by_subj": subject, "seq": seq}
		if seq == 0 {
			query = map[string]any{"next_by_subj": subject, "start_time": since}
		}
		m, err := r.Conn.GetMsg(ctx, stream, query)
		switch {
		case errors.Is(err, event.ErrNotFound):
		case err != nil:
			return nil, err
		case first == nil || m.Seq < first.Seq:
			first = m
		}
	}
	return first, nil
}
