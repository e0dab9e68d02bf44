package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
	"eventhub/jetstream/ordered"
)

// maxOrderedWindow bounds Limits.OrderedWindow: what is over goes to refused events that come
// again, within native.MaxAckPending.
const maxOrderedWindow = 50_000

// An Assignment says which slots of an ordered group a subscription has.
type Assignment struct {
	// Topic is the topic on which the subscription has the slots.
	Topic string
	// Slots are all slots that it has from now on, in ascending order.
	Slots []int
	// Epoch numbers the assignments of the group. It rises.
	Epoch uint64
}

// slotsOf is the number of slots of an ordered group; 0 for others.
func slotsOf(info *natsjs.ConsumerInfo) int {
	text, is := info.Config.Metadata[native.MetaSlots]
	if !is {
		return 0
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 1 // whatever somebody wrote there, it is one order
	}
	return min(n, ordered.MaxSlots)
}

// sameOrder refuses a member that takes an ordered group for another one, or the other way round.
func sameOrder(j *joining, info *natsjs.ConsumerInfo) error {
	switch slots := slotsOf(info); {
	case slots > 0 && j.slots == 0:
		return &event.Error{Code: event.CodeSubscribeFailed, Permanent: true, Msg: "the group is ordered by key: join it with opts.ordered \"key\""}
	case slots == 0 && j.slots > 0:
		return &event.Error{Code: event.CodeSubscribeFailed, Permanent: true, Msg: "the group exists and is not ordered: join it without opts.ordered, or choose another group name"}
	}
	return nil
}

// spot is a member of an ordered group as its owner sees it, and as the hub of the member does
// before there is an owner. Guarded by the ordering's mu.
type spot struct {
	id       string   // for all hubs
	borrower borrower // where it is
	open     bool     // it wants events
	credit   int      // how many more
	rest     int64    // it is given nothing before
	had      []int
	guest    *guest // whose it is; nil: of this hub
	number   uint64 // with its guest

	out []lending // what it is given in this turn of the owner; used by the owner's goroutine only
}

// borrower is where a place is: in a subscription of this hub, or on another hub. Its methods are
// called by the owner's goroutine, and none while the ordering's mu is held.
type borrower interface {
	// accept takes events; false means that it took none, as it does not want one any more.
	accept(lent []lending) bool
	// assigned says which slots it has. It is told before it is given events of new ones.
	assigned(slots []int, epoch uint64)
}

// orderedGroup is an ordered group on this hub: the places of its subscriptions, and the owner of
// the group, if this hub is it, or the way to the hub that is.
type orderedGroup struct {
	bus   *Bus
	group *group
	key   string        // of its entry in the bucket
	wake  chan struct{} // holds one

	mu      sync.Mutex
	seats   map[string]*spot // of this hub
	running bool
	own     *owner // nil: another hub is, or none
	host    *host  // nil: no session with another hub
	changed uint64 // the last revision of the entry that was heard of
	asked   uint64 // the revision that names the hub which is asked for a session; 0: none is
	unask   context.CancelFunc
}

func newOrderedGroup(g *group) *orderedGroup {
	return &orderedGroup{
		bus: g.bus, group: g, key: ownerKey(g), wake: make(chan struct{}, 1), seats: make(map[string]*spot),
	}
}

// ownerKey is the key of a group's entry. Each generation has its own. The ~ of their names, which
// no other part of a name has, is not allowed in a key.
func ownerKey(g *group) string {
	return groupPrefix + g.topic.Stream.Name + "." + strings.Replace(g.consumer, "~", ".", 1)
}

// kick has the ordering look at what has changed.
func (o *orderedGroup) kick() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// enter adds a place of this hub.
func (o *orderedGroup) enter(p *spot) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.seats[p.id] = p
	if o.host != nil {
		o.host.tellSeat(p)
	}
	if !o.running {
		o.running = true
		o.bus.owners.add(o)
		o.bus.groups.share(o.group) // until run ends: those who come meanwhile find this ordering
		o.bus.orderings.Go(o.run)
	}
	o.kick()
}

// change changes a place of this hub: it is opened or closed, or wants more events.
func (o *orderedGroup) change(p *spot, open bool, more int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seats[p.id] != p {
		return
	}
	opens := p.open != open
	p.open = open
	if p.credit += more; !open {
		p.credit = 0
	}
	if o.own != nil && opens {
		o.own.members = true
	}
	if o.host != nil {
		if opens {
			o.host.tellSeat(p)
		} else if more > 0 {
			o.host.tellMore(p, more)
		}
	}
	o.kick()
}

// entryChanged takes the entry of the group. Another hub may own the group by now.
func (o *orderedGroup) entryChanged(value []byte, revision uint64) {
	o.mu.Lock()
	o.changed = max(o.changed, revision)
	if o.asked > 0 && o.asked < o.changed {
		o.unask()
	}
	o.mu.Unlock()
	var e ownership
	if json.Unmarshal(value, &e) == nil && e.Hub != o.bus.handles.hub {
		o.mu.Lock()
		if o.own != nil && e.Term > o.own.entry.Term {
			o.own.broke(brokenLost)
		}
		o.mu.Unlock()
	}
	o.kick()
}

// leave removes a place that holds nothing any more.
func (o *orderedGroup) leave(p *spot) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seats[p.id] != p {
		return
	}
	delete(o.seats, p.id)
	if o.own != nil {
		o.own.left(p)
	}
	if o.host != nil {
		o.host.tellLeft(p)
	}
	o.kick()
}

// occupied reports whether the group has members on this hub. If not, the ordering ends.
func (o *orderedGroup) occupied() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.seats) > 0 {
		return true
	}
	o.running = false
	o.bus.owners.remove(o)
	return false
}

// run owns the group, or has its members served by the hub that does, while it has members here.
func (o *orderedGroup) run() {
	defer o.bus.groups.unshare(o.group, nil)
	for o.occupied() {
		pause, err := o.turn()
		switch {
		case errors.Is(err, records.ErrMoved):
			pause = 10 * time.Millisecond
		case err != nil && o.bus.conn.Ctx.Err() == nil:
			o.bus.often.Log(o.bus.conn.Ctx, slog.LevelWarn, "cannot find the owner of an ordered group; retrying", o.group.source(), slog.String("topic", o.group.topic.Name), slog.String("group", o.group.name), slog.Any("error", err))
			pause = max(pause, 250*time.Millisecond)
		}
		if pause > 0 {
			o.rest(pause)
		}
	}
}

// rest waits for a time, or until something has changed.
func (o *orderedGroup) rest(most time.Duration) {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-o.wake:
	case <-t.C:
	case <-o.bus.conn.Ctx.Done():
	}
}

// turn looks who owns the group, and becomes its owner or a guest of it for as long as that goes.
func (o *orderedGroup) turn() (pause time.Duration, err error) {
	if o.bus.conn.Ctx.Err() != nil {
		return 10 * time.Millisecond, nil // the members leave
	}
	ctx, cancel := context.WithTimeout(o.bus.conn.Ctx, conn.PublishWait)
	defer cancel()
	e, err := o.bus.owners.read(ctx, o.key)
	if err != nil {
		return 0, err
	}
	wait := o.group.fence.ackWait
	switch {
	case e.revision == 0 || e.Clean:
		wait = 0
	case e.Wait > 0:
		wait = min(wait, e.Wait)
	case e.Hub == o.bus.handles.hub: // it ended in disorder
	default:
		if err := o.bus.owners.look(ctx, e.Hub); err != nil {
			return 0, err
		}
		left := o.bus.owners.left(e.Hub, o.bus.clock.Now())
		if left > 0 {
			ended, err := o.visit(&e)
			if err != nil || ended {
				return min(left, 50*time.Millisecond), err
			}
			return min(left, 250*time.Millisecond), nil
		}
		wait = max(wait+left, 0) // it has got nothing since its lease ended
	}
	if err := o.bus.handles.keys.ensure(ctx); err != nil { // guests sign with them
		return 0, err
	}
	taken, err := o.bus.owners.take(ctx, o.key, e)
	if err != nil {
		return 0, err
	}
	o.bus.log.Debug("this hub owns an ordered group", slog.String("topic", o.group.topic.Name), slog.String("group", o.group.name), slog.Duration("wait", wait))
	newOwner(o, taken).serve(wait)
	return 0, nil
}

// stopOrderings waits until this hub owns nothing any more. Its subscriptions have ended.
func (b *Bus) stopOrderings(ctx context.Context) {
	if b.owners == nil {
		return // it was never open
	}
	done := make(chan struct{})
	b.orderingsEnd.Store(true)
	b.owners.eachGroup((*orderedGroup).kick)
	go func() {
		b.orderings.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		b.conn.Cancel()
		<-done
	}
}

// eachGroup calls f for the ordered groups of this hub, without holding the lock.
func (w *owners) eachGroup(f func(*orderedGroup)) {
	w.mu.Lock()
	all := make([]*orderedGroup, 0, len(w.groups))
	for _, o := range w.groups {
		all = append(all, o)
	}
	w.mu.Unlock()
	for _, o := range all {
		f(o)
	}
}

// validateOrder checks the options of ordered groups.
func (o *SubscribeOptions) validateOrder() error {
	switch {
	case !o.OrderByKey && o.Slots != 0:
		return event.BadOptions("opts.Slots is for ordered groups only")
	case o.Slots < 0 || o.Slots > ordered.MaxSlots:
		return event.BadOptions("opts.Slots is %d: 1 to %d are allowed", o.Slots, ordered.MaxSlots)
	}
	if o.OrderByKey && o.Slots == 0 {
		o.Slots = ordered.DefaultSlots
	}
	return nil
}
