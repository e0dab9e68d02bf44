package projections

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"

	"eventhub/jetstream"
)

// feed is one member of a projection's group. It puts what is delivered into lanes, in each of which one event is worked
// on at a time, in the order of arrival.
//
// Deliveries alone are no order: members share a group's events, and those that a killed hub held come late. A span is a
// stretch of deliveries without a hole: all that the group gave out during it came here. Events are given out for the first
// time in the order of the stream. So a lane that was brought up to one such in a span has missed nothing before the next
// one of the same span; in any other case it looks into the stream for what it has missed.
type feed struct {
	log  *slog.Logger
	lane func(*jetstream.Event) string
	work func(ctx context.Context, l *lane, jobs []job) error
	max  int // jobs that a lane works on at a time

	ctx context.Context // ends with the feed
	wg  sync.WaitGroup  // its lanes

	mu sync.Mutex
	// lanes are those with work: never more than jobs.
	lanes map[string]*lane
	span  uint64
	// whole says that the span began with the first event that the group gives out at all, and that all of it was worked
	// off: nothing can have been missed.
	whole   bool
	stretch uint64 // of the last delivery, and its order in it
	order   uint64
	jobs    int // in all lanes, never more than maxJobs
	maxJobs int
	failed  error
	cancel  context.CancelFunc
}

// lane is a queue of deliveries.
type lane struct {
	name  string
	queue []job // bounded by what is in flight
	busy  int   // of queue, those that are being worked on: the first
	// failing is set while its first event is tried again and again: others are given back meanwhile, so that they do not
	// take the places of other lanes' events.
	failing bool
}

// job is a delivery in its span.
type job struct {
	*jetstream.Delivery
	span  uint64
	whole bool
}

// reached is the span in which a lane is up to date once the job is done: 0, which is none, after an event that was given
// out before, for it says nothing of those behind it.
func (j *job) reached() uint64 {
	if j.Attempt > 1 {
		return 0
	}
	return j.span
}

// follows reports that nothing can lie between the job and what a lane did last, which was up to date in the span reached.
func (j *job) follows(reached uint64) bool { return j.whole || reached == j.span && reached != 0 }

func newFeed(log *slog.Logger, laneOf func(*jetstream.Event) string, limit int, work func(context.Context, *lane, []job) error) *feed {
	return &feed{log: log, lane: laneOf, work: work, max: limit, lanes: make(map[string]*lane)}
}

// run joins the group and works until ctx ends, the bus is closed, or a lane fails for good; that error it returns. Call it
// once.
func (f *feed) run(ctx context.Context, bus Bus, topic, group string, from jetstream.Position, inFlight int) error {
	ctx, f.cancel = context.WithCancel(ctx)
	f.ctx = ctx
	defer f.wg.Wait()
	defer f.cancel()
	f.maxJobs = inFlight
	var sub Subscription
	err := insist(ctx, f.log, "join the group", func(ctx context.Context) (err error) {
		sub, err = bus.Subscribe(ctx, topic, group, jetstream.SubscribeOptions{
			From:        from,
			MaxInFlight: inFlight, BatchSize: inFlight, AckTimeout: leaseTime, MaxAttempts: jetstream.NeverGiveUp,
		}, f.arrive)
		return err
	})
	if err != nil {
		return err
	}
	var closed error
	select {
	case <-ctx.Done():
	case <-sub.Done():
		closed = jetstream.ErrClosed
		f.cancel()
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := sub.Stop(stop); err != nil && !errors.Is(err, jetstream.ErrClosed) {
		f.log.LogAttrs(stop, slog.LevelWarn, "a projection's leases were not handed back", slog.String("group", group), slog.Any("error", err))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return cmp.Or(f.failed, closed)
}

// arrive is the subscription's handler: one delivery at a time, in the order in which they came.
func (f *feed) arrive(h *jetstream.Held) {
	d, begun := h.Begin()
	f.mu.Lock()
	defer f.mu.Unlock()
	if h.Stretch != f.stretch || h.Order != f.order+1 {
		f.span++
		f.whole = h.Order == 1
	}
	f.stretch, f.order = h.Stretch, h.Order
	if !begun {
		f.breakSpan() // it comes again, or goes to another
		return
	}
	if f.jobs == f.maxJobs { // leases were lost, but their events are still worked on
		f.park(d, "its member is still busy with events that it has lost")
		return
	}
	name := f.lane(&d.Event)
	l := f.lanes[name]
	if l == nil {
		l = &lane{name: name}
		f.lanes[name] = l
		f.wg.Go(func() { f.drive(l) })
	}
	if l.failing {
		f.park(d, behind)
		return
	}
	l.queue = append(l.queue, job{d, f.span, f.whole})
	f.jobs++
}

// breakSpan ends the span: something in it was not worked off. mu is held.
func (f *feed) breakSpan() {
	f.span++
	f.whole = false
}

// behind is why a delivery is parked behind one that fails.
const behind = "waits for an earlier event of its key"

// park gives a delivery back for a while. mu is held.
func (f *feed) park(d *jetstream.Delivery, why string) {
	f.breakSpan()
	_ = d.Nack(why, parkTime) // a lease that has ended comes again as well
}

// fails says that the lane's event is going to be tried again.
func (f *feed) fails(l *lane) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.failing = true
	for _, j := range l.queue[l.busy:] {
		f.park(j.Delivery, behind)
		f.jobs--
	}
	clear(l.queue[l.busy:])
	l.queue = l.queue[:l.busy]
}

// errGoexit ends a feed whose goroutine a callback has ended.
var errGoexit = errors.New("projections: a callback ended its goroutine (runtime.Goexit)")

// drive works a lane off until it is empty.
func (f *feed) drive(l *lane) {
	returned := false
	defer func() {
		if !returned {
			f.fail(errGoexit)
		}
	}()
	for jobs := f.begin(l); jobs != nil; jobs = f.begin(l) {
		f.end(l, jobs, f.work(f.ctx, l, jobs))
	}
	returned = true
}

// begin returns the jobs that a lane works on next. With none left, or at the end of the feed, it removes the lane.
func (f *feed) begin(l *lane) []job {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(l.queue) == 0 || f.ctx.Err() != nil {
		delete(f.lanes, l.name)
		return nil
	}
	l.busy = min(len(l.queue), f.max)
	return l.queue[:l.busy:l.busy]
}

// end settles jobs by the outcome of their work.
func (f *feed) end(l *lane, jobs []job, err error) {
	if err != nil {
		f.fail(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.jobs -= len(jobs) // before the acks, which make room for others at once
	if err == nil {
		for _, j := range jobs {
			_ = j.Ack() // a lease that has ended comes again, and is known then
		}
	}
	l.failing = false
	clear(jobs)
	l.queue, l.busy = l.queue[l.busy:], 0
}

// fail ends the feed with an error, unless it ends already.
func (f *feed) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() == nil {
		f.failed = err
		f.cancel()
	}
}
