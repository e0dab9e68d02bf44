package ops

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

func topicsHub(t *testing.T) (*jetstream.Bus, http.Handler) {
	t.Helper()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: []topics.Rule{
		{Pattern: "orders.placed", MaxMsgs: 100, MaxAge: time.Hour, OnFull: topics.OnFullReject},
		{Pattern: "user.*", Family: "users"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	h := described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), Topics: TopicsOf(bus), Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	return bus, h
}

func fill(t *testing.T, bus *jetstream.Bus, topic string, n int) (ids []string) {
	t.Helper()
	for range n {
		r, err := bus.Publish(t.Context(), topic, []byte("1"), jetstream.PublishOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.ID)
	}
	return ids
}

func askBody(h http.Handler, method, path, token, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Authorization", token)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// Topics that an operator makes with a JWT count for its subject, as those of clients do. With the
// hub's own token, they count for nobody.
func TestTopicsOfOperatorsCount(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Limits: jetstream.Limits{ClientTopics: 2, TopicsPerClient: 3}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	h := described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), Topics: TopicsOf(bus), Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	operator := "Bearer " + tokenFor(t, "admin:att.**")
	for i, want := range []int{http.StatusOK, http.StatusOK, http.StatusTooManyRequests, http.StatusTooManyRequests} {
		w := ask(h, http.MethodPut, "/topics/att."+strconv.Itoa(i), operator)
		if w.Code != want {
			t.Errorf("topic %d: %d %s, want %d", i, w.Code, w.Body, want)
		}
		if wait, err := strconv.Atoi(w.Header().Get("Retry-After")); i == 3 && (err != nil || wait < 2) {
			t.Errorf("Retry-After is %q, want about 10 s", w.Header().Get("Retry-After"))
		}
	}
	if w := ask(h, http.MethodPut, "/topics/att.0", operator); w.Code != http.StatusOK {
		t.Errorf("a topic that exists: %d %s", w.Code, w.Body)
	}
	for i := range 5 {
		if w := ask(h, http.MethodPut, "/topics/own."+strconv.Itoa(i), "Bearer own"); w.Code != http.StatusOK {
			t.Errorf("with the hub's own token: %d %s", w.Code, w.Body)
		}
	}
	if w := ask(h, http.MethodDelete, "/topics/att.0", operator); w.Code != http.StatusNoContent {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
}

// A list has what the token may see. Families have a right of their own.
func TestListTopics(t *testing.T) {
	bus, h := topicsHub(t)
	for _, topic := range []string{"orders.placed", "orders.paid", "user.1", "secret"} {
		fill(t, bus, topic, 2)
	}
	for _, tt := range []struct{ scope, want string }{
		{"subscribe:orders.*", "orders.paid orders.placed"},
		{"admin:orders.placed", "orders.placed"},
		{"inspect:secret", "secret"},
		{"publish:**", ""},
		{"subscribe:eventhub.topics", "(users)"},
		{"admin:**", "orders.paid orders.placed secret (users)"},
	} {
		w := ask(h, http.MethodGet, "/topics", "Bearer "+tokenFor(t, tt.scope))
		var got struct{ Topics []ListedTopic }
		if err := json.Unmarshal(w.Body.Bytes(), &got); w.Code != 200 || err != nil {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		var names []string
		for _, l := range got.Topics {
			if l.Topic == "" {
				l.Topic = "(" + l.Stream + ")"
			}
			names = append(names, l.Topic)
			if l.Topic == "orders.placed" && (l.Events != 2 || l.OnFull != "reject" || l.Retention != (Retention{3_600_000, 0, 100}) || l.FirstTS == 0 || l.LastTS < l.FirstTS || l.Drift != nil) {
				t.Errorf("got %+v", l)
			}
		}
		if strings.Join(names, " ") != tt.want {
			t.Errorf("%s sees %v, want %s", tt.scope, names, tt.want)
		}
	}
}

func TestShowPurgeAndDeleteTopics(t *testing.T) {
	bus, h := topicsHub(t)
	ids := fill(t, bus, "orders.placed", 10)
	fill(t, bus, "dlq.orders.placed", 1)
	admin := "Bearer " + tokenFor(t, "admin:**")
	var shown ShownTopic
	w := ask(h, http.MethodGet, "/topics/orders%2Eplaced", "Bearer "+tokenFor(t, "inspect:orders.placed"))
	if err := json.Unmarshal(w.Body.Bytes(), &shown); w.Code != 200 || err != nil || shown.Events != 10 || shown.First.ID != ids[0] || shown.Last.ID != ids[9] ||
		shown.OnFull != "reject" || shown.GroupAgeMS != topics.DefaultGroupAge.Milliseconds() || shown.Retention != (Retention{3_600_000, 0, 100}) {
		t.Fatalf("%d %s %v", w.Code, w.Body, err)
	}
	later := strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10)
	for _, tt := range []struct {
		name, method, path, body string
		status                   int
		text                     string
	}{
		{"unknown", "GET", "/topics/nothing", "", 404, `"not_found"`},
		{"no topic", "GET", "/topics/a..b", "", 400, `"bad_topic"`},
		{"nothing asked for", "POST", "/topics/orders.placed/purge", `{}`, 400, "exactly one of all, before_ts and through_id"},
		{"no body", "POST", "/topics/orders.placed/purge", ``, 400, `"bad_options"`},
		{"all is false", "POST", "/topics/orders.placed/purge", `{"all":false}`, 400, "exactly one"},
		{"too much asked for", "POST", "/topics/orders.placed/purge", `{"all":true,"before_ts":1}`, 400, "exactly one"},
		{"no time", "POST", "/topics/orders.placed/purge", `{"before_ts":"x"}`, 400, "before_ts must not be a JSON string"},
		{"negative time", "POST", "/topics/orders.placed/purge", `{"before_ts":-1}`, 400, "before_ts is no time"},
		{"time beyond", "POST", "/topics/orders.placed/purge", `{"before_ts":9223372036855}`, 400, "before_ts is no time"},
		{"unknown field", "POST", "/topics/orders.placed/purge", `{"al":true}`, 400, "unknown field"},
		{"unknown id", "POST", "/topics/orders.placed/purge", `{"through_id":"x"}`, 404, `"unknown_id"`},
		{"unknown topic", "POST", "/topics/nothing/purge", `{"all":true}`, 404, `"not_found"`},
		{"before 1970", "POST", "/topics/orders.placed/purge", `{"before_ts":0}`, 200, `"removed":0,"left":10,"dryRun":false`},
		{"dry run", "POST", "/topics/orders.placed/purge", `{"before_ts":` + later + `,"dry_run":true}`, 200, `"removed":10,"left":0,"dryRun":true`},
		{"through an id", "POST", "/topics/orders.placed/purge", `{"through_id":"` + ids[3] + `"}`, 200, `{"topic":"orders.placed","removed":4,"left":6,"dryRun":false}`},
		{"needed", "POST", "/topics/dlq.orders.placed/purge", `{"all":true}`, 400, "the hub needs topic dlq.orders.placed: it holds dead letters"},
		{"needed, explicitly", "POST", "/topics/dlq.orders.placed/purge", `{"all":true,"needed":true}`, 200, `"removed":1`},
		{"all", "POST", "/topics/orders.placed/purge", `{"all":true}`, 200, `"removed":6,"left":0`},
		{"delete needed", "DELETE", "/topics/dlq.orders.placed", "", 400, "the hub needs topic"},
		{"delete badly", "DELETE", "/topics/dlq.orders.placed?needed=1", "", 400, "needed must be true or false"},
		{"delete needed, explicitly", "DELETE", "/topics/dlq.orders.placed?needed=true", "", 204, ""},
		{"delete", "DELETE", "/topics/orders.placed", "", 204, ""},
		{"delete again", "DELETE", "/topics/orders.placed", "", 404, `"not_found"`},
	} {
		if w := askBody(h, tt.method, tt.path, admin, tt.body); w.Code != tt.status || !strings.Contains(w.Body.String(), tt.text) {
			t.Errorf("%s: %d %s, want %d %s", tt.name, w.Code, w.Body, tt.status, tt.text)
		}
	}
}
