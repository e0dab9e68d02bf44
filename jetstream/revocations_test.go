package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/natstest"
)

// followed is what a hub knows of the revoked tokens.
type followed struct {
	mu      sync.Mutex
	entries map[string]string
	loads   int
}

func follow(t *testing.T, b *Bus) *followed {
	t.Helper()
	f := &followed{entries: make(map[string]string)}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.Admin().Revocations().Follow(ctx, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.loads++
		}, func(key string, value []byte) {
			f.mu.Lock()
			defer f.mu.Unlock()
			delete(f.entries, key)
			if value != nil {
				f.entries[key] = string(value)
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	eventually(t, "the entries are loaded", func() bool { _, n := f.get(""); return n > 0 })
	return f
}

func (f *followed) get(key string) (value string, loads int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.entries[key], f.loads
}

func put(t *testing.T, b *Bus, key, value string, life time.Duration) {
	t.Helper()
	eventually(t, "the entry is stored", func() bool {
		return b.Admin().Revocations().Put(t.Context(), key, []byte(value), life) == nil
	})
}

// TestRevocationsReachAllHubs has two hubs on a server that is restarted.
func TestRevocationsReachAllHubs(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	one, two := open(t, Config{URL: server.URL()}), open(t, Config{URL: server.URL()})
	put(t, one, "sub.a", "early", time.Hour)
	a, b := follow(t, one), follow(t, two)
	has := func(key, value string) {
		t.Helper()
		eventually(t, key+" is "+value, func() bool {
			x, _ := a.get(key)
			y, _ := b.get(key)
			return x == value && y == value
		})
	}
	has("sub.a", "early")
	reaches := func(from *Bus, key string) {
		t.Helper()
		if took := quickest(func(i int) {
			key := fmt.Sprint(key, i)
			put(t, from, key, "1", time.Hour)
			has(key, "1")
		}); took > time.Second {
			t.Errorf("an entry took %v", took)
		}
	}
	reaches(two, "jti.b")
	put(t, one, "sub.a", "late", time.Hour)
	has("sub.a", "late")

	server.Kill()
	server.Start()
	put(t, two, "jti.c", "2", time.Hour)
	has("jti.c", "2")
	reaches(one, "jti.d")

	kv, err := one.conn.JS.KeyValue(t.Context(), revokedBucket)
	if err != nil {
		t.Fatal(err)
	}
	if err := kv.Delete(t.Context(), "jti.b0"); err != nil {
		t.Fatal(err)
	}
	has("jti.b0", "")
}

// TestRevocationsEnd stores an entry for a second, and follows the bucket afterwards.
func TestRevocationsEnd(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	put(t, b, "jti.kept", "1", time.Hour)
	put(t, b, "jti.short", "1", time.Second)
	kv, err := b.conn.JS.KeyValue(t.Context(), revokedBucket)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the entry has ended", func() bool {
		_, err := kv.Get(t.Context(), "jti.short")
		return errors.Is(err, natsjs.ErrKeyNotFound)
	})
	f := follow(t, b)
	// The newest entry is gone, which must not look like an entry that was missed.
	<-time.After(3 * streams.FollowCheck / 2)
	if _, loads := f.get(""); loads != 1 {
		t.Errorf("the entries were loaded %d times", loads)
	}
	if value, _ := f.get("jti.kept"); value != "1" {
		t.Error("an entry is missing")
	}
}

// TestRevocationsAreBounded fills the bucket.
func TestRevocationsAreBounded(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	put(t, b, "jti.0", "1", time.Hour)
	config := b.conn.JS
	s, err := config.Stream(t.Context(), "KV_"+revokedBucket)
	if err != nil {
		t.Fatal(err)
	}
	small := s.CachedInfo().Config
	if small.MaxMsgs != MaxRevocations {
		t.Errorf("the bucket takes %d entries", small.MaxMsgs)
	}
	small.MaxMsgs = 2
	if _, err := b.conn.JS.UpdateStream(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	put(t, b, "jti.1", "1", time.Hour)
	if err := b.Admin().Revocations().Put(t.Context(), "jti.2", []byte("1"), time.Hour); !errors.Is(err, ErrRevocationsFull) {
		t.Errorf("one entry too many: %v", err)
	}
	if err := b.Admin().Revocations().Put(t.Context(), "jti.1", []byte("2"), time.Hour); err != nil {
		t.Errorf("the replacement of an entry: %v", err)
	}
}
