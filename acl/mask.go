package acl

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Mask names the parts of events that an operator does not see on the operations port, such as in
// the dashboard and in lists of dead letters. A mask changes no event: a subscriber gets whole
// events. A Mask is immutable.
type Mask struct {
	// Pointers are JSON pointers (RFC 6901) into the payload, such as /card/number.
	Pointers []string
	// Headers are names of headers in lower case.
	Headers []string
}

var (
	// pointerForm is the form of JSON pointers but the empty one.
	pointerForm = regexp.MustCompile(`^(/([^~/]|~[01])*)+$`)
	// headerForm is the form of names of headers (RFC 9110, token). An asterisk would look like a
	// wildcard, and is refused.
	headerForm = regexp.MustCompile("^[!#$%&'+.^_`|~0-9A-Za-z-]+$")
)

func parseMask(data []byte) (*Mask, error) {
	entries, err := parseStrings("mask", data, MaxMaskPerRule)
	if err != nil {
		return nil, err
	}
	m := &Mask{}
	for i, entry := range entries {
		switch {
		case len(entry) > MaxMaskBytes:
			return nil, fmt.Errorf("mask entry %d has %d bytes; at most %d are allowed", i+1, len(entry), MaxMaskBytes)
		case pointerForm.MatchString(entry):
			m.Pointers = append(m.Pointers, entry)
		case headerForm.MatchString(entry):
			m.Headers = append(m.Headers, strings.ToLower(entry))
		default:
			return nil, fmt.Errorf("mask entry %d is neither a JSON pointer such as /card/number nor the name of a header", i+1)
		}
	}
	return m, nil
}

// Hides reports whether the mask names a header, in any case.
func (m *Mask) Hides(header string) bool {
	return slices.Contains(m.Headers, strings.ToLower(header))
}

// Inspects reports whether the owner may see counts, sizes and groups of a topic: by Inspect,
// Subscribe or Admin. group is the group in question, or "".
func (id *Identity) Inspects(topic, group string) bool {
	return id.Allows(Inspect, topic, "") || id.Allows(Subscribe, topic, group) || id.Allows(Admin, topic, "")
}

// InspectsAny reports whether there may be a topic or a group that the owner may see. After false,
// Inspects and Shows report false for all of them, so that nothing need be read to know.
func (id *Identity) InspectsAny() bool {
	p := id.policy
	return p != nil && slices.ContainsFunc(p.rules, func(r rule) bool { return r.allow && r.acts&(bitInspect|bitsShow) != 0 })
}

// Shows reports whether an operator may see events of a topic: by Subscribe or Admin. The masks
// name what must be hidden; all of them apply. An owner with one of the two rights without a mask
// sees everything.
//
// A mask of a topic also covers the topics that show its events, as a denial does: see
// [Policy.Decide].
func (id *Identity) Shows(topic, group string) (masks []*Mask, ok bool) {
	for _, a := range []Action{Subscribe, Admin} {
		if a != Subscribe {
			group = ""
		}
		if !id.Allows(a, topic, group) {
			continue
		}
		of := id.policy.masks(a.bits(), topic, group, true, true)
		if len(of) == 0 {
			return nil, true
		}
		masks, ok = append(masks, of...), true
	}
	return masks, ok
}

// masks returns the masks of the rules that allow an action on a topic, and on the topics whose
// events the topic shows. deadLetter and snapshot are as in Policy.decide.
func (p *Policy) masks(want actions, topic, group string, deadLetter, snapshot bool) (all []*Mask) {
	var t segmented
	if !t.parse(topic) {
		return nil
	}
	d := p.first(want, &t, group)
	if !d.Allowed {
		return nil
	}
	if d.rule.mask != nil {
		all = append(all, d.rule.mask)
	}
	for _, s := range p.sources(d.rule, &t, topic, deadLetter, snapshot) {
		if s.topic != "" {
			all = append(all, p.masks(want, s.topic, group, s.deadLetter, s.snapshot)...)
		}
	}
	return all
}
