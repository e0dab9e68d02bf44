package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// handlesBucket is the KV bucket with the keys that sign handles. All hubs of a NATS share them.
const handlesBucket = "eventhub_handles"

const (
	handleKeySize = 32
	// handleKeyLife is how long a key signs. Then a hub makes the next one.
	handleKeyLife = 30 * 24 * time.Hour
	// handleKeysKept is how many keys are kept: those of the last months. The longest lease is 12
	// h.
	handleKeysKept = 2
	// handleKeysFresh is how long a hub uses the keys that it has read before it reads them again.
	handleKeysFresh = time.Hour
	// handleKeysRetry is the least time between two readings for keys that are not known: forged
	// handles must not make a hub ask NATS all the time.
	handleKeysRetry = time.Second
)

// handleKey is one of the keys in the bucket.
type handleKey struct {
	ID   uint32    `json:"id"`
	Key  []byte    `json:"key"`
	Made time.Time `json:"made"`
}

// handleKeys are the keys that this hub knows. It keeps those that were removed from the bucket,
// and signs with the newest of the bucket. Its methods may be called concurrently.
type handleKeys struct {
	core *core

	reading sync.Mutex // held while the bucket is read

	mu      sync.Mutex
	known   map[uint32][]byte // bounded: one a month, and what operators make
	current uint32
	read    time.Time   // when the last reading that succeeded began; zero: never
	tried   time.Time   // the last reading for a key that was not known
	next    *keyReading // for those who wait for such a reading
}

// newest returns the key that signs. It must have been read before. If that was long ago, it is
// read again, and the next handles have the key of then.
func (k *handleKeys) newest() (uint32, []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.read) > handleKeysFresh {
		k.readSoonLocked()
	}
	return k.current, k.known[k.current]
}

// find returns the key of that id, or nil if the bucket has had none since the time. For a key that
// it does not know, it reads the bucket, together with all others that wait for that.
func (k *handleKeys) find(ctx context.Context, id uint32, since time.Time) ([]byte, error) {
	k.mu.Lock()
	key, absent := k.known[id], !k.read.Before(since)
	var r *keyReading
	if key == nil && !absent {
		r = k.readSoonLocked()
	}
	k.mu.Unlock()
	if r == nil {
		return key, nil
	}
	err := r.wait(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	if key := k.known[id]; key != nil {
		return key, nil
	}
	return nil, err
}

// readSoonLocked returns the next reading, which begins as soon as one may begin. mu is held.
func (k *handleKeys) readSoonLocked() *keyReading {
	if k.next != nil {
		return k.next
	}
	r := &keyReading{done: make(chan struct{})}
	k.next = r
	after := max(handleKeysRetry-time.Since(k.tried), 0)
	if !k.core.conn.Start(func() { k.readAgain(r, after) }) {
		k.next, r.err = nil, event.ErrClosed
		close(r.done)
	}
	return r
}

// keyReading is a reading of the bucket that has not begun. err is valid when done is closed.
type keyReading struct {
	done chan struct{}
	err  error
}

// wait waits until the reading has ended, or ctx has.
func (r *keyReading) wait(ctx context.Context) error {
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// readAgain reads the bucket after a time.
func (k *handleKeys) readAgain(r *keyReading, after time.Duration) {
	defer close(r.done)
	select {
	case <-time.After(after):
	case <-k.core.conn.Ctx.Done():
		r.err = event.ErrClosed
		return
	}
	k.reading.Lock()
	defer k.reading.Unlock()
	k.mu.Lock()
	k.next, k.tried = nil, time.Now()
	k.mu.Unlock()
	r.err = k.load(k.core.conn.Ctx)
}

// ensure waits until there is a key that signs. One that is old signs on until the bucket can be
// read again, so that no subscription waits for that.
func (k *handleKeys) ensure(ctx context.Context) error {
	k.mu.Lock()
	if k.known[k.current] != nil {
		k.mu.Unlock()
		return nil
	}
	r := k.readSoonLocked()
	k.mu.Unlock()
	return r.wait(ctx)
}

// load reads the keys of the bucket. reading is held.
func (k *handleKeys) load(ctx context.Context) error {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	c, err := Collections{k.core}.Open(ctx, handlesBucket)
	if err != nil {
		return err
	}
	for {
		entry, err := c.Get(ctx, "keys")
		if err != nil {
			return err
		}
		var keys []handleKey
		if len(entry.Value) > 0 {
			if err := json.Unmarshal(entry.Value, &keys); err != nil {
				return fmt.Errorf("jetstream: bucket %s: the entry keys is not readable: %w; delete it, and a hub makes new keys", handlesBucket, err)
			}
		}
		keys = slices.DeleteFunc(keys, func(key handleKey) bool { return key.ID == 0 || len(key.Key) != handleKeySize })
		if n := len(keys); n > 0 && time.Since(keys[n-1].Made) < handleKeyLife {
			k.take(keys, began)
			return nil
		}
		value, err := json.Marshal(append(keys[max(len(keys)-handleKeysKept+1, 0):], newHandleKey()))
		if err != nil {
			return err
		}
		if _, err := c.Put(ctx, "keys", value, nil, entry.Revision); err != nil && !errors.Is(err, event.ErrKeyChanged) {
			return err
		}
		// the next reading finds this key, or that of a hub that was quicker
	}
}

// take notes the keys of a reading that began at the given time.
func (k *handleKeys) take(keys []handleKey, began time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		k.known[key.ID] = key.Key
		k.current = key.ID
	}
	k.read = began
}

func newHandleKey() handleKey {
	var id [4]byte
	key := handleKey{Key: make([]byte, handleKeySize), Made: time.Now().UTC().Truncate(time.Second)}
	_, _ = rand.Read(key.Key) // never fails
	for key.ID == 0 {
		_, _ = rand.Read(id[:])
		key.ID = binary.BigEndian.Uint32(id[:])
	}
	return key
}
