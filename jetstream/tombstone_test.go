package jetstream

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/native"
)

// Why the hub removes no tombstone: in every way of removing one, a server that is killed brings
// the removed key back with an old value (nats-server issue 8505). When this test fails because the
// server no longer does so, tombstones can be removed: see ARCHITECTURE.md.
func TestAKilledServerBringsKeysWithoutTombstonesBack(t *testing.T) {
	t.Parallel()
	c := startProcesses(t, 1)
	ways := map[string]func(ctx context.Context, s natsjs.Stream, tombstone uint64) error{
		"delete": func(ctx context.Context, s natsjs.Stream, tombstone uint64) error { return s.DeleteMsg(ctx, tombstone) },
		"purge-subject": func(ctx context.Context, s natsjs.Stream, tombstone uint64) error {
			return s.Purge(ctx, natsjs.WithPurgeSubject(s.CachedInfo().Config.Name+".a"), natsjs.WithPurgeSequence(tombstone+1))
		},
		"purge-up-to": func(ctx context.Context, s natsjs.Stream, tombstone uint64) error {
			return s.Purge(ctx, natsjs.WithPurgeSequence(tombstone+1))
		},
		"ttl": func(ctx context.Context, s natsjs.Stream, _ uint64) error {
			c.until("the tombstone ends", func(ctx context.Context) bool {
				_, err := s.GetLastMsgForSubject(ctx, s.CachedInfo().Config.Name+".a")
				return err != nil
			})
			return ctx.Err()
		},
	}
	for name, remove := range ways {
		s, err := c.js.CreateStream(t.Context(), natsjs.StreamConfig{Name: name, Subjects: []string{name + ".*"}, MaxMsgsPerSubject: 1, AllowMsgTTL: true})
		if err != nil {
			t.Fatal(err)
		}
		put := func(key, value string) uint64 {
			m := nats.NewMsg(name + "." + key)
			m.Data = []byte(value)
			if value == "" {
				m.Header.Set(native.HeaderOperation, native.Tombstone)
				if name == "ttl" {
					m.Header.Set("Nats-TTL", "1s")
				}
			}
			ack, err := c.js.PublishMsg(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			return ack.Sequence
		}
		put("a", "1")
		put("other", "1")
		put("a", "2")
		at := put("a", "")
		put("other", "2")
		if err := remove(t.Context(), s, at); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := s.GetLastMsgForSubject(t.Context(), name+".a"); err == nil {
			t.Fatalf("%s: the tombstone is still there", name)
		}
		put("other", "3")
	}
	c.nodes[0].Kill()
	c.nodes[0].Start()
	for name := range ways {
		c.healthy(name)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		s, err := c.js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := s.GetLastMsgForSubject(ctx, name+".a"); err != nil || string(m.Data) != "2" {
			t.Errorf("%s: the removed key stays removed (%v)", name, err)
		}
		cancel()
	}
}
