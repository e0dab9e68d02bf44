package streams

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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

// Stream is one JetStream stream as this hub knows it.
type Stream struct {
	Name   string
	Family bool // it holds, or may hold, other topics too
	// Created tells a stream from one of the same name that was made later.
	Created time.Time
	// Deleted is set when this hub is told of the mark of the stream's deletion, and has members
	// on the stream.
	Deleted atomic.Bool
	// Keep is not nil when the topic rejects.
	Keep *keeping
	// Headroom is that of its storage, of which an event takes the room of copies events.
	Headroom *headroom
	Copies   int64
	// Slots bounds the unconfirmed publishes.
	Slots chan struct{}
	// Room is how many consumers it may have before clients can make no more groups.
	Room int
	// Ready is set, per connection of the pool, once a publish was confirmed: until then the first
	// one goes alone.
	Ready []atomic.Bool
	// Recent are ids of its last events; of a stream with one topic only.
	Recent *recentIDs
}

// Topic is one topic as this hub knows it. It is immutable but for what stream holds.
type Topic struct {
	Name    string
	Stream  *Stream
	Subject string
	keyed   string // "." + name, to be put behind keyed.<key>
	Obs     event.TopicObserver

	Bucket     *bucket // nil unless the topic is compacted
	Dead       bool    // it is one of dead letters
	PutBack    bool    // it is the copies that were put back to one group
	MaxPayload int     // in bytes
	Schemas    bool    // the rule asks for schemas
	Source     string  // of the headers of a CloudEvent that publishes add; "": they add none
	// Complete reads the rest of a stored message; nil: there is none.
	Complete func(e *event.Event, h nats.Header)
	// Gates are what publishing keeps of the topic, made by Hooks.Gates; nil for reads.
	Gates any
}

// Filters select the topic's events in its stream; none where the stream has no other topic.
func (t *Topic) Filters() []string {
	if !t.Stream.Family {
		return nil
	}
	return native.Filters(t.Name)
}

// SubjectFor returns the subject of events of a key, or of those without one.
func (t *Topic) SubjectFor(key string) string {
	if key == "" {
		return t.Subject
	}
	return "keyed." + native.KeyToken(key) + t.keyed
}

// topicTable holds the topics that this hub knows.
type topicTable struct {
	mu      sync.RWMutex
	byName  map[string]*Topic
	streams map[string]*Stream
	making  map[string]chan struct{} // closed when the maker is done
	gone    map[string]int64         // when a stream was found missing; see SettleGone
	read    map[string]readTopic     // see Readable
}

// keep remembers a topic. There are at most twice limit: those with a stream of their own are
// counted when they are made, and one of a family makes room for another, for it costs nothing to
// look up again. mu is held.
func (k *topicTable) keep(t *Topic, limit int) {
	if len(k.byName) >= 2*limit {
		for name, old := range k.byName {
			if old.Stream.Family {
				delete(k.byName, name)
				break
			}
		}
	}
	k.byName[t.Name] = t
}

// SettleGone is how long a stream that was deleted stays away before this hub creates it again: the
// server answers a deletion before it has removed the files, and a stream made meanwhile would lose
// its own.
const SettleGone = 500 * time.Millisecond

// maxGone bounds topicTable.gone.
const maxGone = 1_000

// AwaitGone waits until a stream that was deleted a moment ago may be made again.
func (s *Streams) AwaitGone(ctx context.Context, stream string) error {
	s.topics.mu.Lock()
	since, known := s.topics.gone[stream]
	left := SettleGone - time.Duration(s.Clock.Now()-since)
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

// Met returns the topics that this hub has met, in no order.
func (s *Streams) Met() []*Topic {
	s.topics.mu.RLock()
	defer s.topics.mu.RUnlock()
	return slices.Collect(maps.Values(s.topics.byName))
}

// All returns the streams of topics that this hub has met, in no order.
func (s *Streams) All() []*Stream {
	s.topics.mu.RLock()
	defer s.topics.mu.RUnlock()
	return slices.Collect(maps.Values(s.topics.streams))
}

// Stream returns a stream of topics that this hub has met, or nil.
func (s *Streams) Stream(name string) *Stream {
	s.topics.mu.RLock()
	defer s.topics.mu.RUnlock()
	return s.topics.streams[name]
}

// Missing notes that a stream was found missing, so that it is not made again at once.
func (s *Streams) Missing(stream string) {
	s.topics.mu.Lock()
	defer s.topics.mu.Unlock()
	s.topics.missing(stream, s.Clock.Now())
}

// Known returns a topic that this hub has met.
func (s *Streams) Known(topic string) *Topic {
	s.topics.mu.RLock()
	defer s.topics.mu.RUnlock()
	return s.topics.byName[topic]
}

// Topic returns the topic, and makes it if it does not exist and client may make one more.
func (s *Streams) Topic(ctx context.Context, name, client string) (*Topic, error) {
	if t := s.Known(name); t != nil {
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
			if !s.Conn.BeginWork() {
				s.topics.mu.Unlock()
				return nil, event.ErrClosed
			}
			wait = make(chan struct{})
			s.topics.making[name] = wait
			s.topics.mu.Unlock()
			t, err := s.makeTopic(ctx, name, client)
			s.Conn.EndWork()
			s.topics.mu.Lock()
			if err == nil {
				s.topics.keep(t, s.Limits.Topics)
				s.Obs.Gauge(event.GaugeTopics, float64(len(s.topics.byName)))
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

// Existing returns the topic if its stream exists, and makes nothing. It returns ErrNotFound
// otherwise.
func (s *Streams) Existing(ctx context.Context, name string) (*Topic, error) {
	if t := s.Known(name); t != nil {
		return t, nil
	}
	if err := event.ValidTopic(name); err != nil {
		return nil, err
	}
	rule := s.Rules.Of(name)
	info, err := s.Conn.FindStream(ctx, rule.StreamName(name))
	if errors.Is(err, event.ErrNotFound) {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, s.Conn.Unavailable(err)
	}
	return s.NewTopic(name, info, rule, false)
}

// Bounds of what reads remember of topics that nobody uses this hub for otherwise.
const (
	readTopics    = 1_000
	readTopicsFor = 10 * time.Second
)

// readTopic is a topic that was met by a read.
type readTopic struct {
	*Topic
	since int64
}

// Readable is Existing for reads that need no more of the stream than its name: it remembers topics
// for a moment, so that one of their keys is read in one round trip.
func (s *Streams) Readable(ctx context.Context, name string) (*Topic, error) {
	now := s.Clock.Now()
	s.topics.mu.RLock()
	t, met := s.topics.byName[name], s.topics.read[name]
	s.topics.mu.RUnlock()
	if t != nil {
		return t, nil
	}
	if met.Topic != nil && now-met.since < int64(readTopicsFor) {
		return met.Topic, nil
	}
	t, err := s.Existing(ctx, name)
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

// NewTopic refuses a stream that only has the name: what is in it is not the bus's to show. Reads
// do not keep what they meet, so that they cannot use the limit up.
func (s *Streams) NewTopic(name string, info *natsjs.StreamInfo, rule *topics.Rule, keep bool) (*Topic, error) {
	own := []string{native.Subject(name, ""), native.KeyedPattern(name)}
	for _, subject := range own {
		if !slices.ContainsFunc(info.Config.Subjects, func(pattern string) bool { return Covers(pattern, subject) }) {
			return nil, &event.Error{Code: event.CodeBadTopic, Msg: "a stream with the name of this topic exists that is not the event bus's: choose another topic"}
		}
	}
	s.topics.mu.Lock()
	found := s.topics.streams[info.Config.Name]
	if old := found; found == nil || !found.Created.Equal(native.StreamMade(info)) {
		found = &Stream{
			Name: info.Config.Name, Family: native.IsFamily(name, info.Config.Name, info.Config.Subjects), Created: native.StreamMade(info), Room: s.RoomFor(&info.Config),
			Keep: s.NewKeeping(rule, &info.Config), Headroom: s.Headrooms.Of(info.Config.Storage), Copies: int64(max(info.Config.Replicas, 1)),
			Slots: make(chan struct{}, s.Limits.PublishInFlight), Ready: make([]atomic.Bool, len(s.Conn.Links)), Recent: &recentIDs{count: s.Recent},
		}
		if keep {
			s.topics.streams[found.Name] = found // makeTopic has looked at the limit
			if old != nil {
				old.Recent.Drop()
			}
		}
	}
	s.topics.mu.Unlock()
	t := &Topic{
		Name: name, Stream: found, Subject: native.Subject(name, ""), keyed: "." + name, Obs: event.NopObserver{},
		MaxPayload: s.Conn.MaxPayload, Dead: IsDead(name), Schemas: rule.Schema.Asked(),
	}
	if keep {
		t.Obs = s.Obs.Topic(name) // reads count nothing, and must not fill the table of labels
	}
	if rule.Compaction {
		t.Bucket = NewBucket(name)
	}
	if rule.CloudEvents.Headers {
		t.Source = rule.CloudEvents.Source
	}
	if rule.MaxPayload > 0 {
		t.MaxPayload = min(t.MaxPayload, rule.MaxPayload)
	}
	return t, nil
}

func (s *Streams) makeTopic(ctx context.Context, name, client string) (*Topic, error) {
	rule := s.Rules.Of(name)
	streamName := rule.StreamName(name)
	if err := s.TooManyStreams(streamName); err != nil {
		return nil, err
	}
	info, err := s.Conn.FindStream(ctx, streamName)
	switch {
	case err == nil:
		s.Reserved.Drop(streamName)
		s.Hooks.Drifted(name, rule, info)
		return s.meetTopic(ctx, name, info, rule, false)
	case !errors.Is(err, event.ErrNotFound):
		return nil, s.Conn.Unavailable(err)
	}
	if conn.Rationed(client) && s.Headrooms.Of(StreamConfig(rule, name, s.Replicas, s.Memory).Storage).Low.Load() {
		s.Obs.LimitReached("storage_reserve")
		return nil, StorageLow(nil)
	}
	if !s.Reserved.Has(streamName) {
		if err := s.newTopics.Take(client); err != nil {
			return nil, err
		}
	}
	undo, err := s.Hooks.Note(ctx, name, streamName, client)
	if err != nil {
		return nil, err
	}
	info, err = s.CreateStream(ctx, name, rule)
	if err != nil {
		undo(ctx)
		return nil, err
	}
	s.Reserved.Drop(streamName)
	return s.meetTopic(ctx, name, info, rule, true)
}

// meetTopic is the topic of a stream that exists, with its bucket. made says that the stream has
// just been made.
func (s *Streams) meetTopic(ctx context.Context, name string, info *natsjs.StreamInfo, rule *topics.Rule, made bool) (*Topic, error) {
	t, err := s.NewTopic(name, info, rule, true)
	if err != nil {
		return nil, err
	}
	var entries uint64
	if t.Bucket != nil {
		if entries, err = s.meetBucket(ctx, t, &info.Config, made); err != nil {
			return nil, err
		}
	}
	t.Gates = s.Hooks.Gates(ctx, t, rule, entries)
	return t, nil
}

// CreateStream goes on to its end when the caller gives up: others may wait for the same topic.
func (s *Streams) CreateStream(ctx context.Context, topic string, rule *topics.Rule) (*natsjs.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	cfg := StreamConfig(rule, topic, s.Replicas, s.Memory)
	if err := s.AwaitGone(ctx, cfg.Name); err != nil {
		return nil, s.Conn.Unavailable(err)
	}
	if _, err := s.Hooks.FinishDeletion(ctx, cfg.Name); err != nil {
		return nil, s.Conn.Unavailable(err)
	}
	cfg.MaxConsumers = s.Limits.StreamGroups + ownConsumers
	made, err := s.Conn.JS.CreateStream(ctx, cfg)
	if refused, ok := errors.AsType[*natsjs.APIError](err); ok && refused.ErrorCode == natsjs.JSErrCodeMaximumConsumersLimit {
		cfg.MaxConsumers = -1 // the account has a smaller limit
		made, err = s.Conn.JS.CreateStream(ctx, cfg)
	}
	if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
		// Another hub made it at the same moment, with other settings: theirs count.
		info, ferr := s.Conn.FindStream(ctx, cfg.Name)
		if ferr != nil {
			return nil, s.Conn.Unavailable(ferr)
		}
		s.Hooks.Drifted(topic, rule, info)
		return info, nil
	}
	if err != nil {
		return nil, s.notMade(fmt.Errorf("jetstream: create stream %s for topic %s: %w", cfg.Name, topic, err))
	}
	s.Log.InfoContext(ctx, "topic made", slog.String("topic", topic), slog.String("stream", cfg.Name))
	return made.CachedInfo(), nil
}

// Forget drops what is known of a stream that answered no more, so that the next use looks again.
func (s *Streams) Forget(lost *Stream) {
	s.topics.mu.Lock()
	defer s.topics.mu.Unlock()
	if s.topics.streams[lost.Name] == lost {
		delete(s.topics.streams, lost.Name)
		lost.Recent.Drop()
		s.topics.missing(lost.Name, s.Clock.Now())
	}
	for name, t := range s.topics.byName {
		if t.Stream == lost {
			delete(s.topics.byName, name)
		}
	}
}

// ForgetBucket drops what is known of a topic whose bucket is gone, so that the next use makes it
// anew.
func (s *Streams) ForgetBucket(t *Topic) {
	s.topics.mu.Lock()
	defer s.topics.mu.Unlock()
	s.topics.missing(t.Bucket.Stream, s.Clock.Now())
	if s.topics.byName[t.Name] == t {
		delete(s.topics.byName, t.Name)
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
func (s *Streams) notMade(err error) error {
	refused, ok := errors.AsType[*natsjs.APIError](err)
	if ok && StoreFull(refused.ErrorCode, refused.Description) {
		return StorageLow(fmt.Errorf("%w: %w", event.ErrNoStream, err))
	}
	if !ok || conn.Passing(err) {
		return s.Conn.Unavailable(err)
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

// RoomFor returns how many consumers a stream may have before clients can make no more groups on
// it.
func (s *Streams) RoomFor(cfg *natsjs.StreamConfig) int {
	switch {
	case cfg.MaxConsumers > 0:
		return min(s.Limits.StreamGroups, max(cfg.MaxConsumers-min(ownConsumers, cfg.MaxConsumers/10), 1))
	case s.Unbounded:
		return s.Limits.StreamGroups
	}
	return min(s.Limits.StreamGroups, serverConsumers-ownConsumersThere)
}

// Event decodes a stored message.
func (t *Topic) Event(m *conn.StoredMsg) *event.Event {
	_, key, _ := native.ParseSubject(m.Subject)
	e := &event.Event{Topic: t.Name, Key: key, Payload: m.Data, Stream: t.Stream.Name, Sequence: m.Seq, StoredAt: m.Time.UnixNano()}
	e.ReadHeader(m.Header)
	if t.Complete != nil {
		t.Complete(e, m.Header)
	}
	return e
}

// ConsumerName is the name of a group's first consumer.
func (t *Topic) ConsumerName(group string) string {
	return native.ConsumerName(t.Name, group, t.Stream.Family)
}

// FreshTopic is the topic with the stream as it is now: generations count only for the very stream
// that they were made for, and what this hub knows may be of one that was deleted and created again
// meanwhile.
func (s *Streams) FreshTopic(ctx context.Context, topic, client string) (*Topic, natsjs.StreamState, error) {
	for range 3 {
		t, err := s.Topic(ctx, topic, client)
		if err != nil {
			return nil, natsjs.StreamState{}, err
		}
		info, err := s.Conn.FindStream(ctx, t.Stream.Name)
		if err == nil && native.StreamMade(info).Equal(t.Stream.Created) {
			return t, info.State, nil
		}
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return nil, natsjs.StreamState{}, s.Conn.Unavailable(err)
		}
		s.Forget(t.Stream)
	}
	return nil, natsjs.StreamState{}, &event.Error{Code: event.CodeSubscribeFailed, Msg: "the topic is being deleted and made again and again: try later"}
}

// FreshExisting is FreshTopic for those who read: it makes nothing, and returns ErrNotFound
// instead.
func (s *Streams) FreshExisting(ctx context.Context, topic string) (*Topic, natsjs.StreamState, error) {
	t, err := s.Existing(ctx, topic)
	if err != nil {
		return nil, natsjs.StreamState{}, err
	}
	info, err := s.Conn.FindStream(ctx, t.Stream.Name)
	switch {
	case errors.Is(err, event.ErrNotFound):
		s.Forget(t.Stream)
		return nil, natsjs.StreamState{}, event.ErrNotFound
	case err != nil:
		return nil, natsjs.StreamState{}, s.Conn.Unavailable(err)
	case !native.StreamMade(info).Equal(t.Stream.Created):
		s.Forget(t.Stream)
		if t, err = s.Existing(ctx, topic); err != nil {
			return nil, natsjs.StreamState{}, err
		}
	}
	return t, info.State, nil
}
