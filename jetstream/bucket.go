package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

// bucketTopic is where a bucket's stream says whose it is.
const bucketTopic = "eventhub.topic"

// bucket is where the server keeps the newest event of each key of a compacted topic: a KV bucket
// that takes nothing but what its stream sources from the topic's.
type bucket struct {
	stream string // KV_<name>
	prefix string // of its subjects, before the key's token
}

func newBucket(topic string) *bucket {
	name := native.BucketName(topic)
	return &bucket{stream: "KV_" + name, prefix: "$KV." + name + "."}
}

func (k *bucket) subject(key string) string { return k.prefix + native.KeyToken(key) }

// config is the bucket's stream: as nats.go makes that of a KV bucket, but with a source in place
// of subjects, so that native clients read it and nobody writes to it.
func (k *bucket) config(topic string, source *natsjs.StreamConfig) natsjs.StreamConfig {
	return natsjs.StreamConfig{
		Name:              k.stream,
		Description:       "eventhub: the newest event of each key of topic " + topic,
		MaxMsgsPerSubject: 1,
		MaxBytes:          -1,
		MaxMsgs:           -1,
		MaxMsgSize:        -1,
		MaxConsumers:      -1,
		Discard:           natsjs.DiscardNew,
		AllowRollup:       true,
		DenyDelete:        true,
		AllowDirect:       true,
		Storage:           source.Storage,
		Replicas:          source.Replicas,
		Sources:           []*natsjs.StreamSource{k.source(topic, source.Name)},
		Metadata:          map[string]string{bucketTopic: topic},
		// No duplicate window, which a stream with sources may be without: the topic's own has
		// judged ids already, and what a longer one here took for a duplicate would be a newest
		// event that is missing.
	}
}

// source fills the bucket. It begins at 1 by name, because the server otherwise begins a source
// that it has no memory of at the time of the newest message it holds.
func (k *bucket) source(topic, stream string) *natsjs.StreamSource {
	return &natsjs.StreamSource{
		Name:              stream,
		OptStartSeq:       1,
		SubjectTransforms: []natsjs.SubjectTransformConfig{{Source: native.KeyedPattern(topic), Destination: k.prefix + "{{wildcard(1)}}"}},
	}
}

// minWindow is the shortest duplicate window that servers allow which insist on one.
const minWindow = 100 * time.Millisecond

// ensureBucket makes the bucket of a compacted topic unless it exists. One that exists is left as
// it is, whatever it looks like; but one that is filled from elsewhere is refused.
func (s *streams) ensureBucket(ctx context.Context, t *topicInfo, source *natsjs.StreamConfig) error {
	_, err := s.meetBucket(ctx, t, source, false)
	return err
}

// meetBucket is ensureBucket, and returns how many entries the bucket has. made says that the
// topic's stream has just been made.
func (s *streams) meetBucket(ctx context.Context, t *topicInfo, source *natsjs.StreamConfig, made bool) (entries uint64, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	info, err := s.conn.FindStream(ctx, t.bucket.stream)
	if errors.Is(err, event.ErrNotFound) {
		if info, err = s.createBucket(ctx, t, source); err != nil {
			return 0, s.notMade(err)
		}
		made = false
	}
	if err != nil {
		return 0, s.conn.Unavailable(err)
	}
	if t.bucket.foreign(t.name, t.stream.name, info) {
		return 0, &event.Error{Code: event.CodeBadTopic, Msg: "the KV bucket that this compacted topic needs exists and is not the event bus's: choose another topic, or remove bucket " + strings.TrimPrefix(t.bucket.stream, "KV_")}
	}
	if faults := t.bucket.faults(t.name, t.stream.name, info); len(faults) > 0 {
		s.often.Log(ctx, slog.LevelWarn, "the bucket of a compacted topic is not as it should be", t.name, slog.String("topic", t.name),
			slog.String("stream", t.bucket.stream), slog.String("faults", strings.Join(faults, "; ")))
	} else if made {
		s.restartSource(ctx, t, info)
	}
	return info.State.Msgs, nil
}

// restartSource has the server look for the source again: of a stream that was removed and made
// again it takes no notice for up to 20 s otherwise.
func (s *streams) restartSource(ctx context.Context, t *topicInfo, info *natsjs.StreamInfo) {
	off := info.Config
	off.Sources = nil
	off.Duplicates = minWindow // without sources a window is needed
	_, err := s.conn.JS.UpdateStream(ctx, off)
	if err == nil {
		_, err = s.conn.JS.UpdateStream(ctx, info.Config)
	}
	if err != nil {
		s.log.WarnContext(ctx, "the source of a bucket could not be started again: repair it", slog.String("topic", t.name),
			slog.String("stream", t.bucket.stream), slog.Any("error", err))
	}
}

func (s *streams) createBucket(ctx context.Context, t *topicInfo, source *natsjs.StreamConfig) (*natsjs.StreamInfo, error) {
	if err := s.awaitGone(ctx, t.bucket.stream); err != nil {
		return nil, err
	}
	cfg := t.bucket.config(t.name, source)
	made, err := s.conn.JS.CreateStream(ctx, cfg)
	if raced(err) {
		return s.conn.FindStream(ctx, cfg.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: create bucket %s for topic %s: %w", cfg.Name, t.name, err)
	}
	info := made.CachedInfo()
	if info.Config.Duplicates > minWindow {
		cfg.Duplicates = minWindow
		made, err = s.conn.JS.UpdateStream(ctx, cfg)
		if raced(err) {
			return s.conn.FindStream(ctx, cfg.Name)
		}
		if err != nil {
			return nil, fmt.Errorf("jetstream: update bucket %s for topic %s: %w", cfg.Name, t.name, err)
		}
		info = made.CachedInfo()
	}
	s.log.InfoContext(ctx, "bucket made", slog.String("topic", t.name), slog.String("stream", cfg.Name))
	return info, nil
}

// raced reports that another hub made the bucket at the same moment, with other settings, which
// count, or starts its source again (restartSource): then the server's answer has no source.
func raced(err error) bool {
	return errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) || errors.Is(err, natsjs.ErrStreamSourceNotSupported)
}

// foreign reports that the stream is somebody else's. One that has no sources any more is taken for
// ours: that is what a native CreateOrUpdateKeyValue leaves of it.
func (k *bucket) foreign(topic, stream string, info *natsjs.StreamInfo) bool {
	if owner, named := info.Config.Metadata[bucketTopic]; named {
		return owner != topic
	}
	sources := info.Config.Sources
	return info.Config.Mirror != nil ||
		len(sources) > 0 && !slices.ContainsFunc(sources, func(s *natsjs.StreamSource) bool { return s.Name == stream })
}

// faults says what keeps the bucket from holding the newest event of each key.
func (k *bucket) faults(topic, stream string, info *natsjs.StreamInfo) []string {
	var faults []string
	fault := func(wrong bool, format string, args ...any) {
		if wrong {
			faults = append(faults, fmt.Sprintf(format, args...))
		}
	}
	cfg, want := &info.Config, k.source(topic, stream)
	fault(len(cfg.Subjects) > 0, "it takes subjects %s: native clients can write to it", strings.Join(cfg.Subjects, ", "))
	switch same := func(s *natsjs.StreamSource) bool { return sameSource(s, want) }; {
	case len(cfg.Sources) == 0:
		fault(true, "its source is gone: nothing fills it")
	case !slices.ContainsFunc(cfg.Sources, same):
		fault(true, "its source is not the stream of the topic: nothing fills it")
	case len(cfg.Sources) > 1:
		fault(true, "it has %d sources, 1 is right", len(cfg.Sources))
	}
	fault(cfg.Mirror != nil, "it is a mirror")
	fault(cfg.MaxMsgsPerSubject != 1, "it keeps %d entries a key, 1 is right", cfg.MaxMsgsPerSubject)
	fault(cfg.MaxAge > 0, "it drops entries after %v", cfg.MaxAge)
	fault(cfg.MaxMsgs > 0, "it keeps %d entries at most", cfg.MaxMsgs)
	fault(cfg.MaxBytes > 0, "it keeps %d bytes at most", cfg.MaxBytes)
	fault(cfg.MaxMsgSize > 0, "it refuses events of more than %d bytes", cfg.MaxMsgSize)
	fault(cfg.Duplicates > minWindow, "its duplicate window is %v: ids that repeat within it are lost", cfg.Duplicates)
	fault(!cfg.AllowDirect, "it does not allow direct reads")
	fault(cfg.Sealed, "it is sealed")
	for _, s := range info.Sources {
		fault(s.Error != nil, "its source reports: %v", s.Error)
	}
	return faults
}

func sameSource(a, b *natsjs.StreamSource) bool {
	return a.Name == b.Name && a.FilterSubject == b.FilterSubject && a.External == nil && slices.Equal(a.SubjectTransforms, b.SubjectTransforms)
}

// origin is where an entry of a bucket came from.
type origin struct {
	seq uint64 // in the stream of the topic
	// ident tells a stream from one that was made later under its name. Servers before 2.15 say
	// nothing: "".
	ident string
}

// entry decodes an entry of the bucket. It returns false for what did not come from the topic's
// stream: a native client wrote it, while the bucket took subjects.
func (t *topicInfo) entry(m *conn.StoredMsg) (*event.Event, origin, bool) {
	at, ok := t.entryOrigin(m)
	if !ok {
		return nil, at, false
	}
	e := &event.Event{
		Topic: t.name, Key: native.ParseKeyToken(m.Subject[len(t.bucket.prefix):]), Payload: m.Data,
		Stream: t.stream.name, Sequence: at.seq, StoredAt: m.Time.UnixNano(),
	}
	e.ReadHeader(m.Header)
	if m.Header[native.HeaderTS] == nil && m.Header[native.HeaderID] != nil {
		if made, v7 := madeAt(e.ID); v7 { // by a hub, right before it was stored
			e.TS = made.UnixMilli()
		}
	}
	return e, at, true
}

// entryOrigin reads the header <stream> <sequence> <filter> <transform> <subject> [<ident>] of a
// sourced message.
func (t *topicInfo) entryOrigin(m *conn.StoredMsg) (origin, bool) {
	if !strings.HasPrefix(m.Subject, t.bucket.prefix) {
		return origin{}, false
	}
	stream, rest, _ := strings.Cut(conn.Last(m.Header[native.HeaderSource]), " ")
	number, rest, _ := strings.Cut(rest, " ")
	seq, err := strconv.ParseUint(number, 10, 64)
	if err != nil || seq == 0 || stream != t.stream.name {
		return origin{}, false
	}
	for range 3 {
		_, rest, _ = strings.Cut(rest, " ")
	}
	return origin{seq: seq, ident: rest}, true
}
