package jetstream

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/topics"
)

// TestSubjectsOfPatterns compares the subjects of patterns with the topics that these match.
func TestSubjectsOfPatterns(t *testing.T) {
	t.Parallel()
	for pattern, want := range map[string]string{
		"a.b":  "event.a.b keyed.*.a.b",
		"a.*":  "event.a.* keyed.*.a.*",
		"a.**": "event.a keyed.*.a event.a.> keyed.*.a.>",
		"**":   "event.> keyed.*.>",
	} {
		if got, whole := subjectsOf(pattern, maxSegments); !whole || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v", pattern, got, whole)
		}
	}
	takes := func(subjects []string, topic string) bool {
		return slices.ContainsFunc(subjects, func(s string) bool { return streams.Covers(s, plainSubject(topic)) }) &&
			slices.ContainsFunc(subjects, func(s string) bool { return streams.Covers(s, "keyed.k."+topic) })
	}
	deep := strings.Repeat("x.", maxSegments-3)
	for _, tt := range []struct {
		pattern string
		in, out []string
	}{
		{"**.b", []string{"b", "a.b", "a.a.b", "b.b", deep + "b"}, []string{"a", "b.a", "a.b.c"}},
		{"a.**.b", []string{"a.b", "a.x.b", "a." + deep + "b"}, []string{"a", "b", "x.a.b", "a.b.x"}},
		{"a.**.b.**", []string{"a.b", "a.x.b", "a.b.x", "a.x.b.y.z"}, []string{"a", "a.x", "b.a"}},
		{"**.*", []string{"a", "a.b", deep + "a"}, nil},
	} {
		subjects, whole := subjectsOf(tt.pattern, maxSegments)
		if !whole {
			t.Errorf("%s is not whole", tt.pattern)
		}
		for _, topic := range tt.in {
			if !takes(subjects, topic) {
				t.Errorf("%s does not take %.40s", tt.pattern, topic)
			}
		}
		for _, topic := range tt.out {
			if takes(subjects, topic) {
				t.Errorf("%s takes %s", tt.pattern, topic)
			}
		}
	}
	subjects, whole := subjectsOf("**.b", 8)
	if whole || !takes(subjects, "1.2.3.4.5.6.7.b") || takes(subjects, "1.2.3.4.5.6.7.8.b") {
		t.Errorf("up to 8 segments: %v, %v", subjects, whole)
	}
}

// TestPermissionsHaveABound writes the permissions of rights that need more subjects than one
// message holds.
func TestPermissionsHaveABound(t *testing.T) {
	t.Parallel()
	yes := func(string) bool { return true }
	join := func(string, string) bool { return true }
	rights := &NativeRights{Publish: yes, Read: yes, Join: join, Inspect: join, MayJoin: yes}
	known := newNativeMap(nil, nil, nil)
	a := &access{core: &core{conn: &conn.Pool{API: "$JS.API."}, rules: topics.WithBuiltin(nil)}}
	for i := range 100 {
		rights.PublishReach = append(rights.PublishReach, NativeReach{Pattern: fmt.Sprintf("t%d.**.x.**.y", i), Rule: i + 1, Whole: true})
	}
	w := &permissionWriter{access: a, rights: rights, known: known}
	if _, fits := w.write("_INBOX_x", maxSegments); fits {
		t.Error("all subjects fit")
	}
	p, fits := w.write("_INBOX_x", 8)
	if !fits || len(p.Narrowed) != 100 || !strings.Contains(p.Narrowed[0], "rule 1: publish t0.**.x.**.y: only topics of up to 8 segments") {
		t.Errorf("topics of 8 segments do not fit, or that is not said: %d %q", len(p.Narrowed), p.Narrowed[:min(1, len(p.Narrowed))])
	}
	for i := range 10_000 {
		known.topics = append(known.topics, nativeTopic{name: fmt.Sprintf("topic.%d", i), stream: fmt.Sprintf("topic=2E%d", i), alone: true})
	}
	p, fits = w.write("_INBOX_x", 8)
	total := 0
	for _, s := range p.Publish {
		total += len(s)
	}
	if fits || total > maxPermissionBytes {
		t.Errorf("%d bytes of subjects, fits: %v", total, fits)
	}
}

// TestNoRightsAllowNothing has rights that allow nothing yield no subject to publish to.
func TestNoRightsAllowNothing(t *testing.T) {
	t.Parallel()
	no := func(string) bool { return false }
	none := func(string, string) bool { return false }
	w := &permissionWriter{
		access: &access{core: &core{conn: &conn.Pool{API: "$JS.API."}, rules: topics.WithBuiltin(nil)}}, rights: &NativeRights{Publish: no, Read: no, Join: none, Inspect: none, MayJoin: no},
		known: newNativeMap([]nativeTopic{{name: "a", stream: "a", alone: true}, {stream: "dlq"}}, []nativeGroup{{topic: "a", group: "g", stream: "a", consumer: "g"}}, nil),
	}
	p, fits := w.write("_INBOX_x", maxSegments)
	if !fits || len(p.Publish) != 0 || !slices.Equal(p.Subscribe, []string{"_INBOX_x.>"}) || len(p.Narrowed) != 0 {
		t.Errorf("%+v, %v", p, fits)
	}
}

// TestNobodyPullsFromOrderedGroups has a client with every right neither pull from the consumer of
// an ordered group nor settle its events, and not reach what hubs say to each other.
func TestNobodyPullsFromOrderedGroups(t *testing.T) {
	t.Parallel()
	yes := func(string) bool { return true }
	join := func(string, string) bool { return true }
	w := &permissionWriter{
		access: &access{core: &core{conn: &conn.Pool{API: "$JS.API."}, rules: topics.WithBuiltin(nil)}}, watch: true,
		rights: &NativeRights{
			Publish: yes, Read: yes, Join: join, Inspect: join, MayJoin: yes, Topics: []string{"a"}, Groups: []string{"g", "o"},
			PublishReach: []NativeReach{{Pattern: "**", Rule: 1, Whole: true}}, ReadReach: []NativeReach{{Pattern: "**", Rule: 1, Whole: true}},
		},
		known: newNativeMap(
			[]nativeTopic{{name: "a", stream: "a", alone: true}, {stream: "dlq"}},
			[]nativeGroup{{topic: "a", group: "g", stream: "a", consumer: "g"}, {topic: "a", group: "o", stream: "a", consumer: "o", ordered: true}}, nil,
		),
	}
	p, fits := w.write("_INBOX_x", maxSegments)
	allows := func(subject string) bool {
		return slices.ContainsFunc(slices.Concat(p.Publish, p.Subscribe), func(s string) bool { return overlap(s, subject) })
	}
	if !fits || !allows("$JS.API.CONSUMER.MSG.NEXT.a.g") || !allows("$JS.ACK.a.g.1.2.3.4.5") || !allows("$JS.API.CONSUMER.INFO.a.o") {
		t.Errorf("%+v, %v", p, fits)
	}
	for _, subject := range []string{"$JS.API.CONSUMER.MSG.NEXT.a.o", "$JS.ACK.a.o.1.2.3.4.5", "$JS.ACK.hub.acc.a.o.1.2.3.4.5.x", hubInbox + ">", privateInbox()} {
		if allows(subject) {
			t.Errorf("%s is allowed", subject)
		}
	}
	if len(p.Narrowed) == 0 || !strings.Contains(strings.Join(p.Narrowed, "\n"), "group o of a is ordered by key") {
		t.Errorf("narrowed: %q", p.Narrowed)
	}
}
