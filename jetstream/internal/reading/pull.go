package reading

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// Bounds of a rangePull.
const (
	// of one pull. The next one begins when half of it has been read.
	PullBatch = 512
	pullBytes = 512 << 10
	pullsMost = 3
	// pullSilence is how long the server may take to send what was asked for.
	pullSilence = 2 * time.Second
	// pullForgotten is how long a reader may hold still before the server forgets its consumer. The
	// reader then begins again.
	pullForgotten = 30 * time.Second
)

// errPulled is returned where the server that is read has no more messages.
var errPulled = errors.New("jetstream: a range has no more messages")

// rangePull reads messages of a stream in order through a pull consumer without acks, a batch ahead
// of its reader. The server forgets the consumer by itself when the hub dies. A message that is
// lost on the way ends the rangePull; the reader begins a new one behind the last message.
type rangePull struct {
	messages *Messages
	link     *conn.Link
	stream   string
	name     string // of the consumer
	subject  string // of pulls
	inbox    string
	sub      *nats.Subscription
	came     chan *nats.Msg // has room for all that was asked for
	silence  *time.Timer

	batch int
	asked int    // messages that may still come
	room  int    // bytes that they may have
	pulls int    // begun
	open  int    // pulls that have not ended
	fresh bool   // nothing has come since the last pull began
	one   bool   // the next message is larger than a pull
	solo  bool   // a pull of that message is under way
	ended bool   // the pulls that began are enough
	over  bool   // there is no more
	seen  uint64 // messages in all
}

// openRangePull makes the consumer of a rangePull that begins with a sequence, for given subjects
// if there are any.
func (r *Messages) openRangePull(ctx context.Context, stream string, from uint64, subjects []string, batch int) (*rangePull, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	link := r.Conn.Link()
	if link.Cluster.Load() {
		// The consumer is made over this connection. Servers behind others may learn of it later.
		link = r.Conn.Links[0]
	}
	p := &rangePull{messages: r, link: link, stream: stream, name: rand.Text(), inbox: nats.NewInbox(), batch: max(batch, 1)}
	p.subject = r.Conn.API + "CONSUMER.MSG.NEXT." + stream + "." + p.name
	p.came = make(chan *nats.Msg, 4*p.batch+16) // and what ends pulls
	var err error
	if p.sub, err = p.link.NC.ChanSubscribe(p.inbox+".*", p.came); err != nil {
		return nil, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind.
	making, made := context.WithTimeout(context.WithoutCancel(ctx), MakeWait)
	defer made()
	_, err = r.Conn.JS.CreateConsumer(making, stream, natsjs.ConsumerConfig{
		Name: p.name, AckPolicy: natsjs.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: pullForgotten,
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: max(from, 1), FilterSubjects: subjects,
	})
	if err != nil {
		_ = p.sub.Unsubscribe()
		return nil, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	p.silence = time.NewTimer(pullSilence)
	return p, nil
}

// Windows reads messages of a stream in order from *next up to last, of given subjects if there are
// any, and calls f with each window of them. f sets *next behind what it has taken; an error of its
// own, as Own marks it, ends the reading, and is returned. What is cut off begins again at *next,
// after a call of again if that is not nil.
func (r *Messages) Windows(ctx context.Context, stream string, next *uint64, last uint64, subjects []string, batch int, again func(context.Context) error, f func([]*conn.StoredMsg) error) error {
	for failed := 0; ; {
		began := *next
		err := r.windows(ctx, stream, next, last, subjects, batch, f)
		own, stops := errors.AsType[*stopError](err)
		switch {
		case err == nil:
			return nil
		case stops:
			return own.err
		case ctx.Err() != nil:
			return ctx.Err()
		case r.Conn.Ctx.Err() != nil:
			return event.ErrClosed
		}
		if failed++; *next > began {
			failed = 1
		}
		if failed == tries {
			return r.Conn.Unavailable(err)
		}
		if err := r.Conn.Pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		if again == nil {
			continue
		}
		if err := again(ctx); err != nil {
			return err
		}
	}
}

// windows reads through one consumer. It returns nil at the end, and ErrBehind where the replica
// that was read has not what the leader has.
func (r *Messages) windows(ctx context.Context, stream string, next *uint64, last uint64, subjects []string, batch int, f func([]*conn.StoredMsg) error) error {
	p, err := r.openRangePull(ctx, stream, *next, subjects, batch)
	if err != nil {
		return err
	}
	defer p.close(ctx)
	window := make([]*conn.StoredMsg, 0, PullBatch)
	for {
		if err := ctx.Err(); err != nil { // a quick server would keep the reader from its end
			return err
		}
		window, err = p.window(ctx, window[:0])
		if errors.Is(err, errPulled) { // that replica has no more: what does the leader say?
			left, err := r.LeaderNext(ctx, stream, *next, time.Time{}, subjects)
			switch {
			case err != nil:
				return err
			case left == nil || left.Seq > last:
				return nil
			}
			return ErrBehind
		}
		if err != nil {
			return err
		}
		if err := f(window); err != nil {
			return err
		}
		clear(window)
	}
}

// window appends the next messages to into, up to its capacity: at least one, for which it waits,
// and those that have come. It returns errPulled when there are no more.
func (p *rangePull) window(ctx context.Context, into []*conn.StoredMsg) ([]*conn.StoredMsg, error) {
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
			if errors.Is(err, errPulled) && len(into) > 0 {
				p.over = true
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
		into = append(into, &conn.StoredMsg{Subject: m.Subject, Seq: at.StreamSeq, Header: m.Header, Data: m.Data, Time: time.Unix(0, at.StoredAt)})
	}
	return into, nil
}

// ask begins a pull when less than half of one is left.
func (p *rangePull) ask() error {
	if p.asked <= 0 {
		p.asked, p.room, p.open = 0, 0, 0
	}
	switch {
	case p.ended, p.solo, p.one && p.open > 0:
		return nil
	case p.open > 0 && (p.open == pullsMost || p.asked > p.batch/2 && p.room > pullBytes/2):
		return nil
	}
	pull := map[string]any{"batch": p.batch, "no_wait": true, "max_bytes": pullBytes}
	n := p.batch
	if p.solo, p.one = p.one, false; p.solo {
		n, pull = 1, map[string]any{"batch": 1, "no_wait": true}
	}
	body, err := json.Marshal(pull)
	if err != nil {
		return err
	}
	p.pulls++
	if err := p.link.NC.PublishMsg(&nats.Msg{Subject: p.subject, Reply: p.inbox + "." + strconv.Itoa(p.pulls), Data: body}); err != nil {
		return err
	}
	p.asked += n
	p.room += pullBytes
	p.open++
	p.fresh = true
	return nil
}

// end takes a message that ends a pull. All messages that were sent before have come by then.
func (p *rangePull) end(m *nats.Msg) error {
	status, why := m.Header.Get("Status"), m.Header.Get("Description")
	switch {
	case status == "404": // there is no more
		return errPulled
	case status == "408": // the pulls before are enough for what is left: the end of one tells
		p.ended = true
		p.asked -= p.batch
		p.room -= pullBytes
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

// headerInt is a number of a message that ends a pull.
func headerInt(m *nats.Msg, name string) int {
	n, _ := strconv.Atoi(m.Header.Get(name))
	return n
}

// wait returns the next message that comes.
func (p *rangePull) wait(ctx context.Context) (*nats.Msg, error) {
	p.silence.Reset(pullSilence)
	select {
	case m := <-p.came:
		return m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-p.messages.Conn.Ctx.Done():
		return nil, event.ErrClosed
	case <-p.silence.C:
		return nil, fmt.Errorf("%w: the server is silent", conn.ErrFeedCut)
	}
}

// close removes the consumer; what the server is not told it finds out by itself.
func (p *rangePull) close(ctx context.Context) {
	p.silence.Stop()
	_ = p.sub.Unsubscribe() // it fails where the connection is closed, which ends it too
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = p.messages.Conn.JS.DeleteConsumer(ctx, p.stream, p.name)
}
