package topics

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/native"
)

func TestRulesThatAreRefused(t *testing.T) {
	t.Parallel()
	snapshot := func(topic string) *SnapshotRule { return &SnapshotRule{Topic: topic} }
	for want, rules := range map[string][]Rule{
		"at least 100ms":                       {{Pattern: "a", MaxAge: time.Millisecond}},
		"duplicate window 10ms":                {{Pattern: "a", DuplicateWindow: 10 * time.Millisecond}},
		"at most age 1m0s":                     {{Pattern: "a", MaxAge: time.Minute, DuplicateWindow: time.Hour}},
		"replicas 6":                           {{Pattern: "a", Replicas: 6}},
		`storage "tape"`:                       {{Pattern: "a", Storage: "tape"}},
		"max payload -1":                       {{Pattern: "a", MaxPayload: -1}},
		"a family cannot be compacted":         {{Pattern: "a", Family: "f", Compaction: true}},
		"age 59m0s: a compacted":               {{Pattern: "a", Compaction: true, MaxAge: 59 * time.Minute}},
		"messages 99999: a compacted":          {{Pattern: "a", Compaction: true, MaxMsgs: 99_999}},
		"bytes 127MiB: a compacted":            {{Pattern: "a", Compaction: true, MaxBytes: 127 << 20}},
		"snapshots need keys":                  {{Pattern: "a", Snapshot: snapshot("process.state.snapshot")}},
		`on_full "wait"`:                       {{Pattern: "a", OnFull: "wait"}},
		"on_full: reject needs a bound":        {{Pattern: "a", MaxAge: time.Hour, OnFull: OnFullReject}},
		"a family cannot reject":               {{Pattern: "a.*", Family: "f", MaxMsgs: 10, OnFull: OnFullReject}},
		"dead letters already wait":            {{Pattern: "dlq.**", MaxMsgs: 10, OnFull: OnFullReject}},
		"group age 1ms":                        {{Pattern: "a", MaxMsgs: 10, OnFull: OnFullReject, GroupAge: time.Millisecond}},
		"group_age is for topics that reject":  {{Pattern: "a", MaxMsgs: 10, GroupAge: time.Hour}},
		"is not a JSON pointer":                {{Pattern: "a", Snapshot: &SnapshotRule{Topic: "process.state.snapshot", KeySource: "id"}}},
		"age 59m0s: a topic with snap":         {{Pattern: "a", MaxAge: 59 * time.Minute, Snapshot: &SnapshotRule{Topic: "process.state.snapshot", KeySource: "/id"}}},
		"at most half of age":                  {{Pattern: "a", MaxAge: time.Hour, Snapshot: &SnapshotRule{Topic: "process.state.snapshot", KeySource: "/id", Every: time.Hour}}},
		"is not valid UTF-8":                   {{Pattern: "a", Compaction: true, Snapshot: &SnapshotRule{Topic: "process.state.snapshot", BatchKeys: []string{"\xff"}}}},
		"and this is a pattern":                {{Pattern: "a.*", Compaction: true, Snapshot: snapshot("process.state.snapshot")}},
		"cannot go to their source":            {{Pattern: "a", Compaction: true, Snapshot: snapshot("a")}},
		"b is not compacted":                   {{Pattern: "a", Compaction: true, Snapshot: snapshot("b")}},
		"every 1ms":                            {{Pattern: "a", Compaction: true, Snapshot: &SnapshotRule{Topic: "process.state.snapshot", Every: time.Millisecond}}},
		"already go to process.state.snapshot": {{Pattern: "a", Compaction: true, Snapshot: snapshot("process.state.snapshot")}, {Pattern: "b", Compaction: true, Snapshot: snapshot("process.state.snapshot")}},
		"mirrors need schemas":                 {{Pattern: "a", Schema: SchemaRule{Mirrors: []int{1}}}},
		"mirrors has 5 versions":               {{Pattern: "a", Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{1, 2, 3, 4, 5}}}},
		"mirrors: version 501":                 {{Pattern: "a", Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{MaxSchemaVersions + 1}}}},
		"mirrors has version 2 twice":          {{Pattern: "a", Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{2, 2}}}},
		"mirrors need a single topic":          {{Pattern: "a.*", Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{1}}}},
		"mirror " + strings.Repeat("a", native.MaxTopic-2) + ".v1 is not a topic": {{Pattern: strings.Repeat("a", native.MaxTopic-2), Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{1}}}},
		"never used":         {{Pattern: "a.**"}, {Pattern: "a"}},
		"would overlap with": {{Pattern: "a.b"}, {Pattern: "a.*", Family: "f"}},
		"family dlq":         {{Pattern: "*.x"}},
	} {
		faults := Validate(rules)
		if len(faults) != 1 || !strings.Contains(faults[0].Error(), want) || faults[0].Rule != len(rules)-1 {
			t.Errorf("%s: got %v", want, faults)
		}
	}
	letters := Validate([]Rule{{Pattern: "dlq.a", Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{1}}}})
	if len(letters) == 0 || !strings.Contains(letters[0].Error(), "so they have no mirrors") {
		t.Errorf("mirrors of dead letters: %v", letters)
	}
	if faults := Validate(builtinRules); len(faults) > 0 {
		t.Errorf("the built-in rules: %v", faults)
	}
}

// TestDefaultRuleComesAfterBuiltIn: who says what holds for all other topics does not mean dead
// letters.
func TestDefaultRuleComesAfterBuiltIn(t *testing.T) {
	t.Parallel()
	configured := []Rule{{Pattern: "a.b"}, {Pattern: "**", MaxMsgs: 7}}
	rules := WithBuiltin(configured)
	for topic, want := range map[string]Rule{
		"a.b": {Pattern: "a.b"}, "other": {Pattern: "**", MaxMsgs: 7},
		"dlq.a.b": builtinRules[0], "heartbeat.received": builtinRules[1], "process.state": builtinRules[2],
	} {
		if got := rules.Of(topic); !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: got %+v, want %+v", topic, *got, want)
		}
	}
	if got := rules.Snapshots(); len(got) != 1 || got[0].Pattern != "process.state" || got[0].Snapshot.Every != 30*time.Second {
		t.Errorf("snapshots: %+v", got)
	}
	mirrored := Rule{Pattern: "a.c", Schema: SchemaRule{Mode: SchemaWarn, Mirrors: []int{1}}}
	if got := (Rules{mirrored, mirrored, {Pattern: "**"}}).Mirrors(); !reflect.DeepEqual(got, []Rule{mirrored}) {
		t.Errorf("rules with mirrors: %+v", got)
	}
	configured[0] = Rule{Pattern: "process.**", MaxMsgs: 3}
	rules = WithBuiltin(configured)
	if got := rules.Snapshots(); len(got) != 0 {
		t.Errorf("snapshots that no topic goes by: %+v", got)
	}
	if got := rules.Of("process.state"); got.MaxMsgs != 3 {
		t.Errorf("a configured rule comes first: got %+v", got)
	}
}

func TestPatternsMeet(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b             string
		meet, aAll, bAll bool
	}{
		{"a", "a", true, true, true},
		{"a", "b", false, false, false},
		{"a.*", "a.b", true, true, false},
		{"a.*", "*.b", true, false, false},
		{"a.*", "a", false, false, false},
		{"a.**", "a", true, true, false},
		{"a.**", "a.*.c", true, true, false},
		{"a.**", "a.**", true, true, true},
		{"*.**", "a", true, true, false},
		{"a.*", "a.**", true, false, true},
		{"**", "a.b", true, true, false},
		{"a.*.c", "a.b", false, false, false},
		{"a.b.**", "a.*", true, false, false},
	} {
		a, b := Rule{Pattern: c.a}, Rule{Pattern: c.b}
		if got := a.meets(&b); got != c.meet || b.meets(&a) != c.meet {
			t.Errorf("%s and %s meet: %v", c.a, c.b, got)
		}
		if got := a.takesAllOf(&b); got != c.aAll {
			t.Errorf("%s takes all of %s: %v", c.a, c.b, got)
		}
		if got := b.takesAllOf(&a); got != c.bAll {
			t.Errorf("%s takes all of %s: %v", c.b, c.a, got)
		}
	}
}

func TestTexts(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "none", 30 * time.Second: "30s", 2 * time.Minute: "2m", time.Hour: "1h", 90 * time.Minute: "1h30m", 36 * time.Hour: "1d12h",
		7 * 24 * time.Hour: "7d", 24*time.Hour + time.Second: "1d1s", 100 * time.Millisecond: "100ms", 10 * time.Minute: "10m", 20 * time.Hour: "20h",
	} {
		if got := AgeText(d); got != want {
			t.Errorf("%v: got %s, want %s", d, got, want)
		}
	}
	for n, want := range map[int64]string{0: "none", -1: "none", 1: "1", 1024: "1KiB", 10 << 30: "10GiB", 1<<20 + 1: "1048577", 1536 << 20: "1536MiB"} {
		if got := SizeText(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}

func TestRuleMatches(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, topic string
		want           bool
	}{
		{"**", "a", true},
		{"**", "a.b.c", true},
		{"a", "a", true},
		{"a", "a.b", false},
		{"a.b", "a", false},
		{"a.*", "a", false},
		{"a.*", "a.b", true},
		{"a.*", "a.b.c", false},
		{"*.b", "a.b", true},
		{"a.**", "a", true},
		{"a.**", "a.b.c", true},
		{"a.**", "ab", false},
		{"user.*.events", "user.7.events", true},
		{"user.*.events", "user.7.other", false},
		{"dlq.**", "dlq", true},
	} {
		r := Rule{Pattern: c.pattern}
		if got := r.matches(c.topic); got != c.want {
			t.Errorf("%s on %s: got %v", c.pattern, c.topic, got)
		}
	}
}

func TestRuleCheck(t *testing.T) {
	t.Parallel()
	for _, bad := range []Rule{{Pattern: ""}, {Pattern: "a.**.b"}, {Pattern: "a..b"}, {Pattern: "a.b*"}, {Pattern: "a", Family: "Not Lower"}, {Pattern: "**", Family: "all"}, {Pattern: "a", MaxAge: -1}} {
		if len(bad.validate()) == 0 {
			t.Errorf("%+v is accepted", bad)
		}
	}
	good := Rule{Pattern: "user.*.events", Family: "users", MaxAge: time.Hour}
	if faults := good.validate(); len(faults) > 0 {
		t.Error(faults)
	}
}
