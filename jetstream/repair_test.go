package jetstream

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// gauges is an Observer that remembers the states.
type gauges struct {
	event.NopObserver
	mu     sync.Mutex
	values map[string]float64
}

func (g *gauges) Gauge(name string, value float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.values == nil {
		g.values = make(map[string]float64)
	}
	g.values[name] = value
}

func (g *gauges) value(name string) float64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.values[name]
}

// A native CreateOrUpdateKeyValue takes the sources away and lets native clients write.
func TestRepairOfANativeUpdate(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	var seen gauges
	b := open(t, Config{URL: url, Topics: compactedRules, Observer: &seen, bucketCheck: 20 * time.Millisecond})
	_, js := nativeConn(t, url)
	for i := range 10 {
		set(t, b, "state.a", strconv.Itoa(i), "old")
		set(t, b, "state.a", strconv.Itoa(i), strconv.Itoa(i))
	}
	gone := set(t, b, "state.a", "gone", "1")
	filled(t, b, "state.a", "gone", gone)
	w := watchState(t, b)
	w.shows("gone", "1")

	kv, err := js.CreateOrUpdateKeyValue(t.Context(), natsjs.KeyValueConfig{Bucket: "latest_state_a", History: 5})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the gauge says so", func() bool { return seen.value(event.GaugeBucketsBroken) == 1 })
	for key, value := range map[string]string{"3": "forged", "7": "forged", "gone": "forged", "never": "forged", "a.b": "forged"} {
		if _, err := kv.Put(t.Context(), key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := js.Stream(t.Context(), objectName("state.a"))
	if err != nil {
		t.Fatal(err)
	}
	// of this key the topic has nothing left
	if err := s.DeleteMsg(t.Context(), gone.Sequence); err != nil {
		t.Fatal(err)
	}
	set(t, b, "state.a", "5", "55") // nothing brings it to the bucket
	remove(t, b, "state.a", "6")

	// What is forged is not shown.
	got, err := b.Keys("state.a").GetMany(t.Context(), []string{"3", "7", "gone", "never"})
	if err != nil || len(got) != 0 {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
	reports, err := b.Admin().CheckBuckets(t.Context())
	if err != nil || len(reports) != 1 || !strings.Contains(strings.Join(reports[0].Faults, "\n"), "source is gone") {
		t.Fatalf("%+v, %v", reports, err)
	}

	report, err := b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{})
	if err != nil {
		t.Fatal(err)
	}
	outcomes := make(map[string]ForeignOutcome)
	for _, e := range report.Foreign {
		outcomes[e.Key] = e.Outcome
	}
	want := map[string]ForeignOutcome{"3": ForeignRestored, "7": ForeignRestored, "gone": ForeignKept, "never": ForeignKept, "a.b": ForeignKept}
	if fmt.Sprint(outcomes) != fmt.Sprint(want) || report.ForeignTotal != 5 || len(report.Faults) == 0 {
		t.Errorf("%+v", report)
	}
	eventually(t, "the gauge says that it is right", func() bool { return seen.value(event.GaugeBucketsBroken) == 0 })
	got, err = b.Keys("state.a").GetMany(t.Context(), append(numbers(10), "gone", "never"))
	if err != nil || len(got) != 9 || string(got["3"].Payload) != "3" || string(got["7"].Payload) != "7" || string(got["5"].Payload) != "55" || got["6"] != nil {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
	w.shows("5", "55")
	w.shows("6", "")
	fresh := watchState(t, b)
	fresh.shows("7", "7")

	report, err = b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{RemoveForeign: true})
	if err != nil || report.ForeignTotal != 3 || report.Foreign[0].Outcome != ForeignRemoved || len(report.Faults) != 0 {
		t.Errorf("%+v, %v", report, err)
	}
	if report, err = b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{}); err != nil || report.ForeignTotal != 0 || report.Entries != 10 {
		t.Errorf("%+v, %v", report, err)
	}
	// And it goes on as ever.
	r := set(t, b, "state.a", "3", "33")
	filled(t, b, "state.a", "3", r)
	w.shows("3", "33")
	fresh.shows("3", "33")
}

// The same key may be repaired again and again.
func TestRepairOfTheSameKeyAgain(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	_, js := nativeConn(t, url)
	set(t, b, "state.a", "k", "1")
	r := set(t, b, "state.a", "l", "1")
	filled(t, b, "state.a", "l", r)
	for i := range 3 {
		kv, err := js.CreateOrUpdateKeyValue(t.Context(), natsjs.KeyValueConfig{Bucket: "latest_state_a"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := kv.Put(t.Context(), "k", []byte("forged")); err != nil {
			t.Fatal(err)
		}
		w := watchState(t, b) // which meets the forged entry
		w.shows("l", "1")
		report, err := b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{})
		if err != nil || report.ForeignTotal != 1 || report.Foreign[0].Outcome != ForeignRestored {
			t.Fatalf("round %d: %+v, %v", i, report, err)
		}
		w.shows("k", "1")
	}
}

func TestRepairMakesABucketThatIsGone(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules, bucketCheck: time.Hour})
	for i := range 10 {
		set(t, b, "state.a", strconv.Itoa(i), strconv.Itoa(i))
	}
	if err := b.conn.JS.DeleteStream(t.Context(), "KV_latest_state_a"); err != nil {
		t.Fatal(err)
	}
	// Reads still answer from what the topic holds.
	if got, err := b.Keys("state.a").GetMany(t.Context(), numbers(10)); err != nil || len(got) != 10 {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
	if reports, err := b.Admin().CheckBuckets(t.Context()); err != nil || len(reports) != 1 || len(reports[0].Faults) != 1 {
		t.Errorf("%+v, %v", reports, err)
	}
	if report, err := b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{}); err != nil || len(report.Faults) != 1 {
		t.Errorf("%+v, %v", report, err)
	}
	if report, err := b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{}); err != nil || len(report.Faults) != 0 || report.Entries != 10 {
		t.Errorf("%+v, %v", report, err)
	}
}

// A KV bucket that somebody made for something else, before there was a topic of that name, is left
// alone.
func TestRepairTakesNoBucketOfOthers(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	_, js := nativeConn(t, url)
	kv, err := js.CreateKeyValue(t.Context(), natsjs.KeyValueConfig{Bucket: "latest_state_a", History: 5})
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, Config{URL: url, Topics: compactedRules})
	set(t, b, "state.a", "k", "1")
	for i := range 5 {
		if _, err := kv.Put(t.Context(), "k", []byte(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	for _, remove := range []bool{false, true} {
		_, err := b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{RemoveForeign: remove})
		if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic {
			t.Errorf("got %v", err)
		}
	}
	if h, err := kv.History(t.Context(), "k"); err != nil || len(h) != 5 {
		t.Errorf("%d, %v", len(h), err)
	}
	if _, err := kv.Put(t.Context(), "k", []byte("more")); err != nil {
		t.Error(err)
	}
}

// A bucket whose last event lies beyond the end of the topic's stream is filled again only where
// the server tells streams apart.
func TestBucketThatStandsBeyondTheStream(t *testing.T) {
	t.Parallel()
	for at, stale := range map[streams.Origin]bool{{Seq: 7}: true, {Seq: 6}: false, {Seq: 7, Ident: "abc"}: false} {
		if at.Beyond(6) != stale {
			t.Errorf("%+v: got %t", at, !stale)
		}
	}
	b := open(t, Config{Topics: compactedRules, bucketCheck: time.Hour})
	r := set(t, b, "state.a", "k", "1")
	filled(t, b, "state.a", "k", r)
	ti, err := b.reads.Compacted(t.Context(), "state.a")
	if err != nil {
		t.Fatal(err)
	}
	if fault, err := b.admin.staleSource(t.Context(), ti); err != nil || fault != "" {
		t.Errorf("%q, %v", fault, err)
	}
}
