package topics

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"eventhub/jetstream/event"
	"eventhub/jetstream/jsonpointer"
	"eventhub/jetstream/native"
)

// Bounds of the fields of a rule. Those of a compacted topic leave the server time to fill the
// bucket from the stream.
const (
	minRuleAge         = 100 * time.Millisecond // the server's own
	minDuplicateWindow = time.Second
	minGroupAge        = time.Second
	minSnapshotEvery   = time.Second
	maxKeySource       = 512
	maxBatchKeys       = 1_000
	maxRulePayload     = 64<<20 - event.PayloadMargin // no server takes more

	minCompactedAge   = time.Hour
	minCompactedMsgs  = 100_000
	minCompactedBytes = 128 << 20
)

// The fields of a rule, as a topics file names them.
const (
	fieldPattern             = "pattern"
	fieldFamily              = "family"
	fieldAge                 = "retention.age"
	fieldBytes               = "retention.bytes"
	fieldMessages            = "retention.messages"
	fieldOnFull              = "on_full"
	fieldGroupAge            = "group_age"
	fieldDuplicateWindow     = "duplicate_window"
	fieldReplicas            = "replicas"
	fieldStorage             = "storage"
	fieldMaxPayload          = "max_payload"
	fieldCompaction          = "compaction"
	fieldMaxKeys             = "max_keys"
	fieldCloudSource         = "cloudevents.source"
	fieldCloudHeaders        = "cloudevents.headers"
	fieldSnapshotTopic       = "snapshot.topic"
	fieldSchemaMode          = "schema.mode"
	fieldSchemaOf            = "schema.of"
	fieldSchemaCompatibility = "schema.compatibility"
	fieldSchemaUnversioned   = "schema.unversioned"
	fieldSchemaMirrors       = "schema.mirrors"
	fieldSnapshotEvery       = "snapshot.every"
	fieldSnapshotSource      = "snapshot.key_source"
	fieldSnapshotKeys        = "snapshot.batch_keys"
)

// RuleError is a fault of one of several rules, with a remedy.
type RuleError struct {
	// Rule is the index of the rule, and Pattern its pattern.
	Rule    int
	Pattern string
	// Fields are the faulty fields, named as in a topics file, the most relevant first.
	Fields []string
	// Other is the index of an earlier rule that is involved, or -1.
	Other int
	// Msg says what is wrong.
	Msg string
}

// Error names the rule by its pattern.
func (e *RuleError) Error() string { return fmt.Sprintf("topic rule %q: %s", e.Pattern, e.Msg) }

// Validate returns all faults in and between rules, which precede the built-in rules.
// jetstream.Config.Topics must have none.
func Validate(rules []Rule) []*RuleError {
	var faults []*RuleError
	sound := make([]bool, len(rules)) // the pattern is one
	for i := range rules {
		own := rules[i].validate()
		for _, f := range own {
			f.Rule = i
		}
		sound[i] = !slices.ContainsFunc(own, func(f *RuleError) bool { return f.Fields[0] == fieldPattern })
		faults = append(faults, own...)
	}
	add := func(i, other int, fields []string, format string, args ...any) {
		faults = append(faults, &RuleError{Rule: i, Pattern: rules[i].Pattern, Fields: fields, Other: other, Msg: fmt.Sprintf(format, args...)})
	}
	snapshots := make(map[string]int)
	for i := range rules {
		r := &rules[i]
		if r.Snapshot != nil && native.CheckTopic(r.Snapshot.Topic) == nil {
			if other, twice := snapshots[r.Snapshot.Topic]; twice {
				add(i, other, []string{fieldSnapshotTopic}, "snapshots of %q already go to %s; use another topic", rules[other].Pattern, r.Snapshot.Topic)
			} else {
				snapshots[r.Snapshot.Topic] = i
				checkSnapshotTopic(rules, i, add)
			}
		}
		if sound[i] {
			checkOrder(rules, i, sound, add)
		}
	}
	slices.SortStableFunc(faults, func(a, b *RuleError) int { return cmp.Compare(a.Rule, b.Rule) })
	return faults
}

// checkSnapshotTopic checks the rule of the topic to which the snapshots of rule i go.
func checkSnapshotTopic(rules []Rule, i int, add func(int, int, []string, string, ...any)) {
	topic := rules[i].Snapshot.Topic
	if topic == rules[i].Pattern {
		return // validate reports this
	}
	fields := []string{fieldSnapshotTopic, fieldCompaction}
	for _, r := range WithBuiltin(rules) {
		if !r.matches(topic) {
			continue
		}
		other := slices.IndexFunc(rules, func(own Rule) bool { return own.Pattern == r.Pattern })
		switch {
		case !r.Compaction:
			add(i, other, fields, "topic %s is not compacted, so it would lose the snapshots of keys that do not change; add a rule for it with compaction: true", topic)
		case r.Snapshot != nil:
			add(i, other, fields, "topic %s has snapshots of its own; use another topic, or remove those snapshots", topic)
		}
		return
	}
}

// checkOrder compares rule i with the rules before it, and with the built-in families.
func checkOrder(rules []Rule, i int, sound []bool, add func(int, int, []string, string, ...any)) {
	r := &rules[i]
	for j := range i {
		before := &rules[j]
		if !sound[j] {
			continue
		}
		if before.takesAllOf(r) {
			add(i, j, []string{fieldPattern}, "rule is never used, because the earlier rule %q matches all its topics; move this rule up, or remove it", before.Pattern)
			return // one reason is enough
		}
	}
	for j := range i {
		before := &rules[j]
		if !sound[j] {
			continue
		}
		switch {
		case r.Family != "" && r.Family == before.Family:
			add(i, j, []string{fieldFamily}, "family %s already has the pattern %q; a family has only one pattern, so choose another name", r.Family, before.Pattern)
		case r.Family != "" && r.meets(before):
			add(i, j, []string{fieldPattern}, "stream of the family would overlap with the topics of the earlier rule %q; move this rule up, or choose patterns without a common topic", before.Pattern)
		case r.meets(before): // what a family takes never comes to r
		case r.Family != "" && before.Family == "" && native.ObjectName(before.Pattern) == r.Family:
			add(i, j, []string{fieldFamily}, "family %s and topic %s would have streams of the same name; rename one of them", r.Family, before.Pattern)
		case before.Family != "" && r.Family == "" && native.ObjectName(r.Pattern) == before.Family:
			add(i, j, []string{fieldPattern}, "family %s and topic %s would have streams of the same name; rename one of them", before.Family, r.Pattern)
		}
	}
	if r.Pattern == "**" {
		return // it comes after the built-in ones
	}
	for k := range builtinRules {
		own := &builtinRules[k]
		if own.Family == "" || !r.meets(own) || r.takesAllOf(own) {
			continue
		}
		if slices.ContainsFunc(rules[:i], func(before Rule) bool { return before.takesAllOf(own) }) {
			continue // the built-in family is not used
		}
		add(i, -1, []string{fieldPattern}, "pattern matches some topics of %s, which a built-in rule stores in one stream (family %s); add a rule for %s before this one", own.Pattern, own.Family, own.Pattern)
	}
}

// validate returns all faults of the rule itself.
func (r *Rule) validate() (faults []*RuleError) {
	check := func(ok bool, fields []string, format string, args ...any) {
		if !ok {
			faults = append(faults, &RuleError{Pattern: r.Pattern, Fields: fields, Other: -1, Msg: fmt.Sprintf(format, args...)})
		}
	}
	of := func(fields ...string) []string { return fields }
	if msg := badPattern(r.Pattern); msg != "" {
		check(false, of(fieldPattern), "%s", msg)
	} else {
		check(r.Family == "" || r.Pattern != "**", of(fieldFamily, fieldPattern), "a family of all topics would overlap with every other stream; choose a narrower pattern")
	}
	check(r.Family == "" || native.ObjectName(r.Family) == r.Family, of(fieldFamily), "family %q: 1 to %d characters of a-z, 0-9, _ and - are allowed", r.Family, native.MaxObjectName)
	check(r.MaxAge == 0 || r.MaxAge >= minRuleAge, of(fieldAge), "age %v: 0 (no bound) or at least %v is allowed", r.MaxAge, minRuleAge)
	check(r.MaxBytes >= 0, of(fieldBytes), "bytes %d: 0 (no bound) or more is allowed", r.MaxBytes)
	check(r.MaxMsgs >= 0, of(fieldMessages), "messages %d: 0 (no bound) or more is allowed", r.MaxMsgs)
	check(r.OnFull == "" || r.OnFull == OnFullDrop || r.OnFull == OnFullReject, of(fieldOnFull), "on_full %q: drop or reject is allowed", string(r.OnFull))
	if r.OnFull == OnFullReject {
		check(r.MaxBytes > 0 || r.MaxMsgs > 0, of(fieldOnFull, fieldBytes, fieldMessages), "on_full: reject needs a bound; add retention: {bytes: 10GiB}, or messages")
		check(r.Family == "", of(fieldOnFull, fieldFamily), "a family cannot reject, because a group of one topic would stop the others; remove family or on_full")
		check(r.Pattern == "**" || !meet(r.Pattern, native.DeadLetterPrefix+"**"), of(fieldOnFull, fieldPattern), "dead letters already wait while their stream is full; remove on_full")
	}
	check(r.GroupAge == 0 || r.GroupAge >= minGroupAge, of(fieldGroupAge), "group age %v: at least %v is allowed; the default is 7d", r.GroupAge, minGroupAge)
	check(r.GroupAge == 0 || r.OnFull == OnFullReject, of(fieldGroupAge, fieldOnFull), "group_age is for topics that reject: add on_full: reject, or leave it out")
	check(r.DuplicateWindow == 0 || r.DuplicateWindow >= minDuplicateWindow, of(fieldDuplicateWindow), "duplicate window %v: at least %v is allowed; the default is 2m", r.DuplicateWindow, minDuplicateWindow)
	check(r.DuplicateWindow <= 0 || r.MaxAge <= 0 || r.DuplicateWindow <= r.MaxAge, of(fieldDuplicateWindow, fieldAge), "duplicate window %v: at most age %v is allowed, because an id is forgotten with its event", r.DuplicateWindow, r.MaxAge)
	check(r.Replicas >= 0 && r.Replicas <= 5, of(fieldReplicas), "replicas %d: 1 to 5 are allowed", r.Replicas)
	check(r.Storage == "" || r.Storage == StorageFile || r.Storage == StorageMemory, of(fieldStorage), "storage %q: file or memory is allowed", string(r.Storage))
	check(r.MaxPayload >= 0 && r.MaxPayload <= maxRulePayload, of(fieldMaxPayload), "max payload %d: 0 (the limit of the hub) to %d bytes are allowed", r.MaxPayload, maxRulePayload)
	check(r.MaxKeys >= 0, of(fieldMaxKeys), "max keys %d: 1 or more is allowed; without it, it is %d", r.MaxKeys, DefaultMaxKeys)
	check(r.MaxKeys == 0 || r.Compaction, of(fieldMaxKeys, fieldCompaction), "max_keys is for compacted topics: add compaction: true, or leave it out")
	r.checkCloudEvents(check)
	r.Schema.check(check)
	r.checkMirrors(check)
	if r.Compaction {
		check(r.Family == "", of(fieldCompaction, fieldFamily), "a family cannot be compacted, because a bucket needs a stream with a single topic; remove family or compaction")
		check(r.Pattern == "**" || !meet(r.Pattern, native.DeadLetterPrefix+"**"), of(fieldCompaction, fieldPattern), "dead letters cannot be compacted, because they have no keys; remove compaction")
		check(r.MaxAge <= 0 || r.MaxAge >= minCompactedAge, of(fieldAge, fieldCompaction), "age %v: a compacted topic needs at least %v, so that its bucket receives each event before the stream removes it", r.MaxAge, minCompactedAge)
		check(r.MaxMsgs <= 0 || r.MaxMsgs >= minCompactedMsgs, of(fieldMessages, fieldCompaction), "messages %d: a compacted topic needs at least %d, so that its bucket receives each event before the stream removes it", r.MaxMsgs, minCompactedMsgs)
		check(r.MaxBytes <= 0 || r.MaxBytes >= minCompactedBytes, of(fieldBytes, fieldCompaction), "bytes %s: a compacted topic needs at least %s, so that its bucket receives each event before the stream removes it", SizeText(r.MaxBytes), SizeText(minCompactedBytes))
	}
	if s := r.Snapshot; s != nil {
		check(r.Compaction || s.KeySource != "", of(fieldSnapshotTopic, fieldCompaction, fieldSnapshotSource), "snapshots need keys; add compaction: true, or key_source: /id if the key is in the payload")
		check(!r.isPattern(), of(fieldSnapshotTopic, fieldPattern), "snapshots need a single topic, and this is a pattern; add a rule for that topic")
		check(native.CheckTopic(s.Topic) == nil, of(fieldSnapshotTopic), "snapshot topic %q is not a topic; use segments of letters, digits, _ and -, separated by dots", s.Topic)
		check(s.Topic != r.Pattern, of(fieldSnapshotTopic), "snapshots cannot go to their source topic; use another topic, such as %s.snapshot", r.Pattern)
		check(s.Every == 0 || s.Every >= minSnapshotEvery, of(fieldSnapshotEvery), "every %v: at least %v is allowed; the default is 30s", s.Every, minSnapshotEvery)
		if !r.Compaction && s.KeySource != "" { // read from the stream
			check(r.MaxAge <= 0 || r.MaxAge >= minCompactedAge, of(fieldAge, fieldSnapshotTopic), "age %v: a topic with snapshots needs at least %v, so that each event is in a snapshot before the stream removes it", r.MaxAge, minCompactedAge)
			check(r.MaxMsgs <= 0 || r.MaxMsgs >= minCompactedMsgs, of(fieldMessages, fieldSnapshotTopic), "messages %d: a topic with snapshots needs at least %d, so that each event is in a snapshot before the stream removes it", r.MaxMsgs, minCompactedMsgs)
			check(r.MaxBytes <= 0 || r.MaxBytes >= minCompactedBytes, of(fieldBytes, fieldSnapshotTopic), "bytes %s: a topic with snapshots needs at least %s, so that each event is in a snapshot before the stream removes it", SizeText(r.MaxBytes), SizeText(minCompactedBytes))
			check(r.MaxAge < minCompactedAge || s.Every <= r.MaxAge/2, of(fieldSnapshotEvery, fieldAge), "every %v: at most half of age %v is allowed, so that each event is in a snapshot before the stream removes it", s.Every, r.MaxAge)
		}
		faults = append(faults, s.keyFaults(r.Pattern)...)
	}
	return faults
}

// keyFaults returns the faults of the keys of snapshots.
func (s *SnapshotRule) keyFaults(pattern string) (faults []*RuleError) {
	fault := func(field, format string, args ...any) {
		faults = append(faults, &RuleError{Pattern: pattern, Fields: []string{field}, Other: -1, Msg: fmt.Sprintf(format, args...)})
	}
	if len(s.KeySource) > maxKeySource {
		fault(fieldSnapshotSource, "key_source has %d bytes; at most %d are allowed", len(s.KeySource), maxKeySource)
	} else if _, err := jsonpointer.Parse(s.KeySource); err != nil {
		fault(fieldSnapshotSource, "key_source %q is not a JSON pointer: %v", s.KeySource, err)
	}
	if len(s.BatchKeys) > maxBatchKeys {
		fault(fieldSnapshotKeys, "batch_keys has %d keys; at most %d are allowed", len(s.BatchKeys), maxBatchKeys)
		return faults
	}
	known := make(map[string]bool, len(s.BatchKeys))
	for i, key := range s.BatchKeys {
		switch {
		case key == "" || len(key) > native.MaxKey:
			fault(fieldSnapshotKeys, "batch_keys: key %d has %d bytes; 1 to %d are allowed", i+1, len(key), native.MaxKey)
		case !utf8.ValidString(key):
			fault(fieldSnapshotKeys, "batch_keys: key %d is not valid UTF-8", i+1)
		case known[key]:
			fault(fieldSnapshotKeys, "batch_keys has %q twice; remove one of them", key)
		}
		known[key] = true
	}
	return faults
}

// badPattern returns what is wrong with a pattern, or "".
func badPattern(pattern string) string {
	if pattern == "" {
		return "topic or pattern is missing"
	}
	if !wild(pattern) {
		if err := native.CheckTopic(pattern); err != nil {
			return err.Error()
		}
		return ""
	}
	segments := strings.Split(pattern, ".")
	for i, s := range segments {
		switch s {
		case "*":
		case "**":
			if i != len(segments)-1 {
				return "** is only allowed at the end"
			}
		default:
			if native.CheckTopic(s) != nil {
				return fmt.Sprintf("segment %d: letters, digits, _ and - are allowed, or * or ** alone", i+1)
			}
		}
	}
	if len(pattern) > native.MaxTopic {
		return fmt.Sprintf("pattern has %d bytes; at most %d are allowed", len(pattern), native.MaxTopic)
	}
	return ""
}

// isPattern reports whether the rule is for more than one topic.
func (r *Rule) isPattern() bool { return wild(r.Pattern) }

func wild(pattern string) bool { return strings.Contains(pattern, "*") }

// takesAllOf reports whether the rule matches every topic that other matches.
func (r *Rule) takesAllOf(other *Rule) bool {
	p, o := strings.Split(r.Pattern, "."), strings.Split(other.Pattern, ".")
	for i := range p {
		switch {
		case p[i] == "**":
			return true
		case i == len(o):
			return false
		case o[i] == "**", p[i] != "*" && p[i] != o[i]:
			return false
		}
	}
	return len(o) == len(p)
}

// meets reports whether there are topics that both rules match.
func (r *Rule) meets(other *Rule) bool { return meet(r.Pattern, other.Pattern) }

func meet(a, b string) bool {
	p, o := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; ; i++ {
		switch {
		case i < len(p) && p[i] == "**", i < len(o) && o[i] == "**":
			return true
		case i == len(p) || i == len(o):
			return len(p) == len(o)
		case p[i] != "*" && o[i] != "*" && p[i] != o[i]:
			return false
		}
	}
}
