package facade_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
)

// policyConnections is larger for the long form.
var policyConnections = flag.Int("policies.connections", 60, "connections, each with policies of its own")

// plainRule and what follows are a second reading of section 6 of the protocol: slow, short, and
// with nothing in common with package acl.
type plainRule struct {
	Effect string   `json:"effect"`
	Action string   `json:"action"`
	Topics []string `json:"topics"`
}

func plainDecision(rules []plainRule, topic string) bool {
	for _, r := range rules {
		for _, pattern := range r.Topics {
			if (r.Action == "*" || r.Action == "publish") && plainMatch(strings.Split(pattern, "."), strings.Split(topic, ".")) {
				return r.Effect == "allow"
			}
		}
	}
	return false
}

func plainMatch(pattern, topic []string) bool {
	switch {
	case len(pattern) == 0:
		return len(topic) == 0
	case pattern[0] == "**":
		return plainMatch(pattern[1:], topic) || len(topic) > 0 && plainMatch(pattern, topic[1:])
	}
	return len(topic) > 0 && (pattern[0] == "*" || pattern[0] == topic[0]) && plainMatch(pattern[1:], topic[1:])
}

func pick(rnd *rand.Rand, from ...string) string { return from[rnd.IntN(len(from))] }

func randomName(rnd *rand.Rand, segments ...string) string {
	name := make([]string, 1+rnd.IntN(3))
	for i := range name {
		name[i] = pick(rnd, segments...)
	}
	return strings.Join(name, ".")
}

func randomRules(rnd *rand.Rand) []plainRule {
	rules := make([]plainRule, 1+rnd.IntN(8))
	for i := range rules {
		rules[i] = plainRule{Effect: pick(rnd, "allow", "allow", "deny"), Action: pick(rnd, "publish", "publish", "publish", "*", "subscribe", "admin")}
		for range 1 + rnd.IntN(3) {
			rules[i].Topics = append(rules[i].Topics, randomName(rnd, "a", "b", "c", "a", "b", "c", "*", "**"))
		}
	}
	return rules
}

// Many connections are open at once, each with a policy of its own and then another, and none is
// ever judged by what is another's.
func TestPoliciesDoNotMix(t *testing.T) {
	t.Parallel()
	const rounds, perRound, workers = 4, 25, 8
	connections := *policyConnections
	r := jwtRig(t, func(cfg *facade.Config) {
		// Who may publish is told so, and little is stored.
		cfg.Limits.PrincipalRate, cfg.Limits.PrincipalBurst = 1, 1
	})
	type member struct {
		*peer
		rnd   *rand.Rand
		rules []plainRule
	}
	members := make([]member, connections)
	newPolicy := func(i int) error {
		m := &members[i]
		m.rules = randomRules(m.rnd)
		policy, err := json.Marshal(map[string]any{"rules": m.rules})
		if err != nil {
			return err
		}
		m.auth(sign(t, acl.Grant{Subject: strconv.Itoa(i), Policy: policy}))
		return nil
	}
	for i := range members {
		members[i] = member{peer: r.dial(t), rnd: rand.New(rand.NewPCG(4, uint64(i)))}
		if err := newPolicy(i); err != nil {
			t.Fatal(err)
		}
	}
	// All topics are there, so that no publish waits for one.
	for _, a := range []string{"a", "b", "c"} {
		for _, b := range []string{"", ".a", ".b", ".c"} {
			for _, c := range []string{"", ".a", ".b", ".c"} {
				if b == "" && c != "" {
					continue
				}
				if _, err := r.bus.Publish(t.Context(), a+b+c, nil, jetstream.PublishOptions{}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	turn := func(i, round int) error {
		m := &members[i]
		if round == 2 {
			if err := newPolicy(i); err != nil {
				return err
			}
		}
		want := make(map[int]bool, perRound)
		for n := range perRound {
			topic := randomName(m.rnd, "a", "b", "c")
			want[n] = plainDecision(m.rules, topic)
			m.send(`{"op":"PUBLISH","topic":"` + topic + `","corr":` + strconv.Itoa(n) + `}`)
		}
		for range perRound {
			got := m.any()
			n, _ := got.Corr.(float64)
			if allowed := got.Code != "forbidden"; allowed != want[int(n)] || allowed && got.Op != "OK" && got.Code != "rate_limited" {
				return fmt.Errorf("connection %d, round %d, publish %v: %+v, allowed is %v by %+v", i, round, n, got, want[int(n)], m.rules)
			}
		}
		return nil
	}
	for round := range rounds {
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for i := w; i < connections; i += workers {
					if err := turn(i, round); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			return
		}
	}
	if n := r.seen.count("error forbidden"); n < connections*rounds*perRound/10 || n > connections*rounds*perRound*9/10 {
		t.Errorf("%d were forbidden: the policies are not worth much", n)
	}
}
