package asyncapi

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// specification is the JSON Schema of AsyncAPI 3.0.0, which is published under the Apache License
// 2.0 (https://github.com/asyncapi/spec-json-schemas).
func specification(t *testing.T) *jsonschema.Schema {
	t.Helper()
	f, err := os.Open("testdata/asyncapi-3.0.0.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	packed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	tree, err := jsonschema.UnmarshalJSON(packed)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("http://asyncapi.com/definitions/3.0.0/asyncapi.json", tree); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("http://asyncapi.com/definitions/3.0.0/asyncapi.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestDocument describes topics. The document is valid, each reference in it leads somewhere, and
// each payload takes the same documents as the schema that was registered.
func TestDocument(t *testing.T) {
	t.Parallel()
	spec := specification(t)
	if spec.Validate(map[string]any{"asyncapi": "3.0.0", "info": map[string]any{"title": "x", "version": "1"}, "operations": map[string]any{"x": map[string]any{}}}) == nil {
		t.Error("the specification takes anything")
	}
	for name, test := range map[string]struct {
		schema   string
		good     []string
		bad      []string
		rewrites string
	}{
		"plain":                {`{"type":"object","required":["host"],"properties":{"host":{"type":"string"}}}`, []string{`{"host":"a"}`}, []string{`{}`, `{"host":1}`}, ""},
		"boolean":              {`true`, []string{`1`}, nil, ""},
		"pointer":              {`{"properties":{"n":{"$ref":"#/$defs/n"}},"$defs":{"n":{"type":"number"}}}`, []string{`{"n":1}`}, []string{`{"n":"1"}`}, `"#/channels/a.b/messages/v1/payload/schema/$defs/n"`},
		"itself":               {`{"properties":{"next":{"$ref":"#"}},"additionalProperties":false}`, []string{`{"next":{"next":{}}}`}, []string{`{"next":{"x":1}}`}, `"#/channels/a.b/messages/v1/payload/schema"`},
		"anchor":               {`{"items":{"$ref":"#n"},"$defs":{"a/b ~%":{"$anchor":"n","type":"number"}}}`, []string{`[1]`}, []string{`["1"]`}, `schema/$defs/a~1b%20~0%25"`},
		"id":                   {`{"$id":"https://example.com/hosts/1","items":{"$ref":"1#/$defs/n"},"$defs":{"n":{"type":"number"}}}`, []string{`[1]`}, []string{`["1"]`}, `schema/$defs/n"`},
		"ids inside":           {`{"$id":"https://example.com/a","items":{"$ref":"b"},"$defs":{"x":{"$id":"b","$ref":"#/$defs/y","$defs":{"y":{"type":"number"}}},"y":{"type":"string"}}}`, []string{`[1]`}, []string{`["1"]`}, `schema/$defs/x/$defs/y"`},
		"urn":                  {`{"$id":"urn:x:y","items":{"$ref":"#/$defs/n"},"$defs":{"n":{"type":"number"}}}`, []string{`[1]`}, []string{`["1"]`}, `schema/$defs/n"`},
		"dynamic":              {`{"$dynamicAnchor":"n","type":["object"],"additionalProperties":{"$dynamicRef":"#n"}}`, []string{`{"a":{}}`}, []string{`{"a":1}`}, `payload/schema"`},
		"dynamic and another":  {`{"$ref":"#/$defs/m","$dynamicRef":"#n","allOf":[{"maximum":9}],"not":{"$ref":"#/x/y"},"x":{"y":{"$ref":"#/$defs/z"}},"$defs":{"n":{"$dynamicAnchor":"n","type":"number"},"m":{"minimum":2},"z":{"const":5}}}`, []string{`2`, `9`}, []string{`1`, `10`, `"a"`, `5`}, `schema/x/y"`},
		"names that look like": {`{"properties":{"$ref":{"type":"string"},"$id":{"type":"number"},"properties":{"$ref":"#/$defs/n"}},"$defs":{"n":{"type":"null"}},"required":["$id"]}`, []string{`{"$id":1,"$ref":"x","properties":null}`}, []string{`{"$id":"1"}`, `{}`, `{"$id":1,"properties":1}`}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text, err := Document([]Topic{
				{Name: "a.b", Versions: []Version{{Schema: json.RawMessage(test.schema)}, {Schema: json.RawMessage(test.schema), Description: "<again>"}}},
				{Name: "c-d", Versions: []Version{{Schema: json.RawMessage(test.schema)}}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(text, []byte(test.rewrites)) {
				t.Errorf("%s\nwant the reference %s", text, test.rewrites)
			}
			tree, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			if err := spec.Validate(tree); err != nil {
				t.Errorf("%s\n%v", text, err)
			}
			leads(t, tree, tree)
			c := jsonschema.NewCompiler()
			if err := c.AddResource("file:///doc.json", tree); err != nil {
				t.Fatal(err)
			}
			for _, at := range []string{"a.b/messages/v1", "a.b/messages/v2", "c-d/messages/v1"} {
				s, err := c.Compile("file:///doc.json#/channels/" + at + "/payload/schema")
				if err != nil {
					t.Fatal(err)
				}
				for want, docs := range map[bool][]string{true: test.good, false: test.bad} {
					for _, doc := range docs {
						v, err := jsonschema.UnmarshalJSON(strings.NewReader(doc))
						if err != nil {
							t.Fatal(err)
						}
						if err := s.Validate(v); (err == nil) != want {
							t.Errorf("%s, %s: %v", at, doc, err)
						}
					}
				}
			}
		})
	}
}

// leads wants each reference of the document to lead to a place in it.
func leads(t *testing.T, tree, v any) {
	t.Helper()
	switch v := v.(type) {
	case map[string]any:
		if to, ok := v["$ref"].(string); ok {
			place, inside := strings.CutPrefix(to, "#")
			place = strings.NewReplacer("%20", " ", "%25", "%").Replace(place)
			if _, err := (&embedder{root: tree}).find(place); !inside || err != nil {
				t.Errorf("%s leads nowhere: %v", to, err)
			}
		}
		for _, item := range v {
			leads(t, tree, item)
		}
	case []any:
		for _, item := range v {
			leads(t, tree, item)
		}
	}
}

// TestNoDocument names the version that cannot be described.
func TestNoDocument(t *testing.T) {
	t.Parallel()
	for schema, want := range map[string]string{
		`{`:                    "schema of hosts, version 2: read the schema: unexpected EOF",
		`{"$ref":"#/$defs/n"}`: `schema of hosts, version 2: $ref "#/$defs/n": nothing is there`,
		`{"$ref":"other"}`:     `schema of hosts, version 2: $ref "other" leads to no place in the schema`,
		`{"$dynamicRef":"#n","$dynamicAnchor":"n","$defs":{"m":{"$id":"m"}}}`: "$dynamicRef beside an $id",
	} {
		_, err := Document([]Topic{{Name: "hosts", Versions: []Version{{Schema: json.RawMessage("true")}, {Schema: json.RawMessage(schema)}}}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", schema, err, want)
		}
	}
}
