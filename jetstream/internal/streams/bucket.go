package streams

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

// BucketTopic is where a bucket's stream says whose it is.
const BucketTopic = "eventhub.topic"

// bucket is where the server keeps the newest event of each key of a compacted topic: a KV bucket
// that takes nothing but what its stream sources from the topic's.
type bucket struct {
	Stream string // KV_<name>
	Prefix string // of its subjects, before the key's token
}

// NewBucket returns the bucket of a topic, whether it exists or not.
func NewBucket(topic string) *bucket {
	name := native.BucketName(topic)
	return &bucket{Stream: "KV_" + name, Prefix: "$KV." + name + "."}
}

func (k *bucket) Subject(key string) string { return k.Prefix + native.KeyToken(key) }

// Config is the bucket's stream: as nats.go makes that of a KV bucket, but with a source in place
// of subjects, so that native clients read it and nobody writes to it.
func (k *bucket) Config(topic string, source *natsjs.StreamConfig) natsjs.StreamConfig {
	return natsjs.StreamConfig{
		Name:              k.Stream,
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
		Sources:           []*natsjs.StreamSource{k.Source(topic, source.Name)},
		Metadata:          map[string]string{BucketTopic: topic},
		// No duplicate window, which a stream with sources may be without: the topic's own has
		// judged ids already, and what a longer one here took for a duplicate would be a newest
		// event that is missing.
	}
}

// Source fills the bucket. It begins at 1 by name, because the server otherwise begins a source
// that it has no memory of at the time of the newest message it holds.
func (k *bucket) Source(topic, stream string) *natsjs.StreamSource {
	return &natsjs.StreamSource{
		Name:              stream,
		OptStartSeq:       1,
		SubjectTransforms: []natsjs.SubjectTransformConfig{{Source: native.KeyedPattern(topic), Destination: k.Prefix + "{{wildcard(1)}}"}},
	}
}

// MinWindow is the shortest duplicate window that servers allow which insist on one.
const MinWindow = 100 * time.Millisecond

// EnsureBucket makes the bucket of a compacted topic unless it exists. One that exists is left as
// it is, whatever it looks like; but one that is filled from elsewhere is refused.
func (s *Streams) EnsureBucket(ctx context.Context, t *Topic, source *natsjs.StreamConfig) error {
	_, err := s.meetBucket(ctx, t, source, false)
	return err
}

// meetBucket is EnsureBucket, and returns how many entries the bucket has. made says that the
// topic's stream has just been made.
func (s *Streams) meetBucket(ctx context.Context, t *Topic, source *natsjs.StreamConfig, made bool) (entries uint64, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	info, err := s.Conn.FindStream(ctx, t.Bucket.Stream)
	if errors.Is(err, event.ErrNotFound) {
		if info, err = s.CreateBucket(ctx, t, source); err != nil {
			return 0, s.notMade(err)
		}
		made = false
	}
	if err != nil {
		return 0, s.Conn.Unavailable(err)
	}
	if t.Bucket.Foreign(t.Name, t.Stream.Name, info) {
		return 0, &event.Error{Code: event.CodeBadTopic, Msg: "the KV bucket that this compacted topic needs exists and is not the event bus's: choose another topic, or remove bucket " + strings.TrimPrefix(t.Bucket.Stream, "KV_")}
	}
	if faults := t.Bucket.Faults(t.Name, t.Stream.Name, info); len(faults) > 0 {
		s.Often.Log(ctx, slog.LevelWarn, "the bucket of a compacted topic is not as it should be", t.Name, slog.String("topic", t.Name),
			slog.String("stream", t.Bucket.Stream), slog.String("faults", strings.Join(faults, "; ")))
	} else if made {
		s.RestartSource(ctx, t, info)
	}
	return info.State.Msgs, nil
}

// RestartSource has the server look for the source again: of a stream that was removed and made
// again it takes no notice for up to 20 s otherwise.
func (s *Streams) RestartSource(ctx context.Context, t *Topic, info *natsjs.StreamInfo) {
	off := info.Config
	off.Sources = nil
	off.Duplicates = MinWindow // without sources a window is needed
	_, err := s.Conn.JS.UpdateStream(ctx, off)
	if err == nil {
		_, err = s.Conn.JS.UpdateStream(ctx, info.Config)
	}
	if err != nil {
		s.Log.WarnContext(ctx, "the source of a bucket could not be started again: repair it", slog.String("topic", t.Name),
			slog.String("stream", t.Bucket.Stream), slog.Any("error", err))
	}
}

// CreateBucket makes the bucket of a topic, or returns the one that another hub has made.
func (s *Streams) CreateBucket(ctx context.Context, t *Topic, source *natsjs.StreamConfig) (*natsjs.StreamInfo, error) {
	if err := s.AwaitGone(ctx, t.Bucket.Stream); err != nil {
		return nil, err
	}
	cfg := t.Bucket.Config(t.Name, source)
	made, err := s.Conn.JS.CreateStream(ctx, cfg)
	if raced(err) {
		return s.Conn.FindStream(ctx, cfg.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: create bucket %s for topic %s: %w", cfg.Name, t.Name, err)
	}
	info := made.CachedInfo()
	if info.Config.Duplicates > MinWindow {
		cfg.Duplicates = MinWindow
		made, err = s.Conn.JS.UpdateStream(ctx, cfg)
		if raced(err) {
			return s.Conn.FindStream(ctx, cfg.Name)
		}
		if err != nil {
			return nil, fmt.Errorf("jetstream: update bucket %s for topic %s: %w", cfg.Name, t.Name, err)
		}
		info = made.CachedInfo()
	}
	s.Log.InfoContext(ctx, "bucket made", slog.String("topic", t.Name), slog.String("stream", cfg.Name))
	return info, nil
}

// raced reports that another hub made the bucket at the same moment, with other settings, which
// count, or starts its source again (RestartSource): then the server's answer has no source.
func raced(err error) bool {
	return errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) || errors.Is(err, natsjs.ErrStreamSourceNotSupported)
}

// Foreign reports that the stream is somebody else's. One that has no sources any more is taken for
// ours: that is what a native CreateOrUpdateKeyValue leaves of it.
func (k *bucket) Foreign(topic, stream string, info *natsjs.StreamInfo) bool {
	if owner, named := info.Config.Metadata[BucketTopic]; named {
		return owner != topic
	}
	sources := info.Config.Sources
	return info.Config.Mirror != nil ||
		len(sources) > 0 && !slices.ContainsFunc(sources, func(s *natsjs.StreamSource) bool { return s.Name == stream })
}

// Faults says what keeps the bucket from holding the newest event of each key.
func (k *bucket) Faults(topic, stream string, info *natsjs.StreamInfo) []string {
	var faults []string
	fault := func(wrong bool, format string, args ...any) {
		if wrong {
			faults = append(faults, fmt.Sprintf(format, args...))
		}
	}
	cfg, want := &info.Config, k.Source(topic, stream)
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
	fault(cfg.Duplicates > MinWindow, "its duplicate window is %v: ids that repeat within it are lost", cfg.Duplicates)
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

// Origin is where an entry of a bucket came from.
type Origin struct {
	Seq uint64 // in the stream of the topic
	// Ident tells a stream from one that was made later under its name. Servers before 2.15 say
	// nothing: "".
	Ident string
}

// Entry decodes an entry of the bucket. It returns false for what did not come from the topic's
// stream: a native client wrote it, while the bucket took subjects.
func (t *Topic) Entry(m *conn.StoredMsg) (*event.Event, Origin, bool) {
	at, ok := t.EntryOrigin(m)
	if !ok {
		return nil, at, false
	}
	e := &event.Event{
		Topic: t.Name, Key: native.ParseKeyToken(m.Subject[len(t.Bucket.Prefix):]), Payload: m.Data,
		Stream: t.Stream.Name, Sequence: at.Seq, StoredAt: m.Time.UnixNano(),
	}
	e.ReadHeader(m.Header)
	if m.Header[native.HeaderTS] == nil && m.Header[native.HeaderID] != nil {
		if made, v7 := MadeAt(e.ID); v7 { // by a hub, right before it was stored
			e.TS = made.UnixMilli()
		}
	}
	return e, at, true
}

// EntryOrigin reads the header <stream> <sequence> <filter> <transform> <subject> [<ident>] of a
// sourced message.
func (t *Topic) EntryOrigin(m *conn.StoredMsg) (Origin, bool) {
	if !strings.HasPrefix(m.Subject, t.Bucket.Prefix) {
		return Origin{}, false
	}
	stream, rest, _ := strings.Cut(conn.Last(m.Header[native.HeaderSource]), " ")
	number, rest, _ := strings.Cut(rest, " ")
	seq, err := strconv.ParseUint(number, 10, 64)
	if err != nil || seq == 0 || stream != t.Stream.Name {
		return Origin{}, false
	}
	for range 3 {
		_, rest, _ = strings.Cut(rest, " ")
	}
	return Origin{Seq: seq, Ident: rest}, true
}

// Beyond reports whether the server takes the events of a stream that ends at last for ones that
// came already.
func (o Origin) Beyond(last uint64) bool { return o.Ident == "" && o.Seq > last }
