package jetstream

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// failAll refuses every event of a topic until its last attempt has failed.
func failAll(t *testing.T, k *taker, events, attempts int) {
	t.Helper()
	for range events * attempts {
		d := k.next()
		if d.Attempt > attempts {
			t.Fatalf("event %s has attempt %d of %d", d.Event.ID, d.Attempt, attempts)
		}
		if err := d.Nack("no, attempt "+strconv.Itoa(d.Attempt), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// wantLetters waits for so many dead letters of a topic, none of which may say another number of
// attempts, while nobody is given an event.
func wantLetters(t *testing.T, b *Bus, k *taker, topic string, events, attempts int) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(slow)
	for lettersOf(t, b, topic) < events {
		select {
		case h := <-k.ch:
			if d, ok := h.Begin(); ok {
				t.Fatalf("event %s was delivered again, attempt %d of %d", d.Event.ID, d.Attempt, attempts)
			}
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%d letters of %s, want %d", lettersOf(t, b, topic), topic, events)
		}
	}
	err := b.History("dlq."+topic).Scan(t.Context(), ScanOptions{}, func(e *event.Event) error {
		tail := string(e.Payload[max(0, len(e.Payload)-200):])
		if want := `"attempts":` + strconv.Itoa(attempts) + "}"; !strings.HasSuffix(tail, want) || !strings.Contains(tail, `"err":"no, attempt `+strconv.Itoa(attempts)+`"`) {
			t.Errorf("a letter ends with %s, want %s", tail, want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the events are settled", func() bool { return leasedOf(t, b, topic) == 0 })
}

// Events whose dead letters wait for a ration are delivered to nobody after the hub was restarted,
// with its server and beside another hub: their letters are written instead.
func TestMaxAttemptsHoldOverARestart(t *testing.T) {
	t.Parallel()
	const events, size, attempts = 8, 10_000, 2
	for _, c := range []struct {
		name   string
		server func(t *testing.T) func() Config
	}{
		{"NATS lives on", func(t *testing.T) func() Config {
			t.Helper()
			url := natsServer(t)
			return func() Config { return Config{URL: url} }
		}},
		{"NATS restarts as well", func(t *testing.T) func() Config {
			t.Helper()
			dir := t.TempDir()
			return func() Config { return Config{Server: natstest.Embed(t, dir)} }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := c.server(t)
			cfg := server()
			cfg.AckWait, cfg.Limits = 2*time.Second, Limits{DeadLetterBurst: 2 * size, DeadLetterRate: 1}
			a := open(t, cfg)
			for range events {
				publishAll(t, a, "again", `"`+strings.Repeat("x", size-2)+`"`)
			}
			opts := SubscribeOptions{From: FromEarliest, MaxAttempts: attempts, CountFor: "greedy"}
			failAll(t, take(t, a, "again", "g", opts), events, attempts)
			eventually(t, "the letters within the ration", func() bool { return lettersOf(t, a, "again") >= 1 })
			if err := a.Close(); err != nil {
				t.Fatal(err)
			}
			cfg = server()
			cfg.AckWait = 2 * time.Second
			b := open(t, cfg)
			if n := lettersOf(t, b, "again"); n >= events {
				t.Fatalf("%d letters were written, and none waited", n)
			}
			wantLetters(t, b, take(t, b, "again", "g", opts), "again", events, attempts)
		})
	}
}

// A client of which as many dead letters wait as the hub keeps gets none of its events again.
func TestMaxAttemptsHoldBeyondTheLettersThatWait(t *testing.T) {
	t.Parallel()
	const events, size, limit = 12, 1_000, 8 // of which a client may have half
	b := open(t, Config{AckWait: 10 * time.Second, deadRetry: time.Second, Limits: Limits{DeadLetters: limit, DeadLetterBurst: size, DeadLetterRate: 5 * size}})
	for _, topic := range []string{"many1", "many2", "many3"} {
		for range events / 3 {
			publishAll(t, b, topic, `"`+strings.Repeat("x", size-2)+`"`)
		}
	}
	k := take(t, b, "many1", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, CountFor: "greedy", Topics: []string{"many2", "many3"}})
	failAll(t, k, events, 1)
	for _, topic := range []string{"many1", "many2", "many3"} {
		wantLetters(t, b, k, topic, events/3, 1)
	}
}

// The letters of a topic cannot be stored. Events whose letters wait behind the first are delivered
// to nobody after the hub has lost its connection to NATS: their letters are written instead.
func TestMaxAttemptsHoldBehindALetterThatFails(t *testing.T) {
	t.Parallel()
	const events, attempts = 20, 1
	b := open(t, Config{URL: natsServer(t), Connections: 1, AckWait: 3 * time.Second})
	dlq := deadStream(t, b)
	dlq.away()
	for i := range events {
		publishAll(t, b, "behind", strconv.Itoa(i))
	}
	k := take(t, b, "behind", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: attempts})
	failAll(t, k, 1, attempts)
	eventually(t, "the first letter fails", func() bool {
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		topic := b.dead.topics["behind"]
		return topic != nil && topic.failing
	})
	failAll(t, k, events-1, attempts)
	<-time.After(2 * deadFirst) // the promise under test
	if err := b.conn.Links[0].NC.ForceReconnect(); err != nil {
		t.Log(err) // on a slow machine, the hub may have lost it already
	}
	eventually(t, "the hub forgets the letters", func() bool {
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		return len(b.dead.waiting) == 0
	})
	dlq.back()
	wantLetters(t, b, k, "behind", events, attempts)
}
