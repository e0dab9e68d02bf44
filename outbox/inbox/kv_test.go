package inbox_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox/inbox"
)

func openKV(tb testing.TB, cfg inbox.KVConfig) *inbox.KV {
	tb.Helper()
	cfg.Logger = logger(tb)
	k, err := inbox.OpenKV(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return k
}

// Events that are delivered again while their handler runs, and after it, are handled once, and two
// handlers never run for the same event.
func TestKVHandlesOnce(t *testing.T) {
	t.Parallel()
	b := openBus(t)
	k := openKV(t, inbox.KVConfig{Bus: b})
	var mu sync.Mutex
	calls, running := make(map[string]int), make(map[string]bool)
	var again atomic.Int64
	redelivered := make(chan struct{})
	once := sync.OnceFunc(func() { close(redelivered) })
	handle := k.Handle("g", func(ctx context.Context, e *jetstream.Event) error {
		mu.Lock()
		calls[e.ID]++
		if running[e.ID] {
			t.Errorf("%s is handled twice at once", e.ID)
		}
		running[e.ID] = true
		mu.Unlock()
		if e.ID == "slow" {
			<-ctx.Done() // the lease ends
			select {
			case <-redelivered:
			case <-time.After(patience):
			}
			<-time.After(200 * time.Millisecond) // and the other delivery finds the claim
		}
		mu.Lock()
		defer mu.Unlock()
		running[e.ID] = false
		return nil
	})
	lost := errors.New("the acknowledgement is lost")
	handler := func(ctx context.Context, d *jetstream.Delivery) error {
		if d.Attempt > 1 {
			again.Add(1)
			if d.Event.ID == "slow" {
				once()
			}
		}
		if err := handle(ctx, d); err != nil {
			return err
		}
		if d.Attempt < 3 {
			return lost
		}
		return nil
	}
	for range 2 {
		consumeWith(t, b, "t", jetstream.SubscribeOptions{AckTimeout: time.Second, Workers: 4, MaxAttempts: jetstream.NeverGiveUp}, handler)
	}
	var ids []string
	for i := range 20 {
		ids = append(ids, strconv.Itoa(i))
	}
	ids = append(ids, "slow")
	publish(t, b, "t", ids...)
	eventually(t, "all events are settled", func() bool {
		left, err := b.Group("t", "g").Backlog(t.Context())
		return err == nil && left.Waiting == 0 && left.Leased == 0 && left.Floor >= left.Tail
	})
	mu.Lock()
	defer mu.Unlock()
	for _, id := range ids {
		if calls[id] != 1 {
			t.Errorf("%s was handled %d times", id, calls[id])
		}
		if seen, err := k.Seen(t.Context(), "t", "g", id); err != nil || !seen {
			t.Errorf("%s: seen %v, %v", id, seen, err)
		}
	}
	if again.Load() < 40 {
		t.Errorf("there were only %d redeliveries", again.Load())
	}
}

// A handler that fails gives its claim up at once, and its event comes again.
func TestKVFailuresLeaveNoMark(t *testing.T) {
	t.Parallel()
	b := openBus(t)
	k := openKV(t, inbox.KVConfig{Bus: b, Claim: time.Minute})
	var calls atomic.Int64
	consumeWith(t, b, "t", jetstream.SubscribeOptions{}, k.Handle("g", func(context.Context, *jetstream.Event) error {
		switch calls.Add(1) {
		case 1:
			return errors.New("not yet")
		case 2:
			panic("not yet either")
		}
		return nil
	}))
	publish(t, b, "t", "one")
	eventually(t, "the event is handled", func() bool {
		seen, err := k.Seen(t.Context(), "t", "g", "one")
		return err == nil && seen
	})
	if calls.Load() != 3 {
		t.Errorf("%d calls", calls.Load())
	}
}

// A long handler keeps its claim.
func TestKVClaims(t *testing.T) {
	t.Parallel()
	b := openBus(t)
	const claim, long = 1500 * time.Millisecond, 3200 * time.Millisecond
	k := openKV(t, inbox.KVConfig{Bus: b, Claim: claim})
	var calls atomic.Int64
	began := time.Now()
	handle := k.Handle("g", func(context.Context, *jetstream.Event) error {
		if calls.Add(1) == 1 {
			<-time.After(long)
		}
		return nil
	})
	for range 2 {
		consumeWith(t, b, "long", jetstream.SubscribeOptions{AckTimeout: time.Second, Workers: 2, MaxAttempts: jetstream.NeverGiveUp}, handle)
	}
	publish(t, b, "long", "one")
	eventually(t, "the event is handled", func() bool {
		seen, err := k.Seen(t.Context(), "long", "g", "one")
		return err == nil && seen
	})
	if calls.Load() != 1 || time.Since(began) < long {
		t.Errorf("%d calls within %v", calls.Load(), time.Since(began))
	}
}

// The claim of a process that died ends.
func TestKVClaimOfTheDead(t *testing.T) {
	t.Parallel()
	b := openBus(t)
	k := openKV(t, inbox.KVConfig{Bus: b, Claim: time.Second})
	entries, err := b.Collections().Open(t.Context(), inbox.DefaultBucket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := entries.Put(t.Context(), inbox.KVKey("dead", "g", "one"), []byte("claimed by a dead process"), nil, 0); err != nil {
		t.Fatal(err)
	}
	var handled atomic.Int64
	began := time.Now()
	consumeWith(t, b, "dead", jetstream.SubscribeOptions{}, k.Handle("g", func(context.Context, *jetstream.Event) error {
		handled.Add(1)
		return nil
	}))
	publish(t, b, "dead", "one")
	eventually(t, "the event is handled", func() bool { return handled.Load() == 1 })
	if took := time.Since(began); took < time.Second {
		t.Errorf("a claim was taken after %v", took)
	}
}

func TestKVMarks(t *testing.T) {
	t.Parallel()
	b := openBus(t)
	k := openKV(t, inbox.KVConfig{Bus: b, TTL: 2 * time.Second, Claim: time.Second})
	var first atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			ok, err := k.Mark(t.Context(), "t", "g", "\x00"+strings.Repeat("long", 500))
			if err != nil {
				t.Error(err)
			}
			if ok {
				first.Add(1)
			}
		})
	}
	wg.Wait()
	if first.Load() != 1 {
		t.Errorf("%d were the first", first.Load())
	}
	if ok, err := k.Mark(t.Context(), "t", "other", "\x00"+strings.Repeat("long", 500)); err != nil || !ok {
		t.Errorf("of another group: %v, %v", ok, err)
	}
	eventually(t, "the marks to end", func() bool {
		seen, err := k.Seen(t.Context(), "t", "other", "\x00"+strings.Repeat("long", 500))
		return err == nil && !seen
	})
}

func TestKVConfig(t *testing.T) {
	t.Parallel()
	b := openBus(t)
	for want, cfg := range map[string]inbox.KVConfig{
		"no Bus is given":             {},
		"claim 1ms: must be at":       {Bus: b, Claim: time.Millisecond},
		"no longer than the TTL":      {Bus: b, Claim: time.Minute, TTL: time.Second},
		"TTL 1ms":                     {Bus: b, TTL: time.Millisecond},
		`collection "Upper": must be`: {Bus: b, Bucket: "Upper"},
	} {
		if _, err := inbox.OpenKV(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}
