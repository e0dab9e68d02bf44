package acl_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
)

type matchCase struct {
	Pattern, Topic string
	Want           bool
}

// slowMatch is what the patterns mean, written down without a thought for time.
func slowMatch(pattern, topic []string) bool {
	if len(pattern) == 0 {
		return len(topic) == 0
	}
	if pattern[0] == "**" {
		return slowMatch(pattern[1:], topic) || len(topic) > 0 && slowMatch(pattern, topic[1:])
	}
	return len(topic) > 0 && (pattern[0] == "*" || pattern[0] == topic[0]) && slowMatch(pattern[1:], topic[1:])
}

func TestPatternsMatchAsTheFixturesSay(t *testing.T) {
	cases := fixtures[matchCase](t, "match.json")
	if len(cases) < 120 {
		t.Errorf("%d cases, want 120 at least", len(cases))
	}
	for _, c := range cases {
		p, err := acl.ParsePattern(c.Pattern)
		if err != nil {
			t.Errorf("%q: %v", c.Pattern, err)
			continue
		}
		if got := p.Match(c.Topic); got != c.Want {
			t.Errorf("%q on %q: %v, want %v", c.Pattern, c.Topic, got, c.Want)
		}
		if p.String() != c.Pattern {
			t.Errorf("%q became %q", c.Pattern, p)
		}
	}
}

func TestInvalidPatternsAreRefused(t *testing.T) {
	for _, c := range fixtures[struct{ Pattern, Why string }](t, "invalid.json") {
		if _, err := acl.ParsePattern(c.Pattern); err == nil {
			t.Errorf("%q was taken: %s", c.Pattern, c.Why)
		}
	}
}

func TestPatternErrorsSayWhatToDo(t *testing.T) {
	for pattern, want := range map[string]string{
		"":       `pattern "": it is empty; use a topic, or ** for all topics`,
		"a..b":   `pattern "a..b": segment 2 is empty; separate segments by a single dot`,
		"a.b*.c": `pattern "a.b*.c": segment 2 mixes a wildcard with other characters; a wildcard must be a whole segment`,
		"a/b":    `pattern "a/b": segment 1 has an invalid character`,
	} {
		if _, err := acl.ParsePattern(pattern); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %s…", pattern, err, want)
		}
	}
}

func TestZeroPatternMatchesNothing(t *testing.T) {
	var p acl.Pattern
	if p.Match("") || p.Match("a") {
		t.Error("it matches")
	}
}

func TestMatchDoesNotAllocate(t *testing.T) {
	p, err := acl.ParsePattern("**.a.*.b.**")
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { p.Match("x.a.a.y.b.z") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Patterns made to go back as often as can be must still be quick: a matcher that tries everything
// would not come to an end.
func TestNoPatternIsSlow(t *testing.T) {
	p, err := acl.ParsePattern(strings.Repeat("**.a.a.", 36) + "b")
	if err != nil {
		t.Fatal(err)
	}
	topic := strings.Repeat("a.", 125) + "a"
	begin := time.Now()
	for range 1000 {
		if p.Match(topic) {
			t.Fatal("it matches")
		}
	}
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("1,000 matches took %v", d)
	}
}

func FuzzPattern(f *testing.F) {
	for _, c := range fixtures[matchCase](f, "match.json") {
		if len(c.Pattern) < 40 && len(c.Topic) < 40 {
			f.Add(c.Pattern, c.Topic)
		}
	}
	for _, c := range fixtures[struct{ Pattern string }](f, "invalid.json") {
		f.Add(c.Pattern, "a")
	}
	f.Fuzz(func(t *testing.T, pattern, topic string) {
		p, err := acl.ParsePattern(pattern)
		if err != nil {
			return
		}
		if p.String() != pattern {
			t.Fatalf("%q became %q", pattern, p)
		}
		if q, err := acl.ParsePattern(topic); err != nil || strings.Contains(topic, "*") || len(topic) > 251 || q.String() != topic {
			return // no topic
		}
		segments := strings.Split(pattern, ".")
		// The slow matcher takes time that is exponential in these.
		if wild := len(slices.DeleteFunc(slices.Clone(segments), func(s string) bool { return s != "**" })); wild > 4 || len(topic) > 60 {
			return
		}
		if got, want := p.Match(topic), slowMatch(segments, strings.Split(topic, ".")); got != want {
			t.Fatalf("%q on %q: %v, want %v", pattern, topic, got, want)
		}
	})
}

func BenchmarkPattern(b *testing.B) {
	for _, c := range []struct{ name, pattern, topic string }{
		{"literal", "heartbeat.received", "heartbeat.received"},
		{"one", "heartbeat.*", "heartbeat.received"},
		{"any", "heartbeat.**", "heartbeat.received"},
		{"middle", "a.**.c.*.e", "a.b.c.c.d.e"},
		{"other", "process.**", "heartbeat.received"},
	} {
		b.Run(c.name, func(b *testing.B) {
			p, err := acl.ParsePattern(c.pattern)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				p.Match(c.topic)
			}
		})
	}
}
