package jetstream

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// A scan of the newest event of each key leaves out no key that is written meanwhile.
func TestScanLatestByKeyBesideAWriter(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const keys = 20
	for i := range keys {
		set(t, b, "busy", strconv.Itoa(i), "0")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	defer writer.Wait()
	defer cancel()
	writer.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			// the last one fails
			_, _ = b.Publish(ctx, "busy", []byte("1"), PublishOptions{Key: strconv.Itoa(i % keys)})
		}
	})
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		found := make(map[string]bool)
		if err := b.History("busy").Scan(t.Context(), ScanOptions{LatestByKey: true}, func(e *event.Event) error {
			found[e.Key] = true
			return nil
		}); err != nil || len(found) != keys {
			t.Fatalf("found %d keys, %v; want %d", len(found), err, keys)
		}
	}
}

// A range whose end was removed says so, whether or not its reader has had something.
func TestReadOfARangeThatIsGone(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	for i := range 10 {
		publishAll(t, b, "torn", strconv.Itoa(i))
	}
	r, err := b.History("torn").Range(t.Context(), ReadOptions{From: FromAfterID("torn@2")})
	if err != nil {
		t.Fatal(err)
	}
	s, err := b.conn.JS.Stream(t.Context(), "torn")
	if err != nil {
		t.Fatal(err)
	}
	last := func() (n int, err error) {
		for _, err = range r.Events(t.Context()) {
			if err == nil {
				n++
			}
		}
		return n, err
	}
	if n, err := last(); n != 8 || err != nil {
		t.Errorf("%d events, %v", n, err)
	}
	if err := s.Purge(t.Context(), natsjs.WithPurgeSequence(11)); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "torn", "later")
	if n, err := last(); n != 0 || !errors.Is(err, ErrDropped) {
		t.Errorf("after a purge: %d events, %v", n, err)
	}
	if err := b.conn.JS.DeleteStream(t.Context(), "torn"); err != nil {
		t.Fatal(err)
	}
	if n, err := last(); n != 0 || !errors.Is(err, ErrDropped) {
		t.Errorf("after the end of the stream: %d events, %v", n, err)
	}
}

// The last page of a listing does not wait for a server that has nothing more to send.
func TestListingsEndSoon(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	fillListed(t, b, "state.soon", 300)
	for i := range 150 {
		began := time.Now()
		listAll(t, b, "state.soon", 50+i%37)
		if took := time.Since(began); took > 2*time.Second {
			t.Fatalf("listing %d took %v", i, took)
		}
	}
}
