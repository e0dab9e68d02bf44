package jetstream

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// dlqPrefix begins the topics that dead letters go to.
const dlqPrefix = "dlq."

// builtinRules come after the configured ones.
var builtinRules = []TopicRule{
	{Pattern: "dlq.**", Family: "dlq", MaxAge: 30 * 24 * time.Hour, DuplicateWindow: 24 * time.Hour},
	{Pattern: "heartbeat.received", MaxAge: 3 * 24 * time.Hour},
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

// check says what is wrong with a configured rule.
func (r *TopicRule) check() error {
	segments := strings.Split(r.Pattern, ".")
	for i, s := range segments {
		switch s {
		case "*":
		case "**":
			if i != len(segments)-1 {
				return fmt.Errorf("pattern %q: ** may only stand at the end", r.Pattern)
			}
		default:
			if err := ValidTopic(s); err != nil {
				return fmt.Errorf("pattern %q: segment %d: letters, digits, _ and -, or * or ** are allowed", r.Pattern, i+1)
			}
		}
	}
	if r.Family != "" && objectName(r.Family) != r.Family {
		return fmt.Errorf("pattern %q: family %q: at most %d of a-z, 0-9, _ and - are allowed", r.Pattern, r.Family, maxNameLen)
	}
	if r.Family != "" && r.Pattern == "**" {
		return fmt.Errorf("pattern %q: a family of all topics would overlap with every other stream", r.Pattern)
	}
	if r.MaxAge < 0 || r.MaxBytes < 0 || r.MaxMsgs < 0 || r.DuplicateWindow < 0 {
		return fmt.Errorf("pattern %q: limits are 0 (none) or positive", r.Pattern)
	}
	return nil
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

func (b *Bus) rule(topic string) *TopicRule {
	for i := range b.rules {
		if b.rules[i].matches(topic) {
			return &b.rules[i]
		}
	}
	return &b.rules[len(b.rules)-1] // ** is always last
}

func (r *TopicRule) streamName(topic string) string {
	if r.Family != "" {
		return r.Family
	}
	return objectName(topic)
}

// covers reports whether a stream with the subject pattern takes everything that subject means, which may have * itself.
func covers(pattern, subject string) bool {
	for {
		p, pRest, pMore := strings.Cut(pattern, ".")
		s, sRest, sMore := strings.Cut(subject, ".")
		switch {
		case p == ">":
			return true
		case p != "*" && p != s, pMore != sMore:
			return false
		case !pMore:
			return true
		}
		pattern, subject = pRest, sRest
	}
}

// reportDrift tells operators that a stream is not what its rule says. The stream is used as it is.
func (b *Bus) reportDrift(topic string, rule *TopicRule, info *natsjs.StreamInfo) {
	var drift []string
	for _, want := range rule.subjects(topic) {
		if !slices.Contains(info.Config.Subjects, want) {
			drift = append(drift, "subject "+want+" is missing")
		}
	}
	if info.Config.MaxAge != rule.MaxAge {
		drift = append(drift, fmt.Sprintf("max_age is %v, the rule says %v", info.Config.MaxAge, rule.MaxAge))
	}
	if info.Config.Retention != natsjs.LimitsPolicy {
		drift = append(drift, "retention is not limits")
	}
	if len(drift) > 0 {
		b.log.Warn("stream differs from its rule", slog.String("topic", topic), slog.String("stream", info.Config.Name),
			slog.String("drift", strings.Join(drift, "; ")))
	}
}
