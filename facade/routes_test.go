package facade_test

import (
	"bufio"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-chi/chi/v5"

	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
)

// TestRoutesAskThePolicy compares the routes of the HTTP API with the table of docs/protocol.md,
// which names the permission that each needs. A token without that permission is refused, and one
// with it is not.
func TestRoutesAskThePolicy(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Outbox = noOutbox{} })
	needs := documentedRoutes(t)
	var routes []string
	all := grant(t, "all", "publish:t", "subscribe:t")
	r.pullAs(t, all, "t", "g", `{"wait_ms":0}`)
	r.put(t, "t", "1", "Authorization", "Bearer "+all)
	held := r.pullAs(t, all, "t", "g", `{"max":1,"wait_ms":20000}`)
	if len(held) != 1 {
		t.Fatal("no event came")
	}
	handle := held[0].Ack
	if _, _, err := r.bus.Schemas().Register(t.Context(), "t", schemas.Draft{Schema: json.RawMessage("true")}); err != nil {
		t.Fatal(err)
	}
	walked, ok := r.srv.HTTP().(chi.Routes)
	if !ok {
		t.Fatal("the handler is no router")
	}
	err := chi.Walk(walked, func(method, route string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		name := method + " " + strings.ReplaceAll(route, "/*", "/{key}")
		if method == http.MethodHead {
			name = "GET" + strings.TrimPrefix(name, method) // the same without a body
		}
		if needs[name] == "" {
			t.Errorf("docs/protocol.md does not say what %s needs", name)
			return nil
		}
		routes = append(routes, name)
		if needs[name] == "none" {
			if a := r.ask(t, method, route, "", "Authorization", ""); a.status != http.StatusOK {
				t.Errorf("%s without a token: %d %s", name, a.status, a.text)
			}
			return nil
		}
		path := strings.NewReplacer("{topic}", "t", "{key}", "k", "{id}", "i", "{group}", "g").Replace(strings.TrimPrefix(name, strings.Fields(name)[0]+" "))
		if !strings.Contains(route, "{topic}") {
			path += "?topic=t"
		}
		body := "1"
		var headers []string
		switch route {
		case "/publish": // the topic is in the event
			headers = []string{"Ce-Specversion", "1.0", "Ce-Id", "1", "Ce-Source", "/s", "Ce-Type", "t", "Content-Type", "application/json"}
		case "/schemas":
			method = http.MethodGet // its body tells
		case "/subscribe":
			path += "&group=g"
		case "/groups/{topic}/{group}/pull":
			body = `{"wait_ms":0}`
		case "/ack", "/nack", "/modack":
			body = `{"ack":["` + handle + `"]}`
		}
		ask := func(token string) answer {
			if route == "/broadcast/{topic}" {
				stream, a := r.tryStream(t, path, "Authorization", "Bearer "+token)
				if stream != nil {
					_ = stream.body.Close()
				}
				return a
			}
			if route != "/subscribe" {
				return r.ask(t, method, path, body, append(headers, "Authorization", "Bearer "+token)...)
			}
			stream, a := r.trySubscribe(t, strings.TrimPrefix(path, "/subscribe?"), "Authorization", "Bearer "+token)
			if stream != nil {
				_ = stream.body.Close()
			}
			return a
		}
		// A list shows what the token allows.
		refuses := func(a answer) bool {
			return a.status == http.StatusForbidden || route == "/schemas" && !strings.Contains(a.text, `"topic":"t"`)
		}
		for _, action := range []string{"publish", "subscribe", "presence", "schema", "admin"} {
			a := ask(grant(t, "one", action+":t"))
			if refused := refuses(a); refused == (action == needs[name]) {
				t.Errorf("%s with the permission %s: %d %s, needs %s", name, action, a.status, a.text, needs[name])
			}
		}
		if a := ask(grant(t, "two", needs[name]+":other")); !refuses(a) {
			t.Errorf("%s with the permission for another topic: %d %s", name, a.status, a.text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range needs {
		if !slices.Contains(routes, name) {
			t.Errorf("docs/protocol.md has %s, which is no route", name)
		}
	}
	described := make(map[string]string)
	for _, at := range apitest.Routes(t, apitest.Clients) {
		described[at.Method+" "+at.Path] = at.Permission
		if at.Open != (at.Permission == "none") {
			t.Errorf("docs/openapi.yaml: %s %s has the x-permission %s, which its security contradicts", at.Method, at.Path, at.Permission)
		}
	}
	if !maps.Equal(described, needs) {
		t.Errorf("docs/openapi.yaml has the operations of port 8081, with their x-permission,\n%v\nwant\n%v\nAdd an operation under paths, and its action to x-permission.", described, needs)
	}
}

// documentedRoutes are the permissions that the routes need, by method and path.
func documentedRoutes(t *testing.T) map[string]string {
	t.Helper()
	f, err := os.Open("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	row := regexp.MustCompile("^\\| `([A-Z]+ /[^`]*)` \\| `([a-z]+)` \\|")
	needs := make(map[string]string)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if m := row.FindStringSubmatch(lines.Text()); m != nil {
			needs[m[1]] = m[2]
		}
	}
	return needs
}

// noOutbox takes every event and keeps none.
type noOutbox struct{}

func (noOutbox) Add(context.Context, string, []byte, jetstream.PublishOptions) (string, error) {
	return "id", nil
}
