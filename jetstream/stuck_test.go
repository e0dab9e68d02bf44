package jetstream

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// logBook keeps what is logged.
type logBook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// lines returns the lines that contain what.
func (l *logBook) lines(what string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []string
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, what) {
			found = append(found, line)
		}
	}
	return found
}

func (l *logBook) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

const (
	saysStuck = `msg="group is stuck`
	saysFlows = `msg="group is not stuck any more"`
)

// TestStuckGroup has requests for events of one group get lost, so that NATS delivers nothing to it
// any more, and repairs the group.
func TestStuckGroup(t *testing.T) {
	t.Parallel()
	proxy := natstest.StartProxy(t, natsServer(t))
	var book logBook
	b := openRemote(t, Config{URL: proxy.URL(), Logger: book.logger(), AckWait: 6 * time.Second, moveWait: briefly, Limits: Limits{StuckAfter: 2 * time.Second}})
	g, other := b.Group("stalls", "g"), b.Group("stalls", "other")
	k := take(t, b, "stalls", "g", SubscribeOptions{MaxInFlight: 4, BatchSize: 4})
	rest := take(t, b, "stalls", "other", SubscribeOptions{})
	publishAll(t, b, "stalls", counted(4)...)
	k.ack(4, func(p string) bool { return p != "2" })
	rest.payloads(4)
	settledUpTo(t, g, 1)

	proxy.Swallow(func(subject string) bool { return strings.HasSuffix(subject, ".MSG.NEXT.stalls.g") })
	want := []string{"2"} // what is not settled
	var began time.Time
	// the request that waits takes the first of these
	for n := 5; began.IsZero() && n < 100; n++ {
		p := strconv.Itoa(n)
		publishAll(t, b, "stalls", p)
		rest.payloads(1)
		select {
		case h := <-k.ch:
			if d, ok := h.Begin(); !ok || d.Ack() != nil {
				t.Fatal("the event cannot be settled")
			}
		case <-time.After(time.Second):
			began = time.Now()
			want = append(want, p)
		}
	}
	var info GroupInfo
	eventually(t, "the group is stuck", func() bool {
		var err error
		if info, err = g.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		return info.Stuck != 0
	})
	if took := time.Since(began); info.Pending != 1 || took < time.Second/2 {
		t.Errorf("after %v: %+v", took, info)
	}
	found, err := b.Admin().Groups().Lags(t.Context(), 10)
	lags := found.Lags
	if err != nil || len(lags) != 2 || lags[0].StuckSince.IsZero() || !lags[1].StuckSince.IsZero() {
		t.Errorf("lags: %+v, %v", lags, err)
	}
	if info, err := other.Info(t.Context()); err != nil || info.Stuck != 0 {
		t.Errorf("the other group: %+v, %v", info, err)
	}
	if said := book.lines(saysStuck); len(said) != 1 || !strings.Contains(said[0], "group=g") || !strings.Contains(said[0], "level=WARN") {
		t.Errorf("the log says %q", said)
	}
	if said := book.lines(saysFlows); len(said) != 0 {
		t.Errorf("the log says %q", said)
	}
	if did := repairs(t, g); did != (Moved{}) {
		t.Errorf("the repair did %+v", did)
	}
	if got := settledOf(k, 2); !slices.Equal(got, want) {
		t.Errorf("after the repair came %q", got)
	}
	eventually(t, "the group is not stuck", func() bool {
		info, err := g.Info(t.Context())
		return err == nil && info.Stuck == 0 && len(book.lines(saysFlows)) == 1
	})
}

// TestStuckGroupRecovers has a stuck group get events again by itself.
func TestStuckGroupRecovers(t *testing.T) {
	t.Parallel()
	proxy := natstest.StartProxy(t, natsServer(t))
	var book logBook
	b := openRemote(t, Config{URL: proxy.URL(), Logger: book.logger(), Limits: Limits{StuckAfter: 2 * time.Second}})
	g := b.Group("heals", "g")
	proxy.Swallow(func(subject string) bool { return strings.HasSuffix(subject, ".MSG.NEXT.heals.g") })
	k := take(t, b, "heals", "g", SubscribeOptions{})
	publishAll(t, b, "heals", counted(3)...)
	eventually(t, "the group is stuck", func() bool {
		info, err := g.Info(t.Context())
		return err == nil && info.Stuck != 0
	})
	proxy.Swallow(nil)
	// the hub asks again without being told
	if got := settledOf(k, 3); !slices.Equal(got, counted(3)) {
		t.Errorf("got %q", got)
	}
	eventually(t, "the log tells", func() bool { return len(book.lines(saysFlows)) == 1 })
	if said := book.lines(saysStuck); len(said) != 1 {
		t.Errorf("the log says %q", said)
	}
	if info, err := g.Info(t.Context()); err != nil || info.Stuck != 0 {
		t.Errorf("%+v, %v", info, err)
	}
}

// TestNotStuck has groups get nothing for good reasons.
func TestNotStuck(t *testing.T) {
	t.Parallel()
	proxy := natstest.StartProxy(t, natsServer(t))
	var book logBook
	b := openRemote(t, Config{URL: proxy.URL(), Logger: book.logger(), AckWait: 30 * time.Second, Limits: Limits{StuckAfter: time.Second}})
	var calm []string
	for name, prepare := range map[string]func(t *testing.T, b *Bus, topic string){
		"nothing is there": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			take(t, b, topic, "g", SubscribeOptions{})
		},
		"all is leased": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			k := take(t, b, topic, "g", SubscribeOptions{})
			publishAll(t, b, topic, counted(3)...)
			for range 3 {
				k.next()
			}
		},
		"no credit": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			k := take(t, b, topic, "g", SubscribeOptions{MaxInFlight: 1})
			publishAll(t, b, topic, counted(3)...)
			k.next()
		},
		"back-off": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			k := take(t, b, topic, "g", SubscribeOptions{})
			publishAll(t, b, topic, counted(3)...)
			for range 3 {
				if err := k.next().Nack("later", time.Hour); err != nil {
					t.Fatal(err)
				}
			}
		},
		"paused": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			take(t, b, topic, "g", SubscribeOptions{})
			if err := b.Group(topic, "g").Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, topic, counted(3)...)
		},
		"member paused": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			k := take(t, b, topic, "g", SubscribeOptions{})
			if err := k.sub.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, topic, counted(3)...)
		},
		"member does not take": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			take(t, b, topic, "g", SubscribeOptions{MaxInFlight: 2})
			publishAll(t, b, topic, counted(30)...)
		},
		"no members": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			k := take(t, b, topic, "g", SubscribeOptions{})
			if err := k.sub.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, topic, counted(3)...)
		},
		"max ack pending": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			k := take(t, b, topic, "g", SubscribeOptions{})
			c, err := b.conn.JS.Consumer(t.Context(), topic, "g")
			if err != nil {
				t.Fatal(err)
			}
			cfg := c.CachedInfo().Config
			cfg.MaxAckPending = 1
			if _, err := b.conn.JS.UpdateConsumer(t.Context(), topic, cfg); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, topic, counted(3)...)
			k.next()
		},
		"paused natively": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			take(t, b, topic, "g", SubscribeOptions{})
			if _, err := b.conn.JS.PauseConsumer(t.Context(), topic, "g", time.Now().Add(time.Hour)); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, topic, counted(3)...)
		},
		"events removed": func(t *testing.T, b *Bus, topic string) {
			t.Helper()
			take(t, b, topic, "g", SubscribeOptions{Paused: true})
			publishAll(t, b, topic, counted(3)...)
			s, err := b.conn.JS.Stream(t.Context(), topic)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		topic := "calm-" + strings.ReplaceAll(name, " ", "-")
		prepare(t, b, topic)
		calm = append(calm, topic)
	}
	// One that is stuck shows when the others would have been found.
	proxy.Swallow(func(subject string) bool { return strings.HasSuffix(subject, ".MSG.NEXT.stalls.g") })
	take(t, b, "stalls", "g", SubscribeOptions{})
	publishAll(t, b, "stalls", counted(3)...)
	stuck := 0
	eventually(t, "the other group is stuck", func() bool {
		// metrics are read meanwhile
		for _, topic := range calm {
			info, err := b.Group(topic, "g").Info(t.Context())
			if err != nil || info.Stuck != 0 {
				t.Fatalf("%s: %+v, %v", topic, info, err)
			}
		}
		info, err := b.Group("stalls", "g").Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if info.Stuck != 0 {
			stuck++
		}
		return stuck > 1
	})
	if said := book.lines(saysStuck); len(said) != 1 || !strings.Contains(said[0], "topic=stalls") {
		t.Errorf("the log says %q", said)
	}
}

// TestNotStuckWithoutServer freezes the server for longer than a group may be stuck, and has the
// leader of a consumer change again and again.
func TestNotStuckWithoutServer(t *testing.T) {
	t.Parallel()
	const after = time.Second
	t.Run("frozen", func(t *testing.T) {
		t.Parallel()
		server := natstest.Start(t)
		var book logBook
		b := openRemote(t, Config{URL: server.URL(), Logger: book.logger(), Limits: Limits{StuckAfter: after}})
		k := take(t, b, "frozen", "g", SubscribeOptions{})
		server.Freeze()
		// it is stored when the server goes on
		published := make(chan error, 1)
		go func() {
			_, err := b.Publish(context.Background(), "frozen", []byte("1"), PublishOptions{})
			published <- err
		}()
		<-time.After(3 * after)
		server.Thaw()
		if err := <-published; err != nil {
			t.Log(err) // unknown: it may have been stored
			publishAll(t, b, "frozen", "1")
		}
		k.payloads(1)
		if said := book.lines(saysStuck); len(said) != 0 {
			t.Errorf("the log says %q", said)
		}
	})
	t.Run("leaders", func(t *testing.T) {
		t.Parallel()
		url := natsServers(t, 3)
		var book logBook
		b := openRemote(t, Config{URL: url, Replicas: 3, Logger: book.logger(), Limits: Limits{StuckAfter: after}})
		k := take(t, b, "elects", "g", SubscribeOptions{From: FromEarliest})
		for i := range 4 {
			if _, err := b.conn.JS.Conn().Request("$JS.API.CONSUMER.LEADER.STEPDOWN.elects.g", nil, wait); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, "elects", counted(5)...)
			if got := k.payloads(5); len(got) != 5 {
				t.Fatalf("round %d: %q", i, got)
			}
		}
		if said := book.lines(saysStuck); len(said) != 0 {
			t.Errorf("the log says %q", said)
		}
	})
}
