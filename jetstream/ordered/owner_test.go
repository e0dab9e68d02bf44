package ordered_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// long has TestOwnersDie run at the size, and with the times, of a hub in production.
var long = flag.Bool("ordered.long", false, "1,000 keys with 200 events each, and the default leases, in TestOwnersDie")

// memberRole is the role of hubs that can be killed and frozen.
const memberRole = "members"

// inFlight is how many events a member of such a hub has at a time.
const inFlight = 20

// members is what such a hub is told.
type members struct {
	URL, Name, Book   string
	Count             int
	AckWait           time.Duration
	Lease             time.Duration // of an owner
	Expiry            time.Duration // of a lease
	Work              time.Duration // with an event
	Churn             time.Duration // how often one of them leaves and another one joins
	Refuse, Expire, N int           // so many of N events are refused, or not settled, at first
}

// run has members of the group "g" write what they are given to the book: "J member" when a member
// joins, "B member key number" when it begins an event, "E member key number" before it settles it,
// "S member key number" when it has, and "X member key number" before it refuses it or lets it
// expire. All hubs append to one file, so what happens before is written before.
func (m members) run(ctx context.Context) error {
	book, err := os.OpenFile(m.Book, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = book.Close() }()
	b, err := jetstream.Open(ctx, jetstream.Config{
		URL: m.URL, AckWait: m.AckWait, OwnerLease: m.Lease, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)).With(slog.String("hub", m.Name)),
	})
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }()
	joined := 0
	join := func() (*jetstream.Subscription, error) {
		name := fmt.Sprintf("%s-%d", m.Name, joined)
		joined++
		_, _ = fmt.Fprintf(book, "J %s\n", name)
		opts := jetstream.SubscribeOptions{
			OrderByKey: true, Workers: inFlight, MaxInFlight: inFlight, From: jetstream.FromEarliest, MaxAttempts: jetstream.NeverGiveUp, AckTimeout: m.Expiry,
		}
		return b.Consume(ctx, topic, "g", opts, func(ctx context.Context, d *jetstream.Delivery) error {
			write := func(op string) { _, _ = fmt.Fprintf(book, "%s %s %s %s\n", op, name, d.Event.Key, d.Event.Payload) }
			write("B")
			what := m.N
			if d.Attempt == 1 {
				what = rand.IntN(m.N)
			}
			switch {
			case what < m.Refuse:
				write("X")
				return d.Nack("refused", 10*time.Millisecond)
			case what < m.Refuse+m.Expire:
				write("X")
				<-ctx.Done()
				return ctx.Err()
			}
			select {
			case <-time.After(m.Work):
			case <-ctx.Done():
				write("X")
				return ctx.Err()
			}
			write("E")
			err := d.Ack()
			if err == nil {
				write("S")
			}
			return err
		})
	}
	var subs []*jetstream.Subscription
	for range m.Count {
		s, err := join()
		if err != nil {
			return err
		}
		subs = append(subs, s)
	}
	natstest.Ready()
	tick := time.NewTicker(m.Churn)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		leaves := subs[0]
		s, err := join()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			_, _ = fmt.Fprintln(os.Stderr, m.Name, err) // NATS may be slow; the next one comes
			continue
		}
		subs = append(slices.Clone(subs[1:]), s)
		if err := leaves.Drain(ctx); err != nil && ctx.Err() == nil {
			_, _ = fmt.Fprintln(os.Stderr, m.Name, "drain:", err) // its hub was frozen meanwhile
		}
	}
}

// ledger is what the book of several hubs says.
type ledger struct {
	tb     testing.TB
	path   string
	offset int64
	last   map[string]int    // the newest event of each key that was ended
	holder map[string]string // of each key
	// Members of a hub that was frozen may write that they begin an event when the hub goes on,
	// though they began it before. They settle nothing that another member has.
	joined map[string]bool   // true for members of such a hub
	doubts map[string]string // "member key", and what is wrong if the member settles the event

	faults  []string
	settled int // events that a member has ended, each once
	again   int // events that were begun after they had been ended
	let     int // events that were refused or not settled
}

func newLedger(tb testing.TB) *ledger {
	tb.Helper()
	l := &ledger{tb: tb, path: filepath.Join(tb.TempDir(), "book"), last: make(map[string]int), holder: make(map[string]string), joined: make(map[string]bool), doubts: make(map[string]string)}
	if err := os.WriteFile(l.path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	return l
}

// lost writes that a hub was killed or frozen: what its members hold is free some time after that.
func (l *ledger) lost(hub string) {
	l.tb.Helper()
	f, err := os.OpenFile(l.path, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("K " + hub + "\n")
		_ = f.Close()
	}
	if err != nil {
		l.tb.Fatal(err)
	}
}

// read reads what is new in the book.
func (l *ledger) read() {
	l.tb.Helper()
	f, err := os.Open(l.path)
	if err != nil {
		l.tb.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(io.NewSectionReader(f, l.offset, math.MaxInt64-l.offset))
	if err != nil {
		l.tb.Fatal(err)
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	l.offset += int64(len(text))
	for line := range strings.Lines(string(text)) {
		if hub, is := strings.CutPrefix(strings.TrimSpace(line), "K "); is {
			for key, m := range l.holder {
				if strings.HasPrefix(m, hub+"-") {
					delete(l.holder, key)
				}
			}
			for m := range l.joined {
				if strings.HasPrefix(m, hub+"-") {
					l.joined[m] = true
				}
			}
			continue
		}
		f := strings.Fields(line)
		if len(f) == 2 && f[0] == "J" {
			l.joined[f[1]] = false
			continue
		}
		if len(f) != 4 {
			l.tb.Fatalf("line %q", line)
		}
		n, _ := strconv.Atoi(f[3])
		l.note(f[0], f[1], f[2], n)
	}
}

func (l *ledger) note(op, member, key string, n int) {
	switch op {
	case "B":
		delete(l.doubts, member+" "+key)
		if other := l.holder[key]; other != "" {
			fault := fmt.Sprintf("%s is held by %s and %s", key, other, member)
			switch {
			case l.joined[member]:
				l.doubts[member+" "+key] = fault
				return
			case l.joined[other]:
				l.doubts[other+" "+key] = fault
			default:
				l.faults = append(l.faults, fault)
			}
		}
		l.holder[key] = member
		switch {
		case n > l.last[key]+1:
			l.faults = append(l.faults, fmt.Sprintf("%s: %d after %d", key, n, l.last[key]))
		case n <= l.last[key]:
			l.again++
		}
	case "S":
		if fault := l.doubts[member+" "+key]; fault != "" {
			l.faults = append(l.faults, fault)
		}
	case "X", "E":
		if l.holder[key] != member {
			return // of a hub that was frozen
		}
		delete(l.holder, key)
		switch {
		case op == "X":
			l.let++
		case n == l.last[key]+1:
			l.last[key] = n
			l.settled++
		}
	}
}

// until waits until so many events are settled.
func (l *ledger) until(settled int, within time.Duration) {
	l.tb.Helper()
	deadline := time.Now().Add(within)
	before, at := l.settled, time.Now()
	for l.read(); l.settled < settled; l.read() {
		if l.settled > before {
			before, at = l.settled, time.Now()
		}
		if time.Now().After(deadline) {
			for _, fault := range l.faults {
				l.tb.Log(fault)
			}
			l.tb.Logf("the newest settled event of each key: %v; held: %v", l.last, l.holder)
			l.tb.Fatalf("%d of %d events were settled, the last one %v ago", l.settled, settled, time.Since(at).Round(time.Second))
		}
		<-time.After(50 * time.Millisecond)
	}
}

// TestOwnersDie has eight members on three hubs, of which one leaves and another one joins every
// 200 ms. Of their events, they refuse 5 % and let 1 % expire. Two hubs are killed, and one is
// frozen twice: for less than it takes until another hub may have its group, and for longer. No key
// is held by two, none is out of order, and nothing is lost.
func TestOwnersDie(t *testing.T) {
	t.Parallel()
	keys, each := 60, 24
	told := members{AckWait: 2 * time.Second, Lease: time.Second}
	told.Work = 300 * time.Millisecond // the work lasts longer than what happens meanwhile
	freezes := [2]time.Duration{500 * time.Millisecond, 7 * time.Second / 2}
	if *long {
		keys, each = 1000, 200
		told.AckWait, told.Lease, told.Work = 30*time.Second, 10*time.Second, 150*time.Millisecond
		freezes = [2]time.Duration{20 * time.Second, 45 * time.Second}
	}
	l := newLedger(t)
	told.URL, told.Book = natstest.Run(t).ClientURL(), l.path
	told.Expiry, told.Churn = time.Second, 600*time.Millisecond // on each of three hubs
	told.N, told.Refuse, told.Expire = 100, 5, 1
	b := startHubWith(t, told.URL, told.AckWait)
	publishKeys(t, b, keys, each)
	total, began := keys*each, time.Now()
	start := func(name string, count int) *natstest.Child {
		told.Name, told.Count = name, count
		c := natstest.StartChild(t, memberRole, told, nil)
		if !c.AwaitReady() {
			t.Fatal("a hub did not start")
		}
		return c
	}
	within := 2*wait + 3*(told.AckWait+told.Lease)
	if *long {
		within += 10 * time.Minute
	}
	first, second, third := start("a", 3), start("b", 3), start("c", 2)
	freeze := func(c *natstest.Child, hub string, d time.Duration) {
		c.Freeze()
		l.lost(hub)
		<-time.After(d)
		c.Thaw()
	}
	l.until(total/10, within)
	freeze(third, "c", freezes[0])
	l.until(total/4, within)
	first.Kill() // the owner
	l.lost("a")
	_ = start("d", 3)
	l.until(total/2, within)
	freeze(third, "c", freezes[1])
	l.until(total*5/8, within)
	if l.settled == total {
		t.Error("the work has ended too early")
	}
	second.Kill()
	l.lost("b")
	_ = start("e", 3)
	l.until(total, within)
	settledAll(t, b)
	l.read()
	for _, fault := range l.faults {
		t.Error(fault)
	}
	if held := 4 * 8 * inFlight; l.again > held {
		t.Errorf("%d events came again, and at most %d were leased", l.again, held)
	}
	t.Logf("%d events in %v; %d were let go, %d came again", total, time.Since(began).Round(time.Second), l.let, l.again)
}

// TestHandOver closes the hub that owns a group, again and again, while members work. An AckWait
// that is longer than the test shows that the next owner does not wait for it.
func TestHandOver(t *testing.T) {
	t.Parallel()
	url := natstest.Run(t).ClientURL()
	start := func() *jetstream.Bus { return startHubWith(t, url, 2*wait) }
	stays := start()
	publishKeys(t, stays, 40, 30)
	book := newOrderBook(t, 1200)
	owner := start()
	_ = book.join(owner, "m0", sometimes)
	book.until(100)
	for i := 1; i <= 3; i++ {
		next := start()
		_ = book.join(next, fmt.Sprintf("m%d", i), sometimes)
		book.until(100 + i*200)
		_ = owner.Close() // ends its member, too
		owner = next
	}
	_ = book.join(stays, "last", nil)
	book.wait(wait)
	settledAll(t, stays)
}

// TestPoison has an event that always fails: it becomes a dead letter, and its key goes on.
func TestPoison(t *testing.T) {
	t.Parallel()
	b := hubs(t, 1)[0]
	publishKeys(t, b, 3, 5)
	var mu sync.Mutex
	tried, got := 0, make(map[string][]string)
	done := make(chan struct{})
	opts := jetstream.SubscribeOptions{OrderByKey: true, Workers: 4, From: jetstream.FromEarliest, MaxAttempts: 2}
	s, err := b.Consume(t.Context(), topic, "g", opts, func(_ context.Context, d *jetstream.Delivery) error {
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
	settledAll(t, b)
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
		if !strings.Contains(letter, "poison") || !strings.Contains(letter, `"k1"`) || !strings.Contains(letter, `"payload":2`) {
			t.Errorf("the dead letter is %s", letter)
		}
	case <-time.After(wait):
		t.Error("no dead letter")
	}
}

// TestAMemberComesLate has a hub die that owns a group, while no other hub has members of it. When
// one comes after the time that others have to wait, it is given events at once: its hub knows
// since when the owner is gone.
func TestAMemberComesLate(t *testing.T) {
	t.Parallel()
	for try := 1; ; try++ { // a hub that stands still, or whose own lease lapses, is late
		took, control := comesLate(t)
		if took <= max(2*time.Second, 3*control) {
			return
		}
		if try == 3 {
			t.Fatalf("the first event came after %v; that of a new group came after %v", took, control)
		}
	}
}

// comesLate returns how long the first event takes of a group whose owner is gone, and that of a
// new group.
func comesLate(t *testing.T) (took, control time.Duration) {
	t.Helper()
	told := members{AckWait: 3 * time.Second, Lease: 2 * time.Second, Work: 200 * time.Millisecond, Expiry: time.Second, Churn: time.Minute, N: 1, Name: "a", Count: 1}
	l := newLedger(t)
	told.URL, told.Book = natstest.Run(t).ClientURL(), l.path
	b := startHubWith(t, told.URL, told.AckWait)
	publishKeys(t, b, 50, 20)
	owner := natstest.StartChild(t, memberRole, told, nil)
	if !owner.AwaitReady() {
		t.Fatal("the hub did not start")
	}
	l.until(1, wait)
	owner.Kill()
	// One second more, for what was on its way.
	<-time.After(told.AckWait + told.Lease + time.Second)
	// first is how long the first event of a group takes.
	first := func(group string) time.Duration {
		t.Helper()
		came := make(chan struct{}, 1_000)
		began := time.Now()
		s, err := b.Consume(t.Context(), topic, group, jetstream.SubscribeOptions{OrderByKey: true, From: jetstream.FromEarliest}, func(context.Context, *jetstream.Delivery) error {
			came <- struct{}{}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-came:
		case <-time.After(wait):
			t.Fatal("no event came")
		}
		took := time.Since(began)
		if err := s.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		return took
	}
	return first("g"), first("new")
}
