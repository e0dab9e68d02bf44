package records

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

// attemptsBucket holds, for each event that a hub gave back before a client had it, how many of the
// server's deliveries count for no attempt. For an event whose last attempt has failed and whose
// dead letter waits, it also holds what the letter is to say.
const attemptsBucket = native.AttemptsBucket

// Bounds of the attempts bucket. An event that comes again after that counts deliveries as attempts
// that no client had.
const (
	AttemptsAge   = 7 * 24 * time.Hour
	attemptsBytes = 1 << 30
)

// Note is what the attempts bucket says of an event.
type Note struct {
	Spared int
	Failed *native.LastFailure // nil: the event is to be delivered
	Until  int64               // when that may be, in epoch milliseconds; of ordered groups only
}

// Value is the note as it is stored.
func (n Note) Value() []byte {
	if n.Failed == nil && n.Until == 0 {
		return strconv.AppendInt(nil, int64(n.Spared), 10)
	}
	value, err := json.Marshal(native.AttemptNote{Spared: n.Spared, Failed: n.Failed, Until: n.Until})
	if err != nil {
		panic(err) // there are only strings and numbers
	}
	return value
}

// ParseNote reads a note. It reports false where there is none.
func ParseNote(value []byte) (n Note, ok bool) {
	stored, ok := native.ParseNote(value)
	return Note{stored.Spared, stored.Failed, stored.Until}, ok
}

// The hub waits NoteWait for the attempts bucket, whose leader may be changing, before it asks
// again, and NotePatience in all. Then it goes on without the bucket, and the delivery may count
// for an attempt.
const (
	NoteWait     = 2 * time.Second
	NotePatience = 10 * time.Second
)

// SpareNote is what the attempts bucket is told.
type SpareNote struct {
	Subject string
	Note
}

// unsaved are notes and marks that could not be stored, by subject.
type unsaved struct {
	mu    sync.Mutex
	notes map[string]Note // bounded by Limits.AttemptsKnown
	marks map[string]Mark
}

// NoteSpared stores a note and calls then. A note that the bucket does not take for now is kept and
// stored later; one that it refuses counts for stored, as asking again would not help. It does not
// block.
func (r *Records) NoteSpared(l *conn.Link, n SpareNote, then func(stored bool)) {
	n = r.DropNote(n)
	msg := &nats.Msg{Subject: n.Subject, Data: n.Value()}
	err := l.AskUntil(msg, r.Clock.Now()+int64(NoteWait), conn.AskerFunc(func(reply *nats.Msg, err error) {
		stored := err == nil && !conn.NoResponders(reply)
		if !stored {
			r.KeepNote(n)
		} else {
			if _, err := conn.ParsePubAck(reply.Data, "KV_"+attemptsBucket); err != nil {
				r.Obs.LimitReached("attempts_bucket") // it counts as an attempt
				r.Log.Debug("failed to note a delivery that no client had", slog.Any("error", err))
			}
		}
		then(stored)
	}))
	if err != nil {
		r.KeepNote(n)
		then(false)
	}
}

// KeepNote keeps a note until it can be stored. Without room, it counts as an attempt.
func (r *Records) KeepNote(n SpareNote) {
	r.unsaved.mu.Lock()
	defer r.unsaved.mu.Unlock()
	if _, known := r.unsaved.notes[n.Subject]; !known && len(r.unsaved.notes) >= r.Limits.AttemptsKnown {
		r.Obs.LimitReached("attempts_known")
		return
	}
	kept, known := r.unsaved.notes[n.Subject]
	n.Failed, n.Until = cmp.Or(n.Failed, kept.Failed), max(n.Until, kept.Until)
	if known && n.Spared >= 0 && n.Spared < kept.Spared {
		n.Spared = kept.Spared
	}
	r.unsaved.notes[n.Subject] = n.Note
}

// DropNote forgets a kept note that a newer one replaces, and returns the newer one with what it
// does not say.
func (r *Records) DropNote(n SpareNote) SpareNote {
	r.unsaved.mu.Lock()
	defer r.unsaved.mu.Unlock()
	if kept, known := r.unsaved.notes[n.Subject]; known && (n.Spared < 0 || kept.Spared <= n.Spared) {
		n.Failed, n.Until = cmp.Or(n.Failed, kept.Failed), max(n.Until, kept.Until)
		delete(r.unsaved.notes, n.Subject)
	}
	return n
}

// SaveUnsaved stores what could not be stored before, unless something newer is there. It does not
// block.
func (r *Records) SaveUnsaved(l *conn.Link) {
	r.unsaved.mu.Lock()
	notes, marks := r.unsaved.notes, maps.Clone(r.unsaved.marks)
	r.unsaved.notes = make(map[string]Note)
	r.unsaved.mu.Unlock()
	for subject, kept := range notes {
		r.askStored(l, attemptsBucket, subject, func(value []byte, err error) {
			n := SpareNote{subject, kept}
			if err != nil {
				r.KeepNote(n)
				return
			}
			stored, ok := ParseNote(value)
			more := n.Spared < 0 || 0 <= stored.Spared && stored.Spared < n.Spared
			if ok && !more {
				if (n.Failed == nil || stored.Failed != nil) && n.Until <= stored.Until {
					return
				}
				n.Spared = stored.Spared
			}
			n.Failed, n.Until = cmp.Or(n.Failed, stored.Failed), max(n.Until, stored.Until)
			r.NoteSpared(l, n, func(bool) {})
		})
	}
	for subject, m := range marks {
		r.saveMark(l, subject, m)
	}
}

// askStored asks the leader of a bucket for the value under a subject, and calls then with it:
// empty where there is none. It does not block.
func (r *Records) askStored(l *conn.Link, bucket, subject string, then func(value []byte, err error)) {
	msg := &nats.Msg{Subject: r.Conn.API + "STREAM.MSG.GET.KV_" + bucket, Data: []byte(`{"last_by_subj":"` + subject + `"}`)}
	err := l.AskUntil(msg, r.Clock.Now()+int64(NoteWait), conn.AskerFunc(func(reply *nats.Msg, err error) {
		if err != nil {
			then(nil, err)
			return
		}
		stored, err := conn.ParseStored(reply)
		switch {
		case errors.Is(err, event.ErrNotFound):
			then(nil, nil)
		case err != nil:
			then(nil, err)
		default:
			then(stored.Data, nil)
		}
	}))
	if err != nil {
		then(nil, err)
	}
}

// ForgetNote removes what is noted under a subject. It does not wait: a note that stays is about an
// event that is settled.
func (r *Records) ForgetNote(l *conn.Link, subject string) {
	r.unsaved.mu.Lock()
	delete(r.unsaved.notes, subject)
	r.unsaved.mu.Unlock()
	msg := &nats.Msg{Subject: r.Conn.API + "STREAM.PURGE.KV_" + attemptsBucket, Data: []byte(`{"filter":"` + subject + `"}`)}
	_ = l.Ask(msg, r.Clock.Now(), conn.AskerFunc(func(*nats.Msg, error) {}))
}

// NoteSubject is where the deliveries of an event are noted; with sequence 0, where those of many
// events of the group are.
func NoteSubject(stream, consumer string, created time.Time, seq uint64) string {
	return "$KV." + attemptsBucket + "." + native.NoteKey(stream, consumer, created, seq)
}

// AskNote asks for what is noted under a subject, and calls then with it: empty where nothing is.
// It does not block.
func (r *Records) AskNote(l *conn.Link, subject string, then func(value []byte, err error)) {
	r.askStored(l, attemptsBucket, subject, then)
}

// ChangeRuns replaces the note about many events under a subject, unless another hub does so at
// this moment. A note that the bucket refuses for good counts for stored.
func (r *Records) ChangeRuns(l *conn.Link, subject string, change func(native.SparedRuns) native.SparedRuns) error {
	ctx, cancel := context.WithTimeout(r.Conn.Ctx, NoteWait)
	defer cancel()
	reply, err := l.Request(ctx, r.Conn.API+"STREAM.MSG.GET.KV_"+attemptsBucket, []byte(`{"last_by_subj":"`+subject+`"}`))
	if err != nil {
		return err
	}
	stored, err := conn.ParseStored(reply)
	var runs native.SparedRuns
	revision := uint64(0)
	switch {
	case errors.Is(err, event.ErrNotFound):
	case err != nil:
		return err
	default:
		revision = stored.Seq
		_ = json.Unmarshal(stored.Data, &runs) // what cannot be read says nothing
	}
	value, err := json.Marshal(change(runs))
	if err != nil {
		panic(err) // there are only numbers
	}
	reply, err = l.RequestMsg(ctx, &nats.Msg{Subject: subject, Data: value, Header: nats.Header{natsjs.ExpectedLastSubjSeqHeader: {strconv.FormatUint(revision, 10)}}})
	if err != nil {
		return err
	}
	if conn.NoResponders(reply) {
		return nats.ErrNoResponders
	}
	if _, err := conn.ParsePubAck(reply.Data, "KV_"+attemptsBucket); conn.KeyChanged(err) {
		return err
	} else if err != nil { // asking again would not help: the deliveries count as attempts
		r.Obs.LimitReached("attempts_bucket")
		r.Log.Debug("failed to note deliveries that no client had", slog.Any("error", err))
	}
	return nil
}
