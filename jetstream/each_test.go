package jetstream

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// TestBucketMadeAnewWhileItIsRead wants no walk, and no Watch, to take what is left of a bucket for
// all of it.
func TestBucketMadeAnewWhileItIsRead(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	want := fill(t, b, "state.a", 6_000, 6_000, rand.New(rand.NewPCG(7, 8)))
	anew := func() {
		const bucket = "KV_latest_state_a"
		info, err := b.conn.FindStream(t.Context(), bucket)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.conn.JS.DeleteStream(t.Context(), bucket); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the bucket is created again", func() bool {
			_, err := b.conn.JS.CreateStream(t.Context(), info.Config)
			return err == nil
		})
	}
	keys := 0
	err := b.Keys("state.a").Each(t.Context(), func(e *event.Event) error {
		if keys == 0 {
			anew()
		}
		if !e.Tombstone {
			keys++
		}
		return nil
	})
	if err == nil && keys < len(want) {
		t.Errorf("a walk gives %d of %d keys", keys, len(want))
	}
	poll := func() bool { return len(pages(t, b, "state.a", 1_000)) == len(want) }
	eventually(t, "the bucket is filled again", poll)
	seen, remade := make(map[string]bool), false
	err = b.Keys("state.a").Watch(t.Context(), nil, func(e *event.Event) error {
		if e == nil {
			return errAll
		}
		if seen[e.Key] = true; !remade {
			remade = true
			anew()
		}
		return nil
	})
	if err == errAll && len(seen) < len(want) { //nolint:errorlint // it is returned as it is
		t.Errorf("a watch shows %d of %d keys", len(seen), len(want))
	}
	t.Logf("the watch ended with %v", err)
}

// TestBucketWithoutDirectReads says what is wrong rather than trying for ever.
func TestBucketWithoutDirectReads(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	filled(t, b, "state.a", "k", set(t, b, "state.a", "k", "1"))
	info, err := b.conn.FindStream(t.Context(), "KV_latest_state_a")
	if err != nil {
		t.Fatal(err)
	}
	cfg := info.Config
	cfg.AllowDirect = false
	if _, err := b.conn.JS.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	none := func(*event.Event) error { return nil }
	for name, err := range map[string]error{
		"Each":  b.Keys("state.a").Each(t.Context(), none),
		"Watch": b.Keys("state.a").Watch(t.Context(), nil, none),
	} {
		if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFarFuture wants a time that the server cannot count to be taken for the end, and not for the
// beginning.
func TestFarFuture(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "a", "1", "2")
	for _, ts := range []int64{time.Now().Add(time.Hour).UnixMilli(), time.Now().UnixMicro(), 1 << 60} {
		n := 0
		if err := b.History("a").Scan(t.Context(), ScanOptions{From: FromTime(time.UnixMilli(ts))}, func(*event.Event) error { n++; return nil }); err != nil || n > 0 {
			t.Errorf("ts %d: %d events, %v", ts, n, err)
		}
		info, err := b.conn.FindStream(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		if seq, err := b.reads.Resolve(t.Context(), &streams.Topic{Name: "a", Stream: &streams.Stream{Name: "a"}}, FromTime(time.UnixMilli(ts)).start(), info.State, ""); seq != 3 || err != nil {
			t.Errorf("ts %d: a group begins at %d, %v", ts, seq, err)
		}
	}
}
