package facade_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// castingRig has the topic hosts with three versions, and four events: one of version 1 by a native
// client, one of version 2, one that cannot be cast to version 3, and one of version 3.
func castingRig(t *testing.T) *rig {
	t.Helper()
	return castingRigOn(t, jetstream.Config{})
}

// castingRigOn is castingRig with a bus of this configuration.
func castingRigOn(t *testing.T, on jetstream.Config) *rig {
	t.Helper()
	on.Topics = []topics.Rule{
		{Pattern: "hosts", MaxAge: time.Hour, Compaction: true, Schema: topics.SchemaRule{Mode: topics.SchemaWarn, Compatibility: "none"}},
	}
	r := newRigOn(t, on, nil)
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
	putNative(t, cmp.Or(on.URL, r.bus.Admin().NATS().URL()), "a", `{ "host":"a" }`, "")
	r.put(t, "hosts", `{"nick":"secret"}`, "Event-Key", "c", "X-Schema-Version", "2")
	r.put(t, "hosts", `{ "name":{"short":"d"} }`, "Event-Key", "d")
	return r
}

// putNative stores an event of a key in hosts past the hub.
func putNative(t *testing.T, url, key, payload, version string) {
	t.Helper()
	nc, err := nats.Connect(url, nats.Token(rigToken))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	m := &nats.Msg{Subject: "keyed." + key + ".hosts", Data: []byte(payload), Header: nats.Header{}}
	if version != "" {
		m.Header["x-schema-version"] = []string{version}
	}
	if _, err := nc.RequestMsg(m, rigPatience); err != nil {
		t.Fatal(err)
	}
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

// deafRig is castingRig with an event of key e and a version that the hub has not heard of. The
// registry gives no answer until heal is called.
type deafRig struct {
	*rig

	proxy *natstest.Proxy
}

func newDeafRig(t *testing.T) deafRig {
	t.Helper()
	proxy := natstest.StartProxy(t, startNATS(t))
	r := deafRig{castingRigOn(t, jetstream.Config{URL: proxy.URL()}), proxy}
	r.unheard(t, "e")
	eventually(t, "the bucket has all keys", func() bool { return strings.Contains(r.get(t, "/snap/hosts").text, `"count":5`) })
	proxy.Swallow(func(subject string) bool {
		return strings.Contains(subject, "GET") && strings.Contains(subject, "eventhub_schemas")
	})
	return r
}

// unheard stores an event of a key.
func (r deafRig) unheard(t *testing.T, key string) {
	t.Helper()
	putNative(t, r.proxy.URL(), key, `{"name":"x"}`, "4")
}

func (r deafRig) heal() { r.proxy.Swallow(nil) }

// unheard is why the event of a deafRig cannot be cast, once the registry answers.
const unheard = "version 4 of the event is not registered; the latest is 3"

// TestReadsOfASilentRegistry reads an event of a version about which the registry gives no answer:
// the hub tells no client that the event cannot be cast, until the registry says so.
func TestReadsOfASilentRegistry(t *testing.T) {
	t.Parallel()
	r := newDeafRig(t)
	for _, path := range []string{"/snap/hosts/e?schemaVersion=3", "/snap/hosts?schemaVersion=3", "/snap/hosts?schemaVersion=3&keys=a&keys=e"} {
		if a := r.get(t, path); a.status != http.StatusServiceUnavailable || a.Code != "internal" || a.header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s", path, a.status, a.text)
		}
	}
	a := r.get(t, "/snap/hosts?schemaVersion=3&limit=5&next=", "Accept", "application/cloudevents-batch+json")
	if a.status != http.StatusServiceUnavailable || a.Code != "internal" || a.header.Get("Link") != "" {
		t.Errorf("%d %s %s", a.status, a.header, a.text)
	}
	if a := r.get(t, "/snap/hosts?schemaVersion=3&keys=a&keys=b"); a.status != http.StatusOK || !strings.Contains(a.text, `"count":2`) {
		t.Errorf("%d %s", a.status, a.text)
	}
	ranges := []string{"/export?topic=hosts&ndjson=1&schemaVersion=3", "/export?topic=hosts&schemaVersion=3", "/replay?topic=hosts&schemaVersion=3"}
	for _, path := range ranges {
		if text, err := r.wholly(t, path); err == nil || strings.Contains(text, "try again later") {
			t.Errorf("%s: %s, %v", path, text, err)
		}
	}
	// A page of which a part was sent ends with its connection.
	large := `{ "name":{"short":"` + strings.Repeat("x", 20_000) + `"} }`
	r.put(t, "hosts", large, "Event-Key", "large")
	eventually(t, "the bucket has all keys", func() bool { return strings.Contains(r.get(t, "/snap/hosts").text, `"count":6`) })
	if text, err := r.wholly(t, "/snap/hosts?schemaVersion=3&keys=large&keys=e"); err == nil || !strings.Contains(text, `"count":2`) {
		t.Errorf("%.300s, %v", text, err)
	}
	r.heal()
	eventually(t, "the registry answers", func() bool {
		a := r.get(t, "/snap/hosts/e?schemaVersion=3")
		return a.status == http.StatusUnprocessableEntity && a.Code == "schema_invalid" && a.Error == unheard
	})
	for _, path := range append(ranges, "/snap/hosts?schemaVersion=3") {
		if text, err := r.wholly(t, path); err != nil || !strings.Contains(text, `"error":"`+unheard+`","code":"schema_invalid"`) {
			t.Errorf("%s: %.300s, %v", path, text, err)
		}
	}
}

// wholly reads an answer, and returns what came of it and how it ended.
func (r *rig) wholly(t *testing.T, path string) (text string, err error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.http.URL+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rigToken)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return string(b), err
}

// TestBroadcastsWaitForASilentRegistry has a broadcast meet an event of a version about which the
// registry gives no answer for a moment: it makes no GAP of the event meanwhile.
func TestBroadcastsWaitForASilentRegistry(t *testing.T) {
	t.Parallel()
	r := newDeafRig(t)
	live := r.login(t)
	live.follow("hosts", `"schemaVersion":3`)
	r.put(t, "hosts", `{"name":{"short":"f"}}`, "Event-Key", "f")
	live.wantEvents(`{"name":{"short":"f"}}`)
	r.unheard(t, "g")
	r.put(t, "hosts", `{"name":{"short":"h"}}`, "Event-Key", "h")
	// A read that gets no answer says that the broadcast did not get one either.
	if a := r.get(t, "/snap/hosts/e?schemaVersion=3"); a.Code != "internal" {
		t.Errorf("%d %s", a.status, a.text)
	}
	r.heal()
	if gap := live.castNext("GAP"); gap.Missed != 1 || gap.Reason != unheard {
		t.Errorf("%+v", gap)
	}
	live.wantEvents(`{"name":{"short":"h"}}`)
}

// TestBroadcastsOfASilentRegistryEnd has the registry stay silent: broadcasts end before the event,
// live and stored, and go on from there later.
func TestBroadcastsOfASilentRegistryEnd(t *testing.T) {
	t.Parallel()
	r := newDeafRig(t)
	r.srv.SetCastPatience(time.Second)
	live, stored := r.login(t), r.login(t)
	live.follow("hosts", `"schemaVersion":3`)
	r.put(t, "hosts", `{"name":{"short":"f"}}`, "Event-Key", "f")
	last := live.castNext("EVENT")
	r.unheard(t, "g")
	stored.follow("hosts", `"schemaVersion":2,"history":3`) // e, f and g
	for _, p := range []*peer{live, stored} {
		if end := p.castNext("ERR"); end.Code != "not_subscribed" || end.Msg != "hosts" {
			t.Errorf("%+v", end)
		}
	}
	r.heal()
	eventually(t, "the registry answers", func() bool { return r.get(t, "/snap/hosts/e?schemaVersion=3").Code == "schema_invalid" })
	live.follow("hosts", `"schemaVersion":3,"from":"pos","pos":"`+last.Ctx.Pos+`"`)
	if gap := live.castNext("GAP"); gap.From != last.Ctx.Pos || gap.Missed != 1 || gap.Reason != unheard {
		t.Errorf("%+v", gap)
	}
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
