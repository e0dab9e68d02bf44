package asyncapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// Keywords whose value is a schema, a list of schemas, or schemas by name.
var (
	ofSchema = []string{
		"additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedItems",
		"unevaluatedProperties",
	}
	ofList  = []string{"allOf", "anyOf", "oneOf", "prefixItems"}
	ofNames = []string{"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)

// embed returns a schema for a place in a document. Its references lead to that place. It has no
// $id, $anchor and $dynamicAnchor, which would change or double what references mean.
func embed(text json.RawMessage, place string) (any, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var root any
	if err := d.Decode(&root); err != nil {
		return nil, fmt.Errorf("read the schema: %w", err)
	}
	e := &embedder{root: root, place: place, seen: make(map[string]bool), targets: make(map[string]string)}
	base := &url.URL{Scheme: "schema", Path: "/"}
	e.targets[base.String()] = ""
	e.walk(root, "", base)
	// A reference may lead to a place that is no schema by its keyword, which has references, too.
	for len(e.refs) > 0 {
		next := e.refs[0]
		e.refs = e.refs[1:]
		if err := e.follow(next); err != nil {
			return nil, err
		}
	}
	for _, schema := range e.schemas {
		delete(schema, "$id")
		delete(schema, "$anchor")
		delete(schema, "$dynamicAnchor")
	}
	return root, nil
}

// reference is a $ref or $dynamicRef.
type reference struct {
	in      map[string]any
	keyword string
	base    *url.URL
}

type embedder struct {
	root    any
	place   string
	seen    map[string]bool   // the pointers of schemas
	targets map[string]string // the pointers of schemas with $id or an anchor, by URI
	schemas []map[string]any
	refs    []reference
	ids     int // of schemas inside the schema
}

// walk finds the references of a schema and of those in it.
func (e *embedder) walk(v any, at string, base *url.URL) {
	schema, ok := v.(map[string]any)
	if !ok || e.seen[at] {
		return
	}
	e.seen[at] = true
	e.schemas = append(e.schemas, schema)
	if id, ok := schema["$id"].(string); ok {
		if u, err := base.Parse(id); err == nil {
			u.Fragment, u.RawFragment = "", ""
			base = u
			e.targets[base.String()] = at
			if at != "" {
				e.ids++
			}
		}
	}
	for _, keyword := range []string{"$anchor", "$dynamicAnchor"} {
		if name, ok := schema[keyword].(string); ok {
			e.targets[base.String()+"#"+name] = at
		}
	}
	for _, keyword := range []string{"$ref", "$dynamicRef"} {
		if _, ok := schema[keyword].(string); ok {
			e.refs = append(e.refs, reference{schema, keyword, base})
		}
	}
	for _, keyword := range ofSchema {
		e.walk(schema[keyword], at+"/"+keyword, base)
	}
	for _, keyword := range ofList {
		list, _ := schema[keyword].([]any)
		for i, item := range list {
			e.walk(item, at+"/"+keyword+"/"+strconv.Itoa(i), base)
		}
	}
	for _, keyword := range ofNames {
		names, _ := schema[keyword].(map[string]any)
		for name, item := range names {
			e.walk(item, at+"/"+keyword+"/"+escape.Replace(name), base)
		}
	}
}

// escape and unescape are those of JSON pointers.
var escape, unescape = strings.NewReplacer("~", "~0", "/", "~1"), strings.NewReplacer("~1", "/", "~0", "~")

// follow has a reference lead to the place of its target in the document.
func (e *embedder) follow(r reference) error {
	text, _ := r.in[r.keyword].(string)
	if r.keyword == "$dynamicRef" && e.ids > 0 {
		return errors.New("$dynamicRef beside an $id inside the schema has no meaning in an AsyncAPI document")
	}
	to, err := r.base.Parse(text)
	if err != nil {
		return fmt.Errorf("%s %q: %w", r.keyword, text, err)
	}
	fragment := to.Fragment
	to.Fragment, to.RawFragment = "", ""
	at, known := e.targets[to.String()]
	if fragment != "" && fragment[0] != '/' {
		at, known = e.targets[to.String()+"#"+fragment]
		fragment = ""
	}
	if !known {
		return fmt.Errorf("%s %q leads to no place in the schema", r.keyword, text)
	}
	at += fragment
	target, err := e.find(at)
	if err != nil {
		return fmt.Errorf("%s %q: %w", r.keyword, text, err)
	}
	e.walk(target, at, to)
	delete(r.in, r.keyword)
	link := e.place + (&url.URL{Path: at}).EscapedPath()
	if _, both := r.in["$ref"]; both { // only once may it be $ref
		all, _ := r.in["allOf"].([]any)
		r.in["allOf"] = append(all, map[string]any{"$ref": link})
		return nil
	}
	r.in["$ref"] = link
	return nil
}

// find returns what is at a pointer.
func (e *embedder) find(at string) (any, error) {
	v := e.root
	for i, part := range strings.Split(at, "/") {
		if i == 0 {
			continue
		}
		part = unescape.Replace(part)
		switch in := v.(type) {
		case map[string]any:
			var ok bool
			if v, ok = in[part]; ok {
				continue
			}
		case []any:
			if n, err := strconv.Atoi(part); err == nil && n >= 0 && n < len(in) {
				v = in[n]
				continue
			}
		}
		return nil, errors.New("nothing is there")
	}
	return v, nil
}
