package eventhub_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/facade/hubtest"
	eventhub "eventhub/sdk/go"
)

var none = eventhub.PublishOptions{}

var uuidV7 = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

func TestPublishReturnsTheIDOfTheStoredEvent(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	topic, ts := newTopic(), int64(7)
	full := eventhub.PublishOptions{TS: &ts, Key: "k", SID: "s", Headers: map[string]string{"x-a": "b"}, Tags: []string{"t"}, CausedBy: []string{"c"}}
	id, err := c.Publish(t.Context(), topic, map[string]int{"n": 1}, full)
	if err != nil || !uuidV7.MatchString(id) {
		t.Fatal(id, err)
	}
	given, err := c.Publish(t.Context(), topic, "<two>", eventhub.PublishOptions{ID: "order-1"})
	if err != nil || given != "order-1" {
		t.Fatal(given, err)
	}
	if _, err := c.Publish(t.Context(), topic, json.RawMessage(`{"big": 12345678901234567890}`), none); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Publish(t.Context(), topic, nil, none); err != nil {
		t.Fatal(err)
	}
	if got, want := stored(t, hub, topic), []string{`{"n":1}`, `"<two>"`, `{"big": 12345678901234567890}`, `null`}; !slices.Equal(got, want) {
		t.Errorf("stored %q", got)
	}
	r := eventhub.Reader{URL: hub.HTTP, Token: hub.Token}
	for e, err := range r.Replay(t.Context(), topic, eventhub.ReplayOptions{Limit: 1}) {
		if err != nil || e.ID != id || e.TS != 7 || e.Topic != topic || e.Key != "k" || e.SID != "s" || e.Headers["x-a"] != "b" || e.Tags[0] != "t" || e.CausedBy[0] != "c" {
			t.Errorf("stored %+v, %v", e, err)
		}
	}
}

func TestARefusedPublishHasTheHubsCode(t *testing.T) {
	t.Parallel()
	hub := jwtHub(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: scoped(time.Hour, "a", "publish:allowed.*")})
	try := func(topic string, payload any, opts eventhub.PublishOptions) error {
		_, err := c.Publish(t.Context(), topic, payload, opts)
		return err
	}
	failsWith(t, try("other", 1, none), "forbidden", false)
	failsWith(t, try("a..b", 1, none), "bad_topic", false)
	failsWith(t, try("allowed.x", 1, eventhub.PublishOptions{ID: strings.Repeat("x", 200)}), "bad_options", false)
	failsWith(t, try("allowed.x", strings.Repeat("x", 1_100_000), none), "publish_failed", false)
	failsWith(t, try("allowed.x", strings.Repeat("x", 5_000_000), none), "publish_failed", false)
	failsWith(t, try("allowed.x", make(chan int), none), "invalid", false)
	failsWith(t, try("allowed.x", json.RawMessage(`{`), none), "invalid", false)
	failsWith(t, try("allowed.x", []byte(`1`), none), "invalid", false)
	if c.Pending() != 0 {
		t.Errorf("%d publishes wait", c.Pending())
	}
	if err := try("allowed.x", "still works", none); err != nil {
		t.Error(err)
	}
}

// numbers is a sequence of payloads 0 to n-1. each is called before each.
func numbers(n int, each func(int)) func(func(eventhub.Outgoing) bool) {
	return func(yield func(eventhub.Outgoing) bool) {
		for i := range n {
			each(i)
			if !yield(eventhub.Outgoing{Payload: i}) {
				return
			}
		}
	}
}

func TestPublishManyKeepsTheOrderAndItsBounds(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	topic := newTopic()
	most := 0
	// Fewer than the hub takes at once: one that it refuses comes later.
	ids, err := c.PublishMany(t.Context(), topic, numbers(1_500, func(int) { most = max(most, c.Pending()) }))
	if err != nil || len(ids) != 1_500 {
		t.Fatal(len(ids), err)
	}
	if most > eventhub.DefaultManyInFlight {
		t.Errorf("%d at a time", most)
	}
	for i, p := range stored(t, hub, topic) {
		if p != strconv.Itoa(i) {
			t.Fatalf("event %d is %s", i, p)
		}
	}
	if slices.Contains(ids, "") {
		t.Error("an id is missing")
	}
}

func TestPublishManyStopsAtTheFirstFailure(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	taken := 0
	_, err := c.PublishMany(t.Context(), newTopic(), func(yield func(eventhub.Outgoing) bool) {
		for ; taken < 10_000; taken++ {
			e := eventhub.Outgoing{Payload: taken}
			if taken == 20 {
				e.Options.ID = " "
			}
			if !yield(e) {
				return
			}
		}
	})
	failsWith(t, err, "bad_options", false)
	if taken < 20 || taken > 20+2*eventhub.DefaultManyInFlight {
		t.Errorf("%d were taken", taken)
	}
	if c.Pending() != 0 {
		t.Errorf("%d publishes wait", c.Pending())
	}
}

func TestPublishManyIsTakenBackByItsContext(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	p.refuse(true)
	c, err := eventhub.New(p.url, fast(hub.Token))
	if err != nil {
		t.Fatal(err)
	}
	defer shut(c)
	ctx, cancel := context.WithCancel(t.Context())
	topic := newTopic()
	_, err = c.PublishMany(ctx, topic, numbers(10, func(i int) {
		if i == 9 {
			cancel()
		}
	}))
	failsWith(t, err, "aborted", false)
	p.refuse(false)
	publish(t, c, topic, "kept")
	if got := stored(t, hub, topic); !slices.Equal(got, []string{`"kept"`}) {
		t.Errorf("stored %q", got)
	}
}

// The hub lets a principal send 500 frames a second, so that some of these are refused at first.
func TestMorePublishesThanTheQuotaAllowsAreAllStored(t *testing.T) {
	t.Parallel()
	const rate, burst, n = 500, 100, 1_000
	hub := jwtHub(t, func(c *facade.Config) { c.Limits.FrameRate, c.Limits.FrameBurst = rate, burst })
	c := connect(t, hub.WebSocket, eventhub.Options{Token: scoped(time.Hour, "a", "publish:**")})
	topic := newTopic()
	var ids list[string]
	var wg sync.WaitGroup
	began := time.Now()
	for i := range n {
		wg.Add(1)
		err := c.PublishAsync(t.Context(), topic, i, none, func(id string, err error) {
			if err != nil {
				t.Error(err)
			}
			ids.add(id)
			wg.Done()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if took, least := time.Since(began), time.Second*(n-burst)/rate; took < least {
		t.Errorf("%d publishes took %v, want at least %v: there was no quota", n, took, least)
	}
	distinct := map[string]bool{}
	for _, id := range ids.get() {
		distinct[id] = true
	}
	if got := stored(t, hub, topic); len(got) != n || len(distinct) != n {
		t.Errorf("%d events are stored, %d ids", len(got), len(distinct))
	}
}

func TestWithoutAConnectionPublishesWaitInABoundedBuffer(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	p.refuse(true)
	opts := fast(hub.Token)
	opts.BufferEvents, opts.BufferBytes = 3, 2_000
	c, err := eventhub.New(p.url, opts)
	if err != nil {
		t.Fatal(err)
	}
	defer shut(c)
	topic := newTopic()
	failures := make(chan error, 4)
	some := func(i int) {
		if err := c.PublishAsync(t.Context(), topic, i, none, func(_ string, err error) { failures <- err }); err != nil {
			failures <- err
		}
	}
	for i := range 3 {
		some(i)
	}
	_, err = c.Publish(t.Context(), topic, 4, none)
	failsWith(t, err, "buffer_full", true)
	_, err = c.Publish(t.Context(), topic, strings.Repeat("x", 3_000), none)
	failsWith(t, err, "buffer_full", true)
	failsWith(t, c.PublishAsync(t.Context(), topic, strings.Repeat("x", 3_000), none, nil), "buffer_full", true)
	limited, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	failsWith(t, c.PublishAsync(limited, topic, 5, none, nil), "aborted", false)

	waited := make(chan struct{})
	go func() {
		defer close(waited)
		some(3) // waits for room
	}()
	p.refuse(false)
	receive(t, "room for the fourth", waited)
	for range 4 {
		if err := receive(t, "an answer", failures); err != nil {
			t.Error(err)
		}
	}
	if got := stored(t, hub, topic); !slices.Equal(got, []string{"0", "1", "2", "3"}) {
		t.Errorf("stored %q", got)
	}
}

// async publishes, and gives the result later.
func async(t *testing.T, c *eventhub.Client, topic string, payload any) <-chan error {
	t.Helper()
	result := make(chan error, 1)
	if err := c.PublishAsync(t.Context(), topic, payload, none, func(_ string, err error) { result <- err }); err != nil {
		t.Fatal(err)
	}
	return result
}

func TestAPublishInDoubtIsSentAgainAndStoredOnce(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	c := connect(t, p.url, fast(hub.Token))
	topic := newTopic()
	publish(t, c, topic, 0)
	p.deafen(true) // the hub stores the event, and its answer is lost
	one, two := async(t, c, topic, 1), async(t, c, topic, 2)
	eventually(t, "the hub has stored both", func() bool { return len(stored(t, hub, topic)) == 3 })
	p.deafen(false)
	p.cut()
	if err := errors.Join(receive(t, "an answer", one), receive(t, "an answer", two)); err != nil {
		t.Error(err)
	}
	if got := stored(t, hub, topic); !slices.Equal(got, []string{"0", "1", "2"}) {
		t.Errorf("stored %q", got)
	}
}

func TestAPublishInDoubtBeyondTheWindowIsNotSentAgain(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	opts := fast(hub.Token)
	opts.DuplicateWindow = 300 * time.Millisecond
	c := connect(t, p.url, opts)
	topic := newTopic()
	publish(t, c, topic, 0)
	p.deafen(true)
	doubtful := async(t, c, topic, 1)
	eventually(t, "the hub has stored it", func() bool { return len(stored(t, hub, topic)) == 2 })
	p.refuse(true)
	p.cut()
	failsWith(t, receive(t, "an answer", doubtful), "outcome_unknown", false)
	p.refuse(false)
	p.deafen(false)
	publish(t, c, topic, 2)
	if got := stored(t, hub, topic); !slices.Equal(got, []string{"0", "1", "2"}) {
		t.Errorf("stored %q", got)
	}
}

func TestAContextTakesBackAPublishThatWasNotSent(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	p.refuse(true)
	c, err := eventhub.New(p.url, fast(hub.Token))
	if err != nil {
		t.Fatal(err)
	}
	defer shut(c)
	topic := newTopic()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = c.Publish(ctx, topic, "never", none)
	failsWith(t, err, "aborted", false)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v does not wrap the context's error", err)
	}
	_, err = c.Publish(ctx, topic, "never", none)
	failsWith(t, err, "aborted", false)
	kept := async(t, c, topic, "kept")
	p.refuse(false)
	if err := receive(t, "an answer", kept); err != nil {
		t.Error(err)
	}
	if got := stored(t, hub, topic); !slices.Equal(got, []string{`"kept"`}) {
		t.Errorf("stored %q", got)
	}
	eventually(t, "no publish waits", func() bool { return c.Pending() == 0 })
}

func TestAContextThatEndsAfterTheEventWasSentLeavesTheOutcomeUnknown(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	c := connect(t, p.url, fast(hub.Token))
	topic := newTopic()
	publish(t, c, topic, 0)
	p.deafen(true)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := c.Publish(ctx, topic, 1, none)
		failed <- err
	}()
	eventually(t, "the hub has stored it", func() bool { return len(stored(t, hub, topic)) == 2 })
	cancel()
	failsWith(t, receive(t, "an answer", failed), "outcome_unknown", false)
	p.deafen(false)
}

func TestCloseWaitsForPublishesAndRefusesLaterOnes(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	topic := newTopic()
	var results []<-chan error
	for i := range 500 {
		results = append(results, async(t, c, topic, i))
	}
	if err := errors.Join(c.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	for _, r := range results {
		if err := receive(t, "an answer", r); err != nil {
			t.Error(err)
		}
	}
	_, err := c.Publish(t.Context(), topic, 1, none)
	failsWith(t, err, "closed", false)
	_, err = c.Subscribe(t.Context(), topic, "g", eventhub.SubscribeOptions{}, nothing)
	failsWith(t, err, "closed", false)
	failsWith(t, c.Ready(t.Context()), "closed", false)
	if c.State() != eventhub.StateClosed {
		t.Error(c.State())
	}
}

func TestACloseThatCannotDrainSaysWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	opts := fast(hub.Token)
	opts.DrainTimeout = 50 * time.Millisecond
	c := connect(t, p.url, opts)
	topic := newTopic()
	p.deafen(true)
	doubtful := async(t, c, topic, 1)
	eventually(t, "the hub has stored it", func() bool {
		r := eventhub.Reader{URL: hub.HTTP, Token: hub.Token}
		for range r.Replay(t.Context(), topic, eventhub.ReplayOptions{}) {
			return true
		}
		return false
	})
	p.refuse(true)
	p.cut()
	eventually(t, "the client has noticed", func() bool { return c.State() != eventhub.StateReady })
	later := async(t, c, newTopic(), 2)
	if err := c.Close(); err == nil {
		t.Error("Close reports no failure")
	}
	failsWith(t, receive(t, "an answer", doubtful), "outcome_unknown", false)
	failsWith(t, receive(t, "an answer", later), "closed", false)
}

type order struct {
	N int `json:"n"`
}

func (o order) Validate() error {
	if o.N < 0 {
		return fmt.Errorf("n is %d, which is negative", o.N)
	}
	return nil
}

func TestTypedTopicsCheckPayloads(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	orders := eventhub.TopicOf[order](c, newTopic())
	once := 1
	var handled list[order]
	if _, err := orders.Subscribe(t.Context(), "g", eventhub.SubscribeOptions{MaxAttempts: &once}, func(_ context.Context, o order, _ *eventhub.Delivery) error {
		handled.add(o)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var letters list[string]
	subscribe(t, c, "dlq."+orders.Name(), "operators", eventhub.SubscribeOptions{From: eventhub.FromEarliest}, func(_ context.Context, d *eventhub.Delivery) error {
		var letter struct{ Err string }
		if err := d.Decode(&letter); err != nil {
			return err
		}
		letters.add(letter.Err)
		return nil
	})
	_, err := orders.Publish(t.Context(), order{-1}, none)
	failsWith(t, err, "invalid", false)
	if _, err := orders.Publish(t.Context(), order{1}, none); err != nil {
		t.Fatal(err)
	}
	// Events of other clients become dead letters with the reason.
	publish(t, c, orders.Name(), map[string]int{"n": -2}, "no order")
	eventually(t, "two dead letters", func() bool { return len(letters.get()) == 2 })
	eventually(t, "one order", func() bool { return slices.Equal(handled.get(), []order{{1}}) })
	reasons := letters.get()
	slices.Sort(reasons)
	if !strings.Contains(reasons[0], "cannot unmarshal") || reasons[1] != "invalid: invalid payload: n is -2, which is negative" {
		t.Errorf("reasons %q", reasons)
	}
	var values []int
	for m, err := range orders.Events(t.Context(), "loop", eventhub.SubscribeOptions{From: eventhub.FromEarliest, MaxAttempts: &once}) {
		if err != nil {
			t.Fatal(err)
		}
		values = append(values, m.Value.N)
		break
	}
	if !slices.Equal(values, []int{1}) {
		t.Error(values)
	}
}

func nothing(context.Context, *eventhub.Delivery) error { return nil }
