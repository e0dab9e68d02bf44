package facade_test

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/sdk/go/wire"
)

// A hub that ends spreads the clients that understand the pause. Others read the reason as before.
func TestReturnsAreSpread(t *testing.T) {
	t.Parallel()
	const clients, rate = 40, 10
	h := startHub(t, openBus(t), func(cfg *facade.Config) { cfg.Limits.ReturnRate = rate })
	plain := h.dial()
	all := make([]*wire.Conn, clients)
	for i := range all {
		all[i] = dialWith(t, h, "retry_after")
	}
	if err := h.server.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if closed := closeOf(t, plain); closed.Reason != "draining" || closed.RetryAfter() != 0 {
		t.Errorf("a client without the capability was told %q", closed.Reason)
	}
	const spread = (clients + 1) * time.Second / rate
	least, most := spread, time.Duration(0)
	for _, c := range all {
		closed := closeOf(t, c)
		if !closed.Reconnect() || closed.RetryAfter() > spread {
			t.Errorf("a client was told %v", closed)
		}
		least, most = min(least, closed.RetryAfter()), max(most, closed.RetryAfter())
	}
	if most-least < spread/4 { // the chance of that is 1 in 10^22
		t.Errorf("pauses are %v to %v, of up to %v", least, most, spread)
	}
}

// Streams of server-sent events are spread as well: by a member of the last message, and by the
// field that browsers follow.
func TestReturnsOfStreamsAreSpread(t *testing.T) {
	t.Parallel()
	const streams, rate = 40, 10
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.ReturnRate = rate })
	all := make([]*sse, streams)
	for i := range all {
		all[i] = r.subscribe(t, "topic=t&group=g")
	}
	if err := r.srv.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	const spread = streams * 1000 / rate
	least, most := spread, 0
	for _, s := range all {
		m, ok := s.next()
		var said struct {
			Code       int
			Reason     string
			RetryAfter *int `json:"retry_after_ms"`
		}
		if err := json.Unmarshal([]byte(m.data), &said); err != nil || !ok || m.name != "close" || said.Reason != "draining" || said.RetryAfter == nil {
			t.Fatalf("the stream ended with %+v", m)
		}
		pause := *said.RetryAfter
		if pause < 0 || pause > spread || s.retry != strconv.Itoa(pause+1000) {
			t.Errorf("a stream was told %d, and retry: %s", pause, s.retry)
		}
		least, most = min(least, pause), max(most, pause)
	}
	if most-least < spread/4 { // the chance of that is 1 in 10^22
		t.Errorf("pauses are %d to %d, of up to %d", least, most, spread)
	}
}

// However many connections a hub had, nobody is asked to wait for longer than a minute. A hub
// without the limit asks nobody.
func TestPausesAreBounded(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		rate int
		most time.Duration
	}{{1, time.Minute}, {facade.NoLimit, 0}} {
		h := startHub(t, openBus(t), func(cfg *facade.Config) { cfg.Limits.ReturnRate = test.rate })
		all := make([]*wire.Conn, 100)
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() { all[i] = dialWith(t, h, "retry_after") })
		}
		wg.Wait()
		if t.Failed() {
			return
		}
		if err := h.server.Close(); err != nil {
			t.Fatal(err)
		}
		var most time.Duration
		for _, c := range all {
			most = max(most, closeOf(t, c).RetryAfter())
		}
		if most > test.most || most < test.most/2 {
			t.Errorf("with the rate %d, the longest pause is %v", test.rate, most)
		}
	}
}

func dialWith(t *testing.T, h *testHub, caps ...string) *wire.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	c, err := wire.Dial(ctx, h.url, wire.Options{Token: testToken, Caps: caps})
	if err != nil {
		t.Error(err)
		return nil
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func closeOf(t *testing.T, c *wire.Conn) *wire.CloseError {
	t.Helper()
	select {
	case <-c.Done():
	case <-time.After(waitLimit):
		t.Fatal("the connection does not end")
	}
	closed, ok := errors.AsType[*wire.CloseError](c.Err())
	if !ok {
		t.Fatalf("the connection ended with %v", c.Err())
	}
	return closed
}
