package facade

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"eventhub/docs"
	"eventhub/jetstream"
)

// described is a schema of docs/openapi.yaml or docs/asyncapi.yaml, as far as it has bounds.
type described struct {
	Ref        string `yaml:"$ref"`
	Type       any
	Minimum    *int
	Maximum    *int
	MinLength  *int                  `yaml:"minLength"`
	MaxLength  *int                  `yaml:"maxLength"`
	MinItems   *int                  `yaml:"minItems"`
	MaxItems   *int                  `yaml:"maxItems"`
	MaxProps   *int                  `yaml:"maxProperties"`
	Items      *described            `yaml:"items"`
	OneOf      []described           `yaml:"oneOf"`
	Properties map[string]*described `yaml:"properties"`
}

// UnmarshalYAML reads a schema. One that is a boolean has no bounds.
func (s *described) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		return nil
	}
	type plain described
	return n.Decode((*plain)(s))
}

// description is one of the documents.
type description struct {
	file       string
	Components struct {
		Schemas    map[string]*described
		Parameters map[string]parameter
	}
}

type parameter struct {
	Ref      string `yaml:"$ref"`
	Name, In string
	Schema   described
}

func describedIn(t *testing.T, file string, text []byte) *description {
	t.Helper()
	d := &description{file: file}
	if err := yaml.Unmarshal(text, d); err != nil {
		t.Fatal(err)
	}
	return d
}

func lastName(ref string) string { return ref[strings.LastIndex(ref, "/")+1:] }

// schema returns a schema of the document.
func (d *description) schema(t *testing.T, name string) *described {
	t.Helper()
	s := d.Components.Schemas[name]
	if s == nil {
		t.Fatalf("docs/%s has no components.schemas.%s", d.file, name)
	}
	return s
}

// resolve follows references, and takes the other one of a choice with null, or with a word.
func (d *description) resolve(t *testing.T, s *described) *described {
	t.Helper()
	for {
		switch {
		case s.Ref != "":
			s = d.schema(t, lastName(s.Ref))
		case len(s.OneOf) == 2 && (s.OneOf[1].Type == "null" || s.OneOf[0].kind() == "integer"):
			s = &s.OneOf[0]
		default:
			return s
		}
	}
}

// kind is the type of a schema other than null.
func (s *described) kind() string {
	if list, ok := s.Type.([]any); ok && len(list) > 0 {
		return fmt.Sprint(list[0])
	}
	return fmt.Sprint(s.Type)
}

// bounds returns a schema's type and bounds in the words of docs/protocol.md, for checkBounds.
func (d *description) bounds(t *testing.T, s *described) (kind, cell string) {
	t.Helper()
	s = d.resolve(t, s)
	or := func(n *int, byDefault int) int {
		if n == nil {
			return byDefault
		}
		return *n
	}
	switch kind = s.kind(); {
	case s.Minimum != nil && s.Maximum != nil:
		return "integer", fmt.Sprintf("%d..%d", *s.Minimum, *s.Maximum)
	case s.MaxLength != nil:
		return kind, fmt.Sprintf("%d..%d", or(s.MinLength, 0), *s.MaxLength)
	case kind == "array" && s.MaxItems != nil:
		return "array of strings", fmt.Sprintf("%d..%d", or(s.MinItems, 0), *s.MaxItems)
	case kind == "array" && s.Items.MaxLength != nil:
		return "array of strings", fmt.Sprintf("each 0..%d", *s.Items.MaxLength)
	case s.MaxProps != nil:
		return "object of strings", fmt.Sprintf("0..%d", *s.MaxProps)
	}
	return kind, "none"
}

// TestDocumentsBoundOptions checks that docs/asyncapi.yaml has every option and no other, and that
// its bounds are those of the hub: a value on a bound is taken, one beyond it is refused.
func TestDocumentsBoundOptions(t *testing.T) {
	d := describedIn(t, "asyncapi.yaml", docs.AsyncAPI)
	for _, c := range []struct {
		schema, function string
		bounded          []string
		takes            func(opts []byte) bool
	}{
		{"PublishOptions", "publishOptions", []string{"id", "ts", "key", "headers", "tags", "caused_by", "delay_ms", "at"}, func(opts []byte) bool {
			var o jetstream.PublishOptions
			return publishOptions(&o, opts) == nil && o.Validate() == nil
		}},
		{"SubscribeOptions", "subscribeOptions", []string{"ts", "maxInFlight", "ackTimeoutMs", "maxAttempts", "topics", "groupTtlMs", "slots", "schemaVersion", "batchSize"}, func(opts []byte) bool {
			var o jetstream.SubscribeOptions
			return subscribeOptions(&o, opts) == nil
		}},
	} {
		schema := d.schema(t, c.schema)
		want := optionNames(t, c.function)
		if c.schema == "SubscribeOptions" { // readCastOptions, which comes first, reads it
			want = append(want, "mode")
		}
		slices.Sort(want)
		if got := slices.Sorted(maps.Keys(schema.Properties)); !slices.Equal(got, want) {
			t.Errorf("docs/asyncapi.yaml has the options %q in components.schemas.%s.properties, want %q", got, c.schema, want)
		}
		for name, s := range schema.Properties {
			kind, cell := d.bounds(t, s)
			if (cell != "none") != slices.Contains(c.bounded, name) {
				t.Errorf("docs/asyncapi.yaml: %s.%s has the bounds %s; the test knows the bounded options %q", c.schema, name, cell, c.bounded)
			}
			checkBounds(t, name, kind, cell, func(value string) bool {
				return c.takes(optionOf(name, value))
			})
		}
	}
}

// TestDocumentsBoundFrames does the same for fields of frames.
func TestDocumentsBoundFrames(t *testing.T) {
	d := describedIn(t, "asyncapi.yaml", docs.AsyncAPI)
	for _, c := range []struct{ schema, field, frame string }{
		{"Auth", "caps", `{"op":"AUTH","token":"t","caps":%s}`},
		{"Ack", "ids", `{"op":"ACK","topic":"t","group":"g","ids":%s}`},
		{"Nack", "delay_ms", `{"op":"NACK","topic":"t","group":"g","id":"i","delay_ms":%s}`},
	} {
		kind, cell := d.bounds(t, d.schema(t, c.schema).Properties[c.field])
		if cell == "none" {
			t.Errorf("docs/asyncapi.yaml: %s.%s has no bounds", c.schema, c.field)
		}
		checkBounds(t, c.field, kind, cell, func(value string) bool {
			f := new(frame)
			return f.cut(fmt.Appendf(nil, c.frame, value)) == nil && f.decode() == nil
		})
	}
	if got := d.schema(t, "Auth").Properties["caps"].Items.MaxLength; got == nil || *got != maxCap {
		t.Errorf("docs/asyncapi.yaml: an item of Auth.caps must have the maxLength %d", maxCap)
	}
}

// TestDocumentsBoundNames does the same for names, in both documents.
func TestDocumentsBoundNames(t *testing.T) {
	unquoted := func(check func(name string) bool) func(value string) bool {
		return func(value string) bool { return check(strings.Trim(value, `"`)) }
	}
	for file, text := range map[string][]byte{"openapi.yaml": docs.OpenAPI, "asyncapi.yaml": docs.AsyncAPI} {
		d := describedIn(t, file, text)
		for name, takes := range map[string]func(value string) bool{
			// A topic of dead letters may have the most bytes.
			"Topic": unquoted(func(s string) bool {
				if len(s) > 4 {
					s = "dlq." + s[4:]
				}
				return jetstream.ValidTopic(s) == nil
			}),
			"Group":   unquoted(func(s string) bool { return jetstream.ValidGroup(s) == nil }),
			"Key":     unquoted(func(s string) bool { return checkKey("The key", s) == nil }),
			"EventId": unquoted(func(s string) bool { return s != "" && (&jetstream.PublishOptions{ID: s}).Validate() == nil }),
		} {
			kind, cell := d.bounds(t, d.schema(t, name))
			if cell == "none" {
				t.Errorf("docs/%s: components.schemas.%s has no bounds", file, name)
			}
			checkBounds(t, name, kind, cell, takes)
		}
	}
}

// TestDocumentsBoundParameters does the same for the parameters of HTTP requests.
func TestDocumentsBoundParameters(t *testing.T) {
	d := describedIn(t, "openapi.yaml", docs.OpenAPI)
	var paths struct {
		Paths map[string]struct {
			Get struct{ Parameters []parameter }
		}
	}
	if err := yaml.Unmarshal(docs.OpenAPI, &paths); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path  string
		known []string
		base  func(name string) url.Values // what else the request must have
		takes func(query string) bool
	}{
		{"/snap/{topic}", []string{"next", "limit", "offset", "keys", "consistent", optSchemaVersion}, func(string) url.Values { return url.Values{} }, func(query string) bool {
			_, fail := parsePage(httptest.NewRequest(http.MethodGet, "/snap/t?"+query, http.NoBody))
			return fail == nil
		}},
		{"/schemas", []string{"next", "limit"}, func(string) url.Values { return url.Values{} }, func(query string) bool {
			_, _, fail := parseSchemaNames(query)
			return fail == nil
		}},
		{"/subscribe", consumeParams, func(name string) url.Values {
			base := url.Values{"topic": {"t"}, "group": {"g"}}
			if name == "ts" || name == "afterId" {
				base.Set("from", name)
			}
			if name == "slots" {
				base.Set("ordered", "key")
			}
			return base
		}, func(query string) bool {
			_, fail := queryFrame(query)
			return fail == nil
		}},
		{"/broadcast/{topic}", castParams, func(name string) url.Values {
			switch name {
			case "pos", "ts", "afterId":
				return url.Values{"from": {name}}
			case "from": // each with what it needs
				return url.Values{"pos": {"1-1"}, "ts": {"1"}, "afterId": {"x"}}
			}
			return url.Values{}
		}, func(query string) bool {
			values, err := url.ParseQuery(query)
			if pos := values.Get("pos"); len(pos) > 2 { // a place of this length
				values.Set("pos", "1-"+strings.Repeat("0", len(pos)-3)+"1")
			}
			_, fail := castQuery(values.Encode(), "", castParams)
			return err == nil && fail == nil
		}},
		{"/replay", replayParams, func(name string) url.Values {
			base := url.Values{"topic": {"t"}}
			if name == "ts" || name == "afterId" {
				base.Set("from", name)
			}
			return base
		}, func(query string) bool {
			_, fail := parseReplay(query)
			return fail == nil
		}},
		{"/export", exportParams, func(name string) url.Values {
			base := url.Values{"topic": {"t"}}
			if name == "fromTs" {
				base.Set("toTs", strconv.Itoa(maxRangeTime))
			}
			return base
		}, func(query string) bool {
			_, fail := parseExport(query)
			return fail == nil
		}},
	} {
		var names []string
		for _, p := range paths.Paths[c.path].Get.Parameters {
			if p.Ref != "" {
				p = d.Components.Parameters[lastName(p.Ref)]
			}
			if p.In == "header" {
				continue
			}
			names = append(names, p.Name)
			kind, cell := d.bounds(t, &p.Schema)
			if p.Name == "topic" || p.Name == "group" {
				continue // the bus checks it: TestDocumentsBoundNames
			}
			checkBounds(t, c.path+" "+p.Name, kind, cell, func(value string) bool {
				query := c.base(p.Name)
				query[p.Name] = []string{strings.Trim(value, `"`)}
				if kind == "array of strings" {
					query[p.Name] = nil
					for i := range strings.Count(value, `"x"`) {
						query.Add(p.Name, "x"+strconv.Itoa(i)+":")
					}
				}
				return c.takes(query.Encode())
			})
		}
		slices.Sort(names)
		want := slices.Sorted(slices.Values(c.known))
		if !slices.Equal(names, want) {
			t.Errorf("docs/openapi.yaml has the parameters %q under paths['%s'].get, want %q", names, c.path, want)
		}
	}
}

// TestDocumentsHaveEventHeaders checks the headers of a publish: the hub takes each that
// docs/openapi.yaml has, and bounds Event-Ts as the document does.
func TestDocumentsHaveEventHeaders(t *testing.T) {
	d := describedIn(t, "openapi.yaml", docs.OpenAPI)
	var names []string
	for _, p := range d.Components.Parameters {
		if p.In != "header" {
			continue
		}
		names = append(names, p.Name)
		set := func(value string) bool {
			return eventField(new(jetstream.PublishOptions), strings.ToLower(p.Name), p.Name, []string{value}) == nil
		}
		value := map[string]string{"Event-Ts": "1", "Event-At": "1", "Event-Delay-Ms": "1", "Event-Tombstone": "true"}[p.Name]
		if value == "" {
			value = "x"
		}
		if !set(value) {
			t.Errorf("the hub refuses the header %s of docs/openapi.yaml", p.Name)
		}
		if value == "1" {
			kind, cell := d.bounds(t, &p.Schema)
			checkBounds(t, p.Name, kind, cell, set)
		}
	}
	slices.Sort(names)
	want := []string{"Event-At", "Event-Caused-By", "Event-Delay-Ms", "Event-Id", "Event-Key", "Event-Sid", "Event-Tags", "Event-Tombstone", "Event-Ts"}
	if !slices.Equal(names, want) {
		t.Errorf("docs/openapi.yaml has the headers %q, want %q", names, want)
	}
}
