package jetstream

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// collectionName is what the server takes for the name of a bucket, less its capitals: file systems
// may fold case.
var collectionName = regexp.MustCompile(`^[a-z0-9_-]{1,128}$`)

// Collection is a KV bucket of the hub's own: values by key, replaced by compare-and-set. Get reads
// at the bucket's leader, so that it sees every confirmed write. Its methods may be called
// concurrently; Get, Put and Delete are one question to the server each. It needs no closing.
type Collection struct {
	bus    *Bus
	name   string
	prefix string // of its subjects
}

// Entry is one key of a Collection. It is owned by whoever received it.
type Entry struct {
	Key string
	// Value is nil when the key was deleted: its entry stays as a mark, so that a later write knows
	// what it replaces.
	Value []byte
	// Headers are what the writer put beside the value. The names Nats-*, Event-* and KV-* are the
	// bus's own.
	Headers map[string]string
	// Deleted is set when the key was removed.
	Deleted bool
	// Revision names this state of the key. 0: nothing is known of the key.
	Revision uint64
	// StoredAt is when it was stored, in epoch nanoseconds.
	StoredAt int64
}

// Collections are the KV buckets that a program keeps state of its own in. It is a small value that
// costs nothing to make. Its methods may be called concurrently.
type Collections struct{ bus *Bus }

// Collections gives access to KV buckets of the program's own.
func (b *Bus) Collections() Collections { return Collections{b} }

// Open opens the bucket of the name (1..128 of a-z, 0-9, _ and -), and makes it when it does not
// exist.
func (c Collections) Open(ctx context.Context, name string) (*Collection, error) {
	b := c.bus
	if !collectionName.MatchString(name) {
		return nil, fmt.Errorf("jetstream: collection %q: 1 to 128 of a-z, 0-9, _ and - are allowed", name)
	}
	_, err := b.js.KeyValue(ctx, name)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		cfg := natsjs.KeyValueConfig{Bucket: name, Description: "eventhub: state of the hub's own", Replicas: b.cfg.Replicas}
		if b.cfg.MemoryStorage {
			cfg.Storage = natsjs.MemoryStorage
		}
		_, err = b.js.CreateKeyValue(ctx, cfg)
		if errors.Is(err, natsjs.ErrBucketExists) {
			err = nil // another hub was first
		}
	}
	if err != nil {
		return nil, b.unavailable(fmt.Errorf("jetstream: bucket %s: %w", name, err))
	}
	return &Collection{bus: b, name: name, prefix: "$KV." + name + "."}, nil
}

// Delete removes a collection with all that is in it. One that does not exist is no error.
func (c Collections) Delete(ctx context.Context, name string) error {
	b := c.bus
	if !collectionName.MatchString(name) {
		return nil
	}
	if err := b.js.DeleteKeyValue(ctx, name); err != nil && !errors.Is(err, natsjs.ErrBucketNotFound) {
		return b.unavailable(fmt.Errorf("jetstream: delete bucket %s: %w", name, err))
	}
	return nil
}

// Name is the bucket's name.
func (c *Collection) Name() string { return c.name }

func (c *Collection) stream() string { return "KV_" + c.name }

// Get reads a key. Of a key that nothing is known of, the entry has Revision 0; of one that was
// deleted, no value.
func (c *Collection) Get(ctx context.Context, key string) (*Entry, error) {
	m, err := c.bus.lastBySubject(ctx, c.stream(), c.prefix+keyToken(key))
	if errors.Is(err, ErrNotFound) {
		return &Entry{Key: key}, nil
	}
	if err != nil {
		return nil, c.bus.unavailable(err)
	}
	return c.entry(m), nil
}

func (c *Collection) entry(m *storedMsg) *Entry {
	e := &Entry{Key: tokenKey(m.subject[len(c.prefix):]), Revision: m.seq, StoredAt: m.time.UnixNano()}
	if op := m.header.Get("KV-Operation"); op == "DEL" || op == "PURGE" {
		e.Deleted = true
	} else {
		e.Value = m.data
		if e.Value == nil {
			e.Value = []byte{}
		}
	}
	for name, values := range m.header {
		if !reserved(name) && len(values) > 0 {
			if e.Headers == nil {
				e.Headers = make(map[string]string, len(m.header))
			}
			e.Headers[name] = values[0]
		}
	}
	return e
}

// MaxValue is the most bytes that a value may have now: the server's max_payload less 64 KiB.
func (c *Collection) MaxValue() int { return int(c.bus.publisher.link.nc.MaxPayload()) - payloadMargin }

// Put replaces the entry of revision old (0: the key has none) and returns the new revision. key
// has 1..512 bytes; names of headers are neither Nats-*, nor Event-*, nor KV-*. It returns
// ErrKeyChanged when the key has another revision by now: nothing was stored. The *Error for a
// value that is larger than MaxValue has the cause ErrTooLarge. After another error the outcome is
// unknown. value and headers are not kept.
func (c *Collection) Put(ctx context.Context, key string, value []byte, headers map[string]string, old uint64) (uint64, error) {
	return c.write(ctx, key, value, headers, old, false)
}

// Delete is Put for no value: the key's entry stays, as a mark with a revision of its own.
func (c *Collection) Delete(ctx context.Context, key string, headers map[string]string, old uint64) (uint64, error) {
	return c.write(ctx, key, nil, headers, old, true)
}

func (c *Collection) write(ctx context.Context, key string, value []byte, headers map[string]string, old uint64, deletes bool) (uint64, error) {
	if key == "" || len(key) > MaxKey {
		return 0, badOptions("a key has 1 to %d bytes, not %d", MaxKey, len(key))
	}
	if limit := c.MaxValue(); len(value) > limit {
		return 0, &Error{Code: CodePublishFailed, Msg: fmt.Sprintf("the value has %d bytes, at most %d are allowed", len(value), limit), Err: ErrTooLarge}
	}
	h := nats.Header{headerExpectSubSeq: {strconv.FormatUint(old, 10)}}
	for name, v := range headers {
		h[name] = []string{v}
	}
	if deletes {
		h["KV-Operation"] = []string{"DEL"}
	}
	msg := &nats.Msg{Subject: c.prefix + keyToken(key), Header: h, Data: value}
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		reply, err := c.bus.link().requestMsg(ctx, msg)
		if err != nil {
			return 0, c.bus.unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", c.name, err))
		}
		if noResponders(reply) { // it was just made, or has no leader now
			select {
			case <-time.After(wait):
				continue
			case <-ctx.Done():
				return 0, c.bus.unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", c.name, nats.ErrNoResponders))
			}
		}
		ack, err := parsePubAck(reply.Data, c.stream())
		if keyChanged(err) {
			return 0, ErrKeyChanged
		}
		if err != nil {
			return 0, c.bus.unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", c.name, err))
		}
		return ack.Seq, nil
	}
}

// keyChanged reports whether a publish was refused because the subject's last message is not the
// one expected.
func keyChanged(err error) bool {
	refused, ok := errors.AsType[*apiError](err)
	return ok &&
		(refused.ErrCode == natsjs.JSErrCodeStreamWrongLastSequence || refused.ErrCode == natsjs.JSErrCodeStreamWrongLastSequenceConstant)
}

// Each calls f with every entry there is, the least recently written first, marks of deleted keys
// included. A key that is written meanwhile may come twice, the newer entry later; it ends when it
// has caught up with those who write. It stops when f returns an error, and returns that. What it
// reads it may read at a replica that is behind.
func (c *Collection) Each(ctx context.Context, f func(*Entry) error) error {
	_, err := c.bus.readAll(ctx, c.stream(), time.Time{}, 1, nil, func(m *storedMsg) error { return stopped(f(c.entry(m))) })
	if own, ok := errors.AsType[*stopError](err); ok {
		return own.err
	}
	return c.bus.readFailed(err)
}

// Follow calls f with the present entry of a key, if it has one, and with each later one, until ctx
// ends or f returns an error, which it returns. Entries that follow each other closely may be left
// out, but for the last.
func (c *Collection) Follow(ctx context.Context, key string, f func(*Entry) error) error {
	kv, err := c.bus.js.KeyValue(ctx, c.name)
	if err != nil {
		return c.bus.unavailable(err)
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind: so the
	// watch has a context of its own, and Stop ends both. Making it is bounded by the client's
	// request timeout.
	watching, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	w, err := kv.Watch(watching, keyToken(key))
	if err != nil {
		return c.bus.unavailable(err)
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case u, open := <-w.Updates():
			if !open {
				return c.bus.unavailable(errors.New("jetstream: the watch ended"))
			}
			if u == nil {
				continue // the end of what was there
			}
			e, err := c.Get(ctx, key) // with its headers
			if err != nil {
				return err
			}
			if err := f(e); err != nil {
				return err
			}
		}
	}
}
