package ops

import (
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
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
			case shows, reads, lists, scrapes:
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
			subscriber := figures || at.need == reads
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
