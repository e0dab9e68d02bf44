package ordered_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// memberRole is the role of hubs that can be killed and frozen.
const memberRole = "members"

// members is what such a hub is told.
type members struct {
	URL, Name, Book string
	Count           int
}

// run has members of the group "g" write what they are given to the book: "B member key number"
// when a member begins an event, and "E member key number" before it settles it. All hubs append to
// one file, so what happens before is written before.
func (m members) run(ctx context.Context) error {
	book, err := os.OpenFile(m.Book, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = book.Close() }()
	b, err := jetstream.Open(ctx, jetstream.Config{URL: m.URL, AckWait: 3 * time.Second, OwnerLease: 2 * time.Second})
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }()
	for i := range m.Count {
		name := fmt.Sprintf("%s-%d", m.Name, i)
		opts := jetstream.SubscribeOptions{OrderByKey: true, Workers: 8, MaxInFlight: 20, From: jetstream.FromEarliest, MaxAttempts: jetstream.NeverGiveUp}
		_, err := b.Consume(ctx, "orders", "g", opts, func(ctx context.Context, d *jetstream.Delivery) error {
			_, _ = fmt.Fprintf(book, "B %s %s %s\n", name, d.Event.Key, d.Event.Payload)
			select {
			case <-time.After(5 * time.Millisecond): // the work
			case <-ctx.Done():
				return ctx.Err()
			}
			_, _ = fmt.Fprintf(book, "E %s %s %s\n", name, d.Event.Key, d.Event.Payload)
			return d.Ack()
		})
		if err != nil {
			return err
		}
	}
	natstest.Ready()
	<-ctx.Done()
	return nil
}

// ledger is what the book of several hubs says.
type ledger struct {
	faults  []string
	settled int // events that a member has ended, each once
	again   int // events that were begun after they had been ended
}

// read reads the book. "K hub" is written when a hub was killed or frozen: what its members held is
// free some time after that.
func read(tb testing.TB, path string) ledger {
	tb.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	var l ledger
	last := make(map[string]int)
	holder := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		var op, member, key string
		var n int
		if _, err := fmt.Sscan(line, &op, &member, &key, &n); err != nil && op != "K" {
			tb.Fatalf("line %q: %v", line, err)
		}
		switch op {
		case "K":
			for key, m := range holder {
				if strings.HasPrefix(m, member+"-") {
					delete(holder, key)
				}
			}
		case "B":
			if other := holder[key]; other != "" {
				l.faults = append(l.faults, fmt.Sprintf("%s is held by %s and %s", key, other, member))
			}
			holder[key] = member
			switch {
			case n > last[key]+1:
				l.faults = append(l.faults, fmt.Sprintf("%s: %d after %d", key, n, last[key]))
			case n <= last[key]:
				l.again++
			}
		case "E":
			if holder[key] != member {
				continue // of a hub that was frozen
			}
			delete(holder, key)
			if n == last[key]+1 {
				last[key] = n
				l.settled++
			}
		}
	}
	return l
}

// TestOwnersDie kills the owner of a group, and freezes another hub for longer than the lease of an
// owner: no key is held by two, none is out of order, and nothing is lost.
func TestOwnersDie(t *testing.T) {
	const keys, each, held = 60, 40, 3 * 2 * 20
	url := natstest.Run(t).ClientURL()
	b := startHub(t, url)
	publishKeys(t, b, "orders", keys, each)
	path := filepath.Join(t.TempDir(), "book")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(line string) {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(line)
			_ = f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	start := func(name string) *natstest.Child {
		c := natstest.StartChild(t, memberRole, members{URL: url, Name: name, Book: path, Count: 2}, nil)
		if !c.AwaitReady() {
			t.Fatal("a hub did not start")
		}
		return c
	}
	until := func(settled int) {
		t.Helper()
		deadline := time.Now().Add(2 * wait)
		for l := read(t, path); l.settled < settled; l = read(t, path) {
			if time.Now().After(deadline) {
				t.Fatalf("%d of %d events were settled", l.settled, settled)
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	first := start("a")
	second := start("b")
	third := start("c")
	until(keys * each / 4)
	first.Kill()
	write("K a\n")
	until(keys * each / 2)
	second.Freeze()
	write("K b\n")
	until(keys*each*5/8 + 1)
	second.Thaw()
	_ = start("d")
	until(keys * each)
	_ = third
	settledAll(t, b, "orders")
	l := read(t, path)
	for _, fault := range l.faults {
		t.Error(fault)
	}
	if l.again > held {
		t.Errorf("%d events came again, and at most %d were leased", l.again, held)
	}
}

// TestHandOver closes the hub that owns a group, again and again, while members work. An AckWait that
// is longer than the test shows that the next owner does not wait for it.
func TestHandOver(t *testing.T) {
	url := natstest.Run(t).ClientURL()
	start := func() *jetstream.Bus { return startHubWith(t, url, 2*wait) }
	stays := start()
	publishKeys(t, stays, "orders", 40, 30)
	book := newOrderBook(t, 1200)
	owner := start()
	_ = book.join(owner, "orders", "m0", sometimes)
	book.until(100)
	for i := 1; i <= 3; i++ {
		next := start()
		_ = book.join(next, "orders", fmt.Sprintf("m%d", i), sometimes)
		book.until(100 + i*200)
		_ = owner.Close() // ends its member, too
		owner = next
	}
	_ = book.join(stays, "orders", "last", nil)
	book.wait(wait)
	settledAll(t, stays, "orders")
}

// TestPoison has an event that always fails: it becomes a dead letter, and its key goes on.
func TestPoison(t *testing.T) {
	b := hubs(t, 1)[0]
	publishKeys(t, b, "orders", 3, 5)
	var mu sync.Mutex
	tried, got := 0, make(map[string][]string)
	done := make(chan struct{})
	opts := jetstream.SubscribeOptions{OrderByKey: true, Workers: 4, From: jetstream.FromEarliest, MaxAttempts: 2}
	s, err := b.Consume(t.Context(), "orders", "g", opts, func(_ context.Context, d *jetstream.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		key, n := d.Event.Key, string(d.Event.Payload)
		if key == "k1" && n == "2" {
			if tried++; tried != d.Attempt {
				t.Errorf("attempt %d has the number %d", tried, d.Attempt)
			}
			return errors.New("poison")
		}
		if key == "k1" && n > "2" && tried < 2 {
			t.Errorf("event %s before the last attempt of event 2", n)
		}
		got[key] = append(got[key], n)
		if len(got["k0"]) == 5 && len(got["k1"]) == 4 && len(got["k2"]) == 5 {
			close(done)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Stop(context.Background()) })
	select {
	case <-done:
	case <-time.After(wait):
		mu.Lock()
		defer mu.Unlock()
		t.Fatalf("got %v", got)
	}
	settledAll(t, b, "orders")
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"1", "3", "4", "5"}; !slices.Equal(got["k1"], want) || tried != 2 {
		t.Errorf("k1: %v after %d attempts of event 2, want %v after 2", got["k1"], tried, want)
	}
	letters := make(chan string, 10)
	dlq, err := b.Consume(t.Context(), "dlq.orders", "watch", jetstream.SubscribeOptions{From: jetstream.FromEarliest}, func(_ context.Context, d *jetstream.Delivery) error {
		letters <- string(d.Event.Payload)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dlq.Stop(context.Background()) })
	select {
	case letter := <-letters:
		if !strings.Contains(letter, "poison") || !strings.Contains(letter, `"k1"`) {
			t.Errorf("the dead letter is %s", letter)
		}
	case <-time.After(wait):
		t.Error("no dead letter")
	}
}
