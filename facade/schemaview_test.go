package facade_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/facade"
	"eventhub/jetstream"
)

// castingRig has the topic hosts with three versions, and four events: one of version 1 by a native
// client, one of version 2, one that cannot be cast to version 3, and one of version 3.
func castingRig(t *testing.T) *rig {
	t.Helper()
	r := newRigOn(t, jetstream.Config{Topics: []jetstream.TopicRule{
		{Pattern: "hosts", MaxAge: time.Hour, Compaction: true, Schema: jetstream.SchemaRule{Mode: jetstream.SchemaWarn, Compatibility: "none"}},
	}}, nil)
	for _, draft := range []string{
		`{"schema":` + hostSchema + `}`,
		`{"schema":{"type":"object","required":["name"],"properties":{"name":{"type":"string"}}},"up":[{"rename":{"at":"/host","to":"name","required":true}}]}`,
		`{"schema":{"type":"object","required":["name"],"properties":{"name":{"type":"object","required":["short"],"properties":{"short":{"type":"string"}}}}},"up":[{"wrap":{"at":"/name","in":"short","required":true}}],"down":[{"unwrap":{"at":"/name","of":"short"}}]}`,
	} {
		if a := r.post(t, "/schemas/hosts", draft); a.status != http.StatusCreated {
			t.Fatalf("%d %s", a.status, a.text)
		}
	}
	r.put(t, "hosts", `{"name":"b"}`, "Event-Key", "b", "X-Schema-Version", "2") // makes the topic
	nc, _ := r.native(t)
	m := &nats.Msg{Subject: "keyed.a.hosts", Data: []byte(`{ "host":"a" }`)}
	if _, err := nc.RequestMsg(m, rigPatience); err != nil {
		t.Fatal(err)
	}
	r.put(t, "hosts", `{"nick":"secret"}`, "Event-Key", "c", "X-Schema-Version", "2")
	r.put(t, "hosts", `{ "name":{"short":"d"} }`, "Event-Key", "d")
	return r
}

// versioned is what tests look at in records of a version.
type versioned struct {
	Key, Error, Code string
	Headers          map[string]string
	Payload          json.RawMessage
	Name             struct{ Short string }
}

func (v versioned) String() string {
	if v.Error != "" {
		return v.Key + " " + v.Code + " " + v.Error
	}
	return v.Key + " " + v.Headers["x-schema-version"] + " " + string(v.Payload)
}

const uncast = "c schema_invalid upcast v2→v3: /name: nothing is there"

// TestReadsAreCast reads the same events by each route in a version.
func TestReadsAreCast(t *testing.T) {
	t.Parallel()
	r := castingRig(t)
	latest := []string{`b 3 {"name":{"short":"b"}}`, `a 3 {"name":{"short":"a"}}`, uncast, `d 3 { "name":{"short":"d"} }`}
	second := []string{`b 2 {"name":"b"}`, `a 2 {"name":"a"}`, `c 2 {"nick":"secret"}`, `d 2 {"name":"d"}`}
	stored := []string{`b 2 {"name":"b"}`, `a  { "host":"a" }`, `c 2 {"nick":"secret"}`, `d 3 { "name":{"short":"d"} }`}
	want := func(path, member string, wanted []string) {
		t.Helper()
		a := r.get(t, path)
		var body map[string]json.RawMessage
		if err := json.Unmarshal([]byte(a.text), &body); err != nil || a.status != http.StatusOK {
			t.Fatalf("%s: %d %s", path, a.status, a.text)
		}
		var got []versioned
		if err := json.Unmarshal(body[member], &got); err != nil {
			t.Fatalf("%s: %s", path, a.text)
		}
		if fmt.Sprint(got) != fmt.Sprint(wanted) {
			t.Errorf("%s: %v, want %v", path, got, wanted)
		}
	}
	want("/replay?topic=hosts", "events", stored)
	want("/replay?topic=hosts&schemaVersion=latest", "events", latest)
	want("/replay?topic=hosts&schemaVersion=2", "events", second)
	if a := r.get(t, "/export?topic=hosts&ndjson=1&schemaVersion=3"); strings.Count(a.text, "\n") != 4 || !strings.Contains(a.text, `"headers":{"x-schema-version":"2"},"error":"upcast v2→v3: /name: nothing is there","code":"schema_invalid"}`+"\n") ||
		strings.Contains(a.text, "secret") {
		t.Errorf("%s", a.text)
	}
	eventually(t, "the bucket has all keys", func() bool { return strings.Contains(r.get(t, "/snap/hosts").text, `"count":4`) })
	want("/snap/hosts?schemaVersion=latest", "items", []string{latest[3], latest[2], latest[1], latest[0]})
	want("/snap/hosts?schemaVersion=2&keys=a", "items", second[1:2])
	want("/snap/hosts?schemaVersion=3&next=", "items", []string{latest[0], latest[1], latest[2], latest[3]})
	a := r.get(t, "/snap/hosts/a?schemaVersion=3")
	if !strings.Contains(a.text, `"payload":{"name":{"short":"a"}}`) || a.header.Get("ETag") == r.get(t, "/snap/hosts/a").header.Get("ETag") {
		t.Errorf("%s, %s", a.text, a.header)
	}
	if a := r.get(t, "/snap/hosts/c?schemaVersion=3"); a.status != http.StatusUnprocessableEntity || a.Code != "schema_invalid" || a.Error != "upcast v2→v3: /name: nothing is there" {
		t.Errorf("%d %s", a.status, a.text)
	}
	// As CloudEvents
	a = r.get(t, "/replay?topic=hosts&schemaVersion=3", "Accept", "application/cloudevents-batch+json")
	if strings.Count(a.text, `"specversion"`) != 4 || strings.Count(a.text, `"schemaerror":"upcast v2→v3: /name: nothing is there"`) != 1 || strings.Count(a.text, `"data":`) != 3 {
		t.Errorf("%s", a.text)
	}
	a = r.get(t, "/snap/hosts?schemaVersion=3&limit=1&next=", "Accept", "application/cloudevents-batch+json")
	if link := a.header.Get("Link"); !strings.Contains(link, "&limit=1&schemaVersion=3>") {
		t.Errorf("%s", link)
	}
}

// TestSubscriptionsAreCast has a socket, a stream and a pull of groups get a version, and a dead
// letter of what cannot be cast.
func TestSubscriptionsAreCast(t *testing.T) {
	t.Parallel()
	r := castingRig(t)
	want := []string{`b 3 {"name":{"short":"b"}}`, `a 3 {"name":{"short":"a"}}`, `d 3 { "name":{"short":"d"} }`}
	take := func(name string, next func() versioned) {
		t.Helper()
		for _, w := range want {
			if got := next(); got.String() != w {
				t.Errorf("%s: %v, want %s", name, got, w)
			}
		}
	}
	p := r.login(t)
	p.send(`{"op":"SUBSCRIBE","topic":"hosts","group":"socket","opts":{"from":"earliest","schemaVersion":"latest","maxAttempts":1},"corr":1}`)
	p.want(`{"op":"OK","corr":1}`)
	take("socket", func() versioned {
		var f struct{ Event versioned }
		if err := json.Unmarshal([]byte(p.read()), &f); err != nil {
			t.Fatal(err)
		}
		return f.Event
	})
	stream := r.subscribe(t, "topic=hosts&group=stream&from=earliest&schemaVersion=3&maxAttempts=1")
	take("stream", func() versioned {
		var f struct{ Event versioned }
		m, _ := stream.next()
		if err := json.Unmarshal([]byte(m.data), &f); err != nil {
			t.Fatal(err)
		}
		return f.Event
	})
	take("pull", func() versioned {
		for { // the first event may be the one that cannot be cast
			var pulled struct {
				Events []struct{ Event versioned }
			}
			a := r.post(t, "/groups/hosts/pull/pull", `{"max":1,"wait_ms":1000,"opts":{"from":"earliest","schemaVersion":3,"maxAttempts":1}}`)
			if err := json.Unmarshal([]byte(a.text), &pulled); err != nil {
				t.Fatalf("%s, %v", a.text, err)
			}
			if len(pulled.Events) == 1 {
				return pulled.Events[0].Event
			}
		}
	})
	eventually(t, "each group has its dead letter", func() bool { return len(r.stored(t, "dlq.hosts")) == 3 })
	for _, e := range r.stored(t, "dlq.hosts") {
		var l struct {
			Err      string
			Attempts int
			Original versioned
		}
		if err := json.Unmarshal(e.Payload, &l); err != nil || l.Attempts != 1 || l.Err != "upcast v2→v3: /name: nothing is there" || l.Original.String() != `c 2 {"nick":"secret"}` {
			t.Errorf("%s, %v", e.Payload, err)
		}
	}
}

// TestBroadcastsAreCast has broadcasts of a topic in several versions at once, live and stored.
func TestBroadcastsAreCast(t *testing.T) {
	t.Parallel()
	r := castingRig(t)
	second, latest, plain := r.login(t), r.login(t), r.login(t)
	plain.follow("hosts", "")
	second.follow("hosts", `"schemaVersion":2`)
	latest.follow("hosts", `"history":4,"schemaVersion":"latest"`)
	stream, _ := r.listen(t, "hosts", "schemaVersion=latest")
	for _, w := range []string{`{"name":{"short":"b"}}`, `{"name":{"short":"a"}}`} {
		if e := latest.castNext("EVENT"); string(e.Event.Payload) != w {
			t.Errorf("%s, want %s", e.Event.Payload, w)
		}
	}
	gap := latest.castNext("GAP")
	if gap.Missed != 1 || gap.Reason != "upcast v2→v3: /name: nothing is there" || gap.From == "" || gap.To == "" {
		t.Errorf("%+v", gap)
	}
	if e := latest.castNext("EVENT"); string(e.Event.Payload) != `{ "name":{"short":"d"} }` || e.Ctx.Pos <= gap.To {
		t.Errorf("%+v", e)
	}
	r.put(t, "hosts", `{"name":"e"}`, "Event-Key", "e", "X-Schema-Version", "2")
	r.put(t, "hosts", `{"nick":"secret"}`, "Event-Key", "f", "X-Schema-Version", "2")
	r.put(t, "hosts", `{"name":{"short":"g"}}`, "Event-Key", "g")
	plain.wantEvents(`{"name":"e"}`, `{"nick":"secret"}`, `{"name":{"short":"g"}}`)
	second.wantEvents(`{"name":"e"}`, `{"nick":"secret"}`, `{"name":"g"}`)
	latest.wantEvents(`{"name":{"short":"e"}}`)
	gap = latest.castNext("GAP")
	latest.wantEvents(`{"name":{"short":"g"}}`)
	stream.wantCast(`{"name":{"short":"e"}}`)
	if _, m := stream.frame("gap"); m.id != gap.To || !strings.Contains(m.data, `"reason":"upcast v2→v3`) || strings.Contains(m.data, "secret") {
		t.Errorf("%+v", m)
	}
	stream.wantCast(`{"name":{"short":"g"}}`)
	// From the place that a GAP names, a client goes on.
	again := r.login(t)
	again.follow("hosts", `"schemaVersion":"latest","from":"pos","pos":"`+gap.To+`"`)
	again.wantEvents(`{"name":{"short":"g"}}`)
	// A snapshot, which is read from the bucket
	eventually(t, "the bucket has all keys", func() bool { return strings.Contains(r.get(t, "/snap/hosts").text, `"count":7`) })
	snap := r.login(t)
	snap.follow("hosts", `"schemaVersion":2,"snapshot":true,"snapshotEnd":true`)
	snap.wantEvents(`{"name":"b"}`, `{"name":"a"}`, `{"nick":"secret"}`, `{"name":"d"}`, `{"name":"e"}`, `{"nick":"secret"}`, `{"name":"g"}`)
	snap.castNext("SNAPSHOT")
}

// TestVersionsOfABroadcastAreBounded asks for more versions than a topic is broadcast in.
func TestVersionsOfABroadcastAreBounded(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r := newRigOn(t, jetstream.Config{Topics: schemaRules}, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	for i := range 6 {
		a := r.post(t, "/schemas/orders", fmt.Sprintf(`{"schema":{"type":"integer","maximum":%d}}`, 10+i), "Authorization", "Bearer "+grant(t, "op", "schema:orders"))
		if a.status != http.StatusCreated {
			t.Fatal(a.text)
		}
	}
	ask := func(who string, version int) (*peer, string) {
		p := r.as(t, grant(t, who, "subscribe:orders"))
		return p, p.outcome(fmt.Sprintf(`{"op":"SUBSCRIBE","topic":"orders","opts":{"mode":"broadcast","schemaVersion":%d}}`, version))
	}
	var first *peer
	for _, test := range []struct {
		who     string
		version int
		want    string
	}{
		{"a", 1, "OK"},
		{"a", 2, "OK"},
		{"a", 3, "rate_limited"},
		{"a", 1, "OK"},
		{"b", 3, "OK"},
		{"b", 4, "OK"},
		{"c", 5, "overloaded"},
		{"c", 2, "OK"},
	} {
		p, got := ask(test.who, test.version)
		if got != test.want {
			t.Errorf("%s asks for version %d: %s, want %s", test.who, test.version, got, test.want)
		}
		if test.version == 4 {
			first = p
		}
	}
	// A version without listeners makes room.
	if got := first.outcome(`{"op":"UNSUBSCRIBE","topic":"orders","opts":{"mode":"broadcast"}}`); got != "OK" {
		t.Error(got)
	}
	if _, got := ask("c", 5); got != "OK" {
		t.Errorf("c asks again: %s", got)
	}
}

// TestBadVersions says what is wrong with a version, on each route.
func TestBadVersions(t *testing.T) {
	t.Parallel()
	r := castingRig(t)
	p := r.login(t)
	for _, test := range []struct{ opt, want string }{
		{`0`, `opts.schemaVersion must be an integer from 1 to 500, or "latest", not 0`},
		{`501`, `opts.schemaVersion must be an integer from 1 to 500, or "latest", not 501`},
		{`1.5`, `opts.schemaVersion must be an integer from 1 to 500, or "latest", not 1.5`},
		{`"newest"`, `opts.schemaVersion must be an integer from 1 to 500, or "latest", not a string`},
		{`true`, `opts.schemaVersion must be an integer from 1 to 500, or "latest", not a boolean`},
		{`4`, `version 4 of the schema of hosts is not registered; the latest is 3`},
	} {
		for _, mode := range []string{`"group":"g","opts":{"schemaVersion":%s}`, `"opts":{"mode":"broadcast","schemaVersion":%s}`} {
			p.send(`{"op":"SUBSCRIBE","topic":"hosts",` + fmt.Sprintf(mode, test.opt) + `}`)
			if got := p.any(); got.Code != "bad_options" || !strings.HasPrefix(got.Msg, test.want) {
				t.Errorf("%s: %+v, want %s", test.opt, got, test.want)
			}
		}
		if strings.HasPrefix(test.opt, `"`) || test.opt == "true" {
			continue
		}
		for _, path := range []string{"/replay?topic=hosts&", "/export?topic=hosts&", "/snap/hosts?", "/snap/hosts/a?", "/broadcast/hosts?", "/subscribe?topic=hosts&group=g&"} {
			a := r.get(t, path+"schemaVersion="+url.QueryEscape(test.opt))
			if a.status != http.StatusBadRequest || a.Code != "bad_options" || !strings.Contains(a.Error, "ersion") {
				t.Errorf("%s: %d %s", path, a.status, a.text)
			}
		}
	}
	p.send(`{"op":"SUBSCRIBE","topic":"plain","group":"g","opts":{"schemaVersion":1}}`)
	if got := p.any(); got.Msg != "topic plain has no schema, so its events have no version" {
		t.Errorf("%+v", got)
	}
}
