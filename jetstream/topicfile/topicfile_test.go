package topicfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/topics"
)

func TestEverythingThatCanBeSaid(t *testing.T) {
	rules, err := Parse("topics.yaml", []byte(`
topics:
  - topic: process.state
    retention: &bounds {age: 7d, bytes: 10GiB, messages: 1_000_000}
    compaction: true
    snapshot: {topic: process.state.snapshot, every: 1m30s}
    replicas: 3
    storage: memory
    duplicate_window: 2m
    max_payload: 256KiB
  - {topic: process.state.snapshot, compaction: true}
  - pattern: user.*.events
    family: users
    retention: *bounds
  - {topic: kv.set, compaction: true, snapshot: {topic: kv.snapshot}}
  - {topic: kv.snapshot, compaction: true}
  - topic: sensor.read
    retention: {age: 2h}
    snapshot: {topic: sensor.snapshot, key_source: /sensor/id~1, batch_keys: [a, "7", "b:c"], every: 1h}
  - {topic: sensor.snapshot, compaction: true}
  - {topic: orders, schema: {mode: warn, mirrors: [1, 3]}}
  - {pattern: "**", retention: {age: 1.5d6h, bytes: 0, messages: 12}, compaction: false, max_payload: 1024}
`))
	if err != nil {
		t.Fatal(err)
	}
	const day = 24 * time.Hour
	want := []topics.Rule{
		{
			Pattern: "process.state", MaxAge: 7 * day, MaxBytes: 10 << 30, MaxMsgs: 1_000_000, Compaction: true,
			Snapshot: &topics.SnapshotRule{Topic: "process.state.snapshot", Every: 90 * time.Second}, Replicas: 3,
			Storage: topics.StorageMemory, DuplicateWindow: 2 * time.Minute, MaxPayload: 256 << 10,
		},
		{Pattern: "process.state.snapshot", Compaction: true},
		{Pattern: "user.*.events", Family: "users", MaxAge: 7 * day, MaxBytes: 10 << 30, MaxMsgs: 1_000_000},
		{Pattern: "kv.set", Compaction: true, Snapshot: &topics.SnapshotRule{Topic: "kv.snapshot", Every: 30 * time.Second}},
		{Pattern: "kv.snapshot", Compaction: true},
		{Pattern: "sensor.read", MaxAge: 2 * time.Hour, Snapshot: &topics.SnapshotRule{
			Topic: "sensor.snapshot", Every: time.Hour, KeySource: "/sensor/id~1", BatchKeys: []string{"a", "7", "b:c"},
		}},
		{Pattern: "sensor.snapshot", Compaction: true},
		{Pattern: "orders", Schema: topics.SchemaRule{Mode: topics.SchemaWarn, Mirrors: []int{1, 3}}},
		{Pattern: "**", MaxAge: 42 * time.Hour, MaxMsgs: 12, MaxPayload: 1024},
	}
	if !reflect.DeepEqual(rules, want) {
		t.Errorf("got  %+v\nwant %+v", rules, want)
	}
	if rules, err := Parse("f", []byte("topics: []\n")); err != nil || len(rules) != 0 {
		t.Errorf("a list of no rules: %v, %v", rules, err)
	}
}

// TestFaults has files with a fault, or some: each wanted one is a place and a part of its message.
func TestFaults(t *testing.T) {
	rule := func(lines string) string {
		return "topics:\n  - topic: a.b\n    " + strings.ReplaceAll(lines, "\n", "\n    ") + "\n"
	}
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"empty":              {"", []string{"1:1: file is empty"}},
		"comment only":       {"# nothing\n", []string{"1:1: file is empty"}},
		"null":               {"~\n", []string{"1:1: file is empty"}},
		"no value":           {"topics:\n", []string{"topics has no value"}},
		"nothing in it":      {"{}\n", []string{"1:1: topics is missing"}},
		"list":               {"- topic: a\n", []string{"1:1: file is a list; write topics: and a list of rules"}},
		"scalar":             {"topics: all\n", []string{"1:9: topics is \"all\"; write a list of rules"}},
		"other field":        {"topic:\n  - topic: a\n", []string{`1:1: file has no field "topic"; did you mean topics?`}},
		"two documents":      {"topics: []\n---\ntopics: []\n", []string{"2:1: file has a second document"}},
		"not yaml":           {"topics:\n  - topic: a\n   family: b\n", []string{"3:1: invalid YAML"}},
		"no quotes":          {"topics:\n  - pattern: **\n", []string{"2:1: invalid YAML, here or just before: did not find expected alphabetic or numeric character; a value that begins with * needs quotes, as in pattern: \"**\""}},
		"open quote":         {"topics:\n  - topic: a\n  - topic: \"b\n", []string{"3:1: invalid YAML"}},
		"second not yaml":    {"topics: []\n---\na: }\n", []string{"3:1: invalid YAML"}},
		"control characters": {"topics: \x01\n", []string{"1:1: invalid YAML: control characters"}},
		"tabs":               {"topics:\n\t- topic: a\n  \t  family: b\n", []string{"2:1: tab in the indentation", "3:3: tab in the indentation"}},
		"unknown anchor":     {"topics:\n  - *rule\n", []string{"2:5: alias *rule is undefined; no earlier value has the anchor &rule"}},
		"alias of itself":    {"topics: &all [*all]\n", []string{"1:9: rule is a list"}},
		"merge":              {"topics:\n  - &a {topic: a}\n  - {<<: *a, topic: b}\n", []string{"3:6: << is not supported"}},

		"rule is a name":       {"topics:\n  - a.b\n", []string{`2:5: rule is "a.b"; write topic: or pattern:`}},
		"neither":              {"topics:\n  - family: a\n", []string{"2:5: rule has neither topic nor pattern"}},
		"both":                 {rule("pattern: a.*"), []string{"3:14: rule has both topic and pattern"}},
		"pattern as topic":     {"topics:\n  - topic: a.*\n", []string{"2:12: topic must not contain *; for a pattern, write pattern: a.*"}},
		"no pattern":           {"topics:\n  - pattern: a.*.b*\n", []string{"2:14: segment 3: letters"}},
		"no topic":             {"topics:\n  - topic: a..b\n", []string{"2:12: topic has an empty segment at byte 2"}},
		"stars in the middle":  {"topics:\n  - pattern: a.**.b\n", []string{"2:14: ** is only allowed at the end"}},
		"long topic":           {"topics:\n  - topic: " + strings.Repeat("a", 252) + "\n", []string{"2:12: topic has 252 bytes"}},
		"number as topic":      {"topics:\n  - topic: 12\n", []string{"2:12: expected a name, not the number 12; put it in quotes"}},
		"nothing as topic":     {"topics:\n  - topic:\n", []string{"topic has no value"}},
		"unknown field":        {rule("compactoin: true\nstorag: file\nfoo: 1"), []string{"3:5: rule has no field \"compactoin\"; did you mean compaction?", "4:5: rule has no field \"storag\"; did you mean storage?", "5:5: rule has no field \"foo\"; known fields are topic, pattern"}},
		"field elsewhere":      {rule("max_age: 7d\nbytes: 1"), []string{"3:5: rule has no field \"max_age\"; write retention: {age: 7d}", "4:5: rule has no field \"bytes\"; write retention: {bytes: 10GiB}"}},
		"field twice":          {rule("family: x\nfamily: y"), []string{"4:5: family is already set in line 3"}},
		"field is a list":      {rule("? [a]\n: b"), []string{"name of a field is a list"}},
		"retention is a time":  {rule("retention: 7d"), []string{`3:16: retention is "7d"; write bounds such as {age: 7d`}},
		"age without unit":     {rule("retention: {age: 7}"), []string{"3:22: expected a time such as 7d, 36h, 2m or 30s, not the number 7; add a unit"}},
		"age in weeks":         {rule("retention: {age: 1w}"), []string{`3:22: expected a time such as 7d, 36h, 2m or 30s, not "1w"`}},
		"negative age":         {rule("retention: {age: -7d}"), []string{"3:22: age -168h0m0s: 0 (no bound) or at least 100ms"}},
		"endless age":          {rule("retention: {age: 1e9d}"), []string{`3:22: time 1e9d is too long`}},
		"age is no number":     {rule("retention: {age: NaNd}"), []string{`3:22: expected a time such as 7d, 36h, 2m or 30s, not "NaNd"`}},
		"bytes in GB":          {rule("retention: {bytes: 10GB}"), []string{`3:24: expected a size such as 10GiB, 512MiB, 64KiB or a number of bytes, not "10GB"`}},
		"too many bytes":       {rule("retention: {bytes: 9000000000GiB}"), []string{"3:24: size 9000000000GiB is too large"}},
		"negative bytes":       {rule("retention: {bytes: -1}"), []string{"3:24: bytes -1: 0 (no bound) or more"}},
		"messages as text":     {rule("retention: {messages: many}"), []string{`3:27: expected a whole number such as 1000000, not "many"`}},
		"too many messages":    {rule("retention: {messages: 99999999999999999999}"), []string{"3:27: expected a whole number such as 1000000, not the number 99999999999999999999"}},
		"compaction yes":       {rule("compaction: yes"), []string{`3:17: expected true or false, not "yes"`}},
		"compaction is a list": {rule("compaction: [true]"), []string{"3:17: expected true or false, not a list"}},
		"replicas":             {rule("replicas: 0"), []string{"3:15: replicas 0: 1 to 5"}},
		"on_full":              {rule("on_full: wait"), []string{`3:14: on_full "wait": drop or reject`}},
		"on_full, no bound":    {rule("on_full: reject"), []string{"3:14: on_full: reject needs a bound; add retention: {bytes: 10GiB}, or messages"}},
		"group_age":            {rule("group_age: 1d"), []string{"3:16: group_age is for topics that reject: add on_full: reject"}},
		"cloudevents":          {rule("cloudevents: /x"), []string{"3:18: cloudevents is \"/x\"; write a source such as {source: /orders, headers: true}"}},
		"cloudevents, source":  {rule("cloudevents: {source: 'a b'}"), []string{`3:27: source "a b" is not a URI reference`}},
		"cloudevents, empty":   {rule("cloudevents: {source: ''}"), []string{"3:27: name is empty; add one, or remove the field"}},
		"cloudevents, headers": {rule("cloudevents: {headers: true}"), []string{"3:28: headers need a source; add source: /orders"}},
		"group_age 0":          {rule("group_age: 0"), []string{"3:16: group_age 0: at least 1s is allowed; the default is 7d"}},
		"storage":              {rule("storage: disk"), []string{`3:14: storage "disk": file or memory`}},
		"duplicate window":     {rule("duplicate_window: 10ms"), []string{"3:23: duplicate window 10ms: at least 1s"}},
		"no duplicate window":  {rule("duplicate_window: 0s"), []string{"3:23: duplicate_window 0: at least 1s"}},
		"window beyond age":    {rule("retention: {age: 1h}\nduplicate_window: 2h"), []string{"4:23: duplicate window 2h0m0s: at most age 1h0m0s is allowed"}},
		"max payload":          {rule("max_payload: 1GiB"), []string{"3:18: max payload 1073741824: 0 (the limit of the hub) to"}},
		"family name":          {rule("family: Users"), []string{`3:13: family "Users": 1 to 200 characters of a-z`}},
		"family of all":        {"topics:\n  - pattern: \"**\"\n    family: all\n", []string{"3:13: a family of all topics"}},

		"compaction with a family":   {rule("family: x\ncompaction: true"), []string{"4:17: a family cannot be compacted"}},
		"compaction of dead letters": {"topics:\n  - {pattern: dlq.**, compaction: true}\n", []string{"dead letters cannot be compacted"}},
		"compaction, small bounds": {
			rule("compaction: true\nretention: {age: 59m, bytes: 1MiB, messages: 5}"),
			[]string{"4:22: age 59m0s: a compacted topic needs at least 1h", "4:34: bytes 1MiB: a compacted topic needs at least 128MiB", "4:50: messages 5: a compacted topic needs at least 100000"},
		},
		"snapshot is a topic":         {rule("compaction: true\nsnapshot: x"), []string{`4:15: snapshot is "x"; write a topic and an interval`}},
		"snapshot without topic":      {rule("compaction: true\nsnapshot: {every: 30s}"), []string{"4:15: snapshot has no target"}},
		"snapshot too often":          {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, every: 1ms}"), []string{"4:54: every 1ms: at least 1s"}},
		"snapshot without compaction": {rule("snapshot: {topic: process.state.snapshot}"), []string{"3:23: snapshots need keys; add compaction: true, or key_source: /id if the key is in the payload"}},
		"key source is no pointer":    {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, key_source: id}"), []string{`4:59: key_source "id" is not a JSON pointer: must begin with /, as in /id`}},
		"key source, bad escape":      {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, key_source: /a~2}"), []string{`4:59: key_source "/a~2" is not a JSON pointer: ~ must be followed by 0 or 1`}},
		"key source is empty":         {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, key_source: \"\"}"), []string{"4:59: name is empty"}},
		"key source is long":          {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, key_source: /" + strings.Repeat("a", 512) + "}"), []string{"4:59: key_source has 513 bytes; at most 512 are allowed"}},
		"key source, misspelt":        {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, keySource: /id}"), []string{`4:47: snapshot has no field "keySource"; did you mean key_source?`}},
		"key source, small bounds": {
			rule("retention: {age: 59m, bytes: 1MiB, messages: 5}\nsnapshot: {topic: process.state.snapshot, key_source: /id}"),
			[]string{"3:22: age 59m0s: a topic with snapshots needs at least 1h0m0s", "3:34: bytes 1MiB: a topic with snapshots needs at least 128MiB", "3:50: messages 5: a topic with snapshots needs at least 100000"},
		},
		"key source, seldom":     {rule("retention: {age: 2h}\nsnapshot: {topic: process.state.snapshot, every: 61m, key_source: /id}"), []string{"4:54: every 1h1m0s: at most half of age 2h0m0s is allowed"}},
		"mirrors is a number":    {rule("schema: {mode: enforce, mirrors: 1}"), []string{"3:38: mirrors is the number 1; write a list of versions such as [1, 3]"}},
		"mirrors is empty":       {rule("schema: {mode: enforce, mirrors: []}"), []string{"3:38: mirrors is empty; add versions, or remove the field"}},
		"mirrors has a name":     {rule("schema: {mode: enforce, mirrors: [v1]}"), []string{`3:38: mirrors: expected a whole number such as 1000000, not "v1"`}},
		"mirror 0":               {rule("schema: {mode: enforce, mirrors: [1, 0]}"), []string{"3:38: mirrors: version 0: 1 to 500 are allowed"}},
		"mirrors, many":          {rule("schema: {mode: enforce, mirrors: [1, 2, 3, 4, 5]}"), []string{"3:38: mirrors has 5 versions; at most 4 are allowed"}},
		"mirrors, twice":         {rule("schema: {mode: enforce, mirrors: [2, 2]}"), []string{"3:38: mirrors has version 2 twice; remove one of them"}},
		"mirrors without a mode": {rule("schema: {mirrors: [1]}"), []string{"3:23: mirrors need schemas; add mode: enforce, or mode: warn"}},
		"mirrors of a pattern":   {"topics:\n  - pattern: a.*\n    schema: {mode: warn, mirrors: [1]}\n", []string{"3:35: mirrors need a single topic, and this is a pattern, which could match its own mirrors; add a rule for that topic"}},
		"batch keys is a name":   {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, batch_keys: a}"), []string{`4:59: batch_keys is "a"; write a list of keys such as [a, b]`}},
		"batch keys, a number":   {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, batch_keys: [a, 7]}"), []string{"4:63: expected a name, not the number 7; put it in quotes"}},
		"batch keys, none":       {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, batch_keys: []}"), []string{"4:59: batch_keys is empty; add keys, or remove the field"}},
		"batch keys, twice":      {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, batch_keys: [a, b, a]}"), []string{`4:59: batch_keys has "a" twice; remove one of them`}},
		"batch keys, a long one": {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, batch_keys: [" + strings.Repeat("k", 513) + "]}"), []string{"4:59: batch_keys: key 1 has 513 bytes; 1 to 512 are allowed"}},
		"batch keys, too many":   {rule("compaction: true\nsnapshot: {topic: process.state.snapshot, batch_keys: [" + strings.Repeat("k,", 1001) + "]}"), []string{"4:59: batch_keys has 1001 keys; at most 1000 are allowed"}},
		"batch keys at the rule": {rule("batch_keys: [a]"), []string{`3:5: rule has no field "batch_keys"; write snapshot: {topic: process.state.snapshot, batch_keys: [a, b]}`}},
		"key source at the rule": {rule("key_source: /id"), []string{`3:5: rule has no field "key_source"; write snapshot: {topic: process.state.snapshot, key_source: /id}`}},
		"snapshot of a pattern":  {"topics:\n  - pattern: a.*\n    compaction: true\n    snapshot: {topic: process.state.snapshot}\n", []string{"4:23: snapshots need a single topic"}},
		"snapshot to itself":     {rule("compaction: true\nsnapshot: {topic: a.b}"), []string{"4:23: snapshots cannot go to their source topic; use another topic, such as a.b.snapshot"}},
		"snapshot to no topic":   {rule("compaction: true\nsnapshot: {topic: a.*}"), []string{`4:23: snapshot topic "a.*" is not a topic`}},
		"snapshot not compacted": {rule("compaction: true\nsnapshot: {topic: x}"), []string{"4:23: topic x is not compacted"}},
		"snapshot of a snapshot": {rule("compaction: true\nsnapshot: {topic: process.state}"), []string{"4:23: topic process.state has snapshots of its own"}},
		"snapshot topic twice": {
			rule("compaction: true\nsnapshot: {topic: s}") + "  - {topic: c, compaction: true, snapshot: {topic: s}}\n  - {topic: s, compaction: true}\n",
			[]string{`5:52: snapshots of "a.b" already go to s; use another topic (the other rule is in line 2)`},
		},

		"same topic twice":     {"topics:\n  - topic: a\n  - topic: a\n", []string{`3:12: rule is never used, because the earlier rule "a" matches all its topics; move this rule up, or remove it (the other rule is in line 2)`}},
		"shadowed":             {"topics:\n  - pattern: \"**\"\n  - topic: a\n  - {pattern: b.*, family: b}\n", []string{"3:12: rule is never used", "4:15: rule is never used"}},
		"shadowed by pattern":  {"topics:\n  - pattern: a.**\n  - pattern: a.*.c\n  - topic: a\n", []string{"3:14: rule is never used", "4:12: rule is never used"}},
		"families overlap":     {"topics:\n  - {pattern: a.*.c, family: x}\n  - {pattern: a.b.*, family: y}\n", []string{`3:15: stream of the family would overlap with the topics of the earlier rule "a.*.c"`}},
		"family behind a rule": {"topics:\n  - topic: a.vip\n  - {pattern: a.*, family: x}\n", []string{`3:15: stream of the family would overlap with the topics of the earlier rule "a.vip"`}},
		"family of two":        {"topics:\n  - {pattern: a.*, family: x}\n  - {pattern: b.*, family: x}\n", []string{`3:28: family x already has the pattern "a.*"`}},
		"family is a topic":    {"topics:\n  - topic: users\n  - {pattern: user.*, family: users}\n", []string{"3:31: family users and topic users would have streams of the same name"}},
		"topic is a family":    {"topics:\n  - {pattern: user.*, family: users}\n  - topic: users\n", []string{"3:12: family users and topic users would have streams of the same name"}},
		"dead letters":         {"topics:\n  - pattern: dlq.orders\n", []string{"2:14: pattern matches some topics of dlq.**, which a built-in rule stores in one stream (family dlq)"}},
		"all in one go": {
			"topics:\n  - topic: a..b\n  - {topic: c, retention: {age: 1x}, replicas: 9, fam: x}\n  - topic: d\n  - topic: d\n",
			[]string{"2:12: topic has an empty segment", "3:33: expected a time such as 7d, 36h, 2m or 30s, not \"1x\"", "3:48: replicas 9", "3:51: rule has no field \"fam\"", "5:12: rule is never used"},
		},
		"what follows from another fault is not said": {
			rule("compaction: perhaps\nsnapshot: {topic: process.state.snapshot}"), []string{"3:17: expected true or false, not \"perhaps\""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			rules, err := Parse("topics.yaml", []byte(c.text))
			faults, ok := errors.AsType[Errors](err)
			if !ok || rules != nil {
				t.Fatalf("got %v, %v", rules, err)
			}
			if len(faults) != len(c.want) {
				t.Errorf("%d faults, want %d", len(faults), len(c.want))
			}
			for i, f := range faults {
				if got := f.Error(); i < len(c.want) && (!strings.HasPrefix(got, "topics.yaml:") || !strings.Contains(got, c.want[i])) {
					t.Errorf("got  %s\nwant %s", got, c.want[i])
				}
			}
			if t.Failed() {
				t.Logf("all of it:\n%v", err)
			}
		})
	}
}

// TestOrdersThatAreGood are rules that look alike and do not contradict each other.
func TestOrdersThatAreGood(t *testing.T) {
	for _, text := range []string{
		"topics:\n  - {pattern: a.*, family: x}\n  - topic: a.b.c\n  - pattern: a.*.c\n",
		"topics:\n  - {pattern: a.*, family: x}\n  - {pattern: dlq.**, family: dlq}\n  - pattern: \"*.b\"\n  - pattern: \"**\"\n",
		"topics:\n  - topic: a.b\n  - pattern: a.*\n  - pattern: a.**\n",
		"topics:\n  - {pattern: dlq.**, family: letters}\n  - topic: b\n",
		"topics:\n  - {pattern: dlq.**}\n  - {pattern: \"*.x\"}\n",
		"topics:\n  - {topic: users, family: users}\n  - {pattern: user.*, family: others}\n",
		"topics:\n  - {topic: heartbeat.received}\n  - {pattern: \"**\", compaction: true}\n",
	} {
		if _, err := Parse("f", []byte(text)); err != nil {
			t.Errorf("%s%v", text, err)
		}
	}
}

func TestBounds(t *testing.T) {
	for name, text := range map[string]string{
		"bytes":   strings.Repeat("#", maxBytes+1),
		"rules":   "topics: [" + strings.Repeat("{topic: a},", maxRules+1) + "]",
		"aliases": "x: &x {" + strings.Repeat("k: 1, ", 40_000) + "}\ntopics: [" + strings.Repeat("*x,", 1_000) + "]",
		"faults":  "topics: [" + strings.Repeat("1,", maxRules) + "]",
		"depth":   "topics: " + strings.Repeat("[", 9_000) + strings.Repeat("]", 9_000),
	} {
		_, err := Parse("f", []byte(text))
		faults, ok := errors.AsType[Errors](err)
		if !ok || len(faults) == 0 || len(faults) > maxFaults {
			t.Errorf("%s: %d faults", name, len(faults))
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topics.yaml")
	if _, err := Load(path); !errors.Is(err, os.ErrNotExist) || err.Error() != "topics file "+path+": no such file or directory" {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(path, []byte("topics:\n  - topic: a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if rules, err := Load(path); err != nil || len(rules) != 1 || rules[0].Pattern != "a" {
		t.Errorf("got %v, %v", rules, err)
	}
	if err := os.WriteFile(path, make([]byte, maxBytes+10), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), path+":1:1: file exceeds 1048576 bytes") {
		t.Errorf("got %v", err)
	}
	if _, err := Load(filepath.Dir(path)); err == nil {
		t.Error("a directory is a file")
	}
}

// FuzzParse: whatever the bytes, there are rules that the bus takes, or faults within the file.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"", "topics: &a [*a]", "- {<<: *a}", "topics:\n\t- x", "topics: []\n--- \n", "topics: [{topic: a, retention: {age: 1d2h, bytes: 1GiB}}]", "\xff\xfe", "? [a]\n: !!x b",
		"topics: [{topic: s, compaction: true, snapshot: {topic: t, every: 1m}}, {topic: t, compaction: true}]",
		"topics: [{topic: s, snapshot: {topic: t, key_source: /a/0, batch_keys: [a, b]}}, {topic: t, compaction: true}]",
		"topics: [{pattern: u.*, family: u, max_payload: 1KiB, replicas: 3, storage: file, duplicate_window: 1s}]",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		rules, err := Parse("f", data)
		if err == nil {
			if faults := topics.Validate(rules); len(faults) > 0 {
				t.Fatalf("the bus does not take %+v: %v", rules, faults[0])
			}
			return
		}
		faults, ok := errors.AsType[Errors](err)
		if !ok || len(faults) == 0 || len(faults) > maxFaults || rules != nil {
			t.Fatalf("%v, %v", rules, err)
		}
		lines := strings.Count(string(data), "\n") + 2
		for _, e := range faults {
			if e.Line < 1 || e.Column < 1 || e.Line > lines && !strings.ContainsAny(string(data), "\r\u0085\u2028\u2029") || e.Msg == "" {
				t.Fatalf("%v in %d lines", e, lines)
			}
		}
	})
}

func ExampleParse() {
	_, err := Parse("topics.yaml", []byte("topics:\n  - topic: orders\n    retension: {age: 7d}\n    replicas: many\n"))
	fmt.Println(err)
	// Output:
	// topics.yaml:3:5: rule has no field "retension"; did you mean retention?
	// topics.yaml:4:15: expected a whole number such as 1000000, not "many"
}
