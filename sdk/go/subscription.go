package eventhub

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"eventhub/sdk/go/wire"
)

// Where a new group starts.
const (
	FromLatest   = "latest"
	FromEarliest = "earliest"
	FromTS       = "ts"
	FromAfterID  = "afterId"
)

// Defaults and bounds of a subscription.
const (
	DefaultMaxLease = 10 * time.Minute

	maxInFlight     = 10_000
	defaultLease    = 30 * time.Second
	minLease        = time.Second
	maxSubscribes   = 30              // in a row that the hub may refuse
	leaveTimeout    = 5 * time.Second // of UNSUBSCRIBE, when the caller sets none
	firstInFlight   = 16
	inFlightPerWork = 2
)

// Handler handles an event. nil acknowledges the event. An error refuses the event: it comes again,
// or becomes a dead letter whose reason is the error's text. A panic is recovered, refuses the
// event too, and goes to Options.OnError as a *PanicError. ctx ends when the lease is lost: what
// the handler still does, another member may do as well. It also ends when the handler returns,
// unless SubscribeOptions.Manual is set.
type Handler func(ctx context.Context, d *Delivery) error

// SubscribeOptions configure a subscription. Zero fields take the defaults.
type SubscribeOptions struct {
	// From is where a new group starts: FromLatest, FromEarliest, FromTS or FromAfterID. Groups
	// that exist ignore it. Defaults to FromLatest.
	From string
	// TS is in epoch milliseconds, for FromTS. AfterID is an event's id, for FromAfterID.
	TS      *int64
	AfterID string
	// Concurrency is the most handlers that run at a time. Defaults to 1, which handles events in
	// the order of arrival.
	Concurrency int
	// MaxInFlight is the most events that this member holds at a time. Defaults to twice the
	// Concurrency, at least 16. More is faster over slow links, and less leaves more to others.
	MaxInFlight int
	// BatchSize is the most events that the hub requests from its store at a time.
	BatchSize int
	// AckTimeout is the length of a lease. Defaults to 30 s.
	AckTimeout time.Duration
	// MaxLease is how long a lease is prolonged while its event waits for a handler or is handled.
	// Defaults to 10 min.
	MaxLease time.Duration
	// MaxAttempts is the attempt whose failure dead-letters an event. A pointer to 0 means never.
	// Defaults to 5.
	MaxAttempts *int
	// Topics are further topics of the same subscription.
	Topics []string
	// GroupTTL is how long a new group without members exists. Defaults to for ever.
	GroupTTL time.Duration
	// Manual leaves each event open when its handler returns nil: Delivery.Ack or Delivery.Nack
	// settles it, during the handler or later. Its lease is not prolonged then.
	Manual bool
	// Ordered joins an ordered group, or makes one: of each key, one event at a time is leased, in
	// order. Slots is the number of slots of a new one; the hub's default is 64.
	Ordered bool
	Slots   int
	// SchemaVersion is the version of the schema in which events come: from 1 on, or LatestVersion.
	// By default, events come as they are stored. An event that the hub cannot cast is an attempt
	// that failed.
	SchemaVersion SchemaVersion
	// OnAssign, when not nil, is called when the slots of a member of an ordered group change:
	// before the first event of a new slot, and after the last lease of a lost one. It runs on the
	// goroutine that reads the connection, so it must neither block nor wait for answers.
	OnAssign func(Assignment)
	// Extra are options of SUBSCRIBE that this version does not know.
	Extra map[string]any
}

// SchemaVersion is a version of a schema, from 1 on, or LatestVersion.
type SchemaVersion = wire.SchemaVersion

// LatestVersion is the latest version of a schema at the moment of each event.
const LatestVersion = wire.LatestVersion

// An Assignment is all slots of a member of an ordered group on one topic.
type Assignment = wire.Assignment

func (o SubscribeOptions) withDefaults() (SubscribeOptions, *Error) {
	wrong := func(text string) (SubscribeOptions, *Error) { return o, newError("bad_options", text, nil) }
	switch {
	case o.Concurrency < 0 || o.Concurrency > maxInFlight:
		return wrong(fmt.Sprintf("Concurrency %d is not within 1..%d", o.Concurrency, maxInFlight))
	case o.MaxInFlight < 0 || o.MaxInFlight > maxInFlight:
		return wrong(fmt.Sprintf("MaxInFlight %d is not within 1..%d", o.MaxInFlight, maxInFlight))
	case o.MaxLease < 0:
		return wrong("MaxLease must not be negative")
	}
	if o.Concurrency == 0 {
		o.Concurrency = 1
	}
	if o.MaxInFlight == 0 {
		o.MaxInFlight = min(maxInFlight, max(firstInFlight, inFlightPerWork*o.Concurrency))
	}
	if o.AckTimeout == 0 {
		o.AckTimeout = defaultLease
	}
	if o.MaxLease == 0 {
		o.MaxLease = DefaultMaxLease
	}
	return o, nil
}

func (o SubscribeOptions) wire() wire.SubscribeOptions {
	order := ""
	if o.Ordered {
		order = "key"
	}
	return wire.SubscribeOptions{
		Ordered: order, Slots: o.Slots, OnAssign: o.OnAssign,
		From: o.From, TS: o.TS, AfterID: o.AfterID, BatchSize: o.BatchSize, MaxInFlight: o.MaxInFlight,
		AckTimeoutMS: o.AckTimeout.Milliseconds(), MaxAttempts: o.MaxAttempts, Topics: o.Topics,
		GroupTTLMS: o.GroupTTL.Milliseconds(), SchemaVersion: o.SchemaVersion, Extra: o.Extra,
	}
}

// Subscription is a member of a group. It stays one over reconnects, until it is ended. Its methods
// may be called concurrently, but Drain not from a handler.
type Subscription struct {
	client       *Client
	topic, group string
	handler      Handler
	opts         SubscribeOptions
	ctx          context.Context // of the handlers
	cancel       context.CancelCauseFunc
	stop         func() bool   // forgets the context of Subscribe
	opened       chan struct{} // closed when accepted, or ended
	ended        chan struct{} // closed when it has ended
	again        chan uint64   // generations whose SUBSCRIBE is to be repeated

	// control orders SUBSCRIBE, PAUSE, RESUME and UNSUBSCRIBE; acking orders ACK before
	// UNSUBSCRIBE. Both are taken before mu, and never by what a connection calls.
	control sync.Mutex
	acking  sync.Mutex

	mu       sync.Mutex
	accepted bool
	over     bool
	err      *Error
	conn     *wire.Conn // nil while there is none
	member   *wire.Subscription
	// generation counts connections: a delivery of an earlier one has lost its lease.
	generation uint64
	retries    int
	paused     bool
	draining   bool
	active     int // handlers that run
	queue      []*Delivery
	held       map[string]*Delivery // wait, are handled, or are open
	acks       []*Delivery          // to be sent
	flushing   bool
	asked      int // ACKs without an answer
	handled    handled
	quiet      chan struct{} // closed when something was settled; nil while nobody waits
}

// Topic returns the topic of the subscription, and Group its group.
func (s *Subscription) Topic() string { return s.topic }

// Group returns the group of the subscription.
func (s *Subscription) Group() string { return s.group }

// Subscribe joins a group, and stays a member over reconnects until ctx ends, or until Unsubscribe
// or Drain. It returns when the hub has accepted the subscription; while there is no connection, it
// waits. The end of ctx leaves the group, as Unsubscribe does.
func (c *Client) Subscribe(ctx context.Context, topic, group string, opts SubscribeOptions, handler Handler) (*Subscription, error) {
	if ctx.Err() != nil {
		return nil, aborted(ctx)
	}
	opts, failure := opts.withDefaults()
	if failure != nil {
		return nil, failure
	}
	s := &Subscription{
		client: c, topic: topic, group: group, handler: handler, opts: opts,
		opened: make(chan struct{}), ended: make(chan struct{}), again: make(chan uint64, 1),
		held: make(map[string]*Delivery),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	s.stop = context.AfterFunc(ctx, func() { s.leave(nil, ignore) })
	conn, failure := c.join(s)
	if failure != nil {
		s.stop()
		s.cancel(failure)
		return nil, failure
	}
	if conn != nil {
		s.connected(conn)
	}
	<-s.opened
	s.mu.Lock()
	accepted, failure := s.accepted, s.err
	s.mu.Unlock()
	switch {
	case accepted:
		return s, nil
	case failure != nil:
		return nil, failure
	case ctx.Err() != nil:
		return nil, aborted(ctx)
	}
	return nil, closedError()
}

// connected subscribes on a connection.
func (s *Subscription) connected(conn *wire.Conn) {
	s.control.Lock()
	defer s.control.Unlock()
	s.mu.Lock()
	if s.over {
		s.mu.Unlock()
		return
	}
	generation, still := s.generation, s.paused || s.draining
	s.mu.Unlock()
	member, err := conn.Join(s.topic, s.group, s.opts.wire(), func(e wire.Event) { s.deliver(generation, e) })
	if err != nil {
		s.subscribed(generation, err)
		return
	}
	s.mu.Lock()
	if s.generation != generation {
		s.mu.Unlock()
		return
	}
	s.conn, s.member = conn, member
	s.mu.Unlock()
	if err := member.Start(func(err error) { s.subscribed(generation, err) }); err != nil {
		return // the next connection repeats it
	}
	if still {
		_ = member.ControlAsync("PAUSE", ignore)
	}
}

func ignore(error) {}

// subscribed is called with the hub's answer to SUBSCRIBE.
func (s *Subscription) subscribed(generation uint64, err error) {
	s.mu.Lock()
	if s.over || s.generation != generation || err != nil && lost(err) {
		s.mu.Unlock()
		return // the next connection repeats it
	}
	if err == nil {
		s.retries = 0
		if !s.accepted {
			s.accepted = true
			close(s.opened)
		}
		s.mu.Unlock()
		return
	}
	failure := fromWire(err)
	retry := failure.Retryable && s.retries < maxSubscribes
	if retry {
		s.retries++
	}
	s.mu.Unlock()
	switch {
	case retry:
		select {
		case s.again <- generation:
		default:
		}
	case failure.Code != "unauthorized": // a new token was refused: the connection ends
		s.end(failure)
	}
}

// run prolongs leases and repeats refused SUBSCRIBEs until the subscription has ended.
func (s *Subscription) run() {
	defer s.stop()
	keep := time.NewTicker(max(100*time.Millisecond, min(5*time.Second, s.opts.AckTimeout/5)))
	defer keep.Stop()
	retry := stoppedTimer()
	defer retry.Stop()
	var generation uint64
	for {
		select {
		case <-s.ended:
			return
		case now := <-keep.C:
			s.prolong(now)
		case generation = <-s.again:
			s.mu.Lock()
			n := s.retries
			s.mu.Unlock()
			retry.Reset(backoff(n))
		case <-retry.C:
			s.mu.Lock()
			conn := s.conn
			if s.generation != generation {
				conn = nil // another connection has its own
			}
			s.mu.Unlock()
			if conn != nil {
				s.connected(conn)
			}
		}
	}
}

// disconnected notes that the connection has ended, and all leases with it.
func (s *Subscription) disconnected() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disconnect()
}

// disconnect is disconnected while mu is held.
func (s *Subscription) disconnect() {
	s.generation++
	s.conn, s.member = nil, nil
	for _, d := range s.acks {
		s.handled.add(s.key(&d.Event), d.Attempt)
	}
	s.acks = nil
	s.forgetQueue()
	maps.DeleteFunc(s.held, func(_ string, d *Delivery) bool {
		d.lose()
		d.again = nil
		return d.phase == open
	})
	s.tellQuiet()
}

// forgetQueue forgets what no handler has begun. mu is held.
func (s *Subscription) forgetQueue() {
	for _, d := range s.queue {
		delete(s.held, s.key(&d.Event))
	}
	s.queue = nil
}

// end ends the subscription in this client. err is nil unless the hub ended it.
func (s *Subscription) end(err *Error) {
	s.mu.Lock()
	if s.over {
		s.mu.Unlock()
		return
	}
	s.disconnect()
	s.over = true
	s.err = err
	clear(s.held) // handlers that run go on, and settle nothing
	if !s.accepted {
		close(s.opened)
	}
	s.tellQuiet()
	s.mu.Unlock()
	s.client.remove(s)
	s.cancel(errLeaseLost)
	close(s.ended)
	if err != nil {
		s.client.report(err)
	}
}

// Done is closed when the subscription has ended. Handlers may still run then.
func (s *Subscription) Done() <-chan struct{} { return s.ended }

// Err returns the *Error with which the hub ended the subscription, or nil.
func (s *Subscription) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		return nil
	}
	return s.err
}

// Active returns how many events are handled, or wait for a handler.
func (s *Subscription) Active() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active + len(s.queue)
}

// Pause stops deliveries to this member until Resume. Handlers that run go on. A reconnect does not
// end the pause.
func (s *Subscription) Pause(ctx context.Context) error { return s.setPaused(ctx, true) }

// Resume starts deliveries again.
func (s *Subscription) Resume(ctx context.Context) error { return s.setPaused(ctx, false) }

func (s *Subscription) setPaused(ctx context.Context, paused bool) error {
	op := "PAUSE"
	answers := make(chan error, 1)
	s.control.Lock()
	s.mu.Lock()
	s.paused = paused
	member := s.member
	if !paused {
		op = "RESUME"
		s.start()
	}
	s.mu.Unlock()
	if member == nil || member.ControlAsync(op, func(err error) { answers <- err }) != nil {
		answers <- nil // the next connection has the effect
	}
	s.control.Unlock()
	return wait(ctx, answers)
}

// wait waits for an answer. That of a frame whose effect a new connection has anyway is no failure
// when the connection ended.
func wait(ctx context.Context, answers <-chan error) error {
	select {
	case err := <-answers:
		if err == nil || lost(err) {
			return nil
		}
		if failure := fromWire(err); failure.Code != "not_subscribed" {
			return failure
		}
		return nil
	case <-ctx.Done():
		return aborted(ctx)
	}
}

// Unsubscribe leaves the group at once, and waits until the hub has answered or ctx ends. Events
// that are not settled go to other members. Handlers that run are not waited for, and settle
// nothing.
func (s *Subscription) Unsubscribe(ctx context.Context) error {
	answers := make(chan error, 1)
	s.leave(nil, func(err error) { answers <- err })
	return wait(ctx, answers)
}

// leave sends UNSUBSCRIBE and ends the subscription, with why. answered is called once.
func (s *Subscription) leave(why *Error, answered func(error)) {
	s.control.Lock()
	defer s.control.Unlock()
	s.mu.Lock()
	over, member := s.over, s.member
	s.draining = true // nothing new is handled
	s.mu.Unlock()
	if over || member == nil {
		s.end(why)
		answered(nil)
		return
	}
	s.flush()
	err := member.UnsubscribeAsync(answered)
	s.end(why)
	if err != nil {
		answered(nil) // the connection has ended, and the subscription with it
	}
}

// Drain takes no more events, lets the handlers finish, and leaves the group. Events that no
// handler has begun go to other members. When ctx ends first, Drain leaves the group as Unsubscribe
// does, and returns an error.
func (s *Subscription) Drain(ctx context.Context) error {
	s.control.Lock()
	s.mu.Lock()
	s.draining = true
	s.forgetQueue()
	member := s.member
	s.mu.Unlock()
	if member != nil {
		_ = member.ControlAsync("PAUSE", ignore)
	}
	s.control.Unlock()
	left := s.settled(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := s.Unsubscribe(ctx); left == nil {
		return err
	}
	return left
}

// settled waits until nothing is held and the hub has answered all acknowledgements.
func (s *Subscription) settled(ctx context.Context) error {
	for {
		s.mu.Lock()
		if s.over || len(s.held) == 0 && s.asked == 0 && len(s.acks) == 0 && s.active == 0 {
			s.mu.Unlock()
			return nil
		}
		if s.quiet == nil {
			s.quiet = make(chan struct{})
		}
		quiet := s.quiet
		s.mu.Unlock()
		select {
		case <-quiet:
		case <-ctx.Done():
			return aborted(ctx)
		}
	}
}

// tellQuiet wakes those that wait in settled. mu is held.
func (s *Subscription) tellQuiet() {
	if s.quiet != nil {
		close(s.quiet)
		s.quiet = nil
	}
}
