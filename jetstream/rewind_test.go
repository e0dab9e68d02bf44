package jetstream

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// A crash of the machines of NATS may take the end of a stream, and leave the position of a group
// behind the end. The group gets the events that are stored then, which have the sequences of lost
// events.
func TestAGroupBehindTheEndOfItsStream(t *testing.T) {
	t.Parallel()
	for name, restored := range map[string]bool{"made here": false, "restored from a backup": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := natsServer(t)
			publishAll(t, open(t, Config{URL: url}), "t", numbers(3)...)
			look := natstest.Look(t, url)
			if restored {
				s, err := look.JS.Stream(t.Context(), "t")
				if err != nil {
					t.Fatal(err)
				}
				changed := s.CachedInfo().Config
				changed.Metadata[native.MetaMade] = time.Now().Add(-time.Hour).Format(time.RFC3339Nano)
				if _, err := look.JS.UpdateStream(t.Context(), changed); err != nil {
					t.Fatal(err)
				}
			}
			cfg := native.ConsumerConfig("t", "g", native.ConsumerName("t", "g", false), false)
			cfg.OptStartSeq = 6 // two events were lost
			if _, err := look.JS.CreateConsumer(t.Context(), "t", cfg); err != nil {
				t.Fatal(err)
			}
			b := open(t, Config{URL: url})
			k := take(t, b, "t", "g", SubscribeOptions{})
			publishAll(t, b, "t", "after")
			if got := k.payloads(1)[0]; got != "after" {
				t.Errorf("%s came first", got)
			}
			if _, err := b.Group("t", "g").Cursor(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A crash of all machines of NATS may take the descriptions of a stream, of its group, and of what
// the hubs noted, when these were made in the last seconds before, and leave what the consumer had
// noted of its position. The server gives that to a new consumer of the same name, which would
// begin behind new events.
func TestAGroupAmongTheRemainsOfAnother(t *testing.T) {
	t.Parallel()
	for name, consumed := range map[string]int{"of which all was acknowledged": 10, "with leases": 6} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			server := natstest.StartStoring(t, natstest.Storage{Dir: dir, Sync: time.Second})[0]
			b := open(t, Config{URL: server.URL()})
			k := take(t, b, "t", "g", SubscribeOptions{MaxInFlight: 10})
			publishAll(t, b, "t", numbers(10)...)
			for i := range 10 {
				if d := k.next(); i < consumed {
					if err := d.Ack(); err != nil {
						t.Fatal(err)
					}
				}
			}
			look := natstest.Look(t, server.URL())
			eventually(t, "the server has stored the acks", func() bool {
				c, err := look.JS.Consumer(t.Context(), "t", native.ConsumerName("t", "g", false))
				return err == nil && c.CachedInfo().AckFloor.Stream == uint64(consumed)
			})
			_ = b.Close()
			server.Stop()
			loseDescriptions(t, dir)

			server.Start()
			b = open(t, Config{URL: server.URL()})
			k = take(t, b, "t", "g", SubscribeOptions{})
			publishAll(t, b, "t", "a", "b", "c")
			if got := k.payloads(3); !slices.Equal(got, []string{"a", "b", "c"}) {
				t.Errorf("the group got %q", got)
			}
		})
	}
}

// loseDescriptions empties the descriptions of all streams and consumers, and the events, which
// were not synced either.
func loseDescriptions(t *testing.T, store string) {
	t.Helper()
	lost := 0
	if err := filepath.WalkDir(store, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if n := filepath.Base(path); n != "meta.inf" && n != "meta.sum" && n != "index.db" && filepath.Ext(n) != ".blk" {
			return nil
		}
		lost++
		return os.Truncate(path, 0)
	}); err != nil {
		t.Fatal(err)
	}
	if lost == 0 {
		t.Fatal("no description was found")
	}
}
