package jetstream

import (
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// holdOne subscribes with handles and returns the handle of the first event, once it has begun.
func holdOne(t *testing.T, b *Bus, topic string) (handle string) {
	t.Helper()
	handles := make(chan string, 10)
	sub, err := b.Subscribe(t.Context(), topic, "g", SubscribeOptions{Handles: true, From: FromEarliest}, func(h *Held) {
		text := h.Handle()
		if again := h.Handle(); again != text {
			t.Errorf("a delivery has two handles, %s and %s", text, again)
		}
		if sending, ok := h.BeginSend(); ok {
			sending.Written()
			handles <- text
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Stop(t.Context()) })
	select {
	case handle = <-handles:
	case <-time.After(20 * time.Second):
		t.Fatal("no event came")
	}
	return handle
}

func readHandle(t *testing.T, b *Bus, text string) (Handle, error) {
	t.Helper()
	handles, errs := HandlesOf(b).Read(t.Context(), []string{text})
	return handles[0], errs[0]
}

// settleText reads a handle and settles it.
func settleText(t *testing.T, b *Bus, text string) error {
	t.Helper()
	h, err := readHandle(t, b, text)
	if err != nil {
		return err
	}
	err = ErrHubSilent
	// on a busy machine
	for end := time.Now().Add(20 * time.Second); errors.Is(err, ErrHubSilent) && time.Now().Before(end); {
		err = HandlesOf(b).Settle(t.Context(), []Handle{h}, Settlement{Op: SettleAck})[0]
	}
	return err
}

// Hubs share the keys of handles: whichever makes the first one, and also when the entry is lost.
// A hub that has lost its key does not take a handle for a forged one.
func TestHandleKeys(t *testing.T) {
	t.Parallel()
	url := natstest.Run(t).ClientURL()
	open := func() *Bus {
		t.Helper()
		b, err := Open(t.Context(), Config{URL: url})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Close() })
		return b
	}
	buses := []*Bus{open(), open(), open()}
	var all sync.WaitGroup
	for i, b := range buses { // at the same time: one of them makes the key
		all.Go(func() {
			if err := b.handles.keys.ensure(t.Context()); err != nil {
				t.Errorf("bus %d: %v", i, err)
			}
		})
	}
	all.Wait()
	for i, b := range buses {
		topic := fmt.Sprint("t", i)
		if _, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{}); err != nil {
			t.Fatal(err)
		}
		text := holdOne(t, b, topic)
		h, err := readHandle(t, open(), text) // a hub that has read nothing yet
		if err != nil || h.Topic != topic || h.Group != "g" {
			t.Errorf("bus %d: %+v, %v", i, h, err)
		}
		if err := settleText(t, buses[(i+1)%3], text); err != nil {
			t.Errorf("bus %d: %v", i, err)
		}
	}

	if err := buses[0].Collections().Delete(t.Context(), handlesBucket); err != nil {
		t.Fatal(err)
	}
	if _, err := buses[0].Publish(t.Context(), "u", []byte("1"), PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	text := holdOne(t, buses[0], "u")
	if err := settleText(t, open(), text); !errors.Is(err, event.ErrNotLeased) {
		t.Errorf("at a hub that cannot know the key: %v, want %v", err, event.ErrNotLeased)
	}
	if err := settleText(t, buses[1], text); err != nil {
		t.Errorf("at a hub that knows the key: %v", err)
	}
}

// Old keys are replaced, and the last one stays known.
func TestHandleKeyRotation(t *testing.T) {
	t.Parallel()
	b, err := Open(t.Context(), Config{URL: natstest.Run(t).ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	k := b.handles.keys
	if err := k.ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	first, _ := k.newest()
	c, err := b.Collections().Open(t.Context(), handlesBucket)
	if err != nil {
		t.Fatal(err)
	}
	old := newHandleKey()
	old.Made = time.Now().Add(-2 * handleKeyLife)
	entry, err := c.Get(t.Context(), "keys")
	if err != nil {
		t.Fatal(err)
	}
	value := fmt.Appendf(nil, `[{"id":%d,"key":%q,"made":%q}]`, old.ID, base64.StdEncoding.EncodeToString(old.Key), old.Made.Format(time.RFC3339))
	if _, err := c.Put(t.Context(), "keys", value, nil, entry.Revision); err != nil {
		t.Fatal(err)
	}
	if key, err := k.find(t.Context(), old.ID, time.Now()); err != nil || string(key) != string(old.Key) {
		t.Errorf("the key before: %x, %v", key, err)
	}
	second, _ := k.newest()
	if second == first || second == old.ID {
		t.Errorf("the key that signs is %d, and was %d and %d", second, first, old.ID)
	}
	entry, err = c.Get(t.Context(), "keys")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(t.Context(), "keys", []byte("{"), nil, entry.Revision); err != nil {
		t.Fatal(err)
	}
	if key, err := k.find(t.Context(), first+1, time.Now()); err == nil || key != nil {
		t.Errorf("an entry that nobody can read: %x, %v", key, err)
	}
}

// A subscription does not wait for the bucket when there is a key that signs, however old.
func TestHandleKeysSignOn(t *testing.T) {
	t.Parallel()
	b, err := Open(t.Context(), Config{URL: natstest.Run(t).ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	k := b.handles.keys
	if err := k.ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.reading.Lock() // the bucket does not answer
	k.mu.Lock()
	k.read = time.Now().Add(-2 * handleKeysFresh)
	k.mu.Unlock()
	ended := make(chan error, 1)
	go func() { ended <- k.ensure(t.Context()) }()
	select {
	case err := <-ended:
		k.reading.Unlock()
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits for the bucket")
		k.reading.Unlock()
		<-ended
	}
	first, _ := k.newest() // reads the bucket again
	for end := time.Now().Add(20 * time.Second); ; {
		k.mu.Lock()
		fresh := time.Since(k.read) < handleKeysFresh
		k.mu.Unlock()
		if fresh {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the bucket is not read again")
		}
		<-time.After(10 * time.Millisecond)
	}
	if second, _ := k.newest(); second != first {
		t.Errorf("the key is %d, and was %d", second, first)
	}
}

// The server does not let forged requests between hubs settle anything.
func TestForgedForward(t *testing.T) {
	t.Parallel()
	url := natstest.Run(t).ClientURL()
	b, err := Open(t.Context(), Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	if _, err := b.Publish(t.Context(), "t", []byte("1"), PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	text := holdOne(t, b, "t")
	h, err := readHandle(t, b, text)
	if err != nil {
		t.Fatal(err)
	}
	other, err := Open(t.Context(), Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	forged := newHandleKey()
	other.handles.keys.take([]handleKey{{ID: h.key, Key: forged.Key}}, time.Now())
	if err := HandlesOf(other).Settle(t.Context(), []Handle{h}, Settlement{Op: SettleAck})[0]; !errors.Is(err, ErrHubSilent) {
		t.Errorf("a request with another key: %v, want %v", err, ErrHubSilent)
	}
	if err := settleText(t, b, text); err != nil {
		t.Errorf("the lease is gone: %v", err)
	}
	for _, data := range [][]byte{nil, make([]byte, 19), make([]byte, 40)} {
		if _, err := b.conn.Links[0].NC.Request(hubInbox+b.handles.hub, data, 50*time.Millisecond); err == nil {
			t.Errorf("%d bytes were answered", len(data))
		}
	}
}

// A hub remembers a bounded number of settlements.
func TestSettledKnownIsBounded(t *testing.T) {
	t.Parallel()
	table := leaseTable{live: make(map[uint64]*Delivery), settled: make(map[uint64]SettleOp)}
	for i := range uint64(settledKnown + 10) {
		table.remember(i+1, SettleAck)
	}
	if len(table.settled) != settledKnown || len(table.order) != settledKnown {
		t.Errorf("%d and %d are kept, want %d", len(table.settled), len(table.order), settledKnown)
	}
	if table.settle(10, Settlement{Op: SettleAck}) || !table.settle(11, Settlement{Op: SettleAck}) {
		t.Error("not the oldest are forgotten")
	}
}
