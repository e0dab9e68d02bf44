package schemas

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/schema/compat"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/topics"
)

// Report is what the comparison of a version with earlier ones found.
type Report struct {
	// Compatible says that nothing was found.
	Compatible bool `json:"compatible"`
	// Mode is what the version has to be compatible with.
	Mode compat.Mode `json:"mode"`
	// Findings are what was found, at most 100.
	Findings []Finding `json:"findings,omitempty"`
	// Up is the cast that the registry made, if any, and Down the way back, if the registry found
	// one. Without Down, events of the version cannot be read in an earlier one.
	Up   json.RawMessage `json:"up,omitempty"`
	Down json.RawMessage `json:"down,omitempty"`
	// Documents is how many documents were tried.
	Documents int `json:"documents"`
}

// Finding is why a version is not compatible with an earlier one.
type Finding struct {
	// Version is the earlier version, and Direction "backward" or "forward".
	Version   int    `json:"version"`
	Direction string `json:"direction"`
	// Rule names the difference: one of compat.Rules, or "document" for a document that was
	// refused, or "cast" for one that could not be cast.
	Rule string `json:"rule"`
	// At is the place in the documents, a JSON pointer.
	At string `json:"at"`
	// Detail says more: the keyword that refused a document, or the reason of a cast.
	Detail string `json:"detail,omitempty"`
	// Unknown says that the difference may be harmless.
	Unknown bool `json:"unknown,omitempty"`
}

// String is the finding in a line.
func (f Finding) String() string {
	text := fmt.Sprintf("%s of version %d at %q", f.Rule, f.Version, f.At)
	if f.Detail != "" {
		text += " (" + f.Detail + ")"
	}
	if f.Unknown {
		text += ", which may be harmless"
	}
	return text
}

const (
	// triedDocuments is how many generated documents of the latest version are tried, and of the
	// new one. Those of earlier versions share as many, and have triedLeast each.
	triedDocuments, triedLeast = 1_000, 10
	// triedTime bounds the time for all of them: schemas may be made to be slow.
	triedTime = 5 * time.Second
	// maxFindings bounds the findings of a report.
	maxFindings = 100
)

// versionCheck compares a new version with earlier ones.
type versionCheck struct {
	registry *Registry
	rule     *topics.SchemaRule
	set      *versionSet
	next     *compiledVersion
	report   *Report
	until    time.Time // for documents
}

// checkVersion compares a new version with earlier ones, and completes it: without a cast, it gets
// one that fills in defaults, and one back.
func checkVersion(ctx context.Context, registry *Registry, rule *topics.SchemaRule, set *versionSet, next *compiledVersion) (*compiledVersion, *Report, error) {
	c := &versionCheck{registry: registry, rule: rule, set: set, next: next, report: &Report{Mode: modeOf(rule)}, until: time.Now().Add(triedTime)}
	if err := c.complete(); err != nil {
		return nil, nil, err
	}
	last := set.latest()
	first := last
	if modeOf(rule).Transitive() {
		first = 1
	}
	all := set.with(c.next)
	for n := last; n >= max(first, 1); n-- {
		earlier := set.version(n)
		if modeOf(rule).Backward() || c.next.caster.Up() && n == last {
			if err := c.try(ctx, all, earlier, c.next, "backward"); err != nil {
				return nil, nil, err
			}
		}
		if modeOf(rule).Forward() || c.next.caster.Down() && n == last {
			found := c.report.Findings
			if err := c.try(ctx, all, c.next, earlier, "forward"); err != nil {
				return nil, nil, err
			}
			if c.report.Down != nil && !modeOf(rule).Forward() && len(c.report.Findings) > len(found) {
				// Nobody asked for the way back, so it must not stand in the way.
				c.report.Findings = found
				if err := c.cast(c.report.Up, nil); err != nil {
					return nil, nil, err
				}
			}
		}
	}
	c.report.Compatible = len(c.report.Findings) == 0
	return c.next, c.report, nil
}

// complete gives the new version a cast that fills in defaults, if one is needed and none is given,
// and the way back.
func (c *versionCheck) complete() error {
	last := c.set.version(c.set.latest())
	if last == nil || c.next.caster.Up() || !modeOf(c.rule).Backward() {
		return nil
	}
	r, err := compat.Includes(c.next.Schema, last.Schema, c.rule.Lenient)
	if err != nil {
		return event.BadOptions("%v", err)
	}
	up := r.Operations()
	if up == nil {
		return nil
	}
	if c.next.caster.Down() {
		return c.cast(up, nil)
	}
	down, err := wayBack(c.next, last, r, c.rule.Lenient)
	if err != nil {
		return event.BadOptions("%v", err)
	}
	return c.cast(up, down)
}

// cast gives the new version the casts that the registry has made. A nil down leaves the version
// with the one that it came with, if any.
func (c *versionCheck) cast(up, down json.RawMessage) error {
	v := c.next.registered
	v.Up = up
	switch {
	case down != nil:
		v.Down = down
	case c.report.Down != nil:
		v.Down = nil
	}
	next, err := c.registry.compile(&v)
	if err != nil {
		return event.BadOptions("%v", err)
	}
	c.next, c.report.Up, c.report.Down = next, up, down
	return nil
}

// wayBack returns the operations that make documents of the version before of those of a new one,
// which is filled in as up says. They remove what the version before has no place for. nil: there
// are none that surely do.
func wayBack(next, last *compiledVersion, up *compat.Report, lenient bool) (json.RawMessage, error) {
	r, err := compat.Includes(last.Schema, next.Schema, lenient)
	if err != nil {
		return nil, err
	}
	for _, f := range r.Findings {
		filled := slices.ContainsFunc(up.Fills, func(filled compat.Fill) bool { return filled.At == f.At })
		if f.Rule != "property_removed_from_closed_content_model" || !filled {
			return nil, nil //nolint:nilnil // there are none
		}
		r.Drops = append(r.Drops, f.At)
	}
	if down := r.Operations(); down != nil {
		return down, nil
	}
	return json.RawMessage("[]"), nil
}

func (c *versionCheck) find(f Finding) {
	if len(c.report.Findings) < maxFindings && !slices.Contains(c.report.Findings, f) {
		c.report.Findings = append(c.report.Findings, f)
	}
}

// try tells whether documents of the writer's version become documents of the reader's.
func (c *versionCheck) try(ctx context.Context, all *versionSet, writer, reader *compiledVersion, direction string) error {
	if ctx.Err() != nil {
		return tooLong(ctx)
	}
	earlier := min(writer.Version, reader.Version)
	if !all.chain.Casts(writer.Version, reader.Version) || c.report.Up != nil && direction == "backward" && earlier == c.set.latest() {
		r, err := compat.Includes(reader.Schema, writer.Schema, c.rule.Lenient)
		if err != nil {
			return event.BadOptions("%v", err)
		}
		for _, f := range r.Findings {
			c.find(Finding{Version: earlier, Direction: direction, Rule: f.Rule, At: f.At, Unknown: f.Unknown})
		}
	}
	return c.documents(ctx, all.chain, writer, reader, direction)
}

// tooLong says that the client did not wait.
func tooLong(ctx context.Context) error {
	return &event.Error{Code: event.CodeOverloaded, Msg: "the comparison took too long: try again", Err: ctx.Err()}
}

// documents casts the writer's examples, and generated documents, and shows them to the reader.
func (c *versionCheck) documents(ctx context.Context, chain *upcast.Chain, writer, reader *compiledVersion, direction string) error {
	var names []string
	if !c.rule.Lenient {
		var err error
		if names, err = compat.Names(reader.Schema); err != nil {
			return event.BadOptions("%v", err)
		}
	}
	g, err := compat.NewGenerator(writer.Schema, uint64(writer.Version), names...) //nolint:gosec // from 1 on
	if err != nil {
		return event.BadOptions("%v", err)
	}
	docs := examples(writer)
	tries := triedDocuments
	if latest := c.set.latest(); min(writer.Version, reader.Version) < latest {
		tries = max(triedDocuments/latest, triedLeast)
	}
	for range tries {
		if ctx.Err() != nil {
			return tooLong(ctx)
		}
		if time.Now().After(c.until) {
			break
		}
		var doc []byte
		if len(docs) > 0 {
			doc, docs = docs[0], docs[1:]
		} else {
			var ok bool
			if doc, ok = g.Next(); !ok {
				break
			}
		}
		c.report.Documents++
		f := Finding{Version: min(writer.Version, reader.Version), Direction: direction}
		cast, failure := chain.Cast(ctx, doc, writer.Version, reader.Version)
		if failure != nil {
			f.Rule, f.Detail = "cast", failure.Error()
			c.find(f)
			break
		}
		if v := reader.schema.Validate(cast); v != nil {
			f.Rule, f.At, f.Detail = "document", v.Pointer, v.Keyword
			c.find(f)
			break
		}
	}
	return nil
}

// examples are those of a version that are valid.
func examples(v *compiledVersion) (docs [][]byte) {
	var s struct {
		Examples []json.RawMessage `json:"examples"`
	}
	if json.Unmarshal(v.Schema, &s) != nil {
		return nil
	}
	for _, e := range s.Examples {
		if v.schema.Validate(e) == nil {
			docs = append(docs, e)
		}
	}
	return docs
}

// modeOf is what new versions have to be compatible with.
func modeOf(r *topics.SchemaRule) compat.Mode { return cmp.Or(r.Compatibility, compat.Backward) }
