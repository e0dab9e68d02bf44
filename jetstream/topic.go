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

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/native"
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
	recent recentIDs
}

// topicInfo is one topic as this hub knows it. It is immutable but for what stream holds.
type topicInfo struct {
	name    string
	stream  *stream
	subject string
	keyed   string // "." + name, to be put behind keyed.<key>
	obs     TopicObserver

	bucket     *bucket // nil unless the topic is compacted
	keys       *keySet // of the bucket; nil for reads
	dead       bool    // it is one of dead letters
	putBack    bool    // it is the copies that were put back to one group
	derived    *derivedKeys
	maxPayload int         // in bytes
	source     string      // of the headers of a CloudEvent that publishes add; "": they add none
	schema     *schemaGate // nil: the rule asks for no schema
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
	return "keyed." + keyToken(key) + t.keyed
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
func (b *Bus) awaitGone(ctx context.Context, stream string) error {
	b.topics.mu.Lock()
	since, known := b.topics.gone[stream]
	left := settleGone - time.Duration(b.clock.now()-since)
	if left <= 0 {
		delete(b.topics.gone, stream)
	}
	b.topics.mu.Unlock()
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
func (b *Bus) known(topic string) *topicInfo {
	b.topics.mu.RLock()
	defer b.topics.mu.RUnlock()
	return b.topics.byName[topic]
}

// topic returns the topic, and makes it if it does not exist and client may make one more.
func (b *Bus) topic(ctx context.Context, name, client string) (*topicInfo, error) {
	if t := b.known(name); t != nil {
		return t, nil
	}
	if err := ValidTopic(name); err != nil {
		return nil, err
	}
	for {
		b.topics.mu.Lock()
		if t := b.topics.byName[name]; t != nil {
			b.topics.mu.Unlock()
			return t, nil
		}
		wait, busy := b.topics.making[name]
		if !busy {
			if !b.enter() { // a server that stops while it makes a stream leaves half of one
				b.topics.mu.Unlock()
				return nil, ErrClosed
			}
			wait = make(chan struct{})
			b.topics.making[name] = wait
			b.topics.mu.Unlock()
			t, err := b.makeTopic(ctx, name, client)
			b.leave()
			b.topics.mu.Lock()
			if err == nil {
				b.topics.keep(t, b.limits.Topics)
				b.obs.Gauge(GaugeTopics, float64(len(b.topics.byName)))
			}
			delete(b.topics.making, name)
			b.topics.mu.Unlock()
			close(wait)
			return t, err
		}
		b.topics.mu.Unlock()
		select {
		case <-wait: // another caller made it, or failed: look again
		case <-ctx.Done():
			return nil, &Error{Code: CodeOverloaded, Msg: "the topic is still being made: try again", Err: ctx.Err()}
		}
	}
}

// existing returns the topic if its stream exists, and makes nothing. It returns ErrNotFound
// otherwise.
func (b *Bus) existing(ctx context.Context, name string) (*topicInfo, error) {
	if t := b.known(name); t != nil {
		return t, nil
	}
	if err := ValidTopic(name); err != nil {
		return nil, err
	}
	rule := b.rule(name)
	s, err := b.findStream(ctx, rule.streamName(name))
	if errors.Is(err, ErrNotFound) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, b.unavailable(err)
	}
	return b.newTopic(name, s, rule, false)
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
func (b *Bus) readable(ctx context.Context, name string) (*topicInfo, error) {
	now := b.clock.now()
	b.topics.mu.RLock()
	t, met := b.topics.byName[name], b.topics.read[name]
	b.topics.mu.RUnlock()
	if t != nil {
		return t, nil
	}
	if met.topicInfo != nil && now-met.since < int64(readTopicsFor) {
		return met.topicInfo, nil
	}
	t, err := b.existing(ctx, name)
	if err != nil {
		return nil, err
	}
	b.topics.mu.Lock()
	defer b.topics.mu.Unlock()
	if len(b.topics.read) >= readTopics {
		clear(b.topics.read)
	}
	b.topics.read[name] = readTopic{t, now}
	return t, nil
}

// newTopic refuses a stream that only has the name: what is in it is not the bus's to show. Reads
// do not keep what they meet, so that they cannot use the limit up.
func (b *Bus) newTopic(name string, info *natsjs.StreamInfo, rule *TopicRule, keep bool) (*topicInfo, error) {
	own := []string{plainSubject(name), keyedPattern(name)}
	for _, subject := range own {
		if !slices.ContainsFunc(info.Config.Subjects, func(pattern string) bool { return covers(pattern, subject) }) {
			return nil, &Error{Code: CodeBadTopic, Msg: "a stream with the name of this topic exists that is not the event bus's: choose another topic"}
		}
	}
	b.topics.mu.Lock()
	s := b.topics.streams[info.Config.Name]
	if old := s; s == nil || !s.created.Equal(native.StreamMade(info)) {
		s = &stream{
			name: info.Config.Name, family: native.IsFamily(name, info.Config.Name, info.Config.Subjects), created: native.StreamMade(info), room: b.roomFor(&info.Config),
			keep: b.newKeeping(rule, &info.Config), headroom: b.headrooms.of(info.Config.Storage), copies: int64(max(info.Config.Replicas, 1)),
			slots: make(chan struct{}, b.limits.PublishInFlight), ready: make([]atomic.Bool, len(b.links)),
		}
		if keep {
			b.topics.streams[s.name] = s // makeTopic has looked at the limit
			if old != nil {
				b.ids.drop(old)
			}
		}
	}
	b.topics.mu.Unlock()
	t := &topicInfo{
		name: name, stream: s, subject: plainSubject(name), keyed: "." + name, obs: nopObserver{},
		maxPayload: b.maxPayload, dead: isDead(name),
	}
	if keep {
		t.obs = b.obs.Topic(name) // reads count nothing, and must not fill the table of labels
	}
	if rule.Compaction {
		t.bucket = newBucket(name)
	}
	if rule.CloudEvents.Headers {
		t.source = rule.CloudEvents.Source
	}
	if keep {
		t.derived = b.derivedKeysOf(name)
		t.schema = b.schemaGate(name, rule)
	}
	if rule.MaxPayload > 0 {
		t.maxPayload = min(t.maxPayload, rule.MaxPayload)
	}
	return t, nil
}

// findStream returns ErrNotFound for a stream that does not exist.
func (c *core) findStream(ctx context.Context, name string) (*natsjs.StreamInfo, error) {
	s, err := c.js.Stream(ctx, name)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: stream %s: %w", name, err)
	}
	return s.CachedInfo(), nil
}

func (b *Bus) makeTopic(ctx context.Context, name, client string) (*topicInfo, error) {
	rule := b.rule(name)
	streamName := rule.streamName(name)
	if err := b.tooManyStreams(streamName); err != nil {
		return nil, err
	}
	info, err := b.findStream(ctx, streamName)
	switch {
	case err == nil:
		b.reserved.drop(streamName)
		b.reportDrift(name, rule, info)
		return b.meetTopic(ctx, name, info, rule, false)
	case !errors.Is(err, ErrNotFound):
		return nil, b.unavailable(err)
	}
	if rationed(client) && b.headrooms.of(rule.streamConfig(name, &b.cfg).Storage).low.Load() {
		b.obs.LimitReached("storage_reserve")
		return nil, storageLow(nil)
	}
	if !b.reserved.has(streamName) {
		if err := b.newTopics.take(client); err != nil {
			return nil, err
		}
	}
	note, err := b.makers.noteTopic(ctx, name, streamName, client)
	if err != nil {
		return nil, err
	}
	info, err = b.createStream(ctx, name, rule)
	if err != nil {
		b.makers.forget(ctx, note)
		return nil, err
	}
	b.reserved.drop(streamName)
	return b.meetTopic(ctx, name, info, rule, true)
}

// meetTopic is the topic of a stream that exists, with its bucket. made says that the stream has
// just been made.
func (b *Bus) meetTopic(ctx context.Context, name string, info *natsjs.StreamInfo, rule *TopicRule, made bool) (*topicInfo, error) {
	t, err := b.newTopic(name, info, rule, true)
	if err != nil || t.bucket == nil {
		return t, err
	}
	entries, err := b.meetBucket(ctx, t, &info.Config, made)
	if err != nil {
		return nil, err
	}
	t.keys = b.newKeySet(ctx, t, rule, entries)
	return t, nil
}

// createStream goes on to its end when the caller gives up: others may wait for the same topic.
func (b *Bus) createStream(ctx context.Context, topic string, rule *TopicRule) (*natsjs.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishWait)
	defer cancel()
	cfg := rule.streamConfig(topic, &b.cfg)
	if err := b.awaitGone(ctx, cfg.Name); err != nil {
		return nil, b.unavailable(err)
	}
	if _, err := b.finishDeletion(ctx, cfg.Name); err != nil {
		return nil, b.unavailable(err)
	}
	cfg.MaxConsumers = b.limits.StreamGroups + ownConsumers
	s, err := b.js.CreateStream(ctx, cfg)
	if refused, ok := errors.AsType[*natsjs.APIError](err); ok && refused.ErrorCode == natsjs.JSErrCodeMaximumConsumersLimit {
		cfg.MaxConsumers = -1 // the account has a smaller limit
		s, err = b.js.CreateStream(ctx, cfg)
	}
	if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
		// Another hub made it at the same moment, with other settings: theirs count.
		info, ferr := b.findStream(ctx, cfg.Name)
		if ferr != nil {
			return nil, b.unavailable(ferr)
		}
		b.reportDrift(topic, rule, info)
		return info, nil
	}
	if err != nil {
		return nil, b.notMade(fmt.Errorf("jetstream: create stream %s for topic %s: %w", cfg.Name, topic, err))
	}
	b.log.InfoContext(ctx, "topic made", slog.String("topic", topic), slog.String("stream", cfg.Name))
	return s.CachedInfo(), nil
}

// forget drops what is known of a stream that answered no more, so that the next use looks again.
func (b *Bus) forget(s *stream) {
	b.topics.mu.Lock()
	defer b.topics.mu.Unlock()
	if b.topics.streams[s.name] == s {
		delete(b.topics.streams, s.name)
		b.ids.drop(s)
		b.topics.missing(s.name, b.clock.now())
	}
	for name, t := range b.topics.byName {
		if t.stream == s {
			delete(b.topics.byName, name)
		}
	}
}

// forgetBucket drops what is known of a topic whose bucket is gone, so that the next use makes it
// anew.
func (b *Bus) forgetBucket(t *topicInfo) {
	b.topics.mu.Lock()
	defer b.topics.mu.Unlock()
	b.topics.missing(t.bucket.stream, b.clock.now())
	if b.topics.byName[t.name] == t {
		delete(b.topics.byName, t.name)
	}
}

// missing notes that a stream was found missing; mu is held.
func (k *topicTable) missing(stream string, now int64) {
	if len(k.gone) >= maxGone {
		clear(k.gone)
	}
	k.gone[stream] = now
}

// Codes of the server's errors: of those that pass by themselves, and of those that do not.
const (
	codeUnavailable = 503
	codeRefused     = 400
)

// passing reports whether an error of the server passes by itself.
func passing(err error) bool {
	refused, ok := errors.AsType[*natsjs.APIError](err)
	return ok && (refused.Code == codeUnavailable || refused.ErrorCode == errNoPeers)
}

// notMade wraps the failure to make a stream.
func (b *Bus) notMade(err error) error {
	refused, ok := errors.AsType[*natsjs.APIError](err)
	if ok && storeFull(refused.ErrorCode, refused.Description) {
		return storageLow(fmt.Errorf("%w: %w", ErrNoStream, err))
	}
	if !ok || passing(err) {
		return b.unavailable(err)
	}
	code := CodeInternal
	if refused.Code == codeRefused { // for example because another stream has the topic's subjects
		code = CodeBadTopic
	}
	return &Error{Code: code, Msg: "the event store refuses to make this topic: an operator finds the reason in the log", Err: fmt.Errorf("%w: %w", ErrNoStream, err)}
}

// errNoPeers is the server's error when too few servers of a cluster are up for a stream.
const errNoPeers natsjs.ErrorCode = 10005

// unavailable wraps a failure of NATS so that a client learns no more than that.
func (c *core) unavailable(err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	if c.closing() {
		return ErrClosed
	}
	return &Error{Code: CodeInternal, Msg: "the event store did not answer as it should: try again later", Err: err}
}
