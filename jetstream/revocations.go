package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// revokedBucket is the KV bucket that holds the revoked tokens of all hubs.
const revokedBucket = "eventhub_revoked"

// MaxRevocations ("revocations") is the maximum number of entries in the bucket of revoked tokens.
// The server refuses further ones, because a hub that dropped an entry would accept a revoked token
// again.
const MaxRevocations = 100_000

// Times of following the revoked tokens.
const (
	// revokedCheck is the interval at which a hub compares what it has seen with the bucket. A
	// watch whose server is gone learns of that much later.
	revokedCheck = 2 * time.Second
	// revokedRetry is the delay before a failed watch is repeated.
	revokedRetry = 500 * time.Millisecond
)

// ErrRevocationsFull is among the causes of the error of Revocations.Put when the bucket holds
// MaxRevocations entries. Nothing was stored.
var ErrRevocationsFull = fmt.Errorf("jetstream: the list of revoked tokens is full (limit revocations: %d entries)", MaxRevocations)

// Revocations is the list of revoked tokens that all hubs of a NATS share, in the KV bucket
// eventhub_revoked. The bus does not look into the entries. A Revocations is a small value that
// costs nothing to create. Its methods may be called concurrently.
type Revocations struct{ bus *Bus }

// Revocations gives access to the list of revoked tokens.
func (a Admin) Revocations() Revocations { return Revocations(a) }

// open opens the bucket, and makes it if it is not there.
func (r Revocations) open(ctx context.Context) (natsjs.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	b := r.bus
	kv, err := b.js.KeyValue(ctx, revokedBucket)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		// nats.go makes no bucket that bounds the number of its entries.
		cfg := natsjs.StreamConfig{
			Name: "KV_" + revokedBucket, Description: "eventhub: revoked tokens", Subjects: []string{"$KV." + revokedBucket + ".>"},
			MaxMsgsPerSubject: 1, MaxMsgs: MaxRevocations, MaxBytes: -1, Discard: natsjs.DiscardNew, MaxConsumers: -1,
			AllowRollup: true, DenyDelete: true, AllowDirect: true, AllowMsgTTL: true, Replicas: b.cfg.Replicas,
		}
		if b.cfg.Server != nil && b.cfg.Server.InMemory() {
			cfg.Storage = natsjs.MemoryStorage
		}
		if _, err = b.js.CreateStream(ctx, cfg); err == nil || errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
			kv, err = b.js.KeyValue(ctx, revokedBucket)
		}
	}
	if err != nil {
		return nil, b.unavailable(fmt.Errorf("jetstream: bucket %s: %w: is this user allowed to make KV buckets?", revokedBucket, err))
	}
	return kv, nil
}

// Put stores an entry under a key of 1..200 letters, digits, -, _ and dots, or replaces the entry
// of that key. The server removes the entry after life, which is at least a second.
func (r Revocations) Put(ctx context.Context, key string, value []byte, life time.Duration) error {
	if _, err := r.open(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	msg := &nats.Msg{Subject: "$KV." + revokedBucket + "." + key, Data: value}
	_, err := r.bus.js.PublishMsg(ctx, msg, natsjs.WithMsgTTL(max(life, time.Second).Round(time.Second)))
	if api, ok := errors.AsType[*natsjs.APIError](err); ok && strings.Contains(api.Description, "maximum messages exceeded") {
		return ErrRevocationsFull
	}
	if err != nil {
		return r.bus.unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", revokedBucket, err))
	}
	return nil
}

// Follow calls each with every entry, and then with each new one, until ctx ends. The value is nil
// if the key was deleted; each is not told when an entry has reached the end of its life. loaded is
// called whenever all entries that were there have been given. While NATS cannot be reached, Follow
// tries again, and afterwards gives all entries anew. The functions are called by one goroutine at
// a time.
func (r Revocations) Follow(ctx context.Context, loaded func(), each func(key string, value []byte)) {
	said := false
	for ctx.Err() == nil {
		err := r.watch(ctx, func() { said = false; loaded() }, each)
		if err == nil || ctx.Err() != nil {
			continue // connected again, or over
		}
		if !said {
			r.bus.log.WarnContext(ctx, "cannot watch revoked tokens; keeping the known ones and retrying", slog.Any("error", err))
			said = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(revokedRetry):
		}
	}
}

// watch returns nil when the connection was created again: what the server sent meanwhile is
// unknown.
func (r Revocations) watch(ctx context.Context, loaded func(), each func(string, []byte)) error {
	nc := r.bus.js.Conn()
	connected := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(connected)
	kv, err := r.open(ctx)
	if err != nil {
		return err
	}
	seen, err := r.last(ctx) // what is older comes first, unless it has ended
	if err != nil {
		return err
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind: so the
	// watch has a context of its own, and Stop ends both.
	watching, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	w, err := kv.WatchAll(watching)
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	tick := time.NewTicker(revokedCheck)
	defer tick.Stop()
	behind := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-connected:
			return nil
		case e, open := <-w.Updates():
			switch {
			case !open:
				return errors.New("the watch ended")
			case e == nil:
				loaded()
				continue
			}
			seen, behind = max(seen, e.Revision()), false
			if e.Operation() != natsjs.KeyValuePut {
				each(e.Key(), nil)
				continue
			}
			each(e.Key(), e.Value())
		case <-tick.C:
			last, err := r.last(ctx)
			switch {
			case err != nil || last <= seen:
				behind = false
			case behind:
				return errors.New("the watch missed entries")
			default:
				behind = true
			}
		}
	}
}

// last returns the revision of the newest entry of the bucket, also of one that has ended.
func (r Revocations) last(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, revokedCheck)
	defer cancel()
	info, err := r.bus.findStream(ctx, "KV_"+revokedBucket)
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}
