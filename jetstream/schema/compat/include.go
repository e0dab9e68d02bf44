package compat

import (
	"encoding/json"
	"maps"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"eventhub/jetstream/jsonequal"
)

// comparison is one run of Includes.
type comparison struct {
	lenient bool
	report  *Report
	// open are the pairs that are compared, by how deep in the documents, and those that were, as
	// done: what was found of them is in the report.
	open  map[string]int
	steps int
	parts int // that were looked at for being the same: at most maxAlike
	// compared says that the two documents were compared, and equals that they are equal.
	compared, equals bool
	// unsure is above 0 where a finding may be wrong, as something of the writer was left out.
	unsure int
}

// where is a place in the documents.
type where struct {
	path []string
	// vague places are in a branch of several, so that operations cannot tell them.
	vague bool
}

func (p where) in(segment string) where {
	return where{append(slices.Clone(p.path), segment), p.vague}
}

func (p where) String() string { return pointer(p.path) }

func (c *comparison) find(rule string, at where, unknown bool) {
	if len(c.report.Findings) < maxFindings {
		c.report.Findings = append(c.report.Findings, Finding{Rule: rule, At: at.String(), Unknown: unknown || c.unsure > 0})
	}
}

// try reports whether the reader includes the writer, and leaves no finding if it does not.
func (c *comparison) try(r node, w []node, at where) bool {
	at.vague = true
	return c.attempt(func() { c.includes(r, w, at) })
}

// attempt reports whether f finds nothing. If f finds something, it is as if f was never called.
func (c *comparison) attempt(f func()) bool {
	before, open := *c.report, c.open
	c.report.Findings, c.open = nil, maps.Clone(open)
	f()
	if len(c.report.Findings) == 0 {
		c.report.Findings = before.Findings
		return true
	}
	*c.report, c.open = before, open
	return false
}

// includes compares a reader with a writer whose documents are valid for all of w.
func (c *comparison) includes(r node, w []node, at where) {
	if c.steps++; c.steps > maxSteps || len(at.path) > 100 {
		c.find("too_complex", at, true)
		return
	}
	r, ok := r.resolved()
	if !ok {
		if !c.written(r, w) {
			c.find("reference_unknown", at, true)
		}
		return
	}
	if r.always() {
		return
	}
	parts, unsure := apartOf(w)
	if slices.ContainsFunc(parts, node.never) || c.written(r, parts) {
		return
	}
	if len(parts) > maxParts {
		c.find("too_complex", at, true)
		return
	}
	places := []string{r.at}
	for _, n := range parts {
		places = append(places, n.at)
	}
	key := strings.Join(places, "\n")
	depth, met := c.open[key]
	switch {
	case met && depth == len(at.path):
		c.find("too_complex", at, true) // it leads to itself
		return
	case met: // whatever the pair refuses, it refuses higher up
		return
	}
	c.open[key] = len(at.path)
	defer func() { c.open[key] = done }()
	if unsure {
		c.unsure++
		defer func() { c.unsure-- }()
	}
	if r.never() {
		c.find("never_valid", at, false)
		return
	}
	if values, finite := valuesOf(parts); finite {
		c.takesAll(r, values, parts, at)
		return
	}
	if !hasAlternatives(parts) {
		c.keywords(r, parts, at)
		return
	}
	if c.attempt(func() { c.keywords(r, parts, at) }) {
		return
	}
	included, worst, sure := c.alternatives(r, parts, at)
	switch {
	case included:
	case sure: // what the alternative writes, the writer writes
		c.includes(r, worst, at)
	default:
		c.keywords(r, parts, at)
	}
}

// done is the depth of a pair that was compared.
const done = -1

// apartOf takes schemas apart. The parts are sorted, and each is there once.
func apartOf(w []node) (parts []node, unsure bool) {
	for _, n := range w {
		more, known := n.conjuncts()
		for _, p := range more {
			if p.flat = true; !p.always() {
				parts = append(parts, p)
			}
		}
		unsure = unsure || !known
	}
	slices.SortFunc(parts, func(a, b node) int { return strings.Compare(a.at, b.at) })
	return slices.CompactFunc(parts, func(a, b node) bool { return a.at == b.at && a.tree == b.tree }), unsure
}

// written reports whether the schema of the reader is one of the writer's own.
func (c *comparison) written(r node, w []node) bool {
	return slices.ContainsFunc(w, func(n node) bool { return c.alike(r, n) })
}

// maxAlike bounds how many parts of schemas one comparison goes through in search of those that are
// the same.
const maxAlike = 1_000_000

// alike reports whether two schemas are surely the same one: they have equal keywords, and their
// references lead to schemas that are the same, too.
func (c *comparison) alike(a, b node) bool {
	return jsonequal.Values(a.v, b.v) && c.refersToSame(a, b, a.v, make(map[string]bool))
}

// refersToSame reports whether the references in v, which is a part of both schemas, lead to the
// same. References that were followed before are in seen: if they lead to something else, so does
// what they are part of.
func (c *comparison) refersToSame(a, b node, v any, seen map[string]bool) bool {
	if c.parts++; c.parts > maxAlike {
		return false
	}
	switch v := v.(type) {
	case map[string]any:
		if to, is := v["$ref"].(string); is {
			if a.tree == b.tree || c.equal(a.tree, b.tree) || seen[to] {
				return true
			}
			seen[to] = true
			x, known := a.target(to)
			y, alsoKnown := b.target(to)
			if !known || !alsoKnown || !jsonequal.Values(x.v, y.v) || !c.refersToSame(x, y, x.v, seen) {
				return false
			}
		}
		for _, member := range v {
			if !c.refersToSame(a, b, member, seen) {
				return false
			}
		}
	case []any:
		for _, member := range v {
			if !c.refersToSame(a, b, member, seen) {
				return false
			}
		}
	}
	return true
}

// equal reports whether the two documents of the comparison are equal.
func (c *comparison) equal(a, b *tree) bool {
	if !c.compared {
		c.compared, c.equals = true, jsonequal.Values(a.doc, b.doc)
	}
	return c.equals
}

// kindsOfAll are the types that the writer writes.
func kindsOfAll(w []node) kinds {
	k := kinds(everyKind)
	for _, n := range w {
		if t, has := n.object()["type"]; has {
			k &= kindsOf(t)
		}
		if step := n.number("multipleOf"); step != nil && step.Sign() > 0 && step.IsInt() {
			k &^= kindFraction
		}
	}
	return k
}

// valuesOf are the values of a writer that has few.
func valuesOf(w []node) (values []any, finite bool) {
	for _, n := range w {
		if v, has := n.object()["const"]; has {
			return []any{v}, true
		}
	}
	for _, n := range w {
		if list, has := n.object()["enum"].([]any); has {
			return list, true
		}
	}
	switch k := kindsOfAll(w); {
	case k&^(kindNull|kindBool) != 0:
		return nil, false
	default:
		if k&kindNull != 0 {
			values = append(values, nil)
		}
		if k&kindBool != 0 {
			values = append(values, true, false)
		}
		return values, true
	}
}

// takesAll tries each value of the writer.
func (c *comparison) takesAll(r node, values []any, w []node, at where) {
	for _, v := range values {
		if slices.ContainsFunc(w, func(n node) bool { valid, known := n.takes(v); return known && !valid }) {
			continue // the writer does not write it after all
		}
		switch valid, known := r.takes(v); {
		case !known:
			c.find("reference_unknown", at, true)
			return
		case !valid:
			rule := "enum_narrowed"
			if t, has := r.object()["type"]; has && kindsOf(t)&kindOfValue(v) == 0 {
				rule = "type_narrowed"
			}
			c.find(rule, at, false)
			return
		}
	}
}

// kindOfValue is the type of a value.
func kindOfValue(v any) kinds {
	switch v := v.(type) {
	case nil:
		return kindNull
	case bool:
		return kindBool
	case string:
		return kindString
	case []any:
		return kindArray
	case map[string]any:
		return kindObject
	default:
		if r := rational(v); r != nil && r.IsInt() {
			return kindInteger
		}
		return kindFraction
	}
}

// keywords compares the keywords of the reader, one after the other.
func (c *comparison) keywords(r node, w []node, at where) {
	m := r.object()
	k := kindsOfAll(w)
	if t, has := m["type"]; has && k&^kindsOf(t) != 0 {
		c.find("type_narrowed", at, hasChoice(w))
		return
	}
	if _, has := m["const"]; has {
		c.find("enum_added", at, hasChoice(w))
		return
	}
	if _, has := m["enum"]; has {
		c.find("enum_added", at, hasChoice(w))
		return
	}
	if k&kindNumber != 0 {
		c.numbers(r, w, k, at)
	}
	if k&kindString != 0 {
		c.strings(r, w, at)
	}
	if k&kindArray != 0 {
		c.arrays(r, w, at)
	}
	if k&kindObject != 0 {
		c.objects(r, w, at)
	}
	c.combinations(r, w, at)
}

// alternatives reports whether the reader includes each alternative of the writer. If not, worst is
// one that it does not include. sure says that the writer writes all of that.
func (c *comparison) alternatives(r node, w []node, at where) (included bool, worst []node, sure bool) {
	for i, n := range w {
		for _, keyword := range []string{"anyOf", "oneOf"} {
			branches := n.list(keyword)
			if len(branches) == 0 || len(branches) > 64 {
				continue
			}
			m := make(map[string]any, len(n.object()))
			for k, v := range n.object() {
				if k != keyword {
					m[k] = v
				}
			}
			rest := append(slices.Clone(w[:i]), w[i+1:]...)
			rest = append(rest, node{n.tree, n.at + "!" + keyword, m, true})
			failed := slices.IndexFunc(branches, func(b node) bool { return !c.try(r, append(slices.Clone(rest), b), at) })
			if failed < 0 {
				return true, nil, false
			}
			worst, sure = append(rest, branches[failed]), keyword == "anyOf" || distinct(branches)
		}
	}
	return false, worst, sure
}

func hasAlternatives(w []node) bool {
	return slices.ContainsFunc(w, func(n node) bool { return len(n.list("anyOf")) > 0 || len(n.list("oneOf")) > 0 })
}

// hasChoice reports whether the writer has keywords that the comparison does not see through. The
// writer may then write less than it seems.
func hasChoice(w []node) bool {
	return slices.ContainsFunc(w, func(n node) bool {
		m := n.object()
		for _, k := range []string{"anyOf", "oneOf", "not", "if", "contains", "propertyNames", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"} {
			if _, has := m[k]; has {
				return true
			}
		}
		return false
	})
}

// numbers compares what is asked of numbers.
func (c *comparison) numbers(r node, w []node, k kinds, at where) {
	for _, keyword := range []string{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} {
		if _, has := r.object()[keyword]; has && r.number(keyword) == nil {
			c.find("too_complex", at, true)
		}
	}
	whole := k&kindFraction == 0
	low := strictest(w, "minimum", "exclusiveMinimum", whole, 1)
	high := strictest(w, "maximum", "exclusiveMaximum", whole, -1)
	if want := strictest([]node{r}, "minimum", "exclusiveMinimum", whole, 1); want.tighter(low, 1) {
		c.find("minimum_raised", at, hasChoice(w))
	}
	if want := strictest([]node{r}, "maximum", "exclusiveMaximum", whole, -1); want.tighter(high, -1) {
		c.find("maximum_lowered", at, hasChoice(w))
	}
	of := r.number("multipleOf")
	if of == nil || of.Sign() == 0 {
		if _, has := r.object()["multipleOf"]; has {
			c.find("multiple_of_narrowed", at, true)
		}
		return
	}
	var steps []*big.Rat
	for _, n := range w {
		if step := n.number("multipleOf"); step != nil {
			steps = append(steps, step)
		}
	}
	if whole && !slices.ContainsFunc(steps, (*big.Rat).IsInt) {
		steps = append(steps, big.NewRat(1, 1))
	}
	if !slices.ContainsFunc(steps, func(s *big.Rat) bool { return new(big.Rat).Quo(s, of).IsInt() }) {
		c.find("multiple_of_narrowed", at, hasChoice(w) || len(steps) > 1)
	}
}

// bound is a minimum or a maximum; a nil at is none.
type bound struct {
	at        *big.Rat
	exclusive bool
}

// strictest is the bound of several schemas. sign is 1 for a minimum, and -1 for a maximum.
func strictest(all []node, inclusive, exclusive string, whole bool, sign int) (b bound) {
	for _, n := range all {
		for _, keyword := range []string{inclusive, exclusive} {
			at := n.number(keyword)
			if at == nil {
				continue
			}
			if next := (bound{at, keyword == exclusive}).of(whole, sign); next.tighter(b, sign) {
				b = next
			}
		}
	}
	return b
}

// of is the bound for integers, if whole: the first one that it allows.
func (b bound) of(whole bool, sign int) bound {
	if !whole {
		return b
	}
	floor := new(big.Int).Div(b.at.Num(), b.at.Denom()) // rounds down
	at := new(big.Rat).SetInt(floor)
	one := big.NewRat(1, 1)
	switch {
	case sign > 0 && (b.exclusive || at.Cmp(b.at) < 0):
		at.Add(at, one)
	case sign < 0 && b.exclusive && at.Cmp(b.at) == 0:
		at.Sub(at, one)
	}
	return bound{at: at}
}

// tighter reports whether b refuses something that other does not.
func (b bound) tighter(other bound, sign int) bool {
	if b.at == nil {
		return false
	}
	if other.at == nil {
		return true
	}
	by := b.at.Cmp(other.at) * sign
	return by > 0 || by == 0 && b.exclusive && !other.exclusive
}

// strings compares what is asked of strings.
func (c *comparison) strings(r node, w []node, at where) {
	if r.count("minLength", 0) > most(w, "minLength") {
		c.find("min_length_raised", at, hasChoice(w))
	}
	if r.count("maxLength", none) < least(w, "maxLength") {
		c.find("max_length_lowered", at, hasChoice(w))
	}
	pattern, has := r.object()["pattern"]
	if !has || slices.ContainsFunc(w, func(n node) bool { return n.object()["pattern"] == pattern }) {
		return
	}
	if slices.ContainsFunc(w, func(n node) bool { return n.object()["pattern"] != nil }) {
		c.find("pattern_changed", at, true)
	} else {
		c.find("pattern_added", at, hasChoice(w))
	}
}

// none is no upper bound.
const none = 1<<63 - 1

// most is the highest lower bound, 0 without one.
func most(w []node, keyword string) (n int64) {
	for _, p := range w {
		n = max(n, p.count(keyword, 0))
	}
	return n
}

// least is the lowest upper bound.
func least(w []node, keyword string) int64 {
	n := int64(none)
	for _, p := range w {
		n = min(n, p.count(keyword, none))
	}
	return n
}

// arrays compares what is asked of arrays.
func (c *comparison) arrays(r node, w []node, at where) {
	if r.count("minItems", 0) > most(w, "minItems") {
		c.find("min_items_raised", at, hasChoice(w))
	}
	longest := least(w, "maxItems")
	prefix := len(r.list("prefixItems"))
	for _, n := range w {
		prefix = max(prefix, len(n.list("prefixItems")))
		if end, has := n.element(len(n.list("prefixItems"))); has && end.never() {
			longest = min(longest, int64(len(n.list("prefixItems"))))
		}
	}
	if r.count("maxItems", none) < longest {
		c.find("max_items_lowered", at, hasChoice(w))
	}
	if r.object()["uniqueItems"] == true && longest > 1 && !slices.ContainsFunc(w, func(n node) bool { return n.object()["uniqueItems"] == true }) {
		c.find("unique_items_added", at, hasChoice(w))
	}
	for i := range min(int64(prefix)+1, longest) {
		want, has := r.element(int(i))
		if !has {
			continue
		}
		var written []node
		for _, n := range w {
			if e, has := n.element(int(i)); has {
				written = append(written, e)
			}
		}
		place := at.in("*")
		if i < int64(prefix) {
			place = at.in(strconv.FormatInt(i, 10))
		} else {
			// * would stand for the elements before, too, and for the members of objects.
			place.vague = place.vague || prefix > 0 || kindsOfAll(w)&kindObject != 0
		}
		if want.never() && !slices.ContainsFunc(written, node.never) {
			c.find("items_closed", place, hasChoice(w))
			continue
		}
		c.includes(want, written, place)
	}
	c.same(r, w, at, "keyword_changed", "contains", "minContains", "maxContains")
	c.same(r, w, at, "keyword_changed", "unevaluatedItems", "items", "prefixItems")
}

// same wants the writer to have the same keywords as the reader, if the reader has the first one.
func (c *comparison) same(r node, w []node, at where, rule string, keywords ...string) {
	if _, has := r.object()[keywords[0]]; !has {
		return
	}
	equal := func(n node) bool {
		for _, k := range keywords {
			a, has := r.object()[k]
			b, also := n.object()[k]
			if has != also || has && !c.alike(node{tree: r.tree, v: a}, node{tree: n.tree, v: b}) {
				return false
			}
		}
		return true
	}
	if !slices.ContainsFunc(w, equal) {
		c.find(rule, at, true)
	}
}

// combinations compares what the reader combines of other schemas.
func (c *comparison) combinations(r node, w []node, at where) {
	m := r.object()
	if to, has := m["$ref"].(string); has { // beside other keywords
		if target, ok := r.target(to); ok {
			c.includes(target, w, at)
		} else {
			c.same(r, w, at, "reference_unknown", "$ref")
		}
	}
	for _, sub := range r.list("allOf") {
		c.includes(sub, w, at)
	}
	if branches := r.list("anyOf"); len(branches) > 0 {
		c.choice(r, "anyOf", branches, w, at)
	}
	if branches := r.list("oneOf"); len(branches) > 0 {
		if distinct(branches) {
			c.choice(r, "oneOf", branches, w, at)
		} else {
			c.same(r, w, at, "one_of_narrowed", "oneOf")
		}
	}
	c.same(r, w, at, "not_changed", "not")
	c.same(r, w, at, "condition_changed", "if", "then", "else")
	c.same(r, w, at, "keyword_changed", "$dynamicRef")
	if r.at != "" {
		c.same(r, w, at, "keyword_changed", "$id")
	}
}

// choice wants one of the reader's branches to include the writer, or each alternative of it.
func (c *comparison) choice(r node, keyword string, branches, w []node, at where) {
	one := func(w []node) bool {
		return slices.ContainsFunc(branches, func(b node) bool { return c.try(b, w, at) })
	}
	if one(w) {
		return
	}
	only := node{tree: r.tree, at: r.at + "?" + keyword, v: map[string]any{keyword: r.object()[keyword]}}
	if c.alternativesOf(w, one) || c.eachKind(w, one) || c.written(only, w) {
		return
	}
	c.find(map[string]string{"anyOf": "any_of_narrowed", "oneOf": "one_of_narrowed"}[keyword], at, true)
}

// alternativesOf reports whether f holds for each alternative of the writer.
func (c *comparison) alternativesOf(w []node, f func([]node) bool) bool {
	for _, n := range w {
		for _, keyword := range []string{"anyOf", "oneOf"} {
			branches := n.list(keyword)
			if len(branches) > 0 && len(branches) <= 64 && !slices.ContainsFunc(branches, func(b node) bool {
				more, _ := b.conjuncts()
				return !f(append(slices.Clone(w), more...))
			}) {
				return true
			}
		}
	}
	return false
}

// eachKind reports whether f holds for each type that the writer writes.
func (c *comparison) eachKind(w []node, f func([]node) bool) bool {
	written := kindsOfAll(w)
	several := 0
	for _, k := range kindNames {
		if k.kind == kindInteger && written&kindFraction != 0 || written&k.kind == 0 || k.kind == kindNumber && written&kindFraction == 0 {
			continue
		}
		several++
		if !f(append(slices.Clone(w), node{at: "=" + k.name, v: map[string]any{"type": k.name}, flat: true})) {
			return false
		}
	}
	return several > 1
}

// distinct reports whether no value is valid for two of the branches: their types differ, or a
// member that they want has other values in each.
func distinct(branches []node) bool {
	for i, a := range branches {
		for _, b := range branches[:i] {
			if !apart(a, b) {
				return false
			}
		}
	}
	return true
}

func apart(a, b node) bool {
	x, known := a.conjuncts()
	y, alsoKnown := b.conjuncts()
	if !known || !alsoKnown {
		return false
	}
	kx, ky := kindsOfAll(x), kindsOfAll(y)
	if kx&ky == 0 {
		return true
	}
	if disjoint(x, y) {
		return true
	}
	if kx&ky != kindObject {
		return false
	}
	for _, n := range x {
		for _, name := range n.required() {
			if !slices.ContainsFunc(y, func(n node) bool { return slices.Contains(n.required(), name) }) {
				continue
			}
			if disjoint(members(x, name), members(y, name)) {
				return true
			}
		}
	}
	return false
}

// members are the schemas of a member in all parts of a schema.
func members(parts []node, name string) (all []node) {
	for _, n := range parts {
		some, _, _ := n.member(name)
		for _, s := range some {
			more, _ := s.conjuncts()
			all = append(all, more...)
		}
	}
	return all
}

// disjoint reports whether two schemas have values only, and none of them is one of both.
func disjoint(x, y []node) bool {
	a, few := valuesOf(x)
	b, alsoFew := valuesOf(y)
	return few && alsoFew && !slices.ContainsFunc(a, func(v any) bool {
		return slices.ContainsFunc(b, func(w any) bool { return jsonequal.Values(v, w) })
	})
}

// defaultOf is the default of a member, if it has one that is valid.
func (n node) defaultOf(name string) (json.RawMessage, bool) {
	parts, _, _ := n.member(name)
	for _, p := range parts {
		p, _ = p.resolved()
		v, has := p.object()["default"]
		if !has {
			continue
		}
		if valid, known := p.takes(v); !known || !valid {
			return nil, false
		}
		text, err := json.Marshal(v)
		return text, err == nil
	}
	return nil, false
}

// patternsOf are the texts of all patternProperties.
func patternsOf(w []node) (all []string) {
	for _, n := range w {
		all = append(all, n.names("patternProperties")...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// compiles reports whether a pattern can be tried here.
func compiles(pattern string) bool {
	_, err := regexp.Compile(pattern)
	return err == nil
}
