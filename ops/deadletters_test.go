package ops

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// lettersHub is an ops server with n dead letters of group g of a topic, whose events carry a
// secret.
func lettersHub(t *testing.T, n int) (*jetstream.Bus, *httptest.Server) {
	t.Helper()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	failed := make(chan struct{}, n)
	sub, err := bus.Subscribe(t.Context(), "orders.placed", "g", jetstream.SubscribeOptions{MaxAttempts: 1}, func(h *jetstream.Held) {
		if d, ok := h.Begin(); ok {
			_ = d.Nack("broken", 0)
			failed <- struct{}{}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		if _, err := bus.Publish(t.Context(), "orders.placed", []byte(`{"card":"secret"}`), jetstream.PublishOptions{Key: "k", Headers: map[string]string{"h": "secret"}}); err != nil {
			t.Fatal(err)
		}
		<-failed
	}
	if err := sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for tick := time.Tick(10 * time.Millisecond); ; <-tick {
		counts, err := bus.Admin().DeadLetters().Count(t.Context(), jetstream.LetterFilter{}, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		if counts.Total == n {
			break
		}
	}
	s := httptest.NewServer(described(t, Config{
		Bus: bus, Registry: prometheus.NewRegistry(), DeadLetters: bus.Admin().DeadLetters(), Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf,
	}))
	t.Cleanup(s.Close)
	return bus, s
}

// fetch asks over a real connection.
func fetch(t *testing.T, s *httptest.Server, method, path, token, accept string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Accept", accept)
	res, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(body)
}

// TestDeadLetters lists, redrives and discards over HTTP.
func TestDeadLetters(t *testing.T) {
	bus, s := lettersHub(t, 5)
	admin := tokenFor(t, "admin:orders.*")
	for _, test := range []struct {
		name, token string
		see, secret bool
	}{
		{"hub", "own", true, true},
		{"admin", admin, true, true},
		{"subscriber", tokenFor(t, "subscribe:orders.*"), true, false},
		{"subscriber of the group", tokenFor(t, "subscribe:orders.*::g"), true, false},
		{"subscriber of another group", tokenFor(t, "subscribe:orders.*::h"), false, false},
		{"subscriber of the letters", tokenFor(t, "subscribe:dlq.orders.placed"), true, true},
		{"inspector", tokenFor(t, "inspect:orders.*"), true, false},
		{"another", tokenFor(t, "subscribe:other", "publish:**"), false, false},
	} {
		status, body := fetch(t, s, http.MethodGet, "/dlq", test.token, "")
		if see := strings.Contains(body, `"group":"g"`); status != 200 || see != test.see || strings.Contains(body, "secret") != test.secret {
			t.Errorf("%s: %d %s", test.name, status, body)
		}
		status, body = fetch(t, s, http.MethodGet, "/dlq/counts", test.token, "")
		if see := strings.Contains(body, `"total":5`); status != 200 || see != test.see {
			t.Errorf("%s: %d %s", test.name, status, body)
		}
	}
	for _, scope := range []string{"inspect:orders.*", "subscribe:dlq.orders.placed"} {
		_, body := fetch(t, s, http.MethodGet, "/dlq", tokenFor(t, scope), "")
		if strings.Contains(body, "broken") != strings.HasPrefix(scope, "subscribe") {
			t.Errorf("the reason for %s: %s", scope, body)
		}
	}
	masked, err := acl.Sign(signingKey, acl.Grant{Subject: "m", TTL: time.Hour, Policy: []byte(`{"rules":[{"effect":"allow","action":"admin","topics":["orders.*"],"mask":["/card","H"]}]}`)})
	if err != nil {
		t.Fatal(err)
	}
	if _, body := fetch(t, s, http.MethodGet, "/dlq", masked, ""); strings.Contains(body, "secret") || !strings.Contains(body, `"payload":{"card":"***"}`) || !strings.Contains(body, `"headers":{"h":"***"}`) {
		t.Errorf("with a mask: %s", body)
	}
	var page struct {
		Count   int
		Letters []struct{ ID, At, Group, Err string }
		Next    string
	}
	seen := make(map[string]bool)
	for pages := 0; ; pages++ {
		_, body := fetch(t, s, http.MethodGet, "/dlq?topic=orders.placed&limit=2&next="+page.Next, admin, "")
		page.Letters, page.Next = nil, ""
		if err := json.Unmarshal([]byte(body), &page); err != nil {
			t.Fatal(err)
		}
		for _, l := range page.Letters {
			seen[l.ID] = true
		}
		if page.Next == "" {
			if pages != 2 || len(seen) != 5 {
				t.Errorf("%d letters on %d pages", len(seen), pages+1)
			}
			break
		}
	}
	if _, body := fetch(t, s, http.MethodGet, "/dlq?topic=orders.placed&payloads=0", admin, ""); strings.Contains(body, "secret") {
		t.Errorf("without payloads: %s", body)
	}
	one := page.Letters[0].ID
	for _, test := range []struct {
		path   string
		token  string
		status int
		text   string
	}{
		{"/dlq/redrive?topic=orders.placed&all=1", tokenFor(t, "subscribe:**"), 403, "forbidden"},
		{"/dlq/discard?topic=orders.placed&all=1", tokenFor(t, "admin:other"), 403, "forbidden"},
		{"/dlq/redrive?all=1", "own", 400, "topic required"},
		{"/dlq/redrive?topic=orders.placed", admin, 400, "give all=1 for all of the topic"},
		{"/dlq/redrive?topic=orders.placed&all=1&group=g", admin, 400, "leave it out"},
		{"/dlq/redrive?topic=orders.placed&group=none", admin, 404, "There is no such group on this topic."},
		{"/dlq/redrive?topic=orders.placed&id=none", admin, 404, "There is no such dead letter."},
		{"/dlq/redrive?topic=orders.placed&all=1&rate=10001", admin, 400, "rate is 10001"},
		{"/dlq/redrive?topic=orders.placed&all=1&to=nowhere", admin, 400, "to is group or topic"},
		{"/dlq/redrive?topic=orders.placed&all=1&dryRun=1", admin, 200, `{"matched":5,"done":0,"skipped":0,"through":"`},
		{"/dlq/redrive?topic=orders.placed&id=" + url.QueryEscape(one), admin, 200, `{"matched":1,"done":1,"skipped":0}`},
		{"/dlq/redrive?topic=orders.placed&id=" + url.QueryEscape(one), admin, 404, "not_found"},
		{"/dlq/discard?topic=orders.placed&reason=brok&rate=100", admin, 200, `{"matched":4,"done":4,"skipped":0}`},
		{"/dlq/discard?topic=orders.placed&all=1", admin, 200, `{"matched":0,"done":0,"skipped":0}`},
	} {
		if status, body := fetch(t, s, http.MethodPost, test.path, test.token, ""); status != test.status || !strings.Contains(body, test.text) {
			t.Errorf("%s: %d %s", test.path, status, body)
		}
	}
	got := make(chan string, 2)
	sub, err := bus.Subscribe(t.Context(), "orders.placed", "g", jetstream.SubscribeOptions{}, func(h *jetstream.Held) { got <- string(h.Event.Payload) })
	if err != nil {
		t.Fatal(err)
	}
	if payload := <-got; payload != `{"card":"secret"}` {
		t.Errorf("redriven: %s", payload)
	}
	if err := sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestRedriveTellsProgress reads the lines of a redrive, and disconnects from another.
func TestRedriveTellsProgress(t *testing.T) {
	_, s := lettersHub(t, 40)
	status, body := fetch(t, s, http.MethodPost, "/dlq/redrive?topic=orders.placed&group=g&rate=100&toTs=1", "own", ndjson)
	if lines := strings.Split(strings.TrimSpace(body), "\n"); status != 200 || len(lines) != 1 || lines[0] != `{"matched":0,"done":0,"skipped":0,"ended":true}` {
		t.Errorf("nothing: %d %s", status, body)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/dlq/redrive?topic=orders.placed&all=1&rate=10", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer own")
	r.Header.Set("Accept", ndjson)
	res, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	var first redriven
	if err := json.NewDecoder(res.Body).Decode(&first); err != nil || first.Done != 1 || first.Ended {
		t.Errorf("the first line: %+v, %v", first, err)
	}
	_ = res.Body.Close() // at 10 a second, most are left
	<-time.After(300 * time.Millisecond)
	status, body = fetch(t, s, http.MethodPost, "/dlq/redrive?topic=orders.placed&all=1&rate=1000", "own", ndjson)
	lines := strings.Split(strings.TrimSpace(body), "\n")
	var last redriven
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || status != 200 || len(lines) < 2 || !last.Ended || last.Matched != last.Done || last.Done < 20 {
		t.Errorf("the rest: %d %s", status, body)
	}
}

func FuzzLetterQuery(f *testing.F) {
	for _, seed := range []string{
		"", "topic=a&group=b&id=c&event=d&reason=e&fromTs=1&toTs=2", "topic=a&all=1", "rate=0", "fromTs=-1", "fromTs=9e9", "limit=x", "topic=a&topic=b",
		"%zz", "toTs=9007199254740993", "payloads=2", "to=topic&dryRun=true", "next=", "\x00=\x7f",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := parseLetters(raw, "to", "rate", "dryRun", "all", "limit", "next", "payloads")
		if err != nil {
			if text := err.Error(); text == "" || len(text) > 1000 {
				t.Errorf("%q: %q", raw, text)
			}
			return
		}
		if q.limit < 1 || q.opts.Rate < 0 || !q.filter.Until.IsZero() && q.filter.Until.UnixMilli() > maxTime {
			t.Errorf("%q was read as %+v", raw, q)
		}
		if _, err := url.ParseQuery(raw); err != nil {
			t.Errorf("%q is no query", raw)
		}
	})
}
