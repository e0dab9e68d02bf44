// Package typescript writes the types of payloads for TypeScript, from the schemas of their topics.
// The result is the map of topics that createClient of the package eventhub-client takes:
//
//	export type Topics = {
//	  "carts.paid": CartsPaid;
//	};
//	export type CartsPaid = { cart: number; cents?: number };
//
// A type takes every payload that the schema takes, and perhaps more: TypeScript has no bounds,
// lengths and patterns. A schema without additionalProperties has no index signature, so that the
// compiler finds misspelt names.
package typescript

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// Topic is a topic with the schema of its payloads.
type Topic struct {
	Name   string
	Schema []byte
}

// maxDepth bounds how deep a type is written; what is deeper becomes unknown.
const maxDepth = 64

// Declarations returns the types of topics, in the order of their names.
func Declarations(topics []Topic) ([]byte, error) {
	topics = slices.SortedFunc(slices.Values(topics), func(a, b Topic) int { return cmp.Compare(a.Name, b.Name) })
	w := &writer{taken: map[string]bool{"Topics": true}}
	var index, types bytes.Buffer
	index.WriteString("export type Topics = {\n")
	for _, t := range topics {
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(t.Schema))
		if err != nil {
			return nil, fmt.Errorf("schema of %s: is not JSON", t.Name)
		}
		w.root, w.names, w.queue = doc, make(map[string]string), nil
		name := w.name("#", pascal(t.Name))
		fmt.Fprintf(&index, "  %s: %s;\n", quote(t.Name), name)
		for len(w.queue) > 0 {
			ref := w.queue[0]
			w.queue = w.queue[1:]
			at, _ := w.resolve(ref)
			w.here = ref
			types.WriteString(comment(at, ""))
			fmt.Fprintf(&types, "export type %s = %s;\n", w.names[ref], w.typeOf(at, "", 0))
		}
	}
	index.WriteString("};\n")
	return append(index.Bytes(), types.Bytes()...), nil
}

// writer writes the types of one schema at a time.
type writer struct {
	root  any
	taken map[string]bool   // names of all topics
	names map[string]string // by reference
	here  string            // the reference whose type is being written
	queue []string          // references whose type is to be written
}

// name returns the name of the type that a reference leads to, which is like wanted.
func (w *writer) name(ref, wanted string) string {
	if name := w.names[ref]; name != "" {
		return name
	}
	name := wanted
	for n := 2; w.taken[name]; n++ {
		name = wanted + strconv.Itoa(n)
	}
	w.taken[name], w.names[ref] = true, name
	w.queue = append(w.queue, ref)
	return name
}

// resolve returns what a reference of the form #/a/b leads to.
func (w *writer) resolve(ref string) (any, bool) {
	if ref == "#" {
		return w.root, true
	}
	path, ok := strings.CutPrefix(ref, "#/")
	if !ok || strings.Contains(path, "%") {
		return nil, false
	}
	at := w.root
	for segment := range strings.SplitSeq(path, "/") {
		segment = strings.ReplaceAll(strings.ReplaceAll(segment, "~1", "/"), "~0", "~")
		switch v := at.(type) {
		case map[string]any:
			if at, ok = v[segment]; !ok {
				return nil, false
			}
		case []any:
			i, err := strconv.Atoi(segment)
			if err != nil || i < 0 || i >= len(v) {
				return nil, false
			}
			at = v[i]
		default:
			return nil, false
		}
	}
	return at, true
}

// typeOf returns the type of what a schema takes.
func (w *writer) typeOf(schema any, indent string, depth int) string {
	m, is := schema.(map[string]any)
	switch {
	case schema == false:
		return "never"
	case !is || depth > maxDepth:
		return "unknown"
	}
	var parts []string
	if ref, has := m["$ref"].(string); has {
		if _, ok := w.resolve(ref); ok && (depth > 0 || ref != w.here) { // no type is itself
			parts = append(parts, w.name(ref, w.names["#"]+pascal(ref[strings.LastIndexByte(ref, '/')+1:])))
		}
	}
	if base := w.base(m, indent, depth); base != "unknown" {
		parts = append(parts, base)
	}
	for _, keyword := range []string{"allOf", "anyOf", "oneOf"} {
		branches, _ := m[keyword].([]any)
		var types []string
		for _, b := range branches {
			types = append(types, w.typeOf(b, indent, depth+1))
		}
		if keyword == "allOf" {
			parts = append(parts, slices.DeleteFunc(types, func(t string) bool { return t == "unknown" })...)
		} else if len(types) > 0 && !slices.Contains(types, "unknown") {
			parts = append(parts, union(types))
		}
	}
	return join(parts, " & ", "unknown")
}

// base is the type without what is combined from other schemas.
func (w *writer) base(m map[string]any, indent string, depth int) string {
	if v, has := m["const"]; has {
		return literal(v)
	}
	if values, has := m["enum"].([]any); has {
		var all []string
		for _, v := range values {
			all = append(all, literal(v))
		}
		return union(all)
	}
	var names []string
	switch t := m["type"].(type) {
	case string:
		names = []string{t}
	case []any:
		for _, v := range t {
			if name, is := v.(string); is {
				names = append(names, name)
			}
		}
	default:
		return "unknown" // without a type, a payload with properties need not be an object
	}
	var types []string
	for _, name := range names {
		switch name {
		case "integer", "number":
			types = append(types, "number")
		case "array":
			types = append(types, w.array(m, indent, depth))
		case "object":
			types = append(types, w.object(m, indent, depth))
		default:
			types = append(types, name)
		}
	}
	return union(types)
}

func (w *writer) array(m map[string]any, indent string, depth int) string {
	rest := "unknown"
	items, has := m["items"]
	if has {
		rest = w.typeOf(items, indent, depth+1)
	}
	prefix, _ := m["prefixItems"].([]any)
	if len(prefix) == 0 {
		return "Array<" + rest + ">"
	}
	var all []string
	for _, p := range prefix {
		all = append(all, "("+w.typeOf(p, indent, depth+1)+")?") // an array may be shorter
	}
	if rest != "never" {
		all = append(all, "...Array<"+rest+">")
	}
	return "[" + strings.Join(all, ", ") + "]"
}

func (w *writer) object(m map[string]any, indent string, depth int) string {
	properties, _ := m["properties"].(map[string]any)
	required := make(map[string]bool)
	list, _ := m["required"].([]any)
	for _, v := range list {
		if name, is := v.(string); is {
			required[name] = true
		}
	}
	more, open := m["additionalProperties"]
	_, patterns := m["patternProperties"]
	if len(properties) == 0 && len(required) == 0 {
		switch {
		case open && more == false && !patterns:
			return "Record<string, never>"
		case open && !patterns:
			return "Record<string, " + w.typeOf(more, indent, depth+1) + ">"
		default:
			return "Record<string, unknown>"
		}
	}
	var b strings.Builder
	b.WriteString("{\n")
	inner := indent + "  "
	names := slices.Collect(maps.Keys(properties))
	for name := range required {
		if _, declared := properties[name]; !declared {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		kind := "unknown"
		if p, declared := properties[name]; declared {
			b.WriteString(comment(p, inner))
			kind = w.typeOf(p, inner, depth+1)
		}
		mark := "?"
		if required[name] {
			mark = ""
		}
		fmt.Fprintf(&b, "%s%s%s: %s;\n", inner, property(name), mark, kind)
	}
	if open && more != false || patterns {
		fmt.Fprintf(&b, "%s[name: string]: unknown;\n", inner)
	}
	b.WriteString(indent + "}")
	return b.String()
}

// union joins alternatives, each once.
func union(types []string) string {
	var all []string
	for _, t := range types {
		if !slices.Contains(all, t) && t != "never" {
			all = append(all, t)
		}
	}
	if len(all) == 0 && len(types) > 0 {
		return "never"
	}
	return join(all, " | ", "unknown")
}

// join joins types, of which some may be several themselves.
func join(types []string, by, none string) string {
	switch len(types) {
	case 0:
		return none
	case 1:
		return types[0]
	}
	for i, t := range types {
		if strings.Contains(t, " | ") || strings.Contains(t, " & ") {
			types[i] = "(" + t + ")"
		}
	}
	return strings.Join(types, by)
}

// literal is the type of one value.
func literal(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case string:
		return quote(v)
	case json.Number:
		if f, err := v.Float64(); err == nil {
			if text, err := json.Marshal(f); err == nil {
				return string(text)
			}
		}
		return "number"
	}
	return "unknown"
}

// quote is a string of TypeScript.
func quote(s string) string {
	text, err := json.Marshal(s) // which escapes U+2028, too
	if err != nil {
		return `""`
	}
	return string(text)
}

var identifier = regexp.MustCompile(`^[A-Za-z_$][A-Za-z0-9_$]*$`)

// property is the name of a member.
func property(name string) string {
	if identifier.MatchString(name) {
		return name
	}
	return quote(name)
}

// pascal makes a name of a type: CartsPaid of carts.paid.
func pascal(text string) string {
	var b strings.Builder
	up := true
	for _, r := range text {
		switch {
		case r >= 'a' && r <= 'z' && up:
			b.WriteRune(r - 'a' + 'A')
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			b.WriteRune(r)
		default:
			up = true
			continue
		}
		up = false
	}
	name := b.String()
	if name == "" || name[0] >= '0' && name[0] <= '9' {
		name = "T" + name
	}
	return name
}

// comment is the description of a schema.
func comment(schema any, indent string) string {
	m, _ := schema.(map[string]any)
	text, _ := m["description"].(string)
	if text = strings.TrimSpace(text); text == "" {
		return ""
	}
	text = strings.ReplaceAll(text, "*/", "*\\/")
	lines := strings.Split(text, "\n")
	if len(lines) == 1 {
		return indent + "/** " + text + " */\n"
	}
	var b strings.Builder
	b.WriteString(indent + "/**\n")
	for _, line := range lines {
		b.WriteString(strings.TrimRight(indent+" * "+strings.TrimSpace(line), " ") + "\n")
	}
	b.WriteString(indent + " */\n")
	return b.String()
}
