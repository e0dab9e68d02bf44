package jetstream

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// codeOf is the code of an error of the bus, and "" for none.
func codeOf(tb testing.TB, err error) string {
	tb.Helper()
	if err == nil {
		return ""
	}
	e, ok := errors.AsType[*event.Error](err)
	if !ok {
		tb.Fatal(err)
	}
	return e.Code
}

// putKey publishes to a key for a client.
func putKey(tb testing.TB, b *Bus, client, topic, key string, tombstone bool) error {
	tb.Helper()
	payload := []byte("1")
	if tombstone {
		payload = nil
	}
	_, err := b.Publish(tb.Context(), topic, payload, PublishOptions{Key: key, Tombstone: tombstone, CountFor: client})
	return err
}

// A topic takes as many keys as its rule says, removed ones included, whichever hub made them and
// also after a restart. Keys that exist are free.
func TestMaxKeys(t *testing.T) {
	t.Parallel()
	rules := []topics.Rule{{Pattern: "state.few", Compaction: true, MaxKeys: 3}, {Pattern: "state.**", Compaction: true}}
	url := natstest.Run(t).ClientURL()
	cfg := Config{URL: url, Topics: rules, bucketCheck: 50 * time.Millisecond}
	b, other := open(t, cfg), open(t, cfg)
	for _, key := range []string{"a", "b"} {
		if err := putKey(t, b, "eve", "state.few", key, false); err != nil {
			t.Fatal(err)
		}
	}
	filled(t, b, "state.few", "b", set(t, b, "state.few", "b", "1"))
	if err := putKey(t, other, "eve", "state.few", "c", false); err != nil {
		t.Fatal(err)
	}
	// A count while the bucket lacks the newest key would miss it.
	filled(t, other, "state.few", "c", set(t, other, "state.few", "c", "1"))
	knows := func(b *Bus) {
		t.Helper()
		eventually(t, "the hub knows that the bucket is full", func() bool {
			return b.publishers.KnownKeys(b.streams.Known("state.few")) == 3
		})
	}
	knows(other)
	full := func(b *Bus) {
		t.Helper()
		if err := putKey(t, b, "", "state.few", "one more", false); codeOf(t, err) != event.CodeOverloaded || !strings.Contains(err.Error(), "max_keys") {
			t.Errorf("one key more: %v", err)
		}
	}
	full(other)
	for _, key := range []string{"a", "b", "c"} {
		if err := putKey(t, other, "eve", "state.few", key, false); err != nil {
			t.Errorf("key %s exists: %v", key, err)
		}
	}
	knows(b)
	full(b)
	if err := putKey(t, b, "", "state.few", "c", false); err != nil {
		t.Errorf("a key that another hub made: %v", err)
	}
	// A hub that counts the bucket while a key is on its way forgets the key until the next count.
	b = open(t, Config{URL: url, Topics: rules})
	full(b)
	for _, key := range []string{"a", "d"} { // a removed key makes room, and it may be made again
		if err := putKey(t, b, "", "state.few", "a", true); err != nil {
			t.Errorf("a key is removed: %v", err)
		}
		if err := putKey(t, b, "", "state.few", key, false); err != nil {
			t.Errorf("key %s after a removal: %v", key, err)
		}
		full(b)
	}
	filled(t, b, "state.few", "d", set(t, b, "state.few", "d", "1"))
	after := open(t, cfg)
	full(after)
	if err := putKey(t, after, "eve", "state.few", "b", false); err != nil {
		t.Errorf("after a restart, a key that exists: %v", err)
	}
	if err := putKey(t, after, "eve", "state.many", "d", false); err != nil {
		t.Errorf("another topic: %v", err)
	}
}

// A client makes so many keys at once and then so many a second, over all topics. Others are not
// held up, and keys that exist are free.
func TestNewKeysOfAClient(t *testing.T) {
	t.Parallel()
	obs := &counter{}
	b := open(t, Config{Topics: compactedRules, Observer: obs, Limits: Limits{KeysPerClient: 4, KeyRate: 1}})
	for i := range 4 {
		if err := putKey(t, b, "eve", fmt.Sprint("state.", i%2), strconv.Itoa(i), false); err != nil {
			t.Fatal(err)
		}
	}
	if got := codeOf(t, putKey(t, b, "eve", "state.0", "more", false)); got != event.CodeRateLimited {
		t.Errorf("a fifth key: %q", got)
	}
	// An event that is published later counts now.
	if got := codeOf(t, b.NewPublisher().Reserve(t.Context(), "state.0", "later", "eve")); got != event.CodeRateLimited {
		t.Errorf("a key of an event that is published later: %q", got)
	}
	if err := b.NewPublisher().Reserve(t.Context(), "state.0", "0", "eve"); err != nil {
		t.Errorf("a key that exists: %v", err)
	}
	for _, c := range []struct{ client, key string }{{"eve", "0"}, {"victim", "more"}, {"eve", "more"}, {"", "of the hub"}} {
		if err := putKey(t, b, c.client, "state.0", c.key, false); err != nil {
			t.Errorf("%s: %v", c.key, err)
		}
	}
	if got := obs.limit("keys_per_client"); got != 2 {
		t.Errorf("the limit was reached %v times", got)
	}
	eventually(t, "the client may make one more", func() bool { return putKey(t, b, "eve", "state.1", "later", false) == nil })
}

// A client makes so many keys in 30 days, however fast, and whether or not it removes them. Keys
// that it has removed, it may make again.
func TestKeyShareOfAClient(t *testing.T) {
	t.Parallel()
	const share = 3
	obs := &counter{}
	b := open(t, Config{Topics: compactedRules, Observer: obs, Limits: Limits{KeyShare: share}, bucketCheck: 50 * time.Millisecond})
	for i := range share {
		for _, remove := range []bool{false, true} {
			if err := putKey(t, b, "eve", "state.a", strconv.Itoa(i), remove); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := codeOf(t, putKey(t, b, "eve", "state.a", "more", false)); got != event.CodeRateLimited {
		t.Errorf("a key more: %q", got)
	}
	if got := obs.limit("key_share"); got != 1 {
		t.Errorf("the limit was reached %v times", got)
	}
	eventually(t, "removed keys are counted", func() bool { return obs.gauge(event.GaugeKeysRemoved) == share })
	for _, c := range []struct{ client, key string }{{"eve", "0"}, {"victim", "more"}, {"eve", "more"}, {"", "of the hub"}} {
		if err := putKey(t, b, c.client, "state.a", c.key, false); err != nil {
			t.Errorf("%s: %v", c.key, err)
		}
	}
	eventually(t, "a key that was made again counts no more", func() bool { return obs.gauge(event.GaugeKeysRemoved) == share-1 })
}
