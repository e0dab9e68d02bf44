package acl

import (
	"errors"
	"fmt"
	"strings"
)

// ParseScopes converts scopes such as publish:heartbeat.* or subscribe:process.** to a policy. Each
// scope becomes a rule that allows its action on its pattern, in the given order. A scope is split
// at its first colon. The action * allows all actions.
//
// A scope for subscribe may name groups behind ::, as in subscribe:orders.*::billing. The name may
// contain *, which matches any characters. Such a scope allows nothing but to join these groups.
//
// A single malformed scope makes the call fail, so a typing mistake never widens the rights.
// Without scopes, the policy denies everything.
func ParseScopes(scopes []string) (*Policy, error) {
	if len(scopes) > MaxRules {
		return nil, fmt.Errorf("%d scopes; at most %d are allowed", len(scopes), MaxRules)
	}
	p := &Policy{rules: make([]rule, len(scopes))}
	for i, s := range scopes {
		var err error
		if p.rules[i], err = parseScope(s); err != nil {
			return nil, fmt.Errorf("scope %d: %w", i+1, err)
		}
	}
	return p, nil
}

// parseScope parses one scope. Its errors contain no part of the text.
func parseScope(text string) (rule, error) {
	action, topic, found := strings.Cut(text, ":")
	if !found {
		return rule{}, errors.New("there is no colon: write ACTION:PATTERN, such as publish:heartbeat.*")
	}
	topic, group, named := strings.Cut(topic, groupMark)
	acts, ok := parseActions(action)
	if !ok {
		return rule{}, errors.New("the action before the colon must be publish, subscribe, inspect, presence, admin or *")
	}
	p, err := parsePattern(topic)
	if err != nil {
		return rule{}, fmt.Errorf("the pattern after the colon: %w", err)
	}
	r := rule{allow: true, acts: acts, action: action, topics: []Pattern{p}}
	if !named {
		return r, nil
	}
	if acts != bitSubscribe {
		return rule{}, errors.New("a group behind :: is only allowed with the action subscribe")
	}
	if r.only, err = parseGroupPattern(group); err != nil {
		return rule{}, fmt.Errorf("the group behind ::: %w", err)
	}
	return r, nil
}
