//go:build unix

package jetstream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// used is the CPU time of this process, server and hub together.
func used(tb testing.TB) time.Duration {
	tb.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// fillWithIDs stores n events with ids of the hub's form, and returns the ids.
func fillWithIDs(tb testing.TB, b *Bus, topic string, n int) []string {
	tb.Helper()
	publishAll(tb, b, topic, "1")
	ids := make([]string, n)
	for i := range ids {
		id, err := uuid.NewV7()
		if err != nil {
			tb.Fatal(err)
		}
		ids[i] = id.String()
		if _, err := b.conn.JS.PublishMsgAsync(&nats.Msg{Subject: plainSubject(topic), Header: nats.Header{native.HeaderID: {ids[i]}}, Data: []byte(`{"n":1}`)}); err != nil {
			tb.Fatal(err)
		}
		if i%2_000 == 1_999 {
			<-b.conn.JS.PublishAsyncComplete()
		}
	}
	<-b.conn.JS.PublishAsyncComplete()
	return ids
}

func searchFor(tb testing.TB, b *Bus, topic, id, client string) error {
	tb.Helper()
	_, err := b.Subscribe(tb.Context(), topic, "g-"+id, SubscribeOptions{From: FromAfterID(id), CountFor: client}, ignore)
	return err
}

// patiently repeats what a busy machine has no time for: a search goes on where the last one ended.
func patiently(ask func() error) error {
	for end := time.Now().Add(time.Minute); ; {
		err := ask()
		if late, ok := errors.AsType[*event.Error](err); !ok || late.Code != event.CodeOverloaded || time.Now().After(end) {
			return err
		}
	}
}

func unknownID(err error) bool {
	refused, ok := errors.AsType[*event.Error](err)
	return ok && refused.Code == event.CodeUnknownID
}

func consumersOf(tb testing.TB, b *Bus, topic string) int {
	tb.Helper()
	info, err := b.conn.FindStream(tb.Context(), topic)
	if err != nil {
		tb.Fatal(err)
	}
	return info.State.Consumers
}

// waitingSearches is how many searches of one client run or wait (Limits.IDSearches).
const waitingSearches = 64

// A client whose searches have all of its places waits, and others find theirs.
func TestSearchesOfOneClientLeavePlacesToOthers(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "places", "1")
	for range b.limits.IDSearchesPerClient {
		if !b.reads.Searches.Enter(t.Context(), "busy", waitingSearches, func() { t.Error("no place") }) {
			t.Fatal("no place")
		}
		defer b.reads.Searches.Leave("busy")
	}
	if err := searchFor(t, b, "places", "other", "quiet"); !unknownID(err) {
		t.Errorf("another client's search: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := b.Subscribe(ctx, "places", "g", SubscribeOptions{From: FromAfterID("x"), CountFor: "busy"}, ignore)
	if refused, ok := errors.AsType[*event.Error](err); !ok || refused.Code != event.CodeOverloaded {
		t.Errorf("a search without a place: %v", err)
	}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	const tooMany = 10
	results := make(chan error, waitingSearches+tooMany)
	var waiting sync.WaitGroup
	for range cap(results) - b.limits.IDSearchesPerClient {
		waiting.Go(func() { results <- subscribeAfter(ctx, b, "busy") })
	}
	for range tooMany {
		select {
		case err := <-results:
			if refused, ok := errors.AsType[*event.Error](err); !ok || refused.Code != event.CodeRateLimited {
				t.Errorf("one search too many: %v", err)
			}
		case <-time.After(wait / 2):
			t.Fatal("searches beyond the bound wait")
		}
	}
	// To join a group, no event is needed, and no search.
	joined := take(t, b, "places", "there", SubscribeOptions{})
	if err := joined.sub.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	take(t, b, "places", "there", SubscribeOptions{From: FromAfterID("nobody"), CountFor: "busy"})
	end()
	waiting.Wait()
}

func subscribeAfter(ctx context.Context, b *Bus, client string) error {
	_, err := b.Subscribe(ctx, "places", "g", SubscribeOptions{From: FromAfterID("x"), CountFor: client}, ignore)
	return err
}

// What searches remember is bounded, and never makes them wrong: events come and go, and streams
// are created again.
func TestWhatSearchesRemember(t *testing.T) {
	t.Parallel()
	const known = 6_000
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "fam.**", Family: "fam"}}, Limits: Limits{IDsKnown: known}})
	rnd := rand.New(rand.NewPCG(1, 2))
	stored := make(map[string]map[string]uint64)
	topics := []string{"a", "b", "fam.x", "fam.y"}
	for _, topic := range topics {
		stored[topic] = make(map[string]uint64)
	}
	for step := range 60 {
		topic := topics[rnd.IntN(len(topics))]
		for i := range rnd.IntN(400) {
			id := fmt.Sprint(step, " ", i)
			if rnd.IntN(10) == 0 { // by a native publisher
				ack, err := b.conn.JS.PublishMsg(t.Context(), &nats.Msg{Subject: plainSubject(topic), Header: nats.Header{native.HeaderID: {id}}, Data: []byte("1")})
				if err == nil {
					stored[topic][id] = ack.Sequence
				}
				continue // the stream need not be there yet
			}
			r, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{ID: id})
			if err != nil {
				t.Fatal(err)
			}
			stored[topic][id] = r.Sequence
		}
		in := stored[topic]
		for id, seq := range in {
			if rnd.IntN(10) == 0 {
				s, err := b.conn.JS.Stream(t.Context(), b.rules.Of(topic).StreamName(topic))
				if err != nil {
					t.Fatal(err)
				}
				if err := s.DeleteMsg(t.Context(), seq); err != nil {
					t.Fatal(err)
				}
				delete(in, id)
				if err := searchFor(t, b, topic, id, "c"); !unknownID(err) {
					t.Fatalf("%s: a removed event is found: %v", id, err)
				}
			}
			info, state, err := b.streams.FreshExisting(t.Context(), topic)
			if err != nil {
				t.Fatal(err)
			}
			if _, left := in[id]; left {
				if got, err := b.reads.Find(t.Context(), info, id, state, ""); err != nil || got != seq {
					t.Fatalf("%s of %s is at %d, %v; want %d", id, topic, got, err, seq)
				}
			}
			if rnd.IntN(3) == 0 {
				break
			}
		}
		if recent := b.streams.Recent.IDs.Load(); b.reads.KnownIDs() > known || recent > known {
			t.Fatalf("%d and %d ids are kept", b.reads.KnownIDs(), recent)
		}
	}
	for id := range stored["a"] {
		if err := b.conn.JS.DeleteStream(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the stream is created again", func() bool {
			_, err := b.Publish(t.Context(), "a", []byte("1"), PublishOptions{})
			return err == nil
		})
		if err := searchFor(t, b, "a", id, "c"); !unknownID(err) {
			t.Errorf("an event of a deleted stream is found: %v", err)
		}
		break
	}
}
