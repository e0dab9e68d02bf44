package jetstream

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Events that are put back to the one group that failed them are kept in a stream of their own, as
// copies. Each group has a queue there once something was put back to it: a consumer, and a subject
// for each letter. The queue is named by the group's generation, so that it ends with the group.
const (
	putBackStream  = "EVENTHUB_PUTBACK" // no topic has it: names of their streams have no capitals
	putBackSubject = "$EVENTHUB.putback."
	// metaTTL on a queue says that its group had a TTL.
	metaTTL = "eventhub.ttl"
)

// Headers of events that were put back, and of dead letters.
const (
	// headerOriginal says where the event of a dead letter was stored: see originRef.
	headerOriginal = native.HeaderOriginal
	// headerLetter names the dead letter that a copy was made of: see letterRef.
	headerLetter = "Event-Letter"
	// headerKey is the key of a copy, as in a subject.
	headerKey = "Event-Key"
	// headerGroup is the topic and the group of a copy, as a JSON array.
	headerGroup = "Event-Group"
)

// queues makes, counts and removes the queues in which groups find dead-lettered events that were
// put back to them.
type queues struct {
	*core
	streams *streams.Streams
	records *records.Records
}

func newQueues(c *core, s *streams.Streams, r *records.Records) *queues {
	return &queues{core: c, streams: s, records: r}
}

// originRef says where an event was stored that has a dead letter.
type originRef struct {
	stream    string // "" when it is not known
	seq       uint64
	storedAt  int64
	tombstone bool
	bare      bool // the letter does not have the payload
}

// String is the value of headerOriginal: stream, sequence, time of storage, flags.
func (o originRef) String() string {
	return native.Origin(o.stream, o.seq, o.storedAt, o.tombstone, o.bare)
}

// parseOrigin reads a headerOriginal; what it cannot read is not known.
func parseOrigin(s string) originRef {
	f := strings.Split(s, " ")
	if len(f) != 4 || f[0] == "" {
		return originRef{}
	}
	seq, err1 := strconv.ParseUint(f[1], 10, 64)
	at, err2 := strconv.ParseInt(f[2], 10, 64)
	if err1 != nil || err2 != nil {
		return originRef{}
	}
	return originRef{stream: f[0], seq: seq, storedAt: at, tombstone: strings.Contains(f[3], "t"), bare: strings.Contains(f[3], "b")}
}

// letterRef names a stored dead letter. The time tells it from one in a stream that was created
// again.
type letterRef struct {
	stream string
	seq    uint64
	at     int64
}

// String is the value of headerLetter.
func (r letterRef) String() string {
	return r.stream + " " + strconv.FormatUint(r.seq, 10) + " " + strconv.FormatInt(r.at, 10)
}

func parseLetterRef(s string) letterRef {
	f := strings.Split(s, " ")
	if len(f) != 3 {
		return letterRef{}
	}
	seq, err1 := strconv.ParseUint(f[1], 10, 64)
	at, err2 := strconv.ParseInt(f[2], 10, 64)
	if err1 != nil || err2 != nil {
		return letterRef{}
	}
	return letterRef{stream: f[0], seq: seq, at: at}
}

// token is the letter's own part of a subject, and of the id of an event that goes to the topic.
func (r letterRef) token() string {
	sum := sha256.Sum256([]byte(r.String()))
	return hex.EncodeToString(sum[:16])
}

// newQueue names a queue of a group: a name and a nonce, so that a later group of that name has
// another.
func newQueue(topic, group string) string {
	var nonce [4]byte
	_, _ = rand.Read(nonce[:]) // never fails
	return objectName(topic+"@"+group) + "~" + hex.EncodeToString(nonce[:])
}

// queueSubject is what all subjects of a queue begin with.
func queueSubject(queue string) string { return putBackSubject + queue + "." }

// copyHeader is the message header of a copy of the letter's event.
func (l *letter) copyHeader() nats.Header {
	f := native.Fields{TS: l.event.TS, HasTS: true, SID: l.event.SID, Headers: l.event.Headers, Tags: l.event.Tags, CausedBy: l.event.CausedBy, Tombstone: l.origin.tombstone}
	h := f.Header("", false)
	h[native.HeaderID] = []string{l.event.ID}
	h[headerLetter] = []string{l.ref.String()}
	h[headerGroup] = []string{native.JSONList([]string{l.topic, l.group})}
	if l.event.Key != "" {
		h[headerKey] = []string{keyToken(l.event.Key)}
	}
	if l.origin.stream != "" {
		h[headerOriginal] = []string{l.origin.String()}
	}
	return h
}

// readPutBack fills in what only the header of a copy says of its event: the place of the original,
// and none where that is not known. It returns the letter.
func readPutBack(e *event.Event, h nats.Header) letterRef {
	if key := h.Get(headerKey); key != "" {
		e.Key = tokenKey(key)
	}
	origin := parseOrigin(h.Get(headerOriginal))
	e.Stream, e.Sequence = origin.stream, origin.seq
	if origin.storedAt > 0 {
		e.StoredAt = origin.storedAt
	}
	return parseLetterRef(h.Get(headerLetter))
}

// putBackTopic is a topic as its copies in the stream of what was put back.
func (q *queues) putBackTopic(topic string, info *natsjs.StreamInfo) *streams.Topic {
	return &streams.Topic{
		Name: topic, PutBack: true, Complete: func(e *event.Event, h nats.Header) { readPutBack(e, h) }, Obs: event.NopObserver{}, MaxPayload: q.conn.MaxPayload,
		Stream: &streams.Stream{Name: putBackStream, Family: true, Created: native.StreamMade(info)},
	}
}

// openPutBack returns the stream of what was put back, and makes it if it is not there.
func (q *queues) openPutBack(ctx context.Context) (*natsjs.StreamInfo, error) {
	info, err := q.conn.FindStream(ctx, putBackStream)
	if !errors.Is(err, event.ErrNotFound) {
		return info, err
	}
	cfg := natsjs.StreamConfig{
		Name: putBackStream, Subjects: []string{putBackSubject + ">"}, Description: "eventhub: dead-lettered events that were put back to their group",
		Retention: natsjs.WorkQueuePolicy, Discard: natsjs.DiscardNew, MaxBytes: int64(q.limits.PutBackBytes), MaxMsgs: -1, MaxMsgSize: -1,
		Replicas: q.cfg.Replicas,
	}
	if q.cfg.Server != nil && q.cfg.Server.InMemory() {
		cfg.Storage = natsjs.MemoryStorage
	}
	s, err := q.conn.JS.CreateStream(ctx, cfg)
	if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) { // by a hub with other settings
		return q.conn.FindStream(ctx, putBackStream)
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: create stream %s: %w", putBackStream, err)
	}
	return s.CachedInfo(), nil
}

// openQueue returns the consumer of a queue, and makes it if it is not there. The caller looks
// afterwards whether the queue is still the group's.
func (q *queues) openQueue(ctx context.Context, topic, group, queue string, ttl, paused bool) (*streams.Topic, *natsjs.ConsumerInfo, error) {
	stream, err := q.openPutBack(ctx)
	if err != nil {
		return nil, nil, err
	}
	t := q.putBackTopic(topic, stream)
	info, err := q.records.Consumer(ctx, t, queue)
	if err == nil || !gone(err) {
		return t, info, err
	}
	cfg := natsjs.ConsumerConfig{
		Name: queue, Durable: queue, DeliverPolicy: natsjs.DeliverAllPolicy, AckPolicy: natsjs.AckExplicitPolicy, AckWait: q.cfg.AckWait,
		MaxDeliver: -1, MaxAckPending: native.MaxAckPending, MaxWaiting: native.MaxWaiting, FilterSubject: queueSubject(queue) + ">",
		Metadata: map[string]string{native.MetaGroup: group, native.MetaTopic: topic},
	}
	if ttl {
		cfg.Metadata[metaTTL] = "true"
	}
	if paused {
		cfg.PauseUntil = &pausedUntil
	}
	c, err := q.conn.JS.CreateConsumer(ctx, putBackStream, cfg)
	if errors.Is(err, natsjs.ErrConsumerExists) {
		info, err = q.records.Consumer(ctx, t, queue)
		return t, info, err
	}
	if err != nil {
		return nil, nil, fmt.Errorf("jetstream: create consumer %s of stream %s: %w", queue, putBackStream, err)
	}
	return t, c.CachedInfo(), nil
}

// groupQueue returns the queue of a group that exists, and makes it if the group has none. It
// returns ErrNotFound for a group that does not exist.
func (q *queues) groupQueue(ctx context.Context, t *streams.Topic, group string) (string, error) {
	for range 8 {
		ptr, err := q.records.Generation(ctx, t, group)
		if err != nil {
			return "", err
		}
		ttl, err := q.hasTTL(ctx, t, group, &ptr)
		if err != nil {
			return "", err
		}
		if ptr.PutBack != "" {
			_, _, err := q.openQueue(ctx, t.Name, group, ptr.PutBack, ttl, ptr.Paused)
			return ptr.PutBack, err
		}
		next := ptr
		next.PutBack = newQueue(t.Name, group)
		if _, _, err := q.openQueue(ctx, t.Name, group, next.PutBack, ttl, ptr.Paused); err != nil {
			return "", err
		}
		_, err = q.records.Swap(ctx, t, group, ptr, next) // members hear of it by that
		if err == nil {
			return next.PutBack, nil
		}
		if !errors.Is(err, records.ErrMoved) {
			return "", err // the outcome is unknown: the sweeper removes what is no group's
		}
		q.records.DeleteConsumer(ctx, putBackStream, next.PutBack)
	}
	return "", &event.Error{Code: event.CodeOverloaded, Msg: "the group is being moved by others again and again: try later"}
}

// hasTTL reports whether a group ends when it has had no member for its TTL, and takes its queue
// along. It returns ErrNotFound for a group that does not exist.
func (q *queues) hasTTL(ctx context.Context, t *streams.Topic, group string, ptr *records.Generation) (bool, error) {
	info, err := q.records.GroupConsumer(ctx, t, ptr)
	if err == nil {
		return !ptr.Durable && info.Config.InactiveThreshold > 0, nil
	}
	if !gone(err) {
		return false, err
	}
	alive, err := q.waitsForServer(ctx, t, group, ptr)
	if err == nil && !alive {
		err = event.ErrNotFound
	}
	return !ptr.Durable, err // only groups with a TTL live in memory
}

// waitsForServer reports whether a group whose consumer is gone will go on at its mark, because it
// lived in the memory of a server that was restarted.
func (q *queues) waitsForServer(ctx context.Context, t *streams.Topic, group string, ptr *records.Generation) (bool, error) {
	if ptr.Deleted {
		return false, nil
	}
	m, err := q.records.Mark(ctx, t, group)
	if err != nil || m == nil {
		return false, err
	}
	return m.Consumer == ptr.Consumer && m.Stream.Equal(t.Stream.Created) && time.Since(time.UnixMilli(m.SeenMS)) <= m.Life(), nil
}

// putBackCount returns how many events that were put back wait in a queue, and how many of them
// are delivered and not settled. A group without a queue has none.
func (q *queues) putBackCount(ctx context.Context, queue string) (waiting, leased uint64, err error) {
	if queue == "" {
		return 0, 0, nil
	}
	info, err := q.records.Consumer(ctx, &streams.Topic{Stream: &streams.Stream{Name: putBackStream}}, queue)
	if gone(err) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	return info.NumPending, uint64(max(info.NumAckPending, 0)), nil
}

// dropQueue removes a queue and what is in it.
func (q *queues) dropQueue(ctx context.Context, queue string) error {
	if queue == "" {
		return nil
	}
	err := q.conn.JS.DeleteConsumer(ctx, putBackStream, queue)
	if err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return fmt.Errorf("jetstream: delete consumer %s of stream %s: %w", queue, putBackStream, err)
	}
	return q.purgeQueue(ctx, queue)
}

// purgeQueue removes what is in a queue.
func (q *queues) purgeQueue(ctx context.Context, queue string) error {
	var got struct {
		Error *conn.APIError `json:"error"`
	}
	if err := q.conn.AskAPI(ctx, "STREAM.PURGE."+putBackStream, map[string]any{"filter": queueSubject(queue) + ">"}, &got); err != nil {
		return err
	}
	if got.Error != nil && got.Error.ErrCode != natsjs.JSErrCodeStreamNotFound {
		return got.Error
	}
	return nil
}

// sweepPutBack removes queues older than age that are no group's any more, and what was put into
// such after they were removed.
func (q *queues) sweepPutBack(ctx context.Context, age time.Duration) error {
	handle, err := q.conn.JS.Stream(ctx, putBackStream)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	kept, known := make(map[string]bool), uint64(0)
	consumers := handle.ListConsumers(ctx)
	for info := range consumers.Info() {
		group, ours := info.Config.Metadata[native.MetaGroup]
		if !ours {
			continue
		}
		stays := time.Since(info.Created) < age
		if !stays {
			if stays, err = q.queueStays(ctx, info.Config.Metadata[native.MetaTopic], group, info); err != nil {
				return err
			}
		}
		if stays {
			kept[info.Name] = true
			known += info.NumPending + uint64(max(info.NumAckPending, 0))
			continue
		}
		if err := q.dropQueue(ctx, info.Name); err != nil {
			return err
		}
		q.log.InfoContext(ctx, "removed events that were put back to a group that is gone", slog.String("topic", info.Config.Metadata[native.MetaTopic]), slog.String("group", group))
	}
	if err := consumers.Err(); err != nil {
		return err
	}
	info, err := q.conn.FindStream(ctx, putBackStream)
	if err != nil || info.State.Msgs <= known {
		return err
	}
	return q.sweepOrphans(ctx, handle, kept)
}

// sweepOrphans removes what is in queues without a consumer that are no group's.
func (q *queues) sweepOrphans(ctx context.Context, handle natsjs.Stream, kept map[string]bool) error {
	info, err := handle.Info(ctx, natsjs.WithSubjectFilter(putBackSubject+">"))
	if err != nil {
		return err
	}
	seen := make(map[string]bool)
	for subject := range info.State.Subjects {
		queue, _, _ := strings.Cut(strings.TrimPrefix(subject, putBackSubject), ".")
		if kept[queue] || seen[queue] {
			continue
		}
		seen[queue] = true
		m, err := q.messages.LeaderNext(ctx, putBackStream, 1, time.Time{}, []string{subject})
		if err != nil {
			return err
		}
		if m == nil {
			continue
		}
		var of []string
		stays := false
		if json.Unmarshal([]byte(m.Header.Get(headerGroup)), &of) == nil && len(of) == 2 {
			if stays, err = q.queueStays(ctx, of[0], of[1], &natsjs.ConsumerInfo{Name: queue}); err != nil {
				return err
			}
		}
		if !stays {
			if err := q.dropQueue(ctx, queue); err != nil {
				return err
			}
		}
	}
	return nil
}

// queueStays reports whether a queue is its group's. A group with a TTL that has ended takes its
// queue along.
func (q *queues) queueStays(ctx context.Context, topic, group string, queue *natsjs.ConsumerInfo) (bool, error) {
	t, _, err := q.streams.FreshExisting(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	ptr, err := q.records.Generation(ctx, t, group)
	if err != nil || ptr.Deleted || ptr.PutBack != queue.Name {
		return false, err
	}
	if queue.Config.Metadata[metaTTL] == "" || ptr.Durable {
		return true, nil
	}
	if _, err := q.records.GroupConsumer(ctx, t, &ptr); !gone(err) {
		return true, err
	}
	if alive, err := q.waitsForServer(ctx, t, group, &ptr); err != nil || alive {
		return true, err
	}
	next := ptr
	next.PutBack = ""
	_, err = q.records.Swap(ctx, t, group, ptr, next)
	if errors.Is(err, records.ErrMoved) {
		return true, nil // somebody has come
	}
	return false, err
}
