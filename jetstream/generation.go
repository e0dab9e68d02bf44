package jetstream

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

// sweepEvery is how often consumers that are no group's are looked for, and sweepAge how old they
// must be: younger ones may belong to a seek that is under way.
const (
	sweepEvery = 10 * time.Minute
	sweepAge   = time.Minute
	// deletedAge is how long it is known that a group was deleted. A hub that was cut off from NATS
	// for longer makes the group of its members again.
	deletedAge = 24 * time.Hour
)

// generation says which consumer the group is: each seek makes the next one. Of a group that was
// never moved none is stored: it is generation 1, of a plain name.
type generation struct {
	native.Generation

	revision uint64 // in the bucket; 0: not stored
}

// next is the generation after a seek. Its consumer's name has a random part, so that two seeks at
// once do not meet in one consumer.
func (p generation) next(t *streams.Topic, group string) generation {
	var nonce [4]byte
	_, _ = rand.Read(nonce[:]) // never fails
	n := p.Number + 1
	next := generation{Generation: native.Generation{
		Number: n, Consumer: t.ConsumerName(group) + "~" + strconv.Itoa(n) + "-" + hex.EncodeToString(nonce[:]),
		Durable: p.Durable, Paused: p.Paused, Settled: p.Settled, Tried: p.Tried, After: p.After, PutBack: p.PutBack,
	}}
	if p.Deleted {
		next.Durable, next.Paused, next.Settled, next.Tried, next.After, next.PutBack = false, false, nil, nil, p.revision, ""
	}
	return next
}

// carries reports whether the generation says more than which consumer the group is.
func (p *generation) carries() bool {
	return p.Durable || p.Paused || len(p.Settled) > 0 || len(p.Tried) > 0 || p.PutBack != ""
}

// emptied is the generation for a new group of the same name.
func (p *generation) emptied() generation {
	return generation{native.Generation{Number: p.Number, Consumer: p.Consumer, After: p.After}, p.revision}
}

// past is what the members of the next generation are to know of events.
func (p *generation) past() past {
	if p.Deleted {
		return past{}
	}
	return past{p.Settled, p.Tried}
}

// ended reports whether the group was deleted since its member knew it. A member that knows none
// yet is new.
func (p *generation) ended(was *group) bool {
	if was == nil {
		return false
	}
	known := was.revision.Load()
	return p.Deleted && p.revision > known || p.After > known
}

// errGroupDeleted says that somebody deleted the group of a member.
var errGroupDeleted = errors.New("jetstream: the group was deleted")

var errGroupMoved = errors.New("jetstream: the group was moved by another")

// generations reads and writes the generations of groups that were moved.
type generations struct {
	records *records
	kv      natsjs.KeyValue
}

// open opens the bucket of generations.
func (r *records) open(ctx context.Context) error {
	kv, err := r.ownBucket(ctx, natsjs.KeyValueConfig{Bucket: groupsBucket, Description: "eventhub: the consumer of each group that was moved"})
	if err != nil {
		return err
	}
	r.generations = &generations{records: r, kv: kv}
	return nil
}

// ownBucket opens a bucket in which hubs keep what they share, and makes it if it is not there.
func (c *core) ownBucket(ctx context.Context, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error) {
	cfg.Replicas = c.cfg.Replicas
	if c.cfg.Server != nil && c.cfg.Server.InMemory() {
		cfg.Storage = natsjs.MemoryStorage
	}
	kv, err := conn.WhenUp(ctx, c.conn, func() (natsjs.KeyValue, error) { return openOrMake(ctx, c.conn.JS.Within(c.cfg.openWait), cfg) })
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w; check that the NATS user may create KV buckets, and that enough servers of the cluster are up for %d replicas", cfg.Bucket, err, c.cfg.Replicas)
	}
	return kv, nil
}

func openOrMake(ctx context.Context, js natsjs.JetStream, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error) {
	kv, err := js.KeyValue(ctx, cfg.Bucket)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, cfg)
		if errors.Is(err, natsjs.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, cfg.Bucket)
		}
	}
	return kv, err
}

func groupKey(t *streams.Topic, group string) string {
	return native.GroupKey(t.Stream.Name, t.ConsumerName(group))
}

// get reads the generation at the bucket's leader: a stale one would bring a consumer back that a
// seek has left.
func (p *generations) get(ctx context.Context, t *streams.Topic, group string) (generation, error) {
	plain := generation{Generation: native.Generation{Number: 1, Consumer: t.ConsumerName(group)}}
	m, err := p.records.conn.LastBySubject(ctx, "KV_"+groupsBucket, "$KV."+groupsBucket+"."+groupKey(t, group))
	if errors.Is(err, event.ErrNotFound) {
		return plain, nil
	}
	if err != nil {
		return generation{}, err
	}
	plain.revision = m.Seq
	if op := m.Header.Get("KV-Operation"); op == "DEL" || op == "PURGE" {
		return plain, nil
	}
	stored := generation{revision: m.Seq}
	if err := json.Unmarshal(m.Data, &stored); err != nil {
		return generation{}, fmt.Errorf("jetstream: generation of group %q on stream %s is unreadable: %w; delete the entry to start the group anew", group, t.Stream.Name, err)
	}
	if !stored.Stream.Equal(t.Stream.Created) {
		return plain, nil
	}
	return stored, nil
}

// swap replaces old by next, or returns errGroupMoved.
func (p *generations) swap(ctx context.Context, t *streams.Topic, group string, old, next generation) (uint64, error) {
	next.Stream = t.Stream.Created
	value, err := json.Marshal(next)
	if err != nil {
		return 0, err
	}
	rev, err := p.update(ctx, groupKey(t, group), value, old.revision)
	return rev, movedOr(err)
}

// update replaces an entry of a revision, and put replaces whatever is there.
func (p *generations) update(ctx context.Context, key string, value []byte, was uint64) (revision uint64, err error) {
	return conn.UntilHeard(ctx, func(ctx context.Context) (uint64, error) { return p.kv.Update(ctx, key, value, was) })
}

func (p *generations) put(ctx context.Context, key string, value []byte) (revision uint64, err error) {
	return conn.UntilHeard(ctx, func(ctx context.Context) (uint64, error) { return p.kv.Put(ctx, key, value) })
}

// markDeleted notes that a topic's stream is deleted on purpose, and that something of the topic
// may be left. The mark is an entry like that of a group, under the name of the stream alone.
// Unless was is 0, it replaces the mark of that revision, or returns errGroupMoved.
func (p *generations) markDeleted(ctx context.Context, s *streams.Stream, topic string, was uint64) (revision uint64, err error) {
	value, err := json.Marshal(native.Generation{Stream: s.Created, Deleted: true, Unfinished: topic})
	if err != nil {
		return 0, err
	}
	if was == 0 {
		return p.put(ctx, s.Name, value)
	}
	revision, err = p.update(ctx, s.Name, value, was)
	return revision, movedOr(err)
}

// finished notes that nothing is left of a topic that was deleted. It returns errGroupMoved when
// the mark is another by now.
func (p *generations) finished(ctx context.Context, stream string, mark generation) error {
	rev := mark.revision
	mark.Unfinished = ""
	value, err := json.Marshal(mark)
	if err != nil {
		return err
	}
	_, err = p.update(ctx, stream, value, rev)
	return movedOr(err)
}

// movedOr turns the refusal of a compare-and-set into errGroupMoved.
func movedOr(err error) error {
	if api, ok := errors.AsType[*natsjs.APIError](err); ok && (api.ErrorCode == natsjs.JSErrCodeStreamWrongLastSequence || api.ErrorCode == natsjs.JSErrCodeStreamWrongLastSequenceConstant) ||
		errors.Is(err, natsjs.ErrKeyExists) {
		return errGroupMoved
	}
	return err
}

// readGeneration decodes an entry, and reports whether it is one.
func readGeneration(m *conn.StoredMsg) (generation, bool) {
	var g generation
	err := json.Unmarshal(m.Data, &g)
	return g, err == nil
}

// deletion reads the mark of a topic's stream at the leader; the zero value if there is none.
func (p *generations) deletion(ctx context.Context, stream string) (generation, error) {
	m, err := p.records.conn.LastBySubject(ctx, "KV_"+groupsBucket, "$KV."+groupsBucket+"."+stream)
	if errors.Is(err, event.ErrNotFound) {
		return generation{}, nil
	}
	if err != nil {
		return generation{}, err
	}
	mark, readable := readGeneration(m)
	if !readable || !mark.Deleted {
		return generation{}, nil
	}
	mark.revision = m.Seq
	return mark, nil
}

// deleted reports whether the stream was deleted on purpose. A leader that was just elected may not
// have the mark yet that this hub has met, or meets meanwhile.
func (p *generations) deleted(ctx context.Context, s *streams.Stream) (bool, error) {
	if s.Deleted.Load() {
		return true, nil
	}
	mark, err := p.deletion(ctx, s.Name)
	return err == nil && (mark.Deleted && mark.Stream.Equal(s.Created) || s.Deleted.Load()), err
}

// follow tells this hub's members when their group was moved, until the bus closes.
func (p *generations) follow() {
	// After an interruption, all generations are read: one may have been missed.
	var from []natsjs.WatchOpt
	live := true
	for opts := []natsjs.WatchOpt{natsjs.UpdatesOnly()}; p.records.conn.Ctx.Err() == nil; opts, live = from, false {
		if err := p.watch(opts, live); err != nil && p.records.conn.Ctx.Err() == nil {
			p.records.often.Log(p.records.conn.Ctx, slog.LevelWarn, "moves of groups cannot be followed now; they are noticed at the next pull", "", slog.Any("error", err))
		}
		select {
		case <-p.records.conn.Ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// watch follows the bucket. live says that it begins with what changes now.
func (p *generations) watch(opts []natsjs.WatchOpt, live bool) error {
	w, err := p.kv.WatchAll(p.records.conn.Ctx, opts...)
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-p.records.conn.Ctx.Done():
			return nil
		case e, open := <-w.Updates():
			if !open {
				return errors.New("the watch ended")
			}
			if e == nil { // what was there before ends here
				live = true
				continue
			}
			if strings.HasPrefix(e.Key(), heldPrefix) {
				p.records.recordHooks.held(e.Value(), live)
				continue
			}
			var moved generation
			if err := json.Unmarshal(e.Value(), &moved); err != nil {
				continue
			}
			if !strings.Contains(e.Key(), ".") {
				p.records.recordHooks.topicDeleted(e.Key(), moved.Stream)
				continue
			}
			moved.revision = e.Revision()
			p.records.recordHooks.groupMoved(e.Key(), &moved)
		}
	}
}

// sweepGroups removes consumers that seeks have left behind.
func (b *Bus) sweepGroups() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
			if err := b.records.makers.sweep(b.conn.Ctx, "", sweepAge); err != nil && b.conn.Ctx.Err() == nil {
				b.log.Warn("failed to look for notes of groups that are gone; retrying", slog.Any("error", err))
			}
			if err := b.records.generations.sweep(b.conn.Ctx, deletedAge); err != nil && b.conn.Ctx.Err() == nil {
				b.log.Warn("failed to look for marks of deleted groups; retrying", slog.Any("error", err))
			}
			if err := b.queues.sweepPutBack(b.conn.Ctx, sweepAge); err != nil && b.conn.Ctx.Err() == nil {
				b.log.Warn("failed to look for events that were put back to groups that are gone; retrying", slog.Any("error", err))
			}
			for _, s := range b.streams.All() {
				if err := b.records.sweepStream(b.conn.Ctx, s, sweepAge); err != nil && b.conn.Ctx.Err() == nil {
					b.log.Warn("left consumers could not be looked for", slog.String("stream", s.Name), slog.Any("error", err))
				}
			}
		}
	}
}

// sweepStream removes the consumers older than age that a group has left, or never came to.
func (r *records) sweepStream(ctx context.Context, s *streams.Stream, age time.Duration) error {
	handle, err := r.conn.JS.Stream(ctx, s.Name)
	if err != nil {
		return err
	}
	if !native.StreamMade(handle.CachedInfo()).Equal(s.Created) {
		// The stream was made again, and what this hub knows says nothing of its groups.
		r.streams.Forget(s)
		return nil
	}
	consumers := handle.ListConsumers(ctx)
	for info := range consumers.Info() {
		group, ours := info.Config.Metadata[metaGroup]
		if !ours || time.Since(info.Created) < age {
			continue
		}
		t := &streams.Topic{Name: info.Config.Metadata[metaTopic], Stream: s}
		if base, _, _ := strings.Cut(info.Name, "~"); base != t.ConsumerName(group) {
			continue // not named by this rule: not ours to judge
		}
		ptr, err := r.generations.get(ctx, t, group)
		if err != nil {
			return err
		}
		if ptr.Deleted || ptr.Consumer != info.Name {
			r.deleteConsumer(ctx, s.Name, info.Name)
		}
	}
	return consumers.Err()
}

// sweep removes what says that groups were deleted, once it is older than age, and finishes the
// deletions of topics whose hub died.
func (p *generations) sweep(ctx context.Context, age time.Duration) error {
	before := time.Now().Add(-age)
	unfinished := make(map[string]uint64) // streams, and the revisions of their marks
	var old []*conn.StoredMsg
	err := p.records.messages.Through(ctx, "KV_"+groupsBucket, reading.Query{}, func(m *conn.StoredMsg) error {
		g, readable := readGeneration(m)
		if !readable {
			return nil
		}
		if g.Unfinished != "" {
			if time.Since(m.Time) > min(age, sweepAge) {
				unfinished[strings.TrimPrefix(m.Subject, "$KV."+groupsBucket+".")] = m.Seq
			}
			return nil
		}
		if m.Time.Before(before) && (g.Deleted || strings.HasPrefix(m.Subject, "$KV."+groupsBucket+"."+heldPrefix)) {
			old = append(old, m)
		}
		return nil
	})
	if err != nil {
		return err
	}
	var failed error
	for stream, revision := range unfinished {
		failed = errors.Join(failed, p.records.recordHooks.endDeletion(ctx, stream, revision))
	}
	for _, m := range old {
		if err := p.records.conn.Purge(ctx, groupsBucket, m.Subject, m.Seq); err != nil {
			return errors.Join(failed, err)
		}
	}
	return failed
}
