// Package schema validates JSON payloads against schemas (JSON Schema 2020-12). Most schemas use
// few keywords: type, required, properties, additionalProperties, items, enum, const, bounds and
// lengths. Compile makes a program of those, which reads the bytes of a payload once and allocates
// nothing. A member or an element whose schema has other keywords is left to a library that knows
// all of JSON Schema. The program only ever says that a payload is valid. Whatever it does not say
// so of, and all schemas with other keywords at their root, are the library's.
package schema

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"eventhub/jetstream/jsonscan"
)

// Bounds of a schema.
const (
	// MaxBytes is the most bytes of a schema.
	MaxBytes = 256 << 10
	// MaxDepth is the most levels of a schema.
	MaxDepth = 64
	// MaxSteps bounds what a schema asks of one value: its subschemas, those of a $ref counted as
	// often as they apply.
	MaxSteps = 100_000
	// MaxPattern is the most instructions of all patterns of a schema: about one for each
	// character, and as many for each repetition.
	MaxPattern = 4_000
	// maxMatching bounds the work of patterns: their instructions times the bytes of a payload.
	maxMatching = 256 << 20
	// maxPointer is the most bytes of Violation.Pointer.
	maxPointer = 256
)

// draft is the only $schema that Compile takes.
const draft = "https://json-schema.org/draft/2020-12/schema"

// place is the base of relative references in a schema. Nothing is ever loaded from there.
const place = "urn:eventhub:schema"

// Schema is a compiled schema. Its methods may be called concurrently.
type Schema struct {
	text    []byte
	program *node // nil: there is none
	library *jsonschema.Schema
	nodes   int // of the program
	parts   int // of the schema, those that no value meets included
	// work is how many steps the schema takes for one value, at most, with as much for every 8
	// values of an enum or names of required.
	work      int
	scoped    bool // parts of it do not mean the same alone
	delegates bool // the program leaves values to the library
	// patterns is how many instructions all patterns have, those of a $ref counted as often as they
	// apply.
	patterns int
}

// Violation says where a payload breaks a schema. It has nothing of the payload but the names of
// members.
type Violation struct {
	// Pointer is a JSON pointer into the payload, cut after 256 bytes. "" is the whole payload.
	Pointer string
	// Keyword is the keyword of the schema that refuses the value, "false" where the schema allows
	// no value, "json" for a payload that is not JSON, "size" for one that takes too many
	// steps with the schema, or "schema" for one that breaks it in a place that takes too many to
	// find.
	Keyword string
}

// String returns the place and the keyword.
func (v *Violation) String() string { return v.Pointer + ": " + v.Keyword }

// Compile compiles a schema of at most 256 KiB and 64 levels. A reference leads to a part of the
// same schema. $schema may be left out, or must name 2020-12. Compile does not keep text.
func Compile(text []byte) (*Schema, error) {
	if len(text) > MaxBytes {
		return nil, fmt.Errorf("has %d bytes, at most %d are allowed", len(text), MaxBytes)
	}
	if !jsonscan.Valid(text) {
		return nil, errors.New("is not JSON")
	}
	if depth := levels(text); depth > MaxDepth {
		return nil, fmt.Errorf("has %d levels, at most %d are allowed", depth, MaxDepth)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("is not JSON: %w", err)
	}
	if err := checkDraft(doc); err != nil {
		return nil, err
	}
	if err := checkSteps(doc); err != nil {
		return nil, err
	}
	if err := checkNumbers(doc); err != nil {
		return nil, err
	}
	patterns, err := checkPatterns(doc)
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(noLoader{})
	if err := c.AddResource(place, doc); err != nil {
		return nil, reason(err)
	}
	library, err := c.Compile(place)
	if err != nil {
		return nil, reason(err)
	}
	s := &Schema{text: slices.Clone(text), work: workOf(doc), scoped: has(doc, scoped...), library: library, patterns: patterns, parts: partsOf(doc)}
	subschema := func(at string) *jsonschema.Schema {
		sub, err := c.Compile(place + "#" + at)
		if err != nil {
			return nil
		}
		s.delegates = true
		return sub
	}
	s.program, s.nodes = newProgram(doc, subschema, func(sub *jsonschema.Schema, v []byte) bool { return s.judgement(sub, decode(v)) == nil })
	return s, nil
}

// Size estimates the memory of the schema in bytes.
func (s *Schema) Size() int {
	return 16*len(s.text) + 256*s.nodes + 1024*s.parts + 512*min(s.patterns, MaxPattern)
}

// Document returns the text of the schema. The caller must not change it.
func (s *Schema) Document() []byte { return s.text }

// Fast reports whether the schema has a program, so that valid payloads do not need the library.
func (s *Schema) Fast() bool { return s.program != nil }

// Validate returns nil if a payload is valid, and one of its violations otherwise: always the same
// one. It does not change or keep doc.
func (s *Schema) Validate(doc []byte) *Violation {
	if s.patterns*len(doc) > maxMatching {
		return &Violation{Keyword: "pattern"}
	}
	if s.program != nil && (!s.delegates || s.work*values(doc) <= delegated) && s.program.accepts(doc) {
		return nil
	}
	return s.judge(doc)
}

// values returns how many values a payload has at most.
func values(doc []byte) int {
	return 1 + bytes.Count(doc, []byte{','}) + bytes.Count(doc, []byte{'['}) + bytes.Count(doc, []byte{'{'})
}

// judge is Validate by the library.
func (s *Schema) judge(doc []byte) *Violation {
	if !jsonscan.Valid(doc) { // which is stricter about UTF-8 than encoding/json
		return &Violation{Keyword: "json"}
	}
	return s.judgement(s.library, decode(doc))
}

// first returns the violation with the smallest pointer, and of those the one with the smallest
// keyword. It does not look into the branches of what needs one of several.
func first(e *jsonschema.ValidationError) Violation {
	switch e.ErrorKind.(type) {
	case *kind.AnyOf, *kind.OneOf, *kind.Not, *kind.Contains:
		return of(e)
	}
	if len(e.Causes) == 0 {
		return of(e)
	}
	least := first(e.Causes[0])
	for _, cause := range e.Causes[1:] {
		if v := first(cause); v.Pointer < least.Pointer || v.Pointer == least.Pointer && v.Keyword < least.Keyword {
			least = v
		}
	}
	return least
}

// escaper escapes a segment of a JSON pointer.
var escaper = strings.NewReplacer("~", "~0", "/", "~1")

// pointerOf is the pointer to a place. It ends behind the segment with which it is too long.
func pointerOf(path []string) string {
	var p strings.Builder
	for _, segment := range path {
		p.WriteByte('/')
		p.WriteString(escaper.Replace(segment))
		if p.Len() > maxPointer {
			break
		}
	}
	return p.String()
}

// shortPointer cuts a pointer that is too long.
func shortPointer(p string) string {
	if len(p) > maxPointer {
		p = strings.ToValidUTF8(p[:maxPointer], "")
	}
	return p
}

func of(e *jsonschema.ValidationError) Violation {
	v := Violation{Pointer: shortPointer(pointerOf(e.InstanceLocation))}
	switch e.ErrorKind.(type) {
	case *kind.Not:
		v.Keyword = "not"
	case *kind.RefCycle:
		v.Keyword = "$ref"
	default:
		v.Keyword = "false"
		if path := e.ErrorKind.KeywordPath(); len(path) > 0 {
			v.Keyword = path[0]
		}
	}
	return v
}

// noLoader loads nothing.
type noLoader struct{}

var errRemote = errors.New("leads out of the schema: put what it names under $defs")

func (noLoader) Load(string) (any, error) { return nil, errRemote }

// reason makes the errors of the library short: where, and what.
func reason(err error) error {
	if load, ok := errors.AsType[*jsonschema.LoadURLError](err); ok {
		return fmt.Errorf("$ref %s: %w", load.URL, errRemote)
	}
	invalid, ok := errors.AsType[*jsonschema.SchemaValidationError](err)
	if !ok {
		return errors.New(strings.ReplaceAll(err.Error(), place, ""))
	}
	broken, ok := errors.AsType[*jsonschema.ValidationError](invalid.Err)
	if !ok {
		return errors.New("is no JSON Schema 2020-12")
	}
	v := deepest(broken)
	return fmt.Errorf("is no JSON Schema 2020-12: %s: %s", v.Pointer, v.Keyword)
}

// deepest is first, for schemas: their own schema has one branch for each vocabulary.
func deepest(e *jsonschema.ValidationError) Violation {
	if len(e.Causes) == 0 {
		return of(e)
	}
	best := deepest(e.Causes[0])
	for _, cause := range e.Causes[1:] {
		if v := deepest(cause); len(v.Pointer) > len(best.Pointer) || len(v.Pointer) == len(best.Pointer) && v.Pointer+v.Keyword < best.Pointer+best.Keyword {
			best = v
		}
	}
	return best
}

// checkDraft refuses schemas of other drafts.
func checkDraft(doc any) error {
	object, ok := doc.(map[string]any)
	if !ok {
		return nil
	}
	if given, has := object["$schema"]; has {
		if name, _ := given.(string); strings.TrimSuffix(name, "#") != draft {
			return fmt.Errorf("/$schema: must be %q, or left out", draft)
		}
	}
	return nil
}

// levels returns how deep a valid text is.
func levels(text []byte) (most int) {
	level, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			level++
			most = max(most, level)
		case c == '}' || c == ']':
			level--
		}
	}
	return most
}

// checkSteps refuses schemas whose references multiply: of 64 definitions that each name the next
// one twice, a validation would not end.
func checkSteps(doc any) error {
	w := &stepCounter{root: doc, most: MaxSteps, known: make(map[string]int), open: make(map[string]bool), weigh: func(string, any) int { return 0 }, object: 1}
	if w.count(doc) > MaxSteps {
		return fmt.Errorf("its references multiply to more than %d subschemas: use fewer of them", MaxSteps)
	}
	return nil
}

// workOf returns how many steps a schema takes for one value: see Schema.work.
func workOf(doc any) int {
	w := &stepCounter{root: doc, most: explained, known: make(map[string]int), open: make(map[string]bool), object: 1, weigh: func(keyword string, v any) (n int) {
		switch keyword {
		case "enum", "required":
			list, _ := v.([]any)
			n = len(list)
		case "dependentRequired":
			all, _ := v.(map[string]any)
			for _, names := range all {
				list, _ := names.([]any)
				n += len(list)
			}
		}
		return n / 8
	}}
	return w.count(doc)
}

// partsOf returns how many objects and truth values a schema has, which may be schemas.
func partsOf(doc any) (n int) {
	switch doc := doc.(type) {
	case bool:
		n = 1
	case map[string]any:
		n = 1
		for _, member := range doc {
			n += partsOf(member)
		}
	case []any:
		for _, element := range doc {
			n += partsOf(element)
		}
	}
	return n
}

// stepCounter counts subschemas. A reference within what it leads to counts once.
type stepCounter struct {
	root any
	most int // it counts no further
	// object is what an object counts, and weigh what a keyword counts in addition.
	object int
	weigh  func(keyword string, v any) int
	known  map[string]int
	open   map[string]bool
}

func (w *stepCounter) count(v any) int {
	n := 0
	switch v := v.(type) {
	case map[string]any:
		n = w.object
		for name, member := range v {
			n += w.weigh(name, member)
			switch name {
			case "$ref", "$dynamicRef":
				if to, ok := member.(string); ok {
					n += w.target(to)
				}
			case "$defs", "definitions", "enum", "const", "examples", "default":
			default:
				n += w.count(member)
			}
			if n > w.most {
				return n
			}
		}
	case []any:
		for _, member := range v {
			if n += w.count(member); n > w.most {
				return n
			}
		}
	}
	return n
}

func (w *stepCounter) target(to string) int {
	if n, ok := w.known[to]; ok {
		return n
	}
	if w.open[to] {
		return w.object
	}
	w.open[to] = true
	n := w.object
	if v, ok := resolve(w.root, to); ok {
		n = w.count(v)
	}
	delete(w.open, to)
	w.known[to] = n
	return n
}

// resolve returns what a reference of the form #/a/b leads to.
func resolve(root any, to string) (any, bool) {
	if to == "#" {
		return root, true
	}
	path, ok := strings.CutPrefix(to, "#/")
	if !ok || strings.Contains(path, "%") {
		return nil, false
	}
	at := root
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
