package reading

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// Bounds of a pull.
const (
	// of one request. The next one begins when half of it has been read.
	pullBatch    = 2_048
	pullBytes    = 512 << 10
	pullRequests = 3
	// pullWindow is the most messages that a reader is given at a time.
	pullWindow = 512
	// pullSilence is how long the server may take to send what was asked for.
	pullSilence = 2 * time.Second
	// pullForgotten is how long a reader may hold still before the server forgets its consumer. The
	// reader then begins again.
	pullForgotten = 30 * time.Second
	// MakeWait is how long the server may take to make a consumer.
	MakeWait = 5 * time.Second
)

// errPulled is returned where the server that is read has no more messages.
var errPulled = errors.New("jetstream: a stream has no more messages")

// Query says which messages of a stream are read, in the order of the stream.
type Query struct {
	// From is the first sequence, and Since the earliest time of storage where From is 0.
	From  uint64
	Since time.Time
	// Last is the last sequence. 0 is the end of the stream when the reading begins, as its leader
	// knows it.
	Last uint64
	// Until, if not zero, is the latest time of storage.
	Until time.Time
	// Subjects, if not empty, selects the messages with these subjects.
	Subjects []string
	// LatestPerSubject reads only the newest message of each subject.
	LatestPerSubject bool
	HeadersOnly      bool
	// Max, if not 0, is the maximum number of messages.
	Max int
	// Batch and Bytes are how many messages, and bytes of them, are asked for at a time: default
	// 2,048 and 512 KiB.
	Batch, Bytes int
	// Again, if not nil, is called before what was cut off begins again. Its error ends the
	// reading.
	Again func(context.Context) error
}

// beyond reports whether a message lies behind what is read. The newest message of a subject is
// read wherever it is: it may have replaced one before Last when the server looked.
func (q *Query) beyond(m *conn.StoredMsg) bool {
	return m.Seq > q.Last && !q.LatestPerSubject || !q.Until.IsZero() && m.Time.After(q.Until)
}

// consumer is the configuration of a consumer that has what is left to read.
func (q *Query) consumer() natsjs.ConsumerConfig {
	cfg := natsjs.ConsumerConfig{
		Name: rand.Text(), AckPolicy: natsjs.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: pullForgotten,
		FilterSubjects: q.Subjects, HeadersOnly: q.HeadersOnly,
	}
	switch {
	case q.LatestPerSubject:
		cfg.DeliverPolicy = natsjs.DeliverLastPerSubjectPolicy
	case q.From > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = natsjs.DeliverByStartSequencePolicy, q.From
	case !q.Since.IsZero():
		cfg.DeliverPolicy, cfg.OptStartTime = natsjs.DeliverByStartTimePolicy, &q.Since
	}
	return cfg
}

// Through calls f for each message of a query, until f returns an error, and returns that error as
// it is; nil for ErrStop. What is cut off goes on where it was. The stream's leader says where the
// end is, whichever replica is read. Through returns ErrNotFound when the stream does not exist,
// and an internal *Error when NATS fails to answer properly.
func (r *Messages) Through(ctx context.Context, stream string, q Query, f func(*conn.StoredMsg) error) error {
	err := r.Windows(ctx, stream, q, func(window []*conn.StoredMsg) error {
		for _, m := range window {
			if err := f(m); err != nil {
				return Own(err)
			}
		}
		return nil
	})
	if errors.Is(err, ErrStop) {
		return nil
	}
	return err
}

// Walk is Through for a stream that is known to exist: one that is gone counts for a failure of
// NATS.
func (r *Messages) Walk(ctx context.Context, stream string, q Query, f func(*conn.StoredMsg) error) error {
	var own error
	err := r.Through(ctx, stream, q, func(m *conn.StoredMsg) error {
		own = f(m)
		return own
	})
	if own == nil && errors.Is(err, event.ErrNotFound) {
		return r.Conn.Unavailable(err)
	}
	return err
}

// Windows is Through with several messages at a time. An error that f marks as its own (Own) ends
// the reading, and is returned. With any other error of f, the window is read again.
func (r *Messages) Windows(ctx context.Context, stream string, q Query, f func([]*conn.StoredMsg) error) error {
	err := r.goOn(ctx, stream, &q, f)
	ok, own := OwnError(err)
	switch {
	case ok:
		return own
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil, errors.Is(err, event.ErrNotFound):
		return err
	}
	return r.Conn.Unavailable(err)
}

// goOn reads, and begins again where it was when it is cut off.
func (r *Messages) goOn(ctx context.Context, stream string, q *Query, f func([]*conn.StoredMsg) error) error {
	if q.Last == 0 {
		info, err := r.Conn.FindStream(ctx, stream)
		if err != nil {
			return err
		}
		q.Last = info.State.LastSeq
	}
	moved := time.Now()
	for failed := 0; ; {
		if q.From > q.Last || q.Last == 0 {
			return nil
		}
		began := q.From
		err := r.windows(ctx, stream, q, f)
		if own, _ := OwnError(err); err == nil || own {
			return err
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case r.Conn.Ctx.Err() != nil:
			return event.ErrClosed
		}
		if q.Again != nil {
			if err := q.Again(ctx); err != nil {
				return Own(err)
			}
		}
		if errors.Is(err, natsjs.ErrStreamNotFound) {
			return event.ErrNotFound
		}
		if q.From > began && !q.LatestPerSubject {
			failed, moved = 0, time.Now()
			continue
		}
		failed++
		patient := q.Again != nil || time.Since(moved) < MakeWait
		// the newest ones of subjects would come again
		if failed == tries || !patient || q.From > 0 && q.LatestPerSubject {
			return err
		}
		if err := r.Conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// windows reads through one consumer. It returns nil at the end, and ErrBehind where the replica
// that was read has not what the leader has.
func (r *Messages) windows(ctx context.Context, stream string, q *Query, f func([]*conn.StoredMsg) error) error {
	err := r.pullAll(ctx, stream, q, f)
	if !errors.Is(err, errPulled) {
		return err
	}
	from := q.From
	if q.Since.IsZero() {
		from = max(from, 1)
	}
	left, err := r.LeaderNext(ctx, stream, from, q.Since, q.Subjects)
	if err != nil || left == nil || left.Seq > q.Last || q.beyond(left) {
		return err
	}
	return ErrBehind
}

// pullAll reads through one consumer, to the end of the query, or until the consumer has no more:
// then it returns errPulled. It moves the query behind what f has taken.
func (r *Messages) pullAll(ctx context.Context, stream string, q *Query, f func([]*conn.StoredMsg) error) error {
	p, err := r.openPull(ctx, stream, q)
	if err != nil {
		return err
	}
	defer p.close(ctx)
	buffer := make([]*conn.StoredMsg, 0, min(p.batch, pullWindow))
	for {
		if err := ctx.Err(); err != nil { // a quick server would keep the reader from its end
			return err
		}
		came, err := p.window(ctx, buffer)
		if err != nil {
			return err
		}
		window, ended := came, false
		if q.Max > 0 && len(window) >= q.Max {
			window, ended = window[:q.Max], true
		}
		if i := slices.IndexFunc(window, q.beyond); i >= 0 {
			window, ended = window[:i], true
		}
		if len(window) > 0 {
			if err := f(window); err != nil {
				return err
			}
			last := window[len(window)-1].Seq
			q.From, q.Max = last+1, max(q.Max-len(window), 0)
			ended = ended || last == q.Last && !q.LatestPerSubject
		}
		if ended {
			return nil
		}
		clear(came)
	}
}

// pull reads messages of a stream in order through a pull consumer without acks, a batch ahead of
// its reader. The server forgets the consumer by itself when the hub dies. A message that is lost
// on the way ends the pull; the reader begins a new one behind the last message.
type pull struct {
	conn    *conn.Pool
	link    *conn.Link
	stream  string
	name    string // of the consumer
	subject string // of requests
	inbox   string
	sub     *nats.Subscription
	came    chan *nats.Msg // has room for all that was asked for
	silence *time.Timer

	batch    int
	bytes    int
	asked    int    // messages that may still come
	room     int    // bytes that they may have
	requests int    // begun
	open     int    // requests that have not ended
	fresh    bool   // nothing has come since the last request began
	one      bool   // the next message is larger than a request
	solo     bool   // a request of that message is under way
	ended    bool   // the requests that began are enough
	over     bool   // there is no more
	seen     uint64 // messages in all
}

// openPull makes the consumer of a pull.
func (r *Messages) openPull(ctx context.Context, stream string, q *Query) (*pull, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	link := r.Conn.Link()
	if link.Cluster.Load() {
		// The consumer is made over this connection. Servers behind others may learn of it later.
		link = r.Conn.Links[0]
	}
	cfg := q.consumer()
	p := &pull{conn: r.Conn, link: link, stream: stream, name: cfg.Name, inbox: nats.NewInbox(), batch: cmp.Or(q.Batch, pullBatch), bytes: cmp.Or(q.Bytes, pullBytes)}
	if q.Max > 0 {
		p.batch = min(p.batch, q.Max)
	}
	p.subject = r.Conn.API + "CONSUMER.MSG.NEXT." + stream + "." + p.name
	p.came = make(chan *nats.Msg, (pullRequests+1)*p.batch+16) // and what ends requests
	var err error
	if p.sub, err = p.link.NC.ChanSubscribe(p.inbox+".*", p.came); err != nil {
		return nil, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind.
	making, made := context.WithTimeout(context.WithoutCancel(ctx), MakeWait)
	defer made()
	if _, err = r.Conn.JS.CreateConsumer(making, stream, cfg); err != nil {
		_ = p.sub.Unsubscribe()
		if making.Err() != nil { // the server may have made the consumer
			p.remove(ctx)
		}
		return nil, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	p.silence = time.NewTimer(pullSilence)
	return p, nil
}

// window appends the next messages to into, up to its capacity: at least one, for which it waits,
// and those that have come. It returns errPulled when there are no more.
func (p *pull) window(ctx context.Context, into []*conn.StoredMsg) ([]*conn.StoredMsg, error) {
	if p.over {
		return nil, errPulled
	}
	for len(into) < cap(into) {
		if err := p.ask(); err != nil {
			return nil, err
		}
		var m *nats.Msg
		select {
		case m = <-p.came:
		default:
			if len(into) > 0 {
				return into, nil
			}
			var err error
			if m, err = p.wait(ctx); err != nil {
				return nil, err
			}
		}
		at, ok := conn.ParseAckSubject(m.Reply)
		if !ok {
			err := p.end(m)
			if p.over = errors.Is(err, errPulled); p.over && len(into) > 0 {
				return into, nil
			}
			if err != nil {
				return nil, err
			}
			continue
		}
		// without acks nothing is sent twice: a hole would stay one
		if p.seen++; at.Order != p.seen {
			return nil, fmt.Errorf("%w: message %d is missing", conn.ErrFeedCut, p.seen)
		}
		p.asked--
		p.room -= m.Size()
		p.fresh, p.solo = false, false
		into = append(into, &conn.StoredMsg{Subject: m.Subject, Seq: at.StreamSeq, Header: m.Header, Data: m.Data, Time: time.Unix(0, at.StoredAt), Size: m.Size()})
	}
	return into, nil
}

// ask begins a request when less than half of one is left.
func (p *pull) ask() error {
	if p.asked <= 0 {
		p.asked, p.room, p.open, p.ended = 0, 0, 0, false
	}
	switch {
	case p.ended, p.solo, p.one && p.open > 0:
		return nil
	case p.open > 0 && (p.open == pullRequests || p.asked > p.batch/2 && p.room > p.bytes/2):
		return nil
	}
	request := map[string]any{"batch": p.batch, "no_wait": true, "max_bytes": p.bytes}
	n := p.batch
	if p.solo, p.one = p.one, false; p.solo {
		n, request = 1, map[string]any{"batch": 1, "no_wait": true}
	}
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	p.requests++
	if err := p.link.NC.PublishMsg(&nats.Msg{Subject: p.subject, Reply: p.inbox + "." + strconv.Itoa(p.requests), Data: body}); err != nil {
		return err
	}
	p.asked += n
	p.room += p.bytes
	p.open++
	p.fresh = true
	return nil
}

// end takes a message that ends a request. All messages that were sent before have come by then.
func (p *pull) end(m *nats.Msg) error {
	status, why := m.Header.Get("Status"), m.Header.Get("Description")
	switch {
	case status == "404": // there is no more
		return errPulled
	case status == "408": // the requests before are enough for what is left: the end of one tells
		p.ended = true
		p.asked -= p.batch
		p.room -= p.bytes
	case status == "409" && (why == "Batch Completed" || why == "Message Size Exceeds MaxBytes"):
		p.one = why != "Batch Completed" && p.fresh
		p.asked -= max(headerInt(m, "Nats-Pending-Messages"), 0)
		p.room -= headerInt(m, "Nats-Pending-Bytes")
	default:
		return fmt.Errorf("%w: status %s %s", conn.ErrFeedCut, status, why)
	}
	if p.open--; p.open <= 0 {
		p.asked = 0
	}
	return nil
}

// headerInt is a number of a message that ends a request.
func headerInt(m *nats.Msg, name string) int {
	n, _ := strconv.Atoi(m.Header.Get(name))
	return n
}

// wait returns the next message that comes.
func (p *pull) wait(ctx context.Context) (*nats.Msg, error) {
	p.silence.Reset(pullSilence)
	select {
	case m := <-p.came:
		return m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-p.conn.Ctx.Done():
		return nil, event.ErrClosed
	case <-p.silence.C:
		return nil, fmt.Errorf("%w: the server is silent", conn.ErrFeedCut)
	}
}

// close removes the consumer; what the server is not told it finds out by itself.
func (p *pull) close(ctx context.Context) {
	p.silence.Stop()
	_ = p.sub.Unsubscribe() // it fails where the connection is closed, which ends it too
	p.remove(ctx)
}

func (p *pull) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = p.conn.JS.DeleteConsumer(ctx, p.stream, p.name)
}
