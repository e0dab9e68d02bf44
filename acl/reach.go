package acl

import (
	"slices"
	"strings"
)

// maxCompared bounds the pairs of patterns that Reaches compares. In a larger policy that denies
// something, no pattern is said to be whole.
const maxCompared = 20_000

// Reach is a pattern of a rule that allows an action.
type Reach struct {
	// Pattern is the text of the pattern.
	Pattern string
	// Rule is the number of the rule, counted from 1.
	Rule int
	// Whole reports that no rule denies the action on any topic that the pattern matches. Otherwise
	// some of these topics may be denied, and Decide has to be asked about each.
	Whole bool
}

// Reaches returns the patterns of all rules that allow an action, in their order. For Subscribe,
// these are the rules that allow to read a topic without naming a group. Somebody who has to write
// a policy down in another language uses Reaches: every topic that the policy allows matches one of
// them.
func (p *Policy) Reaches(a Action) (all []Reach) {
	want := a.bits()
	if p == nil {
		return nil
	}
	allows, others := 0, 0
	for i := range p.rules {
		if r := &p.rules[i]; r.allow {
			allows += len(r.topics)
		} else {
			others += len(r.topics)
		}
	}
	small := allows*(allows+others) <= maxCompared || !p.denies
	for i := range p.rules {
		r := &p.rules[i]
		if !r.allow || r.acts&want == 0 || want == bitSubscribe && !r.joins("") {
			continue
		}
		for _, q := range r.topics {
			all = append(all, Reach{Pattern: q.text, Rule: i + 1, Whole: !p.denies || small && p.whole(want, i, &q)})
		}
	}
	return all
}

// whole reports whether no rule before rule i denies anything that pattern q matches.
func (p *Policy) whole(want actions, i int, q *Pattern) bool {
	deadLetters, snapshots := q.namesDeadLetters(), q.namesSnapshots()
	for j := range i {
		r := &p.rules[j]
		if r.allow && r.acts&want != 0 && slices.ContainsFunc(r.topics, func(d Pattern) bool { return overlap(d.text, q.text) }) {
			// The earlier rule decides about some of the topics, and may not name them.
			deadLetters, snapshots = false, false
		}
	}
	for j := range i {
		r := &p.rules[j]
		if r.allow || r.acts&want == 0 || want == bitSubscribe && !r.joins("") {
			continue
		}
		for _, d := range r.topics {
			for _, denied := range p.covered(d, !deadLetters, !snapshots) {
				if overlap(denied, q.text) {
					return false
				}
			}
		}
	}
	return true
}

// covered returns patterns of everything that a denial of pattern d covers: its topics and, unless
// the allowing rule names them, the topics that show their events.
func (p *Policy) covered(d Pattern, deadLetters, snapshots bool) []string {
	all := []string{d.text}
	if snapshots {
		all = append(all, d.text+snapshotSuffix)
		for topic, source := range p.snapshots {
			if d.Match(source) || d.Match(deadLetterPrefix+source) {
				all = append(all, topic)
			}
		}
	}
	if deadLetters {
		for _, text := range slices.Clone(all) {
			all = append(all, deadLetterPrefix+text)
		}
		if snapshots { // the snapshots of topics of dead letters, in either order
			all = append(all, deadLetterPrefix+d.text+snapshotSuffix)
		}
	}
	return all
}

// MayJoin reports whether there may be a group that the policy lets its owner join on a topic, or
// see. After false, there is none.
func (p *Policy) MayJoin(topic string) bool {
	if p == nil {
		return false
	}
	var t segmented
	if !t.parse(topic) {
		return false
	}
	for i := range p.rules {
		r := &p.rules[i]
		if !r.allow || r.acts&(bitInspect|bitsShow) == 0 {
			continue
		}
		for k := range r.topics {
			if r.topics[k].match(&t) {
				return true
			}
		}
	}
	return false
}

// Names returns the topics and the groups that rules which allow something name without a wildcard,
// in order.
func (p *Policy) Names() (topics, groups []string) {
	if p == nil {
		return nil, nil
	}
	for i := range p.rules {
		r := &p.rules[i]
		if !r.allow {
			continue
		}
		for k := range r.topics {
			if r.topics[k].segments == nil {
				topics = append(topics, r.topics[k].text)
			}
		}
		if r.acts&bitSubscribe == 0 {
			continue
		}
		for _, g := range r.groups {
			if g != anyGroup {
				groups = append(groups, g)
			}
		}
		if r.only != nil && !strings.Contains(r.only.text, anyGroup) {
			groups = append(groups, r.only.text)
		}
	}
	slices.Sort(topics)
	slices.Sort(groups)
	return slices.Compact(topics), slices.Compact(groups)
}

// overlap reports whether there may be a topic that two patterns match.
func overlap(a, b string) bool {
	return overlaps(strings.Split(a, "."), strings.Split(b, "."), make(map[[2]int]bool))
}

// overlaps is overlap for segments. seen has the pairs of ends that were tried and do not overlap.
func overlaps(a, b []string, seen map[[2]int]bool) bool {
	at := [2]int{len(a), len(b)}
	if seen[at] {
		return false
	}
	seen[at] = true
	switch {
	case len(a) == 0 && len(b) == 0:
		return true
	case len(a) > 0 && a[0] == anySegments:
		return overlaps(a[1:], b, seen) || len(b) > 0 && overlaps(a, b[1:], seen)
	case len(b) > 0 && b[0] == anySegments:
		return overlaps(a, b[1:], seen) || len(a) > 0 && overlaps(a[1:], b, seen)
	case len(a) == 0 || len(b) == 0:
		return false
	case a[0] != oneSegment && b[0] != oneSegment && a[0] != b[0]:
		return false
	}
	return overlaps(a[1:], b[1:], seen)
}
