package acl

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The bounds of a policy, whether it comes from a file, a token's policy or its scopes.
const (
	// MaxPolicyBytes bounds the JSON of a policy.
	MaxPolicyBytes = 1 << 20
	// MaxRules bounds the rules of a policy, and the scopes of a token.
	MaxRules = 1000
	// MaxTopicsPerRule bounds the patterns of a rule.
	MaxTopicsPerRule = 100
	// MaxGroupsPerRule bounds the group names of a rule.
	MaxGroupsPerRule = 100
	// MaxPatterns bounds the patterns of all rules together, and so the time of a decision.
	MaxPatterns = 5000
)

// maxGroupBytes bounds the name of a group.
const maxGroupBytes = 128

// anyGroup stands in a rule for every group.
const anyGroup = "*"

// Policy is an ordered list of rules. The first rule that matches a request decides on it; what no
// rule matches is denied. A Policy does not change and may be used concurrently. The zero Policy,
// and a nil one, deny everything.
type Policy struct {
	rules []rule
}

// rule is one rule of a policy.
type rule struct {
	allow  bool
	acts   actions
	action string // as it was written
	topics []Pattern
	// groups restricts a subscribe to these groups. It is nil when the rule has none.
	groups   []string
	anyGroup bool
}

// FullRights returns the policy that allows everything.
func FullRights() *Policy {
	return &Policy{rules: []rule{{
		allow: true, acts: bitsAll, action: anyAction,
		topics: []Pattern{{text: anySegments, segments: []string{anySegments}}},
	}}}
}

// Len returns the number of rules.
func (p *Policy) Len() int {
	if p == nil {
		return 0
	}
	return len(p.rules)
}

// Decide decides whether a request is allowed, and says which rule decided. group is the group of a
// Subscribe; it is "" when the request has none, such as reading without a group, and it is ignored
// for other actions. A topic that is not well formed, one with a wildcard in particular, is denied
// before any rule is asked. Decide does not allocate.
func (p *Policy) Decide(a Action, topic, group string) Decision {
	want := a.bits()
	var t segmented
	if p == nil || want == 0 || !t.parse(topic) {
		return Decision{}
	}
	for i := range p.rules {
		if r := &p.rules[i]; r.acts&want != 0 && r.matches(want, &t, group) {
			return Decision{Allowed: r.allow, number: i + 1, rule: r}
		}
	}
	return Decision{}
}

func (r *rule) matches(want actions, topic *segmented, group string) bool {
	for i := range r.topics {
		if r.topics[i].match(topic) {
			return want != bitSubscribe || r.groups == nil ||
				group != "" && (r.anyGroup || slices.Contains(r.groups, group))
		}
	}
	return false
}

// Decision is the answer of a Policy. The zero Decision is the default: denied.
type Decision struct {
	// Allowed is the answer.
	Allowed bool

	number int
	rule   *rule
}

// Rule returns the number of the rule that decided, counted from 1; it is 0 when none matched.
func (d Decision) Rule() int { return d.number }

// String says what was decided and why, such as "denied by rule 2: deny publish a.**" or "denied by
// default: no rule matches". It holds text of the policy: it is for operators, not for clients.
func (d Decision) String() string {
	switch {
	case d.rule == nil:
		return "denied by default: no rule matches"
	case d.Allowed:
		return "allowed by rule " + strconv.Itoa(d.number) + ": " + d.rule.String()
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
	if r.groups != nil {
		b.WriteString(" groups")
		for _, g := range r.groups {
			b.WriteString(" " + strconv.Quote(g))
		}
	}
	return b.String()
}

// ParsePolicy reads a policy from JSON:
//
//	{"rules": [{"effect": "allow", "action": "subscribe", "topics": ["process.**"], "groups": ["dashboard"]}]}
//
// effect is allow or deny; action is publish, subscribe, admin, or * for all of them; topics holds
// patterns. groups is for rules about subscribe and holds names, or * for every group: a rule with
// groups never matches a subscribe without one. Nothing is guessed: an unknown field, a field that
// comes twice, a list that is empty, and whatever is beyond the bounds is an error that says where.
func ParsePolicy(data []byte) (*Policy, error) {
	p, err := parsePolicy(data)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return p, nil
}

// parsePolicy is ParsePolicy. Its errors hold nothing of the text.
func parsePolicy(data []byte) (*Policy, error) {
	if len(data) > MaxPolicyBytes {
		return nil, fmt.Errorf("it has %d bytes: %d are allowed", len(data), MaxPolicyBytes)
	}
	fields, err := objectFields(data)
	if err != nil {
		return nil, fmt.Errorf("it %w", err)
	}
	if len(fields) != 1 || fields[0].name != "rules" {
		return nil, errors.New("it must have the field rules and no other")
	}
	values, ok := decodeArray(fields[0].value)
	if !ok {
		return nil, errors.New("rules is not an array")
	}
	if len(values) > MaxRules {
		return nil, fmt.Errorf("it has %d rules: %d are allowed", len(values), MaxRules)
	}
	p := &Policy{rules: make([]rule, 0, len(values))}
	patterns := 0
	for i, value := range values {
		r, err := parseRule(value)
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		if patterns += len(r.topics); patterns > MaxPatterns {
			return nil, fmt.Errorf("it has more than %d topics in all its rules: use wildcards", MaxPatterns)
		}
		p.rules = append(p.rules, r)
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
				return rule{}, errors.New("effect is neither allow nor deny")
			}
		case "action":
			r.action, _ = decodeString(f.value)
			if r.acts, _ = parseActions(r.action); r.acts == 0 {
				return rule{}, errors.New("action is none of publish, subscribe, admin and *")
			}
		case "topics":
			r.topics, err = parseTopics(f.value)
		case "groups":
			r.groups, err = parseGroups(f.value)
			r.anyGroup = slices.Contains(r.groups, anyGroup)
		default:
			return rule{}, errors.New("it has a field other than effect, action, topics and groups")
		}
		if err != nil {
			return rule{}, err
		}
	}
	switch {
	case effect == "":
		return rule{}, errors.New("effect is missing: allow or deny")
	case r.acts == 0:
		return rule{}, errors.New("action is missing: publish, subscribe, admin or *")
	case r.topics == nil:
		return rule{}, errors.New("topics is missing: name the topics, or ** for all")
	case r.groups != nil && r.acts&bitSubscribe == 0:
		return rule{}, errors.New("groups is for rules about subscribe: leave it out")
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

// parseStrings reads a list that may not be empty: to leave a restriction out, its field is left
// out.
func parseStrings(name string, data []byte, limit int) ([]string, error) {
	values, ok := decodeArray(data)
	switch {
	case !ok:
		return nil, fmt.Errorf("%s is not an array of strings", name)
	case len(values) == 0:
		return nil, fmt.Errorf("%s is empty: name at least one, or * for all", name)
	case len(values) > limit:
		return nil, fmt.Errorf("%s has %d entries: %d are allowed", name, len(values), limit)
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
