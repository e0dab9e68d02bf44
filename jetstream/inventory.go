package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/topics"
)

// metaPattern is where a stream's metadata says which rule made it.
const metaPattern = "eventhub.pattern"

// inventory is what streams the server had at one moment.
type inventory struct {
	core   *core
	byName map[string]*natsjs.StreamInfo
}

// topicStream is the stream of a topic, or of a family, as it is or should be.
type topicStream struct {
	topic string // "" for a family
	rule  *topics.Rule
	info  *natsjs.StreamInfo // nil when it does not exist
}

// takeInventory asks the server for all of its streams.
func takeInventory(ctx context.Context, c *core) (*inventory, error) {
	inv, err := listStreams(ctx, c)
	if err != nil {
		return nil, err
	}
	return inv, inv.complete(ctx)
}

// listStreams asks the server for the streams that have a leader.
func listStreams(ctx context.Context, c *core) (*inventory, error) {
	inv := &inventory{core: c, byName: make(map[string]*natsjs.StreamInfo)}
	list := c.conn.JS.ListStreams(ctx)
	for info := range list.Info() {
		inv.add(info)
	}
	if c.conn.Closing() {
		return nil, event.ErrClosed
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		return nil, fmt.Errorf("nats at %s: list streams: %w", c.conn.Where(), err)
	}
	return inv, nil
}

// complete asks for each stream by its name that a rule wants and that the list does not have: a
// cluster leaves out those that have no leader at that moment.
func (inv *inventory) complete(ctx context.Context) error {
	var wanted []string
	for i := range inv.core.rules {
		if r := &inv.core.rules[i]; r.Family != "" || ValidTopic(r.Pattern) == nil {
			wanted = append(wanted, r.StreamName(r.Pattern))
		}
	}
	for range 2 { // the streams of topics, and then the buckets of those that are compacted
		for _, name := range wanted {
			if inv.byName[name] != nil {
				continue
			}
			info, err := inv.core.conn.FindStream(ctx, name)
			if err == nil {
				inv.add(info)
			} else if !errors.Is(err, event.ErrNotFound) {
				return err
			}
		}
		wanted = nil
		for _, info := range inv.byName {
			if s := inv.recognise(info); s.rule != nil && s.rule.Compaction {
				wanted = append(wanted, streams.NewBucket(s.topic).Stream)
			}
		}
	}
	return nil
}

func (inv *inventory) add(info *natsjs.StreamInfo) { inv.byName[info.Config.Name] = info }

// names are those of all streams in order.
func (inv *inventory) names() []string {
	names := make([]string, 0, len(inv.byName))
	for name := range inv.byName {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// recognise says whose stream it is. One that is not the bus's has no rule.
func (inv *inventory) recognise(info *natsjs.StreamInfo) topicStream {
	for i := range inv.core.rules {
		if r := &inv.core.rules[i]; r.Family != "" && r.Family == info.Config.Name {
			ours := func(subject string) bool {
				return slices.ContainsFunc(r.Subjects(""), func(own string) bool { return overlap(own, subject) })
			}
			if slices.ContainsFunc(info.Config.Subjects, ours) {
				return topicStream{rule: r, info: info}
			}
		}
	}
	for _, s := range info.Config.Subjects {
		topic := subjectTopic(s)
		if topic != "" && ValidTopic(topic) == nil && objectName(topic) == info.Config.Name {
			return topicStream{topic: topic, rule: inv.core.rules.Of(topic), info: info}
		}
	}
	return topicStream{}
}

// wanted are the streams that the rules are about: those of topics and families that exist, and
// then those that a configured rule wants to be there; with builtin, also those that a built-in
// rule names.
func (inv *inventory) wanted(builtin bool) []topicStream {
	var all []topicStream
	type pair struct{ topic, stream string }
	met := make(map[pair]bool)
	for _, name := range inv.names() {
		s := inv.recognise(inv.byName[name])
		if s.rule == nil || s.topic != "" && s.rule.Family != "" {
			continue // the second is in the way of its family, which is said there
		}
		met[pair{s.topic, name}] = true
		all = append(all, s)
	}
	for i := range inv.core.rules {
		r := &inv.core.rules[i]
		s := topicStream{rule: r}
		if r.Family == "" {
			s.topic = r.Pattern
		}
		first := slices.IndexFunc(inv.core.rules, func(other topics.Rule) bool { return other.Pattern == r.Pattern })
		if i == first && (builtin || configured(inv.core, r)) && (r.Family != "" || ValidTopic(r.Pattern) == nil) && !met[pair{s.topic, r.StreamName(s.topic)}] {
			all = append(all, s)
		}
	}
	return all
}

// leftOver finds streams of families that no rule names any more, although they take topics of
// others.
func (inv *inventory) leftOver() (changes []TopicChange) {
	for _, name := range inv.names() {
		if c := inv.forsaken(inv.byName[name]); c != nil {
			changes = append(changes, *c)
		}
	}
	return changes
}

// forsaken is what is to be said of a stream of the bus that has no rule, nil for others.
func (inv *inventory) forsaken(info *natsjs.StreamInfo) *TopicChange {
	name, pattern := info.Config.Name, info.Config.Metadata[metaPattern]
	if pattern == "" || inv.recognise(info).rule != nil {
		return nil
	}
	return &TopicChange{
		Stream: name, Rule: pattern, Field: fieldFamily, Have: name, Want: "none", Kind: ChangeImpossible,
		Err: fmt.Errorf("no rule names the family any more, and its stream prevents streams for topics of %s; restore the rule, or delete the stream and its events", pattern),
	}
}

// overlap says which other stream takes some of the subjects.
func (inv *inventory) overlap(name string, subjects []string) error {
	for _, other := range inv.names() {
		if other == name {
			continue
		}
		for _, theirs := range inv.byName[other].Config.Subjects {
			for _, own := range subjects {
				if overlap(own, theirs) {
					return fmt.Errorf("stream %s already stores %s, and streams must not share subjects; delete that stream, or change the rule", other, theirs)
				}
			}
		}
	}
	return nil
}

// bucket is the stream of the bucket that a topic has or would have; nil when it has none.
func (inv *inventory) bucket(topic string) (name string, info *natsjs.StreamInfo) {
	name = streams.NewBucket(topic).Stream
	return name, inv.byName[name]
}

// configured reports whether the rule is one of Config.Topics. A built-in one with the same pattern
// is never used.
func configured(c *core, r *topics.Rule) bool {
	return slices.ContainsFunc(c.cfg.Topics, func(own topics.Rule) bool { return own.Pattern == r.Pattern })
}

// overlap reports whether there are subjects that both patterns take.
func overlap(a, b string) bool {
	p, o := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; i < len(p) && i < len(o); i++ {
		switch {
		case p[i] == ">" || o[i] == ">":
			return true
		case p[i] != "*" && o[i] != "*" && p[i] != o[i]:
			return false
		}
	}
	return len(p) == len(o)
}

// TopicStatus is the state of a stream of the bus.
type TopicStatus struct {
	// Topic is empty for the stream of a family.
	Topic  string
	Stream string
	// Rule is the pattern of the first rule that matches, or empty for a family that no rule names
	// any more.
	Rule string
	// Messages and Bytes are the content of the stream. Age is its age, 0 for none.
	Messages uint64
	Bytes    uint64
	Age      time.Duration
	// MaxBytes and MaxMsgs are the other bounds, 0 for none. OnFull is what happens at the bounds.
	MaxBytes int64
	MaxMsgs  int64
	OnFull   topics.OnFull
	// Stored is how many messages the stream has stored in all, those that are gone included.
	Stored uint64
	// First and Last are when the oldest and the newest message were stored; zero if there is none.
	First, Last time.Time
	// Compacted is set when the topic has a bucket.
	Compacted bool
	// Changes are the changes of PlanTopics for this stream.
	Changes []TopicChange
}

// Topics lists the streams of all topics and families, in order of their names.
func (a Admin) Topics(ctx context.Context) ([]TopicStatus, error) {
	b := a.bus
	inv, err := takeInventory(ctx, b.core)
	if err != nil {
		return nil, err
	}
	var all []TopicStatus
	for _, name := range inv.names() {
		info := inv.byName[name]
		status := TopicStatus{
			Stream: name, Messages: info.State.Msgs, Bytes: info.State.Bytes, Stored: info.State.LastSeq, Age: info.Config.MaxAge,
			MaxBytes: max(info.Config.MaxBytes, 0), MaxMsgs: max(info.Config.MaxMsgs, 0), OnFull: topics.OnFullDrop,
		}
		if info.State.Msgs > 0 {
			status.First, status.Last = info.State.FirstTime, info.State.LastTime
		}
		s := inv.recognise(info)
		if s.rule == nil {
			if c := inv.forsaken(info); c != nil {
				status.Changes = []TopicChange{*c}
				all = append(all, status)
			}
			continue
		}
		status.Topic, status.Rule = s.topic, s.rule.Pattern
		if k := b.streams.NewKeeping(s.rule, &info.Config); k != nil {
			status.OnFull, status.Age = topics.OnFullReject, k.Age
		}
		if s.topic != "" {
			_, bucket := inv.bucket(s.topic)
			status.Compacted = bucket != nil
		}
		if s.topic == "" || s.rule.Family == "" {
			status.Changes = inv.plan(s)
		}
		all = append(all, status)
	}
	return all, nil
}
