package ops

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// A group can be deleted by whoever administers its topic. Names are segments of the path,
// percent-encoded once.
func TestDeleteGroup(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	h := described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), Groups: bus, Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	make := func(group string) {
		t.Helper()
		sub, err := bus.Subscribe(t.Context(), "orders.placed", group, jetstream.SubscribeOptions{}, func(*jetstream.Held) {})
		if err != nil {
			t.Fatal(err)
		}
		if err := sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, group := range []string{"billing", "a b/c%2Fd", "100%", "ü"} {
		make(group)
	}
	admin := "Bearer " + tokenFor(t, "admin:orders.*")
	for _, test := range []struct {
		name, method, path, authorization string
		status                            int
		code                              string
	}{
		{"no token", http.MethodDelete, "/groups/orders.placed/billing", "", 401, "no_token"},
		{"subscriber", http.MethodDelete, "/groups/orders.placed/billing", "Bearer " + tokenFor(t, "subscribe:**"), 403, "forbidden"},
		{"administers another", http.MethodDelete, "/groups/orders.placed/billing", "Bearer " + tokenFor(t, "admin:other"), 403, "forbidden"},
		{"unknown group", http.MethodDelete, "/groups/orders.placed/nobody", admin, 404, "not_found"},
		{"unknown topic", http.MethodDelete, "/groups/orders.none/billing", admin, 404, "not_found"},
		{"no topic", http.MethodDelete, "/groups/orders.*/billing", admin, 400, "bad_topic"},
		{"no group", http.MethodDelete, "/groups/orders.placed/a%00b", admin, 400, "bad_group"},
		{"another method", http.MethodPost, "/groups/orders.placed/billing", admin, 405, ""},
		{"it", http.MethodDelete, "/groups/orders.placed/billing", admin, 204, ""},
		{"it again", http.MethodDelete, "/groups/orders.placed/billing", admin, 404, "not_found"},
		{"a slash and a percent", http.MethodDelete, "/groups/orders.placed/a%20b%2Fc%252Fd", admin, 204, ""},
		{"a percent alone", http.MethodDelete, "/groups/orders.placed/100%25", admin, 204, ""},
		{"the topic encoded", http.MethodDelete, "/groups/orders%2Eplaced/%C3%BC", "Bearer own", 204, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ask(h, test.method, test.path, test.authorization)
			if got.Code != test.status || test.code != "" && !strings.Contains(got.Body.String(), `"code":"`+test.code+`"`) {
				t.Errorf("got %d %s", got.Code, got.Body)
			}
		})
	}
}

// TestManageGroups asks for everything about groups, well and badly.
func TestManageGroups(t *testing.T) {
	t.Parallel()
	// A move waits for as long as a lease may be given of an event that was fetched before.
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), AckWait: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	h := described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), Groups: bus, Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	for i := range 5 {
		if _, err := bus.Publish(t.Context(), "orders.placed", []byte("1"), jetstream.PublishOptions{ID: "id-" + strconv.Itoa(i)}); err != nil {
			t.Fatal(err)
		}
	}
	for topic, group := range map[string]string{"orders.placed": "billing", "secret": "billing"} {
		if err := bus.Group(topic, group).Seek(t.Context(), jetstream.FromEarliest); err != nil {
			t.Fatal(err)
		}
	}
	admin, reader := tokenFor(t, "admin:orders.*"), tokenFor(t, "subscribe:orders.*::billing")
	const at = "/groups/orders.placed/billing"
	for _, tt := range []struct {
		name, token, method, path, body string
		status                          int
		want                            string
	}{
		{"list", reader, "GET", "/groups", "", 200, `{"groups":[{"topic":"orders.placed","group":"billing","generation":2,"floor":0,"pending":5,`},
		{"list one topic", reader, "GET", "/groups?topic=orders.placed", "", 403, "forbidden"},
		{"list one topic as admin", admin, "GET", "/groups?topic=orders.placed&limit=1", "", 200, `"group":"billing"`},
		{"list another topic", admin, "GET", "/groups?topic=secret", "", 403, "forbidden"},
		{"a page too large", admin, "GET", "/groups?limit=501", "", 400, "limit must be a number from 1 to 500"},
		{"a page of none", admin, "GET", "/groups?limit=0", "", 400, "limit must be a number"},
		{"a mistyped name", admin, "GET", "/groups?topics=a", "", 400, `unknown parameter \"topics\"`},
		{"no topic", admin, "GET", "/groups?topic=", "", 400, "bad_topic"},
		{"two limits", admin, "GET", "/groups?limit=1&limit=2", "", 400, "limit is given more than once"},
		{"a cursor of its own", admin, "GET", "/groups?next=abc", "", 400, "next is not what"},
		{"show", reader, "GET", at, "", 200, `"pending":5,"inflight":0`},
		{"show another", reader, "GET", "/groups/orders.placed/other", "", 403, "forbidden"},
		{"show none", admin, "GET", "/groups/orders.placed/other", "", 404, "There is no such group on this topic."},
		{"the cursor", reader, "GET", at + "/cursor", "", 200, `{"topic":"orders.placed","group":"billing"}`},
		{"seek as a reader", reader, "PUT", at + "/cursor", `{"to":"latest"}`, 403, "forbidden"},
		{"no body", admin, "PUT", at + "/cursor", "", 400, "it is empty"},
		{"no position", admin, "PUT", at + "/cursor", "{}", 400, "to must be earliest, latest, ts, afterId, back or bookmark"},
		{"another position", admin, "PUT", at + "/cursor", `{"to":"start"}`, 400, "to must be"},
		{"a position that lacks something", admin, "PUT", at + "/cursor", `{"to":"ts"}`, 400, "ts is missing"},
		{"a position with more", admin, "PUT", at + "/cursor", `{"to":"latest","n":1}`, 400, "n does not go with"},
		{"a time before 1970", admin, "PUT", at + "/cursor", `{"to":"ts","ts":-1}`, 400, "epoch milliseconds"},
		{"a time that is none", admin, "PUT", at + "/cursor", `{"to":"ts","ts":"now"}`, 400, "ts must not be a JSON string"},
		{"none back", admin, "PUT", at + "/cursor", `{"to":"back","n":0}`, 400, "n must be a number from 1"},
		{"an unknown field", admin, "PUT", at + "/cursor", `{"to":"latest","dryrun":true}`, 400, "unknown field"},
		{"an unknown id", admin, "PUT", at + "/cursor", `{"to":"afterId","afterId":"none"}`, 404, "unknown_id"},
		{"an unknown bookmark", admin, "PUT", at + "/cursor", `{"to":"bookmark","name":"none"}`, 404, "no such bookmark"},
		{"an unknown group", admin, "PUT", "/groups/orders.placed/other/cursor", `{"to":"latest"}`, 404, "not_found"},
		{"dry run", admin, "PUT", at + "/cursor", `{"to":"afterId","afterId":"id-1","dry_run":true}`, 200, `{"redelivered":0,"skipped":2}`},
		{"after the dry run", admin, "GET", at, "", 200, `"generation":2,"floor":0,"pending":5`},
		{"bookmark", admin, "PUT", at + "/bookmarks/a%2Fb", "", 200, `{"name":"a/b","floor":0,"newest":0,"unsettled":0,"exact":true`},
		{"bookmark as a reader", reader, "PUT", at + "/bookmarks/c", "", 403, "forbidden"},
		{"seek", admin, "PUT", at + "/cursor", `{"to":"afterId","afterId":"id-1"}`, 200, `{"redelivered":0,"skipped":2}`},
		{"after the seek", admin, "GET", at, "", 200, `"generation":3,"floor":2,"pending":3`},
		{"bookmarks", reader, "GET", at + "/bookmarks", "", 200, `{"bookmarks":[{"name":"a/b",`},
		{"a bookmark", reader, "GET", at + "/bookmarks/a%2Fb", "", 200, `"exact":true`},
		{"seek back", admin, "PUT", at + "/cursor", `{"to":"bookmark","name":"a/b"}`, 200, `{"redelivered":2,"skipped":0}`},
		{"repair as a reader", reader, "POST", at + "/repair", "", 403, "forbidden"},
		{"repair none", admin, "POST", "/groups/orders.placed/other/repair", "", 404, "There is no such group on this topic."},
		{"repair with an unknown field", admin, "POST", at + "/repair", `{"dry":true}`, 400, "unknown field"},
		{"repair with a query", admin, "POST", at + "/repair?dry_run=true", "", 400, "unknown parameter"},
		{"repair, dry", admin, "POST", at + "/repair", `{"dry_run":true}`, 200, `{"redelivered":0}`},
		{"after the dry repair", admin, "GET", at, "", 200, `"generation":4,"floor":0,"pending":5`},
		{"repair", admin, "POST", at + "/repair", "", 200, `{"redelivered":0}`},
		{"after the repair", admin, "GET", at, "", 200, `"generation":5,"floor":0,"pending":5`},
		{"pause", admin, "POST", at + "/pause", "", 204, ""},
		{"paused", reader, "GET", at, "", 200, `"paused":true`},
		{"resume", admin, "POST", at + "/resume", "", 204, ""},
		{"resumed", reader, "GET", at, "", 200, `"paused":false`},
		{"pause as a reader", reader, "POST", at + "/pause", "", 403, "forbidden"},
		{"delete the bookmark", admin, "DELETE", at + "/bookmarks/a%2Fb", "", 204, ""},
		{"delete it again", admin, "DELETE", at + "/bookmarks/a%2Fb", "", 404, "not_found"},
		{"no bookmarks", reader, "GET", at + "/bookmarks", "", 200, `{"bookmarks":[]}`},
	} {
		r := httptest.NewRequest(tt.method, tt.path, strings.NewReader(tt.body))
		r.Header.Set("Authorization", "Bearer "+tt.token)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.want) {
			t.Errorf("%s: %d %s, want %d %s", tt.name, w.Code, w.Body, tt.status, tt.want)
		}
	}
}

// Every name that a group may have is a segment of the path, percent-encoded, also a name that
// looks like a directory or has slashes.
func TestOddNamesOfGroups(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	s := httptest.NewServer(described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), Groups: bus, Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf}))
	t.Cleanup(s.Close)
	token := tokenFor(t, "admin:orders.placed")
	for _, group := range []string{".", "..", "...", "a/b", "/", "../..", "%2E", "%2F", "a b+c", "?", "#", "ä;=", "\\"} {
		sub, err := bus.Subscribe(t.Context(), "orders.placed", group, jetstream.SubscribeOptions{}, func(*jetstream.Held) {})
		if err != nil {
			t.Fatalf("%q: %v", group, err)
		}
		if err := sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		segment := url.PathEscape(group)
		if group == "." || group == ".." {
			segment = strings.ReplaceAll(group, ".", "%2E")
		}
		at := "/groups/orders.placed/" + segment
		quoted, err := json.Marshal(group)
		if err != nil {
			t.Fatal(err)
		}
		for _, ask := range []struct {
			method, path string
			status       int
			want         string
		}{
			{http.MethodGet, at, http.StatusOK, `"group":` + string(quoted)},
			{http.MethodGet, at + "/cursor", http.StatusOK, `"group":` + string(quoted)},
			{http.MethodPut, at + "/bookmarks/" + segment, http.StatusOK, `"name":` + string(quoted)},
			{http.MethodGet, at + "/bookmarks/" + segment, http.StatusOK, `"name":` + string(quoted)},
			{http.MethodPost, at + "/pause", http.StatusNoContent, ""},
			{http.MethodPost, at + "/resume", http.StatusNoContent, ""},
			{http.MethodDelete, at, http.StatusNoContent, ""},
			{http.MethodGet, at, http.StatusNotFound, "not_found"},
		} {
			if status, body := fetch(t, s, ask.method, ask.path, token, ""); status != ask.status || !strings.Contains(body, ask.want) {
				t.Errorf("group %q: %s %s: %d %s, want %d %s", group, ask.method, ask.path, status, body, ask.status, ask.want)
			}
		}
	}
}
