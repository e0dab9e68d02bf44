package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/pacedlog"
)

// Times of following a bucket.
const (
	// followCheck is the interval at which a hub compares what it has seen with the bucket. A watch
	// whose server is gone learns of that much later.
	followCheck = 2 * time.Second
	// followRetry is the delay before a failed watch is repeated.
	followRetry = 500 * time.Millisecond
)

// A sharedBucket is a KV bucket that all hubs of a NATS share and follow. It takes no more than max
// entries, so that a hub never has to drop one.
type sharedBucket struct {
	conn        *conn.Pool
	often       *pacedlog.Log
	replicas    int
	memory      bool // it is kept in memory
	name        string
	description string // of the stream, and in logs: "revoked tokens"
	max         int64  // entries
	maxBytes    int64  // 0: no bound
	maxEntry    int32  // bytes; 0: no bound
	// fixed entries are never changed or removed. Others are removed at the end of their life.
	fixed bool
}

// open opens the bucket, and makes it if it is not there.
func (s sharedBucket) open(ctx context.Context) (natsjs.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	kv, err := s.conn.JS.KeyValue(ctx, s.name)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		if _, err = s.conn.JS.CreateStream(ctx, s.config()); err == nil || errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
			kv, err = s.conn.JS.KeyValue(ctx, s.name)
		}
	}
	if err != nil {
		return nil, s.conn.Unavailable(fmt.Errorf("jetstream: bucket %s: %w: is this user allowed to make KV buckets?", s.name, err))
	}
	return kv, nil
}

// config is the stream of the bucket. nats.go makes no bucket that bounds the number of its
// entries.
func (s sharedBucket) config() natsjs.StreamConfig {
	cfg := natsjs.StreamConfig{
		Name: s.stream(), Description: "eventhub: " + s.description, Subjects: []string{s.subject(">")},
		MaxMsgsPerSubject: 1, MaxMsgs: s.max, MaxBytes: -1, MaxMsgSize: -1, Discard: natsjs.DiscardNew, MaxConsumers: -1,
		AllowRollup: !s.fixed, DenyDelete: true, DenyPurge: s.fixed, AllowDirect: true, AllowMsgTTL: !s.fixed, DiscardNewPerSubject: s.fixed,
		Replicas: s.replicas,
	}
	if s.maxBytes > 0 {
		cfg.MaxBytes = s.maxBytes
	}
	if s.maxEntry > 0 {
		cfg.MaxMsgSize = s.maxEntry
	}
	if s.memory {
		cfg.Storage = natsjs.MemoryStorage
	}
	return cfg
}

func (s sharedBucket) stream() string { return "KV_" + s.name }

func (s sharedBucket) subject(key string) string { return "$KV." + s.name + "." + key }

// follow calls each with every entry, and then with each new one, until ctx ends. The value is nil
// if the key was deleted; each is not told when an entry has reached the end of its life. loaded is
// called whenever all entries that were there have been given. While NATS cannot be reached, follow
// tries again, and afterwards gives all entries anew. The functions are called by one goroutine at
// a time.
func (s sharedBucket) follow(ctx context.Context, loaded func(), each func(key string, value []byte)) {
	for ctx.Err() == nil {
		err := s.watch(ctx, loaded, each)
		if err == nil || ctx.Err() != nil {
			continue // connected again, or over
		}
		s.often.Log(ctx, slog.LevelWarn, "cannot watch a bucket of all hubs; keeping what is known and retrying", s.description, slog.String("of", s.description), slog.Any("error", err))
		select {
		case <-ctx.Done():
		case <-time.After(followRetry):
		}
	}
}

// watch returns nil when the connection was created again: what the server sent meanwhile is
// unknown.
func (s sharedBucket) watch(ctx context.Context, loaded func(), each func(string, []byte)) error {
	nc := s.conn.JS.Conn()
	connected := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(connected)
	kv, err := s.open(ctx)
	if err != nil {
		return err
	}
	seen, err := s.last(ctx) // what is older comes first, unless it has ended
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
	tick := time.NewTicker(followCheck)
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
			last, err := s.last(ctx)
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
func (s sharedBucket) last(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, followCheck)
	defer cancel()
	info, err := s.conn.FindStream(ctx, s.stream())
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}
