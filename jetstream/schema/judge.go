package schema

import (
	"errors"
	"maps"
	"slices"
	"strconv"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

const (
	// explained bounds what the library judges at a time: values times steps. The library keeps an
	// error of about 500 bytes for each step that fails.
	explained = 1 << 14
	// maxVisits bounds the work of a payload that is judged value by value. A visit is a step of
	// the schema that meets a value, with as much for every 8 values of an enum or names of
	// required.
	maxVisits = 1 << 21
	// together bounds the values times steps of schemas whose parts do not mean the same alone. The
	// library then only says whether the payload is valid, and keeps a small error for some of what
	// fails.
	together = 1 << 20
	// delegated bounds what a program leaves to the library, member by member: values times steps
	// of a payload. A judge has a bound for all members.
	delegated = 1 << 22
)

// judge finds the first violation of a large value by a schema of the library. It goes through the
// parts by itself and stops at the first one that fails, because the library keeps an error for
// each failure. The library judges what a part says of its value alone.
type judge struct {
	visits int
	alone  map[*jsonschema.Schema]part
	open   map[visit]bool
}

// part is a schema without the subschemas that it applies.
type part struct {
	schema *jsonschema.Schema
	weight int // how much a visit counts
}

// visit is a schema that meets a value. Along the way to a value, its level stands for it.
type visit struct {
	schema *jsonschema.Schema
	level  int
}

// errMuch says that judging a value takes more than maxVisits.
var errMuch = errors.New("takes too many steps")

// errLoop says that a reference leads to itself.
var errLoop = errors.New("leads to itself")

// judgement returns the violation of a value by a schema of the library, or nil.
func (s *Schema) judgement(library *jsonschema.Schema, v any) *Violation {
	var broken *Violation
	err := errMuch
	switch most := explained / max(s.work, 1); {
	case valuesOf(v, most) <= most:
		broken, err = whole(library, v, nil)
	case s.scoped:
		if most := together / max(s.work, 1); valuesOf(v, most) <= most {
			broken, err = somewhere(library, v)
		}
	default:
		j := &judge{alone: make(map[*jsonschema.Schema]part), open: make(map[visit]bool)}
		broken, err = j.value(library, v, nil)
	}
	switch {
	case errors.Is(err, errLoop):
		return &Violation{Keyword: "$ref"}
	case err != nil:
		return &Violation{Keyword: "size"}
	}
	return broken
}

// value returns the first violation of a value, or nil.
func (j *judge) value(s *jsonschema.Schema, v any, path []string) (*Violation, error) {
	own, known := j.alone[s]
	if !known {
		own = alone(s)
		j.alone[s] = own
	}
	if j.visits += own.weight; j.visits > maxVisits {
		return nil, errMuch
	}
	here := visit{s, len(path)}
	if j.open[here] {
		return nil, errLoop
	}
	j.open[here] = true
	defer delete(j.open, here)
	if broken, err := whole(own.schema, v, path); broken != nil || err != nil {
		return broken, err
	}
	var broken *Violation
	var err error
	switch v := v.(type) {
	case map[string]any:
		broken, err = j.object(s, v, path)
	case []any:
		broken, err = j.array(s, v, path)
	}
	if broken != nil || err != nil {
		return broken, err
	}
	if s.Ref != nil {
		if broken, err := j.value(s.Ref, v, path); broken != nil || err != nil {
			return broken, err
		}
	}
	return j.combined(s, v, path)
}

// whole is the judgement of the library.
func whole(s *jsonschema.Schema, v any, path []string) (*Violation, error) {
	err := s.Validate(v)
	if err == nil {
		return nil, nil //nolint:nilnil // there is no violation
	}
	broken, ok := errors.AsType[*jsonschema.ValidationError](err)
	if !ok {
		return nil, errLoop
	}
	found := first(broken)
	found.Pointer = shortPointer(pointerOf(path) + found.Pointer)
	return &found, nil
}

// somewhere tells whether a value breaks a schema, and not where.
func somewhere(s *jsonschema.Schema, v any) (*Violation, error) {
	yes, no := true, false
	// The library does not describe what fails in a condition.
	condition := &jsonschema.Schema{
		DraftVersion: s.DraftVersion, Location: place, If: s,
		Then: &jsonschema.Schema{DraftVersion: s.DraftVersion, Bool: &yes}, Else: &jsonschema.Schema{DraftVersion: s.DraftVersion, Bool: &no},
	}
	broken, err := whole(condition, v, nil)
	if broken != nil {
		broken = &Violation{Keyword: "schema"}
	}
	return broken, err
}

// alone returns the part of a schema.
func alone(s *jsonschema.Schema) part {
	c := *s
	c.Ref, c.RecursiveRef, c.DynamicRef = nil, nil, nil
	c.Not, c.AllOf, c.AnyOf, c.OneOf, c.If, c.Then, c.Else = nil, nil, nil, nil, nil, nil, nil
	c.PropertyNames, c.Properties, c.PatternProperties, c.AdditionalProperties = nil, nil, nil, nil
	c.DependentSchemas, c.UnevaluatedProperties = nil, nil
	c.Contains, c.MinContains, c.MaxContains, c.PrefixItems, c.Items2020, c.UnevaluatedItems = nil, nil, nil, nil, nil, nil
	names := len(s.Required)
	if s.Enum != nil {
		names += len(s.Enum.Values)
	}
	for _, more := range s.DependentRequired {
		names += len(more)
	}
	return part{&c, 1 + names/8}
}

// object judges the members of an object, in the order of their names.
func (j *judge) object(s *jsonschema.Schema, v map[string]any, path []string) (*Violation, error) {
	for _, name := range slices.Sorted(maps.Keys(v)) {
		in := append(slices.Clip(path), name)
		declared := false
		judged := func(sub *jsonschema.Schema) (*Violation, error) {
			declared = true
			return j.value(sub, v[name], in)
		}
		if sub, is := s.Properties[name]; is {
			if broken, err := judged(sub); broken != nil || err != nil {
				return broken, err
			}
		}
		for pattern, sub := range s.PatternProperties {
			if j.visits++; pattern.MatchString(name) {
				if broken, err := judged(sub); broken != nil || err != nil {
					return broken, err
				}
			}
		}
		switch rest := s.AdditionalProperties.(type) {
		case bool:
			if !declared && !rest {
				return &Violation{Pointer: shortPointer(pointerOf(path)), Keyword: "additionalProperties"}, nil
			}
		case *jsonschema.Schema:
			if !declared {
				if broken, err := judged(rest); broken != nil || err != nil {
					return broken, err
				}
			}
		}
		if s.PropertyNames != nil {
			if broken, err := j.value(s.PropertyNames, name, in); broken != nil || err != nil {
				return found(broken, path, "propertyNames"), err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.DependentSchemas)) {
		if _, has := v[name]; has {
			if broken, err := j.value(s.DependentSchemas[name], v, path); broken != nil || err != nil {
				return broken, err
			}
		}
	}
	return nil, nil //nolint:nilnil // there is no violation
}

// array judges the elements of an array.
func (j *judge) array(s *jsonschema.Schema, v []any, path []string) (*Violation, error) {
	contained := 0
	for i, element := range v {
		in := append(slices.Clip(path), strconv.Itoa(i))
		sub := s.Items2020
		if i < len(s.PrefixItems) {
			sub = s.PrefixItems[i]
		}
		if sub != nil {
			if broken, err := j.value(sub, element, in); broken != nil || err != nil {
				return broken, err
			}
		}
		if s.Contains != nil {
			broken, err := j.value(s.Contains, element, in)
			if err != nil {
				return nil, err
			}
			if broken == nil {
				contained++
			}
		}
	}
	switch {
	case s.Contains == nil:
	case s.MinContains == nil && contained == 0:
		return found(&Violation{}, path, "contains"), nil
	case s.MinContains != nil && contained < *s.MinContains:
		return found(&Violation{}, path, "minContains"), nil
	case s.MaxContains != nil && contained > *s.MaxContains:
		return found(&Violation{}, path, "maxContains"), nil
	}
	return nil, nil //nolint:nilnil // there is no violation
}

// combined judges what a schema combines of others for the same value.
func (j *judge) combined(s *jsonschema.Schema, v any, path []string) (*Violation, error) {
	for _, sub := range s.AllOf {
		if broken, err := j.value(sub, v, path); broken != nil || err != nil {
			return broken, err
		}
	}
	if len(s.AnyOf) > 0 {
		if n, err := j.fitting(s.AnyOf, v, path, 1); n == 0 || err != nil {
			return found(&Violation{}, path, "anyOf"), err
		}
	}
	if len(s.OneOf) > 0 {
		if n, err := j.fitting(s.OneOf, v, path, 2); n != 1 || err != nil {
			return found(&Violation{}, path, "oneOf"), err
		}
	}
	if s.Not != nil {
		if broken, err := j.value(s.Not, v, path); broken == nil || err != nil {
			return found(&Violation{}, path, "not"), err
		}
	}
	if s.If == nil {
		return nil, nil //nolint:nilnil // there is no violation
	}
	broken, err := j.value(s.If, v, path)
	then := s.Then
	if broken != nil {
		then = s.Else
	}
	if then == nil || err != nil {
		return nil, err
	}
	return j.value(then, v, path)
}

// fitting returns how many of the schemas take a value, at most the given number.
func (j *judge) fitting(all []*jsonschema.Schema, v any, path []string, most int) (n int, err error) {
	for _, sub := range all {
		broken, err := j.value(sub, v, path)
		if err != nil {
			return n, err
		}
		if broken == nil {
			if n++; n == most {
				break
			}
		}
	}
	return n, nil
}

// found returns a violation at a place if there is one.
func found(broken *Violation, path []string, keyword string) *Violation {
	if broken == nil {
		return nil
	}
	return &Violation{Pointer: shortPointer(pointerOf(path)), Keyword: keyword}
}

// valuesOf returns how many values a value has, and stops beyond the given number.
func valuesOf(v any, most int) int {
	n := 1
	switch v := v.(type) {
	case map[string]any:
		for _, member := range v {
			if n > most {
				break
			}
			n += valuesOf(member, most-n)
		}
	case []any:
		for _, element := range v {
			if n > most {
				break
			}
			n += valuesOf(element, most-n)
		}
	}
	return n
}
