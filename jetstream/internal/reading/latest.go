package reading

import (
	"context"
	"errors"
	"sync"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Bounds of reads by key.
const (
	keysBytes     = 256 << 10 // subjects in one question for several keys
	leaderReaders = 16        // questions that one call has at the leader at a time
)

// Get is Keys.Get.
func (r *Reads) Get(ctx context.Context, topic string, key string) (*event.Event, error) {
	t, err := r.Streams.Readable(ctx, topic)
	if err != nil {
		return nil, r.Messages.Failed(err)
	}
	e, err := r.Latest(ctx, t, key)
	return e, r.Messages.Failed(err)
}

// Latest returns the newest event of a key, a tombstone too, or ErrNotFound. One that only the
// bucket has is Gone.
func (r *Reads) Latest(ctx context.Context, t *streams.Topic, key string) (*event.Event, error) {
	m, err := r.Conn.LastBySubject(ctx, t.Stream.Name, native.Subject(t.Name, key))
	if err == nil {
		return t.Event(m), nil
	}
	if t.Bucket == nil || !errors.Is(err, event.ErrNotFound) {
		return nil, err
	}
	if m, err = r.Conn.LastBySubject(ctx, t.Bucket.Stream, t.Bucket.Subject(key)); err != nil {
		return nil, err
	}
	e, _, ok := t.Entry(m)
	if !ok {
		return nil, event.ErrNotFound
	}
	e.Gone = true
	return e, nil
}

// Failed keeps what callers know of errors, and hides the rest from clients.
func (r *Messages) Failed(err error) error {
	if err == nil || errors.Is(err, event.ErrNotFound) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return r.Conn.Unavailable(err)
}

// GetMany is Keys.GetMany.
func (r *Reads) GetMany(ctx context.Context, topic string, keys []string) (map[string]*event.Event, error) {
	if len(keys) < 2 {
		return r.GetConsistent(ctx, topic, keys)
	}
	t, err := r.Streams.Readable(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return map[string]*event.Event{}, nil
	}
	if err != nil {
		return nil, r.Messages.Failed(err)
	}
	read := keysRead{reads: r, topic: t, found: make(map[string]*event.Event, len(keys)), bucket: t.Bucket != nil}
	if err := read.all(ctx, keys); err != nil {
		return nil, r.Messages.Failed(err)
	}
	return read.found, nil
}

// keysRead reads several keys by direct gets.
type keysRead struct {
	reads  *Reads
	topic  *streams.Topic
	bucket bool // read there, else from the topic's stream
	found  map[string]*event.Event
}

func (r *keysRead) all(ctx context.Context, keys []string) error {
	for rest := keys; len(rest) > 0; {
		q, n := r.question(rest)
		chunk := rest[:n]
		err := r.chunk(ctx, q, chunk)
		// others made the stream or changed the bucket, or it is gone
		if errors.Is(err, conn.ErrNoDirect) {
			return r.reads.eachLatestOf(ctx, r.topic, rest, r.found)
		}
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// question takes as many keys as one direct get answers.
func (r *keysRead) question(keys []string) (*conn.DirectQuery, int) {
	q := &conn.DirectQuery{MultiLast: make([]string, 0, min(len(keys), conn.MaxDirect))}
	size := 0
	for _, key := range keys {
		subject := r.subject(key)
		if size += len(subject); len(q.MultiLast) == conn.MaxDirect || size > keysBytes && len(q.MultiLast) > 0 {
			break
		}
		q.MultiLast = append(q.MultiLast, subject)
	}
	return q, len(q.MultiLast)
}

func (r *keysRead) subject(key string) string {
	if r.bucket {
		return r.topic.Bucket.Subject(key)
	}
	return native.Subject(r.topic.Name, key)
}

func (r *keysRead) chunk(ctx context.Context, q *conn.DirectQuery, keys []string) error {
	unsure := false // something was not read that a replica had
	for upTo := uint64(0); ; {
		end, err := r.reads.Conn.Direct(ctx, r.stream(), q, func(m *conn.StoredMsg, _ uint64) error {
			r.take(m)
			return nil
		})
		if err != nil {
			return err
		}
		// the second: another replica, which is behind the first
		unsure = unsure || end.Garbled || end.UpTo < upTo
		upTo = max(upTo, end.UpTo)
		if end.Pending == 0 || end.Last < q.Seq {
			break
		}
		q.Seq = end.Last + 1 // it was cut at directBytes; what is replaced meanwhile lies behind
	}
	if !unsure {
		return nil
	}
	var missing []string
	for _, key := range keys {
		if r.found[key] == nil {
			missing = append(missing, key)
		}
	}
	return r.reads.eachLatestOf(ctx, r.topic, missing, r.found)
}

func (r *keysRead) stream() string {
	if r.bucket {
		return r.topic.Bucket.Stream
	}
	return r.topic.Stream.Name
}

func (r *keysRead) take(m *conn.StoredMsg) {
	e, ok := r.topic.Event(m), true
	if r.bucket {
		e, _, ok = r.topic.Entry(m)
	}
	switch {
	case !ok:
	case e.Tombstone:
		delete(r.found, e.Key)
	default:
		r.found[e.Key] = e
	}
}

// GetConsistent is Keys.GetConsistent.
func (r *Reads) GetConsistent(ctx context.Context, topic string, keys []string) (map[string]*event.Event, error) {
	found := make(map[string]*event.Event, len(keys))
	t, err := r.Streams.Readable(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return found, nil
	}
	if err == nil {
		err = r.eachLatestOf(ctx, t, keys, found)
	}
	if err != nil {
		return nil, r.Messages.Failed(err)
	}
	return found, nil
}

// eachLatestOf reads keys at the leader into found, a few at a time.
func (r *Reads) eachLatestOf(ctx context.Context, t *streams.Topic, keys []string, found map[string]*event.Event) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var readers sync.WaitGroup
	var mu sync.Mutex
	next := 0
	for range min(leaderReaders, len(keys)) {
		readers.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				if next == len(keys) {
					mu.Unlock()
					return
				}
				key := keys[next]
				next++
				mu.Unlock()
				e, err := r.Latest(ctx, t, key)
				if err != nil && !errors.Is(err, event.ErrNotFound) {
					cancel(err)
					return
				}
				if err == nil && !e.Tombstone {
					mu.Lock()
					found[key] = e
					mu.Unlock()
				}
			}
		})
	}
	readers.Wait()
	return context.Cause(ctx)
}
