package compat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"regexp/syntax"
	"slices"
	"strings"
)

// Bounds of what is generated.
const (
	generateTries = 40
	generateDepth = 8    // below, only what is required
	generateNodes = 2000 // values of a document
	generateMore  = 3    // elements more than needed, and characters too
)

// Generator makes random documents that are valid for a schema. It is for one goroutine.
type Generator struct {
	tree   *tree
	rand   *rand.Rand
	names  []string
	values int
}

// NewGenerator returns a generator for a schema that schema.Compile takes. The same seed gives the
// same documents. Where the schema takes undeclared members, some have one of the names.
func NewGenerator(text []byte, seed uint64, names ...string) (*Generator, error) {
	t, err := newTree(text)
	if err != nil {
		return nil, fmt.Errorf("the schema %w", err)
	}
	return &Generator{tree: t, names: names, rand: rand.New(rand.NewPCG(seed, 23))}, nil //nolint:gosec // no secret
}

// Names returns the names of members that a schema declares anywhere, for NewGenerator.
func Names(text []byte) ([]string, error) {
	t, err := newTree(text)
	if err != nil {
		return nil, fmt.Errorf("the schema %w", err)
	}
	var all []string
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for keyword, member := range v {
				switch members, _ := member.(map[string]any); keyword {
				case "properties", "dependentRequired":
					all = slices.AppendSeq(all, maps.Keys(members))
				case "required":
					all = append(all, node{v: v}.required()...)
				}
				walk(member)
			}
		case []any:
			for _, member := range v {
				walk(member)
			}
		}
	}
	walk(t.doc)
	slices.Sort(all)
	return slices.Compact(all), nil
}

// Next returns a valid document, or false if none was found: the schema may have none, or keywords
// for which documents are hard to find.
func (g *Generator) Next() ([]byte, bool) {
	for range generateTries {
		g.values = 0
		v, ok := g.value([]node{g.tree.root()}, 0)
		if valid, _ := g.tree.root().takes(v); !ok || !valid {
			continue
		}
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if e.Encode(v) == nil {
			return bytes.TrimSpace(b.Bytes()), true
		}
	}
	return nil, false
}

// flatten takes schemas apart, and decides for one of their alternatives.
func (g *Generator) flatten(w []node) (parts []node) {
	for budget := 64; len(w) > 0 && budget > 0; budget-- {
		n := w[0]
		w = w[1:]
		more, _ := n.conjuncts()
		parts = append(parts, more...)
		for _, p := range more {
			for _, keyword := range []string{"anyOf", "oneOf"} {
				if branches := p.list(keyword); len(branches) > 0 {
					w = append(w, branches[g.rand.IntN(len(branches))])
				}
			}
			if _, has := p.object()["if"]; has {
				if g.rand.IntN(2) == 0 {
					w = append(w, p.one("if"), p.one("then"))
				} else {
					w = append(w, p.one("else"))
				}
			}
		}
	}
	return parts
}

// value makes a value that is mostly valid.
func (g *Generator) value(w []node, depth int) (v any, ok bool) {
	if g.values++; g.values > generateNodes || depth > 4*generateDepth {
		return nil, false
	}
	parts := g.flatten(w)
	if slices.ContainsFunc(parts, node.never) {
		return nil, false
	}
	if values, finite := valuesOf(parts); finite {
		values = slices.DeleteFunc(slices.Clone(values), func(v any) bool {
			return slices.ContainsFunc(parts, func(n node) bool { valid, known := n.takes(v); return known && !valid })
		})
		if len(values) == 0 {
			return nil, false
		}
		return values[g.rand.IntN(len(values))], true
	}
	switch g.kind(parts, depth) {
	case kindBool:
		return g.rand.IntN(2) == 0, true
	case kindInteger:
		return g.number(parts, true), true
	case kindFraction:
		return g.number(parts, false), true
	case kindString:
		return g.text(parts), true
	case kindArray:
		return g.array(parts, depth)
	case kindObject:
		return g.object(parts, depth)
	default:
		return nil, true
	}
}

// kind chooses a type: without the keyword type, one that the other keywords are about.
func (g *Generator) kind(parts []node, depth int) kinds {
	k := kindsOfAll(parts)
	if k == everyKind {
		var hinted kinds
		for _, n := range parts {
			for keyword, kind := range hints {
				if _, has := n.object()[keyword]; has {
					hinted |= kind
				}
			}
		}
		if hinted != 0 && g.rand.IntN(8) > 0 {
			k = hinted
		}
	}
	if small := k &^ (kindArray | kindObject); depth > generateDepth && small != 0 {
		k = small
	}
	var all []kinds
	for bit := kindNull; bit <= kindObject; bit <<= 1 {
		if k&bit != 0 {
			all = append(all, bit)
		}
	}
	return all[g.rand.IntN(len(all))]
}

var hints = map[string]kinds{
	"properties": kindObject, "required": kindObject, "additionalProperties": kindObject, "patternProperties": kindObject, "minProperties": kindObject,
	"items": kindArray, "prefixItems": kindArray, "minItems": kindArray, "maxItems": kindArray,
	"minLength": kindString, "maxLength": kindString, "pattern": kindString, "format": kindString,
	"minimum": kindNumber, "maximum": kindNumber, "multipleOf": kindNumber, "exclusiveMinimum": kindNumber, "exclusiveMaximum": kindNumber,
}

func (g *Generator) number(parts []node, whole bool) json.Number {
	low := strictest(parts, "minimum", "exclusiveMinimum", whole, 1)
	high := strictest(parts, "maximum", "exclusiveMaximum", whole, -1)
	at := new(big.Rat)
	span := big.NewRat(int64(g.rand.IntN(1000)), []int64{1, 10, 1000}[g.rand.IntN(3)])
	if g.rand.IntN(4) == 0 {
		span.SetInt64(0) // the bound itself
	}
	switch {
	case low.at != nil && high.at != nil:
		share := big.NewRat(int64(g.rand.IntN(5)), 4)
		at.Add(low.at, at.Mul(new(big.Rat).Sub(high.at, low.at), share))
	case low.at != nil:
		at.Add(low.at, span)
	case high.at != nil:
		at.Sub(high.at, span)
	default:
		at.SetInt64(int64(g.rand.IntN(2001) - 1000))
	}
	var step *big.Rat
	for _, n := range parts {
		if of := n.number("multipleOf"); of != nil && of.Sign() > 0 && (step == nil || of.Cmp(step) > 0) {
			step = of
		}
	}
	switch {
	case step != nil:
		times := new(big.Rat).Quo(at, step)
		at.Mul(new(big.Rat).SetInt(new(big.Int).Div(times.Num(), times.Denom())), step)
		if low.at != nil && at.Cmp(low.at) < 0 {
			at.Add(at, step)
		}
	case whole:
		at.SetInt(new(big.Int).Div(at.Num(), at.Denom()))
		if low.at != nil && at.Cmp(low.at) < 0 {
			at.Add(at, big.NewRat(1, 1))
		}
	case at.IsInt() && g.rand.IntN(2) == 0:
		at.Add(at, big.NewRat(int64(g.rand.IntN(1000)), 1000))
	}
	if at.IsInt() {
		return json.Number(at.Num().String())
	}
	return json.Number(strings.TrimRight(at.FloatString(12), "0"))
}

// samples are strings of formats, which schemas do not enforce.
var samples = map[string]string{
	"date-time": "2026-01-02T03:04:05Z", "date": "2026-01-02", "time": "03:04:05Z", "duration": "PT5M", "email": "a@example.org", "hostname": "a.example.org",
	"ipv4": "192.0.2.1", "ipv6": "2001:db8::1", "uri": "https://example.org/a", "uuid": "0190a7e2-7a63-7000-8000-000000000001",
}

func (g *Generator) text(parts []node) string {
	low, high := most(parts, "minLength"), least(parts, "maxLength")
	for _, n := range parts {
		if pattern, is := n.object()["pattern"].(string); is {
			if re, err := syntax.Parse(pattern, syntax.Perl); err == nil {
				var b strings.Builder
				g.match(&b, re, 0)
				return b.String()
			}
		}
		if sample, has := samples[fmt.Sprint(n.object()["format"])]; has && int64(len(sample)) >= low && int64(len(sample)) <= high {
			return sample
		}
	}
	length := min(low, 10_000) + int64([]int{0, 1, g.rand.IntN(2 * generateMore), g.rand.IntN(40)}[g.rand.IntN(4)])
	length = min(length, high)
	var b strings.Builder
	for range length {
		b.WriteRune([]rune("abcdefghijxyz0189 -_é/\"\\")[g.rand.IntN(24)])
	}
	return b.String()
}

// match writes a text that a pattern matches, if the pattern is a simple one.
func (g *Generator) match(b *strings.Builder, re *syntax.Regexp, depth int) {
	if depth > 20 || b.Len() > 10_000 {
		return
	}
	repeat := func(least, most int) {
		if most < 0 {
			most = least + generateMore
		}
		for range least + g.rand.IntN(max(min(most-least, generateMore), 0)+1) {
			g.match(b, re.Sub[0], depth+1)
		}
	}
	switch re.Op {
	case syntax.OpLiteral:
		b.WriteString(string(re.Rune))
	case syntax.OpCharClass:
		if len(re.Rune) >= 2 {
			i := g.rand.IntN(len(re.Rune)/2) * 2
			b.WriteRune(re.Rune[i] + g.rand.Int32N(min(re.Rune[i+1]-re.Rune[i], 20)+1))
		}
	case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		b.WriteByte('x')
	case syntax.OpStar:
		repeat(0, -1)
	case syntax.OpPlus:
		repeat(1, -1)
	case syntax.OpQuest:
		repeat(0, 1)
	case syntax.OpRepeat:
		repeat(re.Min, re.Max)
	case syntax.OpAlternate:
		g.match(b, re.Sub[g.rand.IntN(len(re.Sub))], depth+1)
	case syntax.OpConcat, syntax.OpCapture:
		for _, sub := range re.Sub {
			g.match(b, sub, depth+1)
		}
	default: // places, which match nothing
	}
}

func (g *Generator) array(parts []node, depth int) (any, bool) {
	low, high := most(parts, "minItems"), least(parts, "maxItems")
	if low > generateNodes {
		return nil, false
	}
	length := low
	if depth <= generateDepth {
		length = min(low+int64(g.rand.IntN(generateMore+1)), high)
	}
	list := []any{}
	for i := range length {
		var w []node
		for _, n := range parts {
			if e, has := n.element(int(i)); has {
				w = append(w, e)
			}
			if _, has := n.object()["contains"]; has && i == 0 {
				w = append(w, n.one("contains"))
			}
		}
		v, ok := g.value(w, depth+1)
		if !ok {
			return list, i >= low
		}
		list = append(list, v)
	}
	return list, true
}

func (g *Generator) object(parts []node, depth int) (any, bool) {
	m := make(map[string]any)
	add := func(name string) bool {
		if _, has := m[name]; has {
			return true
		}
		var w []node
		for _, n := range parts {
			some, _, _ := n.member(name)
			w = append(w, some...)
		}
		v, ok := g.value(w, depth+1)
		if ok {
			m[name] = v
		}
		return ok
	}
	for _, n := range parts {
		for _, name := range n.required() {
			if !add(name) {
				return nil, false
			}
		}
	}
	if depth > generateDepth {
		return m, true
	}
	fewest := most(parts, "minProperties")
	for _, n := range parts {
		for _, name := range n.names("properties") {
			if g.rand.IntN(2) == 0 || int64(len(m)) < fewest {
				add(name)
			}
		}
		for _, pattern := range n.names("patternProperties") {
			if re, err := syntax.Parse(pattern, syntax.Perl); err == nil && g.rand.IntN(2) == 0 {
				var b strings.Builder
				g.match(&b, re, 0)
				add(b.String())
			}
		}
	}
	for range 20 {
		if int64(len(m)) >= fewest && g.rand.IntN(10) > 0 {
			break
		}
		add(fmt.Sprint("more", g.rand.IntN(100)))
	}
	if len(g.names) > 0 && g.rand.IntN(4) == 0 {
		add(g.names[g.rand.IntN(len(g.names))])
	}
	for _, n := range parts {
		with, _ := n.object()["dependentRequired"].(map[string]any)
		for _, name := range slices.Sorted(maps.Keys(m)) {
			list, _ := with[name].([]any)
			for _, needed := range list {
				if needed, is := needed.(string); is {
					add(needed)
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if int64(len(m)) > least(parts, "maxProperties") && !requires(parts, name) {
			delete(m, name)
		}
	}
	return m, true
}
