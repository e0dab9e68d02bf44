package jetstream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// stored are the events of a topic.
func stored(tb testing.TB, b *Bus, topic string) []*event.Event {
	tb.Helper()
	var events []*event.Event
	for e, err := range b.History(topic).Read(tb.Context(), ReadOptions{}) {
		if err != nil {
			tb.Fatal(err)
		}
		events = append(events, e)
	}
	return events
}

// awaitStored waits until a topic has n events.
func awaitStored(tb testing.TB, b *Bus, topic string, n int) []*event.Event {
	tb.Helper()
	var events []*event.Event
	eventually(tb, fmt.Sprintf("%d events in %s", n, topic), func() bool {
		events = stored(tb, b, topic)
		return len(events) >= n
	})
	if len(events) != n {
		tb.Fatalf("%s has %d events, want %d", topic, len(events), n)
	}
	return events
}

// Subjects and names in the stream of delayed events.
const (
	delayedPrefix   = "eventhub.delayed."
	waitPrefix      = delayedPrefix + "wait."
	duePrefix       = delayedPrefix + "due."
	cancelledPrefix = delayedPrefix + "cancelled."
	dueConsumer     = "due"
)

// delayedCount is how many messages the stream of delayed events has under a filter.
func delayedCount(tb testing.TB, b *Bus, filter string) (n int, err error) {
	tb.Helper()
	_, err = b.conn.Direct(tb.Context(), publish.DelayedStream, &conn.DirectQuery{Seq: 1, Batch: 1, NextBySubj: filter}, func(_ *conn.StoredMsg, pending uint64) error {
		n = int(pending) + 1
		return nil
	})
	return n, err
}

// waiting is how many delayed events wait.
func waiting(tb testing.TB, b *Bus) int {
	tb.Helper()
	n, err := delayedCount(tb, b, waitPrefix+">")
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// delayCode is the code of the error of a publish with a delay.
func delayCode(err error) string {
	if e, ok := errors.AsType[*event.Error](err); ok {
		return e.Code
	}
	return ""
}

func TestDelayedEventIsStoredWhenDue(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{
		{Pattern: "few", MaxMsgs: 2}, {Pattern: "keyed", Compaction: true}, {Pattern: "fam.**", Family: "fam"},
	}})
	full := PublishOptions{
		ID: "mine", TS: 7, HasTS: true, Key: "a:b.c\r\n", SID: "s", Headers: map[string]string{"x": "Nats-Schedule: 1", "Nats_y": "z"},
		Tags: []string{"é\n", ""}, CausedBy: []string{"cause"},
	}
	payload := "{\"n\": 12345678901234567890,\n \"s\":\"\\u00e9\"}"
	for _, topic := range []string{"plain", "few", "keyed", "fam.one"} {
		t.Run(topic, func(t *testing.T) {
			t.Parallel()
			// Making the topic may take longer.
			if _, err := b.streams.Topic(t.Context(), topic, ""); err != nil {
				t.Fatal(err)
			}
			at := time.Now().Add(1500 * time.Millisecond)
			opts := full
			opts.At = at
			r, err := b.Publish(t.Context(), topic, []byte(payload), opts)
			if err != nil || r.ID != "mine" || r.Duplicate || r.Sequence != 0 {
				t.Fatalf("publish: %+v, %v", r, err)
			}
			if r, err = b.Publish(t.Context(), topic, []byte("2"), opts); err != nil || r.ID != "mine" || !r.Duplicate {
				t.Fatalf("a repetition: %+v, %v", r, err)
			}
			made, err := b.Publish(t.Context(), topic, []byte("2"), PublishOptions{Key: "k", Delay: 2 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			if got := stored(t, b, topic); len(got) != 0 && time.Now().Before(at) {
				t.Fatalf("the topic has %d events before one is due", len(got))
			}
			events := awaitStored(t, b, topic, 2)
			e := events[0]
			if time.Unix(0, e.StoredAt).Before(at) {
				t.Errorf("stored %v early", at.Sub(time.Unix(0, e.StoredAt)))
			}
			want := event.Event{
				ID: "mine", TS: 7, Topic: topic, Key: full.Key, SID: "s", Headers: full.Headers, CausedBy: full.CausedBy, Tags: full.Tags,
				Payload: []byte(payload), Stream: e.Stream, Sequence: 1, StoredAt: e.StoredAt,
			}
			if !reflect.DeepEqual(*e, want) {
				t.Errorf("stored %+v\nwant %+v", *e, want)
			}
			e = events[1]
			if e.ID != made.ID || e.TS != e.StoredAt/1e6 {
				t.Errorf("stored %+v; the publish answered %s", e, made.ID)
			}
			after, err := b.History(topic).Range(t.Context(), ReadOptions{From: FromAfterID(made.ID)})
			if err != nil {
				t.Fatal(err)
			}
			for e, err := range after.Events(t.Context()) {
				t.Errorf("behind the last event: %v, %v", e, err)
			}
		})
	}
}

func TestDelayedEventIsTheNewestOfItsKeyWhenDue(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "keyed", Compaction: true}}})
	if _, err := b.Publish(t.Context(), "keyed", []byte(`"later"`), PublishOptions{Key: "k", Delay: time.Second}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Publish(t.Context(), "keyed", []byte(`"now"`), PublishOptions{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	latest := func() *event.Event {
		e, err := b.Keys("keyed").Get(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := latest(); string(e.Payload) != `"now"` {
		t.Fatalf("before it is due: %s", e.Payload)
	}
	awaitStored(t, b, "keyed", 2)
	if e := latest(); string(e.Payload) != `"later"` {
		t.Errorf("when it is due: %s", e.Payload)
	}
	if _, err := b.Publish(t.Context(), "keyed", nil, PublishOptions{Key: "k", Tombstone: true, Delay: 300 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	awaitStored(t, b, "keyed", 3)
	if e := latest(); !e.Tombstone {
		t.Errorf("after a delayed tombstone: %+v", e)
	}
}

func TestDelayInThePastMeansNow(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	for i, opts := range []PublishOptions{{At: time.Now().Add(-time.Hour)}, {At: time.UnixMilli(0)}, {At: time.Now()}} {
		r, err := b.Publish(t.Context(), "now", []byte("1"), opts)
		if err != nil || r.Sequence != uint64(i+1) {
			t.Errorf("%v: %+v, %v", opts.At, r, err)
		}
	}
}

func TestBadDelaysAreRefused(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Limits: Limits{MaxDelay: time.Hour}})
	seq := uint64(0)
	for msg, opts := range map[string]PublishOptions{
		"give one":                 {Delay: time.Second, At: time.Now().Add(time.Second)},
		"must not be negative":     {Delay: -1},
		"at most 3600000":          {Delay: time.Hour + 1},
		"more than 3600000":        {At: time.Now().Add(2 * time.Hour)},
		"exclude each other":       {Delay: time.Second, Key: "k", ExpectKeySequence: &seq},
		"opts.id has 129 bytes":    {Delay: time.Second, ID: strings.Repeat("x", 129)},
		"opts.tombstone removes a": {Delay: time.Second, Tombstone: true},
	} {
		_, err := b.Publish(t.Context(), "bad", []byte("1"), opts)
		if delayCode(err) != event.CodeBadOptions || !strings.Contains(err.Error(), msg) {
			t.Errorf("%s: got %v", msg, err)
		}
	}
	if got := stored(t, b, "bad"); len(got) != 0 {
		t.Errorf("%d events were stored", len(got))
	}
}

// A server that is too old makes the stream without the setting, as here somebody else did.
func TestDelayNeedsMessageSchedules(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url})
	if _, err := b.conn.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: publish.DelayedStream, Subjects: []string{delayedPrefix + ">"}}); err != nil {
		t.Fatal(err)
	}
	_, err := b.Publish(t.Context(), "t", []byte("1"), PublishOptions{Delay: time.Second})
	if delayCode(err) != event.CodeBadOptions || !strings.Contains(err.Error(), "nats-server 2.12") {
		t.Errorf("got %v", err)
	}
	if err := b.NewPublisher().Cancel(t.Context(), "t", "x"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("cancel: %v", err)
	}
}

func TestDelayedEventCanBeCancelled(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	p := b.NewPublisher()
	if err := p.Cancel(t.Context(), "t", "none"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("without a delayed event: %v", err)
	}
	later := PublishOptions{ID: "a", Delay: time.Second}
	if _, err := b.Publish(t.Context(), "t", []byte("1"), later); err != nil {
		t.Fatal(err)
	}
	for _, other := range [][2]string{{"t", "b"}, {"u", "a"}, {"t.a", "a"}} {
		if err := p.Cancel(t.Context(), other[0], other[1]); !errors.Is(err, event.ErrNotFound) {
			t.Errorf("cancel %v: %v", other, err)
		}
	}
	if err := p.Cancel(t.Context(), "t", "a"); err != nil {
		t.Fatal(err)
	}
	if err := p.Cancel(t.Context(), "t", "a"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("cancelled twice: %v", err)
	}
	// the same id may wait again
	if r, err := b.Publish(t.Context(), "t", []byte("2"), later); err != nil || r.Duplicate {
		t.Fatalf("published again: %+v, %v", r, err)
	}
	if events := awaitStored(t, b, "t", 1); string(events[0].Payload) != "2" {
		t.Errorf("stored %s", events[0].Payload)
	}
	if err := p.Cancel(t.Context(), "t", "a"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("cancelled when stored: %v", err)
	}
	for _, id := range []string{"", "x@1", " x"} {
		if err := p.Cancel(t.Context(), "t", id); delayCode(err) != event.CodeBadOptions {
			t.Errorf("cancel %q: %v", id, err)
		}
	}
}

// Each event is cancelled around the moment at which it is due, over two hubs: it is cancelled or
// stored, never both, never neither.
func TestCancelRacesWithTheDueTime(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	const events = 400
	cancelled := make(map[string]bool)
	var mu sync.Mutex
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range events {
		at := time.Now().Add(1500 * time.Millisecond) // however long the publishes before it took
		if _, err := one.Publish(t.Context(), "race", []byte("1"), PublishOptions{ID: strconv.Itoa(i), At: at}); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			// The server stores what is due some milliseconds later, and every quarter of a second
			// while much is due.
			<-time.After(time.Until(at) + time.Duration(i%25)*10*time.Millisecond)
			p := []*Bus{one, two}[i%2].NewPublisher()
			err := p.Cancel(t.Context(), "race", strconv.Itoa(i))
			if err != nil && !errors.Is(err, event.ErrNotFound) {
				t.Errorf("cancel %d: %v", i, err)
			}
			mu.Lock()
			defer mu.Unlock()
			cancelled[strconv.Itoa(i)] = err == nil
		})
	}
	wg.Wait()
	eventually(t, "no event to wait", func() bool {
		n, err := delayedCount(t, one, duePrefix+">")
		return err == nil && n == 0 && waiting(t, one) == 0
	})
	<-time.After(500 * time.Millisecond) // what was on its way
	have := make(map[string]bool)
	for _, e := range stored(t, one, "race") {
		if have[e.ID] {
			t.Errorf("%s is stored twice", e.ID)
		}
		have[e.ID] = true
	}
	gone := 0
	for id, was := range cancelled {
		if was == have[id] {
			t.Errorf("%s: cancelled %v, stored %v", id, was, have[id])
		}
		if was {
			gone++
		}
	}
	t.Logf("%d of %d were cancelled", gone, events)
	if gone == 0 || gone == events {
		t.Errorf("the race was never run: %d of %d were cancelled", gone, events)
	}
}

func TestDelayedEventsSurviveARestartOfTheEmbeddedServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const events = 50
	at := time.Now().Add(2 * time.Second)
	first := open(t, Config{Server: natstest.Embed(t, dir)})
	want := make(map[string]bool)
	for i := range events {
		r, err := first.Publish(t.Context(), "again", []byte(strconv.Itoa(i)), PublishOptions{At: at.Add(time.Duration(i) * 10 * time.Millisecond)})
		if err != nil {
			t.Fatal(err)
		}
		want[r.ID] = true
	}
	_ = first.Close()
	b := open(t, Config{Server: natstest.Embed(t, dir)})
	got := make(map[string]bool)
	for _, e := range awaitStored(t, b, "again", events) {
		got[e.ID] = true
		if time.Unix(0, e.StoredAt).Before(at) {
			t.Errorf("%s was early", e.ID)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("stored %v, want %v", got, want)
	}
}

// A hub that dies between the publish of a due event and its acknowledgement leaves it to the next
// one, which finds it in its topic, also beyond the duplicate window. A native client plays the hub
// that dies.
func TestDueEventIsStoredOnceWhenAHubDies(t *testing.T) {
	t.Parallel()
	for _, forgets := range []bool{false, true} {
		t.Run(fmt.Sprintf("the server forgets deliveries %v", forgets), func(t *testing.T) {
			t.Parallel()
			url, cfg := "", Config{AckWait: 3 * time.Second, Topics: []topics.Rule{{Pattern: "once", DuplicateWindow: time.Second}}}
			delay := time.Second
			// The hub has to be closed before the events are due.
			for at := (time.Time{}); time.Until(at) < 0; delay *= 2 {
				url = natsServer(t)
				cfg.URL = url
				b := open(t, cfg)
				at = time.Now().Add(delay)
				for _, id := range []string{"stored", "lost"} {
					if _, err := b.Publish(t.Context(), "once", []byte("1"), PublishOptions{ID: id, At: at}); err != nil {
						t.Fatal(err)
					}
				}
				eventually(t, "the consumer of due events", func() bool {
					_, err := b.conn.JS.Consumer(t.Context(), publish.DelayedStream, dueConsumer)
					return err == nil
				})
				_ = b.Close()
			}
			nc, err := nats.Connect(url)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			js, err := natsjs.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			c, err := js.Consumer(t.Context(), publish.DelayedStream, dueConsumer)
			if err != nil {
				t.Fatal(err)
			}
			due, err := c.Fetch(2, natsjs.FetchMaxWait(delay+wait))
			if err != nil {
				t.Fatal(err)
			}
			for m := range due.Messages() {
				if id := m.Headers().Get(native.HeaderID); id == "stored" {
					if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "event.once", Data: m.Data(), Header: nats.Header{native.HeaderMsgID: {id}}}); err != nil {
						t.Fatal(err)
					}
				}
			}
			if forgets {
				if err := js.DeleteConsumer(t.Context(), publish.DelayedStream, dueConsumer); err != nil {
					t.Fatal(err)
				}
			}
			<-time.After(1500 * time.Millisecond) // the duplicate window

			b := open(t, cfg)
			awaitStored(t, b, "once", 2)
			eventually(t, "all to be settled", func() bool {
				n, err := delayedCount(t, b, duePrefix+">")
				return err == nil && n == 0
			})
			if events := stored(t, b, "once"); len(events) != 2 || events[0].ID != "stored" || events[1].ID != "lost" {
				t.Errorf("stored: %v", events)
			}
		})
	}
}

func TestDelayedEventsAreCounted(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	watch := &counter{}
	b := open(t, Config{URL: url, Observer: watch, Limits: Limits{DelayedPerClient: 5, Delayed: 8}})
	publishOne := func(client string) error {
		_, err := b.Publish(t.Context(), "t", []byte("1"), PublishOptions{Delay: time.Hour, CountFor: client, ID: ""})
		return err
	}
	n := 0
	for ; publishOne("greedy") == nil; n++ {
	}
	err := publishOne("greedy")
	if n != 5 || delayCode(err) != event.CodeOverloaded || !strings.Contains(err.Error(), "delayed_per_client") || watch.limit("delayed_per_client") != 2 {
		t.Errorf("%d events were taken, and then: %v", n, err)
	}
	// another hub knows them, too
	other := open(t, Config{URL: url, Limits: Limits{DelayedPerClient: 5}})
	if _, err := other.Publish(t.Context(), "t", []byte("1"), PublishOptions{Delay: time.Hour, CountFor: "greedy"}); delayCode(err) != event.CodeOverloaded {
		t.Errorf("through another hub: %v", err)
	}
	for n = 0; publishOne("modest") == nil; n++ {
	}
	if err = publishOne("modest"); n != 3 || !strings.Contains(err.Error(), "(delayed)") {
		t.Errorf("%d events were taken beside those, and then: %v", n, err)
	}
	// room comes back
	for e := range 3 {
		sum := sha256.Sum256([]byte("greedy"))
		m, err := b.conn.LastBySubject(t.Context(), publish.DelayedStream, waitPrefix+hex.EncodeToString(sum[:8])+".>")
		if err != nil {
			t.Fatal(err)
		}
		if err := b.NewPublisher().Cancel(t.Context(), "t", m.Header.Get(native.HeaderID)); err != nil {
			t.Fatalf("cancel %d: %v", e, err)
		}
	}
	eventually(t, "room", func() bool { return publishOne("greedy") == nil })
}

func TestDelayedEventsDisturbNoReader(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	k := take(t, b, "t", "g", SubscribeOptions{})
	for i := range 20 {
		if _, err := b.Publish(t.Context(), "t", []byte(strconv.Itoa(i)), PublishOptions{Delay: time.Hour}); err != nil {
			t.Fatal(err)
		}
	}
	info, err := b.conn.FindStream(t.Context(), "t")
	if err != nil || info.State.LastSeq != 0 {
		t.Errorf("the stream of the topic: %+v, %v", info, err)
	}
	if changes, err := b.Admin().PlanTopics(context.Background()); err != nil || len(changes) != 0 {
		t.Errorf("a plan names %v, %v", changes, err)
	}
	k.quiet(300 * time.Millisecond)
}
