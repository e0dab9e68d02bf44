package jetstream

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// listWalks is larger for the long form, as in RELIABILITY.md.
var listWalks = flag.Int("listing.walks", 4, "listings on a cluster whose leaders change")

// list returns a page. It asks again while the store does not answer.
func list(tb testing.TB, b *Bus, topic, next string, limit int) Listing {
	tb.Helper()
	for deadline := time.Now().Add(slow); ; {
		l, err := b.Keys(topic).List(tb.Context(), ListOptions{Next: next, Limit: limit})
		if err == nil {
			return l
		}
		if known, ok := errors.AsType[*event.Error](err); ok && known.Code != event.CodeInternal || time.Now().After(deadline) {
			tb.Fatal(err)
		}
	}
}

// listAll walks all pages of a size, and returns the keys with how often they came.
func listAll(tb testing.TB, b *Bus, topic string, limit int) map[string]int {
	tb.Helper()
	found := make(map[string]int)
	for next := ""; ; {
		l := list(tb, b, topic, next, limit)
		for _, e := range l.Events {
			found[e.Key]++
		}
		if next = l.Next; next == "" {
			return found
		}
	}
}

// TestListingOnACluster walks over three hubs while keys are written and removed, and leaders
// change: those of the topic, of its bucket, and of the records of the pages.
func TestListingOnACluster(t *testing.T) {
	t.Parallel()
	const topic, steady, wild = "state.listed", 200, 100
	c := startProcesses(t, 3)
	var hubs []*Bus
	for _, n := range c.nodes {
		hubs = append(hubs, openRemote(t, Config{URL: n.URL(), Replicas: 3, Topics: compactedRules}))
	}
	var last event.Receipt
	for i := range steady {
		last = set(t, hubs[0], topic, strconv.Itoa(i), "0")
	}
	filled(t, hubs[0], topic, strconv.Itoa(steady-1), last)
	info, err := hubs[0].reads.Compacted(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	streams := []string{info.Stream.Name, info.Bucket.Stream, "KV_eventhub_listings"}
	listAll(t, hubs[0], topic, 100) // makes the bucket of records
	c.healthy(streams...)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		for n := 1; ctx.Err() == nil; n++ {
			opts := PublishOptions{Key: strconv.Itoa(rand.IntN(steady))}
			if n%3 == 0 {
				opts = PublishOptions{Key: "wild" + strconv.Itoa(rand.IntN(wild)), Tombstone: rand.IntN(2) == 0}
			}
			payload := []byte("1")
			if opts.Tombstone {
				payload = nil
			}
			// whether it was stored is no matter
			_, _ = hubs[n%3].Publish(ctx, topic, payload, opts)
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			ask, done := context.WithTimeout(ctx, time.Second)
			// one that has no leader just now cannot
			_ = c.stepDown(ask, streams[rand.IntN(len(streams))])
			done()
			select {
			case <-time.After(time.Duration(rand.IntN(300)) * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	for walk := range *listWalks {
		found := make(map[string]int)
		for next := ""; ; {
			l := list(t, hubs[rand.IntN(3)], topic, next, 1+rand.IntN(60))
			for _, e := range l.Events {
				found[e.Key]++
			}
			if next = l.Next; next == "" {
				break
			}
		}
		missing, twice := 0, 0
		for i := range steady {
			if found[strconv.Itoa(i)] == 0 {
				missing++
			}
		}
		for _, n := range found {
			if n > 1 {
				twice++
			}
		}
		if missing > 0 || twice > 0 {
			t.Errorf("walk %d: %d keys are missing, %d came twice", walk, missing, twice)
		}
	}
}

// readersOf are the names of the consumers on the bucket of a topic.
func readersOf(tb testing.TB, js natsjs.JetStream, topic string) map[string]bool {
	tb.Helper()
	s, err := js.Stream(tb.Context(), streams.NewBucket(topic).Stream)
	if err != nil {
		tb.Fatal(err)
	}
	names := make(map[string]bool)
	for name := range s.ConsumerNames(tb.Context()).Name() {
		names[name] = true
	}
	return names
}

// fillListed makes keys 0 to n-1 of a topic.
func fillListed(tb testing.TB, b *Bus, topic string, n int) {
	tb.Helper()
	p := b.NewPublisher()
	for i := range n - 1 {
		if err := p.PublishAsync(tb.Context(), topic, []byte("1"), PublishOptions{Key: strconv.Itoa(i)}, func(_ event.Receipt, err error) {
			if err != nil {
				tb.Error(err)
			}
		}); err != nil {
			tb.Fatal(err)
		}
	}
	if err := p.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	filled(tb, b, topic, strconv.Itoa(n-1), set(tb, b, topic, strconv.Itoa(n-1), "1"))
}

// TestListingReadsAhead wants one reader for a listing from its second page on; another one where
// that is lost.
func TestListingReadsAhead(t *testing.T) {
	t.Parallel()
	const topic, keys, limit = "state.ahead", 6_000, 500
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	fillListed(t, b, topic, keys)
	_, js := nativeConn(t, url)
	found := make(map[string]int)
	used := make(map[string]bool)
	page := 0
	for next := ""; ; page++ {
		l := list(t, b, topic, next, limit)
		for _, e := range l.Events {
			found[e.Key]++
		}
		if next = l.Next; next == "" {
			break
		}
		if next != "" && len(l.Events) != limit {
			t.Errorf("page %d has %d events, want %d", page, len(l.Events), limit)
		}
		now := readersOf(t, js, topic)
		if len(now) > 1 {
			t.Errorf("page %d leaves %d readers", page, len(now))
		}
		maps.Copy(used, now)
		if page == 5 { // what it has read ahead is lost along with it
			for name := range now {
				if err := js.DeleteConsumer(t.Context(), streams.NewBucket(topic).Stream, name); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	// a reader does not know that the last page is the last
	if len(found) != keys || page != keys/limit || len(used) != 2 {
		t.Errorf("%d keys on %d pages by %d readers; want %d, %d and 2", len(found), page+1, len(used), keys, keys/limit+1)
	}
	eventually(t, "the readers are gone", func() bool { return len(readersOf(t, js, topic)) == 0 })
}

// TestListingsBeyondTheReaders has more listings at a time than readers.
func TestListingsBeyondTheReaders(t *testing.T) {
	t.Parallel()
	const topic, keys, listings, limit = "state.many", 1_000, 12, 50
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules, Limits: Limits{ListingReaders: 3}})
	fillListed(t, b, topic, keys)
	_, js := nativeConn(t, url)
	var wg sync.WaitGroup
	for range listings {
		wg.Go(func() {
			found := listAll(t, b, topic, limit)
			if len(found) != keys {
				t.Errorf("%d keys came", len(found))
			}
		})
	}
	most := 0
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(5 * time.Millisecond):
			most = max(most, len(readersOf(t, js, topic)))
		}
	}
	if most > 3 {
		t.Errorf("%d readers at a time", most)
	}
}

// TestRecordsOfListings wants the records of a listing gone some time after its end, and those of
// others left.
func TestRecordsOfListings(t *testing.T) {
	t.Parallel()
	const topic = "state.records"
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	fillListed(t, b, topic, 100)
	_, js := nativeConn(t, url)
	records := func() uint64 {
		s, err := js.Stream(t.Context(), "KV_eventhub_listings")
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.Msgs
	}
	left := list(t, b, topic, list(t, b, topic, "", 10).Next, 10)
	listAll(t, b, topic, 10)
	if n := records(); n < 2+9 {
		t.Errorf("there are %d records, want 11", n)
	}
	if n := b.reads.ForgetListings(time.Now()); n != 1 {
		t.Errorf("%d listings have ended", n)
	}
	if n := records(); n != 2 {
		t.Errorf("there are %d records, want 2", n)
	}
	set(t, b, topic, "3", "2") // it was on a page: the record tells
	for next := left.Next; next != ""; {
		l := list(t, b, topic, next, 10)
		for _, e := range l.Events {
			if e.Key == "3" {
				t.Error("a key comes again")
			}
		}
		next = l.Next
	}
	n := records()
	set(t, b, "state.one", "k", "1")
	listAll(t, b, "state.one", 10)
	if records() != n {
		t.Error("a listing of one page leaves records")
	}
}

func TestListingBounds(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	for _, limit := range []int{-1, 0, 1_001} {
		if _, err := b.Keys("state.a").List(t.Context(), ListOptions{Limit: limit}); err == nil || !strings.Contains(err.Error(), fmt.Sprint("limit is ", limit)) {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
	if l, err := b.Keys("state.a").List(t.Context(), ListOptions{Limit: 1}); err != nil || len(l.Events) > 0 || l.Next != "" {
		t.Errorf("a topic that does not exist: %+v, %v", l, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	set(t, b, "state.a", "k", "1")
	if _, err := b.Keys("state.a").List(ctx, ListOptions{Limit: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("after its end: %v", err)
	}
}
