package outbox

import (
	"context"
	"encoding/json"
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

// KVBus is what a KVStore needs of the event bus. *jetstream.Bus is one.
type KVBus interface {
	OpenCollection(ctx context.Context, name string) (*jetstream.Collection, error)
}

var _ KVBus = (*jetstream.Bus)(nil)

// KVConfig configures a KVStore.
type KVConfig struct {
	// Bus holds the bucket. Required.
	Bus KVBus
	// Bucket is the bucket's name: 1..128 of a-z, 0-9, _ and -. Default "outbox".
	Bucket string
	// Shards is how many entries the bucket has, 1..256; it must never change. Default DefaultKVShards. A lane lies in one.
	Shards int
	// ShardRecords is the most records in an entry, which must also fit into a message (1 MiB less 64 KiB on a NATS that is
	// not configured otherwise). Default DefaultKVShardRecords. Beyond either, Add returns ErrFull.
	ShardRecords int
	// MaxPayload is the largest payload in bytes that Add takes. Default 64 KiB.
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
// purge of them, and a second Add of an id is noticed only as long as the first one waits.
//
// Its clock is that of the process: those of all that use it must agree, to a few seconds less than a lease.
type KVStore struct {
	shards  []string
	records int
	max     int
	coll    *jetstream.Collection
	turn    atomic.Uint32 // where the next claim begins

	mu    sync.Mutex
	wakes map[chan struct{}]struct{} // of Listen
}

var _ Store = (*KVStore)(nil)

// OpenKVStore opens the bucket, and makes it when it does not exist.
func OpenKVStore(ctx context.Context, cfg KVConfig) (*KVStore, error) {
	if cfg.Bucket == "" {
		cfg.Bucket = DefaultTable
	}
	for _, d := range []struct {
		v   *int
		def int
	}{{&cfg.Shards, DefaultKVShards}, {&cfg.ShardRecords, DefaultKVShardRecords}, {&cfg.MaxPayload, 64 << 10}} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	switch {
	case cfg.Bus == nil:
		return nil, errors.New("outbox: KV store: Bus is missing")
	case cfg.Shards < 1 || cfg.Shards > 256:
		return nil, fmt.Errorf("outbox: KV store: %d shards: 1 to 256 are allowed", cfg.Shards)
	case cfg.ShardRecords < 1 || cfg.MaxPayload < 1:
		return nil, errors.New("outbox: KV store: limits must be positive")
	}
	coll, err := cfg.Bus.OpenCollection(ctx, cfg.Bucket)
	if err != nil {
		return nil, fmt.Errorf("outbox: KV store: %w", err)
	}
	s := &KVStore{records: cfg.ShardRecords, max: cfg.MaxPayload, coll: coll, wakes: make(map[chan struct{}]struct{})}
	for i := range cfg.Shards {
		s.shards = append(s.shards, "shard-"+strconv.Itoa(i))
	}
	return s, nil
}

// shard is what one entry holds.
type shard struct {
	// Last is the sequence that was given out last. Each shard counts for itself, which is enough for the order of a lane.
	Last    int64     `json:"last"`
	Records []*Record `json:"-"` // in order
}

// shardJSON is a shard as it is written. Payloads are strings in it, for the encoder would change their bytes.
type shardJSON struct {
	*shard
	Rows []rowJSON `json:"records"`
}

type rowJSON struct {
	*Record
	Payload string `json:"payload"`
}

func (sh *shard) encode() ([]byte, error) {
	rows := make([]rowJSON, len(sh.Records))
	for i, r := range sh.Records {
		rows[i] = rowJSON{r, string(r.Payload)}
	}
	return json.Marshal(shardJSON{sh, rows})
}

func decodeShard(value []byte) (*shard, error) {
	sh := new(shard)
	if len(value) == 0 {
		return sh, nil
	}
	read := shardJSON{shard: sh}
	if err := json.Unmarshal(value, &read); err != nil {
		return nil, err
	}
	for _, row := range read.Rows {
		row.Record.Payload = json.RawMessage(row.Payload)
		sh.Records = append(sh.Records, row.Record)
	}
	return sh, nil
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
		if !errors.Is(err, jetstream.ErrKeyChanged) {
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

// Add adds a record, and fills in ID, Payload and TS when they are empty. It is an *Error for what the bus would refuse,
// ErrFull and ErrExists; after another error the outcome is unknown, and Add may be repeated with the same record.
func (s *KVStore) Add(ctx context.Context, r *Record) error {
	if err := r.prepare(s.max); err != nil {
		return err
	}
	err := s.change(ctx, s.of(r.lane()), func(sh *shard, now int64) (bool, error) {
		if len(sh.Records) >= s.records {
			return false, ErrFull
		}
		if slices.ContainsFunc(sh.Records, func(o *Record) bool { return o.ID == r.ID }) {
			return false, ErrExists
		}
		sh.Last++
		added := *r
		added.Sequence, added.Status, added.AddedAt = sh.Last, Pending, now
		sh.Records = append(sh.Records, &added)
		return true, nil
	})
	if errors.Is(err, jetstream.ErrTooLarge) {
		return ErrFull
	}
	if err == nil {
		s.wake()
	}
	return err
}

// Claim implements Store.
func (s *KVStore) Claim(ctx context.Context, opts ClaimOptions) (Claim, error) {
	if err := opts.check(); err != nil {
		return Claim{}, err
	}
	c := Claim{Now: time.Now().UnixMilli()}
	start, left := int(s.turn.Add(1)), opts.bytes()
	for n := range s.shards {
		var got []*Record
		var more bool
		err := s.change(ctx, (start+n)%len(s.shards), func(sh *shard, _ int64) (bool, error) {
			got, more = sh.claim(&opts, opts.Limit-len(c.Records), left, c.Now)
			return len(got) > 0, nil
		})
		if err != nil {
			if len(c.Records) > 0 {
				break // what was claimed is claimed
			}
			return Claim{}, err
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
	return c, nil
}

func (sh *shard) claim(opts *ClaimOptions, most, left int, now int64) (got []*Record, more bool) {
	waits := make(map[string]bool) // lanes that something waits in
	for _, r := range sh.Records {
		lane := r.lane()
		switch {
		case waits[lane]:
		case r.Status == Errored && opts.PassErrors:
		case r.Status != Pending || r.NextAt > now || slices.Contains(opts.ExceptTopics, r.Topic):
			waits[lane] = true
		case len(got) == most || len(r.Payload) > left && left < opts.bytes():
			return got, true
		default:
			left -= len(r.Payload)
			r.Status, r.ClaimedBy, r.LeaseUntil = Claimed, opts.Worker, now+opts.Lease.Milliseconds()
			if r.PublishBegan == 0 {
				r.PublishBegan = now
			}
			got = append(got, r)
		}
	}
	return got, false
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

// Settle implements Store. What is settled at once is in one write for each shard, so for each lane.
func (s *KVStore) Settle(ctx context.Context, worker string, st Settlement) error {
	failed := make(map[string]*Failure, len(st.Failed))
	all := slices.Clone(st.Sent)
	for i := range st.Failed {
		failed[st.Failed[i].Record.ID] = &st.Failed[i]
		all = append(all, st.Failed[i].Record)
	}
	for i, ids := range s.byShard(all) {
		err := s.change(ctx, i, func(sh *shard, now int64) (bool, error) {
			before, changed := len(sh.Records), false
			sh.Records = slices.DeleteFunc(sh.Records, func(r *Record) bool { return ids[r.ID] && failed[r.ID] == nil })
			for _, r := range sh.Records {
				if f := failed[r.ID]; f != nil && r.Status == Claimed && r.ClaimedBy == worker {
					r.fail(f, now)
					changed = true
				}
			}
			return changed || len(sh.Records) < before, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Record) fail(f *Failure, now int64) {
	r.Status, r.ClaimedBy, r.LeaseUntil, r.NextAt = Pending, "", 0, now+f.Delay.Milliseconds()
	if f.Park {
		r.Status = Errored
	}
	if f.Counts {
		r.Attempts++
	}
	if f.Unsent {
		r.PublishBegan = 0
	}
	if f.Err != "" {
		r.LastErr = errText(f.Err)
	}
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
	if err := opts.check(); err != nil || opts.Status == Sent {
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
func (s *KVStore) Listen(ctx context.Context, wake func()) error {
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
			wake()
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
