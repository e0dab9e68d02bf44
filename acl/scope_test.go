package acl_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"eventhub/acl"
)

func TestScopeErrorsSayWhatToDo(t *testing.T) {
	for scope, want := range map[string]string{
		"publish":            "scope 2: there is no colon: write ACTION:PATTERN, such as publish:heartbeat.*",
		"read:a":             "scope 2: the action before the colon must be publish, subscribe, inspect, presence, admin or *",
		"publish:":           "scope 2: the pattern after the colon: it is empty",
		"admin:a.b:":         "scope 2: the pattern after the colon: segment 2 has an invalid character",
		"subscribe:a::":      "scope 2: the group behind ::: it is empty; write the name of a group",
		"subscribe:a:::g":    "scope 2: the group behind ::: it begins with a colon",
		"subscribe:a::g\x00": "scope 2: the group behind ::: it has a control character",
		"subscribe:a::" + strings.Repeat("g", 129): "scope 2: the group behind ::: it has 129 bytes",
		"subscribe::g":  "scope 2: the pattern after the colon: segment 1 has an invalid character",
		"subscribe:::g": "scope 2: the pattern after the colon: it is empty",
		"*:a::g":        "scope 2: a group behind :: is only allowed with the action subscribe",
		"publish:a::g":  "scope 2: a group behind :: is only allowed with the action subscribe",
		"admin:a::*":    "scope 2: a group behind :: is only allowed with the action subscribe",
	} {
		_, err := acl.ParseScopes([]string{"publish:a", scope})
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %s…", scope, err, want)
		}
	}
}

func FuzzScope(f *testing.F) {
	for _, name := range []string{"decide.json", "refuse.json"} {
		for _, c := range fixtures[granted](f, name) {
			for _, s := range c.Scopes {
				f.Add(s)
			}
		}
	}
	for _, s := range []string{"subscribe:orders.*::billing", "subscribe:**::tab-*-x*", "subscribe:a::*", "subscribe:a::b::c", "*:a::g", "subscribe:a::", "subscribe:a:::g", "publish:a::*"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, scope string) {
		p, err := acl.ParseScopes([]string{scope})
		action, pattern, found := strings.Cut(scope, ":")
		pattern, group, named := strings.Cut(pattern, "::")
		_, patternErr := acl.ParsePattern(pattern)
		well := found && patternErr == nil && (action == "*" || action == "publish" || action == "subscribe" || action == "inspect" || action == "presence" || action == "admin")
		if named {
			control := strings.ContainsFunc(group, func(c rune) bool { return c < ' ' || c == 0x7f })
			well = well && action == "subscribe" && group != "" && len(group) <= 128 && utf8.ValidString(group) && group[0] != ':' && !control
		}
		if well != (err == nil) {
			t.Fatalf("%q: %v", scope, err)
		}
		if err != nil {
			return
		}
		// It allows just its action, just what its pattern matches, and just the groups that it
		// names.
		compiled, _ := acl.ParsePattern(pattern)
		for _, a := range []acl.Action{acl.Publish, acl.Subscribe, acl.Presence, acl.Admin} {
			for _, topic := range []string{"a", "b.c", "heartbeat.received"} {
				for _, member := range []string{"", "g", "billing", "tab-1-x", "process-projector", group, strings.ReplaceAll(group, "*", "yz"), strings.ReplaceAll(group, "*", "")} {
					want := (action == "*" || action == string(a)) && compiled.Match(topic)
					if a == acl.Subscribe {
						want = want && (!named || member != "" && plainGlob(group, member)) && (action == "*" || member != "process-projector")
					}
					if d := p.Decide(a, topic, member); d.Allowed != want {
						t.Fatalf("%q: %s %s %q: %v", scope, a, topic, member, d)
					}
				}
			}
		}
	})
}

// plainGlob is a second reading of the patterns of groups: slow, short, and with nothing in common
// with package acl.
func plainGlob(pattern, name string) bool {
	reached := map[int]bool{0: true} // bytes of name that what was read of the pattern may match
	for i := range len(pattern) {
		next := map[int]bool{}
		for at := range reached {
			switch {
			case pattern[i] == '*':
				for to := at; to <= len(name); to++ {
					next[to] = true
				}
			case at < len(name) && name[at] == pattern[i]:
				next[at+1] = true
			}
		}
		reached = next
	}
	return reached[len(name)]
}

func TestScopesDecideAboutGroups(t *testing.T) {
	for _, test := range []struct {
		scopes []string
		group  string
		want   bool
		why    string
	}{
		{[]string{"subscribe:orders.*::billing"}, "billing", true, "allowed by rule 1: allow subscribe orders.*::billing"},
		{[]string{"subscribe:orders.*::billing"}, "billing2", false, "denied by default: no rule matches"},
		{[]string{"subscribe:orders.*::billing"}, "", false, "denied by default: no rule matches"},
		{[]string{"subscribe:orders.*::b*ing"}, "bing", true, "allowed by rule 1: allow subscribe orders.*::b*ing"},
		{[]string{"subscribe:orders.*::b*ing"}, "bin", false, "denied by default: no rule matches"},
		{[]string{"subscribe:orders.*::ab*ba"}, "aba", false, "denied by default: no rule matches"},
		{[]string{"subscribe:orders.*"}, "any", true, "allowed by rule 1: allow subscribe orders.*"},
		{[]string{"subscribe:orders.*"}, "process-projector", false, "denied by default: the hub itself runs this group, and no rule allows admin"},
		{[]string{"*:orders.*"}, "process-projector", true, "allowed by rule 1: allow * orders.*"},
		{[]string{"subscribe:orders.*::b", "subscribe:orders.*"}, "", true, "allowed by rule 2: allow subscribe orders.*"},
	} {
		p, err := acl.ParseScopes(test.scopes)
		if err != nil {
			t.Fatal(err)
		}
		if d := p.Decide(acl.Subscribe, "orders.placed", test.group); d.Allowed != test.want || d.String() != test.why {
			t.Errorf("%v, group %q: %v", test.scopes, test.group, d)
		}
	}
}
