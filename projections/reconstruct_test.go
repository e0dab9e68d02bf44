package projections

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// TestReconstruct wants, at the moment of each event, what a fold of the stream up to it gives, for
// every key.
func TestReconstruct(t *testing.T) {
	t.Parallel()
	const keys, events = 4, 60
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	rnd := rand.New(rand.NewPCG(5, 8))
	for i := range events {
		key := "k:" + strconv.Itoa(rnd.IntN(keys))
		if i%9 == 8 {
			remove(t, bus, topicCounts, key)
		} else {
			put(t, bus, topicCounts, key, strconv.Itoa(i))
		}
		// Moments are milliseconds: the next event has another one.
		now := time.Now().UnixMilli()
		for time.Now().UnixMilli() == now {
			if err := pause(t.Context(), 100*time.Microsecond); err != nil {
				t.Fatal(err)
			}
		}
	}
	var all []*jetstream.Event
	if err := bus.History(topicCounts).Scan(t.Context(), jetstream.ScanOptions{Limit: events}, func(e *jetstream.Event) error {
		all = append(all, e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	at := func(key string, moment time.Time) State {
		t.Helper()
		s, err := Reconstruct(t.Context(), bus.History(topicCounts), key, moment, appendEvent)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	states := make(map[string][]byte)
	for i, e := range all {
		next, err := appendEvent(t.Context(), states[e.Key], e)
		if err != nil {
			t.Fatal(err)
		}
		states[e.Key] = next
		moment := time.Unix(0, e.StoredAt)
		if s := at(e.Key, moment); string(s.Value) != string(next) || (s.Value == nil) != (next == nil) || s.From != positionOf(e) {
			t.Fatalf("after event %d the state of %s is %q from %v, want %q", i, e.Key, s.Value, s.From, next)
		}
		if other := "k:" + strconv.Itoa(i%keys); string(at(other, moment).Value) != string(states[other]) {
			t.Fatalf("after event %d the state of %s is %q, want %q", i, other, at(other, moment).Value, states[other])
		}
	}
	first := time.Unix(0, all[0].StoredAt)
	for name, s := range map[string]State{
		"before all": at(all[0].Key, first.Add(-time.Second)), "at the zero time": at(all[0].Key, time.Time{}),
		"of no key": at("none", time.Now()), "of the future": at("none", first.AddDate(10_000, 0, 0)),
	} {
		if s.Value != nil || s.From != (Position{}) {
			t.Errorf("the state %s is %+v", name, s)
		}
	}
	if s, err := Reconstruct(t.Context(), bus.History("no.topic"), "k", time.Now(), appendEvent); err != nil || s.Value != nil {
		t.Errorf("the state of no topic is %+v (%v)", s, err)
	}
	failed := errors.New("no")
	_, err := Reconstruct(t.Context(), bus.History(topicCounts), all[0].Key, time.Now(), func(context.Context, []byte, *jetstream.Event) ([]byte, error) { return nil, failed })
	if !errors.Is(err, failed) {
		t.Errorf("the error of apply became %v", err)
	}
}

// purging is the history of a topic that drops events right before it is read.
type purging struct {
	History
	drop func()
}

func (p *purging) Scan(ctx context.Context, opts jetstream.ScanOptions, f func(*jetstream.Event) error) error {
	p.drop()
	return p.History.Scan(ctx, opts, f)
}

func TestReconstructOfWhatIsLeft(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	bus := openBus(t, jetstream.Config{URL: url})
	js := native(t, url)
	put(t, bus, topicCounts, "k", "1")
	put(t, bus, topicCounts, "k", "2")
	r := put(t, bus, topicCounts, "k", "3")
	p := &purging{History: bus.History(topicCounts), drop: func() {
		s, err := js.Stream(t.Context(), r.Stream)
		if err == nil {
			err = s.Purge(t.Context(), natsjs.WithPurgeKeep(2))
		}
		if err != nil {
			t.Error(err)
		}
	}}
	for range 2 {
		s, err := Reconstruct(t.Context(), p, "k", time.Now(), appendEvent)
		if !errors.Is(err, ErrTruncated) || string(s.Value) != "2 3 " {
			t.Errorf("the state is %q (%v), want what is left, and ErrTruncated", s.Value, err)
		}
	}
}
