package facade_test

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
)

func TestHTTPPublish(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Headers = []string{"X-Team-*"} })
	body := ` {"n":12345678901234567890,"s":"\u00e9"}` + "\n"
	got := r.post(t, "/publish/http%2Eone", body,
		"Content-Type", "application/json", "Event-Id", "given", "Event-Key", "host:näme:1", "Event-Ts", "1700000000000",
		"Event-Sid", "s1", "Event-Tags", `["a,b","c"]`, "Event-Caused-By", "x, y",
		"Event-Header-X-One", "1", "X-Request-Id", "r1", "X-Request-Id", "r2", "X-Api-Key", "secret", "Ce-Type", "made",
		"Event-Header-Traceparent", "given", "Traceparent", "proxy's", "X-Team-Name", "mine", "X-Teams", "not asked for", "Cookie", "secret=1", "Nats-Msg-Id", "other", "Connection", "X-Hop", "X-Hop", "gone",
		"Proxy-Authorization", "secret", "User-Agent", "test")
	if got.status != http.StatusOK || got.ID != "given" {
		t.Fatal(got)
	}
	events := r.stored(t, "http.one")
	if len(events) != 1 {
		t.Fatal(events)
	}
	e := events[0]
	if string(e.Payload) != body || e.ID != "given" || e.Key != "host:näme:1" || e.TS != 1700000000000 || e.SID != "s1" ||
		!slices.Equal(e.Tags, []string{"a,b", "c"}) || !slices.Equal(e.CausedBy, []string{"x", "y"}) {
		t.Fatalf("%+v", e)
	}
	want := map[string]string{
		"content-type": "application/json", "x-one": "1", "x-request-id": "r1, r2", "ce-type": "made", "traceparent": "given",
		"x-team-name": "mine",
	}
	if !maps.Equal(e.Headers, want) {
		t.Fatalf("got  %v\nwant %v", e.Headers, want)
	}
}

func TestHTTPErrors(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	big := `"` + strings.Repeat("x", r.bus.MaxPayload()-1) + `"`
	for _, c := range []struct {
		path, body string
		headers    []string
		status     int
		code       string
	}{
		{"/publish/t", "1", []string{"Authorization", ""}, 401, "no_token"},
		{"/publish/t", "1", []string{"Authorization", "Basic " + rigToken}, 401, "no_token"},
		{"/publish/t", "1", []string{"Authorization", "bearer no"}, 401, "bad_token"},
		{"/publish/t", "1", []string{"Authorization", "bearer " + rigToken}, 200, ""},
		{"/publish/t", "", nil, 400, "bad_json"},
		{"/publish/t", "{", nil, 400, "bad_json"},
		{"/publish/t", strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000), nil, 400, "bad_json"},
		{"/publish/t", big, nil, 413, "publish_failed"},
		{"/publish/t", big[1:], nil, 400, "bad_json"},
		{"/publish/t%3E", "1", nil, 400, "bad_topic"},
		{"/publish/a%2Fb", "1", nil, 400, "bad_topic"},
		{"/publish/a..b", "1", nil, 400, "bad_topic"},
		{"/publish/t", "1", []string{"Event-Other", "x"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Header-Kv-Operation", "DEL"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Header-A", "1", "Event-Header-A", "2"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Header-A", "\xff"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Authorization", "Bearer " + rigToken, "Authorization", "Bearer x"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Ts", "yesterday"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Tags", `[1]`}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Tags", `["a"`}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Id", "a", "Event-Id", "b"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Key", "\xff"}, 400, "bad_options"},
		{"/publish/t", "1", []string{"Event-Id", "S@1"}, 400, "bad_options"},
		{"/publish/", "1", nil, 404, "not_found"},
		{"/nothing", "1", nil, 404, "not_found"},
	} {
		name := fmt.Sprintf("%s %.20s %q", c.path, c.body, c.headers)
		got := r.post(t, c.path, c.body, c.headers...)
		if got.status != c.status || got.Code != c.code || (got.Error == "") != (c.code == "") {
			t.Errorf("%s: %d %s, want %d %s", name, got.status, got.text, c.status, c.code)
		}
		if c.status == 401 && got.header.Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("%s: no WWW-Authenticate", name)
		}
	}
	if n := len(r.stored(t, "t")); n != 1 {
		t.Fatalf("%d events, want 1", n)
	}

	res, err := r.http.Client().Get(r.http.URL + "/publish/t")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusMethodNotAllowed || res.Header.Get("Allow") != "POST" {
		t.Fatal(res.Status, res.Header)
	}
}

func TestHTTPTooLargeWithoutLength(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	body := io.MultiReader(strings.NewReader(`"`), strings.NewReader(strings.Repeat("x", r.bus.MaxPayload())), strings.NewReader(`"`))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+"/publish/t", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rigToken)
	res, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusRequestEntityTooLarge {
		t.Fatal(res.Status)
	}
}

func TestHTTPPolicyAndLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Auth = policies{}
		cfg.Limits.Requests = 1
	})
	if got := r.post(t, "/publish/t", "1"); got.status != http.StatusForbidden || got.Code != "forbidden" {
		t.Fatal(got)
	}

	// One request that is not finished takes the only place.
	body, sender := io.Pipe()
	defer func() { _ = sender.Close() }()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+"/publish/t", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer t")
	req.Header.Set("Content-Type", "application/x-ndjson")
	res, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if got := r.post(t, "/publish/t", "1"); got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" {
		t.Fatal(got)
	}
	if r.seen.count("limit requests") != 1 {
		t.Fatal("the limit was not counted")
	}
}

func TestNDJSON(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	long := `{"payload":"` + strings.Repeat("x", r.bus.MaxPayload()+100<<10) + `"}`
	over := `{"payload":"` + strings.Repeat("x", r.bus.MaxPayload()) + `"}`
	var body strings.Builder
	codes := []string{"", "bad_frame", "", "bad_json", "bad_frame", "bad_frame", "bad_options", "publish_failed", "publish_failed", "bad_frame", "bad_frame", ""}
	for _, l := range []string{
		`{"payload":{"n":12345678901234567890}}`, "  ",
		`{"payload":null,"opts":{"id":"given","headers":{"a":"b"}}}` + "\r",
		`{"payload":`, `[1]`, `{"opts":{}}`, `{"payload":1,"opts":{"ts":"x"}}`, long, over, `7`,
		`{"payload":1,"key":"k"}`, `{"payload":"last"}`,
	} {
		body.WriteString(l + "\n")
	}
	text := strings.TrimSuffix(body.String(), "\n") // the last line needs no end
	got := r.post(t, "/publish/lines", text, "Content-Type", "application/x-ndjson; charset=utf-8", "Event-Key", "ignored")
	if got.status != http.StatusOK || got.header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatal(got)
	}
	answers := strings.Split(strings.TrimSuffix(got.text, "\n"), "\n")
	if len(answers) != len(codes) {
		t.Fatalf("%d answers, want %d:\n%s", len(answers), len(codes), got.text)
	}
	for i, code := range codes {
		if got := parseAnswer(t, answers[i]); got.Code != code || (got.ID == "") != (code != "") {
			t.Errorf("line %d: %s, want %q", i, answers[i], code)
		}
	}
	events := r.stored(t, "lines")
	if len(events) != 3 || events[1].ID != "given" || events[1].Headers["a"] != "b" || events[0].Key != "" ||
		string(events[0].Payload) != `{"n":12345678901234567890}` || string(events[2].Payload) != `"last"` {
		t.Fatalf("%+v", events)
	}
}

func TestNDJSONStreams(t *testing.T) {
	t.Parallel()
	const many = 5000
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.Window = 16 })
	body, sender := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+"/publish/flow", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rigToken)
	req.Header.Set("Content-Type", "application/x-ndjson")
	res, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	in := bufio.NewScanner(res.Body)
	// Each answer comes while the body is still open.
	for i := range 3 {
		if _, err := fmt.Fprintf(sender, `{"payload":%d,"opts":{"id":"id-%d"}}`+"\n", i, i); err != nil {
			t.Fatal(err)
		}
		if !in.Scan() || parseAnswer(t, in.Text()).ID != "id-"+strconv.Itoa(i) {
			t.Fatal(in.Text(), in.Err())
		}
	}
	go func() {
		for i := range many {
			if _, err := fmt.Fprintf(sender, `{"payload":%d,"opts":{"id":"m-%d"}}`+"\n", i, i); err != nil {
				break
			}
		}
		_ = sender.Close()
	}()
	for i := range many {
		if !in.Scan() || parseAnswer(t, in.Text()).ID != "m-"+strconv.Itoa(i) {
			t.Fatal(i, in.Text(), in.Err())
		}
	}
	if in.Scan() || in.Err() != nil {
		t.Fatal(in.Text(), in.Err())
	}
	events := r.stored(t, "flow")
	if len(events) != 1000 { // Scan's limit
		t.Fatal(len(events))
	}
	for i, e := range events[3:] {
		if string(e.Payload) != strconv.Itoa(i) {
			t.Fatalf("event %d has payload %s", i, e.Payload)
		}
	}
}

func TestStalledBodies(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.BodyStall = 200 * time.Millisecond })
	for _, kind := range []string{"application/json", "application/x-ndjson"} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.http.addr())
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(rigPatience))
		_, err = fmt.Fprintf(conn, "POST /publish/t HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\n"+
			"Content-Length: 100\r\n\r\n{\"payload\":1}\n", rigToken, kind)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(kind, err)
		}
		b, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		switch kind {
		case "application/json":
			if res.StatusCode != http.StatusBadRequest || err != nil {
				t.Fatal(res.Status, string(b), err)
			}
		default:
			// The answer of the whole line came; that the rest is missing shows.
			if res.StatusCode != http.StatusOK || err == nil || parseAnswer(t, string(b)).ID == "" {
				t.Fatal(res.Status, string(b), err)
			}
		}
		_ = conn.Close()
	}
}
