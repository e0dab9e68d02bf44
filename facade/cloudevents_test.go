package facade_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	ce "github.com/cloudevents/sdk-go/v2"
	cehttp "github.com/cloudevents/sdk-go/v2/protocol/http"
	"github.com/nats-io/nats.go"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

const cloudHeadersTopic = "cloud.headers"

var cloudRules = append([]topics.Rule{
	{Pattern: "cloud.one", CloudEvents: topics.CloudEventsRule{Source: "https://example.com/one"}},
	{Pattern: cloudHeadersTopic, CloudEvents: topics.CloudEventsRule{Source: "/here", Headers: true}},
}, keptRules...)

func newCloudRig(t *testing.T) *rig {
	t.Helper()
	return newRigOn(t, jetstream.Config{
		Server: natstest.Embed(t, t.TempDir(), natstest.Listening(rigToken)), Topics: cloudRules,
	}, nil)
}

// only returns the only event of a topic.
func (r *rig) only(t *testing.T, topic string) *jetstream.Event {
	t.Helper()
	events := r.stored(t, topic)
	if len(events) != 1 {
		t.Fatalf("%s has %d events", topic, len(events))
	}
	return events[0]
}

// clouds reads CloudEvents with the official SDK.
func clouds(t *testing.T, a answer, kind string) (list []ce.Event) {
	t.Helper()
	if a.status != http.StatusOK || a.header.Get("Content-Type") != kind {
		t.Fatalf("got %d %s: %s", a.status, a.header.Get("Content-Type"), a.text)
	}
	text := a.text
	switch kind {
	case "application/cloudevents+json":
		text = "[" + text + "]"
	case "application/x-ndjson":
		text = "[" + strings.ReplaceAll(strings.TrimSpace(text), "\n", ",") + "]"
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	for _, e := range list {
		if err := e.Validate(); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return list
}

// The official Go SDK publishes in both modes, to a topic and to the type of the event, and reads
// what it has published.
func TestCloudEventsOfTheOfficialSDK(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	for name, how := range map[string]func(context.Context) context.Context{
		"binary": ce.WithEncodingBinary, "structured": ce.WithEncodingStructured,
	} {
		for _, path := range []string{"/publish", "/publish/cloud." + name} {
			t.Run(name+path, func(t *testing.T) {
				protocol, err := ce.NewHTTP(ce.WithTarget(r.http.URL+path), cehttp.WithHeader("Authorization", "Bearer "+rigToken))
				if err != nil {
					t.Fatal(err)
				}
				client, err := ce.NewClient(protocol)
				if err != nil {
					t.Fatal(err)
				}
				e := ce.NewEvent()
				e.SetID(path)
				e.SetSource("/orders/7")
				e.SetType("cloud." + name)
				e.SetSubject("subject")
				e.SetTime(time.UnixMilli(1_700_000_000_123))
				e.SetExtension("partitionkey", "customer:1")
				e.SetExtension("other", "value")
				if err := e.SetData("application/json", map[string]int{"order": 7}); err != nil {
					t.Fatal(err)
				}
				for range 2 { // the second is a duplicate
					if result := client.Send(how(t.Context()), e); !ce.IsACK(result) {
						t.Fatal(result)
					}
				}
				stored := r.stored(t, "cloud."+name)
				got := stored[len(stored)-1]
				if got.Key != "customer:1" || got.TS != 1_700_000_000_123 || string(got.Payload) != `{"order":7}` || got.ID == path || got.Headers["ce-id"] != path {
					t.Fatalf("stored %+v", got)
				}
				list := clouds(t, r.get(t, "/replay?topic=cloud."+name+"&from=earliest", "Accept", "application/cloudevents+json"), "application/cloudevents-batch+json")
				if len(list) != len(stored) {
					t.Fatalf("%d of %d events", len(list), len(stored))
				}
				back := list[len(list)-1]
				if back.ID() != path || back.Source() != "/orders/7" || back.Type() != "cloud."+name || back.Subject() != "subject" || !back.Time().Equal(e.Time()) ||
					back.Extensions()["other"] != "value" || back.Extensions()["partitionkey"] != "customer:1" || string(back.Data()) != `{"order":7}` {
					t.Fatalf("read %v", back)
				}
			})
		}
	}
}

func TestCloudEventIDs(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	send := func(topic, source, id string) string {
		t.Helper()
		a := r.post(t, "/publish/"+topic, "1", "ce-specversion", "1.0", "ce-id", id, "ce-source", source, "ce-type", "t", "Content-Type", "application/json")
		if a.status != http.StatusOK {
			t.Fatal(a)
		}
		return a.ID
	}
	a, b, again := send("cloud.ids", "/a", "1"), send("cloud.ids", "/b", "1"), send("cloud.ids", "/a", "1")
	if a == b || a != again || a == "1" {
		t.Fatalf("got %q, %q, %q", a, b, again)
	}
	if got := len(r.stored(t, "cloud.ids")); got != 2 {
		t.Fatalf("%d events are stored, want 2", got)
	}
	if id := send("cloud.one", "https://example.com/one", "one-1"); id != "one-1" {
		t.Fatalf("from the configured source: %q", id)
	}
	if id := send("cloud.one", "https://example.com/other", "one-1"); id == "one-1" {
		t.Fatalf("from another source: %q", id)
	}
	long := strings.Repeat("x", 200)
	if id := send("cloud.one", "https://example.com/one", long); id == long || id == "" {
		t.Fatalf("an id that events cannot have became %q", id)
	}
	got := r.post(t, "/publish/cloud.ids", "1", "ce-specversion", "1.0", "ce-id", "2", "ce-source", "/a", "ce-type", "t", "Event-Id", "mine", "Event-Key", "k")
	if got.ID != "mine" {
		t.Fatal(got)
	}
}

// All data comes back byte for byte, JSON or not.
func TestCloudEventData(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	for name, c := range map[string]struct{ body, kind, want string }{
		"json":   {` {"n": 12345678901234567890}`, "application/json", `"data": {"n": 12345678901234567890}}`},
		"text":   {"line\n\"two\"", "text/plain; charset=utf-8", `"data":"line\n\"two\""}`},
		"bytes":  {"\x00\xff", "application/octet-stream", `"data_base64":"AP8="}`},
		"opaque": {`{"a":1}`, "", `"data_base64":"eyJhIjoxfQ=="}`},
		"empty":  {"", "", `"type":"t"}`},
	} {
		t.Run(name, func(t *testing.T) {
			topic := "cloud.data." + name
			headers := []string{"ce-specversion", "1.0", "ce-id", "1", "ce-source", "/s", "ce-type", "t"}
			if c.kind != "" {
				headers = append(headers, "Content-Type", c.kind)
			}
			if a := r.post(t, "/publish/"+topic, c.body, headers...); a.status != http.StatusOK {
				t.Fatal(a)
			}
			if got := r.only(t, topic); string(got.Payload) != c.body {
				t.Fatalf("stored %q", got.Payload)
			}
			a := r.get(t, "/export?ndjson=1&topic="+topic, "Accept", "application/cloudevents+json")
			if clouds(t, a, "application/x-ndjson"); !strings.HasSuffix(strings.TrimSpace(a.text), c.want) {
				t.Fatalf("read %s, want … %s", a.text, c.want)
			}
			// What was read is taken again, and stores the same.
			copied := topic + ".copy"
			if a := r.post(t, "/publish/"+copied, strings.TrimSpace(a.text), "Content-Type", "application/cloudevents+json; charset=utf-8"); a.status != http.StatusOK {
				t.Fatal(a)
			}
			if got := r.only(t, copied); strings.TrimSpace(string(got.Payload)) != strings.TrimSpace(c.body) {
				t.Fatalf("copied %q", got.Payload)
			}
		})
	}
}

func TestCloudEventBatch(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	one := func(id, kind string) string {
		return `{"specversion":"1.0","id":"` + id + `","source":"/s","type":"` + kind + `","data":{"id":"` + id + `"}}`
	}
	body := "\n[" + one("1", "cloud.batch.a") + "," + one("2", "cloud.batch.b") + `,{"specversion":"1.0"},7,` + one("3", "not a topic") + "," + one("4", "cloud.batch.a") + "]"
	a := r.post(t, "/publish", body, "Content-Type", "application/cloudevents-batch+json")
	lines := strings.Split(strings.TrimSpace(a.text), "\n")
	if a.status != http.StatusOK || len(lines) != 6 {
		t.Fatal(a)
	}
	for i, want := range []string{"", "", "bad_options", "bad_options", "bad_topic", ""} {
		if got := parseAnswer(t, lines[i]); got.Code != want || (want == "") != (got.ID != "") {
			t.Errorf("answer %d is %s, want code %q", i, lines[i], want)
		}
	}
	if a, b := r.stored(t, "cloud.batch.a"), r.stored(t, "cloud.batch.b"); len(a) != 2 || len(b) != 1 || string(a[1].Payload) != `{"id":"4"}` {
		t.Fatalf("stored %d and %d events", len(a), len(b))
	}
	// To a topic, whatever the type.
	a = r.post(t, "/publish/cloud.batch.c", "["+one("1", "x y")+"]", "Content-Type", "application/cloudevents-batch+json")
	if got := r.only(t, "cloud.batch.c"); parseAnswer(t, a.text).ID != got.ID || got.Headers["ce-type"] != "x%20y" {
		t.Fatalf("%s: %+v", a.text, got)
	}
	if a := r.post(t, "/publish", "[]", "Content-Type", "application/cloudevents-batch+json"); a.status != http.StatusOK || a.text != "" {
		t.Fatal(a)
	}
	for _, bad := range []string{"{}", "", "[" + one("9", "cloud.batch.a"), "[" + one("9", "cloud.batch.a") + "] 1"} {
		if a := r.post(t, "/publish", bad, "Content-Type", "application/cloudevents-batch+json"); a.status != http.StatusBadRequest || a.Code != "bad_json" {
			t.Fatalf("%q: %v", bad, a)
		}
	}
	if n := len(r.stored(t, "cloud.batch.a")); n != 2 {
		t.Fatalf("a batch that ended early stored %d events", n-2)
	}
}

func TestCloudEventFaults(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	full := []string{"ce-specversion", "1.0", "ce-id", "1", "ce-source", "/s", "ce-type", "cloud.faults"}
	with := func(more ...string) []string { return append(full[:len(full):len(full)], more...) }
	structured := []string{"Content-Type", "application/cloudevents+json"}
	big := strings.Repeat("x", r.bus.MaxPayload()+1)
	for _, c := range []struct {
		path, body string
		headers    []string
		status     int
		code, msg  string
	}{
		{"/publish", "1", nil, 400, "bad_topic", "/publish/TOPIC"},
		{"/publish", "{}\n", []string{"Content-Type", "application/x-ndjson"}, 400, "bad_topic", "/publish/TOPIC"},
		{"/publish", "1", []string{"ce-specversion", "1.0", "ce-id", "1", "ce-source", "/s", "ce-type", "a b"}, 400, "bad_topic", ""},
		{"/publish", "1", []string{"ce-specversion", "1.0", "ce-id", "1", "ce-source", "/s", "ce-type", "dlq.*"}, 400, "bad_topic", ""},
		{"/publish/t", "1", full[:6], 400, "bad_options", "type is missing"},
		{"/publish/t", "1", []string{"ce-specversion", "0.3"}, 400, "bad_options", "id is missing"},
		{"/publish/t", "1", with("ce-datacontenttype", "text/plain"), 400, "bad_options", "Content-Type"},
		{"/publish/t", "1", with("ce-time", "yesterday"), 400, "bad_options", "time is not a time"},
		{"/publish/t", "1", with("ce-subject", "%FF"), 400, "bad_options", "ce-subject does not decode"},
		{"/publish/t", "1", with("ce-subject", "a", "ce-subject", "b"), 400, "bad_options", "more than once"},
		{"/publish/t", "{", with("Content-Type", "application/json"), 400, "bad_json", ""},
		{"/publish/t", big, with("Content-Type", "text/plain"), 413, "publish_failed", ""},
		{"/publish/t", "{", structured, 400, "bad_json", ""},
		{"/publish/t", "[]", structured, 400, "bad_options", "must be a JSON object"},
		{"/publish/t", `{"specversion":"1.0","id":"1","source":"/s","type":"t","datacontenttype":"text/plain","data":"` + big + `"}`, structured, 413, "publish_failed", ""},
		{"/publish/t", "<x/>", []string{"Content-Type", "application/cloudevents+xml"}, 400, "bad_options", "application/cloudevents+json"},
	} {
		a := r.post(t, c.path, c.body, c.headers...)
		if a.status != c.status || a.Code != c.code || !strings.Contains(a.Error, c.msg) {
			t.Errorf("%s %.60q %q: got %d %s %q, want %d %s with %q", c.path, c.body, c.headers, a.status, a.Code, a.Error, c.status, c.code, c.msg)
		}
	}
	for _, topic := range []string{"t", "cloud.faults"} {
		if n := len(r.stored(t, topic)); n != 0 {
			t.Errorf("%d events are stored in %s", n, topic)
		}
	}
}

// A native client reads and writes the NATS binding.
func TestCloudEventsOverNATS(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	if a := r.post(t, "/publish/"+cloudHeadersTopic, `{"a":1}`, "Event-Key", "k ü", "Event-Ts", "1700000000000"); a.status != http.StatusOK {
		t.Fatal(a)
	}
	_, js := r.native(t)
	stored := r.only(t, cloudHeadersTopic)
	s, err := js.Stream(t.Context(), stored.Stream)
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.GetMsg(t.Context(), stored.Sequence)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"ce-specversion": "1.0", "ce-id": m.Header.Get("Event-Id"), "ce-source": "/here", "ce-type": cloudHeadersTopic,
		"ce-time": "2023-11-14T22:13:20Z", "ce-partitionkey": "k%20%C3%BC", "ce-datacontenttype": "application/json",
	} {
		if got := m.Header.Get(name); got != want || want == "" {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}

	msg := nats.NewMsg("event." + cloudHeadersTopic)
	msg.Data = []byte("<x/>")
	for name, value := range map[string]string{
		"CE-SpecVersion": "1.0", "Ce-Id": "native", "ce-source": "/native", "CE-TYPE": "made%20up", "ce-datacontenttype": "text/xml", "ce-count": "5",
	} {
		msg.Header[name] = []string{value}
	}
	if _, err := js.PublishMsg(t.Context(), msg); err != nil {
		t.Fatal(err)
	}
	structured := nats.NewMsg("event." + cloudHeadersTopic)
	structured.Header.Set("Content-Type", "application/cloudevents+json; charset=utf-8")
	structured.Data = []byte(`{"specversion":"1.0","id":"s","source":"/native","type":"made.up","data":[1]}`)
	if _, err := js.PublishMsg(t.Context(), structured); err != nil {
		t.Fatal(err)
	}
	plain := nats.NewMsg("event." + cloudHeadersTopic)
	plain.Data = []byte("\xff")
	if _, err := js.PublishMsg(t.Context(), plain); err != nil {
		t.Fatal(err)
	}
	list := clouds(t, r.get(t, "/export?topic="+cloudHeadersTopic, "Accept", "application/cloudevents-batch+json, application/json;q=0.5"), "application/cloudevents-batch+json")
	if len(list) != 4 {
		t.Fatal(list)
	}
	if e := list[0]; e.ID() != m.Header.Get("Event-Id") || e.Source() != "/here" || e.Extensions()["partitionkey"] != "k ü" || string(e.Data()) != `{"a":1}` {
		t.Errorf("the event of the hub is read as %v", e)
	}
	if e := list[1]; e.ID() != "native" || e.Type() != "made up" || e.DataContentType() != "text/xml" || string(e.Data()) != "<x/>" || e.Extensions()["count"] != "5" {
		t.Errorf("binary mode is read as %v", e)
	}
	if e := list[2]; e.ID() != "s" || e.Source() != "/native" || string(e.Data()) != "[1]" {
		t.Errorf("structured mode is read as %v", e)
	}
	if e := list[3]; e.Source() != "/here" || e.Type() != cloudHeadersTopic || string(e.Data()) != "\xff" {
		t.Errorf("a plain message is read as %v", e)
	}
}

func TestCloudEventsOfKeys(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	for _, key := range []string{"a", "b"} {
		if a := r.post(t, "/publish/kept.cloud", `{"specversion":"1.0","id":"`+key+`","source":"/s","type":"t","partitionkey":"`+key+`","data":1}`, "Content-Type", "application/cloudevents+json"); a.status != http.StatusOK {
			t.Fatal(a)
		}
	}
	accept := []string{"Accept", "application/cloudevents+json"}
	a := r.get(t, "/snap/kept.cloud/a", accept...)
	if list := clouds(t, a, "application/cloudevents+json"); list[0].ID() != "a" {
		t.Fatal(list)
	}
	tag := a.header.Get("ETag")
	if got := r.get(t, "/snap/kept.cloud/a", append(accept, "If-None-Match", tag)...); got.status != http.StatusNotModified {
		t.Fatal(got)
	}
	if got := r.get(t, "/snap/kept.cloud/a", "If-None-Match", tag); got.status != http.StatusOK || got.header.Get("Content-Type") != "application/json" || got.header.Get("Vary") == "" {
		t.Fatalf("the tag of a CloudEvent is taken for that of a record: %v", got)
	}
	r.awaitItems(t, "/snap/kept.cloud", 2, "1")
	seen := make(map[string]bool)
	for path, pages := "/snap/kept.cloud?next=&limit=1", 0; path != ""; pages++ {
		a := r.get(t, path, accept...)
		for _, e := range clouds(t, a, "application/cloudevents-batch+json") {
			seen[e.ID()] = true
		}
		path = ""
		if link, ok := strings.CutSuffix(a.header.Get("Link"), `>; rel="next"`); ok {
			path = "/snap/kept.cloud" + strings.TrimPrefix(link, "<")
		}
		if pages > 5 {
			t.Fatal("the pages have no end")
		}
	}
	if len(seen) != 2 {
		t.Fatalf("the pages have %v", seen)
	}
}

// Records are what a client gets that does not ask for CloudEvents alone.
func TestAcceptOfRecords(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	r.post(t, "/publish/cloud.accept", "1")
	for accept, want := range map[string]string{
		"":                             "application/json",
		"*/*":                          "application/json",
		"application/*":                "application/json",
		"application/cloudevents+json": "application/cloudevents-batch+json",
		"application/cloudevents+json;q=0.1, application/json": "application/json",
		"application/cloudevents+json;q=0":                     "application/json",
		"APPLICATION/CloudEvents-Batch+JSON; q=1.0":            "application/cloudevents-batch+json",
	} {
		if got := r.get(t, "/replay?topic=cloud.accept", "Accept", accept).header.Get("Content-Type"); got != want {
			t.Errorf("Accept: %s: got %s, want %s", accept, got, want)
		}
	}
}

// A client that has used up its rate is told before the hub reads what the client sends, whatever
// is wrong with that.
func TestRateOfCloudEventsThatAreRefused(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{
		Server: natstest.Embed(t, t.TempDir(), natstest.Listening(rigToken)), Topics: cloudRules,
	}, func(cfg *facade.Config) { cfg.Limits.PrincipalRate, cfg.Limits.PrincipalBurst = 1, 1 })
	for name, headers := range map[string][]string{
		"structured": {"Content-Type", "application/cloudevents+json"},
		"binary":     {"ce-specversion", "1.0", "ce-id", "1"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 50 {
				if a := r.post(t, "/publish", "{}", headers...); a.Code == "rate_limited" {
					return
				}
			}
			t.Fatal("50 requests at once are not limited")
		})
	}
}

// The attributes that the hub adds are headers like others: an event has no more headers with them
// than an event may have, so that whatever is stored can be published again.
func TestCloudEventHeadersWithinTheLimits(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	headers := make([]string, 0, 2*64)
	for i := range 64 {
		headers = append(headers, "Event-Header-X-"+strconv.Itoa(i), "v")
	}
	for name, own := range map[string][]string{
		"names": headers,
		"bytes": {"Event-Header-X", strings.Repeat("x", 16<<10-20)},
		"delay": append([]string{"Event-Delay-Ms", "1000"}, headers...),
	} {
		t.Run(name, func(t *testing.T) {
			if a := r.post(t, "/publish/"+cloudHeadersTopic, "1", own...); a.status != http.StatusBadRequest || a.Code != "bad_options" || !strings.Contains(a.Error, "CloudEvent") {
				t.Errorf("got %d %s %q", a.status, a.Code, a.Error)
			}
			if a := r.post(t, "/publish/cloud.other", "1", own...); a.status != http.StatusOK {
				t.Errorf("to a topic whose events get no attributes: %d %s", a.status, a.Error)
			}
		})
	}
	if n := len(r.stored(t, cloudHeadersTopic)); n != 0 {
		t.Errorf("%d events are stored", n)
	}
}

// An event's own header takes the place of the one that its topic would add, in any case.
func TestOwnCloudEventHeader(t *testing.T) {
	t.Parallel()
	r := newCloudRig(t)
	opts := jetstream.PublishOptions{Headers: map[string]string{"CE-Type": "own"}}
	if _, err := r.bus.NewPublisher().Publish(t.Context(), cloudHeadersTopic, []byte("1"), opts); err != nil {
		t.Fatal(err)
	}
	got := r.only(t, cloudHeadersTopic).Headers
	if added, twice := got["ce-type"]; twice || got["CE-Type"] != "own" || got["ce-source"] != "/here" {
		t.Fatalf("ce-type %q is beside the own one: %v", added, got)
	}
}
