package streams

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
	// FollowCheck is the interval at which a hub compares what it has seen with the bucket. A watch
	// whose server is gone learns of that much later.
	FollowCheck = 2 * time.Second
	// followRetry is the delay before a failed watch is repeated.
	followRetry = 500 * time.Millisecond
)

// SharedBucket is a KV bucket that all hubs of a NATS share and follow. It takes no more than Max
// entries, so that a hub never has to drop one.
type SharedBucket struct {
	Conn        *conn.Pool
	Often       *pacedlog.Log
	Replicas    int
	Memory      bool // it is kept in memory
	Name        string
	Description string // of the stream, and in logs: "revoked tokens"
	Max         int64  // entries
	maxBytes    int64  // 0: no bound
	MaxEntry    int32  // bytes; 0: no bound
	// Fixed entries are never changed or removed. Others are removed at the end of their life.
	Fixed bool
}

// Open opens the bucket, and makes it if it is not there.
func (s SharedBucket) Open(ctx context.Context) (natsjs.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	kv, err := s.Conn.JS.KeyValue(ctx, s.Name)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		if _, err = s.Conn.JS.CreateStream(ctx, s.config()); err == nil || errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
			kv, err = s.Conn.JS.KeyValue(ctx, s.Name)
		}
	}
	if err != nil {
		return nil, s.Conn.Unavailable(fmt.Errorf("jetstream: bucket %s: %w: is this user allowed to make KV buckets?", s.Name, err))
	}
	return kv, nil
}

// config is the stream of the bucket. nats.go makes no bucket that bounds the number of its
// entries.
func (s SharedBucket) config() natsjs.StreamConfig {
	cfg := natsjs.StreamConfig{
		Name: s.Stream(), Description: "eventhub: " + s.Description, Subjects: []string{s.Subject(">")},
		MaxMsgsPerSubject: 1, MaxMsgs: s.Max, MaxBytes: -1, MaxMsgSize: -1, Discard: natsjs.DiscardNew, MaxConsumers: -1,
		AllowRollup: !s.Fixed, DenyDelete: true, DenyPurge: s.Fixed, AllowDirect: true, AllowMsgTTL: !s.Fixed, DiscardNewPerSubject: s.Fixed,
		Replicas: s.Replicas,
	}
	if s.maxBytes > 0 {
		cfg.MaxBytes = s.maxBytes
	}
	if s.MaxEntry > 0 {
		cfg.MaxMsgSize = s.MaxEntry
	}
	if s.Memory {
		cfg.Storage = natsjs.MemoryStorage
	}
	return cfg
}

// Stream returns the name of the stream of the bucket.
func (s SharedBucket) Stream() string { return "KV_" + s.Name }

// Subject returns the subject of a key.
func (s SharedBucket) Subject(key string) string { return "$KV." + s.Name + "." + key }

// Follow calls each with every entry, and then with each new one, until ctx ends. The value is nil
// if the key was deleted; each is not told when an entry has reached the end of its life. loaded is
// called whenever all entries that were there have been given. While NATS cannot be reached, Follow
// tries again, and afterwards gives all entries anew. The functions are called by one goroutine at
// a time.
func (s SharedBucket) Follow(ctx context.Context, loaded func(), each func(key string, value []byte)) {
	for ctx.Err() == nil {
		err := s.watch(ctx, loaded, each)
		if err == nil || ctx.Err() != nil {
			continue // connected again, or over
		}
		s.Often.Log(ctx, slog.LevelWarn, "cannot watch a bucket of all hubs; keeping what is known and retrying", s.Description, slog.String("of", s.Description), slog.Any("error", err))
		select {
		case <-ctx.Done():
		case <-time.After(followRetry):
		}
	}
}

// watch returns nil when the connection was created again: what the server sent meanwhile is
// unknown.
func (s SharedBucket) watch(ctx context.Context, loaded func(), each func(string, []byte)) error {
	nc := s.Conn.JS.Conn()
	connected := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(connected)
	kv, err := s.Open(ctx)
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
	tick := time.NewTicker(FollowCheck)
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
func (s SharedBucket) last(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, FollowCheck)
	defer cancel()
	info, err := s.Conn.FindStream(ctx, s.Stream())
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}
