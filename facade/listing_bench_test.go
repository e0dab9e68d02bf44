package facade_test

import (
	"bytes"
	"flag"
	"io"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

var listingKeys = flag.Int("listing.keys", 20_000, "keys of BenchmarkListing")

// BenchmarkListing lists all keys over HTTP, 1,000 a page, and beside it watches all of them
// natively until they have come (WatchAll of the KV API of nats.go), in turns, from one server
// process. The aim is 1.3 of the time of WatchAll.
func BenchmarkListing(b *testing.B) {
	const topic = "kept.bench"
	srv := natstest.Start(b)
	bus := openBus(b, func(c *jetstream.Config) { c.URL, c.Topics = srv.URL(), keptRules })
	hub := startHub(b, bus)
	nc, err := nats.Connect(srv.URL())
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		b.Fatal(err)
	}
	// makes the topic
	if _, err := bus.Publish(b.Context(), topic, []byte("1"), jetstream.PublishOptions{Key: "k0"}); err != nil {
		b.Fatal(err)
	}
	payload := []byte(`{"pad":"` + string(bytes.Repeat([]byte("x"), 118)) + `"}`) // 128 bytes
	for i := range *listingKeys {
		if _, err := js.PublishAsync("keyed.k"+strconv.Itoa(i)+"."+topic, payload); err != nil {
			b.Fatal(err)
		}
		if i%2_000 == 1_999 {
			<-js.PublishAsyncComplete()
		}
	}
	<-js.PublishAsyncComplete()
	kv, err := js.KeyValue(b.Context(), "latest_kept_bench")
	if err != nil {
		b.Fatal(err)
	}
	for filled := time.Now().Add(time.Minute); ; {
		status, err := kv.Status(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if status.Values() == uint64(*listingKeys) {
			break
		}
		if time.Now().After(filled) {
			b.Fatalf("the bucket has %d keys", status.Values())
		}
		<-time.After(10 * time.Millisecond)
	}
	watch := func() time.Duration {
		began := time.Now()
		w, err := kv.WatchAll(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for e := range w.Updates() {
			if e == nil {
				break
			}
			n++
		}
		took := time.Since(began)
		if err := w.Stop(); err != nil || n != *listingKeys {
			b.Fatal(n, err)
		}
		return took
	}
	list := func() time.Duration {
		began := time.Now()
		n := 0
		for next, body := "", new(bytes.Buffer); ; {
			req, err := http.NewRequestWithContext(b.Context(), http.MethodGet, hub.http+"/snap/"+topic+"?limit=1000&next="+next, nil)
			if err != nil {
				b.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+testToken)
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				b.Fatal(err)
			}
			body.Reset()
			_, err = io.Copy(body, res.Body)
			_ = res.Body.Close()
			if err != nil || res.StatusCode != http.StatusOK {
				b.Fatal(res.Status, err)
			}
			// a client decodes the items as it likes: next comes last
			n += bytes.Count(body.Bytes(), []byte(`{"id":"`))
			_, rest, more := bytes.Cut(body.Bytes()[max(0, body.Len()-200):], []byte(`],"next":"`))
			if !more {
				break
			}
			next = string(rest[:bytes.IndexByte(rest, '"')])
		}
		if n != *listingKeys {
			b.Fatalf("%d keys came", n)
		}
		return time.Since(began)
	}
	watch()
	list()
	var watched, listed, ratios []float64
	for b.Loop() {
		w, l := watch().Seconds(), list().Seconds()
		watched, listed, ratios = append(watched, w*1e3), append(listed, l*1e3), append(ratios, l/w)
	}
	middle := func(all []float64) float64 {
		slices.Sort(all)
		return all[len(all)/2]
	}
	b.ReportMetric(middle(watched), "watch-ms")
	b.ReportMetric(middle(listed), "list-ms")
	b.ReportMetric(middle(ratios), "ratio")
	b.ReportMetric(ratios[0], "ratio-min")
	b.ReportMetric(ratios[len(ratios)-1], "ratio-max")
}
