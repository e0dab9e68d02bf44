// Package schema validates JSON payloads against schemas (JSON Schema 2020-12). Compile lets a
// library compare a schema with the schema of schemas, and resolve its references, and then makes
// rules of it. A judge compares payloads with rules. It has a number of steps, which every loop
// pays, so what a payload costs is bounded whatever its schema says.
//
// Most schemas use few keywords: type, required, properties, additionalProperties, items, enum,
// const, pattern, bounds and lengths. Compile makes a program of those, which reads the bytes of a
// payload once and allocates nothing. The program only ever says that a payload is valid. Whatever
// it does not say so of is the judge's.
package schema

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"eventhub/jetstream/jsonscan"
)

// Bounds of a schema.
const (
	// MaxBytes is the most bytes of a schema.
	MaxBytes = 256 << 10
	// MaxDepth is the most levels of a schema.
	MaxDepth = 64
	// MaxSubschemas is the most subschemas of a schema. The library takes time by their square: for
	// so many about half a second.
	MaxSubschemas = 10_000
	// MaxSteps bounds what a schema asks of one value: its subschemas, those of a $ref counted as
	// often as they apply.
	MaxSteps = 100_000
	// MaxPattern is the most instructions of all patterns of a schema: about one for each
	// character, and as many for each repetition.
	MaxPattern = 4_000
	// maxPointer is the most bytes of Violation.Pointer.
	maxPointer = 256
)

// draft is the only $schema that Compile takes.
const draft = "https://json-schema.org/draft/2020-12/schema"

// place is the base of relative references in a schema. Nothing is ever loaded from there.
const place = "urn:eventhub:schema"

// Schema is a compiled schema. Its methods may be called concurrently.
type Schema struct {
	text         []byte
	rule         *rule
	rules        int   // how many there are
	instructions int   // of its patterns
	program      *node // nil: there is none
	nodes        int   // of the program
}

// StepTime is about what a step takes.
const StepTime = 25 * time.Nanosecond

// Steps of Brief: about 0.1 ms, and about a millisecond with decoding the payload.
const (
	QuickSteps = 1 << 12
	BriefSteps = 1 << 14
)

// Violation says where a payload breaks a schema. It has nothing of the payload but the names of
// members.
type Violation struct {
	// Pointer is a JSON pointer into the payload, cut after 256 bytes. "" is the whole payload.
	Pointer string
	// Keyword is the keyword of the schema that refuses the value, "false" where the schema allows
	// no value, "json" for a payload that is not JSON, and "size" for one that takes too many steps
	// with the schema ("pattern" if these are steps of a pattern).
	Keyword string
}

// String returns the place and the keyword.
func (v *Violation) String() string { return v.Pointer + ": " + v.Keyword }

// Compile compiles a schema of at most 256 KiB, 64 levels and 10,000 subschemas. A reference leads
// to a part of the same schema. $schema may be left out, or must name 2020-12. Compile does not
// keep text.
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
	if err := checkPatterns(doc); err != nil {
		return nil, err
	}
	l, err := newLinker(doc)
	if err != nil {
		return nil, err
	}
	if l.subschemas > MaxSubschemas {
		return nil, fmt.Errorf("has %d subschemas, at most %d are allowed", l.subschemas, MaxSubschemas)
	}
	first, err := l.link("")
	if err != nil {
		return nil, err
	}
	s := &Schema{text: slices.Clone(text), rule: first, rules: len(l.rules)}
	for _, p := range l.patterns {
		s.instructions += p.size
	}
	if !l.scoped {
		s.program, s.nodes = newProgram(s.rule)
	}
	return s, nil
}

// Size estimates the memory of the schema in bytes.
func (s *Schema) Size() int {
	return 32*len(s.text) + 256*s.nodes + 1024*s.rules + 512*s.instructions
}

// Document returns the text of the schema. The caller must not change it.
func (s *Schema) Document() []byte { return s.text }

// Fast reports whether the schema has a program, so that valid payloads need no judge.
func (s *Schema) Fast() bool { return s.program != nil }

// Validate returns nil if a payload is valid, and one of its violations otherwise: always the same
// one. It does not change or keep doc.
func (s *Schema) Validate(doc []byte) *Violation { return s.ValidateResting(doc, nil) }

// ValidateResting is Validate for what takes long: it calls rest about every 0.2 ms.
func (s *Schema) ValidateResting(doc []byte, rest func()) *Violation {
	// Where patterns may take long, a judge alone does not match twice what the program does not
	// accept.
	if s.program != nil && s.instructions*len(doc) <= matchingAStep*4*BriefSteps && s.program.accepts(doc, &matching{left: maxSteps}) {
		return nil
	}
	return s.judge(doc, rest)
}

// Brief is Validate for what takes few steps, at most BriefSteps. Beyond them done is false, and
// Validate has to be called. took are the steps that were done.
func (s *Schema) Brief(doc []byte, steps int) (broken *Violation, took int, done bool) {
	if len(doc) > bytesBrief*steps {
		return nil, 0, false
	}
	if s.program != nil {
		m := matching{left: steps, timed: true}
		valid := s.program.accepts(doc, &m)
		switch took = len(doc)/scanning + steps - m.left; {
		case valid:
			return nil, took, true
		case m.spent:
			return nil, took, false
		}
	}
	if !jsonscan.Valid(doc) {
		return &Violation{Keyword: "json"}, took, true
	}
	broken, spent, judged := s.rule.judgement(decode(doc, nil), steps, nil)
	return broken, took + len(doc)/decoding + judged, spent <= steps
}

// judge is Validate without the program.
func (s *Schema) judge(doc []byte, rest func()) *Violation {
	if !jsonscan.Valid(doc) { // which is stricter about UTF-8 than encoding/json
		return &Violation{Keyword: "json"}
	}
	broken, _, _ := s.rule.judgement(decode(doc, rest), maxSteps, rest)
	return broken
}

// escaper escapes a segment of a JSON pointer.
var escaper = strings.NewReplacer("~", "~0", "/", "~1")

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

// deepest returns the violation with the longest pointer: the schema of schemas has one branch for
// each vocabulary.
func deepest(e *jsonschema.ValidationError) (best Violation) {
	if len(e.Causes) == 0 {
		return of(e)
	}
	for i, cause := range e.Causes {
		if v := deepest(cause); i == 0 || len(v.Pointer) > len(best.Pointer) || len(v.Pointer) == len(best.Pointer) && v.Pointer+v.Keyword < best.Pointer+best.Keyword {
			best = v
		}
	}
	return best
}

func of(e *jsonschema.ValidationError) Violation {
	v := Violation{Keyword: "false"}
	for _, segment := range e.InstanceLocation {
		v.Pointer += "/" + escaper.Replace(segment)
	}
	if path := e.ErrorKind.KeywordPath(); len(path) > 0 {
		v.Keyword = path[0]
	}
	return v
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
	w := &stepCounter{root: doc, most: MaxSteps, known: make(map[string]int), open: make(map[string]bool)}
	if w.count(doc) > MaxSteps {
		return fmt.Errorf("its references multiply to more than %d subschemas: use fewer of them", MaxSteps)
	}
	return nil
}

// stepCounter counts subschemas. A reference within what it leads to counts once.
type stepCounter struct {
	root  any
	most  int // it counts no further
	known map[string]int
	open  map[string]bool
}

func (w *stepCounter) count(v any) int {
	n := 0
	switch v := v.(type) {
	case map[string]any:
		n = 1
		for name, member := range v {
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
		return 1
	}
	w.open[to] = true
	n := 1
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
