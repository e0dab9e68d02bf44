package outbox_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// fakeBus is an outbox.Bus without a server. It knows of ids for as long as it lives.
type fakeBus struct {
	mu     sync.Mutex
	busy   map[string]int // how often an id is refused because the bus is overloaded
	stored []string       // ids, in order
}

func (b *fakeBus) Publish(_ context.Context, topic string, _ []byte, o jetstream.PublishOptions) (jetstream.Receipt, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.busy[o.ID] > 0 {
		b.busy[o.ID]--
		return jetstream.Receipt{}, &jetstream.Error{Code: jetstream.CodeOverloaded, Msg: "busy"}
	}
	if slices.Contains(b.stored, o.ID) {
		return jetstream.Receipt{ID: o.ID, Stream: topic, Duplicate: true}, nil
	}
	b.stored = append(b.stored, o.ID)
	return jetstream.Receipt{ID: o.ID, Stream: topic, Sequence: uint64(len(b.stored))}, nil
}

func (b *fakeBus) Ready(context.Context) error { return nil }

func (b *fakeBus) MaxPayload() int { return 1 << 10 }

func (b *fakeBus) Now(context.Context) (time.Time, error) { return time.Now(), nil }

func (b *fakeBus) History(string) outbox.History { return b }

func (b *fakeBus) FindIDs(_ context.Context, s jetstream.IDSearch) (map[string]bool, bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	found := make(map[string]bool)
	for _, id := range s.IDs {
		found[id] = slices.Contains(b.stored, id)
	}
	return found, true, nil
}

func (b *fakeBus) DuplicateWindow(context.Context) (time.Duration, error) { return time.Minute, nil }

func TestDrainerOnAFakeBus(t *testing.T) {
	store, db := newSQLite(t)
	bus := &fakeBus{busy: map[string]int{"id-2": 2}}
	var want []string
	for i := range 5 {
		id := "id-" + strconv.Itoa(i)
		want = append(want, id)
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := store.Add(t.Context(), tx, &outbox.Record{ID: id, Topic: "orders", Key: "k", Payload: []byte(`1`)}); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	drainer, err := outbox.NewDrainer(outbox.Config{Store: store, Bus: bus, RetryFirst: time.Millisecond, Poll: time.Millisecond, Logger: logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	drainer.Start()
	eventually(t, "all are published", func() bool {
		bus.mu.Lock()
		defer bus.mu.Unlock()
		return len(bus.stored) == len(want)
	})
	if err := drainer.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(bus.stored, want) {
		t.Errorf("published %q, want %q", bus.stored, want)
	}
}

// fakeCollection is an outbox.Collection in memory, which another writes to now and then.
type fakeCollection struct {
	mu      sync.Mutex
	entries map[string]jetstream.Entry
	changed int // how often Put finds that another was first
}

func (c *fakeCollection) Get(_ context.Context, key string) (*jetstream.Entry, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[key]
	return &e, nil
}

func (c *fakeCollection) Put(_ context.Context, key string, value []byte, _ map[string]string, old uint64) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed > 0 || c.entries[key].Revision != old {
		c.changed--
		return 0, jetstream.ErrKeyChanged
	}
	c.entries[key] = jetstream.Entry{Key: key, Value: slices.Clone(value), Revision: old + 1}
	return old + 1, nil
}

func (c *fakeCollection) MaxValue() int { return 1 << 20 }

func TestKVStoreOnAFakeCollection(t *testing.T) {
	bucket := &fakeCollection{entries: make(map[string]jetstream.Entry), changed: 3}
	store, err := outbox.NewKVStore(outbox.KVConfig{Collection: bucket, Shards: 2})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if err := store.Add(t.Context(), &outbox.Record{ID: strconv.Itoa(i), Topic: "a", Key: "k", Payload: []byte("1")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := store.Add(t.Context(), &outbox.Record{ID: "1", Topic: "a", Key: "k", Payload: []byte("1")}); !errors.Is(err, outbox.ErrExists) {
		t.Errorf("a second record of an id: %v", err)
	}
	stats, err := store.Stats(t.Context())
	if err != nil || stats.Pending != 3 {
		t.Errorf("%+v, %v", stats, err)
	}
}
