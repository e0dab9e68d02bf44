package jetstream

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/schemas"
)

// NeverGiveUp is the MaxAttempts of a subscription that retries for ever and makes no dead letters.
const NeverGiveUp = -1

// Bounds of a subscription, from the protocol.
const (
	maxInFlightLimit = 10_000
	maxTopicsExtra   = 32
	minAckTimeout    = time.Second
	maxAckTimeout    = 12 * time.Hour
	minGroupTTL      = time.Second
	maxGroupTTL      = 30 * 24 * time.Hour
)

// settleWait is how long the end of a subscription waits for the server. What it did not take comes
// again after AckWait.
const settleWait = 2 * time.Second

// SubscribeOptions configure one subscription. The zero value is valid. Options of the group are
// those of the member that creates the group.
type SubscribeOptions struct {
	// From is where a new group starts. A group that exists continues at its position, whatever
	// From says.
	From Position
	// BatchSize is the most events requested from the server at a time: 1..10,000, default 100.
	// Larger batches cost the server less, and leave fewer events to other members.
	BatchSize int
	// MaxInFlight is the most events leased at a time: 1..10,000, default 100.
	MaxInFlight int
	// AckTimeout is the length of a lease: 1 s..12 h, default 30 s.
	AckTimeout time.Duration
	// MaxAttempts is the attempt whose failure dead-letters the event: default 5, NeverGiveUp for
	// none.
	MaxAttempts int
	// Topics are up to 32 further topics for the same subscription: one group on each, one
	// MaxInFlight over all.
	Topics []string
	// GroupTTL removes a new group after that time without a member: 0 (never) or 1 s..30 d. While
	// the group has an unsettled event, the time begins AckWait after that event's last delivery. A
	// group with a GroupTTL of up to one minute lives in the server's memory: after a restart of
	// the server, events that were settled in the last 2 s come again.
	GroupTTL time.Duration
	// Filter, when not nil, selects events. The subscription acknowledges events for which Filter
	// returns false, and does not deliver them. Filter may be called concurrently, for different
	// topics of the subscription, and must not block.
	Filter func(*event.Event) bool
	// OnReset, when not nil, is called when the group on a topic had to start anew and may have
	// missed events. It is called before the next event of that topic is handed out, and never
	// while the handler runs. It must not block.
	OnReset func(topic string)
	// OnLost, when not nil, is called when events were removed from a topic before the group was
	// given them. It is called before the next event of that topic is handed out, and never while
	// the handler runs. Every subscription of the group that is not paused at its start is told. It
	// must not block.
	OnLost func(Loss)
	// CountFor, when not "", is the client for which the topics and groups that the subscription
	// creates count: see Publisher.CountFor, Limits.GroupsPerClient and Limits.ClientGroups. By
	// default they count for the program itself, which has no limits of its own, and for whose
	// groups each stream keeps room.
	CountFor string
	// FreeGroups exempts the groups from Limits.GroupsPerClient and Limits.ClientGroups.
	FreeGroups bool
	// OnDeleted, when not nil, is called when somebody has deleted the group on a topic
	// (Group.Delete). The subscription then gets no more events of that topic, and the caller ends
	// it, but not within OnDeleted, which must not block. By default, the member makes the group
	// again, at its oldest unsettled event.
	OnDeleted func(topic string)
	// Holder, when not nil, limits how many events this subscription and others hold together:
	// events beyond its limit wait.
	Holder *Holder
	// MaxLease is the longest lease, and the longest delay of a Nack: AckTimeout, Extend and Nack
	// are cut to it. 1 s..12 h, default 12 h.
	MaxLease time.Duration
	// Paused starts the subscription as after Pause: it is a member of the group, and requests no
	// event before Resume.
	Paused bool
	// Handles gives deliveries handles, with which clients settle them on any hub: see Held.Handle.
	Handles bool
	// OrderByKey makes a new group an ordered one, and is needed to join one: of each key, one
	// event at a time is leased, in the order of the stream. A refused or expired event blocks its
	// key until it is settled or dead-lettered; other keys go on. Events without a key are in no
	// order.
	OrderByKey bool
	// Slots is the number of slots of a new ordered group: 1..1,024, default 64. A key belongs to a
	// slot, and a slot to one member. A group that exists keeps the number with which it was made.
	Slots int
	// OnAssign, when not nil, is called when the slots of the subscription on a topic have changed:
	// before the first event of a new slot is handed out, and after the last lease of a lost one
	// has ended. It is never called while the handler runs, and must not block.
	OnAssign func(Assignment)
	// SchemaVersion, when not 0, is the version of the schema in which the subscription gets the
	// events of all its topics: a number from 1 on, or schemas.Latest. An event that cannot be cast
	// is an attempt that failed; its dead letter has the event as it was stored, and the reason.
	SchemaVersion int
	// Workers is how many handlers of Consume run at a time: 1..10,000, default 1. MaxInFlight also
	// limits how many events are processed at a time. Subscribe refuses Workers, because it never
	// calls its handler concurrently.
	Workers int
}

func (o *SubscribeOptions) validate() error {
	if o.BatchSize == 0 {
		o.BatchSize = 100
	}
	if o.MaxInFlight == 0 {
		o.MaxInFlight = 100
	}
	if o.AckTimeout == 0 {
		o.AckTimeout = 30 * time.Second
	}
	if o.MaxLease == 0 {
		o.MaxLease = maxAckTimeout
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = 5
	}
	if err := o.From.validate(); err != nil {
		return err
	}
	switch {
	case o.BatchSize < 1 || o.BatchSize > maxInFlightLimit:
		return event.BadOptions("opts.BatchSize is %d: 1 to %d are allowed", o.BatchSize, maxInFlightLimit)
	case o.MaxInFlight < 1 || o.MaxInFlight > maxInFlightLimit:
		return event.BadOptions("opts.MaxInFlight is %d: 1 to %d are allowed", o.MaxInFlight, maxInFlightLimit)
	case o.AckTimeout < minAckTimeout || o.AckTimeout > maxAckTimeout:
		return event.BadOptions("opts.AckTimeout is %v: %v to %v are allowed", o.AckTimeout, minAckTimeout, maxAckTimeout)
	case o.MaxLease < minAckTimeout || o.MaxLease > maxAckTimeout:
		return event.BadOptions("opts.MaxLease is %v: %v to %v are allowed", o.MaxLease, minAckTimeout, maxAckTimeout)
	case o.MaxAttempts < NeverGiveUp:
		return event.BadOptions("opts.MaxAttempts is %d: 1 or more, 0 (the default), or NeverGiveUp is allowed", o.MaxAttempts)
	case o.GroupTTL != 0 && (o.GroupTTL < minGroupTTL || o.GroupTTL > maxGroupTTL):
		return event.BadOptions("opts.GroupTTL is %v: 0 (never), or %v to %v are allowed", o.GroupTTL, minGroupTTL, maxGroupTTL)
	case len(o.Topics) > maxTopicsExtra:
		return event.BadOptions("opts.Topics has %d topics, at most %d are allowed", len(o.Topics), maxTopicsExtra)
	case o.Workers < 0 || o.Workers > maxInFlightLimit:
		return event.BadOptions("opts.Workers is %d: 1 to %d are allowed", o.Workers, maxInFlightLimit)
	}
	o.AckTimeout = min(o.AckTimeout, o.MaxLease)
	return o.validateOrder()
}

// Subscription is one member of a group, on one or several topics. Consume and Subscribe return it.
// Its methods may be called concurrently, but its handler must not call Stop, Drain or Disconnect.
// Each of these three ends the subscription, and so does Bus.Close.
type Subscription struct {
	bus     *Bus
	link    *conn.Link
	group   string
	opts    SubscribeOptions
	handler func(*Held)
	workers *workers                 // of Consume, else nil
	keeper  *owner                   // of the owner of an ordered group, else nil
	views   map[string]*schemas.View // by topic; nil: events stay as they are

	deliver sync.Mutex  // held while the handler runs
	ended   atomic.Bool // no handler begins any more

	mu       sync.Mutex
	resumed  bool // at least once, or never paused
	paused   bool
	draining bool
	stopped  bool
	members  []*member
	// all that are held or leased; bounded by MaxInFlight and len(members)
	out  []*Delivery
	byID map[string]*Delivery // leased, oldest first along Delivery.sameID
	// not handed out yet: beyond MaxInFlight, or behind one whose attempt is not known yet
	parked    []*Delivery
	active    int // of out, those not parked
	leased    int
	requested int // asked of the server and not arrived
	reserved  int // of these, what opts.Holder counts
	heldBytes int // of those in out that are not leased
	refilling bool
	timer     *time.Timer
	wake      int64         // when timer fires; 0: it does not
	settled   chan struct{} // closed when no lease is left, while Drain waits for it
	// how long it was last kept from asking for events, because it does not take what it has
	slow      time.Duration
	slowUntil int64 // until when it is; 0: it is not

	// While it drains in a cluster, custody is not nil: what still comes is kept until the inboxes
	// have ended.
	custody  []*Delivery
	lastCame int64
	inboxes  int // that linger; guarded by lingering.mu

	returning conn.Gate // what is about to be given back

	ctx      context.Context // ends with the subscription
	cancel   context.CancelFunc
	wg       sync.WaitGroup // its goroutines
	stopOnce sync.Once
}

// Subscribe creates the group if it does not exist, and joins it. Events arrive at once, perhaps
// before Subscribe returns; with SubscribeOptions.Paused, they wait for Resume.
//
// handler is called for each event, in the order of arrival and never concurrently for one
// subscription. It must not block: it hands the Held on (never more than MaxInFlight are valid) and
// whoever gets it calls Begin. A channel may be full of others, which the hub took back, after a
// Pause or a lost connection: a handler that waits for room in one waits for Done, too. For
// handlers that work in place, use Consume.
//
// The end of ctx ends Subscribe, and not the subscription. A new group starts at the end of the
// topic unless opts.From says otherwise.
//
// Errors are *Error: bad_topic, bad_group, bad_options, unknown_id (FromAfterID), subscribe_failed,
// overloaded, rate_limited, internal. The caller ends the subscription with Stop, Drain or
// Disconnect.
func (b *Bus) Subscribe(ctx context.Context, topic, group string, opts SubscribeOptions, handler func(*Held)) (*Subscription, error) {
	if handler == nil {
		return nil, event.BadOptions("the handler is missing")
	}
	if opts.Workers != 0 {
		return nil, event.BadOptions("opts.Workers is %d: only Consume has workers", opts.Workers)
	}
	return b.subscribe(ctx, topic, group, opts, handler, nil)
}

// subscribe is Subscribe, and with w Consume.
func (b *Bus) subscribe(ctx context.Context, topic, group string, opts SubscribeOptions, handler func(*Held), w *workers) (*Subscription, error) {
	if err := opts.validate(); err != nil {
		return nil, err
	}
	names := []string{topic}
	for _, name := range opts.Topics {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if err := ValidTopic(name); err != nil {
			return nil, err
		}
	}
	if err := ValidGroup(group); err != nil {
		return nil, err
	}
	s := &Subscription{
		bus: b, link: b.conn.Link(), group: group, opts: opts, handler: handler, workers: w,
		byID: make(map[string]*Delivery), paused: true,
	}
	s.ctx, s.cancel = context.WithCancel(b.conn.Ctx)
	s.timer = time.AfterFunc(time.Hour, s.tick)
	s.timer.Stop()
	err := b.subscriptions.reserve()
	if err == nil && opts.Handles {
		err = b.handles.keys.ensure(ctx)
	}
	if err == nil {
		s.views, err = viewsOf(ctx, b.schemas, names, opts.SchemaVersion, opts.CountFor)
	}
	var starts []startFunc
	if err == nil {
		starts, err = s.starts(ctx, names)
	}
	for i := 0; i < len(names) && err == nil; i++ {
		err = s.join(ctx, names[i], starts[i])
	}
	if err == nil {
		err = b.subscriptions.register(s)
	}
	if err != nil {
		s.mu.Lock()
		s.stopped = true
		s.mu.Unlock()
		s.cancel()
		s.wg.Wait()
		for _, m := range s.members {
			m.obs.Close()
			s.mu.Lock()
			m.leaveSeat()
			s.mu.Unlock()
			b.groups.unshare(m.group, s)
		}
		return nil, err
	}
	if !opts.Paused {
		s.Resume()
		return s, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keepAlive()
	return s, nil
}

func (s *Subscription) join(ctx context.Context, topic string, start startFunc) error {
	j := &joining{topic: topic, group: s.group, ttl: s.opts.GroupTTL, client: s.opts.CountFor, free: s.opts.FreeGroups, slots: s.opts.Slots, start: start}
	g, err := s.bus.join(ctx, j)
	if err != nil {
		return err
	}
	m := &member{sub: s, group: g, obs: s.bus.obs.Group(topic, s.group, s.opts.GroupTTL > 0)}
	s.mu.Lock()
	s.members = append(s.members, m)
	if !m.ordered() {
		m.takeQueue(j.queue) //nolint:contextcheck // it joins for as long as the subscription lives
	}
	m.takeSeat()
	s.mu.Unlock()
	// from now on, other members' questions come to this one, too
	s.bus.groups.addMember(g, s)
	if err := g.noteSeen(ctx); err != nil { // before others remove what the group is to be given
		return s.bus.conn.Unavailable(err)
	}
	return nil
}

// Done is closed when the subscription begins to end, or its bus does: a handler may wait for it.
func (s *Subscription) Done() <-chan struct{} { return s.ctx.Done() }

// running reports whether events may be asked for. s.mu is held.
func (s *Subscription) running() bool {
	return !s.paused && !s.draining && !s.stopped && s.slowUntil == 0
}

// restart opens what is closed and asks for events: at the start, after a pause, and after forget.
func (s *Subscription) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running() {
		return
	}
	for _, m := range s.members {
		m.open()
	}
	s.refill()
}

// Pause stops deliveries. Leases stay valid, and events that were fetched but not begun are given
// back. After Pause has returned, the server sends no event to this subscription.
func (s *Subscription) Pause(ctx context.Context) error {
	s.mu.Lock()
	s.paused = true
	s.keepAlive()
	back := s.takeHeld()
	s.closeInboxes()
	s.mu.Unlock()
	s.giveBack(back) //nolint:contextcheck // it goes on when nobody waits any more
	s.returned(ctx)
	if err := s.flush(ctx); !errors.Is(err, conn.ErrCut) {
		return err
	}
	return nil // without a connection nothing comes
}

// A Credit says how many events a subscription may get.
type Credit struct {
	// MaxInFlight is SubscribeOptions.MaxInFlight.
	MaxInFlight int
	// InFlight is how many events are leased to the subscription now.
	InFlight int
	// Paused says that the subscription is paused.
	Paused bool
}

// Credit returns the present credit of the subscription.
func (s *Subscription) Credit() Credit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Credit{MaxInFlight: s.opts.MaxInFlight, InFlight: s.leased, Paused: s.paused}
}

// returned waits until what is to be given back was. What could not be comes again after AckWait.
func (s *Subscription) returned(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	_ = s.returning.Empty(ctx)
}

// settleAll waits until the server has worked off what was said about deliveries: not only taken
// it, or a server that stops now would lose it.
func (s *Subscription) settleAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	if err := s.returning.Empty(ctx); err != nil {
		return err
	}
	for _, m := range s.members {
		if err := m.group.paths[s.link.Index].sent(ctx); err != nil {
			return err
		}
	}
	if err := s.flush(ctx); err != nil { // also for what is under way to the inboxes
		return err
	}
	for _, m := range s.members {
		if !m.group.used() || m.group.deleted.Load() {
			continue
		}
		// A consumer works its acks off in order, so its answer to one about no event comes after
		// all others.
		if _, err := s.link.Request(ctx, m.group.keepAliveSubject(), conn.InProgress); err != nil {
			return err
		}
	}
	return nil
}

// flush waits until the server has taken what was sent.
func (s *Subscription) flush(ctx context.Context) error {
	if !s.link.Up.Load() {
		return conn.ErrCut // nothing can be sent, and nothing is kept to be sent later
	}
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	return s.link.NC.FlushWithContext(ctx)
}

// keepAlive has the server told at once, and then now and then, that a group with a TTL has a
// member that asks for nothing. s.mu is held.
func (s *Subscription) keepAlive() {
	for _, m := range s.members {
		if m.group.timeToLive() > 0 {
			s.schedule(s.bus.clock.Now())
		}
	}
}

// Resume starts the deliveries of a subscription that is paused by Pause or by
// SubscribeOptions.Paused. Otherwise it does nothing.
func (s *Subscription) Resume() {
	s.mu.Lock()
	lost := make(map[*member]string)
	for _, m := range s.members {
		if !s.resumed && m.group.lost.Swap(false) {
			lost[m] = m.group.topic.Name
		}
	}
	s.resumed, s.paused = true, false
	s.mu.Unlock()
	for m, topic := range lost {
		s.reset(m, topic, "its consumer is gone")
	}
	s.restart()
}

// Stop ends the subscription and gives its leases back at once; nothing is dead-lettered. It may be
// called twice, and returns when no handler runs any more. It returns an error when it could not
// reach the server; leases that were not given back are redelivered after AckWait.
func (s *Subscription) Stop(ctx context.Context) error { return s.stop(ctx, false) }

// Disconnect is Stop for a subscriber that was lost: leases that have begun count as failed
// attempts, so that those at MaxAttempts are dead-lettered with the reason "connection lost".
func (s *Subscription) Disconnect(ctx context.Context) error { return s.stop(ctx, true) }

// Drain stops deliveries, waits until every lease is settled or ctx ends, and then acts like Stop.
func (s *Subscription) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	back := s.takeHeld()
	if s.link.Clustered() && !s.stopped {
		s.custody = []*Delivery{}
	}
	s.closeInboxes()
	var settled chan struct{}
	if s.leased > 0 && !s.stopped {
		if s.settled == nil {
			s.settled = make(chan struct{})
		}
		settled = s.settled
	}
	s.mu.Unlock()
	s.giveBack(append(back, s.endInboxes(ctx)...)) //nolint:contextcheck // it goes on when nobody waits any more
	if settled != nil {
		select {
		case <-settled:
		case <-ctx.Done():
		}
	}
	return s.Stop(context.WithoutCancel(ctx))
}

func (s *Subscription) stop(ctx context.Context, lost bool) error {
	var err error
	s.stopOnce.Do(func() {
		s.ended.Store(true)
		s.mu.Lock()
		s.stopped = true
		back := s.takeHeld()
		var failed []*Delivery
		for len(s.out) > 0 {
			d := s.out[len(s.out)-1]
			how := event.Returned
			if lost && s.lastAttempt(d) {
				how = event.DeadLettered
			}
			if !s.remove(d, how) {
				continue
			}
			if how == event.DeadLettered {
				failed = append(failed, d)
			} else {
				back = append(back, d)
			}
		}
		s.closeInboxes()
		s.timer.Stop()
		s.mu.Unlock()
		s.opts.Holder.leave(s)
		s.giveBackAll(back, lost) //nolint:contextcheck // it goes on when nobody waits any more
		for _, d := range failed {
			s.bury(d, "connection lost")
		}
		s.cancel()         // a handler may wait for Done
		s.deliver.Lock()   // a handler that runs now is the last one
		s.deliver.Unlock() //nolint:staticcheck // the wait is the purpose
		if s.workers != nil {
			s.workers.stop()
		}
		s.wg.Wait()
		s.bus.subscriptions.unregister(s)
		err = s.settleAll(ctx)
		marking, cancel := context.WithTimeout(ctx, settleWait)
		defer cancel()
		for _, m := range s.members {
			m.obs.Close()
			s.mu.Lock()
			m.leaveSeat()
			s.mu.Unlock()
			s.bus.groups.unshare(m.group, s)
			m.group.storeLastMark(marking, s.link)
			_ = m.group.noteSeen(marking) // else the time counts from the last note
		}
	})
	return err
}

// moved is told of a group's new generation, perhaps late: a member that has joined a newer one
// already stays there.
func (s *Subscription) moved(key string, to *records.Generation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.members {
		switch g := m.group; {
		case to.Revision <= g.revision.Load() || records.GroupKey(g.topic, s.group) != key:
		case g.consumer != to.Consumer || to.Deleted:
			m.reattach(to.Deleted)
			m.movedAt = max(m.movedAt, to.Revision)
		default:
			if to.Durable {
				g.ttl.Store(0)
			}
			if to.Paused {
				m.groupPaused()
			}
			if !m.ordered() {
				m.takeQueue(to.PutBack)
			}
		}
	}
}

// lastAttempt reports whether a failure of d dead-letters it.
func (s *Subscription) lastAttempt(d *Delivery) bool {
	return s.opts.MaxAttempts != NeverGiveUp && d.Attempt >= s.opts.MaxAttempts && d.begun && !streams.IsDead(d.Event.Topic)
}
