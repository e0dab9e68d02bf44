package jetstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/schema/compat"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

const hostV1 = `{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false,"examples":[{"host":"a"}]}`

// ruled are rules of a topic with schemas.
func ruled(s topics.SchemaRule) []topics.Rule {
	return []topics.Rule{{Pattern: "t.**", MaxAge: time.Hour, Schema: s}}
}

func draft(schema string) schemas.Draft { return schemas.Draft{Schema: json.RawMessage(schema)} }

func register(tb testing.TB, b *Bus, topic string, d schemas.Draft) *schemas.Version {
	tb.Helper()
	v, _, err := b.Schemas().Register(tb.Context(), topic, d)
	if err != nil {
		tb.Fatal(err)
	}
	return v
}

func versions(tb testing.TB, b *Bus, topic string) []*schemas.Version {
	tb.Helper()
	all, err := b.Schemas().List(tb.Context(), topic)
	if err != nil {
		tb.Fatal(err)
	}
	return all
}

// wantCode wants an *Error of a code.
func wantCode(tb testing.TB, err error, code string) {
	tb.Helper()
	if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != code {
		tb.Errorf("%v, want %s", err, code)
	}
}

// TestSchemaIsInForceOnAllHubs registers a version on one hub of three, and publishes on the
// others.
func TestSchemaIsInForceOnAllHubs(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	rules := ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})
	var hubs [3]*Bus
	for i := range hubs {
		hubs[i] = open(t, Config{URL: url, Topics: rules})
	}
	_, err := hubs[2].Publish(t.Context(), "t.a", []byte(`{"host":"x"}`), PublishOptions{})
	wantCode(t, err, schemas.CodeInvalid) // none is registered
	v := register(t, hubs[0], "t.a", draft(hostV1))
	if v.Version != 1 || v.Forced {
		t.Errorf("%+v", v)
	}
	for _, b := range hubs {
		eventually(t, "the version is in force", func() bool { return len(versions(t, b, "t.a")) == 1 })
		_, err := b.Publish(t.Context(), "t.a", []byte(`{"host":7,"secret":"s3cret"}`), PublishOptions{})
		wantCode(t, err, schemas.CodeInvalid)
		if err == nil || bytes.Contains([]byte(err.Error()), []byte("s3cret")) {
			t.Errorf("%v", err)
		}
		if _, err := b.Publish(t.Context(), "t.a", []byte(`{"host":"x"}`), PublishOptions{}); err != nil {
			t.Error(err)
		}
	}
	k := take(t, hubs[1], "t.a", "g", SubscribeOptions{From: FromEarliest})
	for range hubs {
		d := k.next()
		if got := d.Event.Headers[schemas.VersionHeader]; got != "1" {
			t.Errorf("an event has the headers %v", d.Event.Headers)
		}
		_ = d.Ack()
	}
	if names, err := hubs[2].Schemas().Topics(t.Context()); err != nil || fmt.Sprint(names) != "[t.a]" {
		t.Errorf("%v have schemas", names)
	}
	late := open(t, Config{URL: url, Topics: rules}) // knows all from its first moment
	_, err = late.Publish(t.Context(), "t.a", []byte(`{}`), PublishOptions{})
	wantCode(t, err, schemas.CodeInvalid)
	if took := quickest(func(i int) {
		topic := fmt.Sprint("t.quick", i)
		register(t, hubs[0], topic, draft(hostV1))
		for _, b := range hubs {
			eventually(t, "the version is in force", func() bool { return len(versions(t, b, topic)) == 1 })
		}
	}); took > time.Second {
		t.Errorf("a version is in force after %v", took)
	}
}

// TestTwoRegistrars has several hubs register different versions at once: of each number there is
// one.
func TestTwoRegistrars(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	for round := range 20 {
		topic := fmt.Sprint("t.r", round)
		var won, lost []string
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i, b := range []*Bus{one, two, one, two} {
			wg.Go(func() {
				schema := fmt.Sprintf(`{"type":"object","title":"%d"}`, i)
				// The second of a hub waits for the first, and finds the version that is there.
				v, _, err := b.Schemas().Register(t.Context(), topic, schemas.Draft{Schema: json.RawMessage(schema), By: strconv.Itoa(i)})
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					won = append(won, fmt.Sprint(v.Version, " ", string(v.Schema)))
					return
				}
				wantCode(t, err, schemas.CodeConflict)
				lost = append(lost, err.Error())
			})
		}
		wg.Wait()
		all := versions(t, one, topic)
		eventually(t, "both hubs know all", func() bool {
			all = versions(t, one, topic)
			return len(all) == len(won) && len(versions(t, two, topic)) == len(won)
		})
		if len(won) == 0 || len(won)+len(lost) != 4 {
			t.Fatalf("won %q, lost %q", won, lost)
		}
		for i, v := range all {
			if v.Version != i+1 {
				t.Errorf("%d is version %d", i+1, v.Version)
			}
			if other := versions(t, two, topic)[i]; !bytes.Equal(other.Schema, v.Schema) {
				t.Errorf("the hubs differ: %s, %s", other.Schema, v.Schema)
			}
		}
	}
}

// TestRegisterAgain registers what is there: nothing is stored.
func TestRegisterAgain(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(hostV1))
	spaced := draft(" " + hostV1 + "\n")
	v, report, err := b.Schemas().Register(t.Context(), "t.a", spaced)
	if err != nil || v.Version != 1 || report != nil {
		t.Errorf("%+v, %+v, %v", v, report, err)
	}
}

// TestSchemaCompatibility registers versions under each mode.
func TestSchemaCompatibility(t *testing.T) {
	t.Parallel()
	wider := `{"type":"object","required":["host"],"properties":{"host":{"type":"string"},"port":{"type":"integer"}},"additionalProperties":false}`
	needs := `{"type":"object","required":["host","port"],"properties":{"host":{"type":"string"},"port":{"type":"integer"}},"additionalProperties":false}`
	fills := `{"type":"object","required":["host","port"],"properties":{"host":{"type":"string"},"port":{"type":"integer","default":80}},"additionalProperties":false}`
	for _, test := range []struct {
		name          string
		mode          compat.Mode
		first, second schemas.Draft
		want          string // the first finding, or ""
	}{
		{"wider", compat.Backward, draft(hostV1), draft(wider), ""},
		{"wider, forward", compat.Forward, draft(hostV1), draft(wider), "property_removed_from_closed_content_model of version 1 at \"/port\""},
		{"wider, full", compat.Full, draft(hostV1), draft(wider), "property_removed_from_closed_content_model of version 1 at \"/port\""},
		{"narrower", compat.Backward, draft(wider), draft(hostV1), "property_removed_from_closed_content_model of version 1 at \"/port\""},
		{"narrower, forward", compat.Forward, draft(wider), draft(hostV1), ""},
		{"none", compat.None, draft(wider), draft(hostV1), ""},
		{"needs more", compat.Backward, draft(hostV1), draft(needs), "required_added of version 1 at \"/port\""},
		{"a default", compat.Backward, draft(hostV1), draft(fills), ""},
		{
			"a default, and the way back is refused", compat.Backward,
			draft(`{"type":"object","properties":{"host":{}},"minProperties":1,"additionalProperties":false}`),
			draft(`{"type":"object","properties":{"host":{},"port":{"default":80}},"required":["port"],"additionalProperties":false}`), "",
		},
		{"a default, both ways", compat.Full, draft(hostV1), draft(fills), ""},
		{"a cast", compat.Backward, draft(hostV1), schemas.Draft{Schema: json.RawMessage(needs), Up: json.RawMessage(`[{"default":{"at":"/port","value":80}}]`)}, ""},
		{"a cast that is wrong", compat.Backward, draft(hostV1), schemas.Draft{Schema: json.RawMessage(needs), Up: json.RawMessage(`[{"default":{"at":"/port","value":"80"}}]`)}, "document of version 1 at \"/port\" (type)"},
		{"a cast that fails", compat.Backward, draft(hostV1), schemas.Draft{Schema: json.RawMessage(needs), Up: json.RawMessage(`[{"rename":{"at":"/port","to":"p","required":true}}]`)}, "cast of version 1 at \"\" (upcast v1→v2: /port: nothing is there)"},
		{"casts both ways", compat.Full, draft(hostV1), schemas.Draft{Schema: json.RawMessage(needs), Up: json.RawMessage(`[{"default":{"at":"/port","value":80}}]`), Down: json.RawMessage(`[{"remove":{"at":"/port"}}]`)}, ""},
		{"unknown", compat.Backward, draft(`{"type":"string","pattern":"^a+$"}`), draft(`{"type":"string","pattern":"^a*$"}`), "pattern_changed of version 1 at \"\", which may be harmless"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: test.mode})})
			register(t, b, "t.a", test.first)
			report, err := b.Schemas().Check(t.Context(), "t.a", test.second)
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if len(report.Findings) > 0 {
				got = report.Findings[0].String()
			}
			if got != test.want || report.Compatible != (test.want == "") {
				t.Errorf("found %q, want %q", got, test.want)
			}
			v, _, err := b.Schemas().Register(t.Context(), "t.a", test.second)
			if test.want == "" {
				if err != nil || v.Version != 2 || v.Forced {
					t.Errorf("%+v, %v", v, err)
				}
				return
			}
			wantCode(t, err, schemas.CodeConflict)
			test.second.Force = true
			if v := register(t, b, "t.a", test.second); v.Version != 2 || !v.Forced {
				t.Errorf("%+v", v)
			}
		})
	}
}

// TestTransitiveCompatibility compares with all versions, or with the latest one.
func TestTransitiveCompatibility(t *testing.T) {
	t.Parallel()
	versions := []string{`{"type":["string","integer"]}`, `{"type":["integer","string","null"]}`, `{"type":["integer","null"]}`}
	last := `{"type":["integer","null","boolean"]}`
	for _, mode := range []compat.Mode{compat.Backward, compat.BackwardTransitive} {
		b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: mode})})
		for _, text := range versions {
			d := draft(text)
			d.Force = true
			register(t, b, "t.a", d)
		}
		report, err := b.Schemas().Check(t.Context(), "t.a", draft(last))
		if err != nil {
			t.Fatal(err)
		}
		if report.Compatible != (mode == compat.Backward) {
			t.Errorf("%s: %+v", mode, report)
		}
	}
}

// TestBadDrafts gives the registry drafts that say nothing, or too much.
func TestBadDrafts(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce}), Limits: Limits{SchemasPerClient: 2}})
	for name, d := range map[string]schemas.Draft{
		"no schema":           {},
		"no JSON":             draft(`{`),
		"no schema at all":    draft(`{"type":7}`),
		"another draft":       draft(`{"$schema":"http://json-schema.org/draft-07/schema#"}`),
		"a remote reference":  draft(`{"$ref":"https://example.org/schema"}`),
		"a cast of the first": {Schema: json.RawMessage(`{}`), Up: json.RawMessage(`[]`)},
		"a long description":  {Schema: json.RawMessage(`{}`), Description: string(make([]byte, 2_000))},
	} {
		_, _, err := b.Schemas().Register(t.Context(), "t.a", d)
		if err == nil {
			t.Errorf("%s: taken", name)
			continue
		}
		t.Logf("%s: %v", name, err)
		wantCode(t, err, event.CodeBadOptions)
	}
	register(t, b, "t.a", draft(hostV1))
	_, _, err := b.Schemas().Register(t.Context(), "t.a", schemas.Draft{Schema: json.RawMessage(hostV1), Up: json.RawMessage(`[{"explode":{}}]`)})
	wantCode(t, err, event.CodeBadOptions)
	for i := range 2 {
		register(t, b, fmt.Sprint("t.c", i), schemas.Draft{Schema: json.RawMessage(hostV1), By: "alice"})
	}
	_, _, err = b.Schemas().Register(t.Context(), "t.d", schemas.Draft{Schema: json.RawMessage(hostV1), By: "alice"})
	wantCode(t, err, event.CodeRateLimited)
	register(t, b, "t.d", schemas.Draft{Schema: json.RawMessage(hostV1), By: "bob"})
	if _, _, err := b.Schemas().Register(t.Context(), "no topic", draft(hostV1)); err == nil {
		t.Error("a schema was registered for no topic")
	}
}

// A large payload whose schema has a dynamic reference is compared as a small one is.
func TestLargePayloadOfADynamicReference(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: append(ruled(topics.SchemaRule{Mode: topics.SchemaEnforce}), topics.Rule{Pattern: "w", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaWarn}})})
	list := draft(`{"$id":"https://example.com/words","$ref":"list","$defs":{"word":{"$dynamicAnchor":"element","type":"string"},
		"list":{"$id":"list","items":{"$dynamicRef":"#element"},"$defs":{"any":{"$dynamicAnchor":"element"}}}}}`)
	register(t, b, "t.a", list)
	register(t, b, "w", list)
	words := strings.Repeat(`"word",`, 10_000)
	for _, test := range []struct{ topic, payload, want string }{
		{"t.a", "[" + words + `""]`, ""},
		{"t.a", "[" + words + `0]`, schemas.CodeInvalid},
		{"w", "[" + words + `0]`, ""},
	} {
		switch _, err := b.Publish(t.Context(), test.topic, []byte(test.payload), PublishOptions{}); {
		case test.want != "":
			wantCode(t, err, test.want)
		case err != nil:
			t.Errorf("%s: %v", test.topic, err)
		}
	}
}

// TestSchemaVersionOfAPublish names versions, and lets the hub stamp events.
func TestSchemaVersionOfAPublish(t *testing.T) {
	t.Parallel()
	seen := &schemaCounts{}
	b := open(t, Config{Topics: append(ruled(topics.SchemaRule{Mode: topics.SchemaEnforce}), topics.Rule{Pattern: "w", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaWarn}},
		topics.Rule{Pattern: "shared.*", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Of: "shared"}}), Observer: seen})
	register(t, b, "t.a", draft(hostV1))
	two := draft(`{"type":"object","required":["host"],"properties":{"host":{"type":["string","integer"]}},"additionalProperties":false}`)
	register(t, b, "t.a", two)
	put := func(topic, payload, version string) error {
		opts := PublishOptions{}
		if version != "" {
			opts.Headers = map[string]string{"X-Schema-Version": version}
		}
		_, err := b.Publish(t.Context(), topic, []byte(payload), opts)
		return err
	}
	for _, test := range []struct{ topic, payload, version, want string }{
		{"t.a", `{"host":7}`, "", ""},
		{"t.a", `{"host":7}`, "2", ""},
		{"t.a", `{"host":7}`, "1", schemas.CodeInvalid},
		{"t.a", `{"host":"x"}`, "1", ""},
		{"t.a", `{"host":"x"}`, "3", schemas.CodeInvalid},
		{"t.a", `{"host":"x"}`, "0", event.CodeBadOptions},
		{"t.a", `{"host":"x"}`, "01", event.CodeBadOptions},
		{"t.a", `{"host":"x"}`, "latest", event.CodeBadOptions},
		{"t.a", `not json`, "", schemas.CodeInvalid},
		{"t.a", ``, "", schemas.CodeInvalid},
		{"t.b", `{"host":"x"}`, "", schemas.CodeInvalid}, // has no schema
		{"w", `{"host":7}`, "", ""},                      // stored, and counted
		{"other", `{"host":7}`, "9", ""},                 // no rule
	} {
		switch err := put(test.topic, test.payload, test.version); {
		case test.want == "" && err != nil:
			t.Errorf("%s %s %q: %v", test.topic, test.payload, test.version, err)
		case test.want != "":
			wantCode(t, err, test.want)
			t.Log(err)
		}
	}
	register(t, b, "shared.a", draft(hostV1))
	if err := put("shared.b", `{"host":"x"}`, ""); err != nil {
		t.Error(err)
	}
	wantCode(t, put("shared.b", `{}`, ""), schemas.CodeInvalid)
	var stamped []string
	k := take(t, b, "t.a", "g", SubscribeOptions{From: FromEarliest})
	for range 3 {
		d := k.next()
		stamped = append(stamped, d.Event.Headers[schemas.VersionHeader]+d.Event.Headers["X-Schema-Version"])
		_ = d.Ack()
	}
	if fmt.Sprint(stamped) != "[2 2 1]" {
		t.Errorf("the events have the versions %v", stamped)
	}
	// With SchemaWarn, an event that breaks the latest version gets that version all the same.
	register(t, b, "w", draft(hostV1))
	register(t, b, "w", two)
	if err := put("w", `{"host":[]}`, ""); err != nil {
		t.Error(err)
	}
	k = take(t, b, "w", "g", SubscribeOptions{From: FromEarliest})
	for _, want := range []string{"", "2"} {
		d := k.next()
		if got := d.Event.Headers[schemas.VersionHeader]; got != want {
			t.Errorf("%s has the version %q, want %q", d.Event.Payload, got, want)
		}
		_ = d.Ack()
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if seen.stored != 2 || seen.refused == 0 {
		t.Errorf("%d stored, %d refused", seen.stored, seen.refused)
	}
}

// schemaCounts counts events that break schemas.
type schemaCounts struct {
	event.NopObserver

	mu          sync.Mutex
	refused     int
	stored      int
	unversioned int
}

func (s *schemaCounts) Topic(string) event.TopicObserver { return s }

func (s *schemaCounts) SchemaUnversioned() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unversioned++
}

func (s *schemaCounts) SchemaBroken(refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if refused {
		s.refused++
	} else {
		s.stored++
	}
}

// TestSchemasWithoutNATS stops the server: events are compared all the same.
func TestSchemasWithoutNATS(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	b := open(t, Config{URL: server.URL(), Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(t, b, "t.a", draft(hostV1))
	if _, err := b.Publish(t.Context(), "t.a", []byte(`{"host":"x"}`), PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	server.Kill()
	_, err := b.Publish(t.Context(), "t.a", []byte(`{"host":7}`), PublishOptions{})
	wantCode(t, err, schemas.CodeInvalid)
	if err := b.NewPublisher().Admit(t.Context(), "t.a", []byte(`{"host":"x"}`), &PublishOptions{}); err != nil {
		t.Error(err)
	}
	server.Start()
	eventually(t, "a version is registered", func() bool {
		_, _, err := b.Schemas().Register(t.Context(), "t.a", draft(`{"type":"object","properties":{"host":true},"additionalProperties":false}`))
		return err == nil
	})
	eventually(t, "the next version is in force", func() bool {
		_, err := b.Publish(t.Context(), "t.a", []byte(`{"host":7}`), PublishOptions{})
		return err == nil
	})
}

// BenchmarkSchemaGate is what a publish costs more on a topic with a schema.
func BenchmarkSchemaGate(b *testing.B) {
	bus := open(b, Config{Topics: ruled(topics.SchemaRule{Mode: topics.SchemaEnforce})})
	register(b, bus, "t.a", draft(hostV1))
	gate := bus.schemas.Gate("t.a", bus.rules.Of("t.a"))
	payload := []byte(`{"host":"machine-7.example.org"}`)
	for b.Loop() {
		if _, _, err := gate.Admit(b.Context(), &event.Event{Payload: payload}, false, "", nil); err != nil {
			b.Fatal(err)
		}
	}
}
