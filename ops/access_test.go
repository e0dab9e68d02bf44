package ops

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/docs"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// noConnections is a hub without connections.
type noConnections struct{}

func (noConnections) List(string, int, ConnectionFilter) ([]Connection, bool) {
	return []Connection{}, false
}
func (noConnections) Close(string) bool { return false }

// TestAccess asks every route as a hub on loopback and one beyond it serve them, with and without a
// token. Without a token, no answer has a payload and nothing changes. Beyond loopback, only the
// probes, the page and the documents answer, which name no topic.
func TestAccess(t *testing.T) {
	const topic, secret = "orders.placed", "payload-4711"
	bus, err := jetstream.Open(t.Context(), jetstream.Config{
		Server: natstest.Embed(t, t.TempDir()), Topics: []topics.Rule{{Pattern: topic, Compaction: true}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	if _, err := bus.Publish(t.Context(), topic, []byte(`"`+secret+`"`), jetstream.PublishOptions{ID: "one", Key: "k"}); err != nil {
		t.Fatal(err)
	}
	// NATS fills the bucket of the newest events a moment later
	for end := time.Now().Add(time.Minute); ; <-time.After(5 * time.Millisecond) {
		if newest, err := bus.Keys(topic).Page(t.Context(), 0, 1); err == nil && len(newest) == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the bucket was not filled")
		}
	}
	if err := bus.Group(topic, "billing").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	revoked := 0
	verifier := newVerifier(t)
	guard := Guard{Tokens: verifier}
	config := func() Config {
		reg := prometheus.NewRegistry()
		use(NewMetrics(reg))
		return Config{
			Bus: bus, Registry: reg, Groups: bus, Connections: noConnections{}, Events: bus, Follow: following(t, bus, verifier), NATS: bus.Admin().NATS(), Topics: TopicsOf(bus), Outboxes: parkedBox{},
			DeadLetters: bus.Admin().DeadLetters(), Guard: guard, Status: facade.StatusOf, Documents: docs.Handlers(),
			Backups: &Backups{Write: func(context.Context, io.Writer, func() error) error { return nil }},
			Revocations: &Revocations{Revoke: func(_ context.Context, r acl.Revocation) (acl.Revocation, error) {
				revoked++
				return r, nil
			}},
		}
	}
	loopback, beyond := config(), config()
	loopback.Local = true
	beyond.Metrics = &guard
	hubs := map[string]http.Handler{"on loopback": described(t, loopback), "beyond loopback": described(t, beyond)}

	// what each route is asked, where its pattern does not say it
	const query = "?topic=" + topic
	queries := map[string]string{
		"GET /cursors": query, "GET /lag": query + "&group=billing", "GET /events": query, "GET /keys": query, "GET /latest-by-key": query + "&key=k", "GET /follow/{topic}": "?history=1",
		"POST /dlq/redrive": query + "&all=1", "POST /dlq/discard": query + "&all=1",
	}
	bodies := map[string]string{
		"POST /publish/{topic}": `{"payload":1}`, "POST /revocations": `{"jti":"x"}`, "PUT /groups/{topic}/{group}/cursor": `{"to":"latest"}`, "POST /topics/{topic}/purge": `{"all":true}`,
	}
	payloads := map[string]bool{"GET /events": true, "GET /keys": true, "GET /latest-by-key": true, "GET /follow/{topic}": true}
	for _, at := range New(config()).routes() {
		name := at.method + " " + at.pattern
		path := strings.NewReplacer("{topic}", topic, "{group}", "billing", "{name}", "n", "{id}", "i", "{file}", "app.js").Replace(at.pattern) + queries[name]
		send := func(where, token, host string) (int, string) {
			t.Helper()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := httptest.NewRequestWithContext(ctx, at.method, path, strings.NewReader(bodies[name]))
			r.Host = host
			if token != "" {
				r.Header.Set("Authorization", "Bearer "+token)
			}
			w := &reader{ResponseRecorder: httptest.NewRecorder(), until: secret}
			if at.need == follows {
				w.leave = cancel // such an answer does not end by itself
			}
			hubs[where].ServeHTTP(w, r)
			return w.Code, w.Body.String()
		}
		for where := range hubs {
			status, body := send(where, "", "127.0.0.1:8082")
			shown := at.need == open || at.need == scrapes && where == "on loopback"
			if want := map[bool]int{true: http.StatusOK, false: http.StatusUnauthorized}[shown]; status != want {
				t.Errorf("%s %s without a token: %d %.200s, want %d", name, where, status, body, want)
			}
			if strings.Contains(body, secret) {
				t.Errorf("%s %s shows a payload without a token", name, where)
			}
			if where == "beyond loopback" && at.pattern != openAPI && at.pattern != asyncAPI && (strings.Contains(body, topic) || strings.Contains(body, "billing")) {
				t.Errorf("%s %s names a topic or a group without a token", name, where)
			}
			if at.method != http.MethodGet && shown {
				t.Errorf("%s changes something without a token", name)
			}
			status, body = send(where, tokenFor(t, "publish:other"), "127.0.0.1:8082")
			if refused := status == http.StatusForbidden; refused != (!shown && at.need != lists) {
				t.Errorf("%s %s with a token without rights: %d %.200s", name, where, status, body)
			}
			if strings.Contains(body, secret) {
				t.Errorf("%s %s shows a payload to a token without rights", name, where)
			}
			if at.method != http.MethodGet {
				continue
			}
			status, body = send(where, "own", "127.0.0.1:8082")
			if status == http.StatusUnauthorized || status == http.StatusForbidden || strings.Contains(body, secret) != payloads[name] {
				t.Errorf("%s %s with a token: %d %.300s", name, where, status, body)
			}
		}
		// a page of another site that makes its own name resolve to this host
		if status, body := send("on loopback", "", "evil.example:8082"); at.need == scrapes && status != http.StatusForbidden {
			t.Errorf("%s on loopback by another name: %d %.200s", name, status, body)
		}
	}
	info, err := bus.Group(topic, "billing").Info(t.Context())
	if err != nil || info.Paused || info.Pending != 1 || revoked != 0 {
		t.Errorf("something was changed: %+v, %v, %d revocations", info, err, revoked)
	}
	if _, last, err := bus.History(topic).Bounds(t.Context()); err != nil || last != 1 {
		t.Errorf("the topic has %d events, %v", last, err)
	}
}

// reader records an answer. With leave, it leaves once the answer has until.
type reader struct {
	*httptest.ResponseRecorder
	until string
	leave func()
}

func (r *reader) Write(p []byte) (int, error) {
	n, err := r.ResponseRecorder.Write(p)
	if r.leave != nil && strings.Contains(r.Body.String(), r.until) {
		r.leave()
	}
	return n, err
}
