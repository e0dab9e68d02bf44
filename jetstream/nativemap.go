package jetstream

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// nativeListWait bounds one listing of streams and consumers for native clients.
const nativeListWait = 8 * time.Second

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

// nativeMap is where the topics and groups of the bus were at one moment.
type nativeMap struct {
	topics []nativeTopic
	groups []nativeGroup
	// streams are the names of all streams of the account, also those that store no topic.
	streams map[string]struct{}
}

// family reports whether the stream is that of a family.
func (m *nativeMap) family(stream string) bool {
	return slices.ContainsFunc(m.topics, func(t nativeTopic) bool { return t.stream == stream && t.name == "" })
}

// nativeMaps lists topics and groups for callers that need a list that is no older than their
// question. One listing runs at a time. Callers that come meanwhile share the next one, so that
// many clients that connect at once cost no more than a few.
type nativeMaps struct {
	bus *Bus

	mu      sync.Mutex
	running bool
	next    *nativeListing // not begun; nil: nobody waits
}

// nativeListing is one listing, and what it found once done is closed.
type nativeListing struct {
	done  chan struct{}
	found *nativeMap
	err   error
}

// get returns a list that was begun after the call.
func (n *nativeMaps) get(ctx context.Context) (*nativeMap, error) {
	if n.bus.closing.Load() {
		return nil, ErrClosed
	}
	n.mu.Lock()
	if n.next == nil {
		n.next = &nativeListing{done: make(chan struct{})}
	}
	listing := n.next
	if !n.running {
		n.running = true
		n.bus.background(n.run)
	}
	n.mu.Unlock()
	select {
	case <-listing.done:
		return listing.found, listing.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// run lists as long as somebody waits.
func (n *nativeMaps) run() {
	for {
		n.mu.Lock()
		listing := n.next
		n.next = nil
		n.running = listing != nil
		n.mu.Unlock()
		if listing == nil {
			return
		}
		ctx, cancel := context.WithTimeout(n.bus.ctx, nativeListWait)
		listing.found, listing.err = n.bus.mapNatively(ctx)
		cancel()
		close(listing.done)
	}
}

// mapNatively asks the server for all topics and groups.
func (b *Bus) mapNatively(ctx context.Context) (*nativeMap, error) {
	inv, err := b.takeInventory(ctx)
	if err != nil {
		return nil, err
	}
	found := &nativeMap{streams: make(map[string]struct{}, len(inv.streams))}
	for _, name := range inv.names() {
		found.streams[name] = struct{}{}
		s := inv.recognise(inv.streams[name])
		if s.rule == nil {
			continue
		}
		t := nativeTopic{name: s.topic, stream: name, alone: s.topic != ""}
		if t.alone {
			own := []string{plainSubject(s.topic), keyedPattern(s.topic)}
			for _, subject := range s.info.Config.Subjects {
				t.alone = t.alone && slices.Contains(own, subject)
			}
			if _, info := inv.bucket(s.topic); info != nil && s.rule.Compaction {
				t.bucket = info.Config.Name
			}
		}
		found.topics = append(found.topics, t)
	}
	lists := make([][]nativeGroup, len(found.topics))
	err = concurrently(len(found.topics), func(i int) (err error) {
		lists[i], err = b.groupsNatively(ctx, &found.topics[i])
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("jetstream: list groups for native clients: %w", err)
	}
	found.groups = slices.Concat(lists...)
	return found, nil
}

// groupsNatively lists the groups of a stream: the consumers that a hub made for a group, and the
// pull consumers that native clients made under the name of a group. A consumer that may get events
// of other topics than the one that it names is no group.
func (b *Bus) groupsNatively(ctx context.Context, t *nativeTopic) (groups []nativeGroup, err error) {
	for page, err := range b.consumerPages(ctx, t.stream, "", 0) {
		if err != nil {
			return nil, err
		}
		for _, info := range page.consumers {
			if info.Config.DeliverSubject != "" {
				continue
			}
			topic, group := info.Config.Metadata[metaTopic], info.Config.Metadata[metaGroup]
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
	return groups, nil
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
func (b *Bus) planNatively(topic string, known *nativeMap) (t nativeTopic, free bool) {
	r := b.rule(topic)
	t = nativeTopic{name: topic, stream: r.streamName(topic), alone: r.Family == ""}
	_, exists := known.streams[t.stream]
	if !t.alone {
		return t, !exists || known.family(t.stream)
	}
	if r.Compaction {
		t.bucket = newBucket(topic).stream
		if _, taken := known.streams[t.bucket]; taken {
			t.bucket = ""
		}
	}
	return t, !exists && b.familyOf(t.stream) == nil
}

// consumerNatively is the name of the consumer that a group has until it is moved.
func (t *nativeTopic) consumerNatively(group string) string {
	return (&topicInfo{name: t.name, stream: &stream{family: !t.alone}}).consumerName(group)
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
const maxSegments = (maxTopicLen + len(dlqPrefix) + 1) / 2
