package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
)

// Bounds of a KVStore.
const (
	// DefaultKVShards is how many entries a KVStore has.
	DefaultKVShards = 16
	// DefaultKVShardRecords bounds the records in each.
	DefaultKVShardRecords = 500

	// kvTries bounds how often a write begins anew because others wrote the same entry.
	kvTries = 100
	// kvRetry is the longest that it waits before.
	kvRetry = 20 * time.Millisecond
)

// Collection is what a KVStore needs of a KV bucket. *jetstream.Collection is one: see
// jetstream.Collections.
type Collection interface {
	// Get reads an entry; one that does not exist has Revision 0 and no Value.
	Get(ctx context.Context, key string) (*jetstream.Entry, error)
	// Put replaces the entry of revision old, or returns jetstream.ErrKeyChanged.
	Put(ctx context.Context, key string, value []byte, headers map[string]string, old uint64) (revision uint64, err error)
	// MaxValue is the most bytes that Put takes now.
	MaxValue() int
}

var _ Collection = (*jetstream.Collection)(nil)

// KVConfig configures a KVStore.
type KVConfig struct {
	// Collection is the bucket, which must hold nothing else. Required.
	Collection Collection
	// Shards is how many entries the bucket has, 1..256; it must never change. Default DefaultKVShards. A lane lies in one.
	Shards int
	// ShardRecords is the most records in an entry. Default DefaultKVShardRecords. Beyond it, Add returns ErrFull.
	//
	// So it does beyond the bytes of a message: max_payload of NATS less 64 KiB, which is 960 KiB where it is not configured
	// and almost 4 MiB in the embedded server. Of each record that counts what was added, as JSON, and some 560 bytes that it
	// needs when it is claimed and fails. 960 KiB are enough for the default number with payloads of 1 KiB.
	ShardRecords int
	// MaxPayload is the largest payload in bytes that Add takes. Default 64 KiB. In an entry a payload is a JSON string: its
	// quotes, backslashes and line ends count twice there, and its <, > and & six times.
	MaxPayload int
}

// KVStore is an outbox in a KV bucket, for services without a database.
//
// It is NOT transactional: Add is a write of its own, and what else the service does may happen without it, or it without
// that. It needs NATS to be there, so unlike an outbox in a database it does not help while NATS is away. What it gives is
// that a record, once added, is published once, by drainers, in order with others of its key, and retried.
//
// It is for hundreds of records that wait, not for many: they are in a few entries, each of which is replaced as a whole by
// compare-and-set. Nothing needs more than one read of each. Sent records are deleted at once, so there is nothing to list or
// purge of them, and a second Add of an id is noticed only as long as the first one waits. An entry that is full takes no
// more, which Add says by ErrFull, but what is in it can always be claimed and settled.
//
// Names of workers have at most 200 bytes as JSON: Claim refuses longer ones. Of an error's text as much is kept.
//
// Its clock is that of the process: those of all that use it must agree, to a few seconds less than a lease.
type KVStore struct {
	shards  []string
	records int
	max     int
	coll    Collection
	turn    atomic.Uint32 // where the next claim begins

	mu    sync.Mutex
	wakes map[chan struct{}]struct{} // of Listen
}

var _ Store = (*KVStore)(nil)

// NewKVStore makes a store on a bucket. It needs no closing.
func NewKVStore(cfg KVConfig) (*KVStore, error) {
	for _, d := range []struct {
		v   *int
		def int
	}{{&cfg.Shards, DefaultKVShards}, {&cfg.ShardRecords, DefaultKVShardRecords}, {&cfg.MaxPayload, 64 << 10}} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	switch {
	case cfg.Collection == nil:
		return nil, errors.New("outbox: KV store: Collection is missing")
	case cfg.Shards < 1 || cfg.Shards > 256:
		return nil, fmt.Errorf("outbox: KV store: %d shards: 1 to 256 are allowed", cfg.Shards)
	case cfg.ShardRecords < 1 || cfg.MaxPayload < 1:
		return nil, errors.New("outbox: KV store: limits must be positive")
	}
	s := &KVStore{records: cfg.ShardRecords, max: cfg.MaxPayload, coll: cfg.Collection, wakes: make(map[chan struct{}]struct{})}
	for i := range cfg.Shards {
		s.shards = append(s.shards, "shard-"+strconv.Itoa(i))
	}
	return s, nil
}

func (s *KVStore) of(lane string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(lane))
	return int(h.Sum32() % uint32(len(s.shards))) //nolint:gosec // at most 256
}

// change reads a shard, lets f change it, and replaces it; f says whether there is anything to replace. It begins anew, with
// the newest state, when another was quicker.
func (s *KVStore) change(ctx context.Context, i int, f func(sh *shard, now int64) (bool, error)) error {
	for range kvTries {
		sh, revision, err := s.read(ctx, i)
		if err != nil {
			return err
		}
		changed, err := f(sh, time.Now().UnixMilli())
		if err != nil || !changed {
			return err
		}
		value, err := sh.encode()
		if err != nil {
			return fmt.Errorf("outbox: KV store: %w", err)
		}
		_, err = s.coll.Put(ctx, s.shards[i], value, nil, revision)
		switch {
		case errors.Is(err, jetstream.ErrTooLarge): // only where an earlier version filled it, or NATS had a larger max_payload
			return fmt.Errorf("outbox: KV store: entry %s has outgrown NATS: raise its max_payload until the entry is drained, or purge records of it that are parked: %w", s.shards[i], err)
		case !errors.Is(err, jetstream.ErrKeyChanged):
			return err
		}
		select {
		case <-time.After(rand.N(kvRetry)): //nolint:gosec // no secret
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fmt.Errorf("outbox: KV store: entry %s: %w", s.shards[i], jetstream.ErrKeyChanged)
}

func (s *KVStore) read(ctx context.Context, i int) (*shard, uint64, error) {
	e, err := s.coll.Get(ctx, s.shards[i])
	if err != nil {
		return nil, 0, fmt.Errorf("outbox: KV store: %w", err)
	}
	sh, err := decodeShard(e.Value)
	if err != nil {
		return nil, 0, fmt.Errorf("outbox: KV store: entry %s is not readable: %w", s.shards[i], err)
	}
	return sh, e.Revision, nil
}

// Add adds a record, and fills in ID, Payload and TS when they are empty. It is an *Error for what the bus would refuse, or no
// entry could hold; ErrExists; and ErrFull, after which it may be repeated when drainers have published some. After another
// error the outcome is unknown, and Add may be repeated with the same record.
func (s *KVStore) Add(ctx context.Context, r *Record) error {
	if err := r.prepare(s.max); err != nil {
		return err
	}
	i := s.of(r.lane())
	err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
		others := len(sh.Records)
		if slices.ContainsFunc(sh.Records, func(o *Record) bool { return o.ID == r.ID }) {
			return false, ErrExists
		}
		if others >= s.records {
			return false, s.full(i, others, "more than ShardRecords allows")
		}
		sh.Last++
		added := *r
		added.Sequence, added.Status, added.AddedAt = sh.Last, Pending, now
		sh.Records = append(sh.Records, &added)
		size, err := sh.reserved()
		limit := s.coll.MaxValue()
		switch {
		case err != nil:
			return false, fmt.Errorf("outbox: KV store: %w", err)
		case size > limit && others > 0:
			return false, s.full(i, others, "larger than max_payload of NATS allows")
		case size > limit:
			return false, fmt.Errorf("outbox: record %q: %w", r.ID, &jetstream.Error{
				Code: jetstream.CodePublishFailed, Msg: fmt.Sprintf("an entry with it alone may come to %d bytes, at most %d are allowed", size, limit), Err: jetstream.ErrTooLarge,
			})
		}
		return true, nil
	})
	if err == nil {
		s.wake()
	}
	return err
}

// full is ErrFull with what to do about it.
func (s *KVStore) full(i, records int, why string) error {
	return fmt.Errorf("%w: entry %s has %d records, and one more would make it %s: add again when drainers have published some, and retry or purge what is parked", ErrFull, s.shards[i], records, why)
}

// Claim implements Store.
func (s *KVStore) Claim(ctx context.Context, opts ClaimOptions) (Claim, error) {
	if err := opts.validate(); err != nil {
		return Claim{}, err
	}
	if n := jsonLen(opts.Worker); n > kvText {
		return Claim{}, fmt.Errorf("outbox: KV store: claim: the worker's name has %d bytes as JSON, at most %d are allowed", n, kvText)
	}
	c := Claim{Now: time.Now().UnixMilli()}
	c.Began = cmp.Or(opts.Began, c.Now)
	var failed error
	start, left := int(s.turn.Add(1)), opts.bytes()
	for n := range s.shards {
		got, more, err := s.claimFrom(ctx, (start+n)%len(s.shards), &opts, opts.Limit-len(c.Records), left, c.Now)
		if err != nil {
			failed = err
			if errors.Is(err, jetstream.ErrTooLarge) {
				continue // it holds up no other
			}
			break
		}
		c.Records = append(c.Records, got...)
		c.More = c.More || more
		for _, r := range got {
			left -= len(r.Payload)
		}
		if len(c.Records) == opts.Limit || left <= 0 {
			c.More = true
			break
		}
	}
	if failed != nil && len(c.Records) == 0 {
		return Claim{}, failed
	}
	return c, nil // what was claimed is claimed
}

// claimFrom claims in one shard. Where the entry would be too large it claims fewer; when not even one fits, that is an error
// unless some are claimed already: when those are settled there is room.
func (s *KVStore) claimFrom(ctx context.Context, i int, opts *ClaimOptions, limit, left int, now int64) (got []*Record, more bool, err error) {
	for {
		waits := false
		err = s.change(ctx, i, func(sh *shard, _ int64) (bool, error) {
			waits = sh.hasClaimed()
			got, more = sh.claim(opts, limit, left, now)
			return len(got) > 0, nil
		})
		large := errors.Is(err, jetstream.ErrTooLarge)
		switch {
		case err == nil:
			return got, more, nil
		case large && len(got) > 1:
			limit = len(got) / 2
		case large && waits:
			return nil, false, nil
		default:
			return nil, false, err
		}
	}
}

// byShard deals records out to their shards.
func (s *KVStore) byShard(records []*Record) map[int]map[string]bool {
	m := make(map[int]map[string]bool)
	for _, r := range records {
		i := s.of(r.lane())
		if m[i] == nil {
			m[i] = make(map[string]bool)
		}
		m[i][r.ID] = true
	}
	return m
}

// Renew implements Store.
func (s *KVStore) Renew(ctx context.Context, worker string, lease time.Duration, records []*Record) ([]string, error) {
	var lost []string
	for i, ids := range s.byShard(records) {
		var left map[string]bool
		err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
			left = make(map[string]bool, len(ids))
			for id := range ids {
				left[id] = true
			}
			for _, r := range sh.Records {
				if left[r.ID] && r.Status == Claimed && r.ClaimedBy == worker {
					r.LeaseUntil = now + lease.Milliseconds()
					delete(left, r.ID)
				}
			}
			return len(left) < len(ids), nil
		})
		if err != nil {
			return nil, err
		}
		for id := range left {
			lost = append(lost, id)
		}
	}
	return lost, nil
}

// Settle implements Store. What is settled at once is in one write for each shard, so for each lane. Where an entry would be
// too large, the errors' texts are left out.
func (s *KVStore) Settle(ctx context.Context, worker string, st Settlement) error {
	failed := make(map[string]*Failure, len(st.Failed))
	all := slices.Clone(st.Sent)
	for i := range st.Failed {
		failed[st.Failed[i].Record.ID] = &st.Failed[i]
		all = append(all, st.Failed[i].Record)
	}
	for i, ids := range s.byShard(all) {
		err := s.settle(ctx, i, worker, ids, failed, true)
		if errors.Is(err, jetstream.ErrTooLarge) {
			err = s.settle(ctx, i, worker, ids, failed, false)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// settle settles the records of one shard; those of ids that are not in failed were sent. texts says whether the texts of
// errors are kept.
func (s *KVStore) settle(ctx context.Context, i int, worker string, ids map[string]bool, failed map[string]*Failure, texts bool) error {
	return s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
		before, changed := len(sh.Records), false
		sh.Records = slices.DeleteFunc(sh.Records, func(r *Record) bool { return ids[r.ID] && failed[r.ID] == nil })
		for _, r := range sh.Records {
			if f := failed[r.ID]; f != nil && r.Status == Claimed && r.ClaimedBy == worker {
				r.fail(f, now, texts)
				changed = true
			}
		}
		return changed || len(sh.Records) < before, nil
	})
}

// RequeueExpired implements Store.
func (s *KVStore) RequeueExpired(ctx context.Context) (int, error) {
	return s.changeAll(ctx, func(r *Record, now int64) bool {
		if r.Status != Claimed || r.LeaseUntil >= now {
			return false
		}
		r.Status, r.ClaimedBy, r.LeaseUntil = Pending, "", 0
		return true
	})
}

// changeAll changes every record that f says it has changed, and counts them.
func (s *KVStore) changeAll(ctx context.Context, f func(r *Record, now int64) bool) (int, error) {
	total := 0
	for i := range s.shards {
		n := 0
		err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
			n = 0
			for _, r := range sh.Records {
				if f(r, now) {
					n++
				}
			}
			return n > 0, nil
		})
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

// Now implements Store.
func (s *KVStore) Now(context.Context) (time.Time, error) { return time.Now(), nil }

// Stats implements Store.
func (s *KVStore) Stats(ctx context.Context) (Stats, error) {
	var st Stats
	for i := range s.shards {
		sh, _, err := s.read(ctx, i)
		if err != nil {
			return Stats{}, err
		}
		for _, r := range sh.Records {
			st.count(r.Status, 1, max(0, time.Now().UnixMilli()-r.AddedAt))
		}
	}
	return st, nil
}

// List implements Store. Sequences count within a shard, so those of different lanes may be the same: After leaves records
// out then, and is of use with one shard only.
func (s *KVStore) List(ctx context.Context, opts ListOptions) ([]*Record, error) {
	var list []*Record
	for i := range s.shards {
		sh, _, err := s.read(ctx, i)
		if err != nil {
			return nil, err
		}
		for _, r := range sh.Records {
			if r.Status == opts.Status && r.Sequence > opts.After {
				list = append(list, r)
			}
		}
	}
	slices.SortStableFunc(list, bySequence)
	return list[:min(len(list), opts.limit())], nil
}

// Retry implements Store.
func (s *KVStore) Retry(ctx context.Context, ids ...string) (int, error) {
	return s.changeAll(ctx, func(r *Record, _ int64) bool {
		if r.Status != Errored || len(ids) > 0 && !slices.Contains(ids, r.ID) {
			return false
		}
		r.Status, r.NextAt, r.Attempts, r.PublishBegan = Pending, 0, 0, 0
		return true
	})
}

// Purge implements Store. There are no sent records to delete.
func (s *KVStore) Purge(ctx context.Context, opts PurgeOptions) (int, error) {
	if err := opts.validate(); err != nil || opts.Status == Sent {
		return 0, err
	}
	total := 0
	for i := range s.shards {
		n := 0
		err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
			n = 0
			sh.Records = slices.DeleteFunc(sh.Records, func(r *Record) bool {
				gone := r.Status == Errored && r.AddedAt <= now-opts.OlderThan.Milliseconds() && total+n < opts.limit() &&
					(len(opts.IDs) == 0 || slices.Contains(opts.IDs, r.ID))
				if gone {
					n++
				}
				return gone
			})
			return n > 0, nil
		})
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

// Listen implements Store. It hears of records that this KVStore has added.
func (s *KVStore) Listen(ctx context.Context, sleeper Sleeper) error {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	s.wakes[ch] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.wakes, ch)
	}()
	for {
		select {
		case <-ch:
			sleeper.Wake()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *KVStore) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.wakes {
		select {
		case ch <- struct{}{}:
		default: // it knows already
		}
	}
}
