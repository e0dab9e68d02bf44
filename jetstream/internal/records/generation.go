package records

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// groupsBucket names, for each group that was moved, the consumer that it now is.
const groupsBucket = native.GroupsBucket

// SweepEvery is how often consumers that are no group's are looked for, and SweepAge how old they
// must be: younger ones may belong to a seek that is under way.
const (
	SweepEvery = 10 * time.Minute
	SweepAge   = time.Minute
	// DeletedAge is how long it is known that a group was deleted. A hub that was cut off from NATS
	// for longer makes the group of its members again.
	DeletedAge = 24 * time.Hour
)

// Generation says which consumer a group is: each seek makes the next one. Of a group that was
// never moved none is stored: it is generation 1, of a plain name.
type Generation struct {
	native.Generation

	Revision uint64 `json:"-"` // in the bucket; 0: not stored
}

// Next is the generation after a seek. Its consumer's name has a random part, so that two seeks at
// once do not meet in one consumer.
func (p Generation) Next(t *streams.Topic, group string) Generation {
	var nonce [4]byte
	_, _ = rand.Read(nonce[:]) // never fails
	n := p.Number + 1
	next := Generation{Generation: native.Generation{
		Number: n, Consumer: t.ConsumerName(group) + "~" + strconv.Itoa(n) + "-" + hex.EncodeToString(nonce[:]),
		Durable: p.Durable, Paused: p.Paused, Settled: p.Settled, Tried: p.Tried, After: p.After, PutBack: p.PutBack,
	}}
	if p.Deleted {
		next.Durable, next.Paused, next.Settled, next.Tried, next.After, next.PutBack = false, false, nil, nil, p.Revision, ""
	}
	return next
}

// Carries reports whether the generation says more than which consumer the group is.
func (p *Generation) Carries() bool {
	return p.Durable || p.Paused || len(p.Settled) > 0 || len(p.Tried) > 0 || p.PutBack != ""
}

// Emptied is the generation for a new group of the same name.
func (p *Generation) Emptied() Generation {
	return Generation{native.Generation{Number: p.Number, Consumer: p.Consumer, After: p.After}, p.Revision}
}

// ErrMoved says that another hub has changed a note first.
var ErrMoved = errors.New("jetstream: the group was moved by another")

// GroupKey names a group in the buckets.
func GroupKey(t *streams.Topic, group string) string {
	return native.GroupKey(t.Stream.Name, t.ConsumerName(group))
}

// Generation reads the generation of a group at the bucket's leader: a stale one would bring a
// consumer back that a seek has left.
func (r *Records) Generation(ctx context.Context, t *streams.Topic, group string) (Generation, error) {
	plain := Generation{Generation: native.Generation{Number: 1, Consumer: t.ConsumerName(group)}}
	m, err := r.Conn.LastBySubject(ctx, "KV_"+groupsBucket, generationSubject(GroupKey(t, group)))
	if errors.Is(err, event.ErrNotFound) {
		return plain, nil
	}
	if err != nil {
		return Generation{}, err
	}
	plain.Revision = m.Seq
	if op := m.Header.Get("KV-Operation"); op == "DEL" || op == "PURGE" {
		return plain, nil
	}
	stored := Generation{Revision: m.Seq}
	if err := json.Unmarshal(m.Data, &stored); err != nil {
		return Generation{}, fmt.Errorf("jetstream: generation of group %q on stream %s is unreadable: %w; delete the entry to start the group anew", group, t.Stream.Name, err)
	}
	if !stored.Stream.Equal(t.Stream.Created) {
		return plain, nil
	}
	return stored, nil
}

// Swap replaces old by next, or returns ErrMoved.
func (r *Records) Swap(ctx context.Context, t *streams.Topic, group string, old, next Generation) (uint64, error) {
	next.Stream = t.Stream.Created
	value, err := json.Marshal(next)
	if err != nil {
		return 0, err
	}
	rev, err := r.update(ctx, GroupKey(t, group), value, old.Revision)
	return rev, MovedOr(err)
}

// update replaces an entry of a revision, and put replaces whatever is there.
func (r *Records) update(ctx context.Context, key string, value []byte, was uint64) (revision uint64, err error) {
	return conn.UntilHeard(ctx, func(ctx context.Context) (uint64, error) { return r.kv.Update(ctx, key, value, was) })
}

func (r *Records) put(ctx context.Context, key string, value []byte) (revision uint64, err error) {
	return conn.UntilHeard(ctx, func(ctx context.Context) (uint64, error) { return r.kv.Put(ctx, key, value) })
}

// MarkDeleted notes that a topic's stream is deleted on purpose, and that something of the topic
// may be left. The mark is an entry like that of a group, under the name of the stream alone.
// Unless was is 0, it replaces the mark of that revision, or returns ErrMoved.
func (r *Records) MarkDeleted(ctx context.Context, s *streams.Stream, topic string, was uint64) (revision uint64, err error) {
	value, err := json.Marshal(native.Generation{Stream: s.Created, Deleted: true, Unfinished: topic})
	if err != nil {
		return 0, err
	}
	if was == 0 {
		return r.put(ctx, s.Name, value)
	}
	revision, err = r.update(ctx, s.Name, value, was)
	return revision, MovedOr(err)
}

// Finished notes that nothing is left of a topic that was deleted. It returns ErrMoved when the
// mark is another by now.
func (r *Records) Finished(ctx context.Context, stream string, mark Generation) error {
	rev := mark.Revision
	mark.Unfinished = ""
	value, err := json.Marshal(mark)
	if err != nil {
		return err
	}
	_, err = r.update(ctx, stream, value, rev)
	return MovedOr(err)
}

// MovedOr turns the refusal of a compare-and-set into ErrMoved.
func MovedOr(err error) error {
	if conn.KeyChanged(err) {
		return ErrMoved
	}
	return err
}

// readGeneration decodes an entry, and reports whether it is one.
func readGeneration(m *conn.StoredMsg) (Generation, bool) {
	var g Generation
	err := json.Unmarshal(m.Data, &g)
	return g, err == nil
}

// Deletion reads the mark of a topic's stream at the leader; the zero value if there is none.
func (r *Records) Deletion(ctx context.Context, stream string) (Generation, error) {
	m, err := r.Conn.LastBySubject(ctx, "KV_"+groupsBucket, generationSubject(stream))
	if errors.Is(err, event.ErrNotFound) {
		return Generation{}, nil
	}
	if err != nil {
		return Generation{}, err
	}
	mark, readable := readGeneration(m)
	if !readable || !mark.Deleted {
		return Generation{}, nil
	}
	mark.Revision = m.Seq
	return mark, nil
}

// Deleted reports whether the stream was deleted on purpose. A leader that was just elected may not
// have the mark yet that this hub has met, or meets meanwhile.
func (r *Records) Deleted(ctx context.Context, s *streams.Stream) (bool, error) {
	if s.Deleted.Load() {
		return true, nil
	}
	mark, err := r.Deletion(ctx, s.Name)
	return err == nil && (mark.Deleted && mark.Stream.Equal(s.Created) || s.Deleted.Load()), err
}

// Follow tells this hub's members when their group was moved, until the bus closes.
func (r *Records) Follow() {
	// After an interruption, all generations are read: one may have been missed.
	var from []natsjs.WatchOpt
	live := true
	for opts := []natsjs.WatchOpt{natsjs.UpdatesOnly()}; r.Conn.Ctx.Err() == nil; opts, live = from, false {
		if err := r.watch(opts, live); err != nil && r.Conn.Ctx.Err() == nil {
			r.Often.Log(r.Conn.Ctx, slog.LevelWarn, "moves of groups cannot be followed now; they are noticed at the next pull", "", slog.Any("error", err))
		}
		select {
		case <-r.Conn.Ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// watch follows the bucket. live says that it begins with what changes now.
func (r *Records) watch(opts []natsjs.WatchOpt, live bool) error {
	w, err := r.kv.WatchAll(r.Conn.Ctx, opts...)
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-r.Conn.Ctx.Done():
			return nil
		case e, open := <-w.Updates():
			if !open {
				return errors.New("the watch ended")
			}
			if e == nil { // what was there before ends here
				live = true
				continue
			}
			if strings.HasPrefix(e.Key(), questionPrefix) {
				r.hear(e.Value(), live)
				continue
			}
			var moved Generation
			if err := json.Unmarshal(e.Value(), &moved); err != nil {
				continue
			}
			if !strings.Contains(e.Key(), ".") {
				r.Hooks.TopicDeleted(e.Key(), moved.Stream)
				continue
			}
			moved.Revision = e.Revision()
			r.Hooks.GroupMoved(e.Key(), &moved)
		}
	}
}

// SweepStream removes the consumers older than age that a group has left, or never came to.
func (r *Records) SweepStream(ctx context.Context, s *streams.Stream, age time.Duration) error {
	handle, err := r.Conn.JS.Stream(ctx, s.Name)
	if err != nil {
		return err
	}
	if !native.StreamMade(handle.CachedInfo()).Equal(s.Created) {
		// The stream was made again, and what this hub knows says nothing of its groups.
		r.Streams.Forget(s)
		return nil
	}
	consumers := handle.ListConsumers(ctx)
	for info := range consumers.Info() {
		group, ours := info.Config.Metadata[native.MetaGroup]
		if !ours || time.Since(info.Created) < age {
			continue
		}
		t := &streams.Topic{Name: info.Config.Metadata[native.MetaTopic], Stream: s}
		if base, _, _ := strings.Cut(info.Name, "~"); base != t.ConsumerName(group) {
			continue // not named by this rule: not ours to judge
		}
		ptr, err := r.Generation(ctx, t, group)
		if err != nil {
			return err
		}
		if ptr.Deleted || ptr.Consumer != info.Name {
			r.DeleteConsumer(ctx, s.Name, info.Name)
		}
	}
	return consumers.Err()
}

// SweepGenerations removes what says that groups were deleted, once it is older than age, and
// finishes the deletions of topics whose hub died.
func (r *Records) SweepGenerations(ctx context.Context, age time.Duration) error {
	before := time.Now().Add(-age)
	unfinished := make(map[string]uint64) // streams, and the revisions of their marks
	var old []*conn.StoredMsg
	err := r.Messages.Through(ctx, "KV_"+groupsBucket, reading.Query{}, func(m *conn.StoredMsg) error {
		g, readable := readGeneration(m)
		if !readable {
			return nil
		}
		if g.Unfinished != "" {
			if time.Since(m.Time) > min(age, SweepAge) {
				unfinished[strings.TrimPrefix(m.Subject, generationSubject(""))] = m.Seq
			}
			return nil
		}
		if m.Time.Before(before) && (g.Deleted || strings.HasPrefix(m.Subject, generationSubject(questionPrefix))) {
			old = append(old, m)
		}
		return nil
	})
	if err != nil {
		return err
	}
	var failed error
	for stream, revision := range unfinished {
		failed = errors.Join(failed, r.Hooks.EndDeletion(ctx, stream, revision))
	}
	for _, m := range old {
		if err := r.Conn.Purge(ctx, groupsBucket, m.Subject, m.Seq); err != nil {
			return errors.Join(failed, err)
		}
	}
	return failed
}

// generationSubject is where the generation of a group is, by its key, and the mark of a stream, by
// its name.
func generationSubject(key string) string { return "$KV." + groupsBucket + "." + key }
