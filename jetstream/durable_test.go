package jetstream

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/records"
)

// settings are those of the consumer that a group now is.
func settings(t *testing.T, b *Bus, topic, group string) natsjs.ConsumerConfig {
	t.Helper()
	ptr, err := b.records.Generation(t.Context(), b.streams.Known(topic), group)
	if err != nil {
		t.Fatal(err)
	}
	info, err := b.records.GroupConsumer(t.Context(), b.streams.Known(topic), &ptr)
	if err != nil {
		t.Fatal(err)
	}
	return info.Config
}

// A member without a TTL takes the TTL from a group. No event is lost, whichever hub's members have
// what, and those in a file see nothing of it.
func TestAMemberWithoutATTLMakesTheGroupDurable(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		ttl  time.Duration
		file bool
	}{{"in memory", memoryTTL, false}, {"in a file", memoryTTL + time.Second, true}} {
		t.Run(test.name, func(t *testing.T) {
			url := natsServer(t)
			one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
			publishAll(t, one, "bills", numbers(10)...)
			eve := take(t, one, "bills", "billing", SubscribeOptions{From: FromEarliest, GroupTTL: test.ttl, CountFor: "jwt:eve", MaxInFlight: 4, BatchSize: 4})
			var held []*Delivery
			for range 4 {
				held = append(held, eve.next())
			}
			for _, d := range []*Delivery{held[0], held[2]} { // 1 is left out
				if err := d.Ack(); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "the acks are in", func() bool {
				c, err := one.Group("bills", "billing").Cursor(t.Context())
				return err == nil && c.LastID != ""
			})
			owner := take(t, two, "bills", "billing", SubscribeOptions{})
			cfg := settings(t, two, "bills", "billing")
			if cfg.InactiveThreshold != 0 || cfg.MemoryStorage || cfg.Metadata[records.MetaMaker] != "jwt:eve" {
				t.Errorf("it is still %+v", cfg)
			}
			if moved := cfg.Name != "billing"; moved == test.file {
				t.Errorf("the consumer is %s now", cfg.Name)
			}
			eventually(t, "the other hub knows", func() bool {
				eve.sub.mu.Lock()
				defer eve.sub.mu.Unlock()
				m := eve.sub.members[0]
				return !m.attaching && m.group.timeToLive() == 0
			})
			if test.file { // the leases live on
				for _, d := range []*Delivery{held[1], held[3]} {
					if err := d.Ack(); err != nil {
						t.Errorf("the ack of a lease from before: %v", err)
					}
				}
			}
			if err := eve.sub.Disconnect(t.Context()); err != nil {
				t.Fatal(err)
			}
			// In a file, nothing that was settled comes again; else nothing below the floor.
			want := numbers(10)[1:]
			if test.file {
				want = numbers(10)[4:]
			}
			got := owner.payloads(len(want))
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("the owner got %q, want %q", got, want)
			}
			owner.quiet(50 * time.Millisecond)
		})
	}
}

// Two members that take the TTL from a group at once, on two hubs, end in one group, and so does
// the one that it had.
func TestTwoMembersMakeTheGroupDurableAtOnce(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	publishAll(t, one, "race", "0")
	for _, ttl := range []time.Duration{time.Second, memoryTTL + time.Second} {
		for round := range 10 {
			group := "g" + strconv.Itoa(round) + ttl.String()
			first := take(t, two, "race", group, SubscribeOptions{From: FromEarliest, GroupTTL: ttl})
			first.next()
			var members [2]*taker
			var wg sync.WaitGroup
			for i, b := range []*Bus{one, two} {
				wg.Go(func() { members[i] = take(t, b, "race", group, SubscribeOptions{}) })
			}
			wg.Wait()
			topic := one.streams.Known("race")
			ptr, err := one.records.Generation(t.Context(), topic, group)
			if err != nil || !ptr.Durable {
				t.Fatalf("%+v, %v", ptr, err)
			}
			for _, b := range []*Bus{one, two} {
				eventually(t, "all are members of one group", func() bool {
					for _, k := range append([]*taker{first}, members[:]...) {
						k.sub.mu.Lock()
						m := k.sub.members[0]
						same := k.sub.bus != b || m.group.consumer == ptr.Consumer && m.group.timeToLive() == 0
						k.sub.mu.Unlock()
						if !same {
							return false
						}
					}
					return true
				})
			}
			eventually(t, "one consumer is left", func() bool {
				s, err := one.conn.JS.Stream(t.Context(), "race")
				return err == nil && s.CachedInfo().State.Consumers == 1
			})
			for _, k := range append([]*taker{first}, members[:]...) {
				_ = k.sub.Stop(context.Background())
			}
			if err := one.Group("race", group).Delete(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A hub that dies after it has made the next consumer, and before the group has become that, leaves
// the group as it was.
func TestACrashWhileAGroupBecomesDurable(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "crash", numbers(3)...)
	eve := take(t, b, "crash", "g", SubscribeOptions{From: FromEarliest, GroupTTL: memoryTTL, MaxInFlight: 1, BatchSize: 1})
	d := eve.next()
	topic := b.streams.Known("crash")
	ptr, err := b.records.Generation(t.Context(), topic, "g")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.createConsumer(t.Context(), topic, "g", ptr.Next(topic, "g").Consumer, groupStart{seq: 1}); err != nil {
		t.Fatal(err)
	}
	if err := d.Ack(); err != nil {
		t.Errorf("the member was disturbed: %v", err)
	}
	owner := take(t, b, "crash", "g", SubscribeOptions{})
	_ = eve.sub.Stop(t.Context())
	got := owner.payloads(2)
	if slices.Sort(got); !slices.Equal(got, []string{"1", "2"}) {
		t.Errorf("got %q", got)
	}
	if err := b.records.SweepStream(t.Context(), topic.Stream, 0); err != nil {
		t.Fatal(err)
	}
	if s, err := b.conn.JS.Stream(t.Context(), "crash"); err != nil || s.CachedInfo().State.Consumers != 1 {
		t.Errorf("%d consumers are left, %v", s.CachedInfo().State.Consumers, err)
	}
}
