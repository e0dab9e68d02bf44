package ops

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// reached is the status of the handlers that stand in for those of the routes.
const reached = http.StatusAccepted

// standIns returns all routes, also those that the configuration leaves out, with handlers that
// only answer, and a server with them.
func standIns(t *testing.T) ([]route, http.Handler) {
	t.Helper()
	guard := Guard{Tokens: newVerifier(t)}
	s := New(Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Guard: guard, Metrics: &guard})
	routes := s.routes()
	for i := range routes {
		at := &routes[i]
		at.off = false
		at.serve = func(w http.ResponseWriter, r *http.Request) {
			if at.target != nil {
				topic, group := at.target(r)
				w.Header().Set("Topic", topic)
				w.Header().Set("Group", group)
			}
			w.WriteHeader(reached)
		}
	}
	return routes, s.router(routes)
}

// TestRoutesAskThePolicy asks every route with tokens of all rights. A route without a need, or one
// whose need does not fit its method, fails.
func TestRoutesAskThePolicy(t *testing.T) {
	routes, h := standIns(t)
	for _, at := range routes {
		t.Run(at.method+" "+at.pattern, func(t *testing.T) {
			path := strings.NewReplacer("{topic}", "a.b", "{group}", "g", "{name}", "n", "{id}", "i", "{file}", "app.js").Replace(at.pattern)
			if strings.Contains(path, "{") {
				t.Fatalf("the test has no value for %s", path)
			}
			path += "?topic=a.b&group=g"
			status := func(authorization string) int {
				w := ask(h, at.method, path, authorization)
				return w.Code
			}
			switch at.need {
			case open:
				if at.method != http.MethodGet {
					t.Error("an open route changes something")
				}
				if got := status(""); got != reached {
					t.Errorf("without a token: %d", got)
				}
				return
			case shows, reads, follows, lists, scrapes:
				if at.method != http.MethodGet {
					t.Error("a route that shows something changes something")
				}
			case changes, publishes:
				if at.method == http.MethodGet {
					t.Error("GET changes something")
				}
			default:
				t.Fatal("the route says nothing about permissions")
			}
			if got := status(""); got != http.StatusUnauthorized {
				t.Errorf("without a token: %d", got)
			}
			w := httptest.NewRecorder()
			r := httptest.NewRequest(at.method, path, nil)
			r.Header.Set("Authorization", "Bearer own")
			h.ServeHTTP(w, r)
			topic, group := w.Header().Get("Topic"), w.Header().Get("Group")
			if w.Code != reached || topic == "" {
				t.Fatalf("with all rights: %d, and the topic is %q", w.Code, topic)
			}
			wants := func(allowed bool, scope string) {
				t.Helper()
				want := http.StatusForbidden
				if allowed {
					want = reached
				}
				if got := status("Bearer " + tokenFor(t, scope)); got != want {
					t.Errorf("with %s: %d, want %d", scope, got, want)
				}
			}
			figures := at.need == shows || at.need == lists || at.need == scrapes
			subscriber := figures || at.need == reads || at.need == follows
			wants(false, "admin:other")
			wants(false, "subscribe:other")
			wants(at.need == publishes, "publish:"+topic)
			wants(at.need != publishes, "admin:"+topic)
			wants(figures, "inspect:"+topic)
			wants(subscriber, "subscribe:"+topic)
			if group != "" {
				wants(subscriber, "subscribe:"+topic+"::"+group)
				wants(false, "subscribe:"+topic+"::other")
			}
		})
	}
}

// TestRoutesRefuseUnknownParameters asks every route that needs a token for what it does not have,
// also those that do something. Open routes answer the same whatever the query, so that probes and
// browsers may add one. A Prometheus may do so at /metrics.
func TestRoutesRefuseUnknownParameters(t *testing.T) {
	s := allServed(t)
	h := apitest.Handler(t, apitest.Operators, s.handler)
	asked := 0
	for _, at := range s.routes() {
		if at.need == open || at.pattern == "/metrics" {
			continue
		}
		if asked++; at.off {
			t.Errorf("%s %s is not served", at.method, at.pattern)
		}
		path := strings.NewReplacer("{topic}", "a.b", "{group}", "g", "{name}", "n", "{id}", "i").Replace(at.pattern)
		separator := "?"
		if topic, _ := at.target(httptest.NewRequest(at.method, path+"?topic=a.b", nil)); topic == "a.b" && at.need != lists {
			path, separator = path+"?topic=a.b", "&"
		}
		body := `{"jti":"1"}`
		if at.need == follows { // a stream has no body
			body = ""
		}
		w := askBody(h, at.method, path+separator+"unknowable=1", "Bearer own", body)
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), `"code":"bad_options"`) || !strings.Contains(w.Body.String(), "unknowable") {
			t.Errorf("%s %s with an unknown parameter: %d %s", at.method, at.pattern, w.Code, w.Body)
		}
	}
	if asked < 25 {
		t.Errorf("%d routes were asked", asked)
	}
}

// allServed returns a server of all routes on a real bus. Revoking a token fails the test.
func allServed(t *testing.T) *Server {
	t.Helper()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	verifier := newVerifier(t)
	guard := Guard{Tokens: verifier}
	return New(Config{
		Bus: bus, Registry: prometheus.NewRegistry(), Guard: guard, Metrics: &guard, Status: facade.StatusOf, Groups: bus, Events: bus, Follow: following(t, bus, verifier), Topics: TopicsOf(bus),
		DeadLetters: bus.Admin().DeadLetters(), Connections: noConnections{}, NATS: bus.Admin().NATS(), Outboxes: parkedBox{},
		Backups: &Backups{Write: func(context.Context, io.Writer, func() error) error { return nil }},
		Revocations: &Revocations{Revoke: func(context.Context, acl.Revocation) (acl.Revocation, error) {
			t.Error("a token was revoked")
			return acl.Revocation{}, nil
		}},
	})
}

// TestMutatedRequests sends every route that takes more than a path requests that are wrong in one
// place. Each request is answered, and none is taken for a fault of the hub.
func TestMutatedRequests(t *testing.T) {
	s := allServed(t)
	s.cfg.Revocations.Revoke = func(_ context.Context, r acl.Revocation) (acl.Revocation, error) { return r, nil }
	bodies := map[string]string{
		"POST /publish/{topic}":              `{"payload":{"a":1},"key":"k","headers":{"a":"b"},"id":"i"}`,
		"PUT /groups/{topic}/{group}/cursor": `{"to":"ts","ts":1,"afterId":"i","n":1,"name":"b","dry_run":true}`,
		"POST /topics/{topic}/purge":         `{"all":true,"before_ts":1,"through_id":"i","needed":true,"dry_run":true,"bound":"b"}`,
		"POST /revocations":                  `{"jti":"i","sub":"s","issued_before":1,"until":1}`,
	}
	asked := 0
	for _, at := range apitest.Routes(t, apitest.Operators) {
		path := strings.NewReplacer("{topic}", "a.b", "{group}", "g", "{name}", "n", "{id}", "i", "{file}", "app.js").Replace(at.Path)
		ask := func(target, body string) {
			asked++
			w := askBody(s.handler, at.Method, target, "Bearer own", body)
			if w.Code >= http.StatusInternalServerError {
				t.Errorf("%s %s %s: %d %s", at.Method, target, body, w.Code, w.Body)
			}
		}
		if at.Path != "/follow/{topic}" { // an answer without an end
			for _, query := range at.Queries(nil) {
				ask(path+query, "")
			}
		}
		name := at.Method + " " + at.Path
		if bodies[name] == "" {
			continue
		}
		for _, body := range apitest.Mutations(t, bodies[name]) {
			ask(path, body)
		}
		delete(bodies, name)
	}
	if len(bodies) > 0 || asked < 1000 {
		t.Errorf("%d requests, and none of %v", asked, bodies)
	}
}

// TestRoutesCheckNames asks every route about a topic and a group that cannot exist. The answer
// comes before the question of rights, and after that of the token.
func TestRoutesCheckNames(t *testing.T) {
	routes, h := standIns(t)
	for _, at := range routes {
		if at.need == open {
			continue
		}
		inPath := strings.Contains(at.pattern, "{topic}")
		names := func(topic, group string) string {
			path := strings.NewReplacer("{topic}", url.PathEscape(topic), "{group}", url.PathEscape(group), "{name}", "n", "{id}", "i").Replace(at.pattern)
			if !inPath {
				path += "?" + url.Values{"topic": {topic}, "group": {group}}.Encode()
			}
			return path
		}
		about := func(path string) (topic, group string) { return at.target(httptest.NewRequest(at.method, path, nil)) }
		topic, group := about(names("a..b", "g"))
		ofTopic, ofGroup := topic == "a..b" || inPath, group == "g" || strings.Contains(at.pattern, "{group}")
		for _, tt := range []struct {
			name, path, code string
			given            bool
		}{
			{"a malformed topic", names("a..b", "g"), `"code":"bad_topic"`, ofTopic},
			{"a pattern", names("a.*", "g"), `"code":"bad_topic"`, ofTopic},
			{"no topic", at.pattern, `{"error":"topic required","code":"bad_topic"}`, ofTopic && !inPath && at.need != lists},
			{"an empty topic", names("", "g"), `"code":"bad_topic"`, ofTopic && !inPath && at.need != lists},
			{"a malformed group", names("a.b", "g\n"), `"code":"bad_group"`, ofGroup},
			{"a long group", names("a.b", strings.Repeat("g", 129)), `"code":"bad_group"`, ofGroup},
		} {
			if !tt.given {
				continue
			}
			for _, token := range []string{"own", tokenFor(t, "publish:other")} {
				if w := ask(h, at.method, tt.path, "Bearer "+token); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), tt.code) {
					t.Errorf("%s %s: %d %s", at.method, tt.path, w.Code, w.Body)
				}
			}
			if w := ask(h, at.method, tt.path, "Bearer wrong"); w.Code != http.StatusUnauthorized {
				t.Errorf("%s %s with a bad token: %d %s", at.method, tt.path, w.Code, w.Body)
			}
		}
	}
}

// TestPageHasTheRoutes compares the table of docs/protocol.md with that of the code.
func TestPageHasTheRoutes(t *testing.T) {
	text, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `([A-Z]+ /[^`]*)` \\| (none|see|read|publish|change|list) \\|")
	documented := make(map[string]string)
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		documented[m[1]] = m[2]
	}
	routes, _ := standIns(t)
	var names []string
	for _, at := range routes {
		name := at.method + " " + at.pattern
		names = append(names, name)
		if documented[name] != at.need.word() {
			t.Errorf("docs/protocol.md has permission %q for %s, want %q", documented[name], name, at.need.word())
		}
	}
	for name := range documented {
		if !slices.Contains(names, name) {
			t.Errorf("docs/protocol.md has %s, which is no route", name)
		}
	}
}

// TestFailures has handlers answer with errors of the bus.
func TestFailures(t *testing.T) {
	s := New(Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Status: func(code string) int {
		return map[string]int{"bad_topic": 400, "not_found": 404, "overloaded": 503, "internal": 503}[code]
	}})
	for _, tt := range []struct {
		err    error
		status int
		text   string
	}{
		{jetstream.ErrNotFound, 404, `{"error":"There is no such group.","code":"not_found"}`},
		{&jetstream.Error{Code: jetstream.CodeBadTopic, Msg: "no"}, 400, `{"error":"no","code":"bad_topic"}`},
		{&jetstream.Error{Code: jetstream.CodeOverloaded, Msg: "no"}, 503, `{"error":"no","code":"overloaded"}`},
		{&jetstream.Error{Code: jetstream.CodeInternal, Msg: "secret"}, 503, `{"error":"The hub failed to move the group: try again later.","code":"internal"}`},
		{jetstream.ErrClosed, 503, `{"error":"The hub failed to move the group: try again later.","code":"internal"}`},
	} {
		w := httptest.NewRecorder()
		s.fail(w, httptest.NewRequest(http.MethodGet, "/", nil), tt.err, "group", "move the group")
		if got := strings.TrimSpace(w.Body.String()); w.Code != tt.status || got != tt.text || (w.Code == 503) != (w.Header().Get("Retry-After") != "") {
			t.Errorf("%v was answered with %d %s, want %d %s", tt.err, w.Code, got, tt.status, tt.text)
		}
	}
}

// TestBodies sends bodies that a request does not take.
func TestBodies(t *testing.T) {
	for _, tt := range []struct {
		body       string
		mayBeEmpty bool
		status     int
		text       string
	}{
		{`{"n":1}`, false, reached, ""},
		{``, true, reached, ""},
		{``, false, 400, "it is empty"},
		{`{"n":1`, false, 400, "it ends early"},
		{`{"n":"1"}`, false, 400, "n must not be a JSON string"},
		{`{"m":1}`, false, 400, `unknown field \"m\"`},
		{`[1]`, false, 400, "it is a JSON array and not an object"},
		{`{"n":1}{}`, false, 400, "more follows the object"},
		{`{"n":1` + strings.Repeat(" ", maxBody) + `}`, false, 413, "too large"},
	} {
		w := httptest.NewRecorder()
		var got struct {
			N int `json:"n"`
		}
		if readBody(w, httptest.NewRequest(http.MethodPut, "/", strings.NewReader(tt.body)), &got, tt.mayBeEmpty) {
			w.WriteHeader(reached)
		}
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.text) {
			t.Errorf("%.20s was answered with %d %s, want %d %s", tt.body, w.Code, w.Body, tt.status, tt.text)
		}
	}
}

// TestFailuresAreLoggedOnceAMinute has a request fail again and again, and another whose operator
// gave up.
func TestFailuresAreLoggedOnceAMinute(t *testing.T) {
	var log bytes.Buffer
	s := New(Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo}))})
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	for range 5 {
		s.fail(httptest.NewRecorder(), r, errors.New("away"), "group", "move the group")
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	s.fail(httptest.NewRecorder(), r.WithContext(gone), context.Canceled, "group", "move the group")
	if n := strings.Count(log.String(), "failed to serve an operator"); n != 1 {
		t.Errorf("%d lines:\n%s", n, &log)
	}
}
