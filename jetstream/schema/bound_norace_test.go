//go:build !race

package schema

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The long form:
//
//	go test ./jetstream/schema -run TestEveryKeywordIsBounded -schema.payload 1048576
var payload = flag.Int("schema.payload", 1<<17, "about how many bytes the payloads of TestEveryKeywordIsBounded have")

// nested is a text within n levels of others.
func nested(n int, open, text, end string) string {
	return strings.Repeat(open, n) + text + strings.Repeat(end, n)
}

// chain is n definitions after the one named 0, of which each refers to the next one.
func chain(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `"%d":{"$ref":"#/$defs/%d"},`, i, i+1)
	}
	return b.String() + `"` + strconv.Itoa(n) + `":true`
}

func fixed(text string) func(int) string { return func(int) string { return text } }

// list and object have an element for each of some bytes, or a member for each 16.
func list(each int, element string) func(int) string {
	return func(n int) string { return "[" + repeated(n/each, element) + "]" }
}

func object(member string) func(int) string {
	return func(n int) string { return "{" + repeated(n/16, member) + "}" }
}

// deep is as many levels as a payload may have, or nearly.
func deep(open string) func(int) string {
	return func(n int) string { return nested(min(n, 9_000), open, "0", "]") }
}

type hostileCase struct {
	keyword         string
	schema, payload func(n int) string
}

// hostile has schemas and payloads that ask as much as possible of a keyword. Both grow with n.
var hostile = []hostileCase{
	{"type", fixed(`{"items":{"type":["integer","null"]}}`), list(6, `1.5e0`)},
	{"type", fixed(`{"type":"integer"}`), func(n int) string { return "1." + strings.Repeat("0", n) + "1" }},
	{"enum", func(n int) string { return `{"items":{"enum":[` + repeated(min(n, 20_000), "#.5") + `]}}` }, list(2, "0.25e1")},
	{"enum", fixed(`{"items":{"anyOf":[` + repeated(60, `{"enum":[#,{"a":[1]}]}`) + `]}}`), list(16, `{"a":[1.0]}`)},
	{"enum", fixed(`{"$defs":{"a":{"items":{"$ref":"#/$defs/a"},"not":{"enum":[0]}}},"$ref":"#/$defs/a"}`), deep("[")},
	{"const", func(n int) string { return `{"items":{"const":{"a":[` + repeated(min(n, 20_000), "#") + `]}}}` }, func(n int) string { return "[" + repeated(20, `{"a":[`+repeated(n/20/7, "#.0")+`]}`) + "]" }},
	{"uniqueItems", fixed(`{"uniqueItems":true}`), list(8, "#")},
	{"uniqueItems", fixed(`{"uniqueItems":true}`), list(32, "[[[[],[]],[[],[]]],[#]]")},
	{"uniqueItems", fixed(`{"uniqueItems":true}`), func(n int) string { return "[" + repeated(20, "["+strings.Repeat("0,", n/40)+"#]") + "]" }},
	{"uniqueItems", fixed(`{"$defs":{"a":{"uniqueItems":true,"items":{"$ref":"#/$defs/a"}}},"$ref":"#/$defs/a"}`), deep("[0,")},
	{"minimum", fixed(`{"items":{"minimum":1.5}}`), list(8, "10.25e9")},
	{"maximum", fixed(`{"maximum":` + strings.Repeat("9", 400) + `.5}`), func(n int) string { return strings.Repeat("9", n) }},
	{"exclusiveMinimum", fixed(`{"items":{"exclusiveMinimum":1e-400}}`), list(8, "1e-9999")},
	{"exclusiveMaximum", fixed(`{"items":{"exclusiveMaximum":1e400}}`), list(8, "1e99999")},
	{"multipleOf", fixed(`{"items":{"multipleOf":0.7}}`), list(16, "7e999999999")},
	{"multipleOf", fixed(`{"items":{"multipleOf":0.` + strings.Repeat("7", 900) + `}}`), list(16, "7e999999999")},
	{"multipleOf", fixed(`{"multipleOf":0.` + strings.Repeat("7", 900) + `}`), func(n int) string { return strings.Repeat("7", n) }},
	{"minLength", fixed(`{"anyOf":[` + repeated(200, `{"minLength":9999999}`) + `]}`), func(n int) string { return `"` + strings.Repeat("ä", n/2) + `"` }},
	{"maxLength", fixed(`{"anyOf":[` + repeated(200, `{"maxLength":1}`) + `]}`), func(n int) string { return `"` + strings.Repeat("ä", n/2) + `"` }},
	{"pattern", fixed(`{"items":{"pattern":"(x?){500}y"}}`), list(16, `"xxxxxxxxxxxxxx"`)},
	{"pattern", fixed(`{"pattern":"(x+x+)+y"}`), func(n int) string { return `"` + strings.Repeat("x", n) + `"` }},
	{"pattern", fixed(`{"items":{"pattern":"x{0,900}y"}}`), func(n int) string { return "[" + repeated(n/1_000, `"`+strings.Repeat("x", 1_000)+`"`) + "]" }},
	{"patternProperties", fixed(`{"patternProperties":{` + repeated(200, `"^(a|b)*#$":false`) + `}}`), object(`"abab#":1`)},
	{"minProperties", fixed(`{"items":{"minProperties":2}}`), list(8, `{"a":0}`)},
	{"maxProperties", fixed(`{"items":{"maxProperties":0}}`), list(8, `{"a":0}`)},
	{"required", fixed(`{"anyOf":[` + repeated(20, `{"required":[`+repeated(1_000, `"a#"`)+`,"z"]}`) + `]}`), object(`"a#":0`)},
	{"required", fixed(`{"required":[` + repeated(200, `"`+strings.Repeat("x", 1_000)+`#"`) + `]}`), func(n int) string { return "{" + repeated(n/1_000, `"`+strings.Repeat("x", 1_000)+`#":0`) + "}" }},
	{"required", func(n int) string {
		return `{"items":{"not":{"required":[` + repeated(min(n/16, 9_000), `"a#"`) + `]}}}`
	}, list(4, `{}`)},
	{"dependentRequired", func(n int) string {
		return `{"items":{"dependentRequired":{` + repeated(min(n/64, 4_000), `"a#":["b"]`) + `}}}`
	}, list(8, `{"c":0}`)},
	{"dependentSchemas", func(n int) string {
		return `{"items":{"dependentSchemas":{` + repeated(min(n/64, 4_000), `"a#":{"minProperties":1}`) + `}}}`
	}, list(8, `{"a1":0}`)},
	{"properties", fixed(`{"anyOf":[` + repeated(61, `{"properties":{"z":false,"b#":{}}}`) + `]}`), func(n int) string { return "{" + repeated(n/16, `"b#":0`) + `,"z":0}` }},
	{"additionalProperties", fixed(`{"allOf":[` + repeated(61, `{"additionalProperties":false}`) + `]}`), object(`"b#":0`)},
	{"propertyNames", fixed(`{"allOf":[` + repeated(61, `{"propertyNames":{"maxLength":1}}`) + `]}`), object(`"b#":0`)},
	{"minItems", fixed(`{"items":{"minItems":1}}`), list(3, `[]`)},
	{"maxItems", fixed(`{"items":{"maxItems":0}}`), list(4, `[0]`)},
	{"prefixItems", func(n int) string { return `{"prefixItems":[` + repeated(min(n/64, 4_000), `{"type":"null"}`) + `]}` }, list(2, `0`)},
	{"items", fixed(`{"oneOf":[` + repeated(61, `{"items":{"type":"null"}}`) + `]}`), func(n int) string { return "[" + strings.Repeat("null,", n/8) + `0]` }},
	{"contains", fixed(`{"allOf":[` + repeated(61, `{"contains":{"type":"null"}}`) + `]}`), list(2, "0")},
	{"minContains", fixed(`{"contains":{"not":{"type":"null"}},"minContains":9999999}`), list(2, "0")},
	{"maxContains", fixed(`{"contains":{"type":"integer"},"maxContains":0}`), list(2, "0")},
	{"allOf", func(n int) string { return `{"items":{"allOf":[` + repeated(min(n/64, 4_000), `{"minimum":#}`) + `]}}` }, list(8, "1234567")},
	{"anyOf", fixed(`{"anyOf":[` + repeated(61, `{"items":{"type":"integer"},"contains":{"type":"null"}}`) + `]}`), list(2, "0")},
	{"oneOf", fixed(`{"items":{"oneOf":[` + repeated(61, `{"const":#}`) + `]}}`), list(8, "#")},
	{"not", fixed(nested(30, `{"not":`, `{"items":{"not":{"type":"null"}}}`, "}")), list(2, "0")},
	{"if", fixed(nested(30, `{"if":{"minItems":1},"then":`, `{"items":{"type":"null"}}`, "}")), list(2, "0")},
	{"then", fixed(`{"items":{"if":{"type":"integer"},"then":{"if":true,"then":{"type":"null"}}}}`), list(2, "0")},
	{"else", fixed(`{"items":{"if":false,"else":{"if":false,"else":{"type":"null"}}}}`), list(2, "0")},
	{"unevaluatedItems", fixed(`{"allOf":[` + repeated(61, `{"contains":{"type":"null"},"minContains":0,"unevaluatedItems":true}`) + `],"unevaluatedItems":false}`), list(2, "0")},
	{"unevaluatedProperties", fixed(`{"anyOf":[` + repeated(400, `{"properties":{"b#":{}}}`) + `],"unevaluatedProperties":false}`), object(`"b#":0`)},
	{"unevaluatedProperties", fixed(`{"anyOf":[` + repeated(4_000, `{}`) + `],"unevaluatedProperties":false}`), object(`"b#":0`)},
	{"$ref", fixed(`{"$defs":{"a":{"items":{"$ref":"#/$defs/a"},"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/b"}]},"b":{"anyOf":[{"minItems":99},{"$ref":"#/$defs/c"}]},"c":{"items":{"$ref":"#/$defs/a"}}},"$ref":"#/$defs/a"}`), deep("[")},
	{"$ref", fixed(`{"allOf":[{"$ref":"#"},{"$ref":"#"},{"items":{"$ref":"#"}}]}`), list(2, "0")},
	{"$ref", fixed(`{"$ref":"#/$defs/0","items":{"$ref":"#"},"$defs":{` + chain(2_000) + `}}`), deep("[")},
	{"$dynamicRef", fixed(`{"$dynamicAnchor":"a","items":{"allOf":[{"$dynamicRef":"#a"},{"$dynamicRef":"#a"}]}}`), deep("[")},
	{"$dynamicRef", fixed(`{"$ref":"https://example.com/b","$defs":{"b":{"$id":"https://example.com/b","$dynamicAnchor":"a","items":{"$dynamicRef":"#a"}}}}`), deep("[")},
}

// workless are keywords that ask nothing of a payload.
var workless = []string{"$id", "$schema", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment", "$defs"}

// Whatever keywords a schema has, and however large a payload is, judging it takes no longer than
// the documented number of steps does.
func TestEveryKeywordIsBounded(t *testing.T) { //nolint:paralleltest // it measures times
	for _, vocabulary := range []string{"core", "applicator", "unevaluated", "validation"} {
		for keyword := range byLibrary(t, `{"$ref":"https://json-schema.org/draft/2020-12/meta/`+vocabulary+`"}`).Ref.Properties {
			if !slices.Contains(workless, keyword) && !slices.ContainsFunc(hostile, func(h hostileCase) bool { return h.keyword == keyword }) {
				t.Errorf("%s is not tried", keyword)
			}
		}
	}
	plain := compile(t, `{"allOf":[`+repeated(61, `{"items":{"type":"integer"}}`)+`]}`)
	zeros := []byte("[" + repeated(*payload/2, "0") + "]")
	bound := max(10*fastest(1, 0, func() { plain.judge(zeros, nil) }), 50*time.Millisecond)
	for i, h := range hostile {
		s := compile(t, h.schema(*payload))
		doc := []byte(h.payload(*payload))
		if took := fastest(3, bound, func() { s.Validate(doc) }); took > bound {
			t.Errorf("%s (%d) took %v for %d KiB, at most %v are wanted", h.keyword, i, took, len(doc)>>10, bound)
		}
	}
}

// fastest returns the shortest time that a function takes of several, until one is short enough.
func fastest(tries int, enough time.Duration, f func()) time.Duration {
	least := time.Duration(math.MaxInt64)
	for range tries {
		began := time.Now()
		f()
		if least = min(least, time.Since(began)); least <= enough {
			break
		}
	}
	return least
}
