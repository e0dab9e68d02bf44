package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/cputime"
	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// Three versions of a machine. The second has casts both ways, the third only up.
const (
	machineV1 = `{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false}`
	machineV2 = `{"type":"object","required":["name"],"properties":{"name":{"type":"string"}},"additionalProperties":false}`
	machineV3 = `{"type":"object","required":["name","up"],"properties":{"name":{"type":"string"},"up":{"type":"boolean"}},"additionalProperties":false}`
)

func machines(tb testing.TB, b *Bus) {
	tb.Helper()
	register(tb, b, "t.a", draft(machineV1))
	register(tb, b, "t.a", schemas.Draft{
		Schema: json.RawMessage(machineV2), Up: json.RawMessage(`[{"rename":{"at":"/host","to":"name","required":true}}]`),
		Down: json.RawMessage(`[{"rename":{"at":"/name","to":"host"}}]`),
	})
	register(tb, b, "t.a", schemas.Draft{Schema: json.RawMessage(machineV3), Up: json.RawMessage(`[{"default":{"at":"/up","value":true}}]`)})
}

// publishNative publishes past the hub.
func publishNative(tb testing.TB, url, payload, version string) {
	tb.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		tb.Fatal(err)
	}
	defer nc.Close()
	m := &nats.Msg{Subject: plainSubject("t.a"), Data: []byte(payload), Header: nats.Header{}}
	if version != "" {
		m.Header["x-schema-version"] = []string{version}
	}
	if _, err := nc.RequestMsg(m, wait); err != nil {
		tb.Fatal(err)
	}
}

// TestDeliveriesAreCast has groups read one topic in each version: events of the version stay byte
// for byte, others are cast, and say so.
func TestDeliveriesAreCast(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"})})
	machines(t, b)
	for _, e := range []struct{ version, payload string }{{"1", `{ "host" : "a" }`}, {"2", `{ "name" : "b" }`}, {"", `{"name":"c", "up":false}`}} {
		opts := PublishOptions{Headers: map[string]string{"k": "v"}}
		if e.version != "" {
			opts.Headers["X-Schema-Version"] = e.version
		}
		if _, err := b.Publish(t.Context(), "t.a", []byte(e.payload), opts); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		version int
		order   bool
		want    []string
	}{
		{0, false, []string{`1 { "host" : "a" }`, `2 { "name" : "b" }`, `3 {"name":"c", "up":false}`}},
		{1, false, []string{`1 { "host" : "a" }`, `1 {"host":"b"}`}},
		{2, true, []string{`2 {"name":"a"}`, `2 { "name" : "b" }`}},
		{3, false, []string{`3 {"name":"a","up":true}`, `3 {"name":"b","up":true}`, `3 {"name":"c", "up":false}`}},
		{schemas.Latest, true, []string{`3 {"name":"a","up":true}`, `3 {"name":"b","up":true}`, `3 {"name":"c", "up":false}`}},
	} {
		group := fmt.Sprint("g", test.version)
		k := take(t, b, "t.a", group, SubscribeOptions{From: FromEarliest, SchemaVersion: test.version, OrderByKey: test.order, MaxAttempts: 1})
		var got []string
		for range test.want {
			d := k.next()
			version := ""
			for name, value := range d.Event.Headers {
				if strings.EqualFold(name, schemas.VersionHeader) {
					version = value
				}
			}
			got = append(got, version+" "+string(d.Event.Payload))
			if d.Event.Headers["k"] != "v" || len(d.Event.Headers) != 2 || d.Attempt != 1 {
				t.Errorf("version %d: the headers are %v, the attempt %d", test.version, d.Event.Headers, d.Attempt)
			}
			if err := d.Ack(); err != nil {
				t.Error(err)
			}
		}
		if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", test.want) {
			t.Errorf("version %d: %q, want %q", test.version, got, test.want)
		}
	}
}

// TestACastThatFailsIsAnAttempt has events that cannot be cast between others: they become dead
// letters as they were stored, with the reason, and the others go on.
func TestACastThatFailsIsAnAttempt(t *testing.T) {
	t.Parallel()
	for _, order := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered=", order), func(t *testing.T) {
			t.Parallel()
			url := natsServer(t)
			obs := new(schemaCounts)
			b := open(t, Config{URL: url, Observer: obs, Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"})})
			machines(t, b)
			letters := take(t, b, "dlq.t.a", "letters", SubscribeOptions{From: FromEarliest})
			got := make(chan string, 10)
			opts := SubscribeOptions{From: FromEarliest, SchemaVersion: 2, OrderByKey: order, MaxAttempts: 2}
			sub, err := b.Consume(t.Context(), "t.a", "g", opts, func(_ context.Context, d *Delivery) error {
				got <- string(d.Event.Payload)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = sub.Stop(context.Background()) }()
			publishNative(t, url, `{"a":"secret"}`, "")
			publishNative(t, url, `not json`, "1")
			publishNative(t, url, `{"name":"x"}`, "two")
			publishNative(t, url, `{"name":"c","up":true}`, "3")
			publishNative(t, url, `{"host":"good"}`, "")
			if one := <-got; one != `{"name":"good"}` {
				t.Errorf("got %s", one)
			}
			reasons := make(map[string]string)
			for range 4 {
				var letter struct {
					Err      string
					Attempts int
					Original struct{ Payload json.RawMessage }
				}
				d := letters.next()
				if err := json.Unmarshal(d.Event.Payload, &letter); err != nil || letter.Attempts != 2 {
					t.Errorf("%s, %v", d.Event.Payload, err)
				}
				reasons[string(letter.Original.Payload)] = letter.Err
				_ = d.Ack()
			}
			for payload, want := range map[string]string{
				`{"a":"secret"}`:         "upcast v1→v2: /host: nothing is there",
				`"not json"`:             "upcast v1→v2: the document is not JSON",
				`{"name":"x"}`:           "x-schema-version of the event is not a number from 1 on",
				`{"name":"c","up":true}`: "downcast v3→v2: there is no cast this way",
			} {
				if reasons[payload] != want {
					t.Errorf("%s became a letter because of %q, want %q", payload, reasons[payload], want)
				}
			}
			eventually(t, "the group has settled all", func() bool {
				info, err := b.Group("t.a", "g").Info(t.Context())
				return err == nil && info.Pending == 0 && info.InFlight == 0
			})
			if len(got) > 0 {
				t.Errorf("%s came, too", <-got)
			}
			obs.mu.Lock()
			defer obs.mu.Unlock()
			if obs.unversioned != 2 {
				t.Errorf("%d events without a version were counted, want 2", obs.unversioned)
			}
		})
	}
}

// TestBadViews says what is wrong with a version that is asked for.
func TestBadViews(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"})})
	machines(t, b)
	for _, test := range []struct {
		topic   string
		version int
		want    string
	}{
		{"t.a", 4, "version 4 of the schema of t.a is not registered; the latest is 3"},
		{"t.a", -2, "version -2: a version is a number from 1 on"},
		{"t.b", 1, "topic t.b has no schema"},
		{"t.b", schemas.Latest, "topic t.b has no schema"},
	} {
		_, err := b.Subscribe(t.Context(), test.topic, "g", SubscribeOptions{SchemaVersion: test.version}, ignore)
		wantCode(t, err, event.CodeBadOptions)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s in version %d: %v, want %s", test.topic, test.version, err, test.want)
		}
	}
	if _, err := b.Group("t.b", "g").Info(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("a group was made: %v", err)
	}
}

// TestCastsInGo has a program bring a cast of its own.
func TestCastsInGo(t *testing.T) {
	t.Parallel()
	double := func(doc []byte) ([]byte, error) {
		n, err := strconv.Atoi(string(doc))
		if err != nil {
			return nil, errors.New("is no integer")
		}
		return strconv.AppendInt(nil, int64(2*n), 10), nil
	}
	b := open(t, Config{
		Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce}), Casters: map[string]map[int]*upcast.Caster{"t.a": {2: upcast.New(double, nil)}},
	})
	register(t, b, "t.a", draft(`{"type":"integer","minimum":0,"maximum":1000}`))
	// Without the cast, this is not compatible.
	register(t, b, "t.a", draft(`{"type":"integer","multipleOf":2}`))
	if _, err := b.Publish(t.Context(), "t.a", []byte(`21`), PublishOptions{Headers: map[string]string{schemas.VersionHeader: "1"}}); err != nil {
		t.Fatal(err)
	}
	k := take(t, b, "t.a", "g", SubscribeOptions{From: FromEarliest, SchemaVersion: schemas.Latest})
	if got := k.payloads(1)[0]; got != "42" {
		t.Errorf("got %s", got)
	}
}

// TestCastsKeepToTheLargestPayload has a cast make more of an event than a client may publish.
func TestCastsKeepToTheLargestPayload(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(`{"type":"object"}`))
	up := `[{"set":{"at":"/a","value":"` + strings.Repeat("x", 200_000) + `"}},{"copy":{"from":"/a","to":"/b"}},{"copy":{"from":"/a","to":"/c"}},{"copy":{"from":"/a","to":"/d"}},{"copy":{"from":"/a","to":"/e"}},{"copy":{"from":"/a","to":"/f"}}]`
	register(t, b, "t.a", schemas.Draft{Schema: json.RawMessage(`{"type":"object","title":"large"}`), Up: json.RawMessage(up)})
	view, err := b.Schemas().View(t.Context(), "t.a", 2)
	if err != nil {
		t.Fatal(err)
	}
	err = view.Cast(t.Context(), &event.Event{Payload: []byte(`{}`), Headers: map[string]string{schemas.VersionHeader: "1"}})
	if err == nil || !strings.Contains(err.Error(), "bytes in version 2; at most 1048576 are allowed") {
		t.Errorf("%v", err)
	}
}

// TestAdmitStamps has an event wait elsewhere while the schema changes: it stays of the version
// that it was compared with.
func TestAdmitStamps(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"})})
	register(t, b, "t.a", draft(machineV1))
	given := map[string]string{"k": "v"}
	opts := PublishOptions{Headers: given}
	p := b.NewPublisher()
	if err := p.Admit(t.Context(), "t.a", []byte(`{"host":"x"}`), &opts); err != nil {
		t.Fatal(err)
	}
	if len(given) != 1 || opts.Headers[schemas.VersionHeader] != "1" || opts.Headers["k"] != "v" {
		t.Errorf("the headers are %v, and were %v", opts.Headers, given)
	}
	register(t, b, "t.a", draft(machineV2))
	if _, err := p.Publish(t.Context(), "t.a", []byte(`{"host":"x"}`), opts); err != nil {
		t.Error(err)
	}
}

// manyHeaders are n headers.
func manyHeaders(n int) map[string]string {
	headers := make(map[string]string, n)
	for i := range n {
		headers[fmt.Sprint("h", i)] = "v"
	}
	return headers
}

// TestAStampNeedsRoom publishes events whose headers have no room for the version that the hub
// adds: they are refused, and not stored as what could never be published again.
func TestAStampNeedsRoom(t *testing.T) {
	t.Parallel()
	const (
		stamp = len(schemas.VersionHeader + "1")
		tags  = len(`["t"]`)
		most  = native.MaxHeaderBytes - stamp
	)
	cloud := topics.Rule{
		Pattern: "cloud", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaWarn}, CloudEvents: topics.CloudEventsRule{Source: "/cloud", Headers: true},
	}
	b := open(t, Config{Topics: append(ruled(topics.SchemaRule{Mode: topics.SchemaWarn}), cloud)})
	for _, topic := range []string{"t.a", "cloud"} {
		register(t, b, topic, draft(machineV1))
	}
	named := manyHeaders(63)
	named["X-Schema-Version"] = "1"
	bytes := func(n int) PublishOptions {
		return PublishOptions{Headers: map[string]string{"h": strings.Repeat("x", n-1-len("sid")-tags)}, SID: "sid", Tags: []string{"t"}}
	}
	const (
		ok      = `{"host":"x"}`
		tooMany = "opts.headers has 64 headers, and topic t.a adds x-schema-version; at most 64 are allowed: leave one out"
	)
	for _, test := range []struct {
		name, topic, payload string
		opts                 PublishOptions
		want                 string
	}{
		{"63 headers", "t.a", ok, PublishOptions{Headers: manyHeaders(63)}, ""},
		{"64 headers", "t.a", ok, PublishOptions{Headers: manyHeaders(64)}, tooMany},
		{"64 headers, later", "t.a", ok, PublishOptions{Headers: manyHeaders(64), Delay: time.Hour}, tooMany},
		{"64 headers with the version", "t.a", ok, PublishOptions{Headers: named}, ""},
		{"64 headers of an event that breaks the schema", "t.a", `{}`, PublishOptions{Headers: manyHeaders(64)}, tooMany},
		{"the most bytes", "t.a", ok, bytes(most), ""},
		{
			"a byte more", "t.a", ok, bytes(most + 1),
			"opts.headers, sid, tags and caused_by have 16368 bytes together, and topic t.a adds x-schema-version with 17; at most 16384 are allowed: make them shorter",
		},
		{"a CloudEvent", "cloud", ok, PublishOptions{Headers: manyHeaders(58)}, ""},
		{
			"a CloudEvent with a header more", "cloud", ok,
			PublishOptions{Headers: manyHeaders(59)},
			"opts.headers has 65 headers, at most 64 are allowed; the attributes of a CloudEvent and x-schema-version, which the topic adds, are among them",
		},
	} {
		p := b.NewPublisher()
		admitted := test.opts
		for way, err := range map[string]error{
			"Admit":   p.Admit(t.Context(), test.topic, []byte(test.payload), &admitted),
			"Publish": publishOnce(t, p, test.topic, test.payload, test.opts),
		} {
			if test.want == "" {
				if err != nil {
					t.Errorf("%s, %s: %v", way, test.name, err)
				}
				continue
			}
			wantCode(t, err, event.CodeBadOptions)
			if err == nil || !strings.HasSuffix(err.Error(), test.want) {
				t.Errorf("%s, %s: %v, want %s", way, test.name, err, test.want)
			}
		}
	}
}

func publishOnce(t *testing.T, p *Publisher, topic, payload string, opts PublishOptions) error {
	t.Helper()
	_, err := p.Publish(t.Context(), topic, []byte(payload), opts)
	return err
}

// TestAStampedEventIsRedriven has an event with as many headers as the hub takes fail: it is
// published again.
func TestAStampedEventIsRedriven(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(machineV1))
	stored := 0
	for n := 62; n <= 64; n++ {
		if _, err := b.Publish(t.Context(), "t.a", []byte(`{"host":"x"}`), PublishOptions{Headers: manyHeaders(n)}); err == nil {
			stored++
		}
	}
	fail(t, b, "t.a", "g", "no", stored)
	if got := redriveAll(t, b, LetterFilter{}, RedriveOptions{ToTopic: true}); got.Done != stored || stored != 2 {
		t.Errorf("%+v of %d", got, stored)
	}
}

// TestCastsTakeMemoryLate has events that are cast to many times their size wait: they stay small
// until they are taken.
func TestCastsTakeMemoryLate(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(`{"type":"object"}`))
	large := `{"set":{"at":"/large","value":"` + strings.Repeat("x", 100_000) + `"}}`
	register(t, b, "t.a", schemas.Draft{Schema: json.RawMessage(`{"type":"object","title":"large"}`), Up: json.RawMessage("[" + large + "]")})
	first := PublishOptions{Headers: map[string]string{schemas.VersionHeader: "1"}}
	for range 100 {
		if _, err := b.Publish(t.Context(), "t.a", []byte(`{}`), first); err != nil {
			t.Fatal(err)
		}
	}
	k := take(t, b, "t.a", "g", SubscribeOptions{From: FromEarliest, SchemaVersion: schemas.Latest})
	for range 100 {
		h := <-k.ch
		if len(h.Event.Payload) != 2 {
			t.Fatalf("an event that waits has %d bytes", len(h.Event.Payload))
		}
		if d, ok := h.Begin(); !ok || len(d.Event.Payload) < 100_000 {
			t.Fatal("an event was not cast")
		}
	}
}

// TestEventsOfANewVersion has a group on one hub get events at once of versions that were
// registered on another: none of them counts as a failure.
func TestEventsOfANewVersion(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	rules := ruled(topics.SchemaRule{Mode: topics.SchemaWarn, Compatibility: "none"})
	first, second := open(t, Config{URL: url, Topics: rules}), open(t, Config{URL: url, Topics: rules})
	register(t, first, "t.a", draft(`{"type":"object","title":"0"}`))
	eventually(t, "both hubs have the version", func() bool { return len(versions(t, second, "t.a")) == 1 })
	attempts := make(chan int, 100)
	opts := SubscribeOptions{From: FromEarliest, SchemaVersion: schemas.Latest, MaxAttempts: 1}
	sub, err := second.Consume(t.Context(), "t.a", "g", opts, func(_ context.Context, d *Delivery) error {
		attempts <- d.Attempt
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Stop(context.Background()) }()
	for i := range 60 {
		register(t, first, "t.a", draft(fmt.Sprintf(`{"type":"object","title":"%d"}`, i+1)))
		if _, err := first.Publish(t.Context(), "t.a", []byte(`{}`), PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for range 60 {
		select {
		case attempt := <-attempts:
			if attempt != 1 {
				t.Errorf("an event has attempt %d", attempt)
			}
		case <-time.After(wait):
			t.Fatal("an event is missing")
		}
	}
	// An event of a version that is not registered is a failure.
	publishNative(t, url, `{}`, "400")
	letters := take(t, first, "dlq.t.a", "letters", SubscribeOptions{From: FromEarliest})
	if got := letters.payloads(1)[0]; !strings.Contains(got, `"err":"version 400 of the event is not registered; the latest is 61"`) {
		t.Errorf("%s", got)
	}
}

// TestDeadLettersAreAsStored has a handler refuse an event that was cast: the dead letter has the
// event as it was published.
func TestDeadLettersAreAsStored(t *testing.T) {
	t.Parallel()
	for _, order := range []bool{false, true} {
		b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"})})
		machines(t, b)
		opts := SubscribeOptions{From: FromEarliest, SchemaVersion: 3, OrderByKey: order, MaxAttempts: 2}
		sub, err := b.Consume(t.Context(), "t.a", "g", opts, func(context.Context, *Delivery) error { return errors.New("no") })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Publish(t.Context(), "t.a", []byte(`{ "host":"a" }`), PublishOptions{Headers: map[string]string{schemas.VersionHeader: "1"}}); err != nil {
			t.Fatal(err)
		}
		letters := take(t, b, "dlq.t.a", "letters", SubscribeOptions{From: FromEarliest})
		if got := letters.payloads(1)[0]; !strings.Contains(got, `"headers":{"x-schema-version":"1"},"payload":{ "host":"a" }`) {
			t.Errorf("ordered %v: %s", order, got)
		}
		_ = sub.Stop(t.Context())
	}
}

// TestTwoVersionsInHeaders has an event name two versions: it is refused, and one that a native
// client stored cannot be cast.
func TestTwoVersionsInHeaders(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"})})
	machines(t, b)
	both := map[string]string{"x-schema-version": "2", "X-Schema-Version": "1"}
	for range 20 {
		_, err := b.Publish(t.Context(), "t.a", []byte(`{"host":"a"}`), PublishOptions{Headers: both})
		wantCode(t, err, event.CodeBadOptions)
		if err == nil || !strings.Contains(err.Error(), "is given twice, as 1 and as 2") {
			t.Fatal(err)
		}
	}
	view, err := b.Schemas().View(t.Context(), "t.a", 3)
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, view.Cast(t.Context(), &event.Event{Payload: []byte(`{"host":"a"}`), Headers: both}), schemas.CodeInvalid)
}

// TestSchemasTakeSoMuchMemory registers schemas that would take more than a client may have.
func TestSchemasTakeSoMuchMemory(t *testing.T) {
	t.Parallel()
	obs := new(counter)
	b := open(t, Config{Observer: obs})
	for n := range 100 {
		text := fmt.Sprintf(`{"title":"%d","pattern":"a{990}b{990}c{990}d{990}"}`, n)
		_, _, err := b.Schemas().Register(t.Context(), fmt.Sprint("t.a", n), schemas.Draft{Schema: json.RawMessage(text), By: "mallory"})
		if err == nil {
			continue
		}
		wantCode(t, err, event.CodeRateLimited)
		if n < 20 || obs.limit("client_schema_memory") != 1 {
			t.Errorf("version %d: %v", n+1, err)
		}
		return
	}
	t.Error("no version was refused")
}

// TestAVersionThatAHubCannotRead has an event of a version that a newer hub may have registered: it
// is given back, and becomes no dead letter.
func TestAVersionThatAHubCannotRead(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url, Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(machineV1))
	entry := []byte(`{"topic":"t.a","version":2,"schema":{"type":"odd"}}`)
	if _, err := b.conn.JS.Publish(t.Context(), "$KV."+schemasBucket+"."+native.ObjectName("t.a")+".2", entry); err != nil {
		t.Fatal(err)
	}
	view, err := b.Schemas().View(t.Context(), "t.a", 1)
	if err != nil {
		t.Fatal(err)
	}
	e := &event.Event{Payload: []byte(`{}`), Headers: map[string]string{schemas.VersionHeader: "2"}}
	wantCode(t, view.Cast(t.Context(), e), event.CodeInternal)
	letters := take(t, b, "dlq.t.a", "letters", SubscribeOptions{From: FromEarliest})
	k := take(t, b, "t.a", "g", SubscribeOptions{From: FromEarliest, SchemaVersion: 1, MaxAttempts: 1})
	publishNative(t, url, `{}`, "2")
	for range 2 { // it comes again after a second
		if ok, err := (<-k.ch).Cast(t.Context()); ok || err != nil {
			t.Errorf("the event was cast: %t, %v", ok, err)
		}
	}
	letters.quiet(50 * time.Millisecond)
}

// TestAVersionThatAHubCannotReadInDebt is the same for a client that owes time.
func TestAVersionThatAHubCannotReadInDebt(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	ration := cputime.New(time.Millisecond, 2, 100, func(string) {})
	b := open(t, Config{URL: url, Computing: ration, Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(machineV1))
	entry := []byte(`{"topic":"t.a","version":2,"schema":{"type":"odd"}}`)
	if _, err := b.conn.JS.Publish(t.Context(), "$KV."+schemasBucket+"."+native.ObjectName("t.a")+".2", entry); err != nil {
		t.Fatal(err)
	}
	k := take(t, b, "t.a", "g", SubscribeOptions{From: FromEarliest, SchemaVersion: 1, MaxAttempts: 1, CountFor: "eve"})
	ration.Charge("eve", 2*cputime.Burst)
	publishNative(t, url, `{}`, "2")
	h := <-k.ch
	if ok, err := h.Cast(t.Context()); ok || err != nil {
		t.Errorf("the event was cast: %t, %v", ok, err)
	}
	if n := (<-k.ch).Attempt; n != 1 { // it comes again after a second
		t.Errorf("the event comes again as attempt %d", n)
	}
}
