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
)

// groupsBucket names, for each group that was moved, the consumer that it now is.
const groupsBucket = "eventhub_groups"

// sweepEvery is how often consumers that no pointer names are looked for, and sweepAge how old they must be: younger
// ones may belong to a seek that is under way.
const (
	sweepEvery = 10 * time.Minute
	sweepAge   = time.Minute
)

// pointer says which consumer is the group. A group that was never moved has none stored: generation 1, plain name.
type pointer struct {
	Generation int    `json:"generation"`
	Consumer   string `json:"consumer"`
	// Stream is when the stream was created: a pointer into a stream that was deleted and made anew counts no more.
	Stream time.Time `json:"stream"`

	revision uint64 // in the bucket; 0: not stored
}

// following is the pointer after a seek. Its name has a random part, so that two seeks at once do not meet in one
// consumer.
func (p pointer) following(t *topicInfo, group string) pointer {
	var nonce [4]byte
	_, _ = rand.Read(nonce[:]) // never fails
	n := p.Generation + 1
	return pointer{Generation: n, Consumer: t.consumerName(group) + "~" + strconv.Itoa(n) + "-" + hex.EncodeToString(nonce[:])}
}

var errPointerMoved = errors.New("jetstream: the group's pointer was moved by another")

// pointers reads and moves the groups' pointers.
type pointers struct {
	bus *Bus
	kv  natsjs.KeyValue
}

func openPointers(ctx context.Context, b *Bus) (*pointers, error) {
	kv, err := b.ownBucket(ctx, natsjs.KeyValueConfig{Bucket: groupsBucket, Description: "eventhub: the consumer of each group that was moved"})
	if err != nil {
		return nil, err
	}
	return &pointers{bus: b, kv: kv}, nil
}

// ownBucket opens a bucket in which hubs keep what they share, and makes it if it is not there.
func (b *Bus) ownBucket(ctx context.Context, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	kv, err := b.js.KeyValue(ctx, cfg.Bucket)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		cfg.Replicas = b.cfg.Replicas
		kv, err = b.js.CreateKeyValue(ctx, cfg)
		if errors.Is(err, natsjs.ErrBucketExists) {
			kv, err = b.js.KeyValue(ctx, cfg.Bucket)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w: is this user allowed to make KV buckets?", cfg.Bucket, err)
	}
	return kv, nil
}

func pointerKey(t *topicInfo, group string) string {
	return t.stream.name + "." + t.consumerName(group)
}

// get reads the pointer at the bucket's leader: a stale one would bring a consumer back that a seek has left.
func (p *pointers) get(ctx context.Context, t *topicInfo, group string) (pointer, error) {
	plain := pointer{Generation: 1, Consumer: t.consumerName(group)}
	m, err := p.bus.lastBySubject(ctx, "KV_"+groupsBucket, "$KV."+groupsBucket+"."+pointerKey(t, group))
	if errors.Is(err, ErrNotFound) {
		return plain, nil
	}
	if err != nil {
		return pointer{}, err
	}
	plain.revision = m.seq
	if op := m.header.Get("KV-Operation"); op == "DEL" || op == "PURGE" {
		return plain, nil
	}
	stored := pointer{revision: m.seq}
	if err := json.Unmarshal(m.data, &stored); err != nil {
		return pointer{}, fmt.Errorf("jetstream: pointer of group %q on stream %s is unreadable: %w: delete it to begin anew", group, t.stream.name, err)
	}
	if !stored.Stream.Equal(t.stream.created) {
		return plain, nil
	}
	return stored, nil
}

// swap moves the pointer from old to next, or returns errPointerMoved.
func (p *pointers) swap(ctx context.Context, t *topicInfo, group string, old, next pointer) (uint64, error) {
	next.Stream = t.stream.created
	value, err := json.Marshal(next)
	if err != nil {
		return 0, err
	}
	rev, err := p.kv.Update(ctx, pointerKey(t, group), value, old.revision)
	var api *natsjs.APIError
	if errors.As(err, &api) && (api.ErrorCode == natsjs.JSErrCodeStreamWrongLastSequence || api.ErrorCode == natsjs.JSErrCodeStreamWrongLastSequenceConstant) ||
		errors.Is(err, natsjs.ErrKeyExists) {
		return 0, errPointerMoved
	}
	return rev, err
}

// follow tells this hub's members when their group was moved, until the bus closes.
func (p *pointers) follow() {
	for p.bus.ctx.Err() == nil {
		if err := p.watch(); err != nil && p.bus.ctx.Err() == nil {
			p.bus.log.Warn("moves of groups cannot be followed now; they are noticed at the next pull", slog.Any("error", err))
		}
		select {
		case <-p.bus.ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

func (p *pointers) watch() error {
	w, err := p.kv.WatchAll(p.bus.ctx, natsjs.UpdatesOnly())
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-p.bus.ctx.Done():
			return nil
		case e, open := <-w.Updates():
			if !open {
				return errors.New("the watch ended")
			}
			if e == nil {
				continue
			}
			var moved pointer
			if err := json.Unmarshal(e.Value(), &moved); err != nil {
				continue
			}
			p.bus.eachSubscription(func(s *Subscription) { s.moved(e.Key(), moved.Consumer, e.Revision()) })
		}
	}
}

// sweepGroups removes consumers that seeks have left behind.
func (b *Bus) sweepGroups() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case <-tick.C:
			b.topics.mu.RLock()
			streams := make([]*stream, 0, len(b.topics.streams))
			for _, s := range b.topics.streams {
				streams = append(streams, s)
			}
			b.topics.mu.RUnlock()
			for _, s := range streams {
				if err := b.sweepStream(b.ctx, s, sweepAge); err != nil && b.ctx.Err() == nil {
					b.log.Warn("left consumers could not be looked for", slog.String("stream", s.name), slog.Any("error", err))
				}
			}
		}
	}
}

// sweepStream removes the consumers older than age that a group has left, or never came to.
func (b *Bus) sweepStream(ctx context.Context, s *stream, age time.Duration) error {
	handle, err := b.js.Stream(ctx, s.name)
	if err != nil {
		return err
	}
	if !handle.CachedInfo().Created.Equal(s.created) {
		b.forget(s) // made anew: what this hub knows of it says nothing about its pointers
		return nil
	}
	consumers := handle.ListConsumers(ctx)
	for info := range consumers.Info() {
		group, ours := info.Config.Metadata["eventhub.group"]
		if !ours || time.Since(info.Created) < age {
			continue
		}
		t := &topicInfo{name: info.Config.Metadata["eventhub.topic"], stream: s}
		if base, _, _ := strings.Cut(info.Name, "~"); base != t.consumerName(group) {
			continue // not named by this rule: not ours to judge
		}
		ptr, err := b.pointers.get(ctx, t, group)
		if err != nil {
			return err
		}
		if ptr.Consumer != info.Name {
			b.deleteConsumer(ctx, s.name, info.Name)
		}
	}
	return consumers.Err()
}
