package jetstream

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream/embedded"
	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// smallDisk is an embedded server with a disk of its own, of size bytes.
type smallDisk struct {
	*embedded.Server

	size atomic.Uint64
}

func (d *smallDisk) DiskFree(context.Context) (uint64, error) {
	stored, err := d.NATS().Jsz(nil)
	if err != nil {
		return 0, err
	}
	return max(d.size.Load(), stored.Store) - stored.Store, nil
}

func embedSmall(t *testing.T, size uint64) *smallDisk {
	t.Helper()
	d := &smallDisk{Server: natstest.Embed(t, t.TempDir())}
	d.size.Store(size)
	return d
}

// limitAccount bounds what the account of a server without accounts may store in files.
func limitAccount(t *testing.T, s *natsserver.Server, most int64) {
	t.Helper()
	limits := natsserver.JetStreamAccountLimits{MaxMemory: -1, MaxStore: most, MaxStreams: -1, MaxConsumers: -1, MaxAckPending: -1}
	if err := s.GlobalAccount().UpdateJetStreamLimits(map[string]natsserver.JetStreamAccountLimits{"": limits}); err != nil {
		t.Fatal(err)
	}
}

// flood publishes for a client, with so many events in flight, until something is refused. It
// returns the first refusal.
func flood(t *testing.T, b *Bus, topic, client string, inFlight int) error {
	t.Helper()
	p := b.NewPublisher()
	p.CountFor(client)
	refused := make(chan error, 1)
	payload := []byte(`"` + strings.Repeat("x", 64<<10) + `"`)
	done := func(_ event.Receipt, err error) {
		if err != nil {
			select {
			case refused <- err:
			default:
			}
		}
	}
	for i := range 10_000 {
		if i%inFlight == 0 {
			if err := p.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.PublishAsync(t.Context(), topic, payload, PublishOptions{}, done); err != nil {
			done(event.Receipt{}, err)
		}
		select {
		case err := <-refused:
			if err := p.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			return err
		default:
		}
	}
	t.Fatal("nothing was refused")
	return nil
}

// publishFor publishes an event for a client, and returns the code of the refusal.
func publishFor(t *testing.T, b *Bus, topic, client string, opts PublishOptions) string {
	t.Helper()
	opts.CountFor = client
	payload := []byte(`1`)
	if opts.Tombstone {
		payload = nil
	}
	if _, err := b.Publish(t.Context(), topic, payload, opts); err != nil {
		return codeOf(t, err)
	}
	return ""
}

// A client that fills the disk, or the account, stops at the reserve. Writes that settle
// events go on, and so do removals of keys. When there is room, clients store again.
func TestClientsLeaveTheReserveToTheHub(t *testing.T) {
	t.Parallel()
	const room, reserve = 64 << 20, 32 << 20
	for name, config := range map[string]func(t *testing.T) Config{
		"disk": func(t *testing.T) Config {
			t.Helper()
			return Config{Server: embedSmall(t, room+reserve), Limits: Limits{StorageReserve: reserve, StorageShare: math.MaxInt64}}
		},
		"account": func(t *testing.T) Config {
			t.Helper()
			s := natstest.Run(t)
			limitAccount(t, s, 16<<30) // the hub's own streams reserve some of it
			return Config{URL: s.ClientURL(), Limits: Limits{StorageReserve: 16<<30 - room, StorageShare: math.MaxInt64}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := &counter{}
			cfg := config(t)
			cfg.Observer, cfg.askStorage = seen, 50*time.Millisecond
			cfg.Topics = []topics.Rule{{Pattern: "states", Compaction: true}}
			b := open(t, cfg)
			publishAll(t, b, "orders", numbers(2)...)
			publishAll(t, b, "junk", "0")
			if code := publishFor(t, b, "states", "victim", PublishOptions{Key: "k"}); code != "" {
				t.Fatal(code)
			}
			k := take(t, b, "orders", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
			acked, failed := k.next(), k.next()

			eventually(t, "the store is low", func() bool {
				if err := flood(t, b, "junk", "attacker", 4_096); codeOf(t, err) != event.CodeStorageLow {
					t.Fatalf("the refusal is %v", err)
				}
				info, err := b.Admin().NATS().Info(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				left := info.FileLeft - b.limits.StorageReserve
				if left < -1<<20 {
					t.Fatalf("the client has taken %d bytes of the reserve", -left)
				}
				return left <= min(b.limits.StorageReserve, room)/streams.AgainPart && info.FileLow && !info.MemoryLow
			})
			for topic, opts := range map[string]PublishOptions{"orders": {}, "new": {}, "states": {Key: "k"}, "dlq.orders": {}, "junk": {Delay: time.Minute}} {
				if code := publishFor(t, b, topic, "victim", opts); code != event.CodeStorageLow {
					t.Errorf("a publish of a client to %s: %q", topic, code)
				}
			}
			if _, err := b.streams.Existing(t.Context(), "new"); !errors.Is(err, event.ErrNotFound) {
				t.Errorf("a topic was made for a client: %v", err)
			}
			// An event that waits here takes nothing of the disk of a NATS elsewhere.
			if err := b.NewPublisher().Admit(t.Context(), "orders", []byte("1"), &PublishOptions{CountFor: "victim"}); (err != nil) != (cfg.Server != nil) {
				t.Errorf("an event to publish later gets %v", err)
			}
			if code := publishFor(t, b, "orders", "", PublishOptions{Yield: true}); code != event.CodeStorageLow {
				t.Errorf("a publish that can wait: %q", code)
			}
			if seen.limit("storage_reserve") == 0 {
				t.Error("the limit was not counted")
			}
			// The bus may still count what was in flight as something that is to be stored.
			eventually(t, "a key is removed", func() bool {
				return publishFor(t, b, "states", "victim", PublishOptions{Key: "k", Tombstone: true}) == ""
			})
			if err := acked.Ack(); err != nil {
				t.Error(err)
			}
			if err := failed.Nack("no", 0); err != nil {
				t.Error(err)
			}
			eventually(t, "the events are settled", func() bool { return leasedOf(t, b, "orders") == 0 })
			if n := lettersOf(t, b, "orders"); n != 1 {
				t.Errorf("%d dead letters", n)
			}
			publishAll(t, b, "orders", "3") // by the hub itself

			if _, err := b.Admin().Topic("junk").Purge(t.Context(), PurgeOptions{All: true}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "clients store again", func() bool { return publishFor(t, b, "orders", "victim", PublishOptions{}) == "" })
			if file, _ := b.Admin().NATS().StorageLow(); file {
				t.Error("the store is still low")
			}
		})
	}
}

// While little is left, a client that has stored more than its share stores nothing, and others do.
func TestAClientStoresNoMoreThanItsShare(t *testing.T) {
	t.Parallel()
	const size = 64 << 20
	seen := &counter{}
	b := open(t, Config{Server: embedSmall(t, size), Observer: seen})
	publishAll(t, b, "junk", "0")
	if err := flood(t, b, "junk", "attacker", 16); codeOf(t, err) != event.CodeStorageLow || seen.limit("storage_share") == 0 {
		t.Fatalf("the refusal is %v", err)
	}
	info, err := b.Admin().NATS().Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.FileLow || info.FileLeft < size/streams.ReserveOf {
		t.Errorf("low is %v, %d bytes are left", info.FileLow, info.FileLeft)
	}
	for range 100 {
		if code := publishFor(t, b, "orders", "victim", PublishOptions{}); code != "" {
			t.Fatalf("another client gets %q", code)
		}
	}
	if err := flood(t, b, "orders", "attacker", 1); codeOf(t, err) != event.CodeStorageLow {
		t.Errorf("the client gets %v", err)
	}
}

// Beyond its bytes a second a client is refused, and told for how long. Others are not.
func TestBytesOfAClientAreRationed(t *testing.T) {
	t.Parallel()
	const rate, burst = 200_000, 1 << 20
	seen := &counter{}
	b := open(t, Config{Observer: seen, Limits: Limits{PublishRate: rate, PublishBurst: burst}})
	err := flood(t, b, "junk", "greedy", 16)
	refused, ok := errors.AsType[*event.Error](err)
	if !ok || refused.Code != event.CodeRateLimited || refused.Wait <= 0 || refused.Wait > time.Second || seen.limit("publish_rate") == 0 {
		t.Fatalf("the refusal is %v", err)
	}
	for _, client := range []string{"other", ""} {
		if code := publishFor(t, b, "junk", client, PublishOptions{}); code != "" {
			t.Errorf("%q gets %q", client, code)
		}
	}
	<-time.After(refused.Wait)
	if code := publishFor(t, b, "junk", "greedy", PublishOptions{}); code != "" {
		t.Errorf("after the wait, the client gets %q", code)
	}
}

// A NATS that says nothing of its bounds refuses events when it is full: clients are told the same,
// and the hub does not take it for a mistake of the event.
func TestAFullNATSIsNoFaultOfTheEvent(t *testing.T) {
	t.Parallel()
	s := natstest.Run(t)
	limitAccount(t, s, 16<<30)
	b := open(t, Config{URL: s.ClientURL(), Limits: Limits{StorageReserve: 1, StorageShare: math.MaxInt64}})
	publishAll(t, b, "orders", "1")
	limitAccount(t, s, 1)
	_, err := b.Publish(t.Context(), "orders", []byte(`"`+strings.Repeat("x", 1000)+`"`), PublishOptions{})
	if codeOf(t, err) != event.CodeStorageLow || Refused(err) {
		t.Errorf("the refusal is %v", err)
	}
	if file, _ := b.Admin().NATS().StorageLow(); !file {
		t.Error("the store is not low")
	}
	if _, err := b.Publish(t.Context(), "other", []byte("1"), PublishOptions{}); codeOf(t, err) != event.CodeStorageLow {
		t.Errorf("a new topic gets %v", err)
	}
}
