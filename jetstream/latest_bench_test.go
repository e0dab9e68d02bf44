package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// benchKeys returns the number of keys of BenchmarkLatest.
func benchKeys() int {
	if testing.Short() {
		return 20_000
	}
	return 1_000_000
}

// BenchmarkLatest reads a bucket of 1,000,000 keys that a native publisher filled, or of 20,000
// with -short. Beside each reading is the same through the KV API of nats.go. In the bucket of the
// second round, a quarter of the keys changed since.
func BenchmarkLatest(b *testing.B) {
	url := natsServer(b)
	bus := open(b, Config{URL: url, Topics: compactedRules})
	const topic = "state.bench"
	set(b, bus, topic, "first", "1") // makes the topic
	fillNatively(b, url, topic, 0, benchKeys())
	filled(b, bus, topic, "last", set(b, bus, topic, "last", "1"))
	b.Run("once", func(b *testing.B) { benchmarkLatest(b, bus, url, topic) })
	fillNatively(b, url, topic, benchKeys()/4, benchKeys()/2)
	filled(b, bus, topic, "last", set(b, bus, topic, "last", "1"))
	b.Run("changed", func(b *testing.B) { benchmarkLatest(b, bus, url, topic) })
}

func fillNatively(b *testing.B, url, topic string, from, to int) {
	b.Helper()
	_, js := nativeConn(b, url)
	for i := from; i < to; i++ {
		if _, err := js.PublishAsync("keyed.k"+strconv.Itoa(i)+"."+topic, []byte(`{"state":"running","since":1795219692090,"host":"local"}`)); err != nil {
			b.Fatal(err)
		}
		if i%2_000 == 1_999 {
			<-js.PublishAsyncComplete()
		}
	}
	<-js.PublishAsyncComplete()
}

// watchNatively reads a bucket from a watch until it has said all.
func watchNatively(b *testing.B, watch func(context.Context, ...natsjs.WatchOpt) (natsjs.KeyWatcher, error)) {
	b.Helper()
	w, err := watch(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	for e := range w.Updates() {
		if e == nil {
			break
		}
	}
	if err := w.Stop(); err != nil {
		b.Fatal(err)
	}
}

func benchmarkLatest(b *testing.B, bus *Bus, url, topic string) {
	b.Helper()
	nc, js := nativeConn(b, url)
	kv, err := js.KeyValue(b.Context(), bucketName(topic))
	if err != nil {
		b.Fatal(err)
	}
	keys := make([]string, 1_000)
	for i := range keys {
		keys[i] = "k" + strconv.Itoa(rand.IntN(benchKeys()))
	}
	turn := 0
	some := func() string {
		turn++
		return keys[turn%len(keys)]
	}
	check := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	for _, bench := range []struct {
		name string
		f    func()
	}{
		{"thousand/bus", func() {
			_, err := bus.Keys(topic).GetMany(b.Context(), keys)
			check(err)
		}},
		{"thousand/kv", func() {
			for _, key := range keys {
				_, err := kv.Get(b.Context(), key)
				check(err)
			}
		}},
		{"one/bus", func() {
			_, err := bus.Keys(topic).Get(b.Context(), some())
			check(err)
		}},
		{"one/leader", func() {
			// That of nats.go asks any replica where it can; this is what it does where it cannot.
			m, err := nc.Request("$JS.API.STREAM.MSG.GET."+objectName(topic), []byte(`{"last_by_subj":"keyed.`+some()+"."+topic+`"}`), wait)
			check(err)
			var answer struct {
				Message struct {
					Subject  string    `json:"subject"`
					Sequence uint64    `json:"seq"`
					Header   []byte    `json:"hdrs"`
					Data     []byte    `json:"data"`
					Time     time.Time `json:"time"`
				} `json:"message"`
			}
			check(json.Unmarshal(m.Data, &answer))
		}},
		{"all/bus", func() {
			check(bus.Keys(topic).Each(b.Context(), func(*event.Event) error { return nil }))
		}},
		{"all/kv", func() { watchNatively(b, kv.WatchAll) }},
		{"watch/bus", func() {
			stop := errors.New("stop")
			err := bus.Keys(topic).Watch(b.Context(), nil, func(e *event.Event) error {
				if e == nil {
					return stop
				}
				return nil
			})
			if !errors.Is(err, stop) {
				b.Fatal(err)
			}
		}},
		{"watch/kv", func() { watchNatively(b, kv.WatchAll) }},
		{"page/bus", func() {
			_, err := bus.Keys(topic).Page(b.Context(), rand.IntN(benchKeys()-1_000), 1_000)
			check(err)
		}},
		{"first_page/bus", func() {
			_, err := bus.Keys(topic).Page(b.Context(), 0, 100)
			check(err)
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			for b.Loop() {
				bench.f()
			}
		})
	}
}
