package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// headerExpectSeq has a stream refuse a message unless its last one has that sequence.
const headerExpectSeq = natsjs.ExpectedLastSeqHeader

// queueOf is the queue of a group, or why there is none.
type queueOf struct {
	name string
	err  error
}

// toGroups puts the events of a batch back to their groups.
func (r *redrive) toGroups(ctx context.Context, batch []*Letter) error {
	left := batch
	r.charged = make(map[letterRef]bool, len(batch)) // what is tried again counts once
	for try := 0; len(left) > 0; try++ {
		if try == redriveTries {
			return &event.Error{Code: event.CodeInternal, Msg: "the event store did not confirm that events were put back: try again later; none is put back twice"}
		}
		var err error
		if left, err = r.putBack(ctx, left); err != nil {
			return err
		}
		if len(left) > 0 {
			if err := r.letters.conn.Pause(ctx, min(50*time.Millisecond<<try, time.Second)); err != nil {
				return err
			}
		}
	}
	return nil
}

// putBack stores copies of the letters' events in the queues of their groups, and removes the
// letters. It returns those to be tried again.
//
// The outcome is exact however often, by however many hubs, and however late it is tried:
//   - a copy is not handed out before its letter is gone (Delivery.removeLetter), so while a letter
//     is there, so is the copy that was made of it;
//   - look reads the queue's last sequence, then that there is no copy, then that the letter is
//     there: up to that sequence, no copy was made;
//   - a copy is stored only if nothing was put back after that sequence
//     (Nats-Expected-Last-Sequence), and if no copy of its letter is there, should a server that
//     led the stream before have answered.
func (r *redrive) putBack(ctx context.Context, batch []*Letter) (again []*Letter, err error) {
	d := r.letters
	if err := r.findQueues(ctx, batch); err != nil {
		return nil, err
	}
	select {
	case d.puttingBack <- struct{}{}: // several of this hub would make each other repeat
		defer func() { <-d.puttingBack }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	out, last, looked := r.look(ctx, batch)
	r.send(ctx, out, last)
	again, ended := r.ended(ctx, out)
	return again, cmp.Or(ended, looked)
}

// look returns the copies that the letters of a batch need, and the last sequence of the stream of
// copies from before it looked. With an error, the copies are those of the letters before.
func (r *redrive) look(ctx context.Context, batch []*Letter) (out []*putting, last uint64, err error) {
	d := r.letters
	stream, err := d.queues.openPutBack(ctx)
	if err != nil {
		return nil, 0, d.conn.Unavailable(err)
	}
	last = stream.State.LastSeq
	now, copied, errs := make([]*Letter, len(batch)), make([]bool, len(batch)), make([]error, len(batch))
	each(batch, func(i int, l *Letter) {
		if q := r.queues[[2]string{l.Topic, l.Group}]; q.name != "" {
			if copied[i], errs[i] = r.copied(ctx, q.name, l); errs[i] != nil {
				return
			}
		}
		now[i], errs[i] = r.current(ctx, l)
	})
	if err := firstError(errs); err != nil {
		return nil, 0, err
	}
	for i, l := range batch {
		q := r.queues[[2]string{l.Topic, l.Group}]
		switch {
		case now[i] == nil:
			r.result.skip("another redrive or discard was first, or the letter was removed by retention")
			continue
		case now[i].Fault == "" && q.err != nil:
			r.result.skip(q.err.Error())
			continue
		case copied[i]:
			out = append(out, &putting{listed: l, stored: true})
			continue
		}
		ready, why, err := r.prepare(ctx, now[i])
		if err != nil {
			return out, last, err
		}
		if why != "" {
			r.result.skip(why)
			continue
		}
		out = append(out, &putting{listed: l, letter: ready, queue: q.name})
	}
	return out, last, nil
}

// copied reports whether a queue has the copy of a letter.
func (r *redrive) copied(ctx context.Context, queue string, l *Letter) (bool, error) {
	_, err := r.letters.conn.LastBySubject(ctx, putBackStream, queueSubject(queue)+l.ref().token())
	if errors.Is(err, event.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, r.letters.conn.Unavailable(err)
	}
	return true, nil
}

// putting is a copy on its way.
type putting struct {
	listed *Letter
	letter *letter // nil when the copy was stored before
	queue  string
	stored bool
	err    error // of the publish
}

// send publishes copies that expect to follow each other behind the given sequence.
func (r *redrive) send(ctx context.Context, out []*putting, last uint64) {
	d := r.letters
	l := d.conn.Link()
	type answer struct {
		i   int
		err error
	}
	answers := make(chan answer, len(out))
	asked := 0
	for i, p := range out {
		if p.stored {
			continue
		}
		h := p.letter.copyHeader()
		h[natsjs.ExpectedLastSubjSeqHeader] = []string{"0"}
		h[headerExpectSeq] = []string{strconv.FormatUint(last, 10)}
		last++
		p.err = conn.ErrNoReply
		msg := &nats.Msg{Subject: queueSubject(p.queue) + p.listed.ref().token(), Header: h, Data: p.letter.event.Payload}
		err := l.Ask(msg, d.clock.Now(), conn.AskerFunc(func(reply *nats.Msg, err error) {
			switch {
			case err != nil:
			case conn.NoResponders(reply):
				err = nats.ErrNoResponders
			default:
				_, err = conn.ParsePubAck(reply.Data, putBackStream)
			}
			answers <- answer{i, err}
		}))
		if err != nil {
			p.err = err
			continue
		}
		asked++
	}
	for range asked {
		select {
		case a := <-answers:
			out[a.i].err = a.err
		case <-ctx.Done():
			return
		}
	}
}

// ended takes the outcome of what was sent: it removes the letters of what is stored, and returns
// the letters to be tried again.
func (r *redrive) ended(ctx context.Context, out []*putting) (again []*Letter, err error) {
	d := r.letters
	errs := make([]error, len(out))
	var wg sync.WaitGroup
	for _, p := range out {
		wg.Go(func() {
			switch {
			case p.stored:
			case p.err == nil:
				p.stored = true
			case ctx.Err() == nil && !full(p.err) && !conn.TooLarge(p.err):
				// Somebody else was first, or the outcome is not known.
				p.stored, _ = r.copied(ctx, p.queue, p.listed)
			}
			if !p.stored {
				return
			}
			// If this fails, the hub that delivers the event does it.
			if err := d.conn.RemoveMsg(ctx, p.listed.Stream, p.listed.Sequence); err != nil && ctx.Err() == nil {
				d.often.Log(ctx, slog.LevelWarn, "failed to remove a dead letter that was put back; the next delivery removes it", p.listed.Stream,
					slog.String("stream", p.listed.Stream), slog.Uint64("sequence", p.listed.Sequence), slog.Any("error", err))
			}
		})
	}
	wg.Wait()
	for i, p := range out {
		switch {
		case p.stored:
			r.result.Done++
		case ctx.Err() != nil:
			errs[i] = ctx.Err()
		case full(p.err):
			d.obs.LimitReached("put_back_bytes")
			errs[i] = &event.Error{Code: event.CodeOverloaded, Msg: "the event store has no room for more events that were put back: the letters that are left stay; redrive them when members have settled what waits"}
		case conn.TooLarge(p.err):
			r.result.skip("the event does not fit into a message of the event store")
		default:
			again = append(again, p.listed)
		}
	}
	return again, errors.Join(firstError(errs))
}

func firstError(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// findQueues finds the queues of the groups of a batch, anew for each batch: a group may have been
// deleted since. It returns an error for a group that has no room.
func (r *redrive) findQueues(ctx context.Context, batch []*Letter) error {
	d := r.letters
	clear(r.queues)
	for _, l := range batch {
		pair := [2]string{l.Topic, l.Group}
		if _, known := r.queues[pair]; known || l.Fault != "" {
			continue
		}
		if l.Group == DelayedGroup {
			r.queues[pair] = queueOf{err: errors.New("the event was delayed, and no group has had it: put it back to its topic")}
			continue
		}
		name, err := r.findQueue(ctx, l)
		switch {
		case errors.Is(err, event.ErrNotFound):
			r.queues[pair] = queueOf{err: fmt.Errorf("topic %s has no group %q any more", l.Topic, l.Group)}
			continue
		case err != nil:
			return d.conn.Unavailable(err)
		}
		waiting, leased, err := d.queues.putBackCount(ctx, name)
		if err != nil {
			return d.conn.Unavailable(err)
		}
		if waiting+leased+uint64(len(batch)) > uint64(d.limits.PutBack) { //nolint:gosec // it is positive
			d.obs.LimitReached("put_back")
			return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("group %q of topic %s has %d events that were put back and are not settled, and at most %d may be: the letters that are left stay; redrive them when its members have settled some", l.Group, l.Topic, waiting+leased, d.limits.PutBack)}
		}
		r.queues[pair] = queueOf{name: name}
	}
	return nil
}

func (r *redrive) findQueue(ctx context.Context, l *Letter) (string, error) {
	t, _, err := r.letters.streams.FreshExisting(ctx, l.Topic)
	if err != nil {
		return "", err
	}
	return r.letters.queues.groupQueue(ctx, t, l.Group)
}
