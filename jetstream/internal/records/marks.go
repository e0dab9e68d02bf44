package records

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// MarksBucket says how far each group is whose consumer lives in the server's memory, so that the
// group outlives its server.
const MarksBucket = "eventhub_marks"

// MarkEvery is how often hubs mark a group; or a quarter of its TTL, if that is less. Marks are
// kept for marksAge: longer than any group in memory lives without members.
const (
	MarkEvery = 2 * time.Second
	marksAge  = 5 * time.Minute
)

// Mark says how far a group in memory is, and when it last had a member.
type Mark struct {
	Consumer string    `json:"consumer"`
	Stream   time.Time `json:"stream"` // when the stream was created
	Floor    uint64    `json:"floor"`  // up to which all is settled
	TTLMS    int64     `json:"ttl_ms"`
	// when the group last had a member, in epoch milliseconds of the hub's clock
	SeenMS int64 `json:"seen_ms"`
	Left   bool  `json:"left,omitempty"` // a member has just left
	// the client that made the group
	Maker string `json:"maker,omitempty"`
}

// Life is how long the group outlives its mark. Unless the mark was made when a member left, one
// may have been there until the next was due.
func (m *Mark) Life() time.Duration {
	ttl := time.Duration(m.TTLMS) * time.Millisecond
	if m.Left {
		return ttl
	}
	return ttl + min(MarkEvery, ttl/4)
}

func markSubject(t *streams.Topic, group string) string {
	return "$KV." + MarksBucket + "." + GroupKey(t, group)
}

// Message is a mark on its way to the bucket.
func (m *Mark) Message(t *streams.Topic, group string) *nats.Msg {
	return m.message(markSubject(t, group))
}

func (m *Mark) message(subject string) *nats.Msg {
	value, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings, numbers and times can be encoded
	}
	return &nats.Msg{Subject: subject, Data: value}
}

// StoreMark stores a mark, or keeps it to be stored later.
func (r *Records) StoreMark(ctx context.Context, t *streams.Topic, group string, m Mark) {
	reply, err := r.Conn.Link().RequestMsg(ctx, m.Message(t, group))
	if err == nil {
		_, err = conn.ParsePubAck(reply.Data, "KV_"+MarksBucket)
	}
	if err != nil {
		r.KeepMark(t, group, m)
	}
}

// maxKeptMarks bounds the marks that wait for a connection. Beyond it, groups whose members leave
// meanwhile may be taken for such that had none for their TTL.
const maxKeptMarks = 10_000

// KeepMark keeps a mark until there is a connection.
func (r *Records) KeepMark(t *streams.Topic, group string, m Mark) {
	subject := markSubject(t, group)
	r.unsaved.mu.Lock()
	defer r.unsaved.mu.Unlock()
	if _, known := r.unsaved.marks[subject]; !known && len(r.unsaved.marks) >= maxKeptMarks {
		r.Obs.LimitReached("marks")
		return
	}
	r.unsaved.marks[subject] = m
}

// saveMark stores a kept mark, unless a newer one is there. It does not block.
func (r *Records) saveMark(l *conn.Link, subject string, m Mark) {
	done := func() {
		r.unsaved.mu.Lock()
		defer r.unsaved.mu.Unlock()
		if r.unsaved.marks[subject].SeenMS == m.SeenMS {
			delete(r.unsaved.marks, subject)
		}
	}
	r.askStored(l, MarksBucket, subject, func(value []byte, err error) {
		if err != nil {
			return // it stays
		}
		var stored Mark
		if json.Unmarshal(value, &stored) == nil && stored.SeenMS >= m.SeenMS {
			done()
			return
		}
		_ = l.Ask(m.message(subject), r.Clock.Now(), conn.AskerFunc(func(reply *nats.Msg, err error) {
			if err == nil && !conn.NoResponders(reply) {
				done()
			}
		}))
	})
}

// Mark reads a group's mark; nil if there is none.
func (r *Records) Mark(ctx context.Context, t *streams.Topic, name string) (*Mark, error) {
	subject := markSubject(t, name)
	kept := r.keptMark(subject)
	msg, err := r.Conn.LastBySubject(ctx, "KV_"+MarksBucket, subject)
	if errors.Is(err, event.ErrNotFound) {
		return kept, nil
	}
	if err != nil {
		return nil, err
	}
	var m Mark
	if err := json.Unmarshal(msg.Data, &m); err != nil {
		return nil, nil //nolint:nilerr,nilnil // an unreadable mark says nothing
	}
	if kept != nil && kept.SeenMS > m.SeenMS {
		return kept, nil
	}
	return &m, nil
}

// keptMark is a mark that is not stored yet; nil if there is none.
func (r *Records) keptMark(subject string) *Mark {
	r.unsaved.mu.Lock()
	defer r.unsaved.mu.Unlock()
	if m, ok := r.unsaved.marks[subject]; ok {
		return &m
	}
	return nil
}
