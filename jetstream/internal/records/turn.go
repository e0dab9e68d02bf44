package records

import (
	"context"
	"crypto/rand"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// Turn is the note of a move or of a removal that is under way.
//
// A move of a group and the removal of settled events from a topic that rejects take turns: else a
// hub that has looked where all groups are would remove events to which a group was moved back
// since. Each stores a note before it looks at anything, and then waits for what the other kind
// noted before it. The sequences of the notes decide, so the two never wait for each other.
// Removals do not wait for removals, nor moves for moves.
type Turn struct {
	retention *Retention
	stream    string
	subject   string
	seq       uint64
}

// TurnKind is what takes a turn.
type TurnKind string

// The kinds of turns.
const (
	Moves    TurnKind = "moving"
	Removals TurnKind = "removing"
)

const (
	// TurnTime is how long a turn may take.
	TurnTime = 20 * time.Second
	// turnAge is for how long a note counts that nobody takes back, because its hub is gone.
	turnAge = time.Minute
	// turnLook is the pause between two looks at notes of others.
	turnLook = 5 * time.Millisecond
)

func (k TurnKind) subject(stream string) string {
	return "$KV." + RetentionBucket + "." + string(k) + "." + stream + "."
}

// TakeTurn notes that something begins. The caller calls End when its outcome is certain, and
// otherwise leaves the note to its age.
func (r *Retention) TakeTurn(ctx context.Context, kind TurnKind, stream string) (*Turn, error) {
	t := &Turn{retention: r, stream: stream, subject: kind.subject(stream) + rand.Text()}
	ack, err := r.Conn.Write(ctx, "KV_"+RetentionBucket, &nats.Msg{Subject: t.subject})
	if err != nil {
		t.End(ctx) // the note may have been stored
		return nil, err
	}
	t.seq = ack.Seq
	return t, nil
}

// End takes the note back.
func (t *Turn) End(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	if err := t.retention.Conn.Purge(ctx, RetentionBucket, t.subject, 0); err != nil && t.retention.Conn.Ctx.Err() == nil {
		t.retention.Often.Log(ctx, slog.LevelWarn, "failed to take back a note; others wait for it until it is old", t.stream,
			slog.String("note", t.subject), slog.Duration("age", turnAge), slog.Any("error", err))
	}
}

// First reports whether nothing of another kind that began before has still to end. It removes
// notes that are too old.
func (t *Turn) First(ctx context.Context, other TurnKind) (bool, error) {
	r := t.retention
	for from := uint64(1); ; {
		m, err := r.Messages.LeaderNext(ctx, "KV_"+RetentionBucket, from, time.Time{}, []string{other.subject(t.stream) + "*"})
		if err != nil {
			return false, err
		}
		if m == nil || m.Seq >= t.seq {
			return true, nil
		}
		info, err := r.Conn.FindStream(ctx, "KV_"+RetentionBucket)
		if err != nil {
			return false, err
		}
		if info.TimeStamp.Sub(m.Time) < turnAge {
			return false, nil
		}
		r.Log.WarnContext(ctx, "a hub that has not finished is waited for no longer", slog.String("note", m.Subject))
		if err := r.Conn.Purge(ctx, RetentionBucket, m.Subject, 0); err != nil {
			return false, err
		}
		from = m.Seq + 1
	}
}

// TurnOfMove begins the turn of a move on a topic that rejects, and waits for removals that began
// before.
func (r *Retention) TurnOfMove(ctx context.Context, t *streams.Topic) (*Turn, error) {
	mine, err := r.TakeTurn(ctx, Moves, t.Stream.Name)
	if err != nil {
		return nil, err
	}
	for {
		first, err := mine.First(ctx, Removals)
		if err == nil && first {
			return mine, nil
		}
		if err == nil {
			err = r.Conn.Pause(ctx, turnLook)
		}
		if err != nil {
			mine.End(ctx)
			return nil, err
		}
	}
}
