package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
)

// Limits of a KVStore.
const (
	// DefaultKVShards is the default number of entries of a KVStore.
	DefaultKVShards = 16
	// DefaultKVShardRecords is the default maximum number of records per entry.
	DefaultKVShardRecords = 500

	// kvTries is how often a write is tried while other writers change the same entry.
	kvTries = 100
	// kvRetry is the longest delay between these tries.
	kvRetry = 20 * time.Millisecond
)

// Collection is the KV bucket of a KVStore. *jetstream.Collection implements it; see
// jetstream.Collections.
type Collection interface {
	// Get reads an entry. A missing entry has Revision 0 and no Value.
	Get(ctx context.Context, key string) (*jetstream.Entry, error)
	// Put replaces the entry if its revision is old, and otherwise returns jetstream.ErrKeyChanged.
	Put(ctx context.Context, key string, value []byte, headers map[string]string, old uint64) (revision uint64, err error)
	// MaxValue is the largest value in bytes that Put currently accepts.
	MaxValue() int
}

var _ Collection = (*jetstream.Collection)(nil)

// KVConfig configures a KVStore.
type KVConfig struct {
	// Collection is the bucket. Nothing else may use the bucket. Required.
	Collection Collection
	// Shards is the number of entries, 1 to 256. It must never change. Each lane lies in a single
	// entry. Defaults to DefaultKVShards.
	Shards int
	// ShardRecords is the maximum number of records in an entry. Add returns ErrFull beyond it.
	// Defaults to DefaultKVShardRecords.
	//
	// The message size of NATS also limits an entry: to max_payload less 64 KiB, which is 960 KiB
	// by default and almost 4 MiB in the embedded server. Each record counts with its JSON size
	// plus about 560 bytes for a claim and an error text. At 960 KiB, the default number of records
	// fits with payloads of 1 KiB.
	ShardRecords int
	// MaxPayload is the largest payload in bytes that Add accepts. An entry stores a payload as a
	// JSON string: each quote, backslash, and line end takes two bytes, and each <, > and & takes
	// six. Defaults to 64 KiB.
	MaxPayload int
}

// KVStore is an outbox in a KV bucket, for services without a database.
//
// KVStore is NOT transactional. Add is a separate write: either Add or the service's other work may
// succeed without the other. KVStore also needs NATS, so unlike an outbox in a database it does not
// bridge an outage of NATS. It does guarantee that drainers publish each added record once, in the
// order of its key, with retries.
//
// KVStore suits hundreds of waiting records, not more: they share a few entries, and every write
// replaces a whole entry by compare-and-set. No operation reads an entry more than once, unless a
// write conflicts. Sent records are deleted at once, so List and Purge find none, and Add detects a
// duplicate id only while the first record waits. A full entry rejects new records with ErrFull,
// but its records can always be claimed and settled.
//
// A worker name may have at most 200 bytes as JSON; Claim rejects longer names. Error texts are
// truncated to the same size.
//
// KVStore uses the clock of the process. The clocks of all processes that share a bucket must agree
// to within a few seconds less than a lease.
type KVStore struct {
	shards  []string
	records int
	max     int
	coll    Collection
	turn    atomic.Uint32 // selects the shard where the next claim begins

	mu    sync.Mutex
	wakes map[chan struct{}]struct{} // one channel per Listen call
}

var _ Store = (*KVStore)(nil)

// NewKVStore returns a store in a bucket. It needs no closing.
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

// change reads a shard, lets f change it, and writes it back if f returns true. When another writer
// changes the entry in between, change starts again from the new state.
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
		case errors.Is(err, jetstream.ErrTooLarge):
			// An earlier version filled the entry, or max_payload was lowered.
			return fmt.Errorf("outbox: KV store: entry %s exceeds max_payload of NATS; raise max_payload until the entry is drained, or purge its parked records: %w", s.shards[i], err)
		case !errors.Is(err, jetstream.ErrKeyChanged):
			return err
		}
		select {
		case <-time.After(rand.N(kvRetry)): //nolint:gosec // not security-relevant
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

// Add adds a record and fills in ID, Payload, and TS when they are empty. It returns an *Error for
// a record that the bus would reject or that fits no entry, ErrExists for a duplicate id, and
// ErrFull when the entry is full; after ErrFull, try again once drainers have published some
// records. After any other error the outcome is unknown, and Add may be repeated with the same
// record. Add may be called concurrently.
func (s *KVStore) Add(ctx context.Context, r *Record) error {
	if err := r.prepare(s.max); err != nil {
		return err
	}
	i := s.of(r.lane())
	err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
		others := len(sh.Records)
		if slices.ContainsFunc(sh.Records, func(o *Record) bool { return o.ref() == r.ref() }) {
			return false, ErrExists
		}
		if others >= s.records {
			return false, s.full(i, others, "exceed ShardRecords")
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
			return false, s.full(i, others, "exceed max_payload of NATS")
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

// full returns ErrFull with the cause and the remedy.
func (s *KVStore) full(i, records int, why string) error {
	return fmt.Errorf("%w: entry %s has %d records and one more would %s; retry after drainers have published some, and retry or purge parked records", ErrFull, s.shards[i], records, why)
}

// Claim implements Store.
func (s *KVStore) Claim(ctx context.Context, opts ClaimOptions) (Claim, error) {
	if err := opts.validate(); err != nil {
		return Claim{}, err
	}
	if n := jsonLen(opts.Worker); n > kvText {
		return Claim{}, fmt.Errorf("outbox: KV store: claim: worker name has %d bytes as JSON, at most %d are allowed", n, kvText)
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
				continue // an oversized entry must not block the other entries
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
	return c, nil // claims already written stay valid despite the error
}

// claimFrom claims records in one shard. When the entry would become too large, it claims fewer.
// When not even one fits, it returns no records if others of the shard are claimed already, because
// settling them makes room, and an error otherwise.
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

// byShard groups records by shard.
func (s *KVStore) byShard(records []*Record) map[int]map[ref]bool {
	m := make(map[int]map[ref]bool)
	for _, r := range records {
		i := s.of(r.lane())
		if m[i] == nil {
			m[i] = make(map[ref]bool)
		}
		m[i][r.ref()] = true
	}
	return m
}

// Renew implements Store.
func (s *KVStore) Renew(ctx context.Context, worker string, lease time.Duration, records []*Record) ([]string, error) {
	var lost []string
	for i, records := range s.byShard(records) {
		var left map[ref]bool
		err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
			left = maps.Clone(records)
			for _, r := range sh.Records {
				if left[r.ref()] && r.Status == Claimed && r.ClaimedBy == worker {
					r.LeaseUntil = now + lease.Milliseconds()
					delete(left, r.ref())
				}
			}
			return len(left) < len(records), nil
		})
		if err != nil {
			return nil, err
		}
		for r := range left {
			lost = append(lost, r.id)
		}
	}
	return lost, nil
}

// Settle implements Store. It settles all records of a shard, and so of a lane, in one write. When
// the entry would become too large, it drops the error texts.
func (s *KVStore) Settle(ctx context.Context, worker string, st Settlement) (Unsettled, error) {
	failed := make(map[ref]*Failure, len(st.Failed))
	all := slices.Clone(st.Sent)
	for i := range st.Failed {
		failed[st.Failed[i].Record.ref()] = &st.Failed[i]
		all = append(all, st.Failed[i].Record)
	}
	for i, records := range s.byShard(all) {
		err := s.settle(ctx, i, worker, records, failed, true)
		if errors.Is(err, jetstream.ErrTooLarge) {
			err = s.settle(ctx, i, worker, records, failed, false)
		}
		if err != nil {
			return Unsettled{}, err
		}
	}
	return Unsettled{}, nil
}

// settle settles the records of one shard. Those that are not in failed were sent. texts
// selects whether error texts are kept.
func (s *KVStore) settle(ctx context.Context, i int, worker string, records map[ref]bool, failed map[ref]*Failure, texts bool) error {
	return s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
		before, changed := len(sh.Records), false
		sh.Records = slices.DeleteFunc(sh.Records, func(r *Record) bool { return records[r.ref()] && failed[r.ref()] == nil })
		for _, r := range sh.Records {
			if f := failed[r.ref()]; f != nil && r.Status == Claimed && r.ClaimedBy == worker {
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

// changeAll applies f to every record and returns how many records f changed.
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

// List implements Store. Each shard has its own sequence numbers, so records of different lanes can
// share a number. ListOptions.After is therefore only reliable with a single shard.
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

// Purge implements Store. It deletes parked records only, because sent records are not kept.
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
					(len(opts.IDs) == 0 || slices.Contains(opts.IDs, r.ID)) && (opts.Topic == "" || opts.Topic == r.Topic)
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

// Listen implements Store. It wakes the sleeper only for records added through the same KVStore
// value.
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
		default: // a wake-up is already pending
		}
	}
}
