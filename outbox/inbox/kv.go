package inbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/pacedlog"
)

// DefaultBucket is the default name of the bucket.
const DefaultBucket = "inbox"

// DefaultClaim is the default of KVConfig.Claim.
const DefaultClaim = 30 * time.Second

// minClaim is the shortest claim: shorter ones would be lost to a pause of the process.
const minClaim = time.Second

// finishAgain is the pause between two attempts to mark an event.
const finishAgain = 250 * time.Millisecond

// Values of the entries in the bucket.
const (
	claimed = "claimed " // a handler runs; who has the claim follows
	handled = "handled"
)

// KVConfig configures a KV store.
type KVConfig struct {
	// Bus is the bus whose NATS holds the bucket. Required. The caller owns it.
	Bus *jetstream.Bus
	// Bucket is the name of the bucket: 1 to 128 of a-z, 0-9, _ and -. Defaults to DefaultBucket.
	Bucket string
	// TTL is how long an event is remembered, at least 1 s; the server then removes its mark.
	// Defaults to DefaultTTL. A bucket that exists keeps its TTL.
	TTL time.Duration
	// Claim is how long a process that has died keeps others from handling the event that it was
	// handling, at least 1 s. Defaults to DefaultClaim.
	Claim time.Duration
	// Logger receives what the store could not do. By default, nothing is logged.
	Logger *slog.Logger
}

// KV is a store in a JetStream KV bucket. Its methods may be called concurrently, also by several
// processes. It needs no closing.
type KV struct {
	entries *jetstream.Collection
	claim   time.Duration
	often   *pacedlog.Log
}

// OpenKV opens a store, and creates its bucket unless it exists.
func OpenKV(ctx context.Context, cfg KVConfig) (*KV, error) {
	fail := func(err error) (*KV, error) { return nil, fmt.Errorf("inbox: KV store: %w", err) }
	ttl, err := validTTL(cfg.TTL)
	if err != nil {
		return fail(err)
	}
	if cfg.Bus == nil {
		return fail(errors.New("no Bus is given"))
	}
	claim := cmp.Or(cfg.Claim, DefaultClaim)
	if claim < minClaim || claim > ttl {
		return fail(fmt.Errorf("claim %v: must be at least %v, and no longer than the TTL of %v", claim, minClaim, ttl))
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	entries, err := cfg.Bus.Collections().OpenWithTTL(ctx, cmp.Or(cfg.Bucket, DefaultBucket), ttl)
	if err != nil {
		return fail(err)
	}
	return &KV{entries: entries, claim: claim, often: pacedlog.New(cfg.Logger)}, nil
}

// Handle returns a handler for Bus.Consume that calls handler for each event of a group that the
// group has not handled. While handler runs, nobody else handles the event: whoever gets it too,
// because its lease has expired, waits and keeps its own lease. handler should end when its context
// does.
func (k *KV) Handle(group string, handler func(ctx context.Context, e *jetstream.Event) error) func(context.Context, *jetstream.Delivery) error {
	return func(ctx context.Context, d *jetstream.Delivery) error {
		c, err := k.take(ctx, d, kvKey(d.Event.Topic, group, d.Event.ID))
		if err != nil || c == nil {
			return k.failed(ctx, group, d, err)
		}
		err = c.run(ctx, func() error { return handler(ctx, &d.Event) })
		return k.failed(ctx, group, d, err)
	}
}

// failed logs the failure of a store.
func (k *KV) failed(ctx context.Context, group string, d *jetstream.Delivery, err error) error {
	if own, ok := errors.AsType[*failure](err); ok && ctx.Err() == nil {
		k.often.Log(ctx, slog.LevelWarn, "failed to mark an event; it comes again", d.Event.Topic+"::"+group, slog.String("topic", d.Event.Topic), slog.String("group", group),
			slog.String("id", d.Event.ID), slog.String("failed", own.what), slog.Any("error", own.err))
	}
	return err
}

// Seen reports whether a group has handled an event.
func (k *KV) Seen(ctx context.Context, topic, group, id string) (bool, error) {
	e, err := k.entries.Get(ctx, kvKey(topic, group, id))
	if err != nil {
		return false, &failure{"cannot look an event up", err}
	}
	return string(e.Value) == handled, nil
}

// Mark marks an event as handled by a group. It reports whether the event had no mark. An event
// that a handler of Handle is handling counts as marked.
func (k *KV) Mark(ctx context.Context, topic, group, id string) (first bool, err error) {
	key := kvKey(topic, group, id)
	e, err := k.entries.Get(ctx, key)
	if err == nil && e.Value == nil {
		_, err = k.entries.Put(ctx, key, []byte(handled), nil, e.Revision)
		if first = err == nil; errors.Is(err, jetstream.ErrKeyChanged) {
			err = nil
		}
	}
	if err != nil {
		return false, &failure{"cannot mark the event", err}
	}
	return first, nil
}

// kvKey is the key of an event. It is a hash, because ids may be longer than keys.
func kvKey(topic, group, id string) string {
	sum := sha256.Sum256([]byte(topic + "\x00" + group + "\x00" + id))
	return hex.EncodeToString(sum[:16])
}

// claim is the right to handle an event.
type claim struct {
	*KV
	key      string
	value    string // of the entry; unlike that of any other claim
	revision uint64 // of the entry
}

// take claims an event. It returns nil if the event was handled. While somebody else has the claim,
// take waits, and keeps the lease. A claim whose entry has not changed for Claim is that of a
// process that has died: clocks of different machines are never compared.
func (k *KV) take(ctx context.Context, d *jetstream.Delivery, key string) (*claim, error) {
	tick := time.NewTicker(max(k.claim/20, 50*time.Millisecond))
	defer tick.Stop()
	var known uint64
	var since, extended time.Time
	for {
		e, err := k.entries.Get(ctx, key)
		if err != nil {
			return nil, &failure{"cannot look the event up", err}
		}
		if string(e.Value) == handled {
			return nil, nil //nolint:nilnil // documented
		}
		now := time.Now()
		if e.Revision != known {
			known, since = e.Revision, now
		}
		if e.Value == nil || now.Sub(since) >= k.claim {
			c := &claim{KV: k, key: key, value: claimed + rand.Text()}
			c.revision, err = k.entries.Put(ctx, key, []byte(c.value), nil, e.Revision)
			if err == nil {
				return c, nil
			}
			if !errors.Is(err, jetstream.ErrKeyChanged) {
				return nil, &failure{"cannot claim the event", err}
			}
			continue // somebody else was first
		}
		if now.Sub(extended) > time.Second {
			if err := d.Extend(0); err != nil {
				return nil, err
			}
			extended = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// run runs handler, and keeps the claim meanwhile. It marks the event, or gives the claim up.
func (c *claim) run(ctx context.Context, handler func() error) (err error) {
	// handler may outlive its lease
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	var renewal sync.WaitGroup
	renewal.Go(func() { c.renew(renewing) })
	returned := false
	defer func() {
		stop()
		renewal.Wait()
		// what is done is done, whether or not the lease has ended
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.claim)
		defer cancel()
		if !returned || err != nil { // it panicked, or failed
			gone := c.write(ending, func() error { _, err := c.entries.Delete(ending, c.key, nil, c.revision); return err })
			if gone != nil {
				c.often.Log(ctx, slog.LevelWarn, "failed to give up the claim of an event; it ends by itself", "", slog.Any("error", gone))
			}
			return
		}
		if failed := c.finish(ending); failed != nil {
			err = &failure{"cannot mark the event", failed}
		}
	}()
	err = handler()
	returned = true
	return err
}

// finish marks the event. It tries again while NATS does not answer, until ctx ends.
func (c *claim) finish(ctx context.Context) error {
	for {
		err := c.write(ctx, func() error { _, err := c.put(ctx, handled); return err })
		if err == nil || errors.Is(err, jetstream.ErrKeyChanged) {
			return err
		}
		select {
		case <-time.After(finishAgain):
		case <-ctx.Done():
			return err
		}
	}
}

// put replaces the value of the entry.
func (c *claim) put(ctx context.Context, value string) (revision uint64, err error) {
	return c.entries.Put(ctx, c.key, []byte(value), nil, c.revision)
}

// write writes the entry, also where a renewal whose outcome was unknown has changed its revision.
func (c *claim) write(ctx context.Context, put func() error) error {
	err := put()
	if !errors.Is(err, jetstream.ErrKeyChanged) {
		return err
	}
	e, failed := c.entries.Get(ctx, c.key)
	if failed != nil || string(e.Value) != c.value {
		return err
	}
	c.revision = e.Revision
	return put()
}

// renew renews the claim until ctx ends.
func (c *claim) renew(ctx context.Context) {
	tick := time.NewTicker(c.claim / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		// not with ctx: the outcome of a write that is given up is unknown
		writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.claim)
		err := c.write(writing, func() error {
			revision, err := c.put(writing, c.value)
			if err == nil {
				c.revision = revision
			}
			return err
		})
		cancel()
		if errors.Is(err, jetstream.ErrKeyChanged) {
			c.often.Log(ctx, slog.LevelWarn, "lost the claim of an event while it was being handled; it may be handled twice", "")
			return
		}
	}
}
