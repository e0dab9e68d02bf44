package compat

import (
	"slices"
	"strconv"
)

// objects compares what is asked of objects.
func (c *comparison) objects(r node, w []node, at where) {
	c.required(r, w, at)
	c.propertyCounts(r, w, at)
	c.patterns(r, w, at)
	names := r.names("properties")
	for _, n := range w {
		names = append(names, n.names("properties")...)
		names = append(names, n.required()...)
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		c.property(r, w, name, at)
	}
	c.undeclared(r, w, at)
	c.same(r, w, at, "property_names_changed", "propertyNames")
	c.dependencies(r, w, at)
	c.same(r, w, at, "keyword_changed", "dependentSchemas")
	c.same(r, w, at, "keyword_changed", "unevaluatedProperties", "properties", "patternProperties", "additionalProperties")
}

// requires reports whether documents have the member: it is wanted, or brought by one that is.
func requires(w []node, name string) bool { return slices.Contains(wanted(w), name) }

// wanted are the members that documents have.
func wanted(w []node) (all []string) {
	for _, n := range w {
		all = append(all, n.required()...)
	}
	for i := 0; i < len(all) && len(all) < 10_000; i++ {
		for _, n := range w {
			with, _ := n.object()["dependentRequired"].(map[string]any)
			brought, _ := with[all[i]].([]any)
			for _, v := range brought {
				if name, is := v.(string); is && !slices.Contains(all, name) {
					all = append(all, name)
				}
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// required compares the members that each side wants. A default fills in what is missing, unless
// the place cannot be told to an up-caster.
func (c *comparison) required(r node, w []node, at where) {
	for _, name := range r.required() {
		if requires(w, name) {
			continue
		}
		value, has := r.defaultOf(name)
		if has && c.fits(w, name, at) {
			c.report.Fills = append(c.report.Fills, Fill{At: at.in(name).String(), Value: value, Existing: len(at.path) > 0 || kindsOfAll(w) != kindObject})
			continue
		}
		c.find("required_added", at.in(name), hasChoice(w))
	}
}

// fits reports whether an operation at the place of a member reaches this member, and no other one.
func (c *comparison) fits(w []node, name string, at where) bool {
	if at.vague || name == "*" || isIndex(name) && kindsOfAll(w)&kindArray != 0 || slices.Contains(at.path, "") {
		return false
	}
	written, declared := c.writes(w, name)
	// What may be there already must be something that the reader takes, in an open model as well.
	return declared || c.lenient || slices.ContainsFunc(written, node.never)
}

// isIndex reports whether a name may be that of an element of an array.
func isIndex(name string) bool {
	_, err := strconv.ParseUint(name, 10, 64)
	return err == nil
}

// writes are the schemas that a member of the writer keeps to, and whether the writer declares it.
func (c *comparison) writes(w []node, name string) (parts []node, declared bool) {
	for _, n := range w {
		some, is, known := n.member(name)
		parts, declared = append(parts, some...), declared || is
		if !known {
			c.find("pattern_properties_changed", where{}, true)
		}
	}
	return parts, declared
}

// property compares what may be under a name.
func (c *comparison) property(r node, w []node, name string, at where) {
	want, wanted, known := r.member(name)
	written, declared := c.writes(w, name)
	place := at.in(name)
	// An operation takes * for all members, and a number for the element of an array as well.
	place.vague = place.vague || name == "*" || isIndex(name) && kindsOfAll(w)&kindArray != 0
	if !known {
		c.find("pattern_properties_changed", at, true)
		return
	}
	if slices.ContainsFunc(written, node.never) {
		return
	}
	if len(want) == 0 {
		return
	}
	switch {
	case wanted && !declared:
		c.added(want, written, place)
	case !wanted && declared:
		c.removed(want, written, requires(w, name), place)
	default:
		for _, n := range want {
			c.includes(n, written, place)
		}
	}
}

// added compares a member that the reader declares, and the writer does not.
func (c *comparison) added(want, written []node, place where) {
	if c.lenient { // a member that is required, and has no default, was found before
		return
	}
	if slices.ContainsFunc(written, func(n node) bool { return !n.always() }) {
		for _, n := range want {
			if !c.try(n, written, place) {
				c.find("property_added_not_covered_by_partially_open", place, false)
				return
			}
		}
		return
	}
	if slices.ContainsFunc(want, func(n node) bool { return !c.try(n, written, place) }) {
		c.find("property_added_to_open_content_model", place, false)
	}
}

// removed compares a member that the writer declares, and the reader does not.
func (c *comparison) removed(want, written []node, required bool, place where) {
	switch {
	case !slices.ContainsFunc(want, node.never):
		for _, n := range want {
			if !c.try(n, written, place) {
				c.find("property_removed_not_covered_by_partially_open", place, false)
				return
			}
		}
	case c.lenient && !required && !place.vague && !slices.Contains(place.path, ""):
		c.report.Drops = append(c.report.Drops, place.String())
	default:
		c.find("property_removed_from_closed_content_model", place, false)
	}
}

// undeclared compares what may be under all other names.
func (c *comparison) undeclared(r node, w []node, at where) {
	if _, has := r.object()["additionalProperties"]; !has {
		return
	}
	want := r.one("additionalProperties")
	var written []node
	for _, n := range w {
		if _, has := n.object()["additionalProperties"]; has {
			written = append(written, n.one("additionalProperties"))
		}
	}
	place := at.in("*")
	place.vague = true // * would stand for the declared members, too
	switch {
	case want.always() || slices.ContainsFunc(written, node.never):
	case want.never():
		if len(written) == 0 && slices.ContainsFunc(w, func(n node) bool { _, has := n.object()["unevaluatedProperties"]; return has }) {
			c.find("content_model_closed", place, true)
			return
		}
		c.find("content_model_closed", place, hasChoice(w))
	default:
		c.includes(want, written, place)
	}
}

// patterns compares what may be under names of a pattern.
func (c *comparison) patterns(r node, w []node, at where) {
	mine, theirs := patternsOf([]node{r}), patternsOf(w)
	for _, pattern := range mine {
		value, _ := r.object()["patternProperties"].(map[string]any)
		want := r.sub(value[pattern], "patternProperties", pattern)
		var written []node
		for _, n := range w {
			if all, _ := n.object()["patternProperties"].(map[string]any); all[pattern] != nil {
				written = append(written, n.sub(all[pattern], "patternProperties", pattern))
			}
		}
		if len(written) == 0 {
			closed := slices.ContainsFunc(w, func(n node) bool { return n.one("additionalProperties").never() })
			if (len(theirs) > 0 || !closed) && !want.always() {
				c.find("pattern_properties_changed", at, true)
			}
			continue
		}
		place := at.in("*")
		place.vague = true
		c.includes(want, written, place)
	}
	for _, pattern := range theirs {
		if !slices.Contains(mine, pattern) && !r.one("additionalProperties").always() {
			c.find("pattern_properties_changed", at, true)
		}
		if !compiles(pattern) {
			c.find("pattern_properties_changed", at, true)
		}
	}
}

// propertyCounts compares how many members there may be.
func (c *comparison) propertyCounts(r node, w []node, at where) {
	fewest, several := most(w, "minProperties"), least(w, "maxProperties")
	for _, n := range w {
		if n.one("additionalProperties").never() && len(n.names("patternProperties")) == 0 {
			several = min(several, int64(len(n.names("properties"))))
		}
	}
	fewest = max(fewest, int64(len(wanted(w))))
	if r.count("minProperties", 0) > fewest {
		c.find("min_properties_raised", at, hasChoice(w))
	}
	if r.count("maxProperties", none) < several {
		c.find("max_properties_lowered", at, hasChoice(w))
	}
}

// dependencies compares the members that others bring with them.
func (c *comparison) dependencies(r node, w []node, at where) {
	mine, _ := r.object()["dependentRequired"].(map[string]any)
	for _, name := range r.names("dependentRequired") {
		list, _ := mine[name].([]any)
		if written, _ := c.writes(w, name); slices.ContainsFunc(written, node.never) {
			continue
		}
		for _, v := range list {
			needed, _ := v.(string)
			has := requires(w, needed) || slices.ContainsFunc(w, func(n node) bool {
				theirs, _ := n.object()["dependentRequired"].(map[string]any)
				also, _ := theirs[name].([]any)
				return slices.Contains(also, v)
			})
			if !has {
				c.find("dependency_added", at.in(needed), hasChoice(w))
			}
		}
	}
}
