package ops

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"eventhub/acl"
	"eventhub/docs"
	"eventhub/docs/apitest"
)

// described returns the handler of a server. Each answer is held against docs/openapi.yaml.
func described(tb testing.TB, cfg Config) http.Handler {
	tb.Helper()
	cfg.Documents = docs.Handlers()
	return describedServer(tb, New(cfg))
}

// describedServer is described for a server that exists.
func describedServer(tb testing.TB, s *Server) http.Handler {
	tb.Helper()
	return apitest.Handler(tb, apitest.Operators, s.Handler())
}

// TestAnswersAreDescribed checks that tests ask servers only through described.
func TestAnswersAreDescribed(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	bare := regexp.MustCompile(`\bHandler\(\)`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if file != "openapi_test.go" && bare.Match(text) {
			t.Errorf("%s asks a Server whose answers nothing holds against docs/openapi.yaml: use described(t, Config{...}) instead of New(Config{...}).Handler()", file)
		}
	}
}

// TestOpenAPIHasTheRoutes compares the operations of docs/openapi.yaml with the table of routes.
func TestOpenAPIHasTheRoutes(t *testing.T) {
	routes, _ := standIns(t)
	want := make(map[string]string)
	for _, at := range routes {
		permission := at.need.word()
		if topic := at.fixedTopic(); topic != "" {
			permission += " " + topic
		}
		want[at.method+" "+at.pattern] = permission
	}
	got := make(map[string]string)
	for _, at := range apitest.Routes(t, apitest.Operators) {
		permission := at.Permission
		if at.Topic != "" {
			permission += " " + at.Topic
		}
		got[at.Method+" "+at.Path] = permission
		if at.Open != (at.Permission == "none") {
			t.Errorf("docs/openapi.yaml: %s %s has the x-permission %q, which its security contradicts", at.Method, at.Path, at.Permission)
		}
	}
	for name, permission := range want {
		if _, ok := got[name]; !ok {
			t.Errorf("docs/openapi.yaml lacks %s: add it under paths, with servers for port 8082 and x-permission: %s", name, permission)
		} else if got[name] != permission {
			t.Errorf("docs/openapi.yaml has for %s the x-permission (and x-permission-topic) %q, want %q", name, got[name], permission)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("docs/openapi.yaml has %s on port 8082, which is no route: remove it, or add it to the table in routes.go", name)
		}
	}
}

// word is what docs/protocol.md and docs/openapi.yaml call a need.
func (n need) word() string {
	return map[need]string{open: "none", shows: "see", reads: "read", follows: "read", changes: "change", lists: "list", publishes: "publish", scrapes: "see"}[n]
}

// fixedTopic is the topic of a route without a topic in its requests, or "".
func (at *route) fixedTopic() string {
	if at.target == nil {
		return ""
	}
	r, err := http.NewRequest(http.MethodGet, "/", http.NoBody)
	if err != nil {
		return ""
	}
	topic, _ := at.target(r)
	return topic
}

// TestDocuments asks for both documents.
func TestDocuments(t *testing.T) {
	h := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry()})
	for path, want := range map[string][]byte{"/openapi.yaml": docs.OpenAPI, "/asyncapi.yaml": docs.AsyncAPI} {
		w := ask(h, http.MethodGet, path, "")
		if w.Code != http.StatusOK || w.Body.String() != string(want) {
			t.Errorf("%s was answered with %d %.100s", path, w.Code, w.Body)
		}
		r := httptest.NewRequest(http.MethodGet, path, http.NoBody)
		r.Header.Set("If-None-Match", w.Header().Get("ETag"))
		got := httptest.NewRecorder()
		if h.ServeHTTP(got, r); got.Code != http.StatusNotModified || got.Body.Len() != 0 {
			t.Errorf("%s that is known was answered with %d %.100s", path, got.Code, got.Body)
		}
	}
}

// TestRevocationBounds compares the bounds of names in docs/openapi.yaml with those of the hub.
func TestRevocationBounds(t *testing.T) {
	var doc struct {
		Components struct {
			Schemas map[string]struct {
				Properties map[string]struct {
					MinLength int `yaml:"minLength"`
					MaxLength int `yaml:"maxLength"`
				}
			}
		}
	}
	if err := yaml.Unmarshal(docs.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	for name, revocation := range map[string]func(text string) acl.Revocation{
		"jti": func(text string) acl.Revocation { return acl.Revocation{ID: text} },
		"sub": func(text string) acl.Revocation { return acl.Revocation{Subject: text, IssuedBefore: 1} },
	} {
		bounds := doc.Components.Schemas["Revocation"].Properties[name]
		for _, n := range []int{bounds.MinLength - 1, bounds.MinLength, bounds.MaxLength, bounds.MaxLength + 1} {
			taken := revocation(strings.Repeat("x", max(n, 0))).Validate() == nil
			if taken != (n >= bounds.MinLength && n <= bounds.MaxLength) {
				t.Errorf("a %s of %d bytes: taken is %v, docs/openapi.yaml has the bounds %d..%d", name, n, taken, bounds.MinLength, bounds.MaxLength)
			}
		}
	}
}
