package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// stream is one JetStream stream as this hub knows it.
type stream struct {
	name   string
	family bool // it holds, or may hold, other topics too
	// created tells a stream from one of the same name that was made later.
	created time.Time
	// deleted is set when this hub is told of the mark of the stream's deletion, and has members
	// on the stream.
	deleted atomic.Bool
	// keep is not nil when the topic rejects.
	keep *keeping
	// headroom is that of its storage, of which an event takes the room of copies events.
	headroom *headroom
	copies   int64
	// slots bounds the unconfirmed publishes.
	slots chan struct{}
	// room is how many consumers it may have before clients can make no more groups.
	room int
	// ready is set, per connection of the pool, once a publish was confirmed: until then the first
	// one goes alone.
	ready []atomic.Bool
	// recent are ids of its last events; of a stream with one topic only.
	recent *recentIDs
}

// topicInfo is one topic as this hub knows it. It is immutable but for what stream holds.
type topicInfo struct {
	name    string
	stream  *stream
	subject string
	keyed   string // "." + name, to be put behind keyed.<key>
	obs     event.TopicObserver

	bucket     *bucket // nil unless the topic is compacted
	dead       bool    // it is one of dead letters
	putBack    bool    // it is the copies that were put back to one group
	maxPayload int     // in bytes
	schemas    bool    // the rule asks for schemas
	source     string  // of the headers of a CloudEvent that publishes add; "": they add none
	// complete reads the rest of a stored message; nil: there is none.
	complete func(e *event.Event, h nats.Header)
	// gates are what publishing keeps of the topic, made by streamHooks.gates; nil for reads.
	gates any
}

// filters select the topic's events in its stream; none where the stream has no other topic.
func (t *topicInfo) filters() []string {
	if !t.stream.family {
		return nil
	}
	return native.Filters(t.name)
}

func (t *topicInfo) subjectFor(key string) string {
	if key == "" {
		return t.subject
	}
	return "keyed." + native.KeyToken(key) + t.keyed
}

// topicTable holds the topics that this hub knows.
type topicTable struct {
	mu      sync.RWMutex
	byName  map[string]*topicInfo
	streams map[string]*stream
	making  map[string]chan struct{} // closed when the maker is done
	gone    map[string]int64         // when a stream was found missing; see settleGone
	read    map[string]readTopic     // see readable
}

// keep remembers a topic. There are at most twice limit: those with a stream of their own are
// counted when they are made, and one of a family makes room for another, for it costs nothing to
// look up again. mu is held.
func (k *topicTable) keep(t *topicInfo, limit int) {
	if len(k.byName) >= 2*limit {
		for name, old := range k.byName {
			if old.stream.family {
				delete(k.byName, name)
				break
			}
		}
	}
	k.byName[t.name] = t
}

// settleGone is how long a stream that was deleted stays away before this hub creates it again: the
// server answers a deletion before it has removed the files, and a stream made meanwhile would lose
// its own.
const settleGone = 500 * time.Millisecond

// maxGone bounds topicTable.gone.
const maxGone = 1_000

// awaitGone waits until a stream that was deleted a moment ago may be made again.
func (s *streams) awaitGone(ctx context.Context, stream string) error {
	s.topics.mu.Lock()
	since, known := s.topics.gone[stream]
	left := settleGone - time.Duration(s.clock.Now()-since)
	if left <= 0 {
		delete(s.topics.gone, stream)
	}
	s.topics.mu.Unlock()
	if !known || left <= 0 {
		return nil
	}
	select {
	case <-time.After(left):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// known returns a topic that this hub has met.
func (s *streams) known(topic string) *topicInfo {
	s.topics.mu.RLock()
	defer s.topics.mu.RUnlock()
	return s.topics.byName[topic]
}

// topic returns the topic, and makes it if it does not exist and client may make one more.
func (s *streams) topic(ctx context.Context, name, client string) (*topicInfo, error) {
	if t := s.known(name); t != nil {
		return t, nil
	}
	if err := event.ValidTopic(name); err != nil {
		return nil, err
	}
	for {
		s.topics.mu.Lock()
		if t := s.topics.byName[name]; t != nil {
			s.topics.mu.Unlock()
			return t, nil
		}
		wait, busy := s.topics.making[name]
		if !busy {
			// a server that stops while it makes a stream leaves half of one
			if !s.conn.BeginWork() {
				s.topics.mu.Unlock()
				return nil, event.ErrClosed
			}
			wait = make(chan struct{})
			s.topics.making[name] = wait
			s.topics.mu.Unlock()
			t, err := s.makeTopic(ctx, name, client)
			s.conn.EndWork()
			s.topics.mu.Lock()
			if err == nil {
				s.topics.keep(t, s.limits.Topics)
				s.obs.Gauge(event.GaugeTopics, float64(len(s.topics.byName)))
			}
			delete(s.topics.making, name)
			s.topics.mu.Unlock()
			close(wait)
			return t, err
		}
		s.topics.mu.Unlock()
		select {
		case <-wait: // another caller made it, or failed: look again
		case <-ctx.Done():
			return nil, &event.Error{Code: event.CodeOverloaded, Msg: "the topic is still being made: try again", Err: ctx.Err()}
		}
	}
}

// existing returns the topic if its stream exists, and makes nothing. It returns ErrNotFound
// otherwise.
func (s *streams) existing(ctx context.Context, name string) (*topicInfo, error) {
	if t := s.known(name); t != nil {
		return t, nil
	}
	if err := event.ValidTopic(name); err != nil {
		return nil, err
	}
	rule := s.rules.Of(name)
	info, err := s.conn.FindStream(ctx, rule.StreamName(name))
	if errors.Is(err, event.ErrNotFound) {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, s.conn.Unavailable(err)
	}
	return s.newTopic(name, info, rule, false)
}

// Bounds of what reads remember of topics that nobody uses this hub for otherwise.
const (
	readTopics    = 1_000
	readTopicsFor = 10 * time.Second
)

// readTopic is a topic that was met by a read.
type readTopic struct {
	*topicInfo
	since int64
}

// readable is existing for reads that need no more of the stream than its name: it remembers topics
// for a moment, so that one of their keys is read in one round trip.
func (s *streams) readable(ctx context.Context, name string) (*topicInfo, error) {
	now := s.clock.Now()
	s.topics.mu.RLock()
	t, met := s.topics.byName[name], s.topics.read[name]
	s.topics.mu.RUnlock()
	if t != nil {
		return t, nil
	}
	if met.topicInfo != nil && now-met.since < int64(readTopicsFor) {
		return met.topicInfo, nil
	}
	t, err := s.existing(ctx, name)
	if err != nil {
		return nil, err
	}
	s.topics.mu.Lock()
	defer s.topics.mu.Unlock()
	if len(s.topics.read) >= readTopics {
		clear(s.topics.read)
	}
	s.topics.read[name] = readTopic{t, now}
	return t, nil
}

// newTopic refuses a stream that only has the name: what is in it is not the bus's to show. Reads
// do not keep what they meet, so that they cannot use the limit up.
func (s *streams) newTopic(name string, info *natsjs.StreamInfo, rule *topics.Rule, keep bool) (*topicInfo, error) {
	own := []string{native.Subject(name, ""), native.KeyedPattern(name)}
	for _, subject := range own {
		if !slices.ContainsFunc(info.Config.Subjects, func(pattern string) bool { return covers(pattern, subject) }) {
			return nil, &event.Error{Code: event.CodeBadTopic, Msg: "a stream with the name of this topic exists that is not the event bus's: choose another topic"}
		}
	}
	s.topics.mu.Lock()
	found := s.topics.streams[info.Config.Name]
	if old := found; found == nil || !found.created.Equal(native.StreamMade(info)) {
		found = &stream{
			name: info.Config.Name, family: native.IsFamily(name, info.Config.Name, info.Config.Subjects), created: native.StreamMade(info), room: s.roomFor(&info.Config),
			keep: s.newKeeping(rule, &info.Config), headroom: s.headrooms.of(info.Config.Storage), copies: int64(max(info.Config.Replicas, 1)),
			slots: make(chan struct{}, s.limits.PublishInFlight), ready: make([]atomic.Bool, len(s.conn.Links)), recent: &recentIDs{count: s.recent},
		}
		if keep {
			s.topics.streams[found.name] = found // makeTopic has looked at the limit
			if old != nil {
				old.recent.drop()
			}
		}
	}
	s.topics.mu.Unlock()
	t := &topicInfo{
		name: name, stream: found, subject: native.Subject(name, ""), keyed: "." + name, obs: event.NopObserver{},
		maxPayload: s.conn.MaxPayload, dead: isDead(name), schemas: rule.Schema.Asked(),
	}
	if keep {
		t.obs = s.obs.Topic(name) // reads count nothing, and must not fill the table of labels
	}
	if rule.Compaction {
		t.bucket = newBucket(name)
	}
	if rule.CloudEvents.Headers {
		t.source = rule.CloudEvents.Source
	}
	if rule.MaxPayload > 0 {
		t.maxPayload = min(t.maxPayload, rule.MaxPayload)
	}
	return t, nil
}

func (s *streams) makeTopic(ctx context.Context, name, client string) (*topicInfo, error) {
	rule := s.rules.Of(name)
	streamName := rule.StreamName(name)
	if err := s.tooManyStreams(streamName); err != nil {
		return nil, err
	}
	info, err := s.conn.FindStream(ctx, streamName)
	switch {
	case err == nil:
		s.reserved.drop(streamName)
		s.streamHooks.met(name, rule, info)
		return s.meetTopic(ctx, name, info, rule, false)
	case !errors.Is(err, event.ErrNotFound):
		return nil, s.conn.Unavailable(err)
	}
	if conn.Rationed(client) && s.headrooms.of(streamConfig(rule, name, s.replicas, s.memory).Storage).low.Load() {
		s.obs.LimitReached("storage_reserve")
		return nil, storageLow(nil)
	}
	if !s.reserved.has(streamName) {
		if err := s.newTopics.Take(client); err != nil {
			return nil, err
		}
	}
	undo, err := s.streamHooks.note(ctx, name, streamName, client)
	if err != nil {
		return nil, err
	}
	info, err = s.createStream(ctx, name, rule)
	if err != nil {
		undo(ctx)
		return nil, err
	}
	s.reserved.drop(streamName)
	return s.meetTopic(ctx, name, info, rule, true)
}

// meetTopic is the topic of a stream that exists, with its bucket. made says that the stream has
// just been made.
func (s *streams) meetTopic(ctx context.Context, name string, info *natsjs.StreamInfo, rule *topics.Rule, made bool) (*topicInfo, error) {
	t, err := s.newTopic(name, info, rule, true)
	if err != nil {
		return nil, err
	}
	var entries uint64
	if t.bucket != nil {
		if entries, err = s.meetBucket(ctx, t, &info.Config, made); err != nil {
			return nil, err
		}
	}
	t.gates = s.streamHooks.gates(ctx, t, rule, entries)
	return t, nil
}

// createStream goes on to its end when the caller gives up: others may wait for the same topic.
func (s *streams) createStream(ctx context.Context, topic string, rule *topics.Rule) (*natsjs.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	cfg := streamConfig(rule, topic, s.replicas, s.memory)
	if err := s.awaitGone(ctx, cfg.Name); err != nil {
		return nil, s.conn.Unavailable(err)
	}
	if _, err := s.streamHooks.finishDeletion(ctx, cfg.Name); err != nil {
		return nil, s.conn.Unavailable(err)
	}
	cfg.MaxConsumers = s.limits.StreamGroups + ownConsumers
	made, err := s.conn.JS.CreateStream(ctx, cfg)
	if refused, ok := errors.AsType[*natsjs.APIError](err); ok && refused.ErrorCode == natsjs.JSErrCodeMaximumConsumersLimit {
		cfg.MaxConsumers = -1 // the account has a smaller limit
		made, err = s.conn.JS.CreateStream(ctx, cfg)
	}
	if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
		// Another hub made it at the same moment, with other settings: theirs count.
		info, ferr := s.conn.FindStream(ctx, cfg.Name)
		if ferr != nil {
			return nil, s.conn.Unavailable(ferr)
		}
		s.streamHooks.met(topic, rule, info)
		return info, nil
	}
	if err != nil {
		return nil, s.notMade(fmt.Errorf("jetstream: create stream %s for topic %s: %w", cfg.Name, topic, err))
	}
	s.log.InfoContext(ctx, "topic made", slog.String("topic", topic), slog.String("stream", cfg.Name))
	return made.CachedInfo(), nil
}

// forget drops what is known of a stream that answered no more, so that the next use looks again.
func (s *streams) forget(lost *stream) {
	s.topics.mu.Lock()
	defer s.topics.mu.Unlock()
	if s.topics.streams[lost.name] == lost {
		delete(s.topics.streams, lost.name)
		lost.recent.drop()
		s.topics.missing(lost.name, s.clock.Now())
	}
	for name, t := range s.topics.byName {
		if t.stream == lost {
			delete(s.topics.byName, name)
		}
	}
}

// forgetBucket drops what is known of a topic whose bucket is gone, so that the next use makes it
// anew.
func (s *streams) forgetBucket(t *topicInfo) {
	s.topics.mu.Lock()
	defer s.topics.mu.Unlock()
	s.topics.missing(t.bucket.stream, s.clock.Now())
	if s.topics.byName[t.name] == t {
		delete(s.topics.byName, t.name)
	}
}

// missing notes that a stream was found missing; mu is held.
func (k *topicTable) missing(stream string, now int64) {
	if len(k.gone) >= maxGone {
		clear(k.gone)
	}
	k.gone[stream] = now
}

// notMade wraps the failure to make a stream.
func (s *streams) notMade(err error) error {
	refused, ok := errors.AsType[*natsjs.APIError](err)
	if ok && storeFull(refused.ErrorCode, refused.Description) {
		return storageLow(fmt.Errorf("%w: %w", event.ErrNoStream, err))
	}
	if !ok || conn.Passing(err) {
		return s.conn.Unavailable(err)
	}
	code := event.CodeInternal
	if refused.Code == conn.CodeRefused { // for example: another stream has the topic's subjects
		code = event.CodeBadTopic
	}
	return &event.Error{Code: code, Msg: "the event store refuses to make this topic: an operator finds the reason in the log", Err: fmt.Errorf("%w: %w", event.ErrNoStream, err)}
}

// What a stream has room for.
const (
	// ownConsumers is how many consumers of a stream are kept for the hub itself: for its own
	// groups, and for reads.
	ownConsumers = 1_000
	// serverConsumers is how many consumers a NATS server keeps for a stream that says nothing, and
	// ownConsumersThere how many of them are kept for the hub itself.
	serverConsumers   = 1_000
	ownConsumersThere = 100
)

// roomFor returns how many consumers a stream may have before clients can make no more groups on
// it.
func (s *streams) roomFor(cfg *natsjs.StreamConfig) int {
	switch {
	case cfg.MaxConsumers > 0:
		return min(s.limits.StreamGroups, max(cfg.MaxConsumers-min(ownConsumers, cfg.MaxConsumers/10), 1))
	case s.unbounded:
		return s.limits.StreamGroups
	}
	return min(s.limits.StreamGroups, serverConsumers-ownConsumersThere)
}

// event decodes a stored message.
func (t *topicInfo) event(m *conn.StoredMsg) *event.Event {
	_, key, _ := native.ParseSubject(m.Subject)
	e := &event.Event{Topic: t.name, Key: key, Payload: m.Data, Stream: t.stream.name, Sequence: m.Seq, StoredAt: m.Time.UnixNano()}
	e.ReadHeader(m.Header)
	if t.complete != nil {
		t.complete(e, m.Header)
	}
	return e
}

// consumerName is the name of a group's first consumer.
func (t *topicInfo) consumerName(group string) string {
	return native.ConsumerName(t.name, group, t.stream.family)
}

// freshTopic is the topic with the stream as it is now: generations count only for the very stream
// that they were made for, and what this hub knows may be of one that was deleted and created again
// meanwhile.
func (s *streams) freshTopic(ctx context.Context, topic, client string) (*topicInfo, natsjs.StreamState, error) {
	for range 3 {
		t, err := s.topic(ctx, topic, client)
		if err != nil {
			return nil, natsjs.StreamState{}, err
		}
		info, err := s.conn.FindStream(ctx, t.stream.name)
		if err == nil && native.StreamMade(info).Equal(t.stream.created) {
			return t, info.State, nil
		}
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return nil, natsjs.StreamState{}, s.conn.Unavailable(err)
		}
		s.forget(t.stream)
	}
	return nil, natsjs.StreamState{}, &event.Error{Code: event.CodeSubscribeFailed, Msg: "the topic is being deleted and made again and again: try later"}
}

// freshExisting is freshTopic for those who read: it makes nothing, and returns ErrNotFound
// instead.
func (s *streams) freshExisting(ctx context.Context, topic string) (*topicInfo, natsjs.StreamState, error) {
	t, err := s.existing(ctx, topic)
	if err != nil {
		return nil, natsjs.StreamState{}, err
	}
	info, err := s.conn.FindStream(ctx, t.stream.name)
	switch {
	case errors.Is(err, event.ErrNotFound):
		s.forget(t.stream)
		return nil, natsjs.StreamState{}, event.ErrNotFound
	case err != nil:
		return nil, natsjs.StreamState{}, s.conn.Unavailable(err)
	case !native.StreamMade(info).Equal(t.stream.created):
		s.forget(t.stream)
		if t, err = s.existing(ctx, topic); err != nil {
			return nil, natsjs.StreamState{}, err
		}
	}
	return t, info.State, nil
}
