package projections

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// A compacted topic and that of its snapshots.
const (
	topicState     = "state"
	topicSnapshots = "state.snapshot"
)

var compacted = []topics.Rule{{Pattern: topicState, Compaction: true}, {Pattern: topicSnapshots, Compaction: true}}

func newCompactor(tb testing.TB, bus Bus) *Compactor {
	tb.Helper()
	return NewCompactor(CompactorConfig{Bus: bus, Topic: topicState, Snapshot: topicSnapshots, Every: 30 * time.Millisecond, Logger: logs(tb)})
}

// compact compacts once the topic's bucket has the event that a receipt is of.
func compact(tb testing.TB, bus *jetstream.Bus, c *Compactor, last jetstream.Receipt) int {
	tb.Helper()
	bucketHas(tb, bus, last.Sequence)
	n, err := c.Compact(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// bucketHas waits until the server has filled the bucket up to an event of the topic.
func bucketHas(tb testing.TB, bus *jetstream.Bus, seq uint64) {
	tb.Helper()
	poll(tb, "the bucket is filled", func() bool {
		var last uint64
		_, err := bus.Keys(topicState).EachSince(tb.Context(), jetstream.BucketPosition{}, func(e *jetstream.Event) error {
			last = e.Sequence
			return nil
		})
		return err == nil && last >= seq
	})
}

// written are all snapshots that were ever written, by key.
func written(tb testing.TB, bus *jetstream.Bus) map[string][]*jetstream.Event {
	tb.Helper()
	all := make(map[string][]*jetstream.Event)
	err := bus.History(topicSnapshots).Scan(tb.Context(), jetstream.ScanOptions{Limit: 1_000_000}, func(e *jetstream.Event) error {
		all[e.Key] = append(all[e.Key], e)
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return all
}

func TestOnlyWhatChangedIsWritten(t *testing.T) {
	dir := t.TempDir()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, dir), Topics: compacted})
	c := newCompactor(t, JetStream(bus))
	if n, err := c.Compact(t.Context()); n != 0 || err != nil {
		t.Errorf("a topic that does not exist gave %d snapshots (%v)", n, err)
	}
	var last jetstream.Receipt
	for i := range 600 { // more than one batch
		last = put(t, bus, topicState, "k"+strconv.Itoa(i), `{"n":1}`)
	}
	if n := compact(t, bus, c, last); n != 600 {
		t.Errorf("%d snapshots were written, want 600", n)
	}
	if n := compact(t, bus, c, last); n != 0 {
		t.Errorf("%d snapshots were written of what has not changed", n)
	}
	for range 5 {
		put(t, bus, topicState, "k7", `{"n":12345678901234567890}`)
	}
	ts := int64(1_700_000_000_000)
	if _, err := bus.Publish(t.Context(), topicState, []byte(`"x"`), jetstream.PublishOptions{Key: "a:b", TS: ts, HasTS: true}); err != nil {
		t.Fatal(err)
	}
	last = remove(t, bus, topicState, "k8")
	if n := compact(t, bus, c, last); n != 3 {
		t.Errorf("%d snapshots were written, want 3", n)
	}

	// Another hub, after a restart, goes on where this one was.
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	bus = openBus(t, jetstream.Config{Server: natstest.Embed(t, dir), Topics: compacted})
	c = newCompactor(t, JetStream(bus))
	if n := compact(t, bus, c, last); n != 0 {
		t.Errorf("%d snapshots were written after a restart", n)
	}
	all := written(t, bus)
	if n := len(all["k7"]); n != 2 {
		t.Errorf("there are %d snapshots of k7, want 2", n)
	}
	var s Snapshot
	if err := json.Unmarshal(all["k7"][1].Payload, &s); err != nil || s.Key != "k7" || string(s.Payload) != `{"n":12345678901234567890}` {
		t.Errorf("the snapshot is %s (%v)", all["k7"][1].Payload, err)
	}
	if got := string(all["a:b"][0].Payload); got != `{"key":"a:b","payload":"x","ts":1700000000000}` {
		t.Errorf("the snapshot is %s", got)
	}
	if k8 := all["k8"]; len(k8) != 2 || !k8[1].Tombstone {
		t.Errorf("the snapshots of a key that was removed are %+v", k8)
	}

	// When how far it was is lost, it looks at all, and writes none that is there.
	if err := bus.Collections().Delete(t.Context(), snapshotsBucket); err != nil {
		t.Fatal(err)
	}
	if n := compact(t, bus, c, last); n != 0 {
		t.Errorf("%d snapshots were written that were there", n)
	}
}

// TestTwoCompactors lets two hubs compact while events come in: no snapshot replaces a newer one,
// or one of the same event.
func TestTwoCompactors(t *testing.T) {
	const keys, writes = 40, 600
	url := startNATS(t)
	one, two := openBus(t, jetstream.Config{URL: url, Topics: compacted}), openBus(t, jetstream.Config{URL: url, Topics: compacted})
	put(t, one, topicState, "k0", "0")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, bus := range []*jetstream.Bus{one, two} {
		wg.Go(func() {
			if err := newCompactor(t, JetStream(bus)).Run(ctx); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := newCompactor(t, JetStream(bus)).Compact(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	rnd := rand.New(rand.NewPCG(5, 7))
	var last jetstream.Receipt
	for i := range writes {
		key := "k" + strconv.Itoa(rnd.IntN(keys))
		if i%10 == 9 {
			last = remove(t, one, topicState, key)
		} else {
			last = put(t, one, topicState, key, strconv.Itoa(i))
		}
	}
	bucketHas(t, one, last.Sequence)
	newest := make(map[string]*jetstream.Event)
	if err := one.History(topicState).Scan(t.Context(), jetstream.ScanOptions{Limit: writes + 1}, func(e *jetstream.Event) error {
		newest[e.Key] = e
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	poll(t, "all is compacted", func() bool {
		h, _, _, err := readSnapshotPosition(t.Context(), JetStream(one), topicState)
		return err == nil && h.Sequence == last.Sequence
	})
	cancel()
	wg.Wait()
	for key, all := range written(t, one) {
		var before uint64
		for _, s := range all {
			from := parsePosition(s.Headers[headerSnapshot])
			if from.Sequence <= before {
				t.Errorf("a snapshot of %s from %d follows one from %d", key, from.Sequence, before)
			}
			before = from.Sequence
		}
		if before != newest[key].Sequence || all[len(all)-1].Tombstone != newest[key].Tombstone {
			t.Errorf("the last snapshot of %s is from %d, its newest event is %d", key, before, newest[key].Sequence)
		}
		delete(newest, key)
	}
	if len(newest) > 0 {
		t.Errorf("%d keys have no snapshot", len(newest))
	}
}

// TestLargeSnapshots has payloads of the largest size, and one from a native client that grows when
// it becomes JSON.
func TestLargeSnapshots(t *testing.T) {
	url := startNATS(t)
	bus := openBus(t, jetstream.Config{URL: url, Topics: compacted})
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	large := `"` + string(bytes.Repeat([]byte("9"), bus.MaxPayload()-2)) + `"`
	for i := range 4 {
		put(t, bus, topicState, "large"+strconv.Itoa(i), large)
	}
	native := bytes.Repeat([]byte{0xff}, 1_000_000)
	if err := nc.Publish("keyed.native."+topicState, native); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	c := newCompactor(t, JetStream(bus))
	compact(t, bus, c, put(t, bus, topicState, "small", "1"))
	if n := len(written(t, bus)); n != 6 {
		t.Errorf("there are %d snapshots, want 6", n)
	}
	m := runMirror(t, MirrorConfig{Bus: JetStream(bus), Snapshot: topicSnapshots})
	awaitMirror(t, m)
	for key, want := range map[string]string{"large3": large, "native": string(native), "small": "1"} {
		if e, err := m.Get(t.Context(), key); err != nil || string(e.Payload) != want {
			t.Errorf("%s is not as it was published (%v)", key, err)
		}
	}
}

func TestCompactorOfAClosedBus(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	compact(t, bus, newCompactor(t, JetStream(bus)), put(t, bus, topicState, "k", "1"))
	ended := make(chan error, 1)
	go func() { ended <- newCompactor(t, JetStream(bus)).Run(t.Context()) }()
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, jetstream.ErrClosed) {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(patience):
		t.Error("it does not end")
	}
}
