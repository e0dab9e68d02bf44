package jetstream

import (
	"cmp"
	"slices"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// dlqPrefix begins the topics that dead letters go to.
const dlqPrefix = native.DeadLetterPrefix

// isDead reports whether a topic is one of dead letters.
func isDead(topic string) bool { return topic+"." == dlqPrefix || strings.HasPrefix(topic, dlqPrefix) }

// defaultSnapshotEvery is the interval of SnapshotRule.Every 0.
const defaultSnapshotEvery = 30 * time.Second

// The bounds of dead letters, unless a rule says otherwise.
const (
	deadAge   = 30 * 24 * time.Hour
	deadBytes = 4 << 30
)

// builtinRules come after the configured ones, but for a configured ** (see withBuiltin).
var builtinRules = []TopicRule{
	{Pattern: "dlq.**", Family: "dlq", MaxAge: deadAge, MaxBytes: deadBytes, DuplicateWindow: 24 * time.Hour},
	{Pattern: "heartbeat.received", MaxAge: 3 * 24 * time.Hour},
	{Pattern: "process.state", MaxAge: 7 * 24 * time.Hour, Compaction: true, Snapshot: &SnapshotRule{Topic: "process.state.snapshot", Every: defaultSnapshotEvery}},
	{Pattern: "process.state.snapshot", MaxAge: 7 * 24 * time.Hour, Compaction: true},
	{Pattern: "**", MaxAge: 7 * 24 * time.Hour},
}

// matches reports whether the rule is for topic. ** stands at the end only.
func (r *TopicRule) matches(topic string) bool {
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

// subjects of the stream that a rule makes for topic.
func (r *TopicRule) subjects(topic string) []string {
	if r.Family == "" {
		return []string{plainSubject(topic), keyedPattern(topic)}
	}
	base, all := strings.CutSuffix(r.Pattern, ".**")
	if !all {
		return []string{plainSubject(base), keyedPattern(base)}
	}
	return []string{plainSubject(base), plainSubject(base) + ".>", keyedPattern(base), keyedPattern(base) + ".>"}
}

// streamConfig is the stream that a rule makes for topic.
func streamConfig(r *TopicRule, topic string, defaults *Config) natsjs.StreamConfig {
	cfg := natsjs.StreamConfig{
		Name:        r.streamName(topic),
		Subjects:    r.subjects(topic),
		Retention:   natsjs.LimitsPolicy,
		Discard:     natsjs.DiscardOld,
		MaxAge:      r.MaxAge,
		MaxBytes:    r.MaxBytes,
		MaxMsgs:     r.MaxMsgs,
		Duplicates:  r.DuplicateWindow,
		Replicas:    cmp.Or(r.Replicas, defaults.Replicas),
		MaxMsgSize:  -1,
		AllowDirect: true,
		Metadata:    map[string]string{"eventhub.pattern": r.Pattern},
	}
	if strings.HasPrefix(r.Pattern, dlqPrefix) {
		cfg.Discard = natsjs.DiscardNew // no letter pushes out another
	}
	if r.OnFull == OnFullReject {
		cfg.Discard, cfg.MaxAge = natsjs.DiscardNew, 0 // hubs remove what all groups have settled
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = -1
	}
	if cfg.MaxMsgs == 0 {
		cfg.MaxMsgs = -1
	}
	if cfg.Duplicates == 0 {
		cfg.Duplicates = 2 * time.Minute
	}
	if cfg.MaxAge > 0 && cfg.Duplicates > cfg.MaxAge {
		cfg.Duplicates = cfg.MaxAge
	}
	if r.MaxPayload > 0 {
		cfg.MaxMsgSize = int32(r.MaxPayload + event.PayloadMargin) //nolint:gosec // ValidateRules bounds it
	}
	if r.Storage == StorageMemory || r.Storage == "" && defaults.MemoryStorage {
		cfg.Storage = natsjs.MemoryStorage
	}
	return cfg
}

// RuleOf returns the rule that a bus has for a topic, or for all topics if no other rule matches.
func RuleOf(b *Bus, topic string) TopicRule { return *b.rules.of(topic) }

// topicRules are rules of which one matches each topic: the last is for **.
type topicRules []TopicRule

// of returns the first rule that matches a topic.
func (rules topicRules) of(topic string) *TopicRule {
	for i := range rules {
		if rules[i].matches(topic) {
			return &rules[i]
		}
	}
	return &rules[len(rules)-1]
}

// snapshots returns the rules of topics with snapshots. Each is for one topic, and its Every is
// filled in.
func (rules topicRules) snapshots() []TopicRule {
	var found []TopicRule
	for i := range rules {
		r := rules[i]
		if r.Snapshot == nil || rules.of(r.Pattern) != &rules[i] {
			continue
		}
		snapshot := *r.Snapshot
		snapshot.Every = cmp.Or(snapshot.Every, defaultSnapshotEvery)
		r.Snapshot = &snapshot
		found = append(found, r)
	}
	return found
}

// withBuiltin adds the built-in rules to configured ones; but a configured ** comes after those of
// the built-in ones that are about certain topics, so that a default for all others does not take
// dead letters from their stream.
func withBuiltin(configured []TopicRule) topicRules {
	rest := slices.IndexFunc(configured, func(r TopicRule) bool { return r.Pattern == "**" })
	if rest < 0 {
		return slices.Concat(configured, builtinRules)
	}
	last := len(builtinRules) - 1 // it is ** too
	return slices.Concat(configured[:rest], builtinRules[:last], configured[rest:], builtinRules[last:])
}

func (r *TopicRule) streamName(topic string) string {
	if r.Family != "" {
		return r.Family
	}
	return objectName(topic)
}

// covers reports whether a stream with the subject pattern takes everything that subject means,
// which may have wildcards itself.
func covers(pattern, subject string) bool {
	for {
		p, pRest, pMore := strings.Cut(pattern, ".")
		s, sRest, sMore := strings.Cut(subject, ".")
		switch {
		case p == ">":
			return true
		case p != "*" && p != s, pMore != sMore, s == ">":
			return false
		case !pMore:
			return true
		}
		pattern, subject = pRest, sRest
	}
}
