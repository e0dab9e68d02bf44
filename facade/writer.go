package facade

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade/textmsg"
	"eventhub/jetstream"
)

const (
	// flushSize is how many bytes go to the kernel in one call.
	flushSize = 256 << 10
	// itemCost is the weight of a queued delivery in bytes, besides its payload. minPrune is the
	// weight from which on the writer looks for deliveries that were given back.
	itemCost = 512
	minPrune = 1 << 20
	// maxPooledItems is the longest queue that is reused.
	maxPooledItems = 4096
)

// item is one message that waits to be sent: a reply, whose bytes come next in the batch's arena,
// or a delivery, which is encoded when its turn comes.
type item struct {
	held    *jetstream.Held   // nil for a reply
	sub     *subscription     // the delivery's subscription
	size    int               // bytes of the reply, or the weight of a delivery that was cast
	tried   bool              // the delivery is in the lane because it takes long to cast
	cast    bool              // the delivery comes from the lane
	start   int64             // offset of the message in batch.out, later on the wire
	sending jetstream.Sending // the delivery, once its lease has begun
}

// batch is the messages that the flusher takes at a time. Batches are pooled: an idle connection
// holds none.
type batch struct {
	items []item
	arena []byte // the replies, framed, back to back
	out   []byte // scratch: what goes to the kernel in one call
}

var batches = sync.Pool{New: func() any { return new(batch) }}

func putBatch(b *batch) {
	clear(b.items)
	if cap(b.items) > maxPooledItems || cap(b.arena) > flushSize || cap(b.out) > 2*flushSize {
		return
	}
	b.items, b.arena, b.out = b.items[:0], b.arena[:0], b.out[:0]
	batches.Put(b)
}

// writer is the single outbound queue of a connection, and its flusher. Two rules bound the queue:
// the subscriptions' maxInFlight bounds deliveries, and the reader, which waits in waitBelowLimit,
// bounds replies. Calls by the bus therefore never wait.
//
// All methods except run may be called concurrently.
type writer struct {
	wire  *wire
	limit int           // most waiting reply bytes
	grace time.Duration // to send what is queued when the connection is to be closed

	mu      sync.Mutex
	work    sync.Cond // the flusher has work
	below   sync.Cond // replies fell below limit, or the connection ended
	queue   *batch    // nil when empty
	woken   []*cast   // broadcasts that have something to send, each once
	spare   []*cast   // for the next ones
	replies int       // bytes of replies queued, being written, or waiting for their turn
	turns   turns     // replies without a corr that wait for earlier ones
	events  int       // bytes of queued deliveries, including those given back since
	taken   backlog   // what the flusher writes now: all of its frames, and the bytes of deliveries
	pruneAt int       // value of events at which those given back are dropped
	lane    castLane
	closing bool
	code    websocket.StatusCode // the reason; valid when closing
}

func newWriter(w *wire, limit int, grace time.Duration) *writer {
	ctx, cancel := context.WithCancel(context.Background())
	o := &writer{wire: w, limit: limit, grace: grace, pruneAt: minPrune, lane: castLane{ctx: ctx, cancel: cancel}}
	o.work.L = &o.mu
	o.below.L = &o.mu
	return o
}

// ok queues an OK frame. It copies its arguments and never blocks.
func (o *writer) ok(to replyTo, id string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.closing:
	case to.corr == nil && o.turns.waiting():
		o.parkLocked(to, framedOK(id))
	default:
		b := o.batchLocked()
		n := len(b.arena)
		b.arena = textmsg.End(appendOK(textmsg.Begin(b.arena), to.corr, id), n)
		o.replyLocked(b, n)
	}
}

// okAt queues the OK of a broadcast. It copies its arguments and never blocks.
func (o *writer) okAt(to replyTo, pos, reason string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.closing:
	case to.corr == nil && o.turns.waiting():
		o.parkLocked(to, textmsg.End(appendOKAt(textmsg.Begin(nil), nil, pos, reason), 0))
	default:
		b := o.batchLocked()
		n := len(b.arena)
		b.arena = textmsg.End(appendOKAt(textmsg.Begin(b.arena), to.corr, pos, reason), n)
		o.replyLocked(b, n)
	}
}

// err queues an ERR frame. final says that the same request fails again, although the code may mean
// otherwise. err copies its arguments and never blocks.
func (o *writer) err(to replyTo, c code, msg string, final bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.closing:
	case to.corr == nil && o.turns.waiting():
		o.parkLocked(to, framedErr(c, msg, final))
	default:
		o.errLocked(to.corr, c, msg, final)
	}
}

// notice queues an ERR frame that answers no frame and waits for no turn. It never blocks.
func (o *writer) notice(c code, msg string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closing {
		o.errLocked(nil, c, msg, false)
	}
}

func (o *writer) errLocked(corr []byte, c code, msg string, final bool) {
	b := o.batchLocked()
	n := len(b.arena)
	b.arena = textmsg.End(appendErr(textmsg.Begin(b.arena), corr, c, msg, final), n)
	o.replyLocked(b, n)
}

// assign queues an ASSIGN frame, which waits for no turn. It never blocks: a subscription has one
// for each time that slots move.
func (o *writer) assign(sub *subscription, a *jetstream.Assignment) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closing {
		return
	}
	b := o.batchLocked()
	n := len(b.arena)
	b.arena = textmsg.End(appendAssign(textmsg.Begin(b.arena), sub.groupJSON, a), n)
	o.replyLocked(b, n)
}

// deliver queues an event. It never blocks.
func (o *writer) deliver(h *jetstream.Held, sub *subscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closing {
		o.deliverLocked(item{held: h, sub: sub})
	}
}

func (o *writer) deliverLocked(it item) {
	b := o.batchLocked()
	b.items = append(b.items, it)
	if o.events += itemCost + len(it.held.Event.Payload); o.events >= o.pruneAt {
		o.pruneLocked(b)
	}
}

// pruneLocked drops deliveries that no longer belong to their subscription. A client that does not
// read but pauses and resumes would pile them up. The subscriptions' credit and held bytes bound
// the rest.
func (o *writer) pruneLocked(b *batch) {
	kept := b.items[:0]
	o.events = 0
	for _, it := range b.items {
		if it.held != nil {
			if !it.held.Valid() {
				if it.cast {
					o.lane.leaveLocked(&it)
					o.below.Broadcast()
				}
				continue
			}
			o.events += itemCost + len(it.held.Event.Payload)
		}
		kept = append(kept, it)
	}
	clear(b.items[len(kept):])
	b.items = kept
	o.pruneAt = max(2*o.events, minPrune)
}

// message queues a message that is framed, as a reply is. It copies the message and never blocks:
// the caller uses waitBelowLimit.
func (o *writer) message(framed []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closing {
		return
	}
	b := o.batchLocked()
	n := len(b.arena)
	b.arena = append(b.arena, framed...)
	o.replyLocked(b, n)
}

// wake has the flusher send what a broadcast has. It never blocks.
func (o *writer) wake(c *cast) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closing && !c.woken {
		c.woken = true
		o.woken = append(o.woken, c)
		o.work.Signal()
	}
}

// batchLocked returns the batch to append to. If the batch is new, it wakes the flusher.
func (o *writer) batchLocked() *batch {
	if o.queue == nil {
		o.queue, _ = batches.Get().(*batch)
		o.work.Signal()
	}
	return o.queue
}

func (o *writer) replyLocked(b *batch, start int) {
	size := len(b.arena) - start
	b.items = append(b.items, item{size: size})
	o.replies += size
}

// backlog is what waits to be sent.
type backlog struct{ bytes, frames int }

// queued returns what waits until the kernel takes it: replies, and deliveries that may since have
// been given back.
func (o *writer) queued() backlog {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := backlog{bytes: o.replies + o.events + o.taken.bytes, frames: o.taken.frames}
	if o.queue != nil {
		b.frames += len(o.queue.items)
	}
	b.frames += len(o.lane.waiting)
	return b
}

// waitBelowLimit waits while too many replies are queued. open reports whether the connection is
// still open, waited whether the call had to wait, and parked whether it waited for replies that
// wait for their turn.
func (o *writer) waitBelowLimit() (open, waited, parked bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.replies >= o.limit && !o.closing {
		waited = true
		parked = parked || o.turns.waiting()
		o.below.Wait()
	}
	return !o.closing, waited, parked
}

// waitBelow waits until fewer than n bytes of replies are queued. It returns false when the
// connection has ended.
func (o *writer) waitBelow(n int) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.replies >= n && !o.closing {
		o.below.Wait()
	}
	return !o.closing
}

// shut ends the connection: queued replies are sent, then the close code. Only the first call
// counts; shut reports whether this call was the first. It never blocks.
func (o *writer) shut(c websocket.StatusCode) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closing {
		return false
	}
	o.dropTurnsLocked()
	o.closing = true
	o.code = c
	o.wire.hurry(o.grace)
	o.work.Signal()
	o.below.Broadcast()
	return true
}

// run is the flusher. It returns when the connection is to be closed and everything that could be
// sent has been sent.
func (o *writer) run() websocket.StatusCode {
	defer o.lane.wg.Wait()
	defer o.lane.cancel()
	for {
		b, woken, closing := o.take()
		if b == nil && (closing || woken == nil) {
			return o.code
		}
		if b != nil {
			if tried, err := o.write(b, closing); err != nil {
				o.fail(b.items[:tried], err)
				putBatch(b)
				return o.code
			}
			o.mu.Lock()
			o.replies -= len(b.arena)
			o.taken = backlog{}
			o.below.Broadcast()
			o.mu.Unlock()
			putBatch(b)
		}
		if woken == nil || closing {
			continue
		}
		if err := o.flushWoken(woken); err != nil {
			o.fail(nil, err)
			return o.code
		}
	}
}

// flushWoken sends what broadcasts have.
func (o *writer) flushWoken(woken []*cast) error {
	for _, c := range woken {
		if err := c.flush(); err != nil {
			return err
		}
	}
	clear(woken)
	o.mu.Lock()
	o.spare = woken[:0]
	o.mu.Unlock()
	return nil
}

// take waits for messages to send. It returns neither a batch nor broadcasts when none is left and
// the connection is closing.
func (o *writer) take() (b *batch, woken []*cast, closing bool) {
	o.mu.Lock()
	for o.queue == nil && len(o.woken) == 0 && !o.closing {
		o.work.Wait()
	}
	o.mu.Unlock()
	// Goroutines that are about to send do so now, and share the system call.
	runtime.Gosched()
	o.mu.Lock()
	defer o.mu.Unlock()
	b = o.queue
	if b != nil {
		o.taken = backlog{bytes: o.events, frames: len(b.items)}
	}
	o.queue = nil
	o.events = 0
	if len(o.woken) > 0 {
		woken, o.woken, o.spare = o.woken, o.spare, nil
		for _, c := range woken {
			c.woken = false
			c.ready = c.live.Load() // what it queued before is in this batch, or was in one before
		}
	}
	return b, woken, o.closing
}

// write sends a batch. tried is the number of items that it reached. When the connection is
// closing, write skips events: they were not begun, so no event loses an attempt.
func (o *writer) write(b *batch, closing bool) (tried int, err error) {
	arena, sent := b.arena, 0
	for i := range b.items {
		it := &b.items[i]
		start := len(b.out)
		it.start = int64(start)
		switch {
		case it.held == nil:
			b.out = append(b.out, arena[:it.size]...)
			arena = arena[it.size:]
		case closing, it.sub.casts && !o.mayWrite(it):
			continue
		default:
			b.out = textmsg.End(it.sub.appendEvent(textmsg.Begin(b.out), it.held), start)
			var begun bool
			if it.sending, begun = it.held.BeginSend(); !begun {
				b.out = b.out[:start]
			}
		}
		if len(b.out) >= flushSize || i == len(b.items)-1 {
			if err := o.send(b.items[sent:i+1], &b.out); err != nil {
				return i + 1, err
			}
			sent = i + 1
		}
	}
	return len(b.items), o.send(b.items[sent:], &b.out) // closing may have passed the last one over
}

// send hands out, which holds the messages of items, to the kernel, and empties out.
func (o *writer) send(items []item, out *[]byte) error {
	if len(*out) == 0 {
		return nil
	}
	offset, err := o.wire.send(*out)
	for i := range items {
		items[i].start += offset
	}
	*out = (*out)[:0]
	if err == nil {
		written(items)
	}
	return err
}

// written starts the leases of events that the kernel has taken.
func written(items []item) {
	for i := range items {
		if items[i].sending.Begun() {
			items[i].sending.Written()
		}
	}
}

// fail ends the connection after a failed write. Events of which the kernel took no byte did not
// reach the client.
func (o *writer) fail(tried []item, err error) {
	accepted := o.wire.taken()
	cut := int64(math.MaxInt64)
	for i := range tried {
		it := &tried[i]
		if it.start < accepted {
			continue
		}
		cut = min(cut, it.start)
		if it.sending.Begun() {
			it.sending.TakeBack()
		}
	}
	if !errors.Is(err, errStalled) {
		o.shut(websocket.StatusAbnormalClosure)
		return
	}
	if o.shut(closeSlowConsumer) {
		// The close code can only follow a whole frame.
		o.wire.truncate(cut)
	}
}
