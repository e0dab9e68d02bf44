package jetstream

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/native"
)

// collectionName is what the server takes for the name of a bucket, less its capitals: file systems
// may fold case.
var collectionName = regexp.MustCompile(`^[a-z0-9_-]{1,128}$`)

// Collection is a KV bucket of the program: values by key, replaced by compare-and-set. Get reads
// at the bucket's leader, so it sees every confirmed write. The methods may be called concurrently.
// Get, Put and Delete cost one request to the server each. A Collection needs no closing.
type Collection struct {
	core   *core
	name   string
	prefix string // of its subjects
}

// Entry is one key of a Collection. The receiver owns it.
type Entry struct {
	Key string
	// Value is nil when the key was deleted. The entry then stays as a mark, so that a later write
	// can name what it replaces.
	Value []byte
	// Headers are the headers of the value. The bus reserves the names Nats-*, Event-* and KV-*.
	Headers map[string]string
	// Deleted is set when the key was removed.
	Deleted bool
	// Revision identifies this state of the key. It is 0 for an unknown key.
	Revision uint64
	// StoredAt is the time of storage in epoch nanoseconds.
	StoredAt int64
}

// Collections gives access to the KV buckets in which a program keeps its own state. It is a small
// value that costs nothing to create. Its methods may be called concurrently.
type Collections struct{ core *core }

// Collections gives access to the KV buckets of the program.
func (b *Bus) Collections() Collections { return Collections{b.core} }

// Open opens the bucket with the given name (1..128 of a-z, 0-9, _ and -), and creates it if it
// does not exist.
func (c Collections) Open(ctx context.Context, name string) (*Collection, error) {
	return c.OpenWithTTL(ctx, name, 0)
}

// OpenWithTTL is Open for a bucket from which the server removes each entry ttl after its last
// write, without a mark. A bucket that exists keeps the ttl with which it was created.
func (c Collections) OpenWithTTL(ctx context.Context, name string, ttl time.Duration) (*Collection, error) {
	r := c.core
	if !collectionName.MatchString(name) {
		return nil, fmt.Errorf("jetstream: collection %q: must be 1 to 128 characters of a-z, 0-9, _ and -", name)
	}
	_, err := r.conn.JS.KeyValue(ctx, name)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		cfg := natsjs.KeyValueConfig{Bucket: name, Description: collectionNote, Replicas: r.cfg.Replicas, TTL: ttl}
		if r.cfg.MemoryStorage {
			cfg.Storage = natsjs.MemoryStorage
		}
		_, err = r.conn.JS.CreateKeyValue(ctx, cfg)
		if errors.Is(err, natsjs.ErrBucketExists) {
			err = nil // another hub was first
		}
	}
	if err != nil {
		return nil, r.conn.Unavailable(fmt.Errorf("jetstream: bucket %s: %w", name, err))
	}
	return &Collection{core: r, name: name, prefix: "$KV." + name + "."}, nil
}

// Delete removes a collection with its content. Deleting a collection that does not exist is no
// error.
func (c Collections) Delete(ctx context.Context, name string) error {
	r := c.core
	if !collectionName.MatchString(name) {
		return nil
	}
	if err := r.conn.JS.DeleteKeyValue(ctx, name); err != nil && !errors.Is(err, natsjs.ErrBucketNotFound) {
		return r.conn.Unavailable(fmt.Errorf("jetstream: delete bucket %s: %w", name, err))
	}
	return nil
}

// Name is the bucket's name.
func (c *Collection) Name() string { return c.name }

func (c *Collection) stream() string { return "KV_" + c.name }

// Get reads a key. The entry of an unknown key has Revision 0. The entry of a deleted key has no
// value.
func (c *Collection) Get(ctx context.Context, key string) (*Entry, error) {
	m, err := c.core.conn.LastBySubject(ctx, c.stream(), c.prefix+keyToken(key))
	if errors.Is(err, event.ErrNotFound) {
		return &Entry{Key: key}, nil
	}
	if err != nil {
		return nil, c.core.conn.Unavailable(err)
	}
	return c.entry(m), nil
}

func (c *Collection) entry(m *conn.StoredMsg) *Entry {
	e := &Entry{Key: tokenKey(m.Subject[len(c.prefix):]), Revision: m.Seq, StoredAt: m.Time.UnixNano()}
	if op := m.Header.Get("KV-Operation"); op == "DEL" || op == "PURGE" {
		e.Deleted = true
	} else {
		e.Value = m.Data
		if e.Value == nil {
			e.Value = []byte{}
		}
	}
	for name, values := range m.Header {
		if !native.Reserved(name) && len(values) > 0 {
			if e.Headers == nil {
				e.Headers = make(map[string]string, len(m.Header))
			}
			e.Headers[name] = values[0]
		}
	}
	return e
}

// MaxValue returns the maximum size of a value in bytes at present: the server's max_payload less
// 64 KiB. Of servers that differ, it is that of the least one.
func (c *Collection) MaxValue() int {
	least := int64(math.MaxInt64)
	for _, l := range c.core.conn.Links {
		least = min(least, l.NC.MaxPayload())
	}
	return int(least) - event.PayloadMargin
}

// Put replaces the entry of revision old (0: the key has none) and returns the new revision. key
// has 1..512 bytes. Names of headers must not begin with Nats-, Event- or KV-. Put stores nothing
// and returns ErrKeyChanged when the key now has a different revision. For a value larger than
// MaxValue, the *Error has the cause ErrTooLarge. After any other error the outcome is unknown. Put
// does not keep value and headers.
func (c *Collection) Put(ctx context.Context, key string, value []byte, headers map[string]string, old uint64) (uint64, error) {
	return c.write(ctx, key, value, headers, old, false)
}

// Delete removes the value of a key, under the conditions of Put. The entry of the key stays as a
// mark with a revision of its own.
func (c *Collection) Delete(ctx context.Context, key string, headers map[string]string, old uint64) (uint64, error) {
	return c.write(ctx, key, nil, headers, old, true)
}

func (c *Collection) write(ctx context.Context, key string, value []byte, headers map[string]string, old uint64, deletes bool) (uint64, error) {
	if key == "" || len(key) > MaxKey {
		return 0, event.BadOptions("a key has 1 to %d bytes, not %d", MaxKey, len(key))
	}
	if limit := c.MaxValue(); len(value) > limit {
		return 0, &event.Error{Code: event.CodePublishFailed, Msg: fmt.Sprintf("the value has %d bytes, at most %d are allowed", len(value), limit), Err: event.ErrTooLarge}
	}
	h := nats.Header{natsjs.ExpectedLastSubjSeqHeader: {strconv.FormatUint(old, 10)}}
	for name, v := range headers {
		h[name] = []string{v}
	}
	if deletes {
		h["KV-Operation"] = []string{"DEL"}
	}
	msg := &nats.Msg{Subject: c.prefix + keyToken(key), Header: h, Data: value}
	ack, err := c.core.conn.Write(ctx, c.stream(), msg)
	if conn.KeyChanged(err) {
		return 0, event.ErrKeyChanged
	}
	if err != nil {
		return 0, c.core.conn.Unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", c.name, err))
	}
	return ack.Seq, nil
}

// Each calls f with every entry, the least recently written first, including the marks of deleted
// keys. A key that is written meanwhile may come twice, the newer entry later. Each ends when it
// has caught up with the writers. It stops when f returns an error, and returns that error. Each
// may read at a replica that lags behind.
func (c *Collection) Each(ctx context.Context, f func(*Entry) error) error {
	_, err := c.core.messages.All(ctx, c.stream(), time.Time{}, 1, nil, func(m *conn.StoredMsg) error { return reading.Own(f(c.entry(m))) })
	if ok, own := reading.OwnError(err); ok {
		return own
	}
	return c.core.messages.Failed(err)
}

// Follow calls f with the current entry of a key, if there is one, and with each later entry. It
// ends when ctx ends or f returns an error, and returns the error. Of entries that follow each
// other closely, Follow may skip all but the last.
func (c *Collection) Follow(ctx context.Context, key string, f func(*Entry) error) error {
	kv, err := c.core.conn.JS.KeyValue(ctx, c.name)
	if err != nil {
		return c.core.conn.Unavailable(err)
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind: so the
	// watch has a context of its own, and Stop ends both. Making it is bounded by the client's
	// request timeout.
	watching, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	w, err := kv.Watch(watching, keyToken(key))
	if err != nil {
		return c.core.conn.Unavailable(err)
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case u, open := <-w.Updates():
			if !open {
				return c.core.conn.Unavailable(errors.New("jetstream: the watch ended"))
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
