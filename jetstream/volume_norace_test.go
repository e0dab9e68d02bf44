//go:build !race

package jetstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats-server/v2/server/archive"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// These tests reach bounds that only thousands of entries reach, or measure CPU time. The race
// detector makes them take ten times as long; smaller tests run the same code with it.

// Deep pages may repeat an event, and leave none out.
func TestDeepPagesLeaveNothingOut(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	want := fill(t, b, "state.a", 14_000, 1_000_000, rand.New(rand.NewPCG(3, 4)))
	var got []string
	seen := make(map[string]bool)
	for _, key := range pages(t, b, "state.a", 1_000) {
		if !seen[key] {
			got = append(got, key)
		}
		seen[key] = true
	}
	if len(want) < 10_000 || !slices.Equal(got, want) {
		t.Errorf("got %d keys, want %d", len(got), len(want))
	}
}

// A page or a listing looks at a bounded number of removed keys. A listing goes on behind them.
func TestRemovedKeysAreBoundedPerPage(t *testing.T) {
	t.Parallel()
	const removed = 20_000 + 5_000
	b := open(t, Config{Topics: compactedRules})
	set(t, b, "state.a", "first", "1")
	p := b.NewPublisher()
	for i := range removed {
		if err := p.PublishAsync(t.Context(), "state.a", nil, PublishOptions{Key: strconv.Itoa(i), Tombstone: true}, func(_ event.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	filled(t, b, "state.a", "last", set(t, b, "state.a", "last", "1"))
	page, err := b.Keys("state.a").Page(t.Context(), 0, 1)
	if err != nil || len(page) != 1 || page[0].Key != "last" {
		t.Errorf("the newest key: %v, %v", page, err)
	}
	_, err = b.Keys("state.a").Page(t.Context(), 0, 2)
	if codeOf(t, err) != event.CodeOverloaded || !strings.Contains(err.Error(), "next") {
		t.Errorf("a page behind removed keys: %v", err)
	}
	var got []string
	pages := 0
	for next := ""; ; pages++ {
		l := list(t, b, "state.a", next, 1)
		for _, e := range l.Events {
			got = append(got, e.Key)
		}
		if next = l.Next; next == "" {
			break
		}
	}
	if !slices.Equal(got, []string{"first", "last"}) || pages < 1 {
		t.Errorf("got %q on %d pages", got, pages+1)
	}
}

// A page of a list ends after so many bytes, however few of the letters it may show.
func TestAPageOfLettersReadsFewBytes(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	payload := append(append([]byte{'"'}, bytes.Repeat([]byte("x"), 250_000)...), '"')
	letterOf(t, b, "large", "g", payload)
	newest, err := b.History("large").Newest(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	const letters = letterBytes/250_000 + 5
	for i := range letters - 1 {
		if err := b.Group("large", "g"+strconv.Itoa(i)).DeadLetter(t.Context(), newest[0], "broken", 1); err != nil {
			t.Fatal(err)
		}
	}
	seen, pages := 0, 0
	for next := ""; pages == 0 || next != ""; pages++ {
		page, err := b.Admin().DeadLetters().List(t.Context(), LetterFilter{}, next, 1000, func(*Letter) bool {
			seen++
			return false
		})
		if err != nil || len(page.Letters) != 0 {
			t.Fatal(page, err)
		}
		if most := letterBytes/250_000 + 1; pages == 0 && seen > most {
			t.Errorf("the first page looked at %d letters of 0.25 MB, want at most %d", seen, most)
		}
		next = page.Next
	}
	if seen != letters || pages != 2 {
		t.Errorf("%d letters on %d pages, want %d on 2", seen, pages, letters)
	}
}

// Searches for ids that no event has cost little: the events are read once, and not once a search.
func TestSearchesForUnknownIDsCostLittle(t *testing.T) { // it measures CPU
	const n, searches, most = 100_000, 50, 150 * time.Millisecond
	b := open(t, Config{})
	ids := fillWithIDs(t, b, "many", n)
	for name, id := range map[string]func() string{
		"uuid":  func() string { return uuid.Must(uuid.NewV7()).String() },
		"other": uuid.NewString,
	} {
		t.Run(name, func(t *testing.T) {
			was := used(t)
			for i := range searches {
				began := used(t)
				wanted := id()
				if err := patiently(func() error { return searchFor(t, b, "many", wanted, "c") }); !unknownID(err) {
					t.Fatal(err)
				}
				if i < 2 {
					t.Logf("search %d costs %v of CPU", i, used(t)-began)
				}
			}
			if cost := (used(t) - was) / searches; cost > most {
				t.Errorf("a search costs %v on average, want at most %v", cost, most)
			}
		})
	}
	for _, i := range []int{0, n / 2, n - 1} {
		got := 0
		err := patiently(func() error {
			return b.History("many").Scan(t.Context(), ScanOptions{From: FromAfterID(ids[i]), Limit: n}, func(*event.Event) error { got++; return nil })
		})
		if err != nil || got != n-1-i {
			t.Errorf("%d events after event %d, %v; want %d", got, i, err, n-1-i)
		}
	}
	if n := consumersOf(t, b, "many"); n != 0 {
		t.Errorf("the searches left %d consumers", n)
	}
}

// The first search for an id that no event has costs little, too, where this hub has published the
// events: it reads none of them.
func TestFirstSearchOfPublishedIDsCostsLittle(t *testing.T) { // it measures CPU
	const n, most = 100_000, 150 * time.Millisecond
	b := open(t, Config{})
	p := b.NewPublisher()
	ids := make([]string, n)
	for i := range ids {
		ids[i] = uuid.NewString()
		if err := p.PublishAsync(t.Context(), "many", []byte(`{"n":1}`), PublishOptions{ID: ids[i]}, func(_ event.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		began := used(t)
		if err := searchFor(t, b, "many", uuid.NewString(), "c"); !unknownID(err) {
			t.Fatal(err)
		}
		cost := used(t) - began
		t.Logf("search %d costs %v of CPU", i, cost)
		if cost > most {
			t.Errorf("search %d costs %v, want at most %v", i, cost, most)
		}
	}
	for _, i := range []int{0, n / 2, n - 1} {
		got := 0
		err := patiently(func() error {
			return b.History("many").Scan(t.Context(), ScanOptions{From: FromAfterID(ids[i]), Limit: n}, func(*event.Event) error { got++; return nil })
		})
		if err != nil || got != n-1-i {
			t.Errorf("%d events after event %d, %v; want %d", got, i, err, n-1-i)
		}
	}
}

// While a bucket is copied, each of its keys is overwritten: what the snapshot then lacks is in the
// part that is read after it. The bucket is larger than what is read ahead.
func TestCopyOfABucketThatIsOverwritten(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const size = 16 << 10
	const keys = (snapshotAhead + 4*snapshotWindow) * snapshotChunk / size
	if _, err := b.conn.JS.CreateKeyValue(t.Context(), natsjs.KeyValueConfig{Bucket: "busy"}); err != nil {
		t.Fatal(err)
	}
	info, err := b.conn.FindStream(t.Context(), "KV_busy")
	if err != nil {
		t.Fatal(err)
	}
	put := func(value func() []byte) {
		for key := range keys {
			if _, err := b.conn.JS.PublishAsync("$KV.busy."+strconv.Itoa(key), value()); err != nil {
				t.Error(err)
				return
			}
			if key%500 == 0 {
				<-b.conn.JS.PublishAsyncComplete()
			}
		}
		<-b.conn.JS.PublishAsyncComplete()
	}
	old, newest := 0, make(map[string]string)
	for try := 1; ; try++ {
		random := rand.New(rand.NewPCG(1, uint64(try))) // bytes that cannot be compressed
		put(func() []byte {
			value := []byte("old")
			for len(value) < size {
				value = binary.LittleEndian.AppendUint64(value, random.Uint64())
			}
			return value
		})
		var file bytes.Buffer
		begun := false
		w := writerFunc(func(p []byte) (int, error) {
			if !begun {
				begun = true
				put(func() []byte { return []byte("new") })
			}
			return file.Write(p)
		})
		_, err := b.backups.copyStream(t.Context(), &copiedStream{name: "KV_busy", info: info, grows: true}, nil, time.Time{}, w, func(int, int) {})
		if errors.Is(err, errSnapshotCut) && try < snapshotTries {
			continue // on a slow machine
		}
		if err != nil {
			t.Fatal(err)
		}
		in := archive.NewReader(s2.NewReader(&file))
		if _, err := readState(in); err != nil {
			t.Fatal(err)
		}
		if err := copyMessages(in, func(hdr archive.Header, body []byte) error {
			value := string(body[hdr.HeaderSize:][:3])
			if newest[hdr.Name] = value; value == "old" {
				old++
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		break
	}
	for key := range keys {
		if value := newest["$KV.busy."+strconv.Itoa(key)]; value != "new" {
			t.Fatalf("key %d is %q", key, value)
		}
	}
	if old == 0 || old == keys {
		t.Errorf("the snapshot has %d of %d old values: it was not overtaken", old, keys)
	}
}

func TestAfterIDOnABusyTopic(t *testing.T) {
	t.Parallel()
	b := open(t, Config{MemoryStorage: true})
	const n = 105_000
	var mu sync.Mutex
	ids := make([]string, n)
	p := b.NewPublisher()
	for i := range n {
		if err := p.PublishAsync(t.Context(), "busy", []byte("1"), PublishOptions{}, func(r event.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			ids[i] = r.ID
			mu.Unlock()
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := 0
	if err := b.History("busy").Scan(t.Context(), ScanOptions{From: FromAfterID(ids[n-10])}, func(*event.Event) error { got++; return nil }); err != nil || got != 9 {
		t.Errorf("%d events, %v", got, err)
	}
}

// TestListingOfLargeEntries has entries that do not fit into what is fetched together, alone or
// with others.
func TestListingOfLargeEntries(t *testing.T) {
	t.Parallel()
	const topic, keys = "state.large", 24
	b := open(t, Config{Topics: compactedRules, Limits: Limits{MaxPayload: 3 << 20}})
	payload := `"` + strings.Repeat("x", 3<<20-2) + `"`
	var last event.Receipt
	for i := range keys {
		last = set(t, b, topic, strconv.Itoa(i), payload)
	}
	filled(t, b, topic, strconv.Itoa(keys-1), last)
	for _, limit := range []int{1, 5, 1_000} {
		found := listAll(t, b, topic, limit)
		for i := range keys {
			if found[strconv.Itoa(i)] != 1 {
				t.Errorf("limit %d: %d came %d times", limit, i, found[strconv.Itoa(i)])
			}
		}
	}
}
