package compat

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/schema"
	"eventhub/jetstream/schema/upcast"
)

// The long form:
//
//	go test ./jetstream/schema/compat -run TestIncludesIsSafe -compat.schemas 4000 -timeout 30m
var schemas = flag.Int("compat.schemas", 700, "how many random schemas TestIncludesIsSafe compares with changed ones")

// rows are the tables of README.md, by the number of their columns.
func rows(tb testing.TB, columns int) (all [][]string) {
	tb.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|--") || len(cells) != columns {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		all = append(all, cells)
	}
	return all[1:]
}

// caster makes an up-caster of what a comparison fills in and drops.
func caster(tb testing.TB, r *Report) *upcast.Chain {
	tb.Helper()
	operations := r.Operations()
	if operations == nil {
		return upcast.NewChain(1, nil)
	}
	k, err := upcast.Compile(operations, nil)
	if err != nil {
		tb.Fatalf("%s: %v", operations, err)
	}
	return upcast.NewChain(1, k)
}

// refused looks for a document of the writer that the reader refuses once it is cast.
func refused(tb testing.TB, reader, writer []byte, r *Report, tries int, lenient bool) []byte {
	tb.Helper()
	compiled, err := schema.Compile(reader)
	if err != nil {
		tb.Fatalf("%s: %v", reader, err)
	}
	var names []string
	if !lenient {
		if names, err = Names(reader); err != nil {
			tb.Fatal(err)
		}
	}
	g, err := NewGenerator(writer, 1, names...)
	if err != nil {
		tb.Fatal(err)
	}
	chain := caster(tb, r)
	for range tries {
		doc, ok := g.Next()
		if !ok {
			continue
		}
		cast, err := chain.Cast(context.Background(), doc, 1, 2)
		if err != nil || compiled.Validate(cast) != nil {
			return doc
		}
	}
	return nil
}

// verdict tries what a cell of a table says of a reader and a writer.
func verdict(t *testing.T, cell, reader, writer string, lenient bool) {
	t.Helper()
	r, err := Includes([]byte(reader), []byte(writer), lenient)
	if err != nil {
		t.Fatal(err)
	}
	answer, rule, _ := strings.Cut(cell, ": ")
	rule = strings.Trim(rule, "`")
	has := func(unknown bool) bool {
		return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Rule == rule && f.Unknown == unknown })
	}
	switch answer {
	case "yes":
		if len(r.Findings) > 0 {
			t.Errorf("reader %s, writer %s: found %v, want none", reader, writer, r.Findings)
		}
		if doc := refused(t, []byte(reader), []byte(writer), r, 500, lenient); doc != nil {
			t.Errorf("reader %s refuses %s of the writer %s", reader, doc, writer)
		}
	case "no":
		if !has(false) {
			t.Errorf("reader %s, writer %s: found %v, want %s", reader, writer, r.Findings, rule)
		}
		if refused(t, []byte(reader), []byte(writer), r, 3_000, false) == nil {
			t.Errorf("reader %s, writer %s: no document was found that shows %s", reader, writer, rule)
		}
	case "unknown":
		if !has(true) {
			t.Errorf("reader %s, writer %s: found %v, want %s, unknown", reader, writer, r.Findings, rule)
		}
	default:
		t.Errorf("the table says %q", cell)
	}
	for _, f := range r.Findings {
		if Rules[f.Rule] == "" {
			t.Errorf("%s is not in Rules", f.Rule)
		}
	}
}

// TestTable tries each row of the tables of README.md.
func TestTable(t *testing.T) {
	t.Parallel()
	models, others := rows(t, 5), rows(t, 4)
	if len(models) != 12 || len(others) < 40 {
		t.Fatalf("%d and %d rows", len(models), len(others))
	}
	for _, row := range models {
		t.Run(strings.Join(row[:3], ","), func(t *testing.T) {
			t.Parallel()
			without := map[string]any{"type": "object", "properties": map[string]any{"k": map[string]any{"type": "integer"}}, "required": []string{"k"}}
			member := map[string]any{"type": "string"}
			if row[2] == "required, with a default" {
				member["default"] = "x"
			}
			with := map[string]any{"type": "object", "properties": map[string]any{"k": map[string]any{"type": "integer"}, "a": member}, "required": []string{"k", "a"}}
			if row[2] == "optional" {
				with["required"] = []string{"k"}
			}
			if row[0] == "closed" {
				without["additionalProperties"], with["additionalProperties"] = false, false
			}
			older, newer := text(t, without), text(t, with)
			if row[1] == "removed" {
				older, newer = newer, older
			}
			verdict(t, row[3], newer, older, false)
			verdict(t, row[4], newer, older, true)
		})
	}
	for _, row := range others {
		older, newer := strings.Trim(row[0], "`"), strings.Trim(row[1], "`")
		t.Run(older+" "+newer, func(t *testing.T) {
			t.Parallel()
			verdict(t, row[2], newer, older, false)
			verdict(t, row[3], older, newer, false)
		})
	}
}

func text(tb testing.TB, v any) string {
	tb.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		tb.Fatal(err)
	}
	return string(b)
}

// randomSchema makes a schema of keywords that meet each other.
func randomSchema(r *rand.Rand, depth int) any {
	if depth > 3 || r.IntN(12) == 0 {
		return r.IntN(8) > 0
	}
	m := map[string]any{}
	names := []string{"a", "b", "c"}
	kinds := []any{"string", "integer", "number", "object", "array", "boolean", "null"}
	some := func(n int) bool { return r.IntN(n) == 0 }
	if !some(4) {
		m["type"] = kinds[r.IntN(len(kinds))]
		if some(5) {
			m["type"] = []any{kinds[r.IntN(3)], kinds[3+r.IntN(4)]}
		}
	}
	if some(8) {
		m["enum"] = []any{1, "x", nil, 2.5, []any{}, map[string]any{"a": 1}}[:1+r.IntN(6)]
	}
	for keyword, most := range map[string]int{
		"minimum": 3, "maximum": 6, "exclusiveMinimum": 3, "exclusiveMaximum": 6, "multipleOf": 4, "minLength": 3, "maxLength": 8,
		"minItems": 3, "maxItems": 5, "minProperties": 3, "maxProperties": 5,
	} {
		if some(12) {
			m[keyword] = r.IntN(most) + 1
		}
	}
	if some(3) {
		p := map[string]any{}
		for range 1 + r.IntN(3) {
			p[names[r.IntN(3)]] = randomSchema(r, depth+1)
		}
		m["properties"] = p
	}
	if some(4) {
		m["required"] = names[:1+r.IntN(2)]
	}
	if some(4) {
		m["additionalProperties"] = randomSchema(r, depth+2)
	}
	if some(14) {
		m["patternProperties"] = map[string]any{[]string{"^a", "b"}[r.IntN(2)]: randomSchema(r, depth+1)}
	}
	if some(6) {
		m["items"] = randomSchema(r, depth+1)
	}
	if some(10) {
		m["prefixItems"] = []any{randomSchema(r, depth+1)}
	}
	if some(14) {
		m["uniqueItems"] = true
	}
	for _, keyword := range []string{"anyOf", "oneOf", "allOf"} {
		if some(10) {
			m[keyword] = []any{randomSchema(r, depth+1), randomSchema(r, depth+1)}
		}
	}
	for _, keyword := range []string{"not", "if", "contains", "propertyNames"} {
		if some(25) {
			m[keyword] = randomSchema(r, depth+2)
		}
	}
	if some(14) {
		m["dependentRequired"] = map[string]any{"a": []any{"b"}}
	}
	if some(20) {
		m["$ref"] = "#/$defs/d"
	}
	return m
}

// mutated changes one thing somewhere in a schema.
func mutated(r *rand.Rand, v any) any {
	m, is := v.(map[string]any)
	if !is || len(m) == 0 {
		return randomSchema(r, 2)
	}
	changed := make(map[string]any, len(m))
	keys := make([]string, 0, len(m))
	for k, v := range m {
		changed[k] = v
		keys = append(keys, k)
	}
	slices.Sort(keys)
	k := keys[r.IntN(len(keys))]
	switch value := m[k].(type) {
	case map[string]any:
		if k == "properties" || k == "patternProperties" {
			props := make(map[string]any, len(value))
			for name, v := range value {
				props[name] = mutated(r, v)
			}
			changed[k] = props
		} else if k != "dependentRequired" {
			changed[k] = mutated(r, value)
		}
	case int:
		changed[k] = max(value+r.IntN(3)-1, 1)
	default:
		delete(changed, k)
	}
	return changed
}

// TestIncludesIsSafe compares random schemas with changed ones. Whenever a reader is said to
// include a writer, no document of the writer is refused.
func TestIncludesIsSafe(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(7, 11))
	included, docs := 0, 0
	for range *schemas {
		def := randomSchema(r, 2)
		one, is := randomSchema(r, 0).(map[string]any)
		if !is {
			continue
		}
		other, is := mutated(r, one).(map[string]any)
		if !is {
			continue
		}
		one["$defs"], other["$defs"] = map[string]any{"d": def}, map[string]any{"d": def}
		n, m := check(t, text(t, one), text(t, other))
		included, docs = included+n, docs+m
	}
	t.Logf("%d readers include their writers; %d documents", included, docs)
	if included < *schemas/8 || docs < *schemas*5/4 {
		t.Errorf("%d readers include their writers, and there were %d documents", included, docs)
	}
}

// check tries documents of a writer, if the reader includes it.
func check(t *testing.T, reader, writer string) (included, docs int) {
	t.Helper()
	compiled, err := schema.Compile([]byte(reader))
	if err != nil {
		return 0, 0
	}
	if _, err := schema.Compile([]byte(writer)); err != nil {
		return 0, 0
	}
	report, err := Includes([]byte(reader), []byte(writer), false)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Findings) > 0 {
		return 0, 0
	}
	names, err := Names([]byte(reader))
	if err != nil {
		t.Fatal(err)
	}
	g, err := NewGenerator([]byte(writer), 3, names...)
	if err != nil {
		t.Fatal(err)
	}
	chain := caster(t, report)
	for range 20 {
		doc, ok := g.Next()
		if !ok {
			break
		}
		docs++
		cast, err := chain.Cast(context.Background(), doc, 1, 2)
		if err != nil {
			t.Errorf("%s cannot be cast: %v", doc, err)
		} else if v := compiled.Validate(cast); v != nil {
			t.Errorf("reader %s\nis said to include writer %s\nand refuses %s (%s)", reader, writer, cast, v)
		}
	}
	return 1, docs
}

// FuzzIncludes is TestIncludesIsSafe for schemas that a fuzzer finds.
func FuzzIncludes(f *testing.F) {
	for _, row := range rows(f, 4) {
		f.Add(strings.Trim(row[0], "`"), strings.Trim(row[1], "`"))
	}
	f.Fuzz(func(t *testing.T, reader, writer string) {
		if len(reader) < 2_000 && len(writer) < 2_000 {
			check(t, reader, writer)
		}
	})
}

// TestGenerator makes documents of a schema with many keywords: all are valid, and not all alike.
func TestGenerator(t *testing.T) {
	t.Parallel()
	text := []byte(`{"type":"object","required":["id","tags"],"properties":{"id":{"type":"string","pattern":"^[a-f]{4}-[0-9]+$"},
		"tags":{"type":"array","items":{"enum":["x","y"]},"minItems":1,"uniqueItems":true},"n":{"type":"number","exclusiveMinimum":0,"maximum":1},
		"step":{"type":"integer","multipleOf":5,"minimum":3},"next":{"$ref":"#"},"who":{"oneOf":[{"type":"string","minLength":2},{"type":"null"}]}},
		"additionalProperties":false,"dependentRequired":{"n":["step"]}}`)
	s, err := schema.Compile(text)
	if err != nil {
		t.Fatal(err)
	}
	g, err := NewGenerator(text, 5)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for range 300 {
		doc, ok := g.Next()
		if !ok {
			t.Fatal("no document")
		}
		if v := s.Validate(doc); v != nil {
			t.Fatalf("%s: %s", doc, v)
		}
		seen[string(doc)] = true
	}
	if len(seen) < 150 {
		t.Errorf("%d documents differ", len(seen))
	}
	again, err := NewGenerator(text, 5)
	if err != nil {
		t.Fatal(err)
	}
	if first, _ := again.Next(); !seen[string(first)] {
		t.Error("the same seed gives other documents")
	}
	if none, err := NewGenerator([]byte(`{"type":"string","minLength":5,"maxLength":4}`), 1); err != nil {
		t.Fatal(err)
	} else if doc, ok := none.Next(); ok {
		t.Errorf("%s is valid for a schema that has no documents", doc)
	}
}

// Documents of a large enum are made in a short time.
func TestGeneratorOfALargeEnum(t *testing.T) {
	t.Parallel()
	var numbers []string
	for i := range 10_000 {
		numbers = append(numbers, strconv.Itoa(i)+".5")
	}
	g, err := NewGenerator([]byte(`{"items":{"enum":[`+strings.Join(numbers, ",")+`]}}`), 1)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for range 5 {
		if text, ok := g.Next(); !ok {
			t.Error("there is no document")
		} else if took := time.Since(began); took > 20*time.Second {
			t.Fatalf("%s came after %v", text, took)
		}
	}
}

// TestModes tells the modes apart.
func TestModes(t *testing.T) {
	t.Parallel()
	var got []string
	for _, m := range Modes {
		got = append(got, fmt.Sprintf("%s %t %t %t %t", m, m.Backward(), m.Forward(), m.Transitive(), m.Valid()))
	}
	want := []string{
		"none false false false true", "backward true false false true", "backward_transitive true false true true",
		"forward false true false true", "forward_transitive false true true true", "full true true false true", "full_transitive true true true true",
	}
	if !slices.Equal(got, want) || Mode("other").Valid() {
		t.Errorf("%q", got)
	}
}

func ExampleIncludes() {
	older := `{"type":"object","properties":{"host":{"type":"string"}}}`
	newer := `{"type":"object","properties":{"host":{"type":"string","maxLength":63},"port":{"type":"integer"}}}`
	report, err := Includes([]byte(newer), []byte(older), false)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, f := range report.Findings {
		fmt.Println(f)
	}
	// Output:
	// /host: max_length_lowered
	// /port: property_added_to_open_content_model
}

// Schemas that refer to themselves many times are compared in a moment, changed or not.
func TestRecursionManyTimes(t *testing.T) {
	t.Parallel()
	tree := func(names int, more string) []byte {
		var members []string
		for i := range names {
			members = append(members, fmt.Sprintf(`"m%d":{"$ref":"#"},"n%d":{"$ref":"#/$defs/e"}`, i, i))
		}
		return fmt.Appendf(nil, `{"type":"object","properties":{%s},"$defs":{"e":{"type":"object","properties":{%s}}}%s}`,
			strings.Join(members, ","), strings.Join(members, ","), more)
	}
	for _, c := range []struct{ reader, writer []byte }{
		{tree(30, ""), tree(30, "")},
		{tree(30, `,"title":"new"`), tree(30, "")},
		{tree(30, `,"maxProperties":1000`), tree(30, "")},
		{tree(31, ""), tree(30, "")},
	} {
		began := time.Now()
		if _, err := Includes(c.reader, c.writer, false); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("took %v", took)
		}
		t.Log(time.Since(began))
	}
	if report, err := Includes(tree(30, ""), tree(30, ""), false); err != nil || len(report.Findings) > 0 {
		t.Errorf("%v, %v", report, err)
	}
}

// Operations touch only what they are made for.
func TestOperationsStayWithin(t *testing.T) {
	t.Parallel()
	const closed = `"additionalProperties":false`
	inner := func(types string) [2]string {
		return [2]string{
			`{"type":"object",` + closed + `,"properties":{"a":{"type":` + types + `,` + closed + `,"properties":{"c":{}}}}}`,
			`{"type":"object",` + closed + `,"properties":{"a":{"type":` + types + `,` + closed + `,"properties":{"c":{},"b":{"default":5}},"required":["b"]}}}`,
		}
	}
	for _, c := range []struct {
		name      string
		schemas   [2]string // of the writer and the reader
		lenient   bool
		doc, want string // "": the reader does not include the writer
	}{
		{"an object that may be missing", inner(`"object"`), false, `{}`, `{}`},
		{"an object that is there", inner(`"object"`), false, `{"a":{"c":1}}`, `{"a":{"c":1,"b":5}}`},
		{"null in place of an object", inner(`["object","null"]`), false, `{"a":null}`, `{"a":null}`},
		{
			"objects of a list", [2]string{
				`{"type":"array","items":{"type":["object","string"],` + closed + `}}`,
				`{"type":"array","items":{"type":["object","string"],` + closed + `,"properties":{"b":{"default":5}},"required":["b"]}}`,
			}, false, `[{},"x"]`, `[{"b":5},"x"]`,
		},
		{
			"a document that is no object",
			[2]string{`{` + closed + `}`, `{` + closed + `,"properties":{"b":{"default":5}},"required":["b"]}`},
			false, `"x"`, `"x"`,
		},
		{
			"a member named *", [2]string{
				`{"type":"object",` + closed + `,"properties":{"*":{},"other":{}}}`, `{"type":"object",` + closed + `,"properties":{"other":{}}}`,
			}, true, `{"*":1,"other":2}`, "",
		},
		{
			"below a member named *", [2]string{
				`{"type":"object",` + closed + `,"properties":{"*":{"type":"object",` + closed + `},"other":{}},"required":["*"]}`,
				`{"type":"object",` + closed + `,"properties":{"*":{"type":"object",` + closed + `,"properties":{"b":{"default":5}},"required":["b"]},"other":{}},"required":["*"]}`,
			}, false, `{"*":{},"other":{}}`, "",
		},
		{
			"items of what may be an object", [2]string{
				`{"items":{"type":"object",` + closed + `}}`, `{"items":{"type":"object",` + closed + `,"properties":{"b":{"default":5}},"required":["b"]}}`,
			}, false, `{"a":{}}`, "",
		},
	} {
		report, err := Includes([]byte(c.schemas[1]), []byte(c.schemas[0]), c.lenient)
		if err != nil {
			t.Fatal(err)
		}
		if c.want == "" {
			if len(report.Findings) == 0 {
				t.Errorf("%s: nothing was found, and the operations are %s", c.name, report.Operations())
			}
			continue
		}
		caster, err := upcast.Compile(report.Operations(), nil)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		got, failure := upcast.NewChain(1, caster).Cast(t.Context(), []byte(c.doc), 1, 2)
		if len(report.Findings) > 0 || failure != nil || string(got) != c.want {
			t.Errorf("%s: %s becomes %s, want %s (%v, %v)", c.name, c.doc, got, c.want, report.Findings, failure)
		}
	}
}
