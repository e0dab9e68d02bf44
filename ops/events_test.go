package ops

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"eventhub/docs"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// operators is a hub whose operations port a test asks. It notes which statuses each route had.
type operators struct {
	t    *testing.T
	h    http.Handler
	seen map[string]map[int]bool
	// hurried gives a request no time to wait.
	hurried bool
}

// ask returns the answer to a request in one line.
func (o *operators) ask(token, method, path, body string) string {
	o.t.Helper()
	ctx := o.t.Context()
	if o.hurried {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
	}
	r := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	r.Header.Set("Authorization", token)
	if token == "twice" {
		r.Header.Add("Authorization", token)
	}
	w := httptest.NewRecorder()
	o.h.ServeHTTP(w, r)
	name := method + " " + strings.SplitN(path, "?", 2)[0]
	if o.seen[name] == nil {
		o.seen[name] = make(map[int]bool)
	}
	o.seen[name][w.Code] = true
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

// wants asks, and compares the answer with a pattern, in which NUMBER stands for any number.
func (o *operators) wants(token, method, path, body, want string) {
	o.t.Helper()
	pattern := strings.ReplaceAll(regexp.QuoteMeta(want), "NUMBER", `[0-9.e+-]+`)
	if got := o.ask(token, method, path, body); !regexp.MustCompile("^" + pattern + "$").MatchString(got) {
		o.t.Errorf("%s %s %s: %s, want %s", method, path, body, got, want)
	}
}

// documented returns the statuses that docs/openapi.yaml has for GET of a path.
func documented(t *testing.T, path string) (statuses []int) {
	t.Helper()
	var doc struct {
		Paths map[string]struct {
			Get struct {
				Responses map[string]any
			}
		}
	}
	if err := yaml.Unmarshal(docs.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	for text := range doc.Paths[path].Get.Responses {
		status, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		statuses = append(statuses, status)
	}
	slices.Sort(statuses)
	return statuses
}

// overview compares the overview of a hub whose only group has 5 pending events with what is known
// otherwise.
func (o *operators) overview(bus *jetstream.Bus) {
	o.t.Helper()
	var got overview
	before := time.Now().UnixMilli()
	if err := json.Unmarshal([]byte(strings.TrimPrefix(o.ask("Bearer own", http.MethodGet, "/overview", ""), "200 ")), &got); err != nil {
		o.t.Fatal(err)
	}
	want, err := bus.Admin().NATS().Info(o.t.Context())
	if err != nil {
		o.t.Fatal(err)
	}
	_, groups := got.Totals["eventhub_group_pending"] // NATS would be asked about each group
	n := got.NATS
	switch {
	case n == nil:
		o.t.Fatal("the overview has no NATS")
	case got.Now < before || got.Now > time.Now().UnixMilli() || got.Started > got.Now || got.Version != buildVersion():
		o.t.Errorf("the overview is %+v", got)
	case !maps.Equal(got.Checks, map[string]string{"bus": "ok", "hub": "ok"}):
		o.t.Errorf("the checks are %v", got.Checks)
	case groups || got.Totals["eventhub_build_info"] != 1:
		o.t.Errorf("the totals are %v", got.Totals)
	case n.Server != want.Server || n.Version != want.Version || n.Cluster != want.Cluster || n.Connected != want.Connected || n.Connections != want.Connections || n.Connected < 1 || n.RoundTripMS <= 0:
		o.t.Errorf("NATS is %+v, want %+v", n, want)
	case n.Streams != want.Streams || n.Consumers != want.Consumers || n.Consumers < 1 || n.FileBytes == 0 || n.FileLimit != want.FileLimit || n.MemoryLimit != want.MemoryLimit || n.Errors > want.Errors:
		o.t.Errorf("NATS is %+v, want %+v", n, want)
	}
}

// TestEventsForOperators reads known events in every way, publishes, and meets each documented
// error.
func TestEventsForOperators(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: []topics.Rule{
		{Pattern: "states", Compaction: true}, {Pattern: "few", MaxMsgs: 2},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	reg := prometheus.NewRegistry()
	use(NewMetrics(reg))
	guard := Guard{Tokens: newVerifier(t)}
	server := New(Config{Bus: bus, Registry: reg, Groups: bus, Events: bus, NATS: bus.Admin().NATS(), Guard: guard, Metrics: &guard, Status: facade.StatusOf})
	o := &operators{t: t, h: describedServer(t, server), seen: make(map[string]map[int]bool)}
	const own = "Bearer own"

	// what is there
	records := make([]string, 5)
	for i := range records {
		id, key, ts := fmt.Sprintf("id-%d", i), fmt.Sprintf("k%d", i%2), int64(1_700_000_000_000+i)
		_, err := bus.Publish(t.Context(), "states", []byte(fmt.Sprintf(`{"n":%d}`, i)), jetstream.PublishOptions{
			ID: id, Key: key, TS: ts, HasTS: true, SID: "till", Headers: map[string]string{"x-a": "b"}, Tags: []string{"new"}, CausedBy: []string{"other"},
		})
		if err != nil {
			t.Fatal(err)
		}
		records[i] = fmt.Sprintf(`{"id":%q,"ts":%d,"topic":"states","key":%q,"payload":{"n":%d},"sid":"till","headers":{"x-a":"b"},"caused_by":["other"],"tags":["new"]}`, id, ts, key, i)
	}
	page := func(more bool, of ...int) string {
		var list []string
		for _, i := range of {
			list = append(list, records[i])
		}
		text := fmt.Sprintf(`200 {"topic":"states","count":%d,"events":[%s]`, len(of), strings.Join(list, ","))
		if more {
			text += `,"more":true`
		}
		return text + "}"
	}
	normal := func(text string) string { // fields of records come in the order of the code
		status, body, _ := strings.Cut(text, " ")
		var value any
		if err := json.Unmarshal([]byte(body), &value); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		b, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		return status + " " + string(b)
	}
	same := func(path, want string) {
		t.Helper()
		if got := normal(o.ask(own, http.MethodGet, path, "")); got != normal(want) {
			t.Errorf("%s: %s, want %s", path, got, normal(want))
		}
	}
	stored := bus.History("states")
	var times []int64
	for e, err := range stored.Read(t.Context(), jetstream.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		times = append(times, e.StoredAt/1e6)
	}
	same("/events?topic=states", page(false, 0, 1, 2, 3, 4))
	same("/events?topic=states&limit=2", page(false, 3, 4))
	same("/events?topic=states&from=latest&limit=1", page(false, 4))
	same("/events?topic=states&from=earliest&limit=2", page(true, 0, 1))
	same("/events?topic=states&from=earliest&key=k1", page(false, 1, 3))
	same("/events?topic=states&from=afterId&afterId=id-2", page(false, 3, 4))
	same(fmt.Sprintf("/events?topic=states&from=ts&ts=%d", times[0]), page(false, 0, 1, 2, 3, 4))
	same(fmt.Sprintf("/events?topic=states&from=ts&ts=%d", time.Now().Add(time.Hour).UnixMilli()), page(false))
	o.wants(own, http.MethodGet, "/events?topic=none", "", `200 {"topic":"none","count":0,"events":[]}`)
	for end := time.Now().Add(time.Minute); !strings.Contains(o.ask(own, http.MethodGet, "/keys?topic=states", ""), `"id":"id-4"`); <-time.After(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the bucket was not filled")
		}
	}
	same("/keys?topic=states", fmt.Sprintf(`200 {"topic":"states","offset":0,"count":2,"items":[%s,%s]}`, records[4], records[3]))
	same("/keys?topic=states&limit=1", fmt.Sprintf(`200 {"topic":"states","offset":0,"count":1,"items":[%s],"more":true}`, records[4]))
	same("/keys?topic=states&offset=1", fmt.Sprintf(`200 {"topic":"states","offset":1,"count":1,"items":[%s]}`, records[3]))
	same("/latest-by-key?topic=states&key=k0", "200 "+records[4])
	o.wants(own, http.MethodGet, "/latest-by-key?topic=states&key=k9", "", "200 null")
	o.wants(own, http.MethodGet, "/latest-by-key?topic=none&key=k", "", "200 null")
	for range 3 {
		if _, err := bus.Publish(t.Context(), "few", []byte(`0`), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if got := o.ask(own, http.MethodGet, "/events?topic=few&from=ts&ts=0", ""); !strings.HasPrefix(got, `200 {"topic":"few","count":2,"truncated":true,"events":[`) {
		t.Errorf("an overtaken start: %s", got)
	}

	// publishing
	o.wants(own, http.MethodPost, "/publish/paid", `{"payload":{"a":1.0},"id":"x","key":"k","headers":{"x-b":"c"}}`, `200 {"id":"x","duplicate":false}`)
	o.wants(own, http.MethodPost, "/publish/paid", `{"payload":2,"id":"x"}`, `200 {"id":"x","duplicate":true}`)
	o.wants(own, http.MethodGet, "/events?topic=paid", "", `200 {"topic":"paid","count":1,"events":[{"id":"x","ts":NUMBER,"topic":"paid","key":"k","headers":{"x-b":"c"},"payload":{"a":1.0}}]}`)
	if got := o.ask(own, http.MethodPost, "/publish/paid", `{"payload":null}`); !regexp.MustCompile(`^200 \{"id":"[0-9a-f-]{36}","duplicate":false\}$`).MatchString(got) {
		t.Errorf("an event without an id: %s", got)
	}

	// errors
	const bad = `400 {"error":`
	for path, want := range map[string]string{
		"GET /events?topic=states&limit=0":                          `"limit must be a number from 1 to 200.","code":"bad_options"}`,
		"GET /events?topic=states&limit=201":                        `"limit must be a number from 1 to 200.","code":"bad_options"}`,
		"GET /events?topic=states&from=ts":                          `"from must be latest (without key), earliest, ts with ts, or afterId with afterId.","code":"bad_options"}`,
		"GET /events?topic=states&from=ts&ts=-1":                    `"ts must be a number from 0 to 9007199254740991.","code":"bad_options"}`,
		"GET /events?topic=states&from=afterId":                     `"from must be latest (without key), earliest, ts with ts, or afterId with afterId.","code":"bad_options"}`,
		"GET /events?topic=states&key=k":                            `"from must be latest (without key), earliest, ts with ts, or afterId with afterId.","code":"bad_options"}`,
		"GET /events?topic=states&since=1":                          `"The query has the unknown parameter \"since\".","code":"bad_options"}`,
		"GET /events?topic=states&limit=1&limit=2":                  `"limit is given more than once.","code":"bad_options"}`,
		"GET /keys?topic=states&offset=-1":                          `"offset must be a number from 0 to 2147483647.","code":"bad_options"}`,
		"GET /keys?topic=states&limit=x":                            `"limit must be a number from 1 to 200.","code":"bad_options"}`,
		"GET /keys?topic=states&key=k":                              `"The query has the unknown parameter \"key\".","code":"bad_options"}`,
		"GET /latest-by-key?topic=states":                           `"The parameter key is missing.","code":"bad_options"}`,
		"GET /latest-by-key?topic=states&key=k&at=1":                `"The query has the unknown parameter \"at\".","code":"bad_options"}`,
		"GET /lag?topic=states":                                     `"topic and group required","code":"bad_options"}`,
		"GET /lag?topic=states&group=g&of=1":                        `"The query has the unknown parameter \"of\".","code":"bad_options"}`,
		"GET /cursors?topic=states&limit=10001":                     `"limit must be a number from 1 to 10000.","code":"bad_options"}`,
		"GET /cursors?topic=states&next=abc":                        `"next is not what a page of groups has returned","code":"bad_options"}`,
		`POST /publish/paid {"id":"y"}`:                             `"payload is missing; null is a payload, too.","code":"bad_options"}`,
		`POST /publish/paid {"payload":1,"ts":1}`:                   `"The body is not what this request takes: unknown field \"ts\".","code":"bad_options"}`,
		`POST /publish/paid {"payload":1,"id":" "}`:                 "",
		`POST /publish/paid {"payload":1,"headers":{"Nats-X":"1"}}`: "",
	} {
		part := strings.SplitN(path, " ", 3)
		got := o.ask(own, part[0], part[1], strings.Join(part[2:], ""))
		if !strings.HasPrefix(got, bad) || want != "" && got != bad+want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	o.wants(own, http.MethodGet, "/events?topic=states&from=afterId&afterId=none", "", `404 {"error":"no event of this topic has the id of afterId: it was not found among the last 100000 events","code":"unknown_id"}`)
	o.wants(own, http.MethodGet, "/lag?topic=states&group=none", "", `404 {"error":"There is no such group on this topic.","code":"not_found"}`)
	if got := o.ask(own, http.MethodPost, "/publish/paid", `{"payload":"`+strings.Repeat("x", maxBody)+`"}`); !strings.HasPrefix(got, "413 ") {
		t.Errorf("a large body: %s", got)
	}

	// all routes: no token, one without rights, too many requests, and NATS away
	paths := []string{"/overview", "/cursors?topic=states", "/lag?topic=states&group=g", "/events?topic=states", "/keys?topic=states", "/latest-by-key?topic=states&key=k0"}
	for _, path := range paths {
		o.wants("", http.MethodGet, path, "", `401 {"error":"A token is required.","code":"no_token"}`)
		o.wants("Bearer "+tokenFor(t, "publish:**"), http.MethodGet, path, "", `403 {"error":"The token does not allow this.","code":"forbidden"}`)
	}
	for i := range MaxRequests {
		if !server.places.Enter(t.Context(), strconv.Itoa(i), 1, nil) {
			t.Fatal("a place is taken")
		}
	}
	for _, path := range paths {
		o.hurried = true // does not wait for its turn
		o.wants(own, http.MethodGet, path, "", `503 {"error":"Too many requests are being served: try again later.","code":"overloaded"}`)
		o.hurried = false
		o.wants("twice", http.MethodGet, path, "", `400 {"error":"The header Authorization is given more than once.","code":"bad_options"}`)
	}
	for i := range MaxRequests {
		server.places.Leave(strconv.Itoa(i))
	}
	if err := bus.Group("states", "g").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	o.overview(bus)
	o.wants(own, http.MethodGet, "/lag?topic=states&group=g", "", `200 {"topic":"states","group":"g","lastCursor":null,"tail":"id-4","lagMs":NUMBER,"pending":5,"inflight":0,"backlog":5,"oldestUnackedMs":NUMBER}`)
	o.wants(own, http.MethodGet, "/cursors?topic=states", "", `200 {"topic":"states","cursors":[{"group":"g","lastId":"","lastTs":0}]}`)
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	for _, path := range paths[1:] {
		if got := o.ask(own, http.MethodGet, path, ""); !regexp.MustCompile(`^503 \{"error":"The hub failed to .*: try again later.","code":"internal"\}$`).MatchString(got) {
			t.Errorf("%s without NATS: %s", path, got)
		}
	}
	for _, path := range paths {
		path = strings.SplitN(path, "?", 2)[0]
		for _, status := range documented(t, path) {
			if status == http.StatusTooManyRequests {
				continue // after 64 searches for ids at a time: see jetstream's tests
			}
			if !o.seen["GET "+path][status] {
				t.Errorf("GET %s was never answered with %d, which docs/openapi.yaml has; it had %v", path, status, slices.Sorted(maps.Keys(o.seen["GET "+path])))
			}
		}
	}
}
