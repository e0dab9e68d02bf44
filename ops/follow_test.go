package ops

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// followed is an answer to GET /follow/{topic}.
type followed struct {
	t      *testing.T
	status int
	lines  *bufio.Scanner
	leave  context.CancelFunc
}

// message is a server-sent event. Its data is one of the frames of a broadcast.
type message struct {
	name, id string
	data     struct {
		Event struct {
			ID      string
			Topic   string
			Headers map[string]string
			Payload json.RawMessage
		}
		Missed int
	}
}

// next returns the next message.
func (f *followed) next() (m message) {
	f.t.Helper()
	for f.lines.Scan() {
		name, value, _ := strings.Cut(f.lines.Text(), ": ")
		switch name {
		case "event":
			m.name = value
		case "id":
			m.id = value
		case "data":
			if err := json.Unmarshal([]byte(value), &m.data); err != nil {
				f.t.Fatalf("%s: %v", value, err)
			}
		case "":
			if m.name != "" {
				return m
			}
		}
	}
	f.t.Fatalf("the stream has ended: %v", f.lines.Err())
	return m
}

// payload returns the payload of the next message, which must be an event.
func (f *followed) payload() string {
	f.t.Helper()
	m := f.next()
	if m.name != "event" {
		f.t.Fatalf("a message %s came instead of an event", m.name)
	}
	return string(m.data.Event.Payload)
}

// following returns what serves GET /follow/{topic} in a hub.
func following(t *testing.T, bus *jetstream.Bus, verifier *acl.Verifier) func(http.ResponseWriter, *http.Request, *acl.Identity, string, func([]byte) []byte) {
	t.Helper()
	clients, err := facade.New(facade.Config{Bus: facade.JetStream(bus), Auth: facade.Tokens(verifier)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = clients.Close() })
	return func(w http.ResponseWriter, r *http.Request, id *acl.Identity, topic string, hide func([]byte) []byte) {
		clients.Follow(w, r, id, topic, hide)
	}
}

// An operator gets the newest events of a topic, and then each as it comes. What a mask names is
// hidden, a new stream goes on where one ended, and a topic is not created.
func TestFollow(t *testing.T) {
	t.Parallel()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	verifier := newVerifier(t)
	server := httptest.NewServer(described(t, Config{
		Bus: bus, Registry: prometheus.NewRegistry(), Events: bus, Guard: Guard{Tokens: verifier}, Status: facade.StatusOf,
		Follow: following(t, bus, verifier),
	}))
	t.Cleanup(server.Close)
	publish := func(topic string, opts jetstream.PublishOptions, payloads ...string) {
		t.Helper()
		for _, payload := range payloads {
			if _, err := bus.Publish(t.Context(), topic, []byte(payload), opts); err != nil {
				t.Fatal(err)
			}
		}
	}
	ask := func(path, token, last string) *followed {
		t.Helper()
		ctx, leave := context.WithCancel(t.Context())
		t.Cleanup(leave)
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
		if last != "" {
			r.Header.Set("Last-Event-ID", last)
		}
		answer, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = answer.Body.Close() })
		return &followed{t: t, status: answer.StatusCode, lines: bufio.NewScanner(answer.Body), leave: leave}
	}
	follow := func(path, token, last string) *followed {
		t.Helper()
		f := ask(path, token, last)
		if f.status != http.StatusOK {
			t.Fatalf("%s: %d", path, f.status)
		}
		if m := f.next(); m.name != "subscribed" {
			t.Fatalf("the first message is %s", m.name)
		}
		return f
	}

	for path, want := range map[string]int{
		"/follow/none": http.StatusNotFound, "/follow/.": http.StatusBadRequest,
		"/follow/orders?history=1001": http.StatusBadRequest, "/follow/orders?presence=true": http.StatusBadRequest,
	} {
		if f := ask(path, "own", ""); f.status != want {
			t.Errorf("%s: %d, want %d", path, f.status, want)
		}
	}
	if topics, err := bus.Admin().Topics(t.Context()); err != nil || len(topics) != 0 {
		t.Errorf("a request created topics: %v, %v", topics, err)
	}

	publish("orders", jetstream.PublishOptions{}, "1", "2", "3")
	f := follow("/follow/orders?history=2", "own", "")
	if a, b := f.payload(), f.payload(); a != "2" || b != "3" {
		t.Errorf("the newest events are %s and %s", a, b)
	}
	publish("orders", jetstream.PublishOptions{}, "4")
	last := f.next()
	if string(last.data.Event.Payload) != "4" || last.id == "" {
		t.Errorf("an event came as %+v", last)
	}
	f.leave()
	publish("orders", jetstream.PublishOptions{}, "5")
	if got := follow("/follow/orders?history=2", "own", last.id).payload(); got != "5" {
		t.Errorf("a stream went on with %s", got)
	}

	masked, err := acl.Sign(signingKey, acl.Grant{TTL: time.Hour, Policy: []byte(
		`{"rules":[{"effect":"allow","action":"admin","topics":["**"],"mask":["/card","X-Token"]}]}`,
	)})
	if err != nil {
		t.Fatal(err)
	}
	publish("cards", jetstream.PublishOptions{Headers: map[string]string{"x-token": "secret", "a": "b"}}, `{"card":4111,"n":1}`)
	m := follow("/follow/cards?history=1", masked, "").next()
	if string(m.data.Event.Payload) != `{"card":"***","n":1}` || m.data.Event.Headers["x-token"] != "***" || m.data.Event.Headers["a"] != "b" {
		t.Errorf("with a mask, an event came as %+v", m)
	}
}

// What a mask names is hidden in frames of events and of dead letters, whatever the payload is.
func TestHideFrame(t *testing.T) {
	t.Parallel()
	masks := []*acl.Mask{{Pointers: []string{"/card"}, Headers: []string{"x-token"}}}
	for _, test := range []struct{ topic, frame, want string }{
		{
			"orders", `{"op":"EVENT","topic":"orders","event":{"headers":{"X-Token":"s"},"payload":{"card": 1, "n":2}},"ctx":{"pos":"a-1"}}`,
			`{"op":"EVENT","topic":"orders","event":{"headers":{"X-Token":"***"},"payload":{"card": "***", "n":2}},"ctx":{"pos":"a-1"}}`,
		},
		{
			"orders", `{"event":{"headers":{"Event-Encoding":"text"},"payload":"card=1"},"ctx":{}}`,
			`{"event":{"headers":{"Event-Encoding":"text"},"payload":"***"},"ctx":{}}`,
		},
		{
			"dlq.orders", `{"event":{"payload":{"original":{"payload":{"card":1,"n":2},"headers":{"x-token":"s"}},"err":"no"}}}`,
			`{"event":{"payload":{"original":{"payload":{"card":"***","n":2},"headers":{"x-token":"***"}},"err":"no"}}}`,
		},
		{
			"dlq.orders", `{"event":{"payload":{"original":{"payload":"Y2FyZA==","headers":{"Event-Encoding":"base64"}}}}}`,
			`{"event":{"payload":{"original":{"payload":"***","headers":{"Event-Encoding":"base64"}}}}}`,
		},
		{"orders", `{"event":{"payload":[1]}}`, `{"event":{"payload":[1]}}`},
	} {
		if got := string(hideFrame(masks, test.topic, []byte(test.frame))); got != test.want {
			t.Errorf("%s became %s", test.frame, got)
		}
	}
	if got := string(hideFrame(nil, "orders", []byte("{}"))); got != "{}" {
		t.Errorf("without a mask, a frame became %s", got)
	}
}
