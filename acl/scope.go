package acl

import (
	"errors"
	"fmt"
	"strings"
)

// ParseScopes makes a policy of scopes such as publish:heartbeat.* or subscribe:process.**: one
// rule for each, in their order, that allows its action on its pattern. A scope is split at its
// first colon; the action * allows all actions. One scope that is malformed makes all of them an
// error: a typing mistake never widens what is allowed. No scopes make a policy that denies
// everything.
func ParseScopes(scopes []string) (*Policy, error) {
	if len(scopes) > MaxRules {
		return nil, fmt.Errorf("%d scopes: %d are allowed", len(scopes), MaxRules)
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

// parseScope reads one scope. Its errors hold nothing of the text.
func parseScope(text string) (rule, error) {
	action, topic, found := strings.Cut(text, ":")
	if !found {
		return rule{}, errors.New("there is no colon: write ACTION:PATTERN, such as publish:heartbeat.*")
	}
	acts, ok := parseActions(action)
	if !ok {
		return rule{}, errors.New("the action before the colon is none of publish, subscribe, admin and *")
	}
	p, err := parsePattern(topic)
	if err != nil {
		return rule{}, fmt.Errorf("the pattern after the colon: %w", err)
	}
	return rule{allow: true, acts: acts, action: action, topics: []Pattern{p}}, nil
}
