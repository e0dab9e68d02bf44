package wire

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// hub is the other end of a connection, played by the test; what a real hub does is tested in
// facade.
type hub struct {
	t  *testing.T
	ws *websocket.Conn
}

type sent struct {
	Op      string          `json:"op"`
	Corr    string          `json:"corr"`
	Token   string          `json:"token"`
	Topic   string          `json:"topic"`
	ID      string          `json:"id"`
	IDs     []string        `json:"ids"`
	Reason  *string         `json:"reason"`
	Delay   *int            `json:"delay_ms"`
	Extend  *int            `json:"extend_ms"`
	Payload json.RawMessage `json:"payload"`
	Opts    json.RawMessage `json:"opts"`
}

func (h *hub) read() (sent, error) {
	var f sent
	_, b, err := h.ws.Read(h.t.Context())
	if err != nil {
		return f, err
	}
	return f, json.Unmarshal(b, &f)
}

func (h *hub) next() sent {
	f, err := h.read()
	if err != nil {
		h.t.Errorf("reading a frame: %v", err)
	}
	return f
}

func (h *hub) write(s string) {
	if err := h.ws.Write(h.t.Context(), websocket.MessageText, []byte(s)); err != nil {
		h.t.Errorf("writing %s: %v", s, err)
	}
}

func (h *hub) ok(f sent) { h.write(`{"op":"OK","corr":"` + f.Corr + `"}`) }

// connect dials a hub that script plays once AUTH is answered.
func connect(t *testing.T, opts Options, script func(*hub)) *Conn {
	t.Helper()
	played := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(played)
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = ws.CloseNow() }()
		h := &hub{t, ws}
		auth := h.next()
		if auth.Op != "AUTH" || auth.Token != opts.Token {
			t.Errorf("first frame %+v", auth)
		}
		h.ok(auth)
		script(h)
	}))
	c, err := Dial(t.Context(), "ws"+strings.TrimPrefix(server.URL, "http")+"/any", opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		<-played
		server.Close()
	})
	return c
}

// drain reads until the client is gone.
func drain(h *hub) {
	for {
		if _, err := h.read(); err != nil {
			return
		}
	}
}

func TestPublish(t *testing.T) {
	c := connect(t, Options{Token: "s"}, func(h *hub) {
		f := h.next()
		if f.Op != "PUBLISH" || f.Topic != "a.b" || string(f.Payload) != `{"n":1e400}` || string(f.Opts) != `{"key":"k:1"}` {
			t.Errorf("frame %+v", f)
		}
		h.write(`{"op":"OK","corr":"` + f.Corr + `","id":"i\u0031"}`)
		f = h.next()
		h.write(`{"corr":"` + f.Corr + `","msg":"no \"way\"","code":"forbidden","op":"ERR"}`)
		drain(h)
	})
	id, err := c.Publish(t.Context(), "a.b", []byte(`{"n":1e400}`), PublishOptions{Key: "k:1"})
	if id != "i1" || err != nil {
		t.Errorf("got %q, %v", id, err)
	}
	_, err = c.Publish(t.Context(), "a.b", nil, PublishOptions{})
	if refused, ok := errors.AsType[*Error](err); !ok || refused.Code != "forbidden" || refused.Msg != `no "way"` {
		t.Errorf("got %v", err)
	}
	if _, err = c.Publish(t.Context(), "a.b", []byte(`1,"topic":"other"`), PublishOptions{}); !errors.Is(err, ErrPayload) {
		t.Errorf("a payload that is not JSON: %v", err)
	}
}

func TestTombstone(t *testing.T) {
	c := connect(t, Options{}, func(h *hub) {
		f := h.next()
		if f.Op != "PUBLISH" || f.Topic != "a.b" || f.Payload != nil || string(f.Opts) != `{"key":"k:1","tombstone":true}` {
			t.Errorf("frame %+v", f)
		}
		h.write(`{"op":"OK","corr":"` + f.Corr + `","id":"i"}`)
		drain(h)
	})
	if id, err := c.Tombstone(t.Context(), "a.b", "k:1"); id != "i" || err != nil {
		t.Errorf("got %q, %v", id, err)
	}
}

func TestPublishAsyncWaitsAtItsBound(t *testing.T) {
	arrived := make(chan sent, 10)
	answer := make(chan string)
	c := connect(t, Options{PublishInFlight: 2}, func(h *hub) {
		go func() {
			for corr := range answer {
				h.write(`{"op":"OK","corr":"` + corr + `","id":"x"}`)
			}
		}()
		for {
			f, err := h.read()
			if err != nil {
				return
			}
			arrived <- f
		}
	})
	defer close(answer)
	var done atomic.Int32
	publish := func() {
		if err := c.PublishAsync("t", []byte("1"), PublishOptions{}, func(string, error) { done.Add(1) }); err != nil {
			t.Error(err)
		}
	}
	publish()
	publish()
	third := make(chan struct{})
	go func() { publish(); close(third) }()
	first := <-arrived
	<-arrived
	select {
	case <-third:
		t.Error("the third publish did not wait")
	case f := <-arrived:
		t.Errorf("the third publish was sent: %+v", f)
	default:
	}
	answer <- first.Corr
	<-third
	<-arrived
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if done.Load() != 3 {
		t.Errorf("%d of 3 publishes were answered", done.Load())
	}
}

func TestSubscribe(t *testing.T) {
	settled := make(chan sent, 10)
	c := connect(t, Options{}, func(h *hub) {
		f := h.next()
		if f.Op != "SUBSCRIBE" || string(f.Opts) != `{"from":"earliest","maxAttempts":0}` {
			t.Errorf("frame %+v", f)
		}
		h.ok(f)
		for _, id := range []string{"1", "2", "3", "4"} {
			h.write(`{"op":"EVENT","topic":"a","group":"g","event":{"id":"` + id + `","ts":7,"topic":"b","key":"k","payload":{"x": 1}},` +
				`"ctx":{"attempt":3,"ack_deadline_ms":5000}}`)
		}
		for range 4 {
			f := h.next()
			settled <- f
			h.write(`{"op":"OK"}`)
		}
		f = h.next()
		if f.Op != "UNSUBSCRIBE" {
			t.Errorf("frame %+v", f)
		}
		h.ok(f)
		drain(h)
	})
	events := make(chan Event, 10)
	never := 0
	sub, err := c.Subscribe(t.Context(), "a", "g", SubscribeOptions{From: "earliest", MaxAttempts: &never},
		func(e Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Subscribe(t.Context(), "a", "g", SubscribeOptions{}, func(Event) {}); err == nil ||
		err.Error() != "already_subscribed: a::g" {
		t.Errorf("a second subscription: %v", err)
	}
	e := <-events
	if e.ID != "1" || e.TS != 7 || e.Topic != "b" || e.Key != "k" || string(e.Payload) != `{"x": 1}` || e.Attempt != 3 ||
		time.Until(e.Deadline) > 5*time.Second || time.Until(e.Deadline) <= 0 {
		t.Errorf("event %+v", e)
	}
	for _, settle := range []func() error{
		e.Ack,
		func() error { e := <-events; return e.Nack("why", 20*time.Millisecond) },
		func() error { e := <-events; return e.Nack("", DefaultBackoff) },
		func() error { e := <-events; return e.ModAck(2 * time.Second) },
	} {
		if err := settle(); err != nil {
			t.Fatal(err)
		}
	}
	want := []struct {
		op, id        string
		delay, extend int
	}{{"ACK", "1", -1, -1}, {"NACK", "2", 20, -1}, {"NACK", "3", -1, -1}, {"MODACK", "4", -1, 2000}}
	orNone := func(n *int) int {
		if n == nil {
			return -1
		}
		return *n
	}
	for _, w := range want {
		f := <-settled
		if f.Op != w.op || f.ID != w.id || orNone(f.Delay) != w.delay || orNone(f.Extend) != w.extend || f.Corr != "" {
			t.Errorf("frame %+v, want %+v", f, w)
		}
	}
	if err := sub.Unsubscribe(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCloseCodes(t *testing.T) {
	for code, reconnect := range map[websocket.StatusCode]bool{
		websocket.StatusGoingAway: true, websocket.StatusServiceRestart: true, websocket.StatusPolicyViolation: true,
		4000: true, 4099: true, 4100: false, 4199: false, 4200: true,
	} {
		c := connect(t, Options{}, func(h *hub) {
			if err := h.ws.Close(code, "because"); err != nil {
				t.Error(err)
			}
		})
		<-c.Done()
		if closed, ok := errors.AsType[*CloseError](c.Err()); !ok || closed.Code != int(code) || closed.Reason != "because" || closed.Reconnect() != reconnect {
			t.Errorf("code %d: %v", code, c.Err())
		}
		_, err := c.Publish(t.Context(), "t", nil, PublishOptions{})
		if _, ok := errors.AsType[*CloseError](err); !ok {
			t.Errorf("publish afterwards: %v", err)
		}
	}
}

func TestTimeout(t *testing.T) {
	c := connect(t, Options{Timeout: 20 * time.Millisecond}, drain)
	if _, err := c.Publish(t.Context(), "t", nil, PublishOptions{}); !errors.Is(err, ErrTimeout) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Publish(ctx, "t", nil, PublishOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestAbortFailsWhoWaits(t *testing.T) {
	seen := make(chan struct{})
	c := connect(t, Options{}, func(h *hub) {
		h.next()
		close(seen)
		drain(h)
	})
	failed := make(chan error, 1)
	go func() {
		_, err := c.Publish(context.Background(), "t", nil, PublishOptions{})
		failed <- err
	}()
	<-seen
	c.Abort()
	if err := <-failed; !errors.Is(err, ErrClosed) {
		t.Errorf("who waited got %v", err)
	}
	if !errors.Is(c.Err(), ErrClosed) {
		t.Errorf("Err is %v", c.Err())
	}
}

func TestUnaskedErrors(t *testing.T) {
	told := make(chan *Error, 1)
	connect(t, Options{OnError: func(e *Error) { told <- e }}, func(h *hub) {
		h.write(`{"op":"LATER","x":[{}]}`)
		h.write(`{"op":"ERR","code":"token_expired","msg":"m"}`)
		drain(h)
	})
	if e := <-told; e.Code != "token_expired" {
		t.Errorf("got %v", e)
	}
}

// When the hub says that there is no such subscription any more, the subscription is over, and
// others are not.
func TestASubscriptionThatTheHubEnded(t *testing.T) {
	c := connect(t, Options{}, func(h *hub) {
		for range 2 {
			h.write(`{"op":"OK","corr":"` + h.next().Corr + `"}`)
		}
		h.write(`{"op":"ERR","code":"not_subscribed","msg":"t::g"}`)
		drain(h)
	})
	var subs []*Subscription
	for _, group := range []string{"g", "other"} {
		s, err := c.Subscribe(t.Context(), "t", group, SubscribeOptions{}, func(Event) {})
		if err != nil {
			t.Fatal(err)
		}
		subs = append(subs, s)
	}
	<-subs[0].Done()
	select {
	case <-subs[1].Done():
		t.Error("another subscription has ended")
	default:
	}
}
