package eventhub

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"eventhub/sdk/go/wire"
)

// FromPos begins a broadcast behind BroadcastOptions.Pos.
const FromPos = "pos"

// What happens to a broadcast whose client or handler is slower than its events.
const (
	// SlowSkip leaves out the events up to the newest ones, and tells OnGap.
	SlowSkip = "skip"
	// SlowCatchUp leaves out nothing: what does not fit is read from the hub's store later.
	SlowCatchUp = "catchup"
	// SlowClose ends the broadcast with CodeBufferFull.
	SlowClose = "close"
)

// Why a broadcast does not go on where it was.
const (
	// ReasonTruncated: the topic does not hold those events any more.
	ReasonTruncated = "truncated"
	// ReasonTooFar: there are more of them than the hub reads for a client.
	ReasonTooFar = "too_far"
	// ReasonStreamChanged: the topic was created anew.
	ReasonStreamChanged = "stream_changed"
	// ReasonSnapshot: the connection broke within a snapshot, and the snapshot begins again.
	ReasonSnapshot = "snapshot"
	// ReasonGap: a watch left out changes, and takes a new snapshot.
	ReasonGap = "gap"
)

// Defaults and bounds of a broadcast.
const (
	DefaultQueueEvents = 8_192
	DefaultQueueBytes  = 16 << 20
	DefaultMaxKeys     = 100_000

	maxQueueEvents = 1_000_000
	maxKeys        = 10_000_000
	// maxSnapshotBytes bounds the events of a snapshot that wait for the handler.
	maxSnapshotBytes = 256 << 20
)

// BroadcastHandler handles an event of a broadcast. Events come in order, one at a time. A panic is
// recovered, and goes to Options.OnError as a *PanicError. ctx ends with the broadcast.
type BroadcastHandler func(ctx context.Context, e *BroadcastEvent)

// BroadcastEvent is an event of a broadcast.
type BroadcastEvent struct {
	Event

	// Pos is the place of the event, for BroadcastOptions.Pos.
	Pos string
	// Snapshot reports whether the event is of the snapshot. Pos is no place to go on from then.
	Snapshot bool
	// Tombstone reports whether the event removes its key.
	Tombstone bool
}

// A Gap says which events were left out: Missed events between the places From and To. Missed is 0
// when nobody can tell how many there are.
type Gap = wire.Gap

// A Presence says how many names are present at a topic, and which have come and left since the
// Presence before: at most 100 names each.
type Presence = wire.Presence

// A Reset says that a broadcast does not go on where it was, and for which Reason: one of the
// Reason constants. For ReasonTruncated and ReasonTooFar, a Gap may follow. For the others nobody
// knows which events were missed. Pos is where the broadcast goes on, "" at a snapshot.
type Reset struct {
	Reason, Pos string
}

// BroadcastOptions configure a broadcast. Zero fields take the defaults. History, Snapshot and From
// exclude one another.
//
// OnGap, OnReset, OnSnapshot and OnPresence are called on the goroutine of the handler, in order
// with the events, and may be nil.
type BroadcastOptions struct {
	// History is how many events from before come first, at most 1,000.
	History int
	// Snapshot has the newest event of each key come first. The topic must be compacted.
	Snapshot bool
	// From is where to begin: FromLatest, FromPos, FromTS or FromAfterID. Defaults to FromLatest.
	From string
	// Pos is a place, for FromPos. TS is in epoch milliseconds, for FromTS. AfterID is an event's
	// id, for FromAfterID.
	Pos     string
	TS      *int64
	AfterID string
	// Slow is what happens when the connection or the handler does not keep up: SlowSkip,
	// SlowCatchUp or SlowClose. Defaults to SlowSkip.
	Slow string
	// ConflateByKey has a newer event of a key replace those that were not handled yet.
	ConflateByKey bool
	// MinInterval is the least time between two moments in which the hub sends events, at most a
	// minute.
	MinInterval time.Duration
	// SchemaVersion is the version of the schema in which events come: from 1 on, or LatestVersion.
	// By default, events come as they are stored. OnGap is told of an event that the hub cannot
	// cast.
	SchemaVersion SchemaVersion
	// QueueEvents and QueueBytes bound what waits for the handler, besides a snapshot. Slow decides
	// when it is more. Default to 8,192, which is what a hub keeps, and 16 MiB.
	QueueEvents, QueueBytes int
	// MaxKeys is the most events of a snapshot that wait for the handler. A larger snapshot ends
	// the broadcast with CodeBufferFull. Defaults to 100,000.
	MaxKeys int

	// OnGap is told which events are left out, in the place of these events.
	OnGap func(Gap)
	// OnReset is told that the broadcast does not go on where it was.
	OnReset func(Reset)
	// OnSnapshot is told that the snapshot has ended: all changes behind pos follow.
	OnSnapshot func(pos string)
	// OnPresence requests presence, and is told who comes and leaves. The policy must allow the
	// action presence.
	OnPresence func(Presence)
	// Extra are options of SUBSCRIBE that this version does not know.
	Extra map[string]any
}

func (o BroadcastOptions) withDefaults() (BroadcastOptions, *Error) {
	for _, n := range []struct {
		name            string
		value           *int
		otherwise, most int
	}{
		{"QueueEvents", &o.QueueEvents, DefaultQueueEvents, maxQueueEvents},
		{"QueueBytes", &o.QueueBytes, DefaultQueueBytes, 1 << 40},
		{"MaxKeys", &o.MaxKeys, DefaultMaxKeys, maxKeys},
	} {
		if *n.value < 0 || *n.value > n.most {
			return o, newError("bad_options", fmt.Sprintf("%s %d is not within 1..%d", n.name, *n.value, n.most), nil)
		}
		if *n.value == 0 {
			*n.value = n.otherwise
		}
	}
	return o, nil
}

func (o BroadcastOptions) wire() wire.BroadcastOptions {
	conflate := ""
	if o.ConflateByKey {
		conflate = "key"
	}
	return wire.BroadcastOptions{
		History: o.History, Snapshot: o.Snapshot, From: o.From, Pos: o.Pos, TS: o.TS, AfterID: o.AfterID,
		Slow: o.Slow, Conflate: conflate, MinIntervalMS: o.MinInterval.Milliseconds(), Presence: o.OnPresence != nil,
		SchemaVersion: o.SchemaVersion, Extra: o.Extra,
	}
}

// Broadcast is a broadcast of a topic to this client. It goes on over reconnects, until it is
// ended. Its methods may be called concurrently.
type Broadcast struct {
	client  *Client
	topic   string
	opts    BroadcastOptions
	handler BroadcastHandler
	watch   *watch // nil for a plain broadcast; owned by work
	ctx     context.Context
	cancel  context.CancelFunc
	stop    func() bool   // forgets the context of Broadcast
	opened  chan struct{} // closed when accepted, or ended
	ended   chan struct{} // closed when it has ended
	idle    chan struct{} // closed when work has returned
	wake    chan struct{} // holds an element when work has something to do
	again   chan struct{} // holds an element when run has something to do

	control sync.Mutex // orders SUBSCRIBE and UNSUBSCRIBE; taken before mu

	mu       sync.Mutex
	accepted bool
	over     bool
	draining bool // nothing more is handled
	err      *Error
	conn     *wire.Conn // nil while there is none
	member   *wire.Broadcast
	// generation counts SUBSCRIBEs. What comes for an earlier one changes nothing.
	generation uint64
	retries    int
	retry      bool   // the SUBSCRIBE is to be repeated after a pause
	anew       bool   // the broadcast is to begin again at once
	held       bool   // nothing is taken until the queue is empty
	snapped    bool   // there is no snapshot, or it has ended
	partial    bool   // a part of a snapshot has come
	pos        string // behind which the broadcast goes on; "" before the first OK
	queue      castQueue
}

// Topic returns the topic of the broadcast.
func (b *Broadcast) Topic() string { return b.topic }

// Done is closed when the broadcast has ended. A handler may still run then.
func (b *Broadcast) Done() <-chan struct{} { return b.ended }

// Err returns the *Error with which the broadcast ended, or nil.
func (b *Broadcast) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil {
		return nil
	}
	return b.err
}

// Broadcast gives every event of a topic to handler, without a group and without acknowledgements,
// until ctx ends or until Unsubscribe. It returns when the hub has accepted the broadcast; while
// there is no connection, it waits. A client has at most one broadcast of a topic.
//
// After a reconnect the broadcast goes on behind the last event that came. OnGap or OnReset is told
// what was missed all the same. A broadcast ends when the topic is deleted or when a new token
// does not allow it: then Err has the reason, which Options.OnError is told as well.
//
// A handler that is slow delays neither other subscriptions nor the connection: events wait in a
// queue of BroadcastOptions.QueueEvents, and when the queue is full, Slow decides.
func (c *Client) Broadcast(ctx context.Context, topic string, opts BroadcastOptions, handler BroadcastHandler) (*Broadcast, error) {
	return c.broadcast(ctx, topic, opts, handler, nil)
}

func (c *Client) broadcast(ctx context.Context, topic string, opts BroadcastOptions, handler BroadcastHandler, w *watch) (*Broadcast, error) {
	if ctx.Err() != nil {
		return nil, aborted(ctx)
	}
	opts, failure := opts.withDefaults()
	if failure != nil {
		return nil, failure
	}
	b := &Broadcast{
		client: c, topic: topic, opts: opts, handler: handler, watch: w, snapped: !opts.Snapshot,
		opened: make(chan struct{}), ended: make(chan struct{}), idle: make(chan struct{}),
		wake: make(chan struct{}, 1), again: make(chan struct{}, 1),
		queue: castQueue{events: opts.QueueEvents, bytes: opts.QueueBytes, keys: opts.MaxKeys, conflate: opts.ConflateByKey},
	}
	b.ctx, b.cancel = context.WithCancel(context.WithoutCancel(ctx))
	b.stop = context.AfterFunc(ctx, func() { b.leave(ignore) })
	conn, failure := c.joinBroadcast(b)
	if failure != nil {
		b.stop()
		b.cancel()
		return nil, failure
	}
	if conn != nil {
		b.connected(conn)
	}
	<-b.opened
	b.mu.Lock()
	accepted, failure := b.accepted, b.err
	b.mu.Unlock()
	switch {
	case accepted:
		return b, nil
	case failure != nil:
		return nil, failure
	case ctx.Err() != nil:
		return nil, aborted(ctx)
	}
	return nil, closedError()
}

// connected subscribes on a connection, in place of an earlier SUBSCRIBE.
func (b *Broadcast) connected(conn *wire.Conn) {
	b.control.Lock()
	defer b.control.Unlock()
	if conn.Err() != nil {
		return // there is another, or will be
	}
	b.mu.Lock()
	b.conn = conn
	if b.over || b.draining || b.held {
		b.mu.Unlock()
		return
	}
	b.generation++
	generation, opts, old := b.generation, b.resumption(), b.member
	b.member, b.retry, b.anew = nil, false, false
	b.mu.Unlock()
	if old != nil {
		_ = old.UnsubscribeAsync(ignore) // otherwise the connection has ended
	}
	current := func() bool { return b.generation == generation && !b.over && !b.draining && !b.held }
	member, err := wire.Follow(conn, b.topic, opts, wire.BroadcastHandlers{
		Began: func(start wire.Start, err error) { b.began(generation, start, err) },
		Event: func(e wire.BroadcastEvent) {
			b.take(current, func() { b.event(&e) })
		},
		Gap: func(g Gap) {
			b.take(current, func() { b.gap(g) })
		},
		Snapshot: func(pos string) {
			b.take(current, func() {
				b.snapped, b.partial, b.pos = true, false, pos
				b.queue.add(castItem{kind: castSnapshot, pos: pos})
			})
		},
		Presence: func(p Presence) {
			b.take(current, func() { b.queue.add(castItem{kind: castPresence, presence: p}) })
		},
	})
	if err != nil {
		b.began(generation, wire.Start{}, err)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn == conn { // also if the broadcast has to begin again already, which ends this one
		b.member = member
	}
}

// resumption returns the options of the next SUBSCRIBE. mu is held.
func (b *Broadcast) resumption() wire.BroadcastOptions {
	opts := b.opts.wire()
	if b.snapped && b.pos != "" {
		opts.Snapshot, opts.History = false, 0
		opts.From, opts.Pos, opts.TS, opts.AfterID = FromPos, b.pos, nil, ""
	}
	return opts
}

// take runs f with mu held if what has come is current, and wakes those who wait for it.
func (b *Broadcast) take(current func() bool, f func()) {
	b.mu.Lock()
	if !current() {
		b.mu.Unlock()
		return
	}
	f()
	b.mu.Unlock()
	nudge(b.wake)
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// began is called with the hub's answer to SUBSCRIBE.
func (b *Broadcast) began(generation uint64, start wire.Start, err error) {
	b.mu.Lock()
	if b.over || b.generation != generation || err != nil && lost(err) {
		b.mu.Unlock()
		return // the next connection repeats it
	}
	if err != nil {
		b.member = nil
		failure := fromWire(err)
		b.retry = failure.Retryable && b.retries < maxSubscribes
		b.retries++
		retry := b.retry
		b.mu.Unlock()
		switch {
		case retry:
			nudge(b.again)
		case failure.Code != "unauthorized": // a new token was refused: the connection ends
			b.end(failure)
		}
		return
	}
	b.retries = 0
	if !b.accepted {
		b.accepted = true
		close(b.opened)
	}
	switch {
	case !b.snapped && b.partial: // what has come of the snapshot before is void
		b.queue.forget()
		b.partial = false
		b.reset(Reset{Reason: ReasonSnapshot})
	case !b.snapped:
	case start.Recovered:
		b.pos = start.Pos
	case b.watch != nil:
		b.beginAnew(start.Reason)
	default:
		b.pos = start.Pos
		b.reset(Reset{Reason: start.Reason, Pos: start.Pos})
	}
	b.mu.Unlock()
	nudge(b.wake)
}

// reset tells the user of a reset. mu is held.
func (b *Broadcast) reset(r Reset) { b.queue.add(castItem{kind: castReset, reset: r}) }

// beginAnew asks for a new snapshot, and forgets changes that were not handled: the snapshot has
// them. mu is held.
func (b *Broadcast) beginAnew(reason string) {
	b.generation++ // what still comes is void
	b.snapped, b.partial, b.anew = false, false, true
	b.queue.forget()
	b.reset(Reset{Reason: reason})
	nudge(b.again)
}

// event takes an event. mu is held.
func (b *Broadcast) event(raw *wire.BroadcastEvent) {
	e := &BroadcastEvent{
		Event: Event{ID: raw.ID, TS: raw.TS, Topic: raw.Topic, Key: raw.Key, Payload: raw.Payload},
		Pos:   raw.Pos, Tombstone: raw.Tombstone, Snapshot: !b.snapped,
	}
	if raw.More {
		e.decodeMore(raw.Record)
	}
	item := castItem{kind: castEvent, event: e, size: len(raw.Record), before: b.pos, pos: raw.Pos}
	if e.Snapshot {
		b.partial = true
		if !b.queue.add(item) {
			b.fail(newError(CodeBufferFull, fmt.Sprintf("the snapshot of %s has more than %d keys, or %d bytes, that wait; raise MaxKeys or handle events faster", b.topic, b.opts.MaxKeys, maxSnapshotBytes), nil))
		}
		return
	}
	if b.queue.add(item) {
		b.pos = raw.Pos
		return
	}
	switch {
	case b.watch != nil:
		b.beginAnew(ReasonGap)
	case b.opts.Slow == SlowClose:
		b.fail(newError(CodeBufferFull, fmt.Sprintf("the handler is slower than the events of %s: %d wait", b.topic, b.opts.QueueEvents), nil))
	case b.opts.Slow == SlowCatchUp:
		b.generation++ // what still comes is fetched later
		b.held = true
		nudge(b.again)
	default:
		b.queue.skip()
		b.queue.add(item)
		b.pos = raw.Pos
	}
}

// gap takes a GAP. mu is held.
func (b *Broadcast) gap(g Gap) {
	b.pos = g.To
	if b.watch != nil {
		b.beginAnew(ReasonGap)
		return
	}
	b.queue.addGap(g)
}

// fail ends the broadcast from where mu is held.
func (b *Broadcast) fail(err *Error) {
	b.generation++
	b.draining, b.err = true, err
	b.queue.clear()
	nudge(b.again)
}

// run does what must not run on the goroutine that reads the connection, until the broadcast has
// ended.
func (b *Broadcast) run() {
	defer b.stop()
	pause := stoppedTimer()
	defer pause.Stop()
	for {
		select {
		case <-b.ended:
			return
		case <-b.again:
		case <-pause.C:
			b.mu.Lock()
			conn, due := b.conn, b.retry
			b.mu.Unlock()
			if conn != nil && due {
				b.connected(conn)
			}
			continue
		}
		b.mu.Lock()
		conn, failure := b.conn, b.err
		anew, held, retry, n := b.anew, b.held, b.retry, b.retries
		b.mu.Unlock()
		switch {
		case failure != nil:
			b.leave(ignore)
		case held:
			b.release()
		case anew && conn != nil:
			b.connected(conn)
		case retry:
			pause.Reset(backoff(n))
		}
	}
}

// release ends the broadcast at the hub until the queue is empty.
func (b *Broadcast) release() {
	b.control.Lock()
	defer b.control.Unlock()
	b.mu.Lock()
	if !b.held {
		b.mu.Unlock()
		return // it has gone on
	}
	member := b.member
	b.member = nil
	b.mu.Unlock()
	if member != nil {
		_ = member.UnsubscribeAsync(ignore) // otherwise the connection has ended
	}
	nudge(b.wake) // the queue may be empty already
}

// disconnected notes that the connection has ended.
func (b *Broadcast) disconnected() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disconnect()
}

// disconnect is disconnected while mu is held.
func (b *Broadcast) disconnect() {
	b.generation++
	b.conn, b.member, b.retry, b.anew = nil, nil, false, false
}

// end ends the broadcast in this client. err is nil unless something went wrong.
func (b *Broadcast) end(err *Error) {
	b.mu.Lock()
	if b.over {
		b.mu.Unlock()
		return
	}
	b.disconnect()
	b.over = true
	if b.err == nil {
		b.err = err
	}
	err = b.err
	b.queue.clear()
	if !b.accepted {
		close(b.opened)
	}
	b.mu.Unlock()
	b.client.removeBroadcast(b)
	b.cancel()
	close(b.ended)
	if err != nil {
		b.client.report(err)
	}
}

// Unsubscribe ends the broadcast at once, and waits until the hub has answered or ctx ends. A
// handler that runs is not waited for, and is the last one.
func (b *Broadcast) Unsubscribe(ctx context.Context) error {
	answers := make(chan error, 1)
	b.leave(func(err error) { answers <- err })
	return wait(ctx, answers)
}

// leave sends UNSUBSCRIBE and ends the broadcast. answered is called once.
func (b *Broadcast) leave(answered func(error)) {
	b.unsubscribe(answered)
	b.end(nil)
}

// unsubscribe sends UNSUBSCRIBE. No handler begins any more. answered is called once.
func (b *Broadcast) unsubscribe(answered func(error)) {
	b.control.Lock()
	defer b.control.Unlock()
	b.mu.Lock()
	b.draining = true
	b.queue.clear()
	member := b.member
	b.member = nil
	b.mu.Unlock()
	nudge(b.wake)
	if member == nil || member.UnsubscribeAsync(answered) != nil {
		answered(nil) // there is no broadcast at the hub
	}
}

// drain ends the broadcast, and lets the handler finish until ctx ends.
func (b *Broadcast) drain(ctx context.Context) error {
	answers := make(chan error, 1)
	b.unsubscribe(func(err error) { answers <- err })
	var late error
	select {
	case <-b.idle:
	case <-ctx.Done():
		late = aborted(ctx)
	}
	b.end(nil)
	if late == nil {
		return wait(ctx, answers)
	}
	return late
}

// work handles what is queued, one after the other.
func (b *Broadcast) work() {
	over := false
	defer func() {
		if over {
			close(b.idle)
		} else { // a handler has ended its goroutine
			b.client.work.Go(b.work)
		}
	}()
	for {
		b.mu.Lock()
		if over = b.over || b.draining; over {
			b.mu.Unlock()
			return
		}
		item, ok := b.queue.pop()
		conn := b.conn
		resume := !ok && b.held && b.member == nil
		if resume {
			b.held = false
		}
		b.mu.Unlock()
		switch {
		case ok:
			b.handle(&item)
			continue
		case resume && conn != nil:
			b.connected(conn)
			continue
		}
		select {
		case <-b.wake:
		case <-b.ended:
		}
	}
}

// handle hands an item to the user.
func (b *Broadcast) handle(item *castItem) {
	id := ""
	if item.event != nil {
		id = item.event.ID
	}
	defer b.recovered(id)
	if b.watch != nil {
		b.watch.handle(b, item)
		return
	}
	switch item.kind {
	case castEvent:
		b.handler(b.ctx, item.event)
	case castGap:
		if b.opts.OnGap != nil {
			b.opts.OnGap(item.gap)
		}
	case castReset:
		if b.opts.OnReset != nil {
			b.opts.OnReset(item.reset)
		}
	case castSnapshot:
		if b.opts.OnSnapshot != nil {
			b.opts.OnSnapshot(item.pos)
		}
	case castPresence:
		if b.opts.OnPresence != nil {
			b.opts.OnPresence(item.presence)
		}
	}
}

// recovered reports a panic of a handler. It is deferred.
func (b *Broadcast) recovered(id string) {
	if value := recover(); value != nil {
		b.client.report(&PanicError{Topic: b.topic, ID: id, Value: value, Stack: debug.Stack()})
	}
}
