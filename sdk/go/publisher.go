package eventhub

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"eventhub/sdk/go/wire"
)

const (
	// maxFrame is the longest frame, in bytes, that the hub takes. The hub skips longer ones.
	maxFrame = 4 << 20
	// sweepEvery is how often publishes that wait are looked at, while there is no connection.
	sweepEvery = 250 * time.Millisecond
	// idleFor is how long the sender sleeps when nothing waits.
	idleFor = time.Hour
)

// pending is a publish without an answer for its caller.
type pending struct {
	number  uint64 // publishes are sent in the order of their numbers
	topic   string
	payload []byte
	opts    wire.PublishOptions
	size    int
	made    time.Time
	sent    time.Time // first; zero while the event was not sent
	rest    time.Time // not to be sent before
	retries int
	doubt   bool // the hub may have stored the event
	over    bool // the caller has its answer
	done    func(id string, err error)
}

// publisher sends events and sees to it that each is answered once. Every event has an id, so that
// it can be sent again after its connection broke. One goroutine, run, sends.
type publisher struct {
	opts Options
	ids  *idMaker
	work chan struct{} // wakes run

	mu      sync.Mutex
	number  uint64
	queue   []*pending // to be sent, by number
	back    []*pending // to be sent again, in any order
	resting []*pending // to be sent again later
	count   int        // of all publishes without an answer
	bytes   int
	conn    *wire.Conn // nil while there is none
	halted  time.Time  // nothing is sent before
	halts   int
	failure *Error        // ends all, now and from now on
	freed   chan struct{} // closed when a publish is answered; nil while nobody waits
}

func newPublisher(opts Options) *publisher {
	return &publisher{opts: opts, ids: newIDMaker(), work: make(chan struct{}, 1)}
}

// prepare makes a publish, which enqueue takes.
func (p *publisher) prepare(topic string, payload any, opts wire.PublishOptions, done func(string, error)) (*pending, *Error) {
	text, err := encode(payload)
	if err != nil {
		return nil, err
	}
	if opts.ID == "" {
		opts.ID = p.ids.next()
	}
	item := &pending{topic: topic, payload: text, opts: opts, made: time.Now(), done: done}
	if item.size = frameSize(item); item.size > maxFrame {
		err := newError("publish_failed", fmt.Sprintf("the event is larger than %d bytes", maxFrame), nil)
		err.Retryable = false
		return nil, err
	}
	return item, nil
}

// frameSize returns about how many bytes the frame of a publish has.
func frameSize(item *pending) int {
	const names = 160 // of the fields, and what stands between them
	o := &item.opts
	size := names + len(item.payload) + len(item.topic) + len(o.ID) + len(o.Key) + len(o.SID)
	for name, value := range o.Headers {
		size += len(name) + len(value) + 6
	}
	for _, text := range slices.Concat(o.Tags, o.CausedBy) {
		size += len(text) + 3
	}
	return size
}

// enqueue takes a publish into the queue, if there is room.
func (p *publisher) enqueue(item *pending) *Error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failure != nil {
		return p.failure
	}
	if !p.room(item) {
		return newError(CodeBufferFull, fmt.Sprintf("%d events wait for their answers: wait for some, or use PublishAsync or PublishMany", p.count), nil)
	}
	p.number++
	item.number = p.number
	p.count++
	p.bytes += item.size
	p.queue = append(p.queue, item)
	p.wake()
	return nil
}

// room reports whether the buffer takes another publish. mu is held.
func (p *publisher) room(item *pending) bool {
	return p.count < p.opts.BufferEvents && p.bytes+item.size <= p.opts.BufferBytes
}

// awaitRoom waits until the buffer may take a publish. It returns an error when ctx ends, or when
// the publish is larger than the whole buffer.
func (p *publisher) awaitRoom(ctx context.Context, item *pending) *Error {
	if item.size > p.opts.BufferBytes {
		return newError(CodeBufferFull, fmt.Sprintf("the event is larger than the buffer of %d bytes (BufferBytes)", p.opts.BufferBytes), nil)
	}
	if p.until(ctx, func() bool { return p.failure != nil || p.room(item) }) != nil {
		return aborted(ctx)
	}
	return nil
}

func (p *publisher) wake() {
	select {
	case p.work <- struct{}{}:
	default:
	}
}

// run sends what waits, until ctx ends.
func (p *publisher) run(ctx context.Context) {
	timer := time.NewTimer(idleFor)
	defer timer.Stop()
	for {
		item, conn, wait, late := p.next(time.Now())
		for _, l := range late {
			l.done("", unknownOutcome(nil))
		}
		if item != nil {
			p.transmit(conn, item) //nolint:contextcheck // the end of the connection ends the wait
			continue
		}
		timer.Reset(wait)
		select {
		case <-p.work:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}

// next returns the publish to send now and the connection for it, or for how long nothing is to be
// done. late are publishes in doubt that the hub may have forgotten.
func (p *publisher) next(now time.Time) (item *pending, conn *wire.Conn, wait time.Duration, late []*pending) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wait = idleFor
	p.resting = slices.DeleteFunc(p.resting, func(r *pending) bool {
		if now.Before(r.rest) && !r.over {
			wait = min(wait, r.rest.Sub(now))
			return false
		}
		p.back = append(p.back, r)
		return true
	})
	if len(p.back) > 0 {
		p.queue = append(p.queue, p.back...)
		p.back = nil
		slices.SortFunc(p.queue, func(a, b *pending) int {
			if a.number < b.number {
				return -1
			}
			return 1
		})
	}
	if p.conn == nil || now.Before(p.halted) {
		p.queue = slices.DeleteFunc(p.queue, func(q *pending) bool { return p.drop(q, now, &late) })
		if len(p.queue) > 0 {
			wait = min(wait, sweepEvery)
		}
		if p.conn != nil {
			wait = min(wait, p.halted.Sub(now))
		}
		return nil, nil, wait, late
	}
	for len(p.queue) > 0 {
		first := p.queue[0]
		p.queue[0] = nil
		p.queue = p.queue[1:]
		if p.drop(first, now, &late) {
			continue
		}
		return first, p.conn, 0, late
	}
	p.queue = nil // what was sent is not held by an old array
	return nil, nil, wait, late
}

// drop reports whether a publish is not to be sent any more.
func (p *publisher) drop(item *pending, now time.Time, late *[]*pending) bool {
	if item.over {
		p.settle(item)
		return true
	}
	if item.doubt && p.tooLate(item, now) {
		p.settle(item)
		*late = append(*late, item)
		return true
	}
	return false
}

// tooLate reports whether the hub may have forgotten the id. A sixth of the window is left for the
// way. The clock that nobody sets stands still while a machine sleeps, and the other may be set.
func (p *publisher) tooLate(item *pending, now time.Time) bool {
	age := max(now.Sub(item.sent), now.Round(0).Sub(item.sent.Round(0)))
	return age > p.opts.DuplicateWindow*5/6
}

// transmit sends a publish. It waits while Options.Window publishes are unanswered.
func (p *publisher) transmit(conn *wire.Conn, item *pending) {
	p.mu.Lock()
	first := item.sent.IsZero()
	if first {
		item.sent = time.Now()
	}
	p.mu.Unlock()
	err := conn.PublishAsync(item.topic, item.payload, item.opts, func(id string, err error) { p.answered(item, id, err) })
	if err == nil {
		return
	}
	// Nothing was sent: the connection has ended.
	p.mu.Lock()
	if first {
		item.sent = time.Time{}
	}
	if p.conn == conn {
		p.conn = nil
	}
	failure, over := p.failure, item.over
	if failure == nil {
		p.back = append(p.back, item)
	} else {
		p.settle(item)
	}
	p.mu.Unlock()
	if failure != nil && !over {
		item.fail(failure)
	}
}

// answered is called with the hub's answer to a publish, or when its connection has ended.
func (p *publisher) answered(item *pending, id string, err error) {
	p.mu.Lock()
	over := item.over
	failure, again := p.judge(item, err)
	if !again {
		p.settle(item)
	}
	p.mu.Unlock()
	switch {
	case again:
		p.wake()
	case over: // the caller has its answer
	case failure != nil:
		item.done("", failure)
	default:
		item.done(id, nil)
	}
}

// judge decides about a publish: it is stored, has failed, or is sent again. mu is held.
func (p *publisher) judge(item *pending, err error) (failure *Error, again bool) {
	if err == nil {
		p.halts = 0
		return nil, false
	}
	now := time.Now()
	young := now.Sub(item.made) < p.opts.Retry
	refused, isAnswer := errors.AsType[*wire.Error](err)
	switch {
	case item.over:
		return nil, false
	case !isAnswer: // the connection has ended
		item.doubt = true
		if p.failure != nil {
			return unknownOutcome(p.failure), false
		}
	case refused.Code == "unauthorized": // a new token was refused: the connection ends
	case (refused.Code == "rate_limited" || refused.Code == "overloaded") && young:
		if now.After(p.halted) {
			p.halted = now.Add(backoff(p.halts))
			p.halts++
		}
	case refused.Code == "publish_failed" && !refused.Permanent:
		// The hub does not know whether the event is stored. Repeating the publish tells.
		item.doubt = true
		if !young {
			return fromWire(err), false
		}
		item.rest = now.Add(backoff(item.retries))
		item.retries++
		p.resting = append(p.resting, item)
		return nil, true
	default:
		failure = fromWire(err)
		if item.doubt {
			failure = unknownOutcome(failure)
		}
		return failure, false
	}
	p.back = append(p.back, item)
	return nil, true
}

func backoff(n int) time.Duration {
	return jitter(min(5*time.Second, 100*time.Millisecond<<min(n, 10)))
}

// settle frees the place of a publish. mu is held.
func (p *publisher) settle(item *pending) {
	item.over = true
	p.count--
	p.bytes -= item.size
	if p.freed != nil {
		close(p.freed)
		p.freed = nil
	}
}

func (item *pending) fail(err *Error) {
	if item.doubt {
		err = unknownOutcome(err)
	}
	item.done("", err)
}

// abandon gives a publish up because ctx ended, and returns the error for its caller; nil if the
// answer was faster. The place is freed by the hub's answer, or when its turn comes.
func (p *publisher) abandon(ctx context.Context, item *pending) *Error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if item.over {
		return nil
	}
	item.over = true
	p.wake()
	if !item.sent.IsZero() {
		return newError(CodeOutcomeUnknown, "the call ended early, after the event had been sent", context.Cause(ctx))
	}
	return aborted(ctx)
}

// connected sends from now on over conn; nil stops sending.
func (p *publisher) connected(conn *wire.Conn) {
	p.mu.Lock()
	p.conn = conn
	p.halted = time.Time{}
	p.mu.Unlock()
	p.wake()
}

// end fails everything, now and from now on.
func (p *publisher) end(err *Error) {
	p.mu.Lock()
	p.failure, p.conn = err, nil
	all := slices.Concat(p.queue, p.back, p.resting)
	p.queue, p.back, p.resting = nil, nil, nil
	var open []*pending
	for _, item := range all {
		if !item.over {
			open = append(open, item)
		}
		p.settle(item)
	}
	p.mu.Unlock()
	for _, item := range open {
		item.fail(err)
	}
}

// pending returns how many publishes have no answer.
func (p *publisher) pending() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// idle waits until nothing waits for an answer, or until ctx ends.
func (p *publisher) idle(ctx context.Context) error {
	return p.until(ctx, func() bool { return p.count == 0 })
}

// until waits until a condition holds that a publish's answer may bring about. It holds mu while
// asking.
func (p *publisher) until(ctx context.Context, holds func() bool) error {
	for {
		p.mu.Lock()
		if holds() {
			p.mu.Unlock()
			return nil
		}
		if p.freed == nil {
			p.freed = make(chan struct{})
		}
		freed := p.freed
		p.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
