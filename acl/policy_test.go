package acl_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"eventhub/acl"
)

// granted is what a token grants: a policy, or scopes.
type granted struct {
	Policy json.RawMessage
	Scopes []string
}

func (g granted) parse() (*acl.Policy, error) {
	if g.Policy != nil {
		return acl.ParsePolicy(g.Policy)
	}
	return acl.ParseScopes(g.Scopes)
}

func TestPoliciesDecideAsTheFixturesSay(t *testing.T) {
	for i, c := range fixtures[struct {
		granted
		Ask []struct {
			Action       acl.Action
			Topic, Group string
			Want         bool
			Rule         int
		}
	}](t, "decide.json") {
		p, err := c.parse()
		if err != nil {
			t.Errorf("%d: %v", i, err)
			continue
		}
		for _, ask := range c.Ask {
			d := p.Decide(ask.Action, ask.Topic, ask.Group)
			if d.Allowed != ask.Want || d.Rule() != ask.Rule {
				t.Errorf("%d: %+v: %v by rule %d", i, ask, d.Allowed, d.Rule())
			}
		}
	}
}

func TestMalformedRightsAreRefused(t *testing.T) {
	for _, c := range fixtures[struct {
		granted
		Why string
	}](t, "refuse.json") {
		if p, err := c.parse(); err == nil || p != nil {
			t.Errorf("%s%q was taken: %s", c.Policy, c.Scopes, c.Why)
		}
	}
}

// What a JSON fixture cannot hold.
func TestMalformedPolicyTextsAreRefused(t *testing.T) {
	const r = `{"effect":"allow","action":"publish","topics":["a"]}`
	for _, text := range []string{
		``, ` `, `{`, `nul`, `{"rules":[]}x`, `{"rules":[]}{"rules":[]}`, `{"rules":[],}`, `{"rules":[` + r + `,]}`, `{"rules" []}`,
		`{"rules":[],"rules":[` + r + `]}`,
		`{"rules":[{"effect":"deny","effect":"allow","action":"publish","topics":["a"]}]}`,
		`{"rules":[{"effect":"allow","action":"publish","topics":["a"],"topics":["**"]}]}`,
		`{"rules":[{"effect":"allow","action":"publish","topics":["a"],"\u0074opics":["**"]}]}`,
		strings.Repeat(`[`, 100_000),
		`{"rules":` + strings.Repeat(`[`, 100_000) + `}`,
	} {
		if _, err := acl.ParsePolicy([]byte(text)); err == nil {
			t.Errorf("%.100s was taken", text)
		}
	}
}

func policyOf(rules ...string) []byte {
	return []byte(`{"rules":[` + strings.Join(rules, ",") + `]}`)
}

func ruleOf(effect, action string, topics ...string) string {
	list, _ := json.Marshal(topics)
	return fmt.Sprintf(`{"effect":%q,"action":%q,"topics":%s}`, effect, action, list)
}

func TestPolicyBounds(t *testing.T) {
	one := ruleOf("allow", "publish", "a")
	hundred := ruleOf("allow", "publish", slices.Repeat([]string{"a"}, acl.MaxTopicsPerRule)...)
	groups := func(n int) string {
		list, _ := json.Marshal(slices.Repeat([]string{"g"}, n))
		return fmt.Sprintf(`{"effect":"allow","action":"subscribe","topics":["a"],"groups":%s}`, list)
	}
	for _, c := range []struct {
		name string
		text []byte
		want string
	}{
		{"rules", policyOf(slices.Repeat([]string{one}, acl.MaxRules)...), ""},
		{"too many rules", policyOf(slices.Repeat([]string{one}, 10_001)...), "policy: it has 10001 rules; at most 1000 are allowed"},
		{"topics", policyOf(hundred), ""},
		{"too many topics", policyOf(ruleOf("allow", "publish", slices.Repeat([]string{"a"}, acl.MaxTopicsPerRule+1)...)), "policy: rule 1: topics has 101 entries; at most 100 are allowed"},
		{"patterns", policyOf(slices.Repeat([]string{hundred}, acl.MaxPatterns/acl.MaxTopicsPerRule)...), ""},
		{"too many patterns", policyOf(append(slices.Repeat([]string{hundred}, acl.MaxPatterns/acl.MaxTopicsPerRule), one)...), "policy: its rules have more than 5000 topics in all"},
		{"groups", policyOf(groups(acl.MaxGroupsPerRule)), ""},
		{"too many groups", policyOf(groups(acl.MaxGroupsPerRule + 1)), "policy: rule 1: groups has 101 entries; at most 100 are allowed"},
		{"too long a pattern", policyOf(one, ruleOf("allow", "publish", "a", strings.Repeat("a", 257))), "policy: rule 2: topic 2: it has 257 bytes; at most 256 are allowed"},
		{"too much text", append(policyOf(one), slices.Repeat([]byte(" "), acl.MaxPolicyBytes)...), "policy: it has "},
	} {
		_, err := acl.ParsePolicy(c.text)
		if got := fmt.Sprint(err); c.want == "" && err != nil || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	scopes := slices.Repeat([]string{"publish:a"}, acl.MaxRules)
	if _, err := acl.ParseScopes(scopes); err != nil {
		t.Error(err)
	}
	if _, err := acl.ParseScopes(append(scopes, "publish:a")); err == nil {
		t.Error("too many scopes were taken")
	}
}

func TestDecisionsNameTheirRule(t *testing.T) {
	p, err := acl.ParsePolicy(policyOf(ruleOf("deny", "publish", "a.**", "b"),
		`{"effect":"allow","action":"*","topics":["**"],"groups":["dash board","*"]}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		action acl.Action
		group  string
		want   string
	}{
		{acl.Publish, "", `denied by rule 1: deny publish a.** b`},
		{acl.Subscribe, "g", `allowed by rule 2: allow * ** groups "dash board" "*"`},
		{acl.Subscribe, "", `denied by default: no rule matches`},
	} {
		if got := p.Decide(c.action, "a.b", c.group).String(); got != c.want {
			t.Errorf("%s %q: %s, want %s", c.action, c.group, got, c.want)
		}
	}
	if p.Len() != 2 {
		t.Errorf("%d rules", p.Len())
	}
}

func TestNoPolicyDeniesAndFullRightsAllow(t *testing.T) {
	var none *acl.Policy
	for _, a := range []acl.Action{acl.Publish, acl.Subscribe, acl.Inspect, acl.Presence, acl.Admin} {
		for _, group := range []string{"", "g"} {
			if none.Decide(a, "a", group).Allowed || new(acl.Policy).Decide(a, "a", group).Allowed {
				t.Errorf("%s: no policy allows", a)
			}
			if !acl.FullRights().Decide(a, "a.b.c", group).Allowed {
				t.Errorf("%s: full rights deny", a)
			}
		}
	}
	if none.Len() != 0 {
		t.Error("no policy has rules")
	}
}

// reference is what a policy means, without compiled patterns and without an early end.
type reference struct {
	Effect, Action string
	Topics         []string
	Groups         []string `json:",omitempty"`
}

func (r reference) MarshalJSON() ([]byte, error) {
	m := map[string]any{"effect": r.Effect, "action": r.Action, "topics": r.Topics}
	if r.Groups != nil {
		m["groups"] = r.Groups
	}
	return json.Marshal(m)
}

// referenceDecision decides as the first rule that matches does, unless it allows a topic that
// shows the events of a topic that an earlier rule denies. shows has the configured snapshot
// topics.
func referenceDecision(rules []reference, action, topic, group string, shows map[string]string) (allowed bool, number int) {
	return referenceCovered(rules, action, topic, group, shows, "")
}

// referenceCovered is referenceDecision. done has a letter for each way in which the topic was
// derived already.
func referenceCovered(rules []reference, action, topic, group string, shows map[string]string, done string) (allowed bool, number int) {
	allowed, number = referenceFirst(rules, action, topic, group)
	if !allowed {
		return allowed, number
	}
	segments := strings.Split(topic, ".")
	names := func(way string) bool { // the rule that allows the topic names it
		return slices.ContainsFunc(rules[number-1].Topics, func(pattern string) bool {
			parts := strings.Split(pattern, ".")
			at := map[string]string{"d": parts[0], "s": parts[len(parts)-1]}[way]
			return !strings.Contains(at, "*") && slowMatch(parts, segments)
		})
	}
	type source struct{ way, topic string }
	var sources []source
	if segments[0] == "dlq" && len(segments) > 1 {
		sources = append(sources, source{"d", strings.Join(segments[1:], ".")})
	}
	if last := len(segments) - 1; segments[last] == "snapshot" && last > 0 {
		sources = append(sources, source{"s", strings.Join(segments[:last], ".")})
	}
	if of, ok := shows[topic]; ok {
		sources = append(sources, source{"s", of})
	}
	for _, s := range sources {
		if strings.Contains(done, s.way) || names(s.way) {
			continue
		}
		if ok, by := referenceCovered(rules, action, s.topic, group, shows, done+s.way); !ok && by > 0 && by < number {
			return false, by
		}
	}
	return allowed, number
}

func referenceFirst(rules []reference, action, topic, group string) (allowed bool, number int) {
	for i := len(rules) - 1; i >= 0; i-- { // from the last: what comes before overrides it
		r := rules[i]
		if r.Action != "*" && r.Action != action {
			continue
		}
		matched := false
		for _, pattern := range r.Topics {
			matched = slowMatch(strings.Split(pattern, "."), strings.Split(topic, ".")) || matched
		}
		if action == "subscribe" && r.Groups != nil {
			listed := slices.Contains(r.Groups, group) || slices.Contains(r.Groups, "*")
			matched = matched && listed && group != ""
		}
		if matched {
			allowed, number = r.Effect == "allow", i+1
		}
	}
	return allowed, number
}

// random returns a random pattern or topic, sometimes one of dead letters or of snapshots.
func random(join func(int, ...string) string, rng *rand.Rand, from ...string) string {
	text := join(1+rng.IntN(4), from...)
	if rng.IntN(3) == 0 {
		text = "dlq." + text
	}
	if rng.IntN(3) == 0 {
		text += ".snapshot"
	}
	return text
}

func TestRandomPoliciesDecideAsTheReference(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	pick := func(from ...string) string { return from[rng.IntN(len(from))] }
	join := func(n int, from ...string) string {
		parts := make([]string, n)
		for i := range parts {
			parts[i] = pick(from...)
		}
		return strings.Join(parts, ".")
	}
	shows := map[string]string{"a.b": "c", "d": "a", "dlq.c": "b.a"}
	allowed, byRule, covered := 0, 0, 0
	for range 1000 {
		rules := make([]reference, rng.IntN(12))
		for i := range rules {
			r := &rules[i]
			r.Effect, r.Action = pick("allow", "deny"), pick("publish", "subscribe", "admin", "*")
			for range 1 + rng.IntN(3) {
				r.Topics = append(r.Topics, random(join, rng, "a", "b", "c", "*", "**"))
			}
			if (r.Action == "subscribe" || r.Action == "*") && rng.IntN(2) == 0 {
				for range 1 + rng.IntN(3) {
					r.Groups = append(r.Groups, pick("g", "h", "i", "*"))
				}
			}
		}
		text, err := json.Marshal(map[string]any{"rules": rules})
		if err != nil {
			t.Fatal(err)
		}
		p, err := acl.ParsePolicy(text)
		if err != nil {
			t.Fatalf("seed %d: %s: %v", seed, text, err)
		}
		p = acl.WithSnapshots(p, shows)
		for range 100 {
			action, topic, group := pick("publish", "subscribe", "admin"), random(join, rng, "a", "b", "c", "d"), pick("", "g", "h", "i", "j")
			d := p.Decide(acl.Action(action), topic, group)
			want, number := referenceDecision(rules, action, topic, group, shows)
			if first, _ := referenceFirst(rules, action, topic, group); first != want {
				covered++
			}
			if d.Allowed != want || d.Rule() != number {
				t.Fatalf("seed %d: %s: %s %s %q: %v, want %v by rule %d", seed, text, action, topic, group, d, want, number)
			}
			if d.Allowed {
				allowed++
			}
			if number > 0 {
				byRule++
			}
		}
	}
	// Else the policies would be of a kind that tests nothing.
	if allowed < 10_000 || byRule < 20_000 || byRule > 95_000 || covered < 50 {
		t.Errorf("seed %d: %d of 100,000 were allowed, %d decided by a rule, %d by a rule about another topic", seed, allowed, byRule, covered)
	}
}

func TestDecideDoesNotAllocate(t *testing.T) {
	p := hundredRules(t)
	if n := testing.AllocsPerRun(100, func() {
		p.Decide(acl.Publish, "team-99.orders.created.eu", "")
		p.Decide(acl.Subscribe, "nobody", "g")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// hundredRules is a policy as a large installation may have it.
func hundredRules(tb testing.TB) *acl.Policy {
	tb.Helper()
	rules := make([]string, 100)
	for i := range rules {
		team := fmt.Sprintf("team-%02d.orders", i)
		rules[i] = ruleOf("allow", "*", team+".**", team+"-audit.*")
	}
	p, err := acl.ParsePolicy(policyOf(rules...))
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func BenchmarkDecide(b *testing.B) {
	p := hundredRules(b)
	wild := make([]string, 100)
	for i := range wild {
		wild[i] = ruleOf("allow", "publish", fmt.Sprintf("*.*.event-%d.**", i))
	}
	q, err := acl.ParsePolicy(policyOf(wild...))
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		policy *acl.Policy
		topic  string
	}{
		{"first of 100 rules", p, "team-00.orders.created"},
		{"last of 100 rules", p, "team-99.orders.created.eu"},
		{"none of 100 rules", p, "team-xx.orders.created.eu"},
		{"none of 100 rules that begin with wildcards", q, "team-xx.orders.created.eu"},
		{"full rights", acl.FullRights(), "team-99.orders.created.eu"},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.policy.Decide(acl.Publish, c.topic, "")
			}
		})
	}
}

func BenchmarkParsePolicy(b *testing.B) {
	rules := make([]string, 100)
	for i := range rules {
		rules[i] = ruleOf("allow", "publish", fmt.Sprintf("team-%d.**", i))
	}
	text := policyOf(rules...)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := acl.ParsePolicy(text); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzPolicy(f *testing.F) {
	for _, name := range []string{"decide.json", "refuse.json"} {
		for _, c := range fixtures[granted](f, name) {
			f.Add([]byte(c.Policy))
		}
	}
	f.Add([]byte(`{"rules":[],"rules":[]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := acl.ParsePolicy(text)
		if err != nil {
			return
		}
		// What was taken is what encoding/json reads as well, and it is within the bounds.
		var got struct{ Rules []reference }
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatalf("taken, though %v", err)
		}
		if p.Len() != len(got.Rules) || p.Len() > acl.MaxRules {
			t.Fatalf("%d rules, want %d", p.Len(), len(got.Rules))
		}
		for _, r := range got.Rules {
			if len(r.Topics) == 0 || len(r.Topics) > acl.MaxTopicsPerRule || r.Effect != "allow" && r.Effect != "deny" {
				t.Fatalf("%+v was taken", r)
			}
			for _, pattern := range r.Topics {
				if strings.Count(pattern, "**") > 3 {
					return // too slow for the reference
				}
			}
		}
		for _, topic := range []string{"a", "a.b", "secret.x.y", "b.c", "dlq.secret.x", "a.snapshot", "dlq.a.b.snapshot"} {
			for _, action := range []string{"publish", "subscribe", "admin"} {
				for _, group := range []string{"", "g", "x"} {
					d := p.Decide(acl.Action(action), topic, group)
					if want, number := referenceDecision(got.Rules, action, topic, group, nil); d.Allowed != want || d.Rule() != number {
						t.Fatalf("%s %s %q: %v, want %v by rule %d", action, topic, group, d, want, number)
					}
				}
			}
		}
	})
}
