package jetstream

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

func TestBucketNames(t *testing.T) {
	t.Parallel()
	for topic, want := range map[string]string{
		"process.state": "latest_process_state",
		"a_b":           "latest_aX5Fb",
		"a-b.C":         "latest_a-b_X43",
		"X5F":           "latest_X585X46",
	} {
		if got := bucketName(topic); got != want {
			t.Errorf("%s: got %s, want %s", topic, got, want)
		}
	}
	long := strings.Repeat("a", 149)
	one, two := bucketName(long+".b"), bucketName(long+"_b")
	if one == two || len(one) > 150 || len(two) > 150 || bucketName(strings.ToUpper(long)) == one {
		t.Errorf("%s, %s", one, two)
	}
}

// The bucket of a topic is one that native KV clients read, and that they cannot write.
func TestNativeClientsReadTheBucket(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	nc, js := nativeConn(t, url)
	var r event.Receipt
	for i := range 5 {
		set(t, b, "state.a", strconv.Itoa(i), "v"+strconv.Itoa(i))
	}
	if _, err := nc.Request("keyed.native.state.a", []byte("vn"), wait); err != nil {
		t.Fatal(err)
	}
	r = remove(t, b, "state.a", "3")
	filled(t, b, "state.a", "3", r)
	kv, err := js.KeyValue(t.Context(), "latest_state_a")
	if err != nil {
		t.Fatal(err)
	}
	if e, err := kv.Get(t.Context(), "native"); err != nil || string(e.Value()) != "vn" {
		t.Errorf("%v, %v", e, err)
	}
	if _, err := kv.Get(t.Context(), "3"); !errors.Is(err, natsjs.ErrKeyNotFound) {
		t.Errorf("a removed key: %v", err)
	}
	lister, err := kv.ListKeys(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for key := range lister.Keys() {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	if want := []string{"0", "1", "2", "4", "native"}; !slices.Equal(keys, want) {
		t.Errorf("keys %v, want %v", keys, want)
	}
	if h, err := kv.History(t.Context(), "1"); err != nil || len(h) != 1 || string(h[0].Value()) != "v1" {
		t.Errorf("history %v, %v", h, err)
	}
	w, err := kv.Watch(t.Context(), "1")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Stop() }()
	if e := <-w.Updates(); e == nil || string(e.Value()) != "v1" {
		t.Errorf("watch: %v", e)
	}
	if e := <-w.Updates(); e != nil {
		t.Errorf("watch: %v", e)
	}
	set(t, b, "state.a", "1", "new")
	select {
	case e := <-w.Updates():
		if string(e.Value()) != "new" {
			t.Errorf("watch: %v", e)
		}
	case <-time.After(wait):
		t.Error("the watch sees no change")
	}
	if _, err := kv.Put(t.Context(), "1", []byte("x")); err == nil {
		t.Error("a native client can write to the bucket")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := nc.RequestWithContext(ctx, "$KV.latest_state_a.1", []byte("x")); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("a native client can write to the bucket: %v", err)
	}
}

// An id may come again when the topic's window is over, and what it brings is the newest event: the
// bucket must not take it for a duplicate. That it is made after both events is the hardest case:
// it gets them within a millisecond.
func TestBucketKeepsIDsThatCameTwice(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plain := open(t, Config{Server: natstest.Embed(t, dir), Topics: []topics.Rule{{Pattern: "state.**", DuplicateWindow: time.Second}}})
	twice := func(b *Bus, key string) event.Receipt {
		first, err := b.Publish(t.Context(), "state.a", []byte("1"), PublishOptions{ID: key, Key: key})
		if err != nil {
			t.Fatal(err)
		}
		var second event.Receipt
		eventually(t, "the window is over", func() bool {
			second, err = b.Publish(t.Context(), "state.a", []byte("2"), PublishOptions{ID: key, Key: key})
			if err != nil {
				t.Fatal(err)
			}
			return !second.Duplicate
		})
		if second.Sequence == first.Sequence {
			t.Fatalf("%+v, %+v", first, second)
		}
		return second
	}
	before := twice(plain, "before")
	if err := plain.Close(); err != nil {
		t.Fatal(err)
	}
	b := open(t, Config{Server: natstest.Embed(t, dir), Topics: []topics.Rule{{Pattern: "state.**", DuplicateWindow: time.Second, Compaction: true}}})
	after := twice(b, "after")
	filled(t, b, "state.a", "before", before)
	filled(t, b, "state.a", "after", after)
	got, err := b.Keys("state.a").GetMany(t.Context(), []string{"before", "after"})
	if err != nil || string(got["before"].Payload) != "2" || string(got["after"].Payload) != "2" {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
}

// Several hubs that meet a topic at once make one bucket.
func TestRacingHubsMakeOneBucket(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	const hubs = 4
	buses := make([]*Bus, hubs)
	for i := range buses {
		buses[i] = open(t, Config{URL: url, Topics: compactedRules})
	}
	for round := range 5 {
		topic := "state." + strconv.Itoa(round)
		var all sync.WaitGroup
		for i, b := range buses {
			all.Go(func() {
				if _, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{Key: strconv.Itoa(i)}); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		eventually(t, "the bucket has all keys", func() bool {
			got, err := buses[0].Keys(topic).GetMany(t.Context(), numbers(hubs))
			return err == nil && len(got) == hubs
		})
		if reports, err := buses[0].Admin().CheckBuckets(t.Context()); err != nil || len(reports) != round+1 {
			t.Fatalf("%v, %v", reports, err)
		}
	}
	reports, err := buses[0].Admin().CheckBuckets(t.Context())
	for _, r := range reports {
		if len(r.Faults) > 0 || r.Entries != hubs {
			t.Errorf("%+v, %v", r, err)
		}
	}
}

// A hub that meets a topic while another starts the source of its bucket again finds the bucket.
func TestBucketWhoseSourceIsStartedAgain(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Topics: compactedRules})
	set(t, b, "state.a", "k", "1")
	at := b.streams.Known("state.a")
	source, err := b.conn.FindStream(t.Context(), at.Stream.Name)
	if err != nil {
		t.Fatal(err)
	}
	info, err := b.conn.FindStream(t.Context(), at.Bucket.Stream)
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	var other sync.WaitGroup
	other.Go(func() {
		for ctx.Err() == nil {
			b.streams.RestartSource(t.Context(), at, info)
		}
	})
	for range 300 {
		if _, err := b.streams.CreateBucket(t.Context(), at, &source.Config); err != nil {
			t.Error(err)
			break
		}
	}
	end()
	other.Wait()
}

// A topic that was there before it was compacted gets a bucket when it is met, with all that it
// still holds.
func TestBucketOfATopicThatWasThere(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	old := open(t, Config{URL: url})
	for i := range 100 {
		set(t, old, "state.a", strconv.Itoa(i%10), strconv.Itoa(i))
	}
	b := open(t, Config{URL: url, Topics: compactedRules})
	r := set(t, b, "state.a", "new", "1")
	filled(t, b, "state.a", "new", r)
	got, err := b.Keys("state.a").GetMany(t.Context(), numbers(10))
	if err != nil || len(got) != 10 || string(got["7"].Payload) != "97" {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
}

func TestForeignBucketIsRefused(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	_, js := nativeConn(t, url)
	if _, err := js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "theirs", Subjects: []string{"theirs"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "KV_latest_state_a", Sources: []*natsjs.StreamSource{{Name: "theirs"}}}); err != nil {
		t.Fatal(err)
	}
	b := open(t, Config{URL: url, Topics: compactedRules})
	_, err := b.Publish(t.Context(), "state.a", []byte("1"), PublishOptions{Key: "k"})
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic || !strings.Contains(known.Msg, "latest_state_a") {
		t.Errorf("publish: %v", err)
	}
	_, err = b.Admin().RepairBucket(t.Context(), "state.a", RepairOptions{})
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic {
		t.Errorf("repair: %v", err)
	}
	s, err := js.Stream(t.Context(), "KV_latest_state_a")
	if err != nil || s.CachedInfo().Config.Sources[0].Name != "theirs" {
		t.Errorf("%v, %v", s, err)
	}
}

// What retention takes from the stream stays in the bucket, also across a restart of the server;
// what was removed stays away.
func TestBucketOutlivesRetentionAndRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := func() *Bus { return open(t, Config{Server: natstest.Embed(t, dir), Topics: compactedRules}) }
	b := start()
	for i := range 20 {
		set(t, b, "state.a", strconv.Itoa(i), "old")
		set(t, b, "state.a", strconv.Itoa(i), strconv.Itoa(i))
	}
	r := remove(t, b, "state.a", "3")
	filled(t, b, "state.a", "3", r)

	s, err := b.conn.JS.Stream(t.Context(), objectName("state.a"))
	if err != nil {
		t.Fatal(err)
	}
	short := s.CachedInfo().Config
	short.MaxAge, short.Duplicates = 100*time.Millisecond, 100*time.Millisecond
	if _, err := b.conn.JS.UpdateStream(t.Context(), short); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stream is empty", func() bool {
		info, err := b.conn.FindStream(t.Context(), objectName("state.a"))
		return err == nil && info.State.Msgs == 0
	})
	check := func(b *Bus) {
		t.Helper()
		got, err := b.Keys("state.a").GetMany(t.Context(), numbers(20))
		if err != nil || len(got) != 19 || got["3"] != nil || string(got["7"].Payload) != "7" {
			t.Errorf("%v, %v", payloadsOf(got), err)
		}
		if e, err := b.Keys("state.a").Get(t.Context(), "3"); err != nil || !e.Tombstone || !e.Gone {
			t.Errorf("%+v, %v", e, err)
		}
	}
	check(b)
	for range 2 {
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		b = start()
		check(b)
	}
	// And the source goes on.
	short.MaxAge, short.Duplicates = time.Hour, time.Second
	if _, err := b.conn.JS.UpdateStream(t.Context(), short); err != nil {
		t.Fatal(err)
	}
	r = set(t, b, "state.a", "3", "back")
	filled(t, b, "state.a", "3", r)
	if got, err := b.Keys("state.a").GetMany(t.Context(), numbers(20)); err != nil || len(got) != 20 || string(got["3"].Payload) != "back" {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
}
