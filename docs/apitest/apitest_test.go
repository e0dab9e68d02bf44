package apitest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// witness is a test that notes what it is told.
type witness struct {
	testing.TB
	said []string
}

func (w *witness) Helper()                  {}
func (w *witness) Context() context.Context { return context.Background() }
func (w *witness) Errorf(format string, args ...any) {
	w.said = append(w.said, fmt.Sprintf(format, args...))
}

// answer is an answer of a hub.
type answer struct {
	port         Port
	method, path string
	status       int
	header       string // NAME: VALUE, and so on, one a line
	body         string
	want         string // of what the test is told; "" for nothing
}

const (
	jsonType  = "Content-Type: application/json"
	eventBody = `{"id":"i","ts":1,"topic":"t","payload":{"any":1e400}}`
	errorBody = `{"error":"no","code":"bad_options"}`
	tag       = `ETag: "0123456789abcdef0123456789abcdef"`
)

var answers = []answer{
	{Clients, "GET", "/snap/t/k", 200, jsonType + "\n" + tag, eventBody, ""},
	{Clients, "HEAD", "/snap/t/k", 200, jsonType + "\n" + tag, "", ""},
	{Clients, "GET", "/snap/t/a/b%2Fc", 200, jsonType + "\n" + tag, eventBody, ""},
	{Clients, "GET", "/snap/t/k", 304, tag, "", ""},
	{Clients, "GET", "/snap/t/k", 200, jsonType, eventBody, "the header Etag is missing"},
	{Clients, "GET", "/snap/t/k", 200, jsonType + "\nETag: 1", eventBody, "the header Etag"},
	{Clients, "GET", "/snap/t/k", 200, jsonType + "\n" + tag + "\nEvent-Size: 5", eventBody, "Event-Size is not in docs/openapi.yaml: add it under paths['/snap/{topic}/{key}'].get.responses.200.headers"},
	{Clients, "GET", "/snap/t/k", 200, jsonType + "\n" + tag, strings.TrimSuffix(eventBody, "}") + `,"size":5}`, "additional properties 'size' not allowed"},
	{Clients, "GET", "/snap/t/k", 200, jsonType + "\n" + tag, `{"id":"i"}`, "missing properties"},
	{Clients, "GET", "/snap/t/k", 200, jsonType + "\n" + tag, `{`, "EOF"},
	{Clients, "GET", "/snap/t/k", 200, "Content-Type: text/html\n" + tag, "<p>", `the body has the type "text/html"`},
	{Clients, "GET", "/snap/t/k", 404, jsonType, `{"error":"not_found"}`, ""},
	{Clients, "GET", "/snap/t/k", 418, jsonType, errorBody, "the status is not in docs/openapi.yaml: add it under paths['/snap/{topic}/{key}'].get.responses"},
	{Clients, "GET", "/snap/t/k", 400, jsonType, errorBody, ""},
	{Clients, "GET", "/snap/t/k", 400, jsonType, `{"error":"no","code":"bad_luck"}`, "value must be one of"},
	{Clients, "GET", "/snap/t/k", 503, jsonType, errorBody, "the header Retry-After is missing"},
	{Clients, "GET", "/snap/t/k", 503, jsonType + "\nRetry-After: soon", errorBody, "the header Retry-After"},
	{Clients, "PUT", "/snap/t/k", 405, jsonType + "\nAllow: GET\nAllow: HEAD\nAllow: DELETE", errorBody, ""},
	{Clients, "PUT", "/snap/t/k", 405, jsonType + "\nAllow: PATCH", errorBody, "Allow names PATCH"},
	{Clients, "PUT", "/snap/t/k", 200, jsonType, `{}`, "the route is not in docs/openapi.yaml"},
	{Clients, "GET", "/snap", 404, jsonType, `{"error":"There is nothing at this path.","code":"not_found"}`, ""},
	{Clients, "GET", "/snap", 404, jsonType, `{"error":"There is no such snap.","code":"not_found"}`, "the status is not in docs/openapi.yaml"},
	{Clients, "GET", "/livez", 200, "Content-Type: text/plain", "ok", "the route is not in docs/openapi.yaml"},
	{Operators, "GET", "/livez", 200, "Content-Type: text/plain", "ok", ""},
	{Operators, "DELETE", "/groups/t/g", 204, "", "", ""},
	{Operators, "DELETE", "/groups/t/g", 204, "", "gone", "has no body"},
	{Clients, "GET", "/export?topic=t&ndjson=1", 200, "Content-Type: application/x-ndjson", eventBody + "\n" + eventBody + "\n", ""},
	{Clients, "GET", "/export?topic=t&ndjson=1", 200, "Content-Type: application/x-ndjson", eventBody + "\n{}\n", "missing properties"},
	{Clients, "GET", "/export?topic=t&limit=0", 200, jsonType, "[]", "change limit under paths['/export'].get.parameters"},
	{Clients, "GET", "/export", 200, jsonType, "[]", "without topic, which docs/openapi.yaml requires"},
}

// TestHandler and TestTransport check that what the document does not have fails a test, and that
// what the document has does not.
func TestHandler(t *testing.T) {
	for _, a := range answers {
		w := &witness{TB: t}
		Handler(w, a.port, a.handler()).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(a.method, a.path, http.NoBody))
		a.judge(t, w)
	}
}

func TestTransport(t *testing.T) {
	for _, a := range answers {
		server := httptest.NewServer(a.handler())
		w := &witness{TB: t}
		client := &http.Client{Transport: Transport(w, a.port, http.DefaultTransport)}
		r, err := http.NewRequestWithContext(t.Context(), a.method, server.URL+a.path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(res.Body); err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		server.Close()
		if a.status == http.StatusNoContent {
			continue // net/http sends no body
		}
		a.judge(t, w)
	}
}

func (a answer) handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for line := range strings.Lines(a.header) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			w.Header().Add(name, value)
		}
		w.WriteHeader(a.status)
		_, _ = io.WriteString(w, a.body)
	})
}

func (a answer) judge(t *testing.T, w *witness) {
	t.Helper()
	said := strings.Join(w.said, "\n")
	if a.want == "" && said != "" || !strings.Contains(said, a.want) {
		t.Errorf("%s %s %d %q %s: the test is told %q, want %q", a.method, a.path, a.status, a.header, a.body, said, a.want)
	}
}

// TestTransportChecksTrailers sends one that the document does not have.
func TestTransportChecksTrailers(t *testing.T) {
	for name, want := range map[string]int{"Event-Last-Id": 0, "Event-Size": 1} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Trailer", name)
			_, _ = io.WriteString(w, "[]")
			w.Header().Set(name, "1")
		}))
		w := &witness{TB: t}
		client := &http.Client{Transport: Transport(w, Clients, http.DefaultTransport)}
		res, err := client.Get(server.URL + "/export?topic=t")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(res.Body); err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		server.Close()
		if len(w.said) != want {
			t.Errorf("a trailer %s: the test is told %q", name, w.said)
		}
	}
}

// TestFrames checks the same for frames, and for the frames of clients that they answer.
func TestFrames(t *testing.T) {
	for _, c := range []struct {
		sent, received string
		want           string // of what the test is told; "" for nothing
	}{
		{"", `{"op":"OK"}`, ""},
		{"", `{"op":"OK","corr":{"a":1},"id":"i"}`, ""},
		{"", `{"op":"OK","size":1}`, "additional properties 'size' not allowed"},
		{"", `{"op":"HOLE"}`, `there is no message for the op "HOLE"`},
		{"", `{"op":"ERR","code":"bad_luck","msg":"no"}`, "value must be one of"},
		{"", `{"op":"EVENT","topic":"t","group":"g","event":` + eventBody + `,"ctx":{"attempt":1,"ack_deadline_ms":1}}`, ""},
		{"", `{"op":"EVENT","topic":"t","group":"g","event":` + eventBody + `,"ctx":{"attempt":0,"ack_deadline_ms":1}}`, "minimum"},
		{`{"op":"PAUSE","topic":"t","group":"g","corr":1,"new":1}`, `{"op":"OK","corr":1}`, ""},
		{`{"op":"PAUSE","topic":"t","group":"g"}`, `{"op":"OK"}`, ""},
		{`{"op":"PAUSE","topic":"t","corr":1}`, `{"op":"OK","corr":1}`, "missing property 'group'"},
		{`{"op":"PAUSE","topic":"t","corr":1}`, `{"op":"ERR","code":"bad_frame","msg":"group is missing","corr":1}`, ""},
		{`{"op":"PAUSE","topic":"t","group":"g","corr":1}`, `{"op":"ERR","code":"bad_frame","msg":"no","corr":1}`, "restrict components.schemas"},
		{`{"op":"PAUSE","topic":"t","group":"g","corr":1}`, `{"op":"ERR","code":"not_subscribed","msg":"t::g","corr":1}`, ""},
		{`{"op":"HALT","corr":1}`, `{"op":"ERR","code":"unknown_op","msg":"no","corr":1}`, ""},
		{`{"op":"HALT","corr":1}`, `{"op":"OK","corr":1}`, `there is no message for the op "HALT"`},
		{`{`, `{"op":"ERR","code":"bad_json","msg":"Invalid JSON"}`, ""},
	} {
		w := &witness{TB: t}
		f := NewFrames(w)
		if c.sent != "" {
			f.Sent(c.sent)
		}
		f.Received(c.received)
		said := strings.Join(w.said, "\n")
		if c.want == "" && said != "" || !strings.Contains(said, c.want) {
			t.Errorf("%s answered with %s: the test is told %q, want %q", c.sent, c.received, said, c.want)
		}
	}
}
