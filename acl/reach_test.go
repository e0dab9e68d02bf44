package acl

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// randomName returns a dotted name of the given segments.
func randomName(rng *rand.Rand, most int, words ...string) string {
	segments := make([]string, 1+rng.IntN(most))
	for i := range segments {
		segments[i] = words[rng.IntN(len(words))]
	}
	return strings.Join(segments, ".")
}

// TestReaches compares the patterns that a policy is said to allow as a whole with the decisions of
// the policy. Each allowed topic matches a pattern, and nothing in a whole pattern is denied.
func TestReaches(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	words := []string{"a", "b", "dlq", "snapshot"}
	for range 3_000 {
		p := &Policy{snapshots: map[string]string{"b.a": "a.b", "a.a.a": "b"}}
		for range 1 + rng.IntN(4) {
			r := rule{allow: rng.IntN(3) > 0, acts: bitsAll, action: anyAction}
			if rng.IntN(3) == 0 {
				r.acts, r.action = bitSubscribe, string(Subscribe)
				if rng.IntN(2) == 0 {
					r.groups = []string{"g"}
				}
			}
			for range 1 + rng.IntN(2) {
				q, err := ParsePattern(randomName(rng, 3, append(slices.Clone(words), oneSegment, anySegments)...))
				if err != nil {
					t.Fatal(err)
				}
				r.topics = append(r.topics, q)
			}
			p.rules = append(p.rules, r)
			p.denies = p.denies || !r.allow
		}
		for _, a := range []Action{Publish, Subscribe} {
			reaches := p.Reaches(a)
			for range 20 {
				topic := randomName(rng, 4, words...)
				allowed, matched := p.Decide(a, topic, "").Allowed, false
				for _, reach := range reaches {
					q, _ := ParsePattern(reach.Pattern)
					if !q.Match(topic) {
						continue
					}
					matched = true
					if reach.Whole && !allowed {
						t.Fatalf("%s %s is %s, but %+v is whole in %s", a, topic, p.Decide(a, topic, ""), reach, rulesOf(p))
					}
				}
				if allowed && !matched {
					t.Fatalf("%s %s is allowed, and no pattern of %v matches", a, topic, reaches)
				}
			}
		}
	}
}

func rulesOf(p *Policy) string {
	lines := make([]string, len(p.rules))
	for i := range p.rules {
		lines[i] = p.rules[i].String()
	}
	return strings.Join(lines, "; ")
}

// TestScopesReachWholly has scopes, which deny nothing, reach all that they match.
func TestScopesReachWholly(t *testing.T) {
	p, err := ParseScopes([]string{"publish:a.**", "publish:**.b", "subscribe:a.*", "subscribe:b.c::mailer", "subscribe:b.*::tab-*"})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []Action{Publish, Subscribe} {
		for _, reach := range p.Reaches(a) {
			if !reach.Whole {
				t.Errorf("%+v is not whole", reach)
			}
		}
	}
	if got := fmt.Sprint(p.Reaches(Subscribe)); got != "[{a.* 3 true}]" {
		t.Errorf("what may be read without a group: %s", got)
	}
	topics, groups := p.Names()
	if !slices.Equal(topics, []string{"b.c"}) || !slices.Equal(groups, []string{"mailer"}) {
		t.Errorf("names: %v, %v", topics, groups)
	}
	for topic, want := range map[string]bool{"a.x": true, "b.c": true, "b.x": true, "c": false, "a": false} {
		if got := p.MayJoin(topic); got != want {
			t.Errorf("groups of %s: %v", topic, got)
		}
	}
}
