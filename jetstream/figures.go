package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

const (
	// figuresAtOnce is how many questions to NATS one request for figures of groups asks at a time.
	figuresAtOnce = 16
	// figuresAge is how long the leader of a consumer may have heard nothing of a majority: older
	// figures may be those of a leader that another has replaced. Servers send heartbeats every
	// second.
	figuresAge = 5 * time.Second
)

// errNotCurrent says that the leader of a consumer is out of touch with the other replicas.
var errNotCurrent = errors.New("jetstream: the leader of the group is out of touch with the other servers: its figures may be old")

// current reports whether the figures of a consumer come from a leader with a majority.
func current(info *natsjs.ConsumerInfo) bool {
	if info.Cluster == nil || len(info.Cluster.Replicas) == 0 {
		return true
	}
	heard := 1
	for _, r := range info.Cluster.Replicas {
		if !r.Offline && r.Active <= figuresAge {
			heard++
		}
	}
	return heard > (len(info.Cluster.Replicas)+1)/2
}

// concurrently calls f for 0..n-1, figuresAtOnce at a time, and returns one of its errors. After an
// error, f is not called for what is left.
func concurrently(n int, f func(i int) error) error {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var workers sync.WaitGroup
	for range min(n, figuresAtOnce) {
		workers.Go(func() {
			for failed.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(i); err != nil {
					failed.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// streamNames returns the names of all streams that are no buckets, in order.
func streamNames(ctx context.Context, c *core) (names []string, err error) {
	for offset := 0; ; {
		var page struct {
			Error   *conn.APIError `json:"error"`
			Total   int            `json:"total"`
			Streams []string       `json:"streams"`
		}
		if err := askPage(ctx, c, "STREAM.NAMES", offset, &page); err != nil {
			return nil, c.conn.Unavailable(fmt.Errorf("jetstream: list streams: %w", err))
		}
		if page.Error != nil {
			return nil, c.conn.Unavailable(fmt.Errorf("jetstream: list streams: %w", page.Error))
		}
		for _, stream := range page.Streams {
			if !strings.HasPrefix(stream, "KV_") && !strings.HasPrefix(stream, "OBJ_") {
				names = append(names, stream)
			}
		}
		if offset += len(page.Streams); offset >= page.Total || len(page.Streams) == 0 {
			slices.Sort(names)
			return slices.Compact(names), nil
		}
	}
}

// askPage asks JetStream for a page of a list, again and again until there is an answer: the server
// that leads JetStream may be away.
func askPage(ctx context.Context, c *core, api string, offset int, into any) error {
	req, err := json.Marshal(map[string]int{"offset": offset})
	if err != nil {
		return err
	}
	reply, err := conn.Again(ctx, func(ctx context.Context) (*nats.Msg, error) {
		return c.conn.Link().Request(ctx, c.conn.API+api, req)
	})
	switch {
	case err != nil:
		return err
	case conn.NoResponders(reply):
		return nats.ErrNoResponders
	}
	return json.Unmarshal(reply.Data, into)
}

// consumerPage is a page of the consumers of a stream, in the order of their names.
type consumerPage struct {
	offset    int
	consumers []*natsjs.ConsumerInfo
	// missing are the names of consumers whose leader did not answer or is not current: nothing is
	// known of them.
	missing []string
	// first and last are names: the least and the greatest of the page, missing ones included.
	first, last string
	more        bool
}

// maxPageRestarts is how often a walk through the consumers of a stream begins again because
// consumers were deleted meanwhile.
const maxPageRestarts = 8

// consumerPages walks through the consumers of a stream whose names are greater than after. offset
// is that of an earlier page that had after, or 0. A consumer that exists all the time is visited
// once.
func consumerPages(ctx context.Context, c *core, stream, after string, offset int) iter.Seq2[consumerPage, error] {
	return func(yield func(consumerPage, error) bool) {
		for restarts := 0; ; {
			page, limit, err := askConsumers(ctx, c, stream, offset)
			if err != nil {
				yield(page, err)
				return
			}
			// Pages overlap by a consumer, so that a gap between them is seen.
			if offset > 0 && (page.first == "" || page.first > after) {
				if restarts++; restarts > maxPageRestarts {
					yield(page, fmt.Errorf("jetstream: list consumers of stream %s: they are being deleted all the time", stream))
					return
				}
				offset = 0
				continue
			}
			page.consumers = slices.DeleteFunc(page.consumers, func(info *natsjs.ConsumerInfo) bool { return info.Name <= after })
			page.missing = slices.DeleteFunc(page.missing, func(name string) bool { return name <= after })
			if !yield(page, nil) || !page.more {
				return
			}
			after = max(after, page.last)
			offset += max(limit-1, 1)
		}
	}
}

// askConsumers asks for a page of the consumers of a stream, of limit at most. A stream that does
// not exist has none.
//
// The lister of nats.go reports consumers without a leader with all figures at 0, and goes wrong in
// its pages where some are missing.
func askConsumers(ctx context.Context, c *core, stream string, offset int) (page consumerPage, limit int, err error) {
	var got struct {
		Error     *conn.APIError         `json:"error"`
		Total     int                    `json:"total"`
		Limit     int                    `json:"limit"`
		Consumers []*natsjs.ConsumerInfo `json:"consumers"`
		Missing   []string               `json:"missing"`
	}
	err = askPage(ctx, c, "CONSUMER.LIST."+stream, offset, &got)
	if err == nil && got.Error != nil {
		if got.Error.ErrCode == natsjs.JSErrCodeStreamNotFound {
			return page, 0, nil
		}
		err = got.Error
	}
	if err != nil {
		return page, 0, fmt.Errorf("jetstream: list consumers of stream %s: %w", stream, err)
	}
	page.offset, page.more, page.missing = offset, offset+got.Limit < got.Total, got.Missing
	for _, info := range got.Consumers {
		switch {
		case slices.Contains(got.Missing, info.Name): // a stand-in without figures
		case current(info):
			page.consumers = append(page.consumers, info)
		default:
			page.missing = append(page.missing, info.Name)
		}
	}
	names := slices.Clone(page.missing)
	for _, info := range page.consumers {
		names = append(names, info.Name)
	}
	if len(names) > 0 {
		page.first, page.last = slices.Min(names), slices.Max(names)
	}
	return page, got.Limit, nil
}

// groupReader reads figures of groups for one request. What several groups share is read once. Its
// methods may be called concurrently.
type groupReader struct {
	admin   *admin
	topics  shared[string, *streams.Topic]
	oldest  shared[topicPlace, time.Time]
	settled shared[topicPlace, settledEvent]
	silent  sync.Map // streams that did not answer
	// known are events that earlier requests have read, by stream; nil for a stream without any.
	// found are those of this request.
	known map[string]*knownEvents
	found map[string]*knownEvents
}

// knownEvents are the times of the first events of topics behind sequences, in a stream that has
// removed no event since.
type knownEvents struct {
	created time.Time
	first   uint64
	deleted int

	mu sync.Mutex
	at map[topicPlace]time.Time
}

// remember has the reader use events that earlier requests have read of streams. It asks each
// stream once, instead of once for each group.
func (r *groupReader) remember(ctx context.Context, streams []string, earlier map[string]*knownEvents) error {
	r.known, r.found = make(map[string]*knownEvents), make(map[string]*knownEvents)
	var mu sync.Mutex
	return concurrently(len(streams), func(i int) error {
		var info *natsjs.StreamInfo
		err := r.within(ctx, streams[i], func(ctx context.Context) (err error) {
			info, err = r.admin.conn.FindStream(ctx, streams[i])
			return err
		})
		if errors.Is(err, event.ErrNotFound) || errors.Is(err, errSilent) {
			return nil
		}
		if err != nil {
			return err
		}
		now := &knownEvents{created: native.StreamMade(info), first: info.State.FirstSeq, deleted: info.State.NumDeleted, at: make(map[topicPlace]time.Time)}
		mu.Lock()
		defer mu.Unlock()
		r.found[streams[i]] = now
		if was := earlier[streams[i]]; was != nil && was.created.Equal(now.created) && was.first == now.first && was.deleted == now.deleted {
			r.known[streams[i]] = was
		}
		return nil
	})
}

// get returns a time that is known.
func (k *knownEvents) get(at topicPlace) (time.Time, bool) {
	if k == nil {
		return time.Time{}, false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	when, ok := k.at[at]
	return when, ok
}

// put notes a time.
func (k *knownEvents) put(at topicPlace, when time.Time) {
	if k == nil || when.IsZero() {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at[at] = when
}

// topicPlace is a sequence of the stream of a topic.
type topicPlace struct {
	topic string
	seq   uint64
}

// settledEvent is the last event up to which a group has settled everything.
type settledEvent struct {
	id string
	ts int64
}

// topic is streams.existing. It returns errSilent if the stream of the topic does not answer.
func (r *groupReader) topic(ctx context.Context, name string) (*streams.Topic, error) {
	return r.topics.get(name, func() (t *streams.Topic, err error) {
		err = r.within(ctx, r.admin.rules.Of(name).StreamName(name), func(ctx context.Context) error {
			t, err = r.admin.streams.Existing(ctx, name)
			return err
		})
		return t, err
	})
}

// errSilent says that the stream of a topic did not answer.
var errSilent = errors.New("jetstream: the stream does not answer")

// silentAfter is how long a stream may take to answer with an event. For the rest of the request,
// nothing more is read of a stream that took longer.
const silentAfter = 2 * time.Second

// within reads something of a stream. It returns errSilent if the stream does not answer.
func (r *groupReader) within(ctx context.Context, stream string, read func(context.Context) error) error {
	if _, silent := r.silent.Load(stream); silent {
		return errSilent
	}
	asking, cancel := context.WithTimeout(ctx, silentAfter)
	defer cancel()
	err := read(asking)
	if err != nil && asking.Err() != nil && ctx.Err() == nil {
		r.silent.Store(stream, true)
		return errSilent
	}
	return err
}

// oldestCopy returns when the first event of a queue of put-back events was put back, or a zero
// time if there is none.
func (r *groupReader) oldestCopy(ctx context.Context, queue *natsjs.ConsumerInfo) (at time.Time, err error) {
	err = r.within(ctx, putBackStream, func(ctx context.Context) error {
		m, err := r.admin.messages.LeaderNext(ctx, putBackStream, floorOf(queue)+1, time.Time{}, []string{queueSubject(queue.Name) + ">"})
		if m != nil {
			at = m.Time
		}
		return err
	})
	return at, err
}

// oldestBehind returns when the first event of a topic behind a sequence was stored, or a zero time
// if there is none.
func (r *groupReader) oldestBehind(ctx context.Context, t *streams.Topic, floor uint64) (time.Time, error) {
	place := topicPlace{t.Name, floor}
	return r.oldest.get(place, func() (at time.Time, err error) {
		if at, ok := r.known[t.Stream.Name].get(place); ok {
			r.found[t.Stream.Name].put(place, at)
			return at, nil
		}
		defer func() { r.found[t.Stream.Name].put(place, at) }()
		err = r.within(ctx, t.Stream.Name, func(ctx context.Context) error {
			m, err := r.admin.reads.NextStored(ctx, t, floor+1, time.Time{})
			if m != nil {
				at = m.Time
			}
			return err
		})
		return at, err
	})
}

// lastSettled is reads.LastSettled, once for each event.
func (r *groupReader) lastSettled(ctx context.Context, t *streams.Topic, info *natsjs.ConsumerInfo) (settledEvent, error) {
	if info.AckFloor.Consumer == 0 {
		return settledEvent{}, nil
	}
	return r.settled.get(topicPlace{t.Name, info.AckFloor.Stream}, func() (settledEvent, error) {
		id, ts, err := r.admin.reads.LastSettled(ctx, t, info)
		return settledEvent{id, ts}, err
	})
}

// shared remembers what was read for each key. Of several callers with one key, one reads.
type shared[K comparable, V any] struct {
	mu   sync.Mutex
	read map[K]func() (V, error)
}

func (s *shared[K, V]) get(key K, read func() (V, error)) (V, error) {
	s.mu.Lock()
	once, ok := s.read[key]
	if !ok {
		if s.read == nil {
			s.read = make(map[K]func() (V, error))
		}
		once = sync.OnceValues(read)
		s.read[key] = once
	}
	s.mu.Unlock()
	return once()
}
