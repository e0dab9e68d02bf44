package projections

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// topicReadings has events without keys: the key is in the payload.
const topicReadings = "readings"

func newReadingsCompactor(bus Bus, log *book) *Compactor {
	return NewCompactor(CompactorConfig{Bus: bus, Topic: topicReadings, Snapshot: topicSnapshots, KeySource: "/sensor/id", Logger: log.logger()})
}

// read publishes a reading. id is JSON.
func read(tb testing.TB, bus *jetstream.Bus, id string, n int) jetstream.Receipt {
	tb.Helper()
	r, err := bus.Publish(tb.Context(), topicReadings, fmt.Appendf(nil, `{"sensor":{"id":%s},"n":%d}`, id, n), jetstream.PublishOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

func mustCompact(tb testing.TB, c *Compactor) int {
	tb.Helper()
	n, err := c.Compact(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// wantSnapshots compares the newest snapshots, less what was removed, by key: the n of each.
func wantSnapshots(tb testing.TB, bus *jetstream.Bus, want map[string]int) {
	tb.Helper()
	got := make(map[string]int)
	for key, all := range written(tb, bus) {
		newest := all[len(all)-1]
		if newest.Tombstone {
			continue
		}
		var s Snapshot
		var reading struct{ N int }
		if err := errors.Join(json.Unmarshal(newest.Payload, &s), json.Unmarshal(s.Payload, &reading)); err != nil || s.Key != key || s.TS == 0 {
			tb.Errorf("the snapshot of %q is %s (%v)", key, newest.Payload, err)
		}
		got[key] = reading.N
	}
	for key, n := range want {
		if got[key] != n {
			tb.Errorf("the snapshot of %q has n %d, want %d", key, got[key], n)
		}
		delete(got, key)
	}
	if len(got) > 0 {
		tb.Errorf("there are snapshots of other keys: %v", got)
	}
}

// TestSnapshotsByKeySource takes keys from payloads, over restarts, and over a stream that was made
// anew.
func TestSnapshotsByKeySource(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, dir), Topics: compacted})
	log := newBook(t)
	c := newReadingsCompactor(JetStream(bus), log)
	if n := mustCompact(t, c); n != 0 {
		t.Errorf("a topic that does not exist gave %d snapshots", n)
	}
	want := make(map[string]int)
	for i := range 2_000 { // 600 keys: more than are written at a time
		key := "s" + strconv.Itoa(i%600)
		read(t, bus, strconv.Quote(key), i)
		want[key] = i
	}
	read(t, bus, "17", 1)
	read(t, bus, `"17"`, 2)
	read(t, bus, "12345678901234567890", 3)
	read(t, bus, `"a\/b: \u00e9"`, 4)
	want["17"], want["12345678901234567890"], want["a/b: é"] = 2, 3, 4
	for _, id := range []string{"null", "true", `{"id":"x"}`, `["x"]`, `""`, strconv.Quote(strings.Repeat("k", 513))} {
		read(t, bus, id, 5) // these have none
	}
	for _, payload := range []string{`{"sensor":"x"}`, `[]`, `7`, `{}`} {
		if _, err := bus.Publish(t.Context(), topicReadings, []byte(payload), jetstream.PublishOptions{Key: "own"}); err != nil {
			t.Fatal(err)
		}
	}
	if n := mustCompact(t, c); n != len(want) {
		t.Errorf("%d snapshots were written, want %d", n, len(want))
	}
	wantSnapshots(t, bus, want)
	if text := log.buf.String(); strings.Count(text, "events without a key") != 1 || !strings.Contains(text, "events=10") {
		t.Errorf("the log does not say that 10 events have no key:\n%s", text)
	}
	if n := mustCompact(t, c); n != 0 {
		t.Errorf("%d snapshots were written of what has not changed", n)
	}

	// A tombstone has no payload: its own key counts.
	read(t, bus, `"s1"`, 7)
	remove(t, bus, topicReadings, "s2")
	want["s1"] = 7
	delete(want, "s2")
	if n := mustCompact(t, c); n != 2 {
		t.Errorf("%d snapshots were written, want 2", n)
	}
	wantSnapshots(t, bus, want)

	// Another hub goes on where this one was.
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	bus = openBus(t, jetstream.Config{Server: natstest.Embed(t, dir), Topics: compacted})
	c = newReadingsCompactor(JetStream(bus), log)
	read(t, bus, `"s3"`, 8)
	want["s3"] = 8
	if n := mustCompact(t, c); n != 1 {
		t.Errorf("%d snapshots were written after a restart, want 1", n)
	}
	wantSnapshots(t, bus, want)
}

// TestSnapshotsByKeySourceOfANewStream has a stream that was removed, and created again with more
// events than it had.
func TestSnapshotsByKeySourceOfANewStream(t *testing.T) {
	t.Parallel()
	for _, events := range []int{2, 9} { // fewer than before, and more
		t.Run(strconv.Itoa(events), func(t *testing.T) {
			url := startNATS(t)
			bus := openBus(t, jetstream.Config{URL: url, Topics: compacted})
			c := newReadingsCompactor(JetStream(bus), newBook(t))
			for i := range 5 {
				read(t, bus, strconv.Itoa(i), 1)
			}
			mustCompact(t, c)
			if err := native(t, url).DeleteStream(t.Context(), topicReadings); err != nil {
				t.Fatal(err)
			}
			want := map[string]int{"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}
			poll(t, "the topic is there again", func() bool {
				_, err := bus.Publish(t.Context(), topicReadings, []byte(`{"sensor":{"id":0},"n":2}`), jetstream.PublishOptions{})
				return err == nil
			})
			want["0"] = 2
			for i := 1; i < events; i++ {
				read(t, bus, strconv.Itoa(i), 2)
				want[strconv.Itoa(i)] = 2
			}
			// The old snapshots count as newer for a minute, in case clocks differ.
			later := newReadingsCompactor(later{JetStream(bus)}, newBook(t))
			if n := mustCompact(t, later); n != events {
				t.Errorf("%d snapshots were written, want %d", n, events)
			}
			wantSnapshots(t, bus, want)
		})
	}
}

// later is a bus whose snapshots are two minutes older than they are.
type later struct{ Bus }

func (l later) Keys(topic string) Keys { return laterKeys{l.Bus.Keys(topic)} }

type laterKeys struct{ Keys }

func (l laterKeys) GetMany(ctx context.Context, keys []string) (map[string]*jetstream.Event, error) {
	found, err := l.Keys.GetMany(ctx, keys)
	for _, e := range found {
		e.StoredAt -= int64(2 * remadeAfter)
	}
	return found, err
}

// TestSnapshotsOfBatchKeys restricts snapshots to keys, to others later, and then to none.
func TestSnapshotsOfBatchKeys(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	only := func(keys ...string) *Compactor {
		return NewCompactor(CompactorConfig{Bus: JetStream(bus), Topic: topicState, Snapshot: topicSnapshots, BatchKeys: keys, Logger: logs(t)})
	}
	want := map[string]int{"b": 1, "d": 3}
	var last jetstream.Receipt
	for i, key := range []string{"a", "b", "c", "d"} {
		last = put(t, bus, topicState, key, fmt.Sprintf(`{"n":%d}`, i))
	}
	if n := compact(t, bus, only("d", "b", "none"), last); n != 2 {
		t.Errorf("%d snapshots were written, want 2", n)
	}
	wantSnapshots(t, bus, want)
	if n := compact(t, bus, only("none", "b", "d"), last); n != 0 {
		t.Errorf("%d snapshots were written in another order of the keys", n)
	}
	// A key that is added has one although it did not change.
	if n := compact(t, bus, only("b", "c", "d"), last); n != 1 {
		t.Errorf("%d snapshots were written of a key that was added, want 1", n)
	}
	want["c"] = 2
	wantSnapshots(t, bus, want)
	put(t, bus, topicState, "a", `{"n":4}`)
	put(t, bus, topicState, "b", `{"n":5}`)
	remove(t, bus, topicState, "c")
	last = remove(t, bus, topicState, "a")
	if n := compact(t, bus, only("b", "c", "d"), last); n != 2 {
		t.Errorf("%d snapshots were written of changes, want 2", n)
	}
	delete(want, "c")
	want["b"] = 5
	wantSnapshots(t, bus, want)
	last = put(t, bus, topicState, "e", `{"n":6}`)
	if n := compact(t, bus, only(), last); n != 2 { // with the tombstone of a
		t.Errorf("%d snapshots were written of the rest, want 2", n)
	}
	want["e"] = 6
	wantSnapshots(t, bus, want)
}

// TestSnapshotsByKeySourceOfACompactedTopic has a topic with keys, whose snapshots go by another
// one, and by two of those.
func TestSnapshotsByKeySourceOfACompactedTopic(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	c := NewCompactor(CompactorConfig{Bus: JetStream(bus), Topic: topicState, Snapshot: topicSnapshots, KeySource: "/owner", BatchKeys: []string{"ann", "bob"}, Logger: logs(t)})
	put(t, bus, topicState, "car1", `{"owner":"ann","n":1}`)
	put(t, bus, topicState, "car2", `{"owner":"bob","n":2}`)
	put(t, bus, topicState, "car3", `{"owner":"eve","n":3}`)
	if n := compact(t, bus, c, put(t, bus, topicState, "car4", `{"owner":"ann","n":4}`)); n != 2 {
		t.Errorf("%d snapshots were written, want 2", n)
	}
	wantSnapshots(t, bus, map[string]int{"ann": 4, "bob": 2})
	if n := compact(t, bus, c, put(t, bus, topicState, "car3", `{"owner":"bob","n":5}`)); n != 1 {
		t.Errorf("%d snapshots were written, want 1", n)
	}
	wantSnapshots(t, bus, map[string]int{"ann": 4, "bob": 5})
}

// TestTwoCompactorsByKeySource lets two hubs compact while readings come in: each snapshot is newer
// than the one before, and in the end each is of the newest reading.
func TestTwoCompactorsByKeySource(t *testing.T) {
	const keys, events = 40, 600
	url := startNATS(t)
	one, two := openBus(t, jetstream.Config{URL: url, Topics: compacted}), openBus(t, jetstream.Config{URL: url, Topics: compacted})
	read(t, one, "0", 0)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, bus := range []*jetstream.Bus{one, two} {
		wg.Go(func() {
			for c := newReadingsCompactor(JetStream(bus), newBook(t)); ctx.Err() == nil; {
				if _, err := c.Compact(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	rnd := rand.New(rand.NewPCG(8, 9))
	want := map[string]int{"0": 0}
	var last jetstream.Receipt
	for i := range events {
		key := strconv.Itoa(rnd.IntN(keys))
		last = read(t, one, key, i)
		want[key] = i
	}
	poll(t, "all is compacted", func() bool {
		h, _, _, err := readSnapshotPosition(t.Context(), JetStream(one), topicReadings)
		return err == nil && h.Sequence == last.Sequence
	})
	cancel()
	wg.Wait()
	wantSnapshots(t, one, want)
	for key, all := range written(t, one) {
		var before uint64
		for _, s := range all {
			from := parsePosition(s.Headers[headerSnapshot])
			if from.Sequence <= before {
				t.Errorf("a snapshot of %s from %d follows one from %d", key, from.Sequence, before)
			}
			before = from.Sequence
		}
	}
}

// TestReadersOfPartialSnapshots wants a mirror to be whole although the snapshots are of some keys,
// and a projection to refuse to begin with such.
func TestReadersOfPartialSnapshots(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	c := NewCompactor(CompactorConfig{Bus: JetStream(bus), Topic: topicState, Snapshot: topicSnapshots, BatchKeys: []string{"a"}, Logger: logs(t)})
	put(t, bus, topicState, "a", "1")
	compact(t, bus, c, put(t, bus, topicState, "b", "2"))
	m := runMirror(t, MirrorConfig{Bus: JetStream(bus), Snapshot: topicSnapshots})
	awaitMirror(t, m)
	for key, want := range map[string]string{"a": "1", "b": "2"} {
		if e, err := m.Get(t.Context(), key); err != nil || string(e.Payload) != want {
			t.Errorf("%s is %v (%v)", key, e, err)
		}
	}
	r := runAway(t, JetStream(bus), Projection{Topic: topicState, Group: "cold", Snapshot: topicSnapshots})
	defer r.cancel()
	if err := r.wait(t); err == nil || !strings.Contains(err.Error(), "leave Snapshot out") {
		t.Errorf("the projection ended with: %v", err)
	}
}

func TestCompactorThatIsWrong(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	for want, cfg := range map[string]CompactorConfig{
		"not a JSON pointer": {Bus: JetStream(bus), Topic: topicState, Snapshot: topicSnapshots, KeySource: "id"},
		"not compacted":      {Bus: JetStream(bus), Topic: "plain", Snapshot: topicSnapshots},
	} {
		put(t, bus, "plain", "k", "1")
		if _, err := NewCompactor(cfg).Compact(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	err := NewCompactor(CompactorConfig{Bus: JetStream(bus), Topic: topicState, Snapshot: topicSnapshots, KeySource: "id"}).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "not a JSON pointer") {
		t.Errorf("Run ended with %v", err)
	}
}
