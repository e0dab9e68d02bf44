package schema

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"eventhub/jetstream/jsonscan"
)

// The long form:
//
//	go test ./jetstream/schema -run TestProgramsAgree -schema.programs 3000
var programs = flag.Int("schema.programs", 500, "how many random schemas TestProgramsAgree compiles")

// orderSchema and orderText are what benchmarks use: 268 bytes, as an order may have.
const (
	orderSchema = `{
		"$schema": "https://json-schema.org/draft/2020-12/schema",
		"type": "object", "required": ["id", "customer", "items", "total"], "additionalProperties": false,
		"properties": {
			"id": {"type": "string", "minLength": 1, "maxLength": 64},
			"status": {"enum": ["placed", "paid", "shipped"]},
			"customer": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "mail": {"type": "string", "maxLength": 254}}},
			"items": {"type": "array", "minItems": 1, "maxItems": 100, "items": {
				"type": "object", "required": ["sku", "count", "price"], "additionalProperties": false, "properties": {
					"sku": {"type": "string"}, "count": {"type": "integer", "minimum": 1}, "price": {"type": "number", "minimum": 0}}}},
			"total": {"type": "number", "minimum": 0},
			"note": {"type": ["string", "null"]}
		}
	}`
	orderText = `{"id":"01a20b53-1e41-7d72-9e8c-be08630a2e85","status":"placed","customer":{"name":"Ada L.","mail":"ada@example.com"},"items":[{"sku":"tea-20","count":2,"price":4.95},{"sku":"cup-1","count":1,"price":12},{"sku":"pot-3","count":1,"price":39.5}],"total":61.4,"note":null}`
)

func compile(tb testing.TB, text string) *Schema {
	tb.Helper()
	s, err := Compile([]byte(text))
	if err != nil {
		tb.Fatalf("%s: %v", text, err)
	}
	return s
}

// Documents fit schemas or break them where they should, and the program says so of valid ones.
func TestValidate(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		schema, doc, want string // "": valid
		slow              bool   // the schema has no program
	}{
		{schema: orderSchema, doc: orderText},
		{schema: orderSchema, doc: strings.Replace(orderText, `"count":2`, `"count":0`, 1), want: "/items/0/count: minimum"},
		{schema: orderSchema, doc: strings.Replace(orderText, `"count":2`, `"count":2.5`, 1), want: "/items/0/count: type"},
		{schema: orderSchema, doc: strings.Replace(orderText, `"count":2`, `"count":2.0`, 1)},
		{schema: orderSchema, doc: strings.Replace(orderText, `"total":61.4,`, ``, 1), want: ": required"},
		{schema: orderSchema, doc: strings.Replace(orderText, `"note"`, `"notes"`, 1), want: ": additionalProperties"},
		{schema: orderSchema, doc: strings.Replace(orderText, `"placed"`, `"lost"`, 1), want: "/status: enum"},
		{schema: orderSchema, doc: strings.Replace(orderText, `"id"`, `"\u0069d"`, 1)},
		{schema: orderSchema, doc: orderText + "x", want: ": json"},
		{schema: orderSchema, doc: "", want: ": json"},
		{schema: orderSchema, doc: "{\"id\":\"\xff\"}", want: ": json"},
		{schema: `{}`, doc: ` [1, {"a" : null}] `},
		{schema: `true`, doc: `1`},
		{schema: `false`, doc: `1`, want: ": false", slow: true},
		{schema: `{"type":"integer"}`, doc: `1e2`},
		{schema: `{"type":"integer"}`, doc: `12345678901234567890`},
		{schema: `{"maximum":10}`, doc: `10.00000000000000000001`, want: ": maximum"},
		{schema: `{"maximum":10}`, doc: `10`},
		{schema: `{"exclusiveMaximum":10}`, doc: `10`, want: ": exclusiveMaximum"},
		{schema: `{"exclusiveMinimum":-1.5}`, doc: `-1.4`},
		{schema: `{"exclusiveMinimum":-1.5,"minimum":-1.5}`, doc: `-1.5`, want: ": exclusiveMinimum"},
		{schema: `{"minimum":1,"type":"string"}`, doc: `"0"`},
		{schema: `{"multipleOf":3}`, doc: `-9`},
		{schema: `{"multipleOf":3}`, doc: `10`, want: ": multipleOf"},
		{schema: `{"multipleOf":0.1}`, doc: `0.3`, slow: true},
		{schema: `{"maxLength":2}`, doc: `"äß"`},
		{schema: `{"maxLength":2}`, doc: `"äßc"`, want: ": maxLength"},
		{schema: `{"maxLength":1}`, doc: `"😀"`},
		{schema: `{"maxLength":1}`, doc: `"\ud83d\ude00"`},
		{schema: `{"minLength":2}`, doc: `"\n"`, want: ": minLength"},
		{schema: `{"minLength":2}`, doc: `"\u00e4\""`},
		{schema: `{"enum":[1,"a",null,true]}`, doc: `null`},
		{schema: `{"enum":[1,"a",null,true]}`, doc: `1.0`},
		{schema: `{"enum":[1,"a",null,true]}`, doc: `"\u0061"`},
		{schema: `{"enum":[1,"a",null,true]}`, doc: `false`, want: ": enum"},
		{schema: `{"enum":[{"a":1}]}`, doc: `{"a":1.0}`, slow: true},
		{schema: `{"const":"a\"b"}`, doc: `"a\"b"`},
		{schema: `{"const":"x"}`, doc: `"y"`, want: ": const"},
		{schema: `{"items":{"type":"boolean"},"maxItems":2}`, doc: `[true,false]`},
		{schema: `{"items":{"type":"boolean"},"maxItems":2}`, doc: `[true,false,true]`, want: ": maxItems"},
		{schema: `{"items":{"type":"boolean"}}`, doc: `[true,0]`, want: "/1: type"},
		{schema: `{"minItems":1}`, doc: `[ ]`, want: ": minItems"},
		{schema: `{"uniqueItems":false}`, doc: `[1,1]`},
		{schema: `{"uniqueItems":true}`, doc: `[1,1.0]`, want: ": uniqueItems", slow: true},
		{schema: `{"properties":{"a":{"type":"string"}}}`, doc: `{"a":1,"a":"x"}`},
		{schema: `{"properties":{"a":{"type":"string"}}}`, doc: `{"a":"x","a":1}`, want: "/a: type"},
		{schema: `{"additionalProperties":{"type":"string"},"properties":{"n":{"type":"number"}}}`, doc: `{"n":1,"x":"y"}`},
		{schema: `{"additionalProperties":{"type":"string"},"properties":{"n":{"type":"number"}}}`, doc: `{"n":1,"x~/y":2}`, want: "/x~0~1y: type"},
		{schema: `{"required":["a"],"additionalProperties":{"type":"string"}}`, doc: `{"a":1}`, want: "/a: type"},
		{schema: `{"required":["a"],"additionalProperties":false}`, doc: `{"a":1}`, want: ": additionalProperties", slow: true},
		{schema: `{"$ref":"#/$defs/n","$defs":{"n":{"type":"number"}}}`, doc: `1`},
		{schema: `{"properties":{"a":{"pattern":"^x"},"b":{"anyOf":[{"type":"string"},{"minimum":3}]}},"additionalProperties":{"uniqueItems":true}}`, doc: `{"a":"xy","b":4,"c":[1,2]}`},
		{schema: `{"properties":{"a":{"pattern":"^x"}},"additionalProperties":{"uniqueItems":true}}`, doc: `{"a":"xy","c":[1,1]}`, want: "/c: uniqueItems"},
		{schema: `{"items":{"oneOf":[{"type":"string"},{"$ref":"#/$defs/n"}]},"$defs":{"n":{"type":"number"}}}`, doc: `["a",1,null]`, want: "/2: oneOf"},
		{schema: `{"properties":{"a":{"properties":{"b":{}}},"a/properties/b":{"pattern":"^x"}}}`, doc: `{"a/properties/b":"y"}`, want: "/a~1properties~1b: pattern"},
		{schema: `{"properties":{"a b":{"pattern":"^x"}}}`, doc: `{"a b":"y"}`, want: "/a b: pattern"},
		{schema: `{"properties":{"a":{"pattern":"^x"}},"$defs":{"b":{"$anchor":"c"}}}`, doc: `{"a":"y"}`, want: "/a: pattern"},
		{schema: `{"properties":{"n":{"$ref":"#/$defs/n","minimum":2}},"$defs":{"n":{"type":"number"}}}`, doc: `{"n":1}`, want: "/n: minimum"},
		{schema: `{"properties":{"next":{"$ref":"#"}},"additionalProperties":false}`, doc: `{"next":{"next":{"x":1}}}`, want: "/next/next: additionalProperties"},
		{schema: `{"pattern":"^a"}`, doc: `"ab"`},
		{schema: `{"pattern":"^a"}`, doc: `"\u0061"`},
		{schema: `{"properties":{"a\"b":{"type":"null"}}}`, doc: `{"a\"b":null}`, slow: true},
		{schema: `{"maximum":5}`, doc: `01`, want: ": json"},
		{schema: `{"maximum":5}`, doc: `-`, want: ": json"},
		{schema: `{"maximum":5}`, doc: `1.`, want: ": json"},
		{schema: `{"maximum":5}`, doc: `-0.50`},
		{schema: `{"format":"email"}`, doc: `"no mail"`}, // an annotation
		{schema: `{"anyOf":[{"type":"string"},{"type":"object","required":["a"]}]}`, doc: `{}`, want: ": anyOf", slow: true},
		{schema: `{"not":{"type":"null"}}`, doc: `null`, want: ": not", slow: true},
		{schema: `{"allOf":[{"required":["b"]},{"required":["a"]}],"properties":{"a":{"type":"null"}}}`, doc: `{"a":1,"b":1}`, want: "/a: type", slow: true},
	} {
		s := compile(t, test.schema)
		if s.Fast() == test.slow {
			t.Errorf("%s has a program: %v", test.schema, s.Fast())
		}
		got := ""
		if v := s.Validate([]byte(test.doc)); v != nil {
			got = v.String()
		}
		if got != test.want {
			t.Errorf("%s of %s: %q, want %q", test.doc, test.schema, got, test.want)
		}
	}
}

// A schema that cannot be used is refused with the place and the reason.
func TestCompileRefuses(t *testing.T) {
	t.Parallel()
	var doubling strings.Builder
	doubling.WriteString(`{"$ref":"#/$defs/d0","$defs":{"end":{}`)
	for i := range 40 {
		next := "d" + strconv.Itoa(i+1)
		if i == 39 {
			next = "end"
		}
		fmt.Fprintf(&doubling, `,"d%d":{"allOf":[{"$ref":"#/$defs/%s"},{"$ref":"#/$defs/%[2]s"}]}`, i, next)
	}
	doubling.WriteString(`}}`)
	for _, test := range []struct{ schema, want string }{
		{``, "is not JSON"},
		{`{"type":`, "is not JSON"},
		{`1`, "is no JSON Schema 2020-12"},
		{`{"type":"text"}`, "/type"},
		{`{"properties":{"a":{"minimum":"1"}}}`, "/properties/a/minimum: type"},
		{`{"$schema":"http://json-schema.org/draft-07/schema#"}`, "/$schema: must be"},
		{`{"$ref":"https://example.com/other.json"}`, "leads out of the schema"},
		{`{"$ref":"#/$defs/none"}`, "none"},
		{`{"pattern":"("}`, "pattern"},
		{strings.Repeat(`{"items":`, 70) + `{}` + strings.Repeat(`}`, 70), "has 71 levels, at most 64"},
		{`{"description":"` + strings.Repeat("x", MaxBytes) + `"}`, "at most 262144 are allowed"},
		{doubling.String(), "multiply"},
		{`{"allOf":[` + repeated(MaxSubschemas, `{}`) + `]}`, "has 10001 subschemas, at most 10000 are allowed"},
		{`{"items":{"$recursiveRef":"#"}}`, "/items/$recursiveRef: is of an earlier draft"},
		{`{"items":{"$id":"https://example.com/a","$schema":"http://json-schema.org/draft-07/schema#"}}`, "/items: is of another draft"},
		{`{"items":{"$ref":"#a","$defs":{"b":{"$anchor":"a","pattern":"a{900}b{900}c{900}d{900}e{900}"}}}}`, "more than 4000 instructions"},
	} {
		s, err := Compile([]byte(test.schema))
		if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), place) {
			t.Errorf("%.60s: %v, %v, want %q", test.schema, s, err, test.want)
		}
	}
}

// The violation is the same one each time, and is short.
func TestViolationIsBounded(t *testing.T) {
	t.Parallel()
	s := compile(t, `{"additionalProperties":{"type":"string"}}`)
	doc := `{"b":1,"` + strings.Repeat("ä", 500) + `":1,"a":1}`
	for range 20 {
		if v := s.Validate([]byte(doc)); v == nil || v.Pointer != "/a" || v.Keyword != "type" {
			t.Fatalf("%v", v)
		}
	}
	if v := s.Validate([]byte(`{"` + strings.Repeat("ä", 500) + `":1}`)); v == nil || len(v.Pointer) > maxPointer || !strings.HasPrefix(v.Pointer, "/ää") {
		t.Errorf("%v", v)
	}
}

// A program allocates nothing.
func TestProgramsAllocateNothing(t *testing.T) {
	s, doc := compile(t, orderSchema), []byte(orderText)
	if len(doc) != 268 {
		t.Fatalf("the document has %d bytes", len(doc))
	}
	if n := testing.AllocsPerRun(100, func() {
		if s.Validate(doc) != nil {
			t.Error("the document is invalid")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// repeated is a list of n texts, each with its index in place of #.
func repeated(n int, text string) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strings.ReplaceAll(text, "#", strconv.Itoa(i)))
	}
	return b.String()
}

// byLibrary compiles a schema by the library, which is slow, and has no bounds.
func byLibrary(tb testing.TB, text string) *jsonschema.Schema {
	tb.Helper()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		tb.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(place, doc); err != nil {
		tb.Fatal(err)
	}
	library, err := c.Compile(place)
	if err != nil {
		tb.Fatal(err)
	}
	return library
}

// absurd are exponents with which the library panics.
var absurd = regexp.MustCompile(`[eE][+-]?\d{5}`)

// agree fails if a judge and the library do not say the same of a document, or if a program takes
// one that the judge refuses. It returns whether the program took the document.
func agree(tb testing.TB, s *Schema, library *jsonschema.Schema, text string, doc []byte) (taken bool) {
	tb.Helper()
	v := s.judge(doc, nil)
	if value, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc)); err == nil && jsonscan.Valid(doc) && checkNumbers(value) == nil && !absurd.Match(doc) {
		if invalid := library.Validate(value); (v != nil) != (invalid != nil) && (v == nil || v.Keyword != "size" && v.Keyword != "pattern") {
			tb.Errorf("a judge says of %s by %s: %v, and the library %v", doc, text, v, invalid)
		}
	}
	if s.program == nil || !s.program.accepts(doc, &matching{left: maxSteps}) {
		return false
	}
	if v != nil {
		tb.Errorf("the program of %s takes %s, and a judge says %v", text, doc, v)
	}
	return true
}

// Judges of random schemas say what the library does of random documents, and programs take none
// that judges refuse.
func TestProgramsAgree(t *testing.T) {
	t.Parallel()
	taken, fast := 0, 0
	for seed := range uint64(*programs) {
		g := generator{rand.New(rand.NewPCG(seed, 1)), int(seed % 2)}
		text, _ := json.Marshal(g.schema(3))
		s, err := Compile(text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if s.Fast() {
			fast++
		}
		library := byLibrary(t, string(text))
		for range 20 {
			if agree(t, s, library, string(text), []byte(g.document(3))) {
				taken++
			}
		}
	}
	if fast < *programs/2 || taken < *programs*5/3 {
		t.Errorf("%d of %d schemas have programs, which took %d documents", fast, *programs, taken)
	}
}

// generator makes random schemas and documents of few names and values, so that they often fit.
type generator struct {
	*rand.Rand

	rare int // 1: with all keywords
}

func (g generator) pick(of ...string) string { return of[g.IntN(len(of))] }

func (g generator) scalar() any {
	return []any{nil, true, false, 0, 1, -1, 2.5, 10, "", "a", "ab", "ä", "a\"b", json.Number("1.0"), json.Number("1e1")}[g.IntN(15)]
}

func (g generator) schema(depth int) any {
	if g.IntN(12) == 0 {
		return g.IntN(3) > 0
	}
	s := make(map[string]any)
	kinds := []string{"null", "boolean", "integer", "number", "string", "array", "object"}
	switch g.IntN(4) {
	case 0:
		s["type"] = g.pick(kinds...)
	case 1:
		g.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		s["type"] = kinds[:1+g.IntN(4)]
	}
	for range g.IntN(4) {
		switch g.IntN(12) {
		case 0:
			s["enum"] = []any{g.scalar(), g.scalar(), g.scalar()}
		case 1:
			if g.IntN(3) == 0 {
				s["const"] = g.scalar()
			}
		case 2:
			s[g.pick("minimum", "exclusiveMinimum")] = []any{0, 1, -1, 0.5, json.Number("1.0")}[g.IntN(5)]
		case 3:
			s[g.pick("maximum", "exclusiveMaximum")] = []any{2, 10, 2.5, json.Number("1e1")}[g.IntN(4)]
		case 4:
			s["multipleOf"] = 1 + g.IntN(3)
		case 5:
			s["minLength"] = g.IntN(3)
		case 6:
			s["maxLength"] = g.IntN(4)
		case 7:
			s[g.pick("minItems", "maxItems")] = g.IntN(3)
		case 8:
			if depth > 0 {
				s["items"] = g.schema(depth - 1)
			}
		case 9, 10:
			if depth > 0 {
				properties := make(map[string]any)
				for range 1 + g.IntN(3) {
					properties[g.pick("a", "b", "c", "d/e")] = g.schema(depth - 1)
				}
				s["properties"] = properties
			}
		case 11:
			s["required"] = []string{g.pick("a", "b", "c")}
		}
	}
	for range g.IntN(2+2*g.rare) * g.rare {
		g.rarely(s, depth-1)
	}
	switch {
	case g.IntN(6) == 0:
		s["additionalProperties"] = false
	case depth > 0 && g.IntN(6) == 0:
		s["additionalProperties"] = g.schema(depth - 1)
	}
	return s
}

// rarely adds a keyword that programs do not know.
func (g generator) rarely(s map[string]any, depth int) {
	if depth < 0 {
		return
	}
	names := func() []any { return []any{g.pick("a", "b"), g.pick("c", "x")} }
	list := func() []any { return []any{g.schema(depth), g.schema(depth)} }
	switch keyword := g.pick("allOf", "anyOf", "oneOf", "not", "if", "contains", "uniqueItems", "prefixItems", "patternProperties", "propertyNames",
		"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "multipleOf", "pattern", "$ref", "$dynamicRef"); keyword {
	case "allOf", "anyOf", "oneOf", "prefixItems":
		s[keyword] = list()
	case "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties":
		s[keyword] = g.schema(depth)
	case "if":
		s["if"], s["then"], s["else"] = g.schema(depth), g.schema(depth), g.schema(depth)
	case "contains":
		s["contains"], s[g.pick("minContains", "maxContains")] = g.schema(depth), g.IntN(3)
	case "uniqueItems":
		s[keyword] = true
	case "minProperties", "maxProperties":
		s[keyword] = g.IntN(3)
	case "patternProperties":
		s[keyword] = map[string]any{g.pick("^a", "b|c", ""): g.schema(depth)}
	case "dependentRequired":
		s[keyword] = map[string]any{g.pick("a", "b"): names()}
	case "dependentSchemas":
		s[keyword] = map[string]any{g.pick("a", "b"): g.schema(depth)}
	case "multipleOf":
		s[keyword] = json.Number(g.pick("0.5", "1.5", "2", "1e1"))
	case "pattern":
		s[keyword] = g.pick("^a", "b$", "ä")
	case "$ref", "$dynamicRef":
		// The elements of the list are what the schema around it says, or lists.
		id := "https://example.com/" + strconv.Itoa(g.IntN(1<<30))
		s["$id"], s["$ref"] = id, id+"/list"
		s["$defs"] = map[string]any{
			"element": map[string]any{g.pick("$anchor", "$dynamicAnchor"): "element", "type": g.pick("string", "number")},
			"list":    map[string]any{"$id": id + "/list", "$dynamicAnchor": "element", "items": map[string]any{keyword: "#element"}},
		}
	}
}

func (g generator) document(depth int) string {
	blank := g.pick("", "", "", " ", "\n\t")
	kind := g.IntN(8)
	if depth == 0 {
		kind = g.IntN(6)
	}
	switch kind {
	case 0:
		return g.pick("null", "true", "false") + blank
	case 1, 2:
		return g.pick("0", "1", "-1", "2.5", "10", "1.0", "1e1", "-0", "0.5", "3", "1E400", "12345678901234567", "2.50000000000000001", "-0.0") + blank
	case 3, 4, 5:
		return g.pick(`""`, `"a"`, `"ab"`, `"ä"`, `"a\"b"`, `"\u0061"`, `"\ud83d\ude00"`, `"😀"`, `"abcd"`) + blank
	case 6:
		items := make([]string, g.IntN(4))
		for i := range items {
			items[i] = g.document(depth - 1)
		}
		return "[" + blank + strings.Join(items, ","+blank) + "]" + blank
	default:
		members := make([]string, g.IntN(4))
		for i := range members {
			members[i] = g.pick(`"a"`, `"b"`, `"c"`, `"d/e"`, `"\u0061"`, `"x"`) + blank + ":" + blank + g.document(depth-1)
		}
		return "{" + blank + strings.Join(members, ","+blank) + "}" + blank
	}
}

// Numbers that the library could not compute with are compared all the same, in a short time.
func TestAbsurdNumbers(t *testing.T) {
	t.Parallel()
	many := "[" + strings.Repeat("1e1000000,", 100_000) + "1]"
	for _, test := range []struct {
		schema, doc, want string
	}{
		{`{"minimum":0}`, `0E10000000000000000000`, ""},
		{`{"minimum":0}`, `-1E10000000000000000000`, ": minimum"},
		{`{"maximum":1e400}`, `1e999999999`, ": maximum"},
		{`{"maximum":1e400}`, `9e399`, ""},
		{`{"exclusiveMinimum":0}`, `1e-99999999999999999999`, ""},
		{`{"exclusiveMinimum":0}`, `0.0e-99999999999999999999`, ": exclusiveMinimum"},
		{`{"type":"integer"}`, `1e1000000000`, ""},
		{`{"type":"integer"}`, `1e-1000000000`, ": type"},
		{`{"maximum":1,"pattern":"x"}`, strings.Repeat("9", 500_000), ": maximum"},
		{`{"items":{"multipleOf":0.5,"pattern":"x"}}`, many, ""},
		{`{"properties":{"x":{"minimum":0.5}}}`, `{"x":0.5` + strings.Repeat("1", 1_000_010) + `}`, ""},
		{`{"properties":{"x":{"maximum":0.5}}}`, `{"x":0.5` + strings.Repeat("0", 1_000_010) + `1}`, "/x: maximum"},
		{`{"properties":{"x":{"maximum":0.5}}}`, `{"x":0.5` + strings.Repeat("0", 1_000_010) + `}`, ""},
		{`{"type":"integer","pattern":"x"}`, `3.` + strings.Repeat("0", 1_000_010) + `1`, ": type"},
		{`{"type":"integer","pattern":"x"}`, `3.` + strings.Repeat("0", 1_000_010), ""},
		{`{"type":"integer","pattern":"x"}`, `0.0003` + strings.Repeat("0", 500_000) + `e4`, ""},
	} {
		began := time.Now()
		got := ""
		if v := compile(t, test.schema).Validate([]byte(test.doc)); v != nil {
			got = v.String()
		}
		if got != test.want {
			t.Errorf("%s of %.40s: %q, want %q", test.schema, test.doc, got, test.want)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s of %.40s: took %v", test.schema, test.doc, took)
		}
	}
	for _, text := range []string{`{"minimum":1e401}`, `{"enum":[{"a":-1e-500}]}`, `{"const":1e99999999999}`, `{"minimum":0.1` + strings.Repeat("1", 1_000) + `}`} {
		if _, err := Compile([]byte(text)); err == nil || !strings.Contains(err.Error(), "has a number beyond 1e400") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Patterns are bounded by what they take once they are compiled.
func TestPatternsAreBounded(t *testing.T) {
	t.Parallel()
	var list []string
	for i := range 10 {
		list = append(list, fmt.Sprintf(`"a{1000}%d":true`, i))
	}
	for _, text := range []string{`{"patternProperties":{` + strings.Join(list, ",") + `}}`, `{"items":{"pattern":"^((a{100}){100})$"}}`} {
		if _, err := Compile([]byte(text)); err == nil || !strings.Contains(err.Error(), "more than 4000 instructions") && !strings.Contains(err.Error(), "pattern") {
			t.Errorf("%s: %v", text, err)
		}
	}
	s := compile(t, `{"items":{"pattern":"^[a-z]{1,500}[0-9]{1,500}x?$"}}`)
	if v := s.Validate([]byte(`["` + strings.Repeat("a", 400) + `1"]`)); v != nil {
		t.Error(v)
	}
	if v := s.Validate([]byte(`["` + strings.Repeat("a", 1<<20) + `"]`)); v == nil || v.String() != ": pattern" {
		t.Error(v)
	}
}

// A payload of many values does not meet a schema that asks much of each.
func TestVisitsAreBounded(t *testing.T) {
	t.Parallel()
	const refs, steps = 5_000, 9_000
	s := compile(t, `{"items":{"allOf":[`+strings.Repeat(`{"$ref":"#/$defs/n"},`, refs)+`{}]},"$defs":{"n":{"type":"number"}}}`)
	few := []byte("[0,0,0]")
	if v := s.Validate(few); v != nil {
		t.Error(v)
	}
	if v := s.Validate([]byte("[" + strings.Repeat("0,", maxSteps/refs) + "0]")); v == nil || v.String() != ": size" {
		t.Error(v)
	}
	// Here a visit counts much.
	var names []string
	for i := range steps {
		names = append(names, strconv.Quote(strconv.Itoa(i)))
	}
	s = compile(t, `{"items":{"not":{"required":[`+strings.Join(names, ",")+`]}}}`)
	const values = maxSteps / (steps / 2)
	if v := s.Validate([]byte("[" + strings.Repeat("{},", values/2) + "{}]")); v != nil {
		t.Error(v)
	}
	if v := s.Validate([]byte("[" + strings.Repeat("{},", values) + "{}]")); v == nil || v.String() != ": size" {
		t.Error(v)
	}
}

// A payload that breaks a schema in many places costs no more than one that breaks it once.
func TestInvalidPayloadsAreBounded(t *testing.T) { //nolint:paralleltest // it counts what is allocated
	names := func(n int) string {
		var all []string
		for i := range n {
			all = append(all, strconv.Quote(fmt.Sprint("name", i)))
		}
		return strings.Join(all, ",")
	}
	list := func(element string, n int) string { return "[" + strings.Repeat(element+",", n-1) + element + "]" }
	for _, c := range []struct{ name, schema, doc, want string }{
		{"types", `{"type":"array","items":{"type":"string"}}`, list("1", 100_000), "/0: type"},
		{"the last one", `{"type":"array","items":{"type":"number"}}`, "[" + strings.Repeat("1,", 60_000) + `"a"]`, "/60000: type"},
		{"required", `{"items":{"required":[` + names(20) + `]}}`, list("{}", 60_000), "/0: required"},
		{"allOf", `{"items":{"allOf":` + list(`{"type":"string"}`, 1_000) + `}}`, list("1", 300), "/0: type"},
		{"anyOf", `{"items":{"anyOf":` + list(`{"type":"string"}`, 1_000) + `}}`, list("1", 60_000), "/0: anyOf"},
		{"oneOf", `{"oneOf":` + list(`{"items":{"type":"string"}}`, 1_000) + `}`, list("1", 60_000), ": oneOf"},
		{"many required", `{"items":{"required":[` + names(9_000) + `]}}`, list("{}", 300), "/0: required"},
		{"enum", `{"items":{"enum":[` + names(9_000) + `]}}`, list(`"other"`, 18_000), "/0: enum"},
		{"contains", `{"contains":{"type":"string"}}`, list("1", 60_000), ": contains"},
		{"not", `{"not":{"items":{"type":"number"}}}`, list("1", 60_000), ": not"},
		{"if", `{"if":{"items":{"type":"number"}},"then":{"maxItems":3}}`, list("1", 60_000), ": maxItems"},
		{"members", `{"properties":{"a":{"items":{"properties":{"b/c":{"$ref":"#/$defs/n"}}}}},"$defs":{"n":{"type":"null"}}}`, `{"a":` + list(`{"b/c":1}`, 18_000) + `}`, "/a/0/b~1c: type"},
		{"undeclared", `{"items":{"additionalProperties":{"type":"null"}}}`, list(`{"b":1}`, 18_000), "/0/b: type"},
		{"unevaluated", `{"items":{"unevaluatedProperties":false}}`, list(`{"b":1}`, 18_000), "/0/b: false"},
		{"much that is unevaluated", `{"items":{"allOf":` + list(`{"type":"object"}`, 1_000) + `,"unevaluatedProperties":false}}`, list(`{"b":1}`, 18_000), "/0/b: false"},
	} {
		s := compile(t, c.schema)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		v := s.Validate([]byte(c.doc))
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		if v == nil || v.String() != c.want {
			t.Errorf("%s: %v, want %s", c.name, v, c.want)
		}
		// Most is for the values of a payload, and short-lived.
		most := 600*uint64(len(c.doc)) + 5<<20
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > most {
			t.Errorf("%s: %d bytes were allocated for a payload of %d, at most %d are wanted", c.name, allocated, len(c.doc), most)
		}
		if took > 30*time.Second {
			t.Errorf("%s took %v", c.name, took)
		}
		t.Logf("%s: %v, %d KiB for %d KiB, %v", c.name, v, (after.TotalAlloc-before.TotalAlloc)>>10, len(c.doc)>>10, took)
	}
}

// A large payload that is valid is taken, whatever its schema asks of it.
func TestLargePayloads(t *testing.T) {
	t.Parallel()
	s := compile(t, `{"$id":"https://example.com/list","anyOf":[{"type":"null"},{"type":"array","items":{"if":{"required":["a"]},"then":{"properties":{"a":{"type":"number"}}},"else":{"$ref":"#/$defs/b"}},
		"contains":{"required":["b"]},"minContains":1,"maxContains":1}],"$defs":{"b":{"dependentSchemas":{"b":{"propertyNames":{"maxLength":1}}}}}}`)
	if v := s.Validate([]byte("[" + strings.Repeat(`{"a":1},`, 100_000) + `{"b":2}]`)); v != nil {
		t.Error(v)
	}
	u := compile(t, `{"items":{"$ref":"#/$defs/b"},"unevaluatedItems":false,"$defs":{"b":{"properties":{"a":{}},"unevaluatedProperties":false}}}`)
	if v := u.Validate([]byte("[" + strings.Repeat(`{"a":1},`, 100_000) + `{}]`)); v != nil {
		t.Error(v)
	}
	if v := s.Validate([]byte("[" + strings.Repeat(`{"a":1},`, 20_000) + `{"bb":2,"b":1}]`)); v == nil || v.String() != ": anyOf" {
		t.Error(v)
	}
}

// A program takes nothing that the library refuses.
func FuzzSubsetAgrees(f *testing.F) {
	f.Add([]byte(orderSchema), []byte(orderText))
	for seed := range uint64(40) {
		g := generator{rand.New(rand.NewPCG(seed, 2)), int(seed % 2)}
		text, _ := json.Marshal(g.schema(3))
		f.Add(text, []byte(g.document(3)))
	}
	f.Fuzz(func(t *testing.T, text, doc []byte) {
		s, err := Compile(text)
		if err != nil {
			return
		}
		agree(t, s, byLibrary(t, string(text)), string(text), doc)
		if v := s.Validate(doc); v != nil && len(v.Pointer) > maxPointer {
			t.Errorf("a pointer has %d bytes", len(v.Pointer))
		}
	})
}

func BenchmarkValidate(b *testing.B) {
	s, doc := compile(b, orderSchema), []byte(orderText)
	b.Run("program", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if s.Validate(doc) != nil {
				b.Fatal("invalid")
			}
		}
	})
	b.Run("judge", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if s.judge(doc, nil) != nil {
				b.Fatal("invalid")
			}
		}
	})
	b.Run("encoding/json.Valid", func(b *testing.B) {
		for b.Loop() {
			if !json.Valid(doc) {
				b.Fatal("invalid")
			}
		}
	})
}

func ExampleSchema_Validate() {
	s, err := Compile([]byte(`{"type":"object","required":["host"],"properties":{"cpu":{"type":"number","minimum":0}}}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(s.Validate([]byte(`{"host":"a","cpu":0.5}`)) == nil)
	fmt.Println(s.Validate([]byte(`{"host":"a","cpu":-1}`)))
	// Output:
	// true
	// /cpu: minimum
}

// BenchmarkFallback validates an event of `eventhub bench schema` by the library.
func BenchmarkFallback(b *testing.B) {
	s := compile(b, `{"type":"object","required":["seq","at"],"additionalProperties":false,"properties":{"seq":{"type":"string","minLength":10,"maxLength":10},"at":{"type":"string","maxLength":15},"pid":{"type":"integer","minimum":1},"name":{"type":"string","maxLength":64},"host":{"type":"string","maxLength":253},"cpu_pct":{"type":"number","minimum":0,"maximum":100},"mem_mb":{"type":"integer","minimum":0},"pad":{"type":"string","maxLength":4194304,"pattern":"^x*$"}}}`)
	doc := []byte(`{"seq":"0000000042","at":"000000000000007","pid":12345,"name":"stt","host":"dev","cpu_pct":12.3,"mem_mb":256,"pad":"` + strings.Repeat("x", 150) + `"}`)
	b.ReportAllocs()
	for b.Loop() {
		if s.Validate(doc) != nil {
			b.Fatal("invalid")
		}
	}
}
