package eventhub_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/facade/hubtest"
	eventhub "eventhub/sdk/go"
)

func TestAMemberStaysOneOverCutsAndMissesNothing(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	c := connect(t, p.url, opts)
	topic := newTopic()
	var mu sync.Mutex
	got := map[string]bool{}
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{MaxAttempts: new(int)}, func(_ context.Context, d *eventhub.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		got[string(d.Payload)] = true
		return nil
	})
	for i := range 5 {
		published := make(chan error, 1)
		go func() {
			_, err := c.PublishMany(t.Context(), topic, func(yield func(eventhub.Outgoing) bool) {
				for n := range 100 {
					if !yield(eventhub.Outgoing{Payload: i*100 + n}) {
						return
					}
				}
			})
			published <- err
		}()
		cutOnce(t, p, c, states)
		if err := receive(t, "the answers", published); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "all", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got) == 500
	})
	if n := len(stored(t, hub, topic)); n != 500 {
		t.Errorf("%d are stored", n)
	}
}

func TestATokenIsReplacedBeforeItExpires(t *testing.T) {
	t.Parallel()
	hub := jwtHub(t)
	var tokens atomic.Int64
	opts := fast("")
	opts.TokenProvider = func(context.Context) (string, error) {
		return scoped(3*time.Second, strconv.Itoa(int(tokens.Add(1))), "publish:**", "subscribe:**"), nil
	}
	c := connect(t, hub.WebSocket, opts)
	topic := newTopic()
	var got list[string]
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		got.add(string(d.Payload))
		return nil
	})
	eventually(t, "three tokens", func() bool { return tokens.Load() >= 3 })
	publish(t, c, topic, "still here")
	eventually(t, "the event", func() bool { return len(got.get()) == 1 })
}

func TestAnExpiredTokenEndsTheConnectionAndTheNextOpensAnother(t *testing.T) {
	t.Parallel()
	hub := jwtHub(t)
	var token atomic.Pointer[string]
	set := func(s string) { token.Store(&s) }
	set(scoped(time.Second, "short", "publish:**"))
	opts := fast("")
	opts.TokenProvider = func(context.Context) (string, error) { return *token.Load(), nil }
	opts.MinPause, opts.MaxPause = 500*time.Millisecond, 500*time.Millisecond
	c := connect(t, hub.WebSocket, opts)
	eventually(t, "the connection has ended", func() bool { return c.State() == eventhub.StateWaiting })
	set(scoped(time.Hour, "long", "publish:**"))
	publish(t, c, newTopic(), 1)
}

func TestATokenThatForbidsASubscriptionEndsOnlyThat(t *testing.T) {
	t.Parallel()
	hub := jwtHub(t)
	kept, lost := newTopic(), newTopic()
	var narrow atomic.Bool
	opts := fast("")
	opts.TokenProvider = func(context.Context) (string, error) {
		if narrow.Load() {
			return scoped(time.Hour, "narrow", "subscribe:"+kept), nil
		}
		return scoped(3*time.Second, "wide", "subscribe:"+kept, "subscribe:"+lost), nil
	}
	c := connect(t, hub.WebSocket, opts)
	staying := subscribe(t, c, kept, "g", eventhub.SubscribeOptions{}, nothing)
	ending := subscribe(t, c, lost, "g", eventhub.SubscribeOptions{}, nothing)
	narrow.Store(true)
	receive(t, "the end", ending.Done())
	failsWith(t, ending.Err(), "forbidden", false)
	select {
	case <-staying.Done():
		t.Error("the other has ended")
	default:
	}
}

func TestAWrongTokenFailsConnect(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	_, err := eventhub.Connect(t.Context(), hub.WebSocket, eventhub.Options{Token: "wrong"})
	failsWith(t, err, "bad_token", false)
	_, err = eventhub.Connect(t.Context(), hub.WebSocket, eventhub.Options{})
	failsWith(t, err, "no_token", false)
	both := eventhub.Options{Token: "a", TokenProvider: func(context.Context) (string, error) { return "b", nil }}
	_, err = eventhub.Connect(t.Context(), hub.WebSocket, both)
	failsWith(t, err, "bad_options", false)
	_, err = eventhub.New(hub.WebSocket, eventhub.Options{Window: -1})
	failsWith(t, err, "bad_options", false)
	_, err = eventhub.New(hub.WebSocket, eventhub.Options{MinPause: -1})
	failsWith(t, err, "bad_options", false)
	for _, url := range []string{"nonsense", "http://127.0.0.1:1", "ws://", "ws://%"} {
		_, err = eventhub.Connect(t.Context(), url, eventhub.Options{Token: "t"})
		failsWith(t, err, "gave_up", false)
	}
}

func TestConnectGivesUpAfterItsTimeOrWithItsContext(t *testing.T) {
	t.Parallel()
	const closed = "ws://127.0.0.1:1"
	opts := fast("t")
	opts.ConnectTimeout = 50 * time.Millisecond
	_, err := eventhub.Connect(t.Context(), closed, opts)
	failsWith(t, err, "connect_timeout", true)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err = eventhub.Connect(ctx, closed, fast("t"))
	failsWith(t, err, "aborted", false)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v does not wrap the context's error", err)
	}
}

func TestADeadConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	opts := fast(hub.Token)
	opts.PingEvery = 300 * time.Millisecond
	var reasons list[string]
	opts.OnState = func(s eventhub.State, err error) {
		if s == eventhub.StateWaiting {
			reasons.add(err.Error())
		}
	}
	c := connect(t, p.url, opts)
	p.deafen(true)
	eventually(t, "the client has noticed", func() bool { return len(reasons.get()) > 0 })
	if got := reasons.get()[0]; got != "connection_lost: the hub does not answer" {
		t.Error(got)
	}
	p.deafen(false)
	publish(t, c, newTopic(), 1)
}

func TestManyClientsDoNotComeBackAtOnce(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	var times list[time.Time]
	var clients []*eventhub.Client
	for range 20 {
		opts := fast(hub.Token)
		opts.MinPause, opts.MaxPause = 400*time.Millisecond, 400*time.Millisecond
		var broken atomic.Bool
		opts.OnState = func(s eventhub.State, _ error) {
			switch {
			case s == eventhub.StateWaiting:
				broken.Store(true)
			case s == eventhub.StateToken && broken.Load():
				times.add(time.Now())
			}
		}
		clients = append(clients, connect(t, p.url, opts))
	}
	p.cut()
	eventually(t, "all came back", func() bool { return len(times.get()) >= len(clients) })
	all := times.get()
	slices.SortFunc(all, func(a, b time.Time) int { return a.Compare(b) })
	if spread := all[len(all)-1].Sub(all[0]); spread < 20*time.Millisecond {
		t.Errorf("all came within %v", spread)
	}
}

// Subscriptions that are made while connections break are there once, and none is lost.
func TestSubscriptionsMadeWhileConnectionsBreak(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	var reported list[error]
	opts := fast(hub.Token)
	opts.OnError = reported.add
	c := connect(t, p.url, opts)
	topic := newTopic()
	publish(t, c, topic, 0)
	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cutter.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(7 * time.Millisecond):
				p.cut()
			}
		}
	})
	const n = 40
	var got [n]atomic.Int64
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			_, err := c.Subscribe(t.Context(), topic, "g"+strconv.Itoa(i), eventhub.SubscribeOptions{From: eventhub.FromEarliest, MaxAttempts: new(int)}, func(context.Context, *eventhub.Delivery) error {
				got[i].Add(1)
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	<-time.After(300 * time.Millisecond)
	close(stop)
	cutter.Wait()
	wg.Wait()
	for i := range n {
		eventually(t, "the event", func() bool { return got[i].Load() > 0 })
	}
	if all := reported.get(); len(all) > 0 {
		t.Errorf("reported %v", all)
	}
}
