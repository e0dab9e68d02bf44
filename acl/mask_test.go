package acl_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
)

// holder returns the owner of a token with rules.
func holder(t *testing.T, rules ...string) *acl.Identity {
	t.Helper()
	token, err := acl.Sign(secret, acl.Grant{TTL: time.Hour, Policy: []byte(`{"rules":[` + strings.Join(rules, ",") + `]}`)})
	if err != nil {
		t.Fatal(err)
	}
	id, err := newVerifier(t, acl.Config{Secret: secret}).Verify(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestMasks(t *testing.T) {
	t.Parallel()
	const (
		orders = `{"effect":"allow","action":"admin","topics":["orders"],"mask":["/card","/a~1b/0","X-Token"]}`
		all    = `{"effect":"allow","action":"admin","topics":["**"]}`
		reads  = `{"effect":"allow","action":"subscribe","topics":["orders"]}`
		groups = `{"effect":"allow","action":"subscribe","topics":["orders"],"groups":["g"],"mask":["/mail"]}`
		counts = `{"effect":"allow","action":"inspect","topics":["**"]}`
		both   = `{"effect":"allow","action":"*","topics":["orders"],"mask":["/card"]}`
		letter = `{"effect":"allow","action":"admin","topics":["dlq.orders"]}`
		denied = `{"effect":"deny","action":"admin","topics":["orders"]}`
	)
	for _, test := range []struct {
		name         string
		rules        []string
		topic, group string
		want         string
	}{
		{"a rule with a mask", []string{orders}, "orders", "", "[{[/card /a~1b/0] [x-token]}] true"},
		{"a rule without one", []string{all}, "orders", "", "[] true"},
		{"none", []string{orders}, "other", "", "[] false"},
		{"the first rule decides", []string{orders, all}, "orders", "", "[{[/card /a~1b/0] [x-token]}] true"},
		{"a subscriber sees all anyway", []string{orders, reads}, "orders", "", "[] true"},
		{"masks of both rights", []string{orders, groups}, "orders", "g", "[{[/mail] []} {[/card /a~1b/0] [x-token]}] true"},
		{"of the right that there is", []string{orders, groups}, "orders", "other", "[{[/card /a~1b/0] [x-token]}] true"},
		{"one rule for all actions", []string{both}, "orders", "", "[{[/card] []} {[/card] []}] true"},
		{"figures show no events", []string{counts}, "orders", "", "[] false"},
		{"dead letters are covered", []string{orders, all}, "dlq.orders", "", "[{[/card /a~1b/0] [x-token]}] true"},
		{"snapshots are covered", []string{orders, all}, "orders.snapshot", "", "[{[/card /a~1b/0] [x-token]}] true"},
		{"unless a rule names them", []string{orders, letter, all}, "dlq.orders", "", "[] true"},
		{"a denied topic covers, too", []string{denied, all}, "dlq.orders", "", "[] false"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			masks, ok := holder(t, test.rules...).Shows(test.topic, test.group)
			var all []string
			for _, m := range masks {
				all = append(all, fmt.Sprint(*m))
			}
			if got := fmt.Sprint(all, ok); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
	for _, rules := range []string{orders, reads, counts, all} {
		if !holder(t, rules).Inspects("orders", "g") {
			t.Errorf("%s does not let its owner see figures", rules)
		}
	}
	if holder(t, `{"effect":"allow","action":"publish","topics":["**"]}`).Inspects("orders", "") {
		t.Error("a publisher sees figures")
	}
}

func TestMasksThatAreRefused(t *testing.T) {
	t.Parallel()
	for mask, want := range map[string]string{
		`[]`:           "mask is empty",
		`"/card"`:      "mask is not an array of strings",
		`[""]`:         "mask entry 1 is neither a JSON pointer such as /card/number nor the name of a header",
		`["/a","/~2"]`: "mask entry 2 is neither",
		`["x token"]`:  "mask entry 1 is neither",
		`["*"]`:        "mask entry 1 is neither",
		`["/` + strings.Repeat("a", acl.MaxMaskBytes) + `"]`:        "mask entry 1 has 257 bytes; at most 256 are allowed",
		`["/a"` + strings.Repeat(`,"/a"`, acl.MaxMaskPerRule) + `]`: "mask has 101 entries; at most 100 are allowed",
	} {
		_, err := acl.ParsePolicy([]byte(`{"rules":[{"effect":"allow","action":"admin","topics":["a"],"mask":` + mask + `}]}`))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want %s", mask, err, want)
		}
	}
	for _, rule := range []string{
		`{"effect":"deny","action":"admin","topics":["a"],"mask":["/a"]}`,
		`{"effect":"allow","action":"publish","topics":["a"],"mask":["/a"]}`,
		`{"effect":"allow","action":"inspect","topics":["a"],"mask":["/a"]}`,
	} {
		if _, err := acl.ParsePolicy([]byte(`{"rules":[` + rule + `]}`)); err == nil || !strings.Contains(err.Error(), "mask is only allowed in rules that allow subscribe or admin") {
			t.Errorf("%s: %v", rule, err)
		}
	}
}

// Only a rule that allows to see something makes it worth looking.
func TestInspectsAny(t *testing.T) {
	t.Parallel()
	for rule, want := range map[string]bool{
		`{"effect":"allow","action":"publish","topics":["**"]}`:                 false,
		`{"effect":"deny","action":"*","topics":["a"]}`:                         false,
		`{"effect":"allow","action":"inspect","topics":["a"]}`:                  true,
		`{"effect":"allow","action":"admin","topics":["a"],"mask":["/m"]}`:      true,
		`{"effect":"allow","action":"subscribe","topics":["a"],"groups":["g"]}`: true,
		`{"effect":"allow","action":"*","topics":["**"]}`:                       true,
	} {
		if got := holder(t, rule).InspectsAny(); got != want {
			t.Errorf("%s: %v", rule, got)
		}
	}
}
