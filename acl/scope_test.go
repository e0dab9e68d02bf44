package acl_test

import (
	"strings"
	"testing"

	"eventhub/acl"
)

func TestScopeErrorsSayWhatToDo(t *testing.T) {
	for scope, want := range map[string]string{
		"publish":    "scope 2: there is no colon: write ACTION:PATTERN, such as publish:heartbeat.*",
		"read:a":     "scope 2: the action before the colon must be publish, subscribe, admin or *",
		"publish:":   "scope 2: the pattern after the colon: it is empty",
		"admin:a.b:": "scope 2: the pattern after the colon: segment 2 has an invalid character",
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
	f.Fuzz(func(t *testing.T, scope string) {
		p, err := acl.ParseScopes([]string{scope})
		action, pattern, found := strings.Cut(scope, ":")
		_, patternErr := acl.ParsePattern(pattern)
		well := found && patternErr == nil && (action == "*" || action == "publish" || action == "subscribe" || action == "admin")
		if well != (err == nil) {
			t.Fatalf("%q: %v", scope, err)
		}
		if err != nil {
			return
		}
		// It allows just its action, and just what its pattern matches.
		compiled, _ := acl.ParsePattern(pattern)
		for _, a := range []acl.Action{acl.Publish, acl.Subscribe, acl.Admin} {
			for _, topic := range []string{"a", "b.c", "heartbeat.received"} {
				want := (action == "*" || action == string(a)) && compiled.Match(topic)
				if d := p.Decide(a, topic, ""); d.Allowed != want {
					t.Fatalf("%q: %s %s: %v", scope, a, topic, d)
				}
			}
		}
	})
}
