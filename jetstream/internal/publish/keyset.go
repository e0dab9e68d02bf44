package publish

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/topics"
)

const (
	// keysWait is how long the first use of a topic waits until the keys of its bucket are read.
	// The rest is read while the topic is used.
	keysWait = 500 * time.Millisecond
	// A key that would be refused is looked up at the leader, for others may have made it: keyLooks
	// times a second for each client. A look-up takes at most keyLookWait.
	keyLooks    = 20
	keyLookWait = time.Second
	// keysAgain is how long after a reading of a bucket a full topic reads the bucket again.
	keysAgain = time.Minute
	// keysStale is how many keys that the bucket has no longer a keySet may hold before it reads
	// the bucket again, beside as many as the bucket has.
	keysStale = 10_000
)

// ErrMaxKeys is the cause of the *Error (overloaded) for an event of a new key, when a compacted
// topic has as many keys as its rule allows (topics.Rule.MaxKeys). Nothing was stored.
var ErrMaxKeys = errors.New("jetstream: a topic has as many keys as its rule allows")

var keySeed = maphash.MakeSeed()

// keySet is what this hub knows of the keys in the bucket of a compacted topic, so that a publish
// of a known key asks nobody. Keys that other hubs and native clients make are counted once a
// minute; the keys that they remove are found when the bucket is read, at most once a minute while
// the topic is full. Its methods may be called concurrently.
type keySet struct {
	shared *Publishers
	topic  *streams.Topic
	most   int

	mu      sync.Mutex
	hashes  map[uint64]bool // every key, and whether it is removed: 9 bytes and some more for each
	removed int             // keys whose newest event is a tombstone
	// every key of the bucket is in hashes that was there at the last reading
	complete bool
	reading  bool
	present  int   // entries of the bucket when it was last looked at
	since    int   // keys that were made since then
	readAt   int64 // when the bucket was last read, in the clock of the bus
}

// newKeySet begins to read the keys of a bucket with so many entries, and waits a moment for it.
func (p *Publishers) newKeySet(ctx context.Context, t *streams.Topic, rule *topics.Rule, entries uint64) *keySet {
	k := &keySet{shared: p, topic: t, most: rule.MaxKeys, hashes: make(map[uint64]bool), present: int(entries)} //nolint:gosec // far fewer
	if k.most == 0 {
		k.most = topics.DefaultMaxKeys
	}
	if entries == 0 {
		k.complete = true
		return k
	}
	done := k.read()
	wait := time.NewTimer(keysWait)
	defer wait.Stop()
	select {
	case <-done:
	case <-wait.C:
	case <-ctx.Done():
	}
	return k
}

// read begins to read the keys of the bucket, unless that is going on. The result is closed at the
// end.
func (k *keySet) read() <-chan struct{} {
	done := make(chan struct{})
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.shared
	if k.reading {
		close(done)
		return done
	}
	k.reading, k.readAt = true, p.Clock.Now()
	started := p.Conn.Start(func() {
		defer close(done)
		found := make(map[uint64]bool)
		err := p.Hooks.EachKey(p.Conn.Ctx, k.topic, func(key string, removed bool) { found[maphash.String(keySeed, key)] = removed })
		k.mu.Lock()
		defer k.mu.Unlock()
		k.reading = false
		if err != nil {
			if p.Conn.Ctx.Err() == nil && !errors.Is(err, event.ErrNotFound) {
				p.Log.WarnContext(p.Conn.Ctx, "failed to read the keys of a topic; retrying in a minute", slog.String("topic", k.topic.Name), slog.Any("error", err))
			}
			return
		}
		if !k.complete { // what was made meanwhile stays
			maps.Copy(found, k.hashes)
		}
		k.hashes, k.complete, k.removed = found, true, 0
		for _, removed := range found {
			if removed {
				k.removed++
			}
		}
	})
	if !started {
		k.reading = false
		close(done)
	}
	return done
}

// looked tells how many entries the bucket has. It returns how many keys are removed.
func (k *keySet) looked(entries uint64) (removed int) {
	k.mu.Lock()
	k.present, k.since = int(entries), 0 //nolint:gosec // far fewer
	again := !k.complete || len(k.hashes) > 2*k.present+keysStale
	removed = k.removed
	k.mu.Unlock()
	if again {
		k.read()
	}
	return removed
}

// exists notes a key that the caller has read.
func (k *keySet) exists(key string, tombstone bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.noteLocked(maphash.String(keySeed, key), tombstone)
}

// admit returns an *Error if the key is new and client may not make it, and notes whether the key
// is removed. "" is the hub itself, which only MaxKeys binds, as it does clients that nobody named.
func (k *keySet) admit(ctx context.Context, key, client string, tombstone bool) error {
	h := maphash.String(keySeed, key)
	limit, err := k.add(h, client, tombstone)
	if err == nil {
		return nil
	}
	if !k.made(ctx, key, client) {
		k.shared.Obs.LimitReached(limit)
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.noteLocked(h, tombstone)
	return nil
}

func (k *keySet) noteLocked(h uint64, removed bool) {
	if k.hashes[h] {
		k.removed--
	}
	if removed {
		k.removed++
	}
	k.hashes[h] = removed
}

// made reports whether others have made a key, as far as the client may have that looked up.
func (k *keySet) made(ctx context.Context, key, client string) bool {
	if k.shared.keyLooks.Take(client) > 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, keyLookWait)
	defer cancel()
	return k.shared.Hooks.HasKey(ctx, k.topic, key)
}

// add adds a key unless a limit forbids it, which add then names.
func (k *keySet) add(h uint64, client string, tombstone bool) (limit string, err error) {
	k.mu.Lock()
	removed, known := k.hashes[h]
	if known && (!removed || tombstone) {
		k.noteLocked(h, tombstone)
		k.mu.Unlock()
		return "", nil
	}
	p := k.shared
	if k.complete { // otherwise the key may be an old one
		if !tombstone && k.present+k.since-k.removed >= k.most {
			again := p.Clock.Now()-k.readAt > int64(keysAgain)
			k.mu.Unlock()
			if again { // others may have removed some
				k.read()
			}
			return "max_keys", &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("topic %s has %d keys, which is the limit of its rule (max_keys): a new key is taken when keys have gone", k.topic.Name, k.most), Err: ErrMaxKeys}
		}
		counts := !known && client != "" && !strings.HasPrefix(client, conn.OwnClient)
		if counts && p.keyShares.Wait(client) > 0 {
			k.mu.Unlock()
			return "key_share", &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d new keys of compacted topics in 30 days, which is its limit: one more is allowed every %v",
				p.Limits.KeyShare, max(ShareTime/time.Duration(p.Limits.KeyShare), time.Millisecond).Round(time.Millisecond))}
		}
		if counts && p.newKeys.Take(client) > 0 {
			k.mu.Unlock()
			return "keys_per_client", &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d new keys of compacted topics, which is its limit: %d more are allowed a second", p.Limits.KeysPerClient, p.Limits.KeyRate)}
		}
		if counts {
			p.keyShares.Take(client)
		}
		if !known {
			k.since++
		}
	}
	k.noteLocked(h, tombstone)
	k.mu.Unlock()
	return "", nil
}
