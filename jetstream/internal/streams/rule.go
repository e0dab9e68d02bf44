package streams

import (
	"cmp"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// IsDead reports whether a topic is one of dead letters.
func IsDead(topic string) bool {
	return topic+"." == native.DeadLetterPrefix || strings.HasPrefix(topic, native.DeadLetterPrefix)
}

// StreamConfig is the stream that a rule makes for topic. Where the rule does not say otherwise,
// the stream has so many replicas, and is kept in memory or in files.
func StreamConfig(r *topics.Rule, topic string, replicas int, memory bool) natsjs.StreamConfig {
	cfg := natsjs.StreamConfig{
		Name:        r.StreamName(topic),
		Subjects:    r.Subjects(topic),
		Retention:   natsjs.LimitsPolicy,
		Discard:     natsjs.DiscardOld,
		MaxAge:      r.MaxAge,
		MaxBytes:    r.MaxBytes,
		MaxMsgs:     r.MaxMsgs,
		Duplicates:  r.DuplicateWindow,
		Replicas:    cmp.Or(r.Replicas, replicas),
		MaxMsgSize:  -1,
		AllowDirect: true,
		Metadata:    map[string]string{"eventhub.pattern": r.Pattern},
	}
	if strings.HasPrefix(r.Pattern, native.DeadLetterPrefix) {
		cfg.Discard = natsjs.DiscardNew // no letter pushes out another
	}
	if r.OnFull == topics.OnFullReject {
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
		cfg.MaxMsgSize = int32(r.MaxPayload + event.PayloadMargin) //nolint:gosec // topics.Validate bounds it
	}
	if r.Storage == topics.StorageMemory || r.Storage == "" && memory {
		cfg.Storage = natsjs.MemoryStorage
	}
	return cfg
}

// Covers reports whether a stream with the subject pattern takes everything that subject means,
// which may have wildcards itself.
func Covers(pattern, subject string) bool {
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
