package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// keyedTopic is a filled compacted topic with a bus and a native client, each with one connection
// to the same server.
type keyedTopic struct {
	name    string
	keys    int
	entries uint64 // number of published events
	// filledIn is the time for publishing. caughtUpIn is the further time until the bucket was
	// complete.
	filledIn, caughtUpIn time.Duration

	bus    *jetstream.Bus
	conn   *nats.Conn
	js     natsjs.JetStream
	kv     natsjs.KeyValue
	stream natsjs.Stream // stream of the topic, accessed at its leader
	bucket string        // stream of the bucket
}

// open creates and fills the topic. The caller must close it.
func (cmd *Keyed) open(ctx context.Context, b *run) (_ *keyedTopic, err error) {
	t := &keyedTopic{name: "bench.keyed." + b.id, keys: cmd.Keys}
	bucket := "latest_" + strings.ReplaceAll(t.name, ".", "_")
	t.bucket = "KV_" + bucket
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close(ctx))
		}
	}()
	at, _, _ := strings.Cut(b.sys.native.url, ",") // the same server of a cluster for both
	t.bus, err = jetstream.Open(ctx, jetstream.Config{
		URL: at, Replicas: b.target.Replicas, Connections: 1,
		Topics: []topics.Rule{{Pattern: t.name, Compaction: true}},
	})
	if err != nil {
		return nil, err
	}
	if t.conn, err = nats.Connect(at, nats.Name("eventhub bench")); err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", redact(at), err)
	}
	if t.js, err = natsjs.New(t.conn, natsjs.WithPublishAsyncMaxPending(4096)); err != nil {
		return nil, err
	}
	// The first event creates the topic. The native client then writes its key again, like all
	// other keys.
	first, err := t.bus.Publish(ctx, t.name, newPayload(cmd.Size), jetstream.PublishOptions{Key: keyName(0)})
	if err != nil {
		return nil, err
	}
	if t.stream, err = t.js.Stream(ctx, first.Stream); err != nil {
		return nil, err
	}
	// nats.go reads from any replica if the stream allows direct reads. Clearing the flag in the
	// cached info makes nats.go read at the leader.
	t.stream.CachedInfo().Config.AllowDirect = false
	stop := b.progress(fmt.Sprintf("publishing %d keys", cmd.Keys))
	err = t.fill(ctx, cmd)
	stop()
	if err != nil {
		return nil, fmt.Errorf("fill the topic: %w", err)
	}
	if t.kv, err = t.js.KeyValue(ctx, bucket); err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", bucket, err)
	}
	return t, nil
}

// close removes the topic and its bucket.
func (t *keyedTopic) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	var errs []error
	if t.stream != nil {
		for _, name := range []string{t.bucket, t.stream.CachedInfo().Config.Name} {
			if err := t.js.DeleteStream(ctx, name); !errors.Is(err, natsjs.ErrStreamNotFound) {
				errs = append(errs, err)
			}
		}
	}
	if t.conn != nil {
		t.conn.Close()
	}
	if t.bus != nil {
		errs = append(errs, t.bus.Close()) //nolint:contextcheck // Close limits its own duration
	}
	return errors.Join(errs...)
}

// fill publishes the events and waits until the bucket is complete.
func (t *keyedTopic) fill(ctx context.Context, cmd *Keyed) error {
	begin := time.Now()
	again := int(float64(cmd.Keys) * cmd.Again)
	var failed atomic.Pointer[error]
	js, err := natsjs.New(t.conn, natsjs.WithPublishAsyncMaxPending(4096),
		natsjs.WithPublishAsyncErrHandler(func(_ natsjs.JetStream, _ *nats.Msg, err error) { failed.CompareAndSwap(nil, &err) }))
	if err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // not security-relevant
	for i := range cmd.Keys + again {
		key := i
		if i >= cmd.Keys {
			key = random.IntN(cmd.Keys)
		}
		payload := newPayload(cmd.Size) // nats.go holds the payload until it is confirmed
		stamp(payload, i, now())
		if _, err := js.PublishAsync("keyed."+keyName(key)+"."+t.name, payload, natsjs.WithStallWait(stallAfter)); err != nil {
			return err
		}
		if err := failed.Load(); err != nil {
			return *err
		}
		if i%1000 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(stallAfter):
		return fmt.Errorf("publishes not confirmed within %v", stallAfter)
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := failed.Load(); err != nil {
		return *err
	}
	t.entries, t.filledIn = uint64(cmd.Keys+again+1), time.Since(begin) //nolint:gosec // positive
	begin = time.Now()
	err = t.await(ctx)
	t.caughtUpIn = time.Since(begin)
	return err
}

// await waits until every replica of the bucket is complete.
func (t *keyedTopic) await(ctx context.Context) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	var last uint64
	moved := time.Now()
	for {
		s, err := t.js.Stream(ctx, t.bucket)
		if err != nil {
			return err
		}
		info := s.CachedInfo()
		done := info.State.LastSeq >= t.entries && info.State.Msgs == uint64(t.keys) //nolint:gosec // positive
		if info.Cluster != nil {
			for _, r := range info.Cluster.Replicas {
				done = done && r.Current && r.Lag == 0
			}
		}
		if done {
			return nil
		}
		if info.State.LastSeq != last {
			last, moved = info.State.LastSeq, time.Now()
		}
		if time.Since(moved) > stallAfter {
			return fmt.Errorf("bucket stalled at %d keys and %d of %d events for %v", info.State.Msgs, last, t.entries, stallAfter)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// keyName returns a key name with the same form in subjects and in the bucket.
func keyName(n int) string { return "k" + strconv.Itoa(n) }

// draw returns count distinct random keys. Equal n yield equal keys.
func (t *keyedTopic) draw(n, count int) []string {
	random := rand.New(rand.NewPCG(2, uint64(n))) //nolint:gosec // not security-relevant
	keys := make([]string, 0, count)
	drawn := make(map[int]bool, count)
	for len(keys) < count {
		k := random.IntN(t.keys)
		if !drawn[k] {
			drawn[k] = true
			keys = append(keys, keyName(k))
		}
	}
	return keys
}
