package native_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

func TestPublishNeedsATopic(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if _, err := r.client.Publish(t.Context(), "orders.placed", []byte("1"), native.Fields{}); !errors.Is(err, native.ErrNoTopic) {
		t.Errorf("a publish to a topic without a stream: %v", err)
	}
	if _, err := r.client.Group(t.Context(), "orders.placed", "g", native.GroupOptions{}); !errors.Is(err, native.ErrNoTopic) {
		t.Errorf("a group of a topic without a stream: %v", err)
	}
	r.create("orders.placed")
	r.publish("orders.placed", "1", native.Fields{})
}

// TestEventsGoBothWays publishes events with all fields natively and through a bus, and reads each
// on the other side.
func TestEventsGoBothWays(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *jetstream.Config) {
		c.Topics = []topics.Rule{{Pattern: "user.**", Family: "user"}}
	})
	r.create("orders", "user.7")
	fields := native.Fields{ID: "o-1", TS: 5, HasTS: true, Key: "customer:1", SID: "s", Headers: map[string]string{"traceparent": "00-ab", "X": "é"}, Tags: []string{"a", "é"}, CausedBy: []string{"c"}}
	for _, topic := range []string{"orders", "user.7"} {
		hub := r.member(topic, "hub", jetstream.SubscribeOptions{From: jetstream.FromEarliest})
		own := r.group(topic, "native", native.GroupOptions{Earliest: true})
		r.publish(topic, "1", fields)
		if ack := r.publish(topic, "1", fields); !ack.Duplicate {
			t.Errorf("%s: a second publish of an id is stored", topic)
		}
		byHub := jetstream.PublishOptions{ID: "o-2", TS: 5, HasTS: true, Key: fields.Key, SID: fields.SID, Headers: fields.Headers, Tags: fields.Tags, CausedBy: fields.CausedBy}
		if _, err := r.bus.Publish(t.Context(), topic, []byte("2"), byHub); err != nil {
			t.Fatal(err)
		}
		// The server takes an id of the one for an id of the other.
		byHub.ID = "o-1"
		if got, err := r.bus.Publish(t.Context(), topic, []byte("3"), byHub); err != nil || !got.Duplicate {
			t.Errorf("%s: a publish of the same id through the hub: %+v, %v", topic, got, err)
		}
		for i, id := range []string{"o-1", "o-2"} {
			seen, read := hub.next(), r.next(own)
			for how, e := range map[string]*native.Event{"hub": &seen.Event, "native": read.Event} {
				if e.ID != id || e.TS != 5 || e.Topic != topic || e.Key != fields.Key || e.SID != "s" || !maps.Equal(e.Headers, fields.Headers) ||
					!slices.Equal(e.Tags, fields.Tags) || !slices.Equal(e.CausedBy, fields.CausedBy) || string(e.Payload) != strconv.Itoa(i+1) {
					t.Errorf("%s reads from %s: %+v", how, topic, e)
				}
			}
			if got, want := string(read.Event.AppendRecord(nil)), string(seen.Event.AppendRecord(nil)); got != want {
				t.Errorf("the records differ: %s and %s", got, want)
			}
			if err := errors.Join(seen.Ack(), read.Ack()); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestBareMessagesAreEvents publishes nothing but a subject and a body.
func TestBareMessagesAreEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders")
	hub := r.member("orders", "hub", jetstream.SubscribeOptions{})
	for body, want := range map[string]string{
		`{"order":7}`: `,"payload":{"order":7}}`,
		"not json":    `,"headers":{"Event-Encoding":"text"},"payload":"not json"}`,
		"\xff\x00":    `,"headers":{"Event-Encoding":"base64"},"payload":"/wA="}`,
		"":            `,"payload":null}`,
	} {
		ack, err := r.js.Publish(t.Context(), "event.orders", []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		d := hub.next()
		start := `{"id":"orders@` + strconv.FormatUint(ack.Sequence, 10) + `","ts":` + strconv.FormatInt(d.Event.StoredAt/1e6, 10) + `,"topic":"orders"`
		if got := string(d.Event.AppendRecord(nil)); got != start+want {
			t.Errorf("%q is the event %s, want %s", body, got, start+want)
		}
		if err := d.Ack(); err != nil {
			t.Error(err)
		}
	}
}

// TestMixedGroup lets a native member and one of a hub share a group: each event goes to one of
// them, and attempts count together.
func TestMixedGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders", "dlq.orders")
	hub := r.member("orders", "g", jetstream.SubscribeOptions{MaxAttempts: 4, MaxInFlight: 1})
	own := r.group("orders", "g", native.GroupOptions{MaxAttempts: 4})
	r.publish("orders", "1", native.Fields{ID: "one"})
	// One of the two has the event at a time, and refuses it.
	for attempt := 1; attempt <= 4; attempt++ {
		if attempt%2 == 1 {
			d := hub.next()
			if d.Attempt != attempt {
				t.Errorf("the hub's member has attempt %d, want %d", d.Attempt, attempt)
			}
			pause(hub) // so that the other one has it next
			if err := d.Nack("hub", 0); err != nil {
				t.Error(err)
			}
			continue
		}
		d := r.next(own)
		if d.Attempt != attempt {
			t.Errorf("the native member has attempt %d, want %d", d.Attempt, attempt)
		}
		if err := d.Nack(t.Context(), "native", 0); err != nil {
			t.Error(err)
		}
		if attempt < 4 {
			hub.sub.Resume()
		}
	}
	letters := r.member("dlq.orders", "letters", jetstream.SubscribeOptions{From: jetstream.FromEarliest})
	var letter struct {
		Topic, Group, Err string
		Attempts          int
		Original          struct{ ID string }
	}
	if err := json.Unmarshal(letters.next().Event.Payload, &letter); err != nil {
		t.Fatal(err)
	}
	if letter.Topic != "orders" || letter.Group != "g" || letter.Err != "native" || letter.Attempts != 4 || letter.Original.ID != "one" {
		t.Errorf("the dead letter is %+v", letter)
	}
	eventually(t, "the event is settled", func() bool {
		info, err := own.Consumer().Info(t.Context())
		return err == nil && info.NumAckPending == 0 && info.NumPending == 0
	})
}

// TestDeadLettersOfNativeMembers has a handler fail for good, and looks at the letter as operators
// do: it can be put back to the group.
func TestDeadLettersOfNativeMembers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders", "dlq.orders")
	own := r.group("orders", "g", native.GroupOptions{MaxAttempts: 2, Workers: 3})
	var mu sync.Mutex
	attempts := make(map[string][]int)
	end := consume(t, own, func(_ context.Context, d *native.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		attempts[d.Event.ID] = append(attempts[d.Event.ID], d.Attempt)
		switch string(d.Event.Payload) {
		case `"bad"`:
			return errors.New("no")
		case `"panics"`:
			panic("a fault")
		}
		return nil
	})
	for _, id := range []string{"good", "bad", "panics"} {
		r.publish("orders", `"`+id+`"`, native.Fields{ID: id, Key: "k"})
	}
	letters := r.bus.Admin().DeadLetters()
	var found []*jetstream.Letter
	eventually(t, "both letters", func() bool {
		page, err := letters.List(t.Context(), jetstream.LetterFilter{Topic: "orders", Group: "g"}, "", 10, func(*jetstream.Letter) bool { return true })
		found = page.Letters
		return err == nil && len(page.Letters) == 2
	})
	if err := end(); err != nil {
		t.Error(err)
	}
	for _, l := range found {
		if l.Attempts != 2 || l.Event.Key != "k" || l.Event.Stream != "orders" {
			t.Errorf("letter %+v of %+v", l, l.Event)
		}
	}
	if got := attempts["bad"]; !slices.Equal(got, []int{1, 2}) {
		t.Errorf("attempts of the bad event: %v", got)
	}
	if got := attempts["good"]; !slices.Equal(got, []int{1}) {
		t.Errorf("attempts of the good event: %v", got)
	}
	// A member of a hub gets what is put back.
	hub := r.member("orders", "g", jetstream.SubscribeOptions{})
	if _, err := letters.Redrive(t.Context(), jetstream.LetterFilter{Topic: "orders", Group: "g", EventID: "bad"}, jetstream.RedriveOptions{}); err != nil {
		t.Fatal(err)
	}
	if d := hub.next(); d.Event.ID != "bad" || d.Event.Key != "k" || d.Event.Sequence == 0 {
		t.Errorf("the hub's member gets %+v", d.Event)
	}
}

// TestMembersFollowASeek moves a group while a native member consumes.
func TestMembersFollowASeek(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders")
	own := r.group("orders", "g", native.GroupOptions{Earliest: true})
	got := make(chan string, 100)
	end := consume(t, own, func(_ context.Context, d *native.Delivery) error {
		got <- d.Event.ID
		return nil
	})
	next := func() string {
		t.Helper()
		select {
		case id := <-got:
			return id
		case <-time.After(patience):
			t.Fatal("no event came")
			return ""
		}
	}
	r.publish("orders", "1", native.Fields{ID: "one"})
	if id := next(); id != "one" {
		t.Fatalf("%s came", id)
	}
	eventually(t, "the ack", func() bool {
		info, err := own.Consumer().Info(t.Context())
		return err == nil && info.AckFloor.Stream == 1
	})
	if err := r.bus.Group("orders", "g").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	if id := next(); id != "one" {
		t.Errorf("after the seek, %s came", id)
	}
	if err := r.bus.Group("orders", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.publish("orders", "2", native.Fields{ID: "two"})
	eventually(t, "the end of the group", func() bool {
		_, err := r.client.Group(t.Context(), "orders", "g", native.GroupOptions{})
		return errors.Is(err, native.ErrGroupGone)
	})
	if err := end(); err != nil && !errors.Is(err, native.ErrGroupGone) {
		t.Error(err)
	}
}

// TestKeptEventsStay has a handler run for longer than AckWait, and a second member wait for the
// event.
func TestKeptEventsStay(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *jetstream.Config) { c.AckWait = 2 * time.Second })
	r.create("orders")
	own := r.group("orders", "g", native.GroupOptions{AckWait: 2 * time.Second})
	started, finish := make(chan int, 10), make(chan struct{})
	end := consume(t, own, func(ctx context.Context, d *native.Delivery) error {
		started <- d.Attempt
		select {
		case <-finish:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	hub := r.member("orders", "g", jetstream.SubscribeOptions{})
	pause(hub)
	r.publish("orders", "1", native.Fields{})
	if attempt := <-started; attempt != 1 {
		t.Errorf("attempt %d", attempt)
	}
	hub.sub.Resume()
	select {
	case <-hub.got:
		t.Error("the event went to another member while its handler ran")
	case <-time.After(9 * time.Second / 2): // more than twice AckWait
	}
	close(finish)
	eventually(t, "the ack", func() bool {
		info, err := own.Consumer().Info(t.Context())
		return err == nil && info.NumAckPending == 0
	})
	if err := end(); err != nil {
		t.Error(err)
	}
}

// TestLateSettlementsAreNotSent settles an event whose time is over: the delivery of the member
// that has the event by then stays.
func TestLateSettlementsAreNotSent(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders", "dlq.orders")
	own := r.group("orders", "g", native.GroupOptions{AckWait: time.Second, MaxAttempts: 1})
	r.publish("orders", "1", native.Fields{})
	late := r.next(own)
	now := r.next(own) // after AckWait
	if now.Attempt != 2 {
		t.Errorf("attempt %d", now.Attempt)
	}
	for how, settle := range map[string]func() error{
		"Ack": late.Ack, "Keep": func() error { return late.Keep(t.Context()) }, "Nack": func() error { return late.Nack(t.Context(), "", 0) },
	} {
		if err := settle(); !errors.Is(err, native.ErrNotHeld) {
			t.Errorf("a late %s: %v", how, err)
		}
	}
	info, err := own.Consumer().Info(t.Context())
	if err != nil || info.AckFloor.Stream != 0 {
		t.Errorf("the event is settled: %+v, %v", info, err)
	}
}

// TestSettlingTwice settles each event once: only the first settlement is sent.
func TestSettlingTwice(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders")
	own := r.group("orders", "g", native.GroupOptions{})
	r.publish("orders", "1", native.Fields{})
	d := r.next(own)
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	if err := d.Ack(); !errors.Is(err, native.ErrNotHeld) {
		t.Errorf("a second Ack: %v", err)
	}
	if err := d.Nack(t.Context(), "", 0); !errors.Is(err, native.ErrNotHeld) {
		t.Errorf("Nack after Ack: %v", err)
	}
}

// TestAttemptsOfAMemberThatEnds receives an event that a hub had before, unseen, when the member
// has come to its end: the attempt is that of an event that no client had.
func TestAttemptsOfAMemberThatEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders")
	own := r.group("orders", "g", native.GroupOptions{})
	r.publish("orders", "1", native.Fields{})
	take := func() natsjs.Msg {
		batch, err := own.Consumer().Fetch(1)
		if err != nil {
			t.Fatal(err)
		}
		return <-batch.Messages()
	}
	unseen := take()
	meta, err := unseen.Metadata()
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := r.js.KeyValue(t.Context(), native.AttemptsBucket)
	if err != nil {
		t.Fatal(err)
	}
	key := native.NoteKey(meta.Stream, meta.Consumer, native.ConsumerMade(own.Consumer().CachedInfo()), meta.Sequence.Stream)
	if _, err := bucket.Put(t.Context(), key, []byte("1")); err != nil {
		t.Fatal(err)
	}
	if err := unseen.Nak(); err != nil {
		t.Fatal(err)
	}
	again := take()
	ended, end := context.WithCancel(t.Context())
	end()
	d, err := own.Receive(ended, again)
	if err != nil {
		t.Fatal(err)
	}
	if d.Attempt != 1 {
		t.Errorf("attempt %d", d.Attempt)
	}
}

// TestAttemptsOfManyGivenBack receives an event that a hub has given back with many others: no
// client had any of them. A note of its own that the server has forgotten deliveries counts alone.
func TestAttemptsOfManyGivenBack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders")
	own := r.group("orders", "g", native.GroupOptions{})
	r.publish("orders", "1", native.Fields{})
	take := func() natsjs.Msg {
		batch, err := own.Consumer().Fetch(1)
		if err != nil {
			t.Fatal(err)
		}
		return <-batch.Messages()
	}
	bucket, err := r.js.KeyValue(t.Context(), native.AttemptsBucket)
	if err != nil {
		t.Fatal(err)
	}
	note := func(seq uint64, text string) {
		info := own.Consumer().CachedInfo()
		if _, err := bucket.PutString(t.Context(), native.NoteKey(info.Stream, info.Name, native.ConsumerMade(info), seq), text); err != nil {
			t.Fatal(err)
		}
	}
	note(0, `[[1,1,2],[3,9,1]]`)
	for range 2 {
		if err := take().Nak(); err != nil {
			t.Fatal(err)
		}
	}
	third := take()
	d, err := own.Receive(t.Context(), third)
	if err != nil {
		t.Fatal(err)
	}
	if d.Attempt != 1 {
		t.Errorf("the first attempt is attempt %d", d.Attempt)
	}
	if err := third.Nak(); err != nil {
		t.Fatal(err)
	}
	note(1, "-1")
	if d, err = own.Receive(t.Context(), take()); err != nil {
		t.Fatal(err)
	}
	if d.Attempt != 5 {
		t.Errorf("the fourth delivery of at least five is attempt %d", d.Attempt)
	}
}

// TestLargeDeadLetters fails an event that does not fit into a letter: the letter says where it is.
func TestLargeDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders", "dlq.orders")
	own := r.group("orders", "g", native.GroupOptions{MaxAttempts: 1})
	body := bytes.Repeat([]byte{1}, 1<<20-100) // six times as long as JSON
	if _, err := r.js.Publish(t.Context(), "event.orders", body); err != nil {
		t.Fatal(err)
	}
	if err := r.next(own).Nack(t.Context(), "no", 0); err != nil {
		t.Fatal(err)
	}
	page, err := r.bus.Admin().DeadLetters().List(t.Context(), jetstream.LetterFilter{Topic: "orders"}, "", 10, func(*jetstream.Letter) bool { return true })
	if err != nil || len(page.Letters) != 1 {
		t.Fatalf("letters %+v, %v", page, err)
	}
	if reason := page.Letters[0].Reason; !strings.HasPrefix(reason, "no (payload of") {
		t.Errorf("reason %q", reason)
	}
}

// TestNewestByKey reads the newest event of a key as KV clients do, whoever published it.
func TestNewestByKey(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *jetstream.Config) {
		c.Topics = []topics.Rule{{Pattern: "state", Compaction: true}}
	})
	r.create("state")
	kv, err := r.js.KeyValue(t.Context(), native.BucketName("state"))
	if err != nil {
		t.Fatal(err)
	}
	watch, err := kv.Watch(t.Context(), native.KeyToken("host:7"), natsjs.UpdatesOnly())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Stop() }()
	update := func() natsjs.KeyValueEntry {
		t.Helper()
		select {
		case e := <-watch.Updates():
			return e
		case <-time.After(patience):
			t.Fatal("no update came")
			return nil
		}
	}
	r.publish("state", "1", native.Fields{Key: "host:7"})
	if e := update(); string(e.Value()) != "1" {
		t.Errorf("update %s", e.Value())
	}
	if _, err := r.bus.Publish(t.Context(), "state", []byte("2"), jetstream.PublishOptions{Key: "host:7"}); err != nil {
		t.Fatal(err)
	}
	if e := update(); string(e.Value()) != "2" {
		t.Errorf("update %s", e.Value())
	}
	if e, err := kv.Get(t.Context(), native.KeyToken("host:7")); err != nil || string(e.Value()) != "2" {
		t.Errorf("get: %v, %v", e, err)
	}
	r.publish("state", "", native.Fields{Key: "host:7", Tombstone: true})
	if e := update(); e.Operation() != natsjs.KeyValueDelete {
		t.Errorf("update %v", e.Operation())
	}
	if _, err := kv.Get(t.Context(), native.KeyToken("host:7")); !errors.Is(err, natsjs.ErrKeyNotFound) {
		t.Errorf("get of a removed key: %v", err)
	}
	if e, err := r.bus.Keys("state").Get(t.Context(), "host:7"); err != nil || !e.Tombstone {
		t.Errorf("the hub reads a removed key: %+v, %v", e, err)
	}
}

// TestMessagesThatAreNoEvents are refused, and not taken for events.
func TestMessagesThatAreNoEvents(t *testing.T) {
	t.Parallel()
	for _, subject := range []string{"orders", "keyed.k", "event.a b", "$KV.latest_orders.k"} {
		if _, err := native.DecodeStored("s", &natsjs.RawStreamMsg{Subject: subject, Header: nats.Header{}}); !errors.Is(err, native.ErrNotEvent) {
			t.Errorf("%s: %v", subject, err)
		}
	}
}
