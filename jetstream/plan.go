package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/topics"
)

// ChangeKind is the effect of a TopicChange.
type ChangeKind string

// The kinds of changes.
const (
	// ChangeCreate creates a stream, or the bucket of a compacted topic.
	ChangeCreate ChangeKind = "create"
	// ChangeSafe changes a stream without losing an event.
	ChangeSafe ChangeKind = "change"
	// ChangeDeletes narrows a bound of a stream, which may remove events at once.
	ChangeDeletes ChangeKind = "deletes"
	// ChangeImpossible is a change that the server cannot make, or the bus never makes. Err gives
	// the reason and an alternative.
	ChangeImpossible ChangeKind = "impossible"
)

// TopicChange is one difference between Config.Topics and the server.
type TopicChange struct {
	// Topic is empty for the stream of a family.
	Topic  string
	Stream string
	// Rule is the pattern of the rule.
	Rule string
	// Field is the name of the field in a topics file, "stream" for a stream to be created, or the
	// name in NATS of a property that the file does not have. Have and Want are in the units of the
	// file.
	Field string
	Have  string
	Want  string
	Kind  ChangeKind
	// Done is set by ApplyTopics when it has made the change. Err is the reason why the change
	// failed or is impossible. It is nil for a change that was not requested.
	Done bool
	Err  error

	set func(*natsjs.StreamConfig) // carries out what one stream's configuration can
}

// String returns the change on one line, without its outcome.
func (c *TopicChange) String() string {
	name := cmp.Or(c.Topic, "family "+c.Stream)
	if c.Kind == ChangeCreate && c.Field == fieldStream {
		return name + ": stream " + c.Stream + " is to be made"
	}
	return name + ": " + c.Field + " is " + c.Have + ", the rule says " + c.Want
}

// The fields of changes: those that a topics file has, by the names that it gives them, and others.
const (
	fieldFamily          = "family"
	fieldCompaction      = "compaction"
	fieldAge             = "retention.age"
	fieldBytes           = "retention.bytes"
	fieldMessages        = "retention.messages"
	fieldDuplicateWindow = "duplicate_window"
	fieldReplicas        = "replicas"
	fieldMaxPayload      = "max_payload"
	fieldStorage         = "storage"

	fieldStream    = "stream"
	fieldSubjects  = "subjects"
	fieldRetention = "retention policy"
	fieldDiscard   = "discard policy"
	fieldPerKey    = "messages per subject"
	fieldDirect    = "direct access"

	fieldBucketReplicas = "replicas of the bucket"
)

// PlanTopics compares the rules of Config.Topics with the server and changes nothing. A rule for
// one topic, or for a family, requires that its stream exists. Every rule determines the streams of
// those topics that it is the first to match. The built-in rules require the buckets of existing
// compacted topics, and nothing else.
func (a Admin) PlanTopics(ctx context.Context) ([]TopicChange, error) {
	b := a.bus
	inv, err := takeInventory(ctx, b.core)
	if err != nil {
		return nil, err
	}
	var changes []TopicChange
	for _, s := range inv.wanted(false) {
		changes = append(changes, inv.plan(s)...)
	}
	return append(changes, inv.leftOver()...), nil
}

// ApplyTopics applies the changes that PlanTopics finds. Without deleting, it creates what is
// missing and makes only changes that lose no events; with deleting, it also makes changes that may
// lose events. It returns all changes, each with its outcome, and an error when the rules could not
// be compared with the server. A change that fails does not stop the others. Several hubs may call
// ApplyTopics at once.
func (a Admin) ApplyTopics(ctx context.Context, deleting bool) ([]TopicChange, error) {
	b := a.bus
	inv, err := takeInventory(ctx, b.core)
	if err != nil {
		return nil, err
	}
	var changes []TopicChange
	for _, s := range inv.wanted(false) {
		planned := inv.plan(s)
		switch {
		case len(planned) == 0:
		case ctx.Err() != nil:
			return changes, ctx.Err()
		default:
			planned = b.admin.apply(ctx, inv, s, planned, deleting)
		}
		changes = append(changes, planned...)
	}
	return append(changes, inv.leftOver()...), nil
}

// CreateBuiltinTopics creates the topics that the built-in rules name and that do not exist yet,
// dead letters among them, so that native NATS clients can publish there before anybody has used
// the topics through a bus. It returns an error for each that could not be created.
func (a Admin) CreateBuiltinTopics(ctx context.Context) error {
	b := a.bus
	inv, err := takeInventory(ctx, b.core)
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range inv.wanted(true) {
		if s.info != nil || configured(b.core, s.rule) {
			continue
		}
		for _, c := range b.admin.apply(ctx, inv, s, inv.plan(s), false) {
			if c.Err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", c.String(), c.Err))
			}
		}
	}
	return errors.Join(errs...)
}

// apply carries out what was planned for one stream.
func (a *admin) apply(ctx context.Context, inv *inventory, s topicStream, planned []TopicChange, deleting bool) []TopicChange {
	if s.info == nil {
		if planned[0].Kind != ChangeCreate {
			return planned
		}
		info, err := a.streams.CreateStream(ctx, s.topic, s.rule)
		if err != nil {
			planned[0].Err = err
			return planned
		}
		planned[0].Done = true
		inv.add(info)
		s.info = info
		// Another hub may have made it at the same moment, by another file.
		return append(planned[:1:1], a.apply(ctx, inv, s, inv.plan(s), deleting)...)
	}
	// What others have changed since the inventory was taken must not be undone by a configuration
	// from before.
	info, err := a.conn.FindStream(ctx, s.info.Config.Name)
	if err != nil {
		for i := range planned {
			planned[i].Err = cmp.Or(planned[i].Err, err)
		}
		return planned
	}
	s.info = info
	inv.add(info)
	planned = inv.plan(s)
	var own, bucket []*TopicChange
	for i := range planned {
		switch c := &planned[i]; {
		case c.Field == fieldCompaction && c.Kind == ChangeCreate:
			c.Err = a.makeBucket(ctx, s)
			c.Done = c.Err == nil
		case c.set == nil || c.Kind == ChangeDeletes && !deleting:
		case c.Stream == s.info.Config.Name:
			own = append(own, c)
		default:
			bucket = append(bucket, c)
		}
	}
	for _, sets := range [][]*TopicChange{own, bucket} {
		if err := a.update(ctx, s.rule, sets...); err != nil && len(sets) > 1 {
			for _, c := range sets { // one of them may stand in the way of the others
				_ = a.update(ctx, s.rule, c) // it is in c.Err
			}
		}
	}
	return planned
}

// update carries out changes of one stream's configuration in one step.
func (a *admin) update(ctx context.Context, rule *topics.Rule, sets ...*TopicChange) error {
	if len(sets) == 0 {
		return nil
	}
	set := func(cfg *natsjs.StreamConfig) {
		for _, c := range sets {
			c.set(cfg)
		}
		if _, ours := cfg.Metadata[streams.BucketTopic]; !ours {
			cfg.Metadata = maps.Clone(cfg.Metadata)
			if cfg.Metadata == nil {
				cfg.Metadata = make(map[string]string)
			}
			cfg.Metadata[metaPattern] = rule.Pattern
		}
	}
	_, err := conn.Placed(ctx, func() (natsjs.Stream, error) { return a.changeStream(ctx, sets[0].Stream, set) })
	for _, c := range sets {
		c.Done, c.Err = err == nil, err
	}
	return err
}

// makeBucket makes the bucket of a topic that has a stream.
func (a *admin) makeBucket(ctx context.Context, s topicStream) error {
	t, err := a.streams.NewTopic(s.topic, s.info, s.rule, false)
	if err != nil {
		return err
	}
	return a.streams.EnsureBucket(ctx, t, &s.info.Config)
}

// plan compares one stream with its rule.
func (inv *inventory) plan(s topicStream) []TopicChange {
	name := s.rule.StreamName(s.topic)
	var changes []TopicChange
	if s.info == nil {
		c := TopicChange{Topic: s.topic, Stream: name, Rule: s.rule.Pattern, Field: fieldStream, Have: "missing", Want: "made", Kind: ChangeCreate}
		if _, exists := inv.byName[name]; exists {
			c.Kind, c.Have = ChangeImpossible, "not the event bus's"
			c.Err = fmt.Errorf("stream %s exists, but does not store the subjects of the topic; delete the stream, or choose another topic", name)
		} else if err := inv.overlap(name, s.rule.Subjects(s.topic)); err != nil {
			c.Kind, c.Err = ChangeImpossible, err
		}
		return append(changes, c)
	}
	if configured(inv.core, s.rule) {
		changes = compare(s.rule, s.topic, &s.info.Config, &inv.core.cfg)
		for i := range changes {
			if c := &changes[i]; c.Field == fieldSubjects && c.Kind == ChangeSafe {
				if err := inv.overlap(name, s.rule.Subjects(s.topic)); err != nil {
					c.Kind, c.Err, c.set = ChangeImpossible, err, nil
				}
			}
		}
	}
	if s.topic == "" {
		return changes
	}
	bucket, filled := inv.bucket(s.topic)
	c := TopicChange{Topic: s.topic, Stream: bucket, Rule: s.rule.Pattern, Field: fieldCompaction}
	switch n := s.rule.Replicas; {
	case s.rule.Compaction && filled == nil:
		c.Have, c.Want, c.Kind = "false", "true", ChangeCreate
		changes = append(changes, c)
	case s.rule.Compaction && n != 0 && filled.Config.Replicas != n && configured(inv.core, s.rule):
		c.Field, c.Have, c.Want, c.Kind = fieldBucketReplicas, countText(int64(filled.Config.Replicas)), countText(int64(n)), ChangeSafe
		c.set = func(cfg *natsjs.StreamConfig) { cfg.Replicas = n }
		changes = append(changes, c)
	case !s.rule.Compaction && filled != nil:
		bucket = strings.TrimPrefix(bucket, "KV_")
		c.Have, c.Want, c.Kind = "true", "false", ChangeImpossible
		c.Err = fmt.Errorf("the event bus never deletes bucket %s, and the server keeps filling it; delete the bucket with the nats command (nats kv del %s), or keep compaction: true", bucket, bucket)
		changes = append(changes, c)
	}
	return changes
}

// compare says how a stream differs from its rule.
func compare(r *topics.Rule, topic string, have *natsjs.StreamConfig, defaults *Config) (changes []TopicChange) {
	want := streams.StreamConfig(r, topic, defaults.Replicas, defaults.MemoryStorage)
	differs := func(field, has, wants string, kind ChangeKind, set func(*natsjs.StreamConfig)) {
		changes = append(changes, TopicChange{Topic: topic, Stream: have.Name, Rule: r.Pattern, Field: field, Have: has, Want: wants, Kind: kind, set: set})
	}
	impossible := func(field, has, wants, why string) {
		differs(field, has, wants, ChangeImpossible, nil)
		changes[len(changes)-1].Err = errors.New(why)
	}
	var missing []string
	for _, s := range want.Subjects {
		if !slices.ContainsFunc(have.Subjects, func(has string) bool { return streams.Covers(has, s) }) {
			missing = append(missing, s)
		}
	}
	if len(missing) > 0 {
		differs(fieldSubjects, strings.Join(have.Subjects, " "), strings.Join(want.Subjects, " "), ChangeSafe, func(c *natsjs.StreamConfig) {
			// narrower ones would overlap
			c.Subjects = append(slices.DeleteFunc(slices.Clone(c.Subjects), func(s string) bool {
				return slices.ContainsFunc(missing, func(m string) bool { return streams.Covers(m, s) })
			}), missing...)
		})
	}
	bound := func(field string, has, wants int64, text func(int64) string, set func(*natsjs.StreamConfig)) {
		has, wants = max(has, 0), max(wants, 0)
		switch {
		case has == wants:
		case wants == 0 || has != 0 && has < wants, want.Discard == natsjs.DiscardNew && field != fieldAge:
			differs(field, text(has), text(wants), ChangeSafe, set)
		default:
			differs(field, text(has), text(wants), ChangeDeletes, set)
		}
	}
	bound(fieldAge, int64(have.MaxAge), int64(want.MaxAge), func(n int64) string { return topics.AgeText(time.Duration(n)) }, func(c *natsjs.StreamConfig) { c.MaxAge = want.MaxAge })
	bound(fieldBytes, have.MaxBytes, want.MaxBytes, topics.SizeText, func(c *natsjs.StreamConfig) { c.MaxBytes = want.MaxBytes })
	bound(fieldMessages, have.MaxMsgs, want.MaxMsgs, countText, func(c *natsjs.StreamConfig) { c.MaxMsgs = want.MaxMsgs })
	bound(fieldPerKey, have.MaxMsgsPerSubject, 0, countText, func(c *natsjs.StreamConfig) { c.MaxMsgsPerSubject = -1 })
	if have.Duplicates != want.Duplicates {
		differs(fieldDuplicateWindow, topics.AgeText(have.Duplicates), topics.AgeText(want.Duplicates), ChangeSafe, func(c *natsjs.StreamConfig) { c.Duplicates = want.Duplicates })
	}
	if r.Replicas != 0 && have.Replicas != want.Replicas { // a default is for new streams only
		differs(fieldReplicas, countText(int64(have.Replicas)), countText(int64(want.Replicas)), ChangeSafe, func(c *natsjs.StreamConfig) { c.Replicas = want.Replicas })
	}
	if has := max(have.MaxMsgSize, -1); has != want.MaxMsgSize && (has > 0 || want.MaxMsgSize > 0) {
		differs(fieldMaxPayload, payloadText(has), payloadText(want.MaxMsgSize), ChangeSafe, func(c *natsjs.StreamConfig) { c.MaxMsgSize = want.MaxMsgSize })
	}
	if !have.AllowDirect {
		differs(fieldDirect, "false", "true", ChangeSafe, func(c *natsjs.StreamConfig) { c.AllowDirect = true })
	}
	switch {
	case have.Discard == want.Discard:
	case want.Discard == natsjs.DiscardNew:
		differs(fieldDiscard, "old", "new", ChangeSafe, func(c *natsjs.StreamConfig) { c.Discard = natsjs.DiscardNew })
	default:
		differs(fieldDiscard, "new", "old", ChangeDeletes, func(c *natsjs.StreamConfig) { c.Discard, c.DiscardNewPerSubject = natsjs.DiscardOld, false })
	}
	if r.Storage != "" && have.Storage != want.Storage {
		impossible(fieldStorage, storAgeText(have.Storage), storAgeText(want.Storage), "a stream cannot move between file and memory; delete the stream and its events, or restore the storage of the rule")
	}
	if have.Retention != natsjs.LimitsPolicy {
		impossible(fieldRetention, strings.ToLower(have.Retention.String()), "limits", "the stream deletes acknowledged events, so groups lose events; delete and create the topic without that policy")
	}
	return changes
}

// reportDrift tells operators that a stream is not what its rule says. The stream is used as it is.
func (c *core) reportDrift(topic string, rule *topics.Rule, info *natsjs.StreamInfo) {
	changes := compare(rule, topic, &info.Config, &c.cfg)
	if len(changes) == 0 {
		return
	}
	drift := make([]string, len(changes))
	for i, change := range changes {
		drift[i] = change.Field + " is " + change.Have + ", the rule says " + change.Want
	}
	c.often.Log(c.conn.Ctx, slog.LevelWarn, "stream differs from its rule", topic, slog.String("topic", topic), slog.String("stream", info.Config.Name),
		slog.String("drift", strings.Join(drift, "; ")))
}

// countText is a number in a topics file.
func countText(n int64) string {
	if n <= 0 {
		return "none"
	}
	return strconv.FormatInt(n, 10)
}

// payloadText is what a bound on messages leaves for payloads.
func payloadText(n int32) string {
	if n <= 0 {
		return "none"
	}
	if n <= event.PayloadMargin {
		return "0"
	}
	return topics.SizeText(int64(n) - event.PayloadMargin)
}

func storAgeText(s natsjs.StorageType) string {
	if s == natsjs.MemoryStorage {
		return string(topics.StorageMemory)
	}
	return string(topics.StorageFile)
}
