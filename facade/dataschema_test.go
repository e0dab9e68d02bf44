package facade_test

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

const cloudType, cloudBatchType = "application/cloudevents+json", "application/cloudevents-batch+json"

// dataSchemaRig has two versions of the schema of the topics hosts.*, which is registered as hosts,
// and the topic plain without a schema.
func dataSchemaRig(t *testing.T) *rig {
	t.Helper()
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{
		{Pattern: "hosts.*", MaxAge: time.Hour, Compaction: true, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Of: "hosts"}},
	}}, nil)
	for _, draft := range []string{
		`{"schema":` + hostSchema + `}`,
		`{"schema":{"type":"object","required":["name"],"properties":{"name":{"type":"string"}},"additionalProperties":false},"up":[{"rename":{"at":"/host","to":"name"}}],"down":[{"rename":{"at":"/name","to":"host"}}]}`,
	} {
		if a := r.post(t, "/schemas/hosts.eu", draft); a.status != http.StatusCreated {
			t.Fatalf("%d %s", a.status, a.text)
		}
	}
	return r
}

// TestDataSchemaNamesTheVersion publishes CloudEvents in each mode. Their dataschema names a
// version, or none.
func TestDataSchemaNamesTheVersion(t *testing.T) {
	t.Parallel()
	r := dataSchemaRig(t)
	const one, two = `{"host":"a"}`, `{"name":"a"}`
	n := 0
	for _, test := range []struct{ topic, schema, header, data, want string }{
		{"hosts.eu", "https://example.com/api/schemas/hosts.eu/1", "", one, "1"},
		{"hosts.eu", "https://example.com/schemas/hosts/1", "", one, "1"},
		{"hosts.eu", "eventhub:/schemas/hosts%2Eeu/2", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/%68osts/2?a=/schemas/x/7#/b", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts/1", "1", one, "1"},
		{"hosts.eu", "eventhub:/schemas/hosts/2", "1", one, "400 dataschema names version 2 of the schema, and the header x-schema-version has \"1\""},
		{"hosts.eu", "eventhub:/schemas/hosts/2", "x", one, "400 dataschema names version 2 of the schema, and the header x-schema-version has \"x\""},
		{"hosts.eu", "eventhub:/schemas/hosts/3", "", one, "422 version 3 of the schema is not registered; the latest is 2"},
		{"hosts.eu", "eventhub:/schemas/hosts/1", "", two, "422 version 1: "},
		// These name none, so the latest version counts.
		{"hosts.eu", "eventhub:/schemas/hosts/latest", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts/01", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts/0", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts/501", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts/99999999999999999999", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts.us/1", "", two, "2"},
		{"hosts.eu", "eventhub:/schemas/hosts/1/", "", two, "2"},
		{"hosts.eu", "eventhub:/schema/hosts/1", "", two, "2"},
		{"hosts.eu", "https://schemas/hosts/1", "", two, "2"},
		{"hosts.eu", "urn:schemas/hosts/1", "", two, "2"},
		{"hosts.eu", "https://example.com/?x=/schemas/hosts/1", "", two, "2"},
		{"hosts.eu", "https://example.com/host.json", "1", one, "1"},
		{"hosts.eu", "/schemas/hosts/1", "", one, "400 dataschema is not an absolute URI"},
		{"plain", "eventhub:/schemas/plain/3", "", one, ""},
		{"plain", "eventhub:/schemas/plain/3", "2", one, "2"},
	} {
		headers := []string{"Event-Key", "k"}
		if test.header != "" {
			headers = append(headers, "X-Schema-Version", test.header)
		}
		for _, mode := range []string{"binary", "structured", "batch"} {
			n++
			var a answer
			envelope := fmt.Sprintf(`{"specversion":"1.0","id":"%d","source":"/s","type":"%s","dataschema":%q,"data":%s}`, n, test.topic, test.schema, test.data)
			switch mode {
			case "binary":
				a = r.post(t, "/publish", test.data, append(headers, "Content-Type", "application/json", "Ce-Specversion", "1.0", "Ce-Id", strconv.Itoa(n), "Ce-Source", "/s",
					"Ce-Type", test.topic, "Ce-Dataschema", strings.ReplaceAll(test.schema, "%", "%25"))...)
			case "structured":
				a = r.post(t, "/publish/"+test.topic, envelope, append(headers, "Content-Type", cloudType)...)
			default:
				a = r.post(t, "/publish", "["+envelope+"]", append(headers, "Content-Type", cloudBatchType)...)
			}
			if status, part, refused := strings.Cut(test.want, " "); refused {
				if mode == "batch" {
					status = "200"
				}
				if strconv.Itoa(a.status) != status || !strings.Contains(strings.ReplaceAll(a.text, `\"`, `"`), part) {
					t.Errorf("%s %s: %d %s, want %s", mode, test.schema, a.status, a.text, test.want)
				}
				continue
			}
			if a.status != http.StatusOK || strings.Contains(a.text, "error") {
				t.Errorf("%s %s: %d %s", mode, test.schema, a.status, a.text)
				continue
			}
			all := r.stored(t, test.topic)
			if len(all) == 0 {
				t.Fatalf("%s has no events", test.topic)
			}
			if e := all[len(all)-1]; e.Headers["x-schema-version"] != test.want || e.Headers["ce-id"] != strconv.Itoa(n) {
				t.Errorf("%s %s: stored with %v, want version %q", mode, test.schema, e.Headers, test.want)
			}
		}
	}
}

// TestDataSchemaShowsTheVersion reads events as CloudEvents, as they are stored and cast.
func TestDataSchemaShowsTheVersion(t *testing.T) {
	t.Parallel()
	r := dataSchemaRig(t)
	publish := func(topic, schema, data string, headers ...string) {
		t.Helper()
		headers = append(headers, "Content-Type", "application/json", "Ce-Specversion", "1.0", "Ce-Id", data, "Ce-Source", "/s", "Ce-Type", "t")
		if schema != "" {
			headers = append(headers, "Ce-Dataschema", schema)
		}
		r.put(t, topic, data, headers...)
	}
	r.put(t, "hosts.eu", `{"host":"a"}`, "Event-Key", "a", "X-Schema-Version", "1")
	publish("hosts.eu", "", `{"name":"b"}`, "Event-Key", "b")
	publish("hosts.eu", "https://example.com/schemas/hosts/1?x=1", `{"host":"c"}`, "Event-Key", "c")
	publish("hosts.eu", "https://example.com/d.json", `{"name":"d"}`, "Event-Key", "d")
	publish("plain", "", `1`, "X-Schema-Version", "7")
	eventually(t, "the bucket has all keys", func() bool { return strings.Contains(r.get(t, "/snap/hosts.eu").text, `"count":4`) })
	for _, test := range []struct{ query, want string }{
		{"", "eventhub:/schemas/hosts.eu/1 eventhub:/schemas/hosts.eu/2 https://example.com/schemas/hosts/1?x=1 https://example.com/d.json"},
		{"&schemaVersion=2", "eventhub:/schemas/hosts.eu/2 eventhub:/schemas/hosts.eu/2 https://example.com/schemas/hosts/2?x=1 https://example.com/d.json"},
		{"&schemaVersion=1", "eventhub:/schemas/hosts.eu/1 eventhub:/schemas/hosts.eu/1 https://example.com/schemas/hosts/1?x=1 https://example.com/d.json"},
	} {
		for path, kind := range map[string]string{
			"/replay?topic=hosts.eu": cloudBatchType, "/export?topic=hosts.eu": cloudBatchType,
			"/export?topic=hosts.eu&ndjson=1": "application/x-ndjson", "/snap/hosts.eu?next=": cloudBatchType,
		} {
			var got []string
			for _, e := range clouds(t, r.get(t, path+test.query, "Accept", cloudType), kind) {
				got = append(got, e.DataSchema())
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("%s%s: %v, want %s", path, test.query, got, test.want)
			}
		}
		one := clouds(t, r.get(t, "/snap/hosts.eu/c?"+test.query, "Accept", cloudType), cloudType)[0]
		if want := strings.Fields(test.want)[2]; one.DataSchema() != want {
			t.Errorf("one key%s: %s, want %s", test.query, one.DataSchema(), want)
		}
	}
	if got := clouds(t, r.get(t, "/replay?topic=plain", "Accept", cloudType), cloudBatchType)[0].DataSchema(); got != "" {
		t.Errorf("a topic without a rule: %s", got)
	}
	// The CloudEvents that were read can be published: the attribute names the same version.
	text := r.get(t, "/snap/hosts.eu/a", "Accept", cloudType).text
	if a := r.post(t, "/publish/hosts.eu", text, "Content-Type", cloudType, "Event-Id", "again"); a.status != http.StatusOK {
		t.Errorf("%d %s", a.status, a.text)
	}
	if all := r.stored(t, "hosts.eu"); all[len(all)-1].Headers["x-schema-version"] != "1" {
		t.Errorf("%v", all[len(all)-1].Headers)
	}
}
