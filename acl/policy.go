package acl

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Limits of a policy. They apply to policy files, to policies in tokens, and to scopes.
const (
	// MaxPolicyBytes is the maximum size of the JSON of a policy.
	MaxPolicyBytes = 1 << 20
	// MaxRules is the maximum number of rules of a policy, and of scopes of a token.
	MaxRules = 1000
	// MaxTopicsPerRule is the maximum number of patterns of a rule.
	MaxTopicsPerRule = 100
	// MaxGroupsPerRule is the maximum number of group names of a rule.
	MaxGroupsPerRule = 100
	// MaxMaskPerRule is the maximum number of entries of the mask of a rule.
	MaxMaskPerRule = 100
	// MaxMaskBytes is the maximum length of an entry of a mask.
	MaxMaskBytes = 256
	// MaxPatterns is the maximum number of patterns of all rules together. It limits the time of a
	// decision.
	MaxPatterns = 5000
)

// maxGroupBytes is the maximum length of the name of a group.
const maxGroupBytes = 128

// anyGroup in a rule matches every group.
const anyGroup = "*"

// Policy is an ordered list of rules. The first rule that matches a request decides; without a
// match, the request is denied. A Policy is immutable and safe for concurrent use. The zero Policy
// and a nil Policy deny everything.
//
// A denial of a topic also covers the topics that show its events: see [Policy.Decide].
type Policy struct {
	rules []rule
	// denies is set if a rule denies.
	denies bool
	// snapshots maps further snapshot topics to the topics of which they are made; see
	// Config.Snapshots.
	snapshots map[string]string
}

// rule is one rule of a policy.
type rule struct {
	allow  bool
	acts   actions
	action string // source text
	topics []Pattern
	// groups restricts a subscribe rule to these groups. nil means no restriction.
	groups   []string
	anyGroup bool
	// only restricts a rule from a scope to groups. nil means no restriction.
	only *groupPattern
	// mask names the parts of events that operators do not see. nil hides nothing.
	mask *Mask
}

// FullRights returns the policy that allows everything.
func FullRights() *Policy {
	return &Policy{rules: []rule{{
		allow: true, acts: bitsAll, action: anyAction,
		topics: []Pattern{{text: anySegments, segments: []string{anySegments}}},
	}}}
}

// with returns the policy with further snapshot topics.
func (p *Policy) with(snapshots map[string]string) *Policy {
	if p == nil || len(snapshots) == 0 {
		return p
	}
	q := *p
	q.snapshots = snapshots
	return &q
}

// Len returns the number of rules.
func (p *Policy) Len() int {
	if p == nil {
		return 0
	}
	return len(p.rules)
}

// Decide decides whether a request is allowed and reports the deciding rule. group is the group of
// a Subscribe, or "" for a request without a group; other actions ignore it. A Subscribe with a
// group that the hub itself runs (Reserved) must be allowed for Admin as well. A malformed topic,
// such as one with a wildcard, is denied before any rule is evaluated. Decide does not allocate.
//
// A rule that denies an action on a topic also denies it on the topic's dead letters, dlq.TOPIC,
// and on its snapshots, TOPIC.snapshot. Such a topic is exempt if an earlier rule allows it, or if
// the rule that allows it names it: by a pattern that begins with dlq, or by a pattern whose last
// segment is no wildcard.
func (p *Policy) Decide(a Action, topic, group string) Decision {
	want := a.bits()
	if p == nil || want == 0 {
		return Decision{}
	}
	d := p.decide(want, topic, group, true, true)
	if d.Allowed && want == bitSubscribe && Reserved(group) {
		if admin := p.decide(bitAdmin, topic, "", true, true); !admin.Allowed {
			admin.reserved = true
			return admin
		}
	}
	return d
}

// decide is Decide without what reserved groups need. deadLetter and snapshot report whether the
// topic may still be taken for the dead letters or the snapshots of another topic. Each happens
// once, which bounds the recursion: the hub makes neither dead letters of dead letters nor
// snapshots of snapshots.
func (p *Policy) decide(want actions, topic, group string, deadLetter, snapshot bool) Decision {
	var t segmented
	if !t.parse(topic) {
		return Decision{}
	}
	d := p.first(want, &t, group)
	if !d.Allowed || !p.denies {
		return d
	}
	for _, s := range p.sources(d.rule, &t, topic, deadLetter, snapshot) {
		if s.topic == "" {
			continue
		}
		if over := p.decide(want, s.topic, group, s.deadLetter, s.snapshot); over.deniesBefore(d) {
			return over.covering(s.topic)
		}
	}
	return d
}

// source is a topic whose events another topic shows, and what that topic may still be taken for.
type source struct {
	topic                string
	deadLetter, snapshot bool
}

// sources returns the topics whose events a topic shows, unless the rule that allows the topic
// names it. Entries without a topic mean nothing.
func (p *Policy) sources(r *rule, t *segmented, topic string, deadLetter, snapshot bool) (all [3]source) {
	if shown, ok := strings.CutPrefix(topic, deadLetterPrefix); ok && deadLetter && !r.names(t, Pattern.namesDeadLetters) {
		all[0] = source{shown, false, snapshot}
	}
	if !snapshot || r.names(t, Pattern.namesSnapshots) {
		return all
	}
	if shown, ok := strings.CutSuffix(topic, snapshotSuffix); ok {
		all[1] = source{shown, deadLetter, false}
	}
	all[2] = source{p.snapshots[topic], deadLetter, false}
	return all
}

// The names of topics that show the events of another topic.
const (
	deadLetterPrefix = "dlq."
	snapshotSuffix   = ".snapshot"
)

// first returns the decision of the first rule that matches a request.
func (p *Policy) first(want actions, topic *segmented, group string) Decision {
	for i := range p.rules {
		if r := &p.rules[i]; r.acts&want != 0 && r.matches(want, topic, group) {
			return Decision{Allowed: r.allow, number: i + 1, rule: r}
		}
	}
	return Decision{}
}

// names reports whether a pattern of the rule matches the topic and names it.
func (r *rule) names(topic *segmented, named func(Pattern) bool) bool {
	for i := range r.topics {
		if named(r.topics[i]) && r.topics[i].match(topic) {
			return true
		}
	}
	return false
}

func (r *rule) matches(want actions, topic *segmented, group string) bool {
	for i := range r.topics {
		if r.topics[i].match(topic) {
			return want != bitSubscribe || r.joins(group)
		}
	}
	return false
}

// joins reports whether a subscribe rule is about the group.
func (r *rule) joins(group string) bool {
	switch {
	case r.only != nil:
		return group != "" && r.only.match(group)
	case r.groups != nil:
		return group != "" && (r.anyGroup || slices.Contains(r.groups, group))
	}
	return true
}

// Decision is the result of Policy.Decide. The zero Decision is a denial by default.
type Decision struct {
	// Allowed reports whether the request is allowed.
	Allowed bool

	number   int
	rule     *rule
	reserved bool // the decision is about Admin, which the group needs besides Subscribe
	// shown is the topic that the rule is about if the requested topic is denied because it shows
	// the events of that topic.
	shown string
}

// deniesBefore reports whether a rule denies the request that comes before the rule of another
// decision.
func (d Decision) deniesBefore(other Decision) bool {
	return !d.Allowed && d.rule != nil && d.number < other.number
}

// covering returns the denial of the topic shown as a denial of a topic that shows its events.
func (d Decision) covering(shown string) Decision {
	if d.shown == "" {
		d.shown = shown
	}
	return d
}

// Rule returns the number of the deciding rule, counted from 1, or 0 if no rule matched.
func (d Decision) Rule() int { return d.number }

// String explains the decision, such as "denied by rule 2: deny publish a.**" or "denied by
// default: no rule matches". The text quotes the policy, so it is meant for operators and not for
// clients.
func (d Decision) String() string {
	switch {
	case d.reserved && d.rule == nil:
		return "denied by default: the hub itself runs this group, and no rule allows admin"
	case d.reserved:
		return "denied: the hub itself runs this group, and rule " + strconv.Itoa(d.number) + " denies admin: " + d.rule.String()
	case d.rule == nil:
		return "denied by default: no rule matches"
	case d.Allowed:
		return "allowed by rule " + strconv.Itoa(d.number) + ": " + d.rule.String()
	case d.shown != "":
		return "denied by rule " + strconv.Itoa(d.number) + ", because the topic shows events of " + d.shown + ": " + d.rule.String()
	}
	return "denied by rule " + strconv.Itoa(d.number) + ": " + d.rule.String()
}

// String returns the rule in one line.
func (r *rule) String() string {
	var b strings.Builder
	b.WriteString("deny ")
	if r.allow {
		b.Reset()
		b.WriteString("allow ")
	}
	b.WriteString(r.action)
	for i := range r.topics {
		b.WriteString(" " + r.topics[i].text)
	}
	if r.only != nil {
		b.WriteString(groupMark + r.only.text)
	}
	if r.groups != nil {
		b.WriteString(" groups")
		for _, g := range r.groups {
			b.WriteString(" " + strconv.Quote(g))
		}
	}
	return b.String()
}

// ParsePolicy parses a policy in JSON:
//
//	{"rules": [{"effect": "allow", "action": "subscribe", "topics": ["process.**"], "groups": ["dashboard"]}]}
//
// effect is allow or deny. action is publish, subscribe, inspect, presence, admin, or * for all
// actions. topics is a list of patterns. groups is allowed only for rules about subscribe. It is a
// list of names, or * for every group; a rule with groups never matches a subscribe without a
// group. mask is allowed only for rules that allow subscribe or admin; see [Mask]. Unknown fields,
// duplicate fields, empty lists, and values beyond the limits are errors that name their position.
func ParsePolicy(data []byte) (*Policy, error) {
	p, err := parsePolicy(data)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return p, nil
}

// parsePolicy is ParsePolicy with errors that contain no part of the text.
func parsePolicy(data []byte) (*Policy, error) {
	if len(data) > MaxPolicyBytes {
		return nil, fmt.Errorf("it has %d bytes; at most %d are allowed", len(data), MaxPolicyBytes)
	}
	fields, err := objectFields(data)
	if err != nil {
		return nil, fmt.Errorf("it %w", err)
	}
	if len(fields) != 1 || fields[0].name != "rules" {
		return nil, errors.New("it must have exactly one field, rules")
	}
	values, ok := decodeArray(fields[0].value)
	if !ok {
		return nil, errors.New("rules is not an array")
	}
	if len(values) > MaxRules {
		return nil, fmt.Errorf("it has %d rules; at most %d are allowed", len(values), MaxRules)
	}
	p := &Policy{rules: make([]rule, 0, len(values))}
	patterns := 0
	for i, value := range values {
		r, err := parseRule(value)
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		if patterns += len(r.topics); patterns > MaxPatterns {
			return nil, fmt.Errorf("its rules have more than %d topics in all; use wildcards", MaxPatterns)
		}
		p.rules = append(p.rules, r)
		p.denies = p.denies || !r.allow
	}
	return p, nil
}

func parseRule(data []byte) (rule, error) {
	fields, err := objectFields(data)
	if err != nil {
		return rule{}, fmt.Errorf("it %w", err)
	}
	var r rule
	effect := ""
	for _, f := range fields {
		switch f.name {
		case "effect":
			effect, _ = decodeString(f.value)
			r.allow = effect == "allow"
			if !r.allow && effect != "deny" {
				return rule{}, errors.New("effect must be allow or deny")
			}
		case "action":
			r.action, _ = decodeString(f.value)
			if r.acts, _ = parseActions(r.action); r.acts == 0 {
				return rule{}, errors.New("action must be publish, subscribe, inspect, presence, schema, admin or *")
			}
		case "topics":
			r.topics, err = parseTopics(f.value)
		case "groups":
			r.groups, err = parseGroups(f.value)
			r.anyGroup = slices.Contains(r.groups, anyGroup)
		case "mask":
			r.mask, err = parseMask(f.value)
		default:
			return rule{}, errors.New("it has a field other than effect, action, topics, groups and mask")
		}
		if err != nil {
			return rule{}, err
		}
	}
	switch {
	case effect == "":
		return rule{}, errors.New("effect is missing; use allow or deny")
	case r.acts == 0:
		return rule{}, errors.New("action is missing; use publish, subscribe, inspect, presence, schema, admin or *")
	case r.topics == nil:
		return rule{}, errors.New("topics is missing; list topics, or ** for all")
	case r.groups != nil && r.acts&bitSubscribe == 0:
		return rule{}, errors.New("groups is only allowed in rules about subscribe")
	case r.mask != nil && (!r.allow || r.acts&bitsShow == 0):
		return rule{}, errors.New("mask is only allowed in rules that allow subscribe or admin")
	}
	return r, nil
}

func parseTopics(data []byte) ([]Pattern, error) {
	texts, err := parseStrings("topics", data, MaxTopicsPerRule)
	if err != nil {
		return nil, err
	}
	topics := make([]Pattern, len(texts))
	for i, text := range texts {
		if topics[i], err = parsePattern(text); err != nil {
			return nil, fmt.Errorf("topic %d: %w", i+1, err)
		}
	}
	return topics, nil
}

func parseGroups(data []byte) ([]string, error) {
	groups, err := parseStrings("groups", data, MaxGroupsPerRule)
	if err != nil {
		return nil, err
	}
	for i, g := range groups {
		if g == "" || len(g) > maxGroupBytes || hasControl(g) {
			return nil, fmt.Errorf("group %d is not a name of 1 to %d bytes without control characters", i+1, maxGroupBytes)
		}
	}
	return groups, nil
}

// parseStrings parses a non-empty list. A rule without the restriction must omit the field instead.
func parseStrings(name string, data []byte, limit int) ([]string, error) {
	values, ok := decodeArray(data)
	switch {
	case !ok:
		return nil, fmt.Errorf("%s is not an array of strings", name)
	case len(values) == 0:
		return nil, fmt.Errorf("%s is empty; list at least one entry, or leave the field out", name)
	case len(values) > limit:
		return nil, fmt.Errorf("%s has %d entries; at most %d are allowed", name, len(values), limit)
	}
	texts := make([]string, len(values))
	for i, v := range values {
		if texts[i], ok = decodeString(v); !ok {
			return nil, fmt.Errorf("%s is not an array of strings", name)
		}
	}
	return texts, nil
}

func hasControl(text string) bool {
	return strings.ContainsFunc(text, func(c rune) bool { return c < ' ' || c == 0x7f })
}
