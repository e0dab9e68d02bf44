// Package compat tells whether documents of one version of a JSON Schema are documents of another
// one. A version is backward compatible with an earlier one if it takes every document of it, and
// forward compatible if the earlier one takes every document of the new one.
//
// The comparison is structural and errs on the safe side. It says that one schema includes another
// only if it does. Where it cannot decide, as with two different patterns, its finding is unknown.
package compat

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"eventhub/jetstream/schema"
)

// Mode is what a new version of a schema has to be compatible with.
type Mode string

// The modes. A transitive one is about all earlier versions, and the others about the latest one.
const (
	None               Mode = "none"
	Backward           Mode = "backward"
	BackwardTransitive Mode = "backward_transitive"
	Forward            Mode = "forward"
	ForwardTransitive  Mode = "forward_transitive"
	Full               Mode = "full"
	FullTransitive     Mode = "full_transitive"
)

// Modes are all modes.
var Modes = []Mode{None, Backward, BackwardTransitive, Forward, ForwardTransitive, Full, FullTransitive}

// Valid reports whether m is one of the modes.
func (m Mode) Valid() bool { return slices.Contains(Modes, m) }

// Transitive reports whether m is about all earlier versions.
func (m Mode) Transitive() bool { return strings.HasSuffix(string(m), "_transitive") }

// Backward reports whether the new version has to take documents of earlier ones.
func (m Mode) Backward() bool {
	return strings.HasPrefix(string(m), "backward") || strings.HasPrefix(string(m), "full")
}

// Forward reports whether earlier versions have to take documents of the new one.
func (m Mode) Forward() bool {
	return strings.HasPrefix(string(m), "forward") || strings.HasPrefix(string(m), "full")
}

// Finding is why a reader's schema does not take all documents of a writer's schema.
type Finding struct {
	// Rule names the difference: one of Rules.
	Rule string `json:"rule"`
	// At is the place in the documents, a JSON pointer. A segment * stands for every element of an
	// array, or for every member that the schema does not name.
	At string `json:"at"`
	// Unknown says that the difference may be harmless.
	Unknown bool `json:"unknown,omitempty"`
}

// String returns the place, the rule, and whether the difference may be harmless.
func (f Finding) String() string {
	text := f.At + ": " + f.Rule
	if f.Unknown {
		text += " (unknown)"
	}
	return text
}

// Rules are the differences that are found, and what each means.
var Rules = map[string]string{
	"type_narrowed":                        "the reader does not take a type of value that the writer writes",
	"enum_narrowed":                        "the reader does not take a value that the writer writes",
	"enum_added":                           "the reader takes certain values only, and the writer writes any",
	"never_valid":                          "the reader takes no value here",
	"minimum_raised":                       "the reader's minimum is above the writer's",
	"maximum_lowered":                      "the reader's maximum is below the writer's",
	"multiple_of_narrowed":                 "the reader takes multiples only that the writer does not keep to",
	"min_length_raised":                    "the reader's minLength is above the writer's",
	"max_length_lowered":                   "the reader's maxLength is below the writer's",
	"pattern_added":                        "the reader has a pattern, and the writer none",
	"pattern_changed":                      "two patterns differ",
	"min_items_raised":                     "the reader's minItems is above the writer's",
	"max_items_lowered":                    "the reader's maxItems is below the writer's",
	"unique_items_added":                   "the reader wants unique items",
	"items_closed":                         "the reader takes no element at a position where the writer writes one",
	"required_added":                       "the reader wants a member that the writer may leave out",
	"property_added_to_open_content_model": "the writer may write anything under a name that the reader gives a schema",
	"property_added_not_covered_by_partially_open":   "what the writer may write under undeclared names does not fit a schema of the reader",
	"property_removed_from_closed_content_model":     "the reader takes no member of a name that the writer declares",
	"property_removed_not_covered_by_partially_open": "a member of the writer does not fit what the reader takes under undeclared names",
	"content_model_closed":                           "the reader takes no undeclared members, and the writer may write them",
	"min_properties_raised":                          "the reader's minProperties is above the writer's",
	"max_properties_lowered":                         "the reader's maxProperties is below the writer's",
	"pattern_properties_changed":                     "two sets of patternProperties differ",
	"property_names_changed":                         "the reader restricts names in another way than the writer",
	"dependency_added":                               "the reader wants a member beside another one, and the writer may leave the first out",
	"any_of_narrowed":                                "no alternative of the reader was found that takes all that the writer writes",
	"one_of_narrowed":                                "alternatives of the reader may overlap, or none takes all that the writer writes",
	"not_changed":                                    "the reader excludes values in another way than the writer",
	"condition_changed":                              "conditions differ",
	"keyword_changed":                                "a keyword that is not compared differs",
	"reference_unknown":                              "a reference is not followed",
	"too_complex":                                    "the schemas are too complex to be compared",
}

// Fill is a value for a member that the reader requires and the writer may leave out. The reader's
// schema has the value as default.
type Fill struct {
	// At is a place in the documents, a JSON pointer in which * is a segment for every element.
	At    string
	Value json.RawMessage
	// Existing says that the object around the place may be missing, or be no object. The value is
	// filled in only where the object is there.
	Existing bool
}

// Report is what a comparison found.
type Report struct {
	// Findings are sorted. None means that the reader takes all documents of the writer, once Fills
	// and Drops are applied to them.
	Findings []Finding
	// Fills are members that documents of the writer lack. They are sorted.
	Fills []Fill
	// Drops are places of members that the reader does not take. Only a lenient comparison has
	// them.
	Drops []string
}

// Operations returns what Fills and Drops do to a document, as a list for package upcast; nil if
// there are none.
func (r *Report) Operations() json.RawMessage {
	var all []any
	for _, f := range r.Fills {
		args := map[string]any{"at": f.At, "value": f.Value}
		if f.Existing {
			args["existing"] = true
		}
		all = append(all, map[string]any{"default": args})
	}
	for _, at := range r.Drops {
		all = append(all, map[string]any{"remove": map[string]any{"at": at}})
	}
	if len(all) == 0 {
		return nil
	}
	text, err := json.Marshal(all)
	if err != nil {
		return nil // a Value is JSON
	}
	return text
}

// maxFindings bounds the findings of a comparison.
const maxFindings = 100

// Bounds of a comparison: how many subschemas are compared, and how many a document of the writer
// has to keep to at one place.
const (
	maxSteps = 20_000
	maxParts = 64
)

// Includes compares the schema of a reader with that of a writer. Both are texts that
// schema.Compile takes.
//
// A lenient comparison takes it that nobody writes undeclared members under a name that the other
// schema declares, and that a reader leaves out optional members that it does not declare.
func Includes(reader, writer []byte, lenient bool) (*Report, error) {
	r, err := newTree(reader)
	if err != nil {
		return nil, fmt.Errorf("the reader's schema %w", err)
	}
	w, err := newTree(writer)
	if err != nil {
		return nil, fmt.Errorf("the writer's schema %w", err)
	}
	c := &comparison{lenient: lenient, report: &Report{}, open: make(map[string]int)}
	c.includes(r.root(), []node{w.root()}, where{})
	report := c.report
	slices.SortFunc(report.Findings, func(a, b Finding) int { return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Rule, b.Rule)) })
	report.Findings = slices.Compact(report.Findings)
	slices.SortFunc(report.Fills, func(a, b Fill) int { return cmp.Compare(a.At, b.At) })
	report.Fills = slices.CompactFunc(report.Fills, func(a, b Fill) bool { return a.At == b.At })
	slices.Sort(report.Drops)
	report.Drops = slices.Compact(report.Drops)
	return report, nil
}

// tree is a schema as values: maps, slices, json.Numbers and so on.
type tree struct {
	doc   any
	parts *schema.Parts
	// patterns are compiled; nil for what does not compile.
	patterns map[string]*regexp.Regexp
}

func newTree(text []byte) (*tree, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, errors.New("is not JSON")
	}
	parts, err := schema.NewParts(text)
	if err != nil {
		return nil, errors.New("is no JSON Schema 2020-12")
	}
	return &tree{doc, parts, make(map[string]*regexp.Regexp)}, nil
}

func (t *tree) root() node { return node{tree: t, v: t.doc} }

// node is a subschema, and where it is in its tree.
type node struct {
	tree *tree
	at   string // a JSON pointer
	v    any
	flat bool // what it combines by allOf and $ref stands beside it
}

// object returns the keywords of the schema, which is nil for true and false.
func (n node) object() map[string]any {
	m, _ := n.v.(map[string]any)
	return m
}

// always reports whether the schema takes every value.
func (n node) always() bool {
	if b, is := n.v.(bool); is {
		return b
	}
	for k := range n.object() {
		if !annotations[k] {
			return false
		}
	}
	return true
}

// never reports whether the schema is false.
func (n node) never() bool {
	b, is := n.v.(bool)
	return is && !b
}

// sub returns the subschema under a path of keywords, names and indexes.
func (n node) sub(v any, path ...string) node {
	return node{tree: n.tree, at: n.at + pointer(path), v: v}
}

// pointer is a JSON pointer of segments.
func pointer(path []string) string {
	var b strings.Builder
	for _, segment := range path {
		b.WriteByte('/')
		b.WriteString(escaper.Replace(segment))
	}
	return b.String()
}

var escaper = strings.NewReplacer("~", "~0", "/", "~1")

// takes reports whether a value is valid. known is false if that cannot be told.
func (n node) takes(value any) (valid, known bool) {
	if b, is := n.v.(bool); is {
		return b, true
	}
	if n.tree == nil {
		return false, false // it was made for the comparison
	}
	return n.tree.parts.Takes(n.at, value)
}

// annotations are keywords that make nothing invalid.
var annotations = map[string]bool{
	"$schema": true, "$anchor": true, "$comment": true, "$defs": true, "definitions": true, "$vocabulary": true,
	"title": true, "description": true, "default": true, "examples": true, "deprecated": true, "readOnly": true, "writeOnly": true,
	"format": true, "contentEncoding": true, "contentMediaType": true, "contentSchema": true,
}
