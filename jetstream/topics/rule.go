// Package topics has the rules of topics: how long events are kept, what happens when there are too
// many, and what payloads and keys must look like. Rules are values that need no connection.
//
// The main names are [Rule], [SnapshotRule], [SchemaRule] and [CloudEventsRule], [Validate], which
// reports all faults of a list of rules, and [WithBuiltin], which adds the built-in rules. Package
// topicfile reads rules from a file.
package topics

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"eventhub/jetstream/native"
)

// Rule configures the streams of matching topics.
type Rule struct {
	// Pattern is a topic or a pattern. In a pattern, * is one segment, and ** at the end is any
	// number of segments, including none.
	Pattern string
	// Family, if not empty, stores all matching topics in one stream of this name. By default each
	// topic has a stream of its own.
	Family string
	// MaxAge, MaxBytes and MaxMsgs bound the stream; 0 means no bound. The server removes the
	// oldest events beyond a bound. Dead letters (topics below dlq) are removed by MaxAge only: a
	// stream that has no room for one refuses it, and the letter waits.
	MaxAge   time.Duration
	MaxBytes int64
	MaxMsgs  int64
	// OnFull is what happens when a bound is reached: OnFullDrop, the default, or OnFullReject,
	// which requires MaxBytes or MaxMsgs and excludes Family. Dead letters have neither.
	OnFull OnFull
	// GroupAge is how long a group without members holds the events of a topic with OnFullReject:
	// default 7 days, at least 1 s.
	GroupAge time.Duration
	// DuplicateWindow is how long an id is remembered. Default 2 min; 1 s at least.
	DuplicateWindow time.Duration
	// Replicas is the number of copies of the stream, and of its bucket: 1..5. Default
	// jetstream.Config.Replicas.
	Replicas int
	// Storage is StorageFile or StorageMemory. jetstream.Config.MemoryStorage sets the default.
	Storage Storage
	// MaxPayload is the largest payload in bytes, at most jetstream.Limits.MaxPayload, which is the
	// default too.
	MaxPayload int
	// Compaction keeps the newest event of each key in a KV bucket, which the server fills from the
	// stream. The bucket keeps the event until a tombstone removes it, whatever the bounds above.
	// Events of such a topic need a key. Compaction excludes Family. It requires a MaxAge of 0 or
	// at least an hour, a MaxMsgs of 0 or at least 100,000, and a MaxBytes of 0 or at least
	// 128 MiB, so that the bucket gets each event before the stream removes it.
	Compaction bool
	// MaxKeys is the most keys of a topic with Compaction, without removed keys. Default
	// 1,000,000. Beyond it, publishes of new keys get overloaded ("max_keys" in
	// Observer.LimitReached). A hub learns once a minute of keys that other hubs and native clients
	// make, and of keys that have gone.
	MaxKeys int
	// Snapshot, if not nil, requests snapshots. Pattern must then be a single topic, with
	// Compaction or with Snapshot.KeySource. With KeySource, MaxAge, MaxMsgs and MaxBytes have the
	// same minimum values as with Compaction.
	Snapshot *SnapshotRule
	// CloudEvents says how the events look as CloudEvents.
	CloudEvents CloudEventsRule
	// Presence keeps who listens to broadcasts of the topic. The bus only tells what the rule says,
	// and carries what hubs tell one another.
	Presence bool
	// Schema says what the payloads are compared with.
	Schema SchemaRule
}

// DefaultMaxKeys is the default of Rule.MaxKeys.
const DefaultMaxKeys = 1_000_000

// DefaultGroupAge is how long a group without members holds the events of a topic that rejects,
// unless Rule.GroupAge says otherwise.
const DefaultGroupAge = 7 * 24 * time.Hour

// OnFull is what happens to events at the bounds of a topic.
type OnFull string

const (
	// OnFullDrop removes the oldest events, whether groups have read them or not. The bus reports
	// what groups have lost (jetstream.SubscribeOptions.OnLost).
	OnFullDrop OnFull = "drop"
	// OnFullReject removes no event that a group has not settled, whatever its age. Publishes get
	// topic_full while the topic has no room.
	OnFullReject OnFull = "reject"
)

// SnapshotRule requests snapshots of the state of a topic, for consumers that start without state.
// The bus only stores the rule; projections.Compactor writes the snapshots.
type SnapshotRule struct {
	// Topic receives the snapshots. It is a compacted topic.
	Topic string
	// Every is the interval: default 30 s, at least 1 s, and at most half of the MaxAge of a topic
	// without compaction.
	Every time.Duration
	// KeySource, if not "", is a JSON pointer (RFC 6901) to the key in the payload of each event,
	// for events without keys of their own. The key must be a string or a number. At most
	// 512 bytes.
	KeySource string
	// BatchKeys, if not empty, restricts the snapshots to these keys: at most 1,000, each of 1 to
	// 512 bytes.
	BatchKeys []string
}

// Storage is the place where a stream is stored.
type Storage string

// The storages. The zero value leaves the choice to jetstream.Config.MemoryStorage.
const (
	StorageFile   Storage = "file"
	StorageMemory Storage = "memory" // does not survive a restart of the server
)

// defaultSnapshotEvery is the interval of SnapshotRule.Every 0.
const defaultSnapshotEvery = 30 * time.Second

// builtinRules come after the configured ones, but for a configured ** (see WithBuiltin).
var builtinRules = []Rule{
	{Pattern: "dlq.**", Family: "dlq", MaxAge: 30 * 24 * time.Hour, MaxBytes: 4 << 30, DuplicateWindow: 24 * time.Hour},
	{Pattern: "heartbeat.received", MaxAge: 3 * 24 * time.Hour},
	{Pattern: "process.state", MaxAge: 7 * 24 * time.Hour, Compaction: true, Snapshot: &SnapshotRule{Topic: "process.state.snapshot", Every: defaultSnapshotEvery}},
	{Pattern: "process.state.snapshot", MaxAge: 7 * 24 * time.Hour, Compaction: true},
	{Pattern: "**", MaxAge: 7 * 24 * time.Hour},
}

// matches reports whether the rule is for topic. ** stands at the end only.
func (r *Rule) matches(topic string) bool {
	p, t := r.Pattern, topic
	for {
		if p == "**" {
			return true
		}
		pSeg, pRest, pMore := strings.Cut(p, ".")
		tSeg, tRest, tMore := strings.Cut(t, ".")
		if pSeg != "*" && pSeg != tSeg {
			return false
		}
		if !tMore {
			return !pMore || pRest == "**"
		}
		if !pMore {
			return false
		}
		p, t = pRest, tRest
	}
}

// Subjects returns the subjects of the stream that the rule makes for topic.
func (r *Rule) Subjects(topic string) []string {
	if r.Family == "" {
		return []string{native.Subject(topic, ""), native.KeyedPattern(topic)}
	}
	base, all := strings.CutSuffix(r.Pattern, ".**")
	if !all {
		return []string{native.Subject(base, ""), native.KeyedPattern(base)}
	}
	return []string{native.Subject(base, ""), native.Subject(base, "") + ".>", native.KeyedPattern(base), native.KeyedPattern(base) + ".>"}
}

// Rules are rules of which one matches each topic: the last is for **. WithBuiltin makes them.
type Rules []Rule

// Of returns the first rule that matches a topic.
func (rules Rules) Of(topic string) *Rule {
	for i := range rules {
		if rules[i].matches(topic) {
			return &rules[i]
		}
	}
	return &rules[len(rules)-1] // ** is always last
}

// Snapshots returns the rules in force that request snapshots. Each is for one topic, and its Every
// is filled in.
func (rules Rules) Snapshots() []Rule {
	found := rules.inForce(func(r *Rule) bool { return r.Snapshot != nil })
	for i := range found {
		snapshot := *found[i].Snapshot
		snapshot.Every = cmp.Or(snapshot.Every, defaultSnapshotEvery)
		found[i].Snapshot = &snapshot
	}
	return found
}

// Mirrors returns the rules in force that request copies in other versions of the schema
// (SchemaRule.Mirrors). Each is for one topic.
func (rules Rules) Mirrors() []Rule {
	return rules.inForce(func(r *Rule) bool { return len(r.Schema.Mirrors) > 0 })
}

// inForce returns the rules for which is holds and that no earlier rule replaces.
func (rules Rules) inForce(is func(*Rule) bool) (found []Rule) {
	for i := range rules {
		if r := &rules[i]; is(r) && rules.Of(r.Pattern) == r {
			found = append(found, *r)
		}
	}
	return found
}

// WithBuiltin adds the built-in rules to configured ones; but a configured ** comes after those of
// the built-in ones that are about certain topics, so that a default for all others does not take
// dead letters from their stream.
func WithBuiltin(configured []Rule) Rules {
	rest := slices.IndexFunc(configured, func(r Rule) bool { return r.Pattern == "**" })
	if rest < 0 {
		return slices.Concat(configured, builtinRules)
	}
	last := len(builtinRules) - 1 // it is ** too
	return slices.Concat(configured[:rest], builtinRules[:last], configured[rest:], builtinRules[last:])
}

// StreamName returns the name of the stream that the rule makes for topic.
func (r *Rule) StreamName(topic string) string {
	if r.Family != "" {
		return r.Family
	}
	return native.ObjectName(topic)
}
