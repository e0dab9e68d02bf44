package facade_test

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

var schemaRules = []topics.Rule{
	{Pattern: "orders.*", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Of: "orders"}},
	{Pattern: "orders", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce}},
	{Pattern: "hosts", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "full"}},
}

const hostSchema = `{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false}`

// TestSchemasOverHTTP registers versions, reads them, and publishes.
func TestSchemasOverHTTP(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: schemaRules}, nil)
	want := func(a answer, status int, part string) {
		t.Helper()
		if a.status != status || !strings.Contains(a.text, part) {
			t.Errorf("%d %s, want %d with %s", a.status, a.text, status, part)
		}
	}
	want(r.get(t, "/schemas/hosts"), http.StatusOK, `{"topic":"hosts","mode":"enforce","compatibility":"full","latest":0,"versions":[]}`)
	want(r.get(t, "/schemas/other"), http.StatusOK, `"mode":"off","compatibility":"backward"`)
	want(r.get(t, "/schemas/hosts/latest"), http.StatusNotFound, "The topic has no schema.")
	want(r.post(t, "/publish/hosts", `{"host":"a"}`), http.StatusUnprocessableEntity, "none is registered")
	draft := `{"schema":` + hostSchema + `,"description":"what a host says"}`
	want(r.post(t, "/schemas/hosts", draft), http.StatusCreated, `{"topic":"hosts","version":1,"compatible":true,"mode":"full","documents":0}`)
	want(r.post(t, "/schemas/hosts", draft), http.StatusOK, `{"topic":"hosts","version":1}`)
	want(r.post(t, "/publish/hosts", `{"host":7}`), http.StatusUnprocessableEntity, `"error":"version 1, /host: type"`)
	want(r.post(t, "/publish/hosts", `{"host":"a"}`), http.StatusOK, `"id"`)
	want(r.post(t, "/publish/hosts", `{"host":"b"}`, "X-Schema-Version", "1"), http.StatusOK, `"id"`)
	want(r.post(t, "/publish/hosts", `{"host":"b"}`, "X-Schema-Version", "2"), http.StatusUnprocessableEntity, "version 2 of the schema is not registered; the latest is 1")
	want(r.post(t, "/publish/hosts", `{"host":"b"}`, "X-Schema-Version", "x"), http.StatusBadRequest, "a version is a number from 1 on")
	wider := `{"schema":{"type":"object","required":["host"],"properties":{"host":{"type":["string","integer"]}},"additionalProperties":false}`
	want(r.post(t, "/schemas/hosts/check", wider+`}`), http.StatusOK, `{"compatible":false,"mode":"full","findings":[{"version":1,"direction":"forward","rule":"type_narrowed","at":"/host"}`)
	want(r.post(t, "/schemas/hosts", wider+`}`), http.StatusConflict, `type_narrowed of version 1 at \"/host\"`)
	want(r.post(t, "/schemas/hosts", wider+`,"force":true}`), http.StatusCreated, `"version":2,"compatible":false`)
	want(r.get(t, "/schemas/hosts/1"), http.StatusOK, `"schema":`+hostSchema+`,"description":"what a host says"`)
	want(r.get(t, "/schemas/hosts/latest"), http.StatusOK, `"version":2`)
	want(r.get(t, "/schemas/hosts"), http.StatusOK, `"forced":true`)
	for _, e := range r.stored(t, "hosts") {
		if e.Headers["x-schema-version"] != "1" {
			t.Errorf("an event has the headers %v", e.Headers)
		}
	}
	// A pattern shares its schemas.
	want(r.post(t, "/schemas/orders.eu", `{"schema":{"type":"integer"}}`), http.StatusCreated, `"version":1`)
	want(r.post(t, "/publish/orders.us", `"x"`), http.StatusUnprocessableEntity, "version 1: type")
	want(r.get(t, "/schemas/orders.us/1"), http.StatusOK, `"topic":"orders"`)

	p := r.login(t)
	p.send(`{"op":"PUBLISH","topic":"hosts","payload":{"host":true,"password":"hunter2"},"corr":1}`)
	p.want(`{"op":"ERR","code":"schema_invalid","msg":"version 2: additionalProperties","corr":1}`)
}

// TestBadSchemaRequests tells what is wrong with a request, and stores nothing.
func TestBadSchemaRequests(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: schemaRules}, nil)
	for _, test := range []struct{ method, path, body, want string }{
		{"POST", "/schemas/hosts", ``, "400 The body is empty"},
		{"POST", "/schemas/hosts", `{`, "400 "},
		{"POST", "/schemas/hosts", `[]`, "400 The body must be a JSON object, not an array."},
		{"POST", "/schemas/hosts", `{}`, "400 schema is missing"},
		{"POST", "/schemas/hosts", `{"schema":{"type":"text"}}`, "400 schema: is no JSON Schema 2020-12: /type: "},
		{"POST", "/schemas/hosts", `{"schema":{},"up":[{"rename":{"at":"/a","to":"b"}}]}`, "400 the first version has none before it"},
		{"POST", "/schemas/hosts", `{"schema":{},"force":"yes"}`, "400 force must be true or false"},
		{"POST", "/schemas/hosts", `{"schema":{},"description":7}`, "400 description must be a string"},
		{"POST", "/schemas/hosts", `{"schema":{},"version":2}`, "400 The body has version, which is none of schema, up, down, description and force."},
		{"POST", "/schemas/hosts", `{"schema":{"description":"` + strings.Repeat("x", 600_000) + `"}}`, "400 The body is larger than 524288 bytes."},
		{"POST", "/schemas/no topic", `{"schema":{}}`, "400 "},
		{"GET", "/schemas/hosts/0", ``, "404 "},
		{"GET", "/schemas/hosts/-1", ``, "400 The version in the path"},
		{"GET", "/schemas/hosts/1.0", ``, "400 The version in the path"},
		{"GET", "/schemas/hosts/newest", ``, "400 The version in the path"},
	} {
		a := r.ask(t, test.method, strings.ReplaceAll(test.path, " ", "%20"), test.body)
		if got := strconv.Itoa(a.status) + " " + a.Error; !strings.HasPrefix(got, test.want) {
			t.Errorf("%s %s %.60s: %s, want %s", test.method, test.path, test.body, got, test.want)
		}
	}
	if a := r.get(t, "/schemas/hosts"); !strings.Contains(a.text, `"latest":0`) {
		t.Errorf("%s", a.text)
	}
}

// TestSchemasAskThePolicy gives tokens that may do this for one topic.
func TestSchemasAskThePolicy(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r := newRigOn(t, jetstream.Config{Topics: schemaRules}, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	body := `{"schema":{"type":"integer"}}`
	try := func(path string, scopes ...string) int {
		return r.post(t, path, body, "Authorization", "Bearer "+grant(t, "alice", scopes...)).status
	}
	if s := try("/schemas/hosts", "schema:hosts"); s != http.StatusCreated {
		t.Errorf("allowed: %d", s)
	}
	for _, scope := range []string{"publish:hosts", "subscribe:hosts", "admin:hosts", "inspect:hosts", "schema:other"} {
		if s := try("/schemas/hosts", scope); s != http.StatusForbidden {
			t.Errorf("%s: %d", scope, s)
		}
	}
	// The schemas of a pattern belong to a name of their own.
	if s := try("/schemas/orders.eu", "schema:orders.eu"); s != http.StatusForbidden {
		t.Errorf("one topic of a pattern: %d", s)
	}
	if s := try("/schemas/orders.eu", "schema:orders.eu", "schema:orders"); s != http.StatusCreated {
		t.Errorf("a topic and the name of the schemas: %d", s)
	}
	var list struct{ Versions []json.RawMessage }
	a := r.get(t, "/schemas/orders", "Authorization", "Bearer "+grant(t, "bob", "schema:orders"))
	if json.Unmarshal([]byte(a.text), &list) != nil || len(list.Versions) != 1 || strings.Contains(a.text, "alice") {
		t.Errorf("%s", a.text)
	}
}

// TestSchemaNames lists the names that a token may see, page by page.
func TestSchemaNames(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r := newRigOn(t, jetstream.Config{Topics: schemaRules}, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	want := func(text, query string, scopes ...string) {
		t.Helper()
		a := r.get(t, "/schemas"+query, "Authorization", "Bearer "+grant(t, "alice", scopes...))
		if got := regexp.MustCompile(`,"ts":[0-9]{13}}`).ReplaceAllString(strings.TrimSpace(a.text), "}"); a.status != http.StatusOK || got != text {
			t.Errorf("%s %v: %d %s, want %s", query, scopes, a.status, a.text, text)
		}
	}
	want(`{"topics":[]}`, "", "schema:**")
	for _, name := range []string{"hosts", "plain", "orders", "a-b", "plain"} {
		draft := `{"schema":{"type":"integer"}}`
		if name == "plain" {
			draft = `{"schema":{"type":"string","maxLength":` + strconv.Itoa(5+len(r.get(t, "/schemas", "Authorization", "Bearer "+grant(t, "a", "schema:**")).text)) + `}}`
		}
		if a := r.post(t, "/schemas/"+name, draft, "Authorization", "Bearer "+grant(t, "bob", "schema:**")); a.status != http.StatusCreated {
			t.Fatal(a.text)
		}
	}
	const ab, hosts, orders, plain = `{"topic":"a-b","latest":1}`, `{"topic":"hosts","latest":1}`, `{"topic":"orders","latest":1}`, `{"topic":"plain","latest":2}`
	want(`{"topics":[`+ab+","+hosts+","+orders+","+plain+`]}`, "", "schema:**")
	want(`{"topics":[`+ab+","+hosts+`],"next":"hosts"}`, "?limit=2&next=", "schema:**")
	want(`{"topics":[`+orders+","+plain+`]}`, "?limit=2&next=hosts", "schema:**")
	want(`{"topics":[`+plain+`]}`, "?next=orders.eu", "schema:**")
	want(`{"topics":[]}`, "?next=plain", "schema:**")
	// Names that the token does not allow take no room on a page.
	want(`{"topics":[`+hosts+`],"next":"hosts"}`, "?limit=1", "schema:hosts", "schema:plain", "publish:orders")
	want(`{"topics":[`+hosts+`]}`, "?limit=1", "schema:hosts", "publish:**")
	want(`{"topics":[]}`, "", "subscribe:**")
	for _, query := range []string{"?limit=0", "?limit=1001", "?limit=x", "?limit=1&limit=1", "?next=a&next=b", "?next=a+b", "?next=%zz"} {
		if a := r.get(t, "/schemas"+query, "Authorization", "Bearer "+grant(t, "alice", "schema:**")); a.status != http.StatusBadRequest || a.Code != "bad_options" {
			t.Errorf("%s: %d %s", query, a.status, a.text)
		}
	}
}
