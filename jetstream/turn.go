package jetstream

import (
	"context"
	"crypto/rand"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// A move of a group and the removal of settled events from a topic that rejects take turns: else a
// hub that has looked where all groups are would remove events to which a group was moved back
// since. Each stores a note before it looks at anything, and then waits for what the other kind
// noted before it. The sequences of the notes decide, so the two never wait for each other.
// Removals do not wait for removals, nor moves for moves.
type turn struct {
	records *records
	stream  string
	subject string
	seq     uint64
}

type turnKind string

const (
	moves    turnKind = "moving"
	removals turnKind = "removing"
)

const (
	// turnTime is how long a turn may take.
	turnTime = 20 * time.Second
	// turnAge is for how long a note counts that nobody takes back, because its hub is gone.
	turnAge = time.Minute
	// turnLook is the pause between two looks at notes of others.
	turnLook = 5 * time.Millisecond
)

func (k turnKind) subject(stream string) string {
	return "$KV." + retentionBucket + "." + string(k) + "." + stream + "."
}

// takeTurn notes that something begins. The caller calls end when its outcome is certain, and
// otherwise leaves the note to its age.
func (r *records) takeTurn(ctx context.Context, kind turnKind, stream string) (*turn, error) {
	t := &turn{records: r, stream: stream, subject: kind.subject(stream) + rand.Text()}
	ack, err := r.conn.Write(ctx, "KV_"+retentionBucket, &nats.Msg{Subject: t.subject})
	if err != nil {
		t.end(ctx) // the note may have been stored
		return nil, err
	}
	t.seq = ack.Seq
	return t, nil
}

// end takes the note back.
func (t *turn) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	if err := t.records.conn.Purge(ctx, retentionBucket, t.subject, 0); err != nil && t.records.conn.Ctx.Err() == nil {
		t.records.often.Log(ctx, slog.LevelWarn, "failed to take back a note; others wait for it until it is old", t.stream,
			slog.String("note", t.subject), slog.Duration("age", turnAge), slog.Any("error", err))
	}
}

// first reports whether nothing of another kind that began before has still to end. It removes
// notes that are too old.
func (t *turn) first(ctx context.Context, other turnKind) (bool, error) {
	r := t.records
	for from := uint64(1); ; {
		m, err := r.messages.LeaderNext(ctx, "KV_"+retentionBucket, from, time.Time{}, []string{other.subject(t.stream) + "*"})
		if err != nil {
			return false, err
		}
		if m == nil || m.Seq >= t.seq {
			return true, nil
		}
		info, err := r.conn.FindStream(ctx, "KV_"+retentionBucket)
		if err != nil {
			return false, err
		}
		if info.TimeStamp.Sub(m.Time) < turnAge {
			return false, nil
		}
		r.log.WarnContext(ctx, "a hub that has not finished is waited for no longer", slog.String("note", m.Subject))
		if err := r.conn.Purge(ctx, retentionBucket, m.Subject, 0); err != nil {
			return false, err
		}
		from = m.Seq + 1
	}
}

// turnOfMove begins the turn of a move on a topic that rejects, and waits for removals that began
// before.
func (r *records) turnOfMove(ctx context.Context, t *streams.Topic) (*turn, error) {
	mine, err := r.takeTurn(ctx, moves, t.Stream.Name)
	if err != nil {
		return nil, err
	}
	for {
		first, err := mine.first(ctx, removals)
		if err == nil && first {
			return mine, nil
		}
		if err == nil {
			err = r.conn.Pause(ctx, turnLook)
		}
		if err != nil {
			mine.end(ctx)
			return nil, err
		}
	}
}
