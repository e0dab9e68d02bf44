package jetstream

import (
	"context"
	"slices"
	"strings"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// nativeTopic is a topic as native clients find it.
type nativeTopic struct {
	name   string // "" for a family
	stream string
	// alone reports that the stream holds events of this topic only.
	alone  bool
	bucket string // the stream of its bucket; "" unless the topic is compacted
}

// nativeGroup is a consumer that native clients may pull from.
type nativeGroup struct {
	topic, group     string
	stream, consumer string
	ordered          bool // only its owner pulls from the consumer
}

// nativeMap is where the topics and groups of the bus were at one moment. It is not changed.
type nativeMap struct {
	// topics are those with a stream of their own, the families, and the topics of families that
	// have groups.
	topics []nativeTopic
	groups []nativeGroup
	// streams are the names of all streams of the account, also those that store no topic.
	streams map[string]struct{}

	named    map[string]struct{}    // topics by name
	alone    map[string]struct{}    // streams that hold events of one topic only
	families map[string]struct{}    // streams of families
	ordered  map[groupName]struct{} // groups that are ordered
}

func newNativeMap(topics []nativeTopic, groups []nativeGroup, streams map[string]struct{}) *nativeMap {
	m := &nativeMap{
		topics: topics, groups: groups, streams: streams,
		named: make(map[string]struct{}), alone: make(map[string]struct{}), families: make(map[string]struct{}), ordered: make(map[groupName]struct{}),
	}
	for _, t := range topics {
		if t.name == "" {
			m.families[t.stream] = struct{}{}
			continue
		}
		m.named[t.name] = struct{}{}
		if t.alone {
			m.alone[t.stream] = struct{}{}
		}
	}
	for _, g := range groups {
		if _, known := m.named[g.topic]; !known {
			m.named[g.topic] = struct{}{}
			m.topics = append(m.topics, nativeTopic{name: g.topic, stream: g.stream})
		}
		if g.ordered {
			m.ordered[groupName{g.topic, g.group}] = struct{}{}
		}
	}
	return m
}

// groupsNatively lists the groups of a stream: the consumers that a hub made for a group, and the
// pull consumers that native clients made under the name of a group. A consumer that may get events
// of other topics than the one that it names is no group.
//
// complete is false if nothing is known of some consumers, as their leaders did not answer.
func (a *access) groupsNatively(ctx context.Context, t *nativeTopic) (groups []nativeGroup, complete bool, err error) {
	complete = true
	for page, err := range consumerPages(ctx, a.core, t.stream, "", 0) {
		if err != nil {
			return nil, false, err
		}
		complete = complete && len(page.missing) == 0
		for _, info := range page.consumers {
			if info.Config.DeliverSubject != "" {
				continue
			}
			topic, group := info.Config.Metadata[native.MetaTopic], info.Config.Metadata[native.MetaGroup]
			if group == "" && t.alone && info.Config.Durable != "" {
				topic, group = t.name, tokenKey(info.Name)
				if objectName(group) != info.Name {
					continue
				}
			}
			if ValidTopic(topic) == nil && ValidGroup(group) == nil && t.gives(topic, &info.Config) {
				groups = append(groups, nativeGroup{topic, group, t.stream, info.Name, slotsOf(info) > 0})
			}
		}
	}
	return groups, complete, nil
}

// mayBeGroup reports whether a consumer of that name may be a group. Names of groups have their
// capitals escaped, by = and two digits.
func mayBeGroup(consumer string) bool {
	for i := 0; i < len(consumer); i++ {
		switch c := consumer[i]; {
		case c == '=':
			i += 2
		case 'A' <= c && c <= 'Z':
			return false
		}
	}
	return true
}

// gives reports whether a consumer of the stream gets events of the topic only.
func (t *nativeTopic) gives(topic string, cfg *natsjs.ConsumerConfig) bool {
	if t.name != "" {
		return topic == t.name
	}
	filters := cfg.FilterSubjects
	if cfg.FilterSubject != "" {
		filters = []string{cfg.FilterSubject}
	}
	other := func(s string) bool { return s != plainSubject(topic) && s != keyedPattern(topic) }
	return len(filters) > 0 && !slices.ContainsFunc(filters, other)
}

// planNatively returns a topic that no stream of its own stores, as a hub would make it. free is
// false if its stream would have the name of another stream, which exists or which a rule wants.
func (a *access) planNatively(topic string, known *nativeMap) (t nativeTopic, free bool) {
	r := a.rules.Of(topic)
	t = nativeTopic{name: topic, stream: r.StreamName(topic), alone: r.Family == ""}
	_, exists := known.streams[t.stream]
	if !t.alone {
		_, family := known.families[t.stream]
		return t, !exists || family
	}
	if r.Compaction {
		t.bucket = streams.NewBucket(topic).Stream
		if _, taken := known.streams[t.bucket]; taken {
			t.bucket = ""
		}
	}
	return t, !exists && a.familyOf(t.stream) == nil
}

// consumerNatively is the name of the consumer that a group has until it is moved.
func (t *nativeTopic) consumerNatively(group string) string {
	return (&streams.Topic{Name: t.name, Stream: &streams.Stream{Family: !t.alone}}).ConsumerName(group)
}

// subjectsOf returns the subjects of the events of all topics that a pattern of a policy matches.
// The subjects are exact for topics of up to depth segments; whole reports whether there are no
// others. A topic has at most maxSegments segments. Beyond maxVariants, there are no subjects.
func subjectsOf(pattern string, depth int) (subjects []string, whole bool) {
	whole = true
	var expand func(done, left []string)
	expand = func(done, left []string) {
		if len(subjects) > maxVariants {
			return
		}
		for len(left) > 0 && left[0] != "**" {
			done, left = append(slices.Clip(done), left[0]), left[1:]
		}
		switch {
		case len(done) > depth:
			whole = whole && depth >= maxSegments
		case len(left) == 0:
			subjects = append(subjects, strings.Join(done, "."))
		case len(left) == 1:
			if len(done) > 0 {
				subjects = append(subjects, strings.Join(done, "."))
			}
			subjects = append(subjects, strings.Join(append(slices.Clip(done), ">"), "."))
		default:
			for len(done) <= depth {
				expand(done, left[1:])
				done = append(slices.Clip(done), "*")
			}
			whole = whole && depth >= maxSegments
		}
	}
	expand(nil, strings.Split(pattern, "."))
	if len(subjects) > maxVariants {
		return nil, false
	}
	all := make([]string, 0, 2*len(subjects))
	for _, s := range subjects {
		all = append(all, plainSubject(s), keyedPattern(s))
	}
	return all, whole
}

// maxVariants bounds how often a pattern with several ** is written out.
const maxVariants = 1_000

// maxSegments is the most segments of a topic: each takes a byte at least, and a dot.
const maxSegments = (maxTopicLen + len(native.DeadLetterPrefix) + 1) / 2
