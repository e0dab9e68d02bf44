package compat

import (
	"maps"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// kinds are types of values, as bits.
type kinds uint8

const (
	kindNull kinds = 1 << iota
	kindBool
	kindInteger
	kindFraction // a number that is no integer
	kindString
	kindArray
	kindObject

	kindNumber = kindInteger | kindFraction
	everyKind  = 1<<7 - 1
)

// kindNames are the names of types, in the order of their bits.
var kindNames = []struct {
	kind kinds
	name string
}{
	{kindNull, "null"}, {kindBool, "boolean"}, {kindNumber, "number"}, {kindInteger, "integer"}, {kindString, "string"}, {kindArray, "array"}, {kindObject, "object"},
}

// kindsOf reads the keyword type.
func kindsOf(v any) (k kinds) {
	names, _ := v.([]any)
	if name, is := v.(string); is {
		names = []any{name}
	}
	for _, name := range names {
		for _, known := range kindNames {
			if name == known.name {
				k |= known.kind
			}
		}
	}
	return k
}

// resolved follows the references of a schema that has no other keywords. ok is false if one of
// them cannot be followed.
func (n node) resolved() (_ node, ok bool) {
	for range 100 {
		m := n.object()
		to, has := m["$ref"].(string)
		if !has || len(others(m)) > 0 {
			return n, true
		}
		if n, ok = n.target(to); !ok {
			return n, false
		}
	}
	return n, false
}

// others are the keywords beside $ref that refuse values.
func others(m map[string]any) (names []string) {
	for k := range m {
		if k != "$ref" && !annotations[k] {
			names = append(names, k)
		}
	}
	return names
}

// target is what a reference of the form #/a/b leads to.
func (n node) target(to string) (node, bool) {
	if to == "#" {
		return n.tree.root(), true
	}
	path, ok := strings.CutPrefix(to, "#/")
	if !ok || strings.Contains(path, "%") {
		return n, false
	}
	at := n.tree.root()
	for segment := range strings.SplitSeq(path, "/") {
		name := strings.ReplaceAll(strings.ReplaceAll(segment, "~1", "/"), "~0", "~")
		switch v := at.v.(type) {
		case map[string]any:
			member, has := v[name]
			if !has {
				return n, false
			}
			at = at.sub(member, name)
		case []any:
			i, err := strconv.Atoi(name)
			if err != nil || i < 0 || i >= len(v) {
				return n, false
			}
			at = at.sub(v[i], name)
		default:
			return n, false
		}
	}
	return at, true
}

// list returns the subschemas of a keyword that has several.
func (n node) list(keyword string) (nodes []node) {
	values, _ := n.object()[keyword].([]any)
	for i, v := range values {
		nodes = append(nodes, n.sub(v, keyword, strconv.Itoa(i)))
	}
	return nodes
}

// one returns the subschema of a keyword, true without it.
func (n node) one(keyword string) node {
	v, has := n.object()[keyword]
	if !has {
		v = true
	}
	return n.sub(v, keyword)
}

// conjuncts takes a schema apart: a value is valid if it is valid for all that are returned. They
// have neither allOf nor, alone, $ref. known is false if a reference was left out.
func (n node) conjuncts() (parts []node, known bool) {
	if n.flat {
		return []node{n}, true
	}
	known = true
	var walk func(n node, depth int)
	walk = func(n node, depth int) {
		if depth > 64 || len(parts) > 256 {
			known = false
			return
		}
		parts = append(parts, n)
		m := n.object()
		if to, has := m["$ref"].(string); has {
			if target, ok := n.target(to); ok {
				walk(target, depth+1)
			} else {
				known = false
			}
		}
		for _, sub := range n.list("allOf") {
			walk(sub, depth+1)
		}
	}
	walk(n, 0)
	return parts, known
}

// number is a bound, nil without one.
func (n node) number(keyword string) *big.Rat {
	v, has := n.object()[keyword]
	if !has {
		return nil
	}
	return rational(v)
}

// rational is the value of a number; nil for none, and for one with an absurd exponent.
func rational(v any) *big.Rat {
	number, is := v.(interface{ String() string })
	if !is {
		return nil
	}
	text := number.String()
	if _, exp, has := strings.Cut(strings.ToLower(text), "e"); has {
		if e, err := strconv.Atoi(exp); err != nil || e < -400 || e > 400 {
			return nil
		}
	}
	if len(text) > 1000 {
		return nil
	}
	r, ok := new(big.Rat).SetString(text)
	if !ok {
		return nil
	}
	return r
}

// count is a keyword that counts, missing without it.
func (n node) count(keyword string, missing int64) int64 {
	r := n.number(keyword)
	if r == nil {
		return missing
	}
	if !r.IsInt() || !r.Num().IsInt64() {
		return 1 << 62
	}
	return r.Num().Int64()
}

// names are the members of a keyword whose value is an object, in order.
func (n node) names(keyword string) []string {
	m, _ := n.object()[keyword].(map[string]any)
	return slices.Sorted(maps.Keys(m))
}

// required are the members that the schema wants.
func (n node) required() (names []string) {
	list, _ := n.object()["required"].([]any)
	for _, v := range list {
		if name, is := v.(string); is {
			names = append(names, name)
		}
	}
	return names
}

// pattern returns a pattern, nil for one that does not compile.
func (t *tree) pattern(text string) *regexp.Regexp {
	re, seen := t.patterns[text]
	if !seen {
		if compiled, err := regexp.Compile(text); err == nil {
			re = compiled
		}
		t.patterns[text] = re
	}
	return re
}

// member returns the schemas that the value of a member has to keep to. declared says that the
// schema names it, or has a pattern for it. known is false if a pattern cannot be tried.
func (n node) member(name string) (parts []node, declared, known bool) {
	m, known := n.object(), true
	if props, _ := m["properties"].(map[string]any); props != nil {
		if v, has := props[name]; has {
			parts, declared = append(parts, n.sub(v, "properties", name)), true
		}
	}
	for _, pattern := range n.names("patternProperties") {
		re := n.tree.pattern(pattern)
		if re == nil {
			known = false
			continue
		}
		if re.MatchString(name) {
			patterns, _ := m["patternProperties"].(map[string]any)
			parts, declared = append(parts, n.sub(patterns[pattern], "patternProperties", pattern)), true
		}
	}
	if !declared {
		if _, has := m["additionalProperties"]; has {
			parts = append(parts, n.one("additionalProperties"))
		}
	}
	return parts, declared, known
}

// element returns the schema of an array's element, and whether there is one.
func (n node) element(i int) (node, bool) {
	if prefix := n.list("prefixItems"); i < len(prefix) {
		return prefix[i], true
	}
	if _, has := n.object()["items"]; has {
		return n.one("items"), true
	}
	return n, false
}
