package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/topics"
)

func TestPublishKeepsTheOrderOfCalls(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	p := b.NewPublisher()
	const n = 5_000
	var mu sync.Mutex
	seqs := make([]uint64, n)
	for i := range n {
		err := p.PublishAsync(t.Context(), "order", fmt.Append(nil, i), PublishOptions{}, func(r event.Receipt, err error) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			seqs[i] = r.Sequence
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, seq := range seqs {
		if seq != uint64(i+1) {
			t.Fatalf("event %d has sequence %d", i, seq)
		}
	}
}

func TestSameIDIsStoredOnce(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "fam.**", Family: "fam"}}})
	for _, topic := range []string{"alone", "fam.one", "fam.two"} {
		first, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{ID: "x", Key: "k1"})
		if err != nil {
			t.Fatal(err)
		}
		second, err := b.Publish(t.Context(), topic, []byte("2"), PublishOptions{ID: "x", Key: "k2"})
		if err != nil {
			t.Fatal(err)
		}
		if first.Duplicate || !second.Duplicate || second.ID != "x" || second.Sequence != first.Sequence {
			t.Errorf("%s: %+v, %+v", topic, first, second)
		}
		var got []string
		if err := b.History(topic).Scan(t.Context(), ScanOptions{}, func(e *event.Event) error {
			got = append(got, e.ID+" "+e.Key+" "+string(e.Payload)+" "+e.Topic)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if len(got) != 1 || got[0] != "x k1 1 "+topic {
			t.Errorf("%s: %q", topic, got)
		}
	}
}

func TestExpectKeySequence(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	at := func(seq uint64) *uint64 { return &seq }
	first, err := b.Publish(t.Context(), "state", []byte("1"), PublishOptions{Key: "k", ExpectKeySequence: at(0)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Publish(t.Context(), "state", []byte("2"), PublishOptions{Key: "k", ExpectKeySequence: at(0)}); !errors.Is(err, event.ErrKeyChanged) {
		t.Errorf("got %v", err)
	}
	publishAll(t, b, "state", "other")
	if _, err := b.Publish(t.Context(), "state", []byte("2"), PublishOptions{Key: "k", ExpectKeySequence: at(first.Sequence)}); err != nil {
		t.Errorf("got %v", err)
	}
	e, err := b.Keys("state").Get(t.Context(), "k")
	if err != nil || string(e.Payload) != "2" {
		t.Errorf("%v, %v", e, err)
	}
	if _, err := b.Keys("state").Get(t.Context(), "nobody"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

func TestOptionsThatWouldPoisonAStreamAreRefused(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint("h", i)] = ""
	}
	for name, opts := range map[string]PublishOptions{
		"tombstone":        {Headers: map[string]string{"KV-Operation": "DEL"}},
		"tombstone folded": {Headers: map[string]string{"kv-operation": "DEL"}},
		"server header":    {Headers: map[string]string{"nats-rollup": "all"}},
		"hub header":       {Headers: map[string]string{"EVENT-Id": "1"}},
		"blank in name":    {Headers: map[string]string{"a b": "1"}},
		"empty name":       {Headers: map[string]string{"": "1"}},
		"unicode name":     {Headers: map[string]string{"é": "1"}},
		"colon in name":    {Headers: map[string]string{"a:b": "1"}},
		"line break":       {Headers: map[string]string{"a": "1\r\nNats-Rollup: all"}},
		"outer blank":      {Headers: map[string]string{"a": " 1"}},
		"too many":         {Headers: many},
		"too large":        {Headers: map[string]string{"a": strings.Repeat("x", 16<<10)}},
		"large tags":       {Tags: numbers(20_000)},
		"id long":          {ID: strings.Repeat("i", 129)},
		"id blank":         {ID: " i"},
		"id control":       {ID: "a\x00b"},
		"id native":        {ID: "stream@7"},
		"key long":         {Key: strings.Repeat("k", 513)},
		"key encoding":     {Key: "\xff"},
		"sid control":      {SID: "a\nb"},
		"ts negative":      {TS: -1, HasTS: true},
		"ts unsafe":        {TS: 1 << 53, HasTS: true},
	} {
		_, err := b.Publish(t.Context(), "guarded", []byte("1"), opts)
		if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodeBadOptions {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := b.streams.Existing(t.Context(), "guarded"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("a refused publish made the topic: %v", err)
	}
}

func TestAllFieldsSurvive(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	opts := PublishOptions{
		ID: "id-1", TS: 0, HasTS: true, Key: "a:b.c d/é\x01*>", SID: "s", Headers: map[string]string{"Trace-Id": "ü", "x": ""},
		Tags: []string{"#duck", "a,b", "\n"}, CausedBy: []string{"p"},
	}
	if _, err := b.Publish(t.Context(), "full", []byte("{}"), opts); err != nil {
		t.Fatal(err)
	}
	e, err := b.Keys("full").Get(t.Context(), opts.Key)
	if err != nil {
		t.Fatal(err)
	}
	got := string(e.AppendRecord(nil))
	want := `{"id":"id-1","ts":0,"topic":"full","key":"a:b.c d/é\u0001*>","sid":"s","headers":{"Trace-Id":"ü","x":""},"caused_by":["p"],"tags":["#duck","a,b","\n"],"payload":{}}`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestADeletedStreamIsMadeAnew(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "gone", "1")
	if err := b.conn.JS.DeleteStream(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	_, err := b.Publish(t.Context(), "gone", []byte("2"), PublishOptions{})
	if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodePublishFailed {
		t.Errorf("got %v", err)
	}
	publishAll(t, b, "gone", "3")
}

func TestLimitsOfTopics(t *testing.T) {
	t.Parallel()
	obs := &counter{}
	b := open(t, Config{Observer: obs, Limits: Limits{Topics: 4, TopicsPerClient: 2}})
	code := func(err error) string {
		if e, ok := errors.AsType[*event.Error](err); ok {
			return e.Code
		}
		return fmt.Sprint(err)
	}
	pub := func(p *Publisher, topic string) error {
		_, err := p.Publish(t.Context(), topic, []byte("1"), PublishOptions{})
		return err
	}
	one, two := b.NewPublisher(), b.NewPublisher()
	for _, c := range []struct {
		p     *Publisher
		topic string
		want  string
	}{
		{one, "t1", "<nil>"},
		{one, "t2", "<nil>"},
		{one, "t1", "<nil>"},
		{one, "t3", event.CodeRateLimited},
		{two, "t3", "<nil>"},
		{one, "t3", "<nil>"}, // it exists: using it costs nothing
		{two, "t4", "<nil>"},
		{two, "t5", event.CodeOverloaded},
		{one, "dlq.t1", event.CodeOverloaded}, // the family's stream would be one more
	} {
		if got := code(pub(c.p, c.topic)); got != c.want {
			t.Errorf("%s: got %s, want %s", c.topic, got, c.want)
		}
	}
	_, err := b.Subscribe(t.Context(), "t6", "g", SubscribeOptions{CountFor: "another"}, ignore)
	if got := code(err); got != event.CodeOverloaded {
		t.Errorf("subscribe: got %s", got)
	}
	if obs.limit("topics") == 0 || obs.limit("topics_per_client") == 0 {
		t.Errorf("limits are not counted: %v", obs.counts)
	}
}

func TestPayloadLimit(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	if _, err := b.Publish(t.Context(), "big", make([]byte, 1<<20), PublishOptions{Headers: map[string]string{"a": strings.Repeat("x", 16<<10-1)}}); err != nil {
		t.Error(err)
	}
	_, err := b.Publish(t.Context(), "big", make([]byte, 1<<20+1), PublishOptions{})
	if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodePublishFailed || !strings.Contains(e.Msg, "1048576") {
		t.Errorf("got %v", err)
	}
}

func TestCloseTwice(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "a", "1")
	for range 2 {
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Publish(context.Background(), "a", []byte("1"), PublishOptions{}); !errors.Is(err, event.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := b.Subscribe(context.Background(), "a", "g", SubscribeOptions{}, ignore); err == nil {
		t.Error("a closed bus takes subscriptions")
	}
	if b.Ready(context.Background()) == nil {
		t.Error("a closed bus is ready")
	}
}

func TestAForeignStreamIsNotShown(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	if _, err := b.conn.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: "payroll", Subjects: []string{"secret.>"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.conn.JS.Publish(t.Context(), "secret.salary", []byte("1")); err != nil {
		t.Fatal(err)
	}
	_, pubErr := b.Publish(t.Context(), "payroll", []byte("1"), PublishOptions{})
	_, subErr := b.Subscribe(t.Context(), "payroll", "g", SubscribeOptions{From: FromEarliest}, ignore)
	scanErr := b.History("payroll").Scan(t.Context(), ScanOptions{}, func(*event.Event) error { t.Error("shown"); return nil })
	for _, err := range []error{pubErr, subErr, scanErr} {
		if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodeBadTopic {
			t.Errorf("got %v", err)
		}
	}
	// A stream made by hand for many topics is one of the bus's, and shows each topic its own
	// events only.
	if _, err := b.conn.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: "shared", Subjects: []string{"event.shared", "keyed.*.shared", "event.other"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.conn.JS.Publish(t.Context(), "event.other", []byte("1")); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "shared", "2")
	if n, err := scanned(t, b, "shared"); n != 1 || err != nil {
		t.Errorf("%d events, %v", n, err)
	}
}

func TestCovers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, subject string
		want             bool
	}{
		{"event.a", "event.a", true},
		{"event.>", "event.a.b", true},
		{"event.>", "event", false},
		{"event.*", "event.a", true},
		{"event.*", "event.a.b", false},
		{"event.a", "event.*", false},
		{"keyed.*.a", "keyed.*.a", true},
		{"keyed.x.a", "keyed.*.a", false},
		{"keyed.>", "keyed.*.a", true},
		{">", "anything", true},
	} {
		if got := streams.Covers(c.pattern, c.subject); got != c.want {
			t.Errorf("%s, %s: got %v", c.pattern, c.subject, got)
		}
	}
}
