package facade_test

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"testing"

	"eventhub/jetstream"
)

// BenchmarkSnap reads latest records over HTTP: of one key, of one that has not changed, and pages
// of 1,000; the same calls of the bus show what HTTP adds. Compare within one run only.
func BenchmarkSnap(b *testing.B) {
	const keys, topic = 20_000, "kept.bench"
	bus := openBus(b, func(c *jetstream.Config) { c.Topics = keptRules })
	hub := startHub(b, bus)
	pub := bus.NewPublisher()
	var stored sync.WaitGroup
	for i := range keys {
		stored.Add(1)
		err := pub.PublishAsync(b.Context(), topic, fmt.Appendf(nil, `{"pid":%d,"host":"some.host","status":"running"}`, i),
			jetstream.PublishOptions{Key: strconv.Itoa(i)}, func(_ jetstream.Receipt, err error) {
				defer stored.Done()
				if err != nil {
					b.Error(err)
				}
			})
		if err != nil {
			b.Fatal(err)
		}
	}
	stored.Wait()
	// Only consistent reads have what was just confirmed.
	eventually(b, "all keys can be read", func() bool {
		page, err := bus.Keys(topic).Page(b.Context(), keys-1, 1)
		return err == nil && len(page) == 1
	})
	ask := func(b *testing.B, path, tag string, status int) (got string) {
		b.Helper()
		req, err := http.NewRequestWithContext(b.Context(), http.MethodGet, hub.http+"/snap/"+topic+path, nil)
		if err != nil {
			b.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+testToken)
		req.Header.Set("If-None-Match", tag)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != status {
			b.Fatal(res.Status, err)
		}
		return res.Header.Get("ETag")
	}
	b.Run("key", func(b *testing.B) {
		for b.Loop() {
			ask(b, "/7", "", http.StatusOK)
		}
	})
	b.Run("key/unchanged", func(b *testing.B) {
		tag := ask(b, "/7", "", http.StatusOK)
		for b.Loop() {
			ask(b, "/7", tag, http.StatusNotModified)
		}
	})
	b.Run("key/bus", func(b *testing.B) {
		for b.Loop() {
			if _, err := bus.Keys(topic).Get(b.Context(), "7"); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, offset := range []int{0, 9_000, 15_000} {
		b.Run("page/"+strconv.Itoa(offset), func(b *testing.B) {
			for b.Loop() {
				ask(b, "?limit=1000&offset="+strconv.Itoa(offset), "", http.StatusOK)
			}
		})
		b.Run("page/"+strconv.Itoa(offset)+"/bus", func(b *testing.B) {
			for b.Loop() {
				if page, err := bus.Keys(topic).Page(b.Context(), offset, 1000); err != nil || len(page) != 1000 {
					b.Fatal(len(page), err)
				}
			}
		})
	}
	b.Run("page/0/consistent", func(b *testing.B) {
		for b.Loop() {
			ask(b, "?limit=1000&consistent=true", "", http.StatusOK)
		}
	})
}
