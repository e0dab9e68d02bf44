package schema

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// rule is a schema as a judge reads it. It leads to the rules of its subschemas and references, in
// circles, too. Rules do not change once they are made.
type rule struct {
	resource *resource
	always   bool  // the rule takes every value
	never    bool  // the rule takes no value
	types    types // 0: any
	// constant and enum are nil without const and enum.
	constant, enum set

	ref, dynamic *rule
	anchor       string // of $dynamicRef, if the way to it decides where it leads
	allOf        []*rule
	anyOf, oneOf []*rule
	not          *rule
	when, then   *rule // if and then
	otherwise    *rule // else
	combines     bool  // one of these is set

	required    []string
	dependents  []dependent
	properties  map[string]*rule
	patterns    []patternRule // patternProperties
	additional  *rule         // additionalProperties
	closed      bool          // additionalProperties is false
	names       *rule         // propertyNames
	looksInside bool          // one of these five is set
	unevaluated *rule         // unevaluatedProperties
	members     span

	prefix           []*rule // prefixItems
	items            *rule
	contains         *rule
	once             bool // without minContains, one element is enough
	contained        span
	unevaluatedItems *rule
	unique           bool
	elements         span

	length  span // in code points
	pattern *pattern

	minimum, maximum           *number
	exclusiveMin, exclusiveMax *number
	multipleOf                 *divisor
	numbers                    bool // one of these is set
}

// onlyRefers reports whether a rule is that of a $ref alone.
func (r *rule) onlyRefers() bool {
	return r.dynamic == nil && r.not == nil && r.when == nil && len(r.allOf)+len(r.anyOf)+len(r.oneOf) == 0 &&
		r.types == 0 && r.constant == nil && r.enum == nil && r.pattern == nil && !r.numbers && !r.looksInside && !r.unique &&
		len(r.required)+len(r.dependents)+len(r.prefix) == 0 && r.items == nil && r.contains == nil && r.unevaluated == nil && r.unevaluatedItems == nil &&
		r.members == anySpan && r.elements == anySpan && r.length == anySpan
}

// span bounds a count. A most of -1 is no bound.
type span struct{ least, most int }

// anySpan is no bound.
var anySpan = span{0, -1}

func (s span) few(n int) bool  { return n < s.least }
func (s span) many(n int) bool { return s.most >= 0 && n > s.most }

// dependent is what a member asks for where it is.
type dependent struct {
	keyword  string
	name     string
	required []string
	rule     *rule
}

type patternRule struct {
	*pattern
	rule *rule
}

// pattern is a compiled pattern, and how many instructions it has.
type pattern struct {
	*regexp.Regexp
	size int
}

// cost is the most steps that a match takes. A match cannot be stopped.
func (p *pattern) cost(bytes int) int { return p.size * (bytes + 1) / matchingAStep }

// timed matches, and returns how many steps that took: most patterns take far fewer than their
// cost, and no fewer than a part of it are counted.
func timed(cost int, match func() bool) (ok bool, took int) {
	if cost < timedFrom {
		return match(), cost
	}
	began := time.Now()
	ok = match()
	return ok, min(cost, max(int(time.Since(began)/StepTime), cost/timedLeast))
}

// set has values in the order of their hashes.
type set []value

func newSet(values []any) set {
	text, _ := json.Marshal(values)
	all := append(set{}, decode(text, nil).elements...)
	j := judge{left: math.MaxInt}
	for i := range all {
		j.sum(&all[i])
	}
	slices.SortFunc(all, func(a, b value) int { return cmp.Compare(a.hash, b.hash) })
	return all
}

// resource is a schema with an $id, or a whole document: what one $dynamicRef can lead to.
type resource struct {
	anchors map[string]*rule // $dynamicAnchor
}

// linker makes rules of the schemas of the library, which has resolved all references.
type linker struct {
	library   *jsonschema.Compiler
	rules     map[*jsonschema.Schema]*rule
	todo      []*jsonschema.Schema
	patterns  map[string]*pattern
	resources map[string]*resource // by place; nil for one that no rule is in yet
	// anchored are the places of schemas with a $dynamicAnchor in a resource of the document.
	anchored map[string][]string
	scoped   bool // a rule asks which other rules led to it
	// subschemas is how many the document has.
	subschemas int
}

func newLinker(doc any) (*linker, error) {
	l := &linker{
		library: jsonschema.NewCompiler(), rules: make(map[*jsonschema.Schema]*rule), patterns: make(map[string]*pattern),
		resources: make(map[string]*resource), anchored: make(map[string][]string),
	}
	l.library.DefaultDraft(jsonschema.Draft2020)
	l.library.UseLoader(noLoader{})
	if err := l.library.AddResource(place, doc); err != nil {
		return nil, reason(err)
	}
	l.collect(doc, place+"#", place+"#")
	return l, nil
}

// link returns the rule of the subschema at a JSON pointer, and makes those of all that it leads
// to.
func (l *linker) link(pointer string) (*rule, error) {
	fragment := url.URL{Fragment: pointer}
	root, err := l.library.Compile(place + "#" + fragment.EscapedFragment())
	if err != nil {
		return nil, reason(err)
	}
	first := l.rule(root)
	for len(l.todo) > 0 {
		s := l.todo[len(l.todo)-1]
		l.todo = l.todo[:len(l.todo)-1]
		switch at := strings.TrimPrefix(strings.TrimPrefix(s.Location, place), "#"); {
		case s.DraftVersion != 2020:
			return nil, fmt.Errorf("%s: is of another draft than %s", at, draft)
		case s.RecursiveRef != nil:
			return nil, fmt.Errorf("%s/$recursiveRef: is of an earlier draft, use $dynamicRef", at)
		}
		l.fill(l.rules[s], s)
	}
	return first, nil
}

// applicators are the keywords with subschemas: by themselves, in a list, or by name.
var applicators = map[string]string{
	"additionalProperties": "one", "contains": "one", "contentSchema": "one", "else": "one", "if": "one", "items": "one", "not": "one",
	"propertyNames": "one", "then": "one", "unevaluatedItems": "one", "unevaluatedProperties": "one",
	"allOf": "list", "anyOf": "list", "oneOf": "list", "prefixItems": "list",
	"$defs": "names", "definitions": "names", "dependentSchemas": "names", "patternProperties": "names", "properties": "names",
}

// collect finds the resources of a document, and what $dynamicRef may lead to. resource is the
// place of the one around.
func (l *linker) collect(doc any, at, resource string) {
	l.subschemas++
	schema, is := doc.(map[string]any)
	if id, _ := schema["$id"].(string); strings.TrimSuffix(id, "#") != "" || at == resource {
		resource = at
		l.resources[at] = nil
	}
	if anchor, has := schema["$dynamicAnchor"].(string); is && has && anchor != "" {
		l.anchored[resource] = append(l.anchored[resource], at)
	}
	for keyword, v := range schema {
		in := at + "/" + keyword
		switch applicators[keyword] {
		case "one":
			l.collect(v, in, resource)
		case "list":
			list, _ := v.([]any)
			for i, sub := range list {
				l.collect(sub, in+"/"+strconv.Itoa(i), resource)
			}
		case "names":
			names, _ := v.(map[string]any)
			for name, sub := range names {
				l.collect(sub, in+"/"+url.PathEscape(escaper.Replace(name)), resource)
			}
		}
	}
}

// rule returns the rule of a schema, which is filled in later.
func (l *linker) rule(s *jsonschema.Schema) *rule {
	if s == nil {
		return nil
	}
	r, known := l.rules[s]
	if !known {
		r = &rule{}
		l.rules[s] = r
		l.todo = append(l.todo, s)
	}
	return r
}

func (l *linker) list(all []*jsonschema.Schema) (rules []*rule) {
	for _, s := range all {
		rules = append(rules, l.rule(s))
	}
	return rules
}

// of returns the resource of a schema.
func (l *linker) of(s *jsonschema.Schema) *resource {
	at := s.Location
	root := strings.IndexByte(at, '#') + 1
	for {
		if _, is := l.resources[at]; is || len(at) == root {
			break
		}
		at = at[:max(root, strings.LastIndexByte(at, '/'))]
	}
	r := l.resources[at]
	if r != nil {
		return r
	}
	r = &resource{anchors: make(map[string]*rule)}
	l.resources[at] = r
	places := l.anchored[at]
	if !strings.HasPrefix(at, place+"#") {
		places = []string{at} // the schema of schemas has one anchor in each of its documents
	}
	for _, place := range places {
		if s, err := l.library.Compile(place); err == nil && s.DynamicAnchor != "" {
			r.anchors[s.DynamicAnchor] = l.rule(s)
		}
	}
	return r
}

// fill makes a rule of a schema.
func (l *linker) fill(r *rule, s *jsonschema.Schema) {
	r.resource = l.of(s)
	r.always, r.never = s.Bool != nil && *s.Bool, s.Bool != nil && !*s.Bool
	if s.Types != nil {
		for _, name := range s.Types.ToStrings() {
			r.types |= typeNames[name]
		}
	}
	if s.Const != nil {
		r.constant = newSet([]any{*s.Const})
	}
	if s.Enum != nil {
		r.enum = newSet(s.Enum.Values)
	}
	r.ref = l.rule(s.Ref)
	if s.DynamicRef != nil {
		r.dynamic = l.rule(s.DynamicRef.Ref)
		if s.DynamicRef.Anchor == s.DynamicRef.Ref.DynamicAnchor {
			r.anchor = s.DynamicRef.Anchor
			l.scoped = l.scoped || r.anchor != ""
		}
	}
	r.allOf, r.anyOf, r.oneOf, r.not = l.list(s.AllOf), l.list(s.AnyOf), l.list(s.OneOf), l.rule(s.Not)
	r.when, r.then, r.otherwise = l.rule(s.If), l.rule(s.Then), l.rule(s.Else)
	r.combines = r.ref != nil || r.dynamic != nil || r.not != nil || r.when != nil || len(r.allOf)+len(r.anyOf)+len(r.oneOf) > 0
	l.object(r, s)
	l.array(r, s)
	r.length = spanOf(s.MinLength, s.MaxLength)
	if s.Pattern != nil {
		r.pattern = l.pattern(s.Pattern.String())
	}
	r.minimum, r.maximum, r.exclusiveMin, r.exclusiveMax = limit(s.Minimum), limit(s.Maximum), limit(s.ExclusiveMinimum), limit(s.ExclusiveMaximum)
	if s.MultipleOf != nil {
		r.multipleOf = newDivisor(ofRat(s.MultipleOf))
	}
	r.numbers = s.Minimum != nil || s.Maximum != nil || s.ExclusiveMinimum != nil || s.ExclusiveMaximum != nil || s.MultipleOf != nil
}

// object fills in what a schema says of objects.
func (l *linker) object(r *rule, s *jsonschema.Schema) {
	r.required = s.Required
	for name, names := range s.DependentRequired {
		r.dependents = append(r.dependents, dependent{"dependentRequired", name, names, nil})
	}
	for name, sub := range s.DependentSchemas {
		r.dependents = append(r.dependents, dependent{"dependentSchemas", name, nil, l.rule(sub)})
	}
	for name, of := range s.Dependencies { // as both were called before
		names, _ := of.([]string)
		sub, _ := of.(*jsonschema.Schema)
		r.dependents = append(r.dependents, dependent{"dependencies", name, names, l.rule(sub)})
	}
	slices.SortFunc(r.dependents, func(a, b dependent) int {
		return cmp.Or(strings.Compare(a.name, b.name), strings.Compare(a.keyword, b.keyword))
	})
	if len(s.Properties) > 0 {
		r.properties = make(map[string]*rule, len(s.Properties))
	}
	for name, sub := range s.Properties {
		r.properties[name] = l.rule(sub)
	}
	for re, sub := range s.PatternProperties {
		r.patterns = append(r.patterns, patternRule{l.pattern(re.String()), l.rule(sub)})
	}
	slices.SortFunc(r.patterns, func(a, b patternRule) int { return strings.Compare(a.String(), b.String()) })
	switch rest := s.AdditionalProperties.(type) {
	case bool:
		r.closed, r.additional = !rest, &rule{always: rest, never: !rest}
	case *jsonschema.Schema:
		r.additional = l.rule(rest)
	}
	r.looksInside = len(r.properties)+len(r.patterns) > 0 || r.additional != nil || s.PropertyNames != nil
	r.names, r.unevaluated = l.rule(s.PropertyNames), l.rule(s.UnevaluatedProperties)
	r.members = spanOf(s.MinProperties, s.MaxProperties)
}

// array fills in what a schema says of arrays.
func (l *linker) array(r *rule, s *jsonschema.Schema) {
	r.prefix, r.items, r.contains, r.unevaluatedItems = l.list(s.PrefixItems), l.rule(s.Items2020), l.rule(s.Contains), l.rule(s.UnevaluatedItems)
	r.contained, r.elements, r.unique = spanOf(s.MinContains, s.MaxContains), spanOf(s.MinItems, s.MaxItems), s.UniqueItems
	r.once = s.MinContains == nil
}

func spanOf(least, most *int) span {
	s := anySpan
	if least != nil {
		s.least = *least
	}
	if most != nil {
		s.most = *most
	}
	return s
}

func limit(r *big.Rat) *number {
	if r == nil {
		return nil
	}
	n := ofRat(r)
	return &n
}

// pattern returns a pattern that the library has compiled before.
func (l *linker) pattern(text string) *pattern {
	p, known := l.patterns[text]
	if !known {
		p = &pattern{regexp.MustCompile(text), instructions(text)}
		l.patterns[text] = p
	}
	return p
}
