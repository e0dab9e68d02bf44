package jetstream

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"eventhub/jetstream/event"
)

// pages reads all pages of a size.
func pages(tb testing.TB, b *Bus, topic string, limit int) []string {
	tb.Helper()
	var keys []string
	for offset := 0; ; offset += limit {
		page, err := b.Keys(topic).Page(tb.Context(), offset, limit)
		if err != nil {
			tb.Fatal(err)
		}
		for _, e := range page {
			keys = append(keys, e.Key)
		}
		if len(page) < limit {
			return keys
		}
	}
}

// model is what a bucket should hold: live keys, the newest first.
func model(history []string, removed map[string]bool) []string {
	var keys []string
	seen := make(map[string]bool)
	for _, key := range slices.Backward(history) {
		if !seen[key] && !removed[key] {
			keys = append(keys, key)
		}
		seen[key] = true
	}
	return keys
}

// fill publishes to random keys, and removes some.
func fill(tb testing.TB, b *Bus, topic string, events, keys int, rnd *rand.Rand) []string {
	tb.Helper()
	var history []string
	removed := make(map[string]bool)
	p := b.NewPublisher()
	for range events {
		key := strconv.Itoa(rnd.IntN(keys))
		opts := PublishOptions{Key: key, Tombstone: rnd.IntN(4) == 0}
		payload := []byte("1")
		if opts.Tombstone {
			payload = nil
		}
		if err := p.PublishAsync(tb.Context(), topic, payload, opts, func(_ event.Receipt, err error) {
			if err != nil {
				tb.Error(err)
			}
		}); err != nil {
			tb.Fatal(err)
		}
		history = append(history, key)
		removed[key] = opts.Tombstone
	}
	if err := p.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	filled(tb, b, topic, "last", set(tb, b, topic, "last", "1"))
	return model(append(history, "last"), removed)
}

func TestPagesLeaveOutWhatWasRemoved(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	rnd := rand.New(rand.NewPCG(1, 2))
	want := fill(t, b, "state.a", 2_400, 2_000, rnd)
	for _, limit := range []int{40, 100, 999, 1_000} {
		if got := pages(t, b, "state.a", limit); !slices.Equal(got, want) {
			t.Errorf("pages of %d: got %d keys, want %d", limit, len(got), len(want))
		}
	}
	for range 30 {
		offset, limit := rnd.IntN(len(want)+50), 1+rnd.IntN(300)
		page, err := b.Keys("state.a").Page(t.Context(), offset, limit)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range page {
			got = append(got, e.Key)
		}
		if end := min(offset+limit, len(want)); !slices.Equal(got, want[min(offset, end):end]) {
			t.Errorf("offset %d, limit %d: got %d keys", offset, limit, len(got))
		}
	}
	var each []string
	if err := b.Keys("state.a").Each(t.Context(), func(e *event.Event) error {
		if !e.Tombstone {
			each = append(each, e.Key)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if slices.Reverse(each); !slices.Equal(each, want) {
		t.Errorf("Each: got %d keys, want %d", len(each), len(want))
	}
}

// busy makes keys "0" to keys-1 of state.a, and writes all of them again and again, until it is
// stopped.
func busy(t *testing.T, b *Bus, keys int, payload string) (stop func()) {
	t.Helper()
	p := b.NewPublisher()
	write := func(i int) {
		if err := p.PublishAsync(t.Context(), "state.a", []byte(payload), PublishOptions{Key: strconv.Itoa(i)}, func(_ event.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Error(err)
		}
	}
	for i := range keys {
		write(i)
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	last := strconv.Itoa(keys - 1)
	filled(t, b, "state.a", last, set(t, b, "state.a", last, "1"))
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		rnd := rand.New(rand.NewPCG(5, 6))
		for unconfirmed := 0; ; unconfirmed += len(payload) {
			if unconfirmed > 8<<20 {
				_ = p.Flush(t.Context()) // what failed is told to write
				unconfirmed = 0
			}
			select {
			case <-end:
				return
			default:
				write(rnd.IntN(keys))
			}
		}
	}()
	return func() {
		close(end)
		<-ended
		if err := p.Flush(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestEachBesideWriters wants every key in every walk. Few keys are read by direct gets, many
// through a consumer.
func TestEachBesideWriters(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ keys, walks int }{{40, 10}, {3_000, 2}} {
		t.Run(strconv.Itoa(c.keys), func(t *testing.T) {
			t.Parallel()
			b := open(t, Config{Topics: compactedRules})
			defer busy(t, b, c.keys, "1")()
			for range c.walks {
				seen := make(map[string]uint64)
				if err := b.Keys("state.a").Each(t.Context(), func(e *event.Event) error {
					if e.Sequence <= seen[e.Key] {
						t.Errorf("key %s: event %d comes after %d", e.Key, e.Sequence, seen[e.Key])
					}
					seen[e.Key] = e.Sequence
					return nil
				}); err != nil {
					t.Fatal(err)
				}
				if len(seen) != c.keys {
					t.Fatalf("a walk gives %d keys, %d are there", len(seen), c.keys)
				}
			}
		})
	}
}

// TestGetManyBesideWriters asks for more than one direct get holds, which is 8 MiB.
func TestGetManyBesideWriters(t *testing.T) {
	t.Parallel()
	const keys = 24
	b := open(t, Config{Topics: compactedRules})
	defer busy(t, b, keys, `"`+strings.Repeat("x", 16<<20/keys)+`"`)()
	for range 3 {
		found, err := b.Keys("state.a").GetMany(t.Context(), numbers(keys))
		if err != nil {
			t.Fatal(err)
		}
		if len(found) != keys {
			t.Fatalf("%d keys are found, %d are there", len(found), keys)
		}
	}
}

func TestPageBounds(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	filled(t, b, "state.a", "k", set(t, b, "state.a", "k", "1"))
	for _, c := range []struct{ offset, limit int }{{-1, 1}, {0, 0}, {0, 1_001}} {
		_, err := b.Keys("state.a").Page(t.Context(), c.offset, c.limit)
		if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadOptions {
			t.Errorf("%+v: %v", c, err)
		}
	}
	publishAll(t, b, "plain", "1")
	_, err := b.Keys("plain").Page(t.Context(), 0, 1)
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic {
		t.Errorf("a topic that is not compacted: %v", err)
	}
	stop := errors.New("stop")
	if err := b.Keys("state.a").Each(t.Context(), func(*event.Event) error { return stop }); err != stop { //nolint:errorlint // it is returned as it is
		t.Errorf("got %v", err)
	}
}

// TestLatestPageIsBoundedInBytes has more in a page than it may hold: it ends early, and the next
// one goes on there.
func TestLatestPageIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	const keys = 40
	payload := `"` + strings.Repeat("x", 1<<20-2) + `"`
	for i := range keys - 1 {
		set(t, b, "state.large", strconv.Itoa(i), payload)
	}
	filled(t, b, "state.large", strconv.Itoa(keys-1), set(t, b, "state.large", strconv.Itoa(keys-1), payload))
	var got []string
	for pages := 0; ; pages++ {
		page, err := b.Keys("state.large").Page(t.Context(), len(got), 1_000)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			if pages != 2 {
				t.Errorf("it took %d pages, want 2", pages)
			}
			break
		}
		for _, e := range page {
			got = append(got, e.Key)
		}
	}
	for i := range keys {
		if want := strconv.Itoa(keys - 1 - i); i >= len(got) || got[i] != want {
			t.Fatalf("the pages are %v", got)
		}
	}
}
