package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// compactedRules compact the topics that begin with state.
var compactedRules = []topics.Rule{{Pattern: "state.**", Compaction: true}}

func set(tb testing.TB, b *Bus, topic, key, payload string) event.Receipt {
	tb.Helper()
	r, err := b.Publish(tb.Context(), topic, []byte(payload), PublishOptions{Key: key})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

func remove(tb testing.TB, b *Bus, topic, key string) event.Receipt {
	tb.Helper()
	r, err := b.Publish(tb.Context(), topic, []byte("null"), PublishOptions{Key: key, Tombstone: true})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// nativeConn connects to a server as a client that knows nothing of the bus.
func nativeConn(tb testing.TB, url string) (*nats.Conn, natsjs.JetStream) {
	tb.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		tb.Fatal(err)
	}
	return nc, js
}

// filled waits until the bucket of a topic has the event.
func filled(tb testing.TB, b *Bus, topic, key string, r event.Receipt) {
	tb.Helper()
	k := streams.NewBucket(topic)
	eventually(tb, "the bucket has key "+key, func() bool {
		m, err := b.conn.LastBySubject(tb.Context(), k.Stream, k.Subject(key))
		if err != nil {
			return false
		}
		f := strings.Fields(conn.Last(m.Header[native.HeaderSource]))
		return len(f) > 1 && f[1] == strconv.FormatUint(r.Sequence, 10)
	})
}

// payloadsOf is what a read by keys gave.
func payloadsOf(events map[string]*event.Event) map[string]string {
	got := make(map[string]string)
	for key, e := range events {
		got[key] = string(e.Payload)
	}
	return got
}

func TestLatestSeesWhatWasConfirmed(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	for i := range 200 {
		r := set(t, b, "state.a", "k", strconv.Itoa(i))
		e, err := b.Keys("state.a").Get(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if string(e.Payload) != strconv.Itoa(i) || e.Sequence != r.Sequence || e.Key != "k" || e.Topic != "state.a" || e.Tombstone || e.Gone {
			t.Fatalf("after %d: %+v", i, e)
		}
		got, err := b.Keys("state.a").GetMany(t.Context(), []string{"k"})
		if err != nil || string(got["k"].Payload) != strconv.Itoa(i) {
			t.Fatalf("after %d: %v, %v", i, got, err)
		}
	}
	remove(t, b, "state.a", "k")
	if e, err := b.Keys("state.a").Get(t.Context(), "k"); err != nil || !e.Tombstone {
		t.Errorf("%+v, %v", e, err)
	}
	if got, err := b.Keys("state.a").GetMany(t.Context(), []string{"k"}); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	set(t, b, "state.a", "k", "again")
	if got, err := b.Keys("state.a").GetConsistent(t.Context(), []string{"k", "none"}); err != nil || len(got) != 1 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestReadsMakeNothing(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	if _, err := b.Keys("state.a").Get(t.Context(), "k"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	for _, keys := range [][]string{nil, {"k"}, {"k", "l"}} {
		if got, err := b.Keys("state.a").GetMany(t.Context(), keys); err != nil || got == nil || len(got) != 0 {
			t.Errorf("%v, %v", got, err)
		}
	}
	if got, err := b.Keys("state.a").Page(t.Context(), 0, 10); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	if err := b.Keys("state.a").Each(t.Context(), func(e *event.Event) error { return fmt.Errorf("got %v", e) }); err != nil {
		t.Error(err)
	}
	for info := range b.conn.JS.ListStreams(t.Context()).Info() {
		if !slices.Contains([]string{"KV_" + native.GroupsBucket, "KV_" + native.AttemptsBucket, "KV_" + records.MarksBucket, "KV_" + records.MakersBucket, "KV_" + delaysBucket, "KV_" + records.RetentionBucket, "KV_" + records.BookmarksBucket, "KV_" + ownersBucket}, info.Config.Name) {
			t.Errorf("there is a stream %s", info.Config.Name)
		}
	}
}

func TestGetManyOfManyKeys(t *testing.T) {
	t.Parallel()
	rules := []topics.Rule{{Pattern: "state.**", Compaction: true}, {Pattern: "plain"}}
	b := open(t, Config{Topics: rules})
	const n = 2_500 // more than one question answers
	var keys []string
	want := make(map[string]string)
	for _, topic := range []string{"state.a", "plain"} {
		p := b.NewPublisher()
		for i := range n {
			key := "key:" + strconv.Itoa(i)
			keys = append(keys, key)
			opts := PublishOptions{Key: key, Tombstone: i%10 == 3}
			payload := strconv.Itoa(i)
			if want[key] = payload; opts.Tombstone {
				delete(want, key)
				payload = ""
			}
			if err := p.PublishAsync(t.Context(), topic, []byte(payload), opts, func(_ event.Receipt, err error) {
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
		r := set(t, b, topic, "last", "x")
		if topic != "plain" {
			filled(t, b, topic, "last", r)
		}
		got, err := b.Keys(topic).GetMany(t.Context(), append(slices.Clip(keys), "none"))
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(payloadsOf(got), want) {
			t.Errorf("%s: got %d, want %d", topic, len(got), len(want))
		}
	}
}

// Answers are cut at a number of bytes and asked for again.
func TestGetManyOfLargePayloads(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	payload := `"` + strings.Repeat("x", 900<<10) + `"`
	var keys []string
	var r event.Receipt
	for i := range 24 {
		keys = append(keys, "k"+strconv.Itoa(i))
		r = set(t, b, "state.a", keys[i], payload)
	}
	filled(t, b, "state.a", keys[len(keys)-1], r)
	got, err := b.Keys("state.a").GetMany(t.Context(), keys)
	if err != nil || len(got) != len(keys) {
		t.Fatalf("got %d of %d, %v", len(got), len(keys), err)
	}
	for key, e := range got {
		if string(e.Payload) != payload {
			t.Errorf("%s has %d bytes", key, len(e.Payload))
		}
	}
}

// A stream that others made need not allow direct reads.
func TestGetManyWithoutDirectReads(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	cfg := streams.StreamConfig(b.rules.Of("theirs"), "theirs", b.cfg.Replicas, b.cfg.MemoryStorage)
	cfg.AllowDirect = false
	if _, err := b.conn.JS.CreateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		set(t, b, "theirs", strconv.Itoa(i), strconv.Itoa(i))
	}
	remove(t, b, "theirs", "7")
	got, err := b.Keys("theirs").GetMany(t.Context(), numbers(101))
	if err != nil || len(got) != 99 || string(got["42"].Payload) != "42" {
		t.Errorf("got %d, %v", len(got), err)
	}
}

// A bucket whose direct reads somebody took away is read at its leader, and no page is empty for
// that.
func TestReadsOfABucketWithoutDirectReads(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules, bucketCheck: time.Hour})
	gone := set(t, b, "state.a", "a", "1")
	filled(t, b, "state.a", "b", set(t, b, "state.a", "b", "2"))
	source, err := b.conn.JS.Stream(t.Context(), objectName("state.a"))
	if err != nil {
		t.Fatal(err)
	}
	if err := source.DeleteMsg(t.Context(), gone.Sequence); err != nil {
		t.Fatal(err)
	}
	info, err := b.conn.FindStream(t.Context(), streams.NewBucket("state.a").Stream)
	if err != nil {
		t.Fatal(err)
	}
	info.Config.AllowDirect = false
	if _, err := b.conn.JS.UpdateStream(t.Context(), info.Config); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Keys("state.a").GetMany(t.Context(), []string{"a", "b"}); err != nil || len(got) != 2 {
		t.Errorf("%v, %v", payloadsOf(got), err)
	}
	if page, err := b.Keys("state.a").Page(t.Context(), 0, 10); err == nil {
		t.Errorf("a page of %d", len(page))
	}
}

// A read that is given up leaves neither a subscription nor a consumer.
func TestReadsThatAreGivenUpLeaveNothing(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	for i := range 2_000 {
		set(t, b, "state.a", strconv.Itoa(i), "1")
	}
	subscriptions := func() (n int) {
		for _, l := range b.conn.Links {
			n += l.NC.NumSubscriptions()
		}
		return n
	}
	before := subscriptions()
	none := func(*event.Event) error { return nil }
	for i := range 40 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*200*time.Microsecond)
		_, _ = b.Keys("state.a").Page(ctx, 40*i, 1_000)
		_, _ = b.Keys("state.a").GetMany(ctx, numbers(100))
		_ = b.Keys("state.a").Each(ctx, none)
		_ = b.Keys("state.a").Watch(ctx, nil, none)
		_ = b.History("state.a").Tail(ctx, "", 0, none)
		cancel()
	}
	if n := subscriptions(); n != before {
		t.Errorf("%d subscriptions, %d before", n, before)
	}
	for _, name := range []string{streams.NewBucket("state.a").Stream, objectName("state.a")} {
		eventually(t, name+" has no consumers", func() bool {
			info, err := b.conn.FindStream(t.Context(), name)
			return err == nil && info.State.Consumers == 0
		})
	}
}

func TestTailOfNoTopic(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	err := b.History("no topic").Tail(t.Context(), "", 0, func(*event.Event) error { return nil })
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic {
		t.Errorf("got %v", err)
	}
}

func TestKeysOfEveryByte(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	keys := []string{"ä", "日本", "host:name:1", "a.b.c", "*", ">", "=", "=41", "\u007f", " ", strings.Repeat("z", 512), strings.Repeat("ß", 256)}
	for c := range 128 {
		keys = append(keys, "b"+string(rune(c)))
	}
	var r event.Receipt
	for i, key := range keys {
		r = set(t, b, "state.bytes", key, strconv.Itoa(i))
	}
	filled(t, b, "state.bytes", keys[len(keys)-1], r)
	got, err := b.Keys("state.bytes").GetMany(t.Context(), keys)
	if err != nil {
		t.Fatal(err)
	}
	_, js := nativeConn(t, url)
	kv, err := js.KeyValue(t.Context(), bucketName("state.bytes"))
	if err != nil {
		t.Fatal(err)
	}
	for i, key := range keys {
		if e := got[key]; e == nil || string(e.Payload) != strconv.Itoa(i) || e.Key != key {
			t.Errorf("key %q: %+v", key, e)
		}
		if e, err := b.Keys("state.bytes").Get(t.Context(), key); err != nil || string(e.Payload) != strconv.Itoa(i) {
			t.Errorf("key %q: %+v, %v", key, e, err)
		}
		if e, err := kv.Get(t.Context(), keyToken(key)); err != nil || string(e.Value()) != strconv.Itoa(i) {
			t.Errorf("key %q natively: %v, %v", key, e, err)
		}
	}
}

func TestCompactedTopicRefuses(t *testing.T) {
	t.Parallel()
	rules := []topics.Rule{{Pattern: "state.**", Compaction: true, MaxPayload: 100}}
	b := open(t, Config{Topics: rules})
	cases := []struct {
		name    string
		payload []byte
		opts    PublishOptions
		code    string
		names   string
	}{
		{"no key", []byte("1"), PublishOptions{}, event.CodeBadOptions, "topic state.a keeps the newest event of each key: give opts.key"},
		{"tombstone without key", nil, PublishOptions{Tombstone: true}, event.CodeBadOptions, "opts.key"},
		{"tombstone with payload", []byte("1"), PublishOptions{Key: "k", Tombstone: true}, event.CodeBadOptions, "payload"},
		{"large payload", bytes.Repeat([]byte("1"), 101), PublishOptions{Key: "k"}, event.CodePublishFailed, "101 bytes, at most 100"},
	}
	for range 2 { // before the topic exists, and when it does
		for _, c := range cases {
			_, err := b.Publish(t.Context(), "state.a", c.payload, c.opts)
			if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != c.code || !strings.Contains(known.Msg, c.names) {
				t.Errorf("%s: got %v", c.name, err)
			}
		}
		if _, err := b.conn.FindStream(t.Context(), objectName("state.a")); b.streams.Known("state.a") == nil && !errors.Is(err, event.ErrNotFound) {
			t.Errorf("a refused publish made the topic: %v", err)
		}
		set(t, b, "state.a", "k", "1")
	}
	for _, payload := range []string{"", "null"} {
		if _, err := b.Publish(t.Context(), "state.a", []byte(payload), PublishOptions{Key: "k", Tombstone: true}); err != nil {
			t.Errorf("tombstone with payload %q: %v", payload, err)
		}
		if e, err := b.Keys("state.a").Get(t.Context(), "k"); err != nil || string(e.Payload) != payload {
			t.Errorf("tombstone with payload %q is stored as %+v, %v", payload, e, err)
		}
	}
}

func TestSubscribersSeeTombstones(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	set(t, b, "state.a", "k", "1")
	remove(t, b, "state.a", "k")
	k := take(t, b, "state.a", "g", SubscribeOptions{From: FromEarliest})
	for _, want := range []bool{false, true} {
		d := k.next()
		if d.Event.Tombstone != want {
			t.Errorf("got %+v", d.Event)
		}
		if record := string(d.Event.AppendRecord(nil)); want && !strings.Contains(record, `"payload":null`) {
			t.Errorf("record %s", record)
		}
		_ = d.Ack()
	}
}

func TestNativeTombstones(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	nc, _ := nativeConn(t, url)
	var r event.Receipt
	for _, op := range []string{"DEL", "PURGE"} {
		set(t, b, "state.a", "k", "1")
		m := &nats.Msg{Subject: keyedSubject("state.a", "k"), Data: []byte("whatever"), Header: nats.Header{"KV-Operation": {op}}}
		if _, err := nc.RequestMsg(m, wait); err != nil {
			t.Fatal(err)
		}
		e, err := b.Keys("state.a").Get(t.Context(), "k")
		if err != nil || !e.Tombstone || !strings.Contains(string(e.AppendRecord(nil)), `"payload":null`) {
			t.Errorf("%s: %+v, %v", op, e, err)
		}
		r = event.Receipt{Sequence: e.Sequence}
	}
	filled(t, b, "state.a", "k", r)
	if got, err := b.Keys("state.a").GetMany(t.Context(), []string{"k", "l"}); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

// What comes from the bucket says the same as what comes from the stream, but for when it was
// stored.
func TestFieldsOfBucketAndStreamAgree(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: compactedRules})
	nc, _ := nativeConn(t, url)
	began := time.Now()
	set(t, b, "state.a", "by hub", "1")
	if _, err := b.Publish(t.Context(), "state.a", []byte(`{"a":1}`), PublishOptions{
		ID: "mine", TS: 42, HasTS: true, Key: "full", SID: "s", Headers: map[string]string{"H": "v"}, Tags: []string{"t"}, CausedBy: []string{"c"},
	}); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*nats.Msg{
		{Subject: keyedSubject("state.a", "native"), Data: []byte("not json")},
		{Subject: keyedSubject("state.a", "spoof"), Header: nats.Header{"Nats-Subject": {"x"}, "Nats-Sequence": {"77"}, "Status": {"204"}, "Nats-Time-Stamp": {"never"}}},
	} {
		if _, err := nc.RequestMsg(m, wait); err != nil {
			t.Fatal(err)
		}
	}
	filled(t, b, "state.a", "last", set(t, b, "state.a", "last", "1"))
	keys := []string{"by hub", "full", "native", "spoof"}
	many, err := b.Keys("state.a").GetMany(t.Context(), keys)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		one, err := b.Keys("state.a").Get(t.Context(), key)
		if err != nil || many[key] == nil {
			t.Errorf("%s: %v", key, err)
			continue
		}
		got, want := *many[key], *one
		if late := got.StoredAt - want.StoredAt; late < 0 {
			t.Errorf("%s: stored %v earlier", key, time.Duration(-late))
		}
		if got.TS < min(began.UnixMilli(), want.TS)-10 || got.TS > want.TS+wait.Milliseconds() {
			t.Errorf("%s: ts %d, in the stream %d", key, got.TS, want.TS)
		}
		got.StoredAt, got.TS = want.StoredAt, want.TS
		if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("%s:\n got %+v\nwant %+v", key, got, want)
		}
	}
}

func TestKeyWhoseEventsAreGone(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	r := set(t, b, "state.a", "k", "1")
	filled(t, b, "state.a", "k", r)
	s, err := b.conn.JS.Stream(t.Context(), objectName("state.a"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	e, err := b.Keys("state.a").Get(t.Context(), "k")
	if err != nil || !e.Gone || string(e.Payload) != "1" || e.Sequence != r.Sequence || e.ID != r.ID || e.Stream != r.Stream {
		t.Fatalf("%+v, %v", e, err)
	}
	none := uint64(0)
	r, err = b.Publish(t.Context(), "state.a", []byte("2"), PublishOptions{Key: "k", ExpectKeySequence: &none})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Publish(t.Context(), "state.a", []byte("3"), PublishOptions{Key: "k", ExpectKeySequence: &none}); !errors.Is(err, event.ErrKeyChanged) {
		t.Errorf("got %v", err)
	}
	filled(t, b, "state.a", "k", r)
	if e, err := b.Keys("state.a").Get(t.Context(), "k"); err != nil || e.Gone || string(e.Payload) != "2" {
		t.Errorf("%+v, %v", e, err)
	}
}
