package projections

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"

	"eventhub/jetstream"
)

// feed is one member of a projection's group. It distributes deliveries to lanes. Each lane handles
// its events one after another, in the order of arrival.
//
// Deliveries alone do not preserve the stream order: members share the events of the group, and
// events held by a killed hub arrive late. A span is a run of deliveries without a gap: during a
// span, this member received every event that the group delivered. First deliveries follow the
// stream order. So a lane that was brought up to a first delivery has missed nothing before the
// next delivery of the same span. In any other case, the lane reads the stream for events that it
// missed.
type feed struct {
	log  *slog.Logger
	lane func(*jetstream.Event) string
	work func(ctx context.Context, l *lane, jobs []job) error
	max  int // maximum number of jobs that a lane handles at a time

	ctx context.Context // ends with the feed
	wg  sync.WaitGroup  // running lanes

	mu sync.Mutex
	// lanes holds the lanes with work, so there are never more lanes than jobs.
	lanes map[string]*lane
	span  uint64
	// whole means that the span began with the first event that the group delivered at all, and
	// that every event since was handled, so nothing can have been missed.
	whole   bool
	stretch uint64 // stretch of the last delivery; order is its place in that stretch
	order   uint64
	jobs    int // number of jobs in all lanes, at most maxJobs
	maxJobs int
	failed  error
	cancel  context.CancelFunc
}

// lane is a queue of deliveries.
type lane struct {
	name  string
	queue []job // bounded by the number of events in flight
	busy  int   // number of jobs being handled, from the front of queue
	// failing is set while the first event is being retried. The other events of the lane are given
	// back meanwhile, so that they do not take up capacity that other lanes could use.
	failing bool
}

// job is a delivery together with its span.
type job struct {
	*jetstream.Delivery
	span  uint64
	whole bool
}

// reached returns the span in which the lane is current once the job is done. It returns 0, meaning
// none, for a redelivered event, which says nothing about the events after it.
func (j *job) reached() uint64 {
	if j.Redelivered {
		return 0
	}
	return j.span
}

// follows reports whether no event can lie between the job and the last event of a lane that was
// current in the span reached.
func (j *job) follows(reached uint64) bool { return j.whole || reached == j.span && reached != 0 }

func newFeed(log *slog.Logger, laneOf func(*jetstream.Event) string, limit int, work func(context.Context, *lane, []job) error) *feed {
	return &feed{log: log, lane: laneOf, work: work, max: limit, lanes: make(map[string]*lane)}
}

// run joins the group and handles events until ctx ends, the bus is closed, or a lane fails
// permanently. It returns the error of the lane or the bus. It may be called only once.
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
		f.log.LogAttrs(stop, slog.LevelWarn, "failed to return the leases of a projection", slog.String("group", group), slog.Any("error", err))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return cmp.Or(f.failed, closed)
}

// arrive is the handler of the subscription. It is called for one delivery at a time, in order of
// arrival.
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
		f.breakSpan() // the event will be redelivered, perhaps to another member
		return
	}
	// possible because events whose leases were lost are still being handled
	if f.jobs == f.maxJobs {
		f.park(d, "member is still handling events whose leases were lost")
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

// breakSpan ends the span because one of its events was not handled. The caller holds mu.
func (f *feed) breakSpan() {
	f.span++
	f.whole = false
}

// behind is the NACK reason of an event that waits behind a failing event.
const behind = "waits for an earlier event of its key"

// park gives a delivery back for parkTime. The caller holds mu.
func (f *feed) park(d *jetstream.Delivery, why string) {
	f.breakSpan()
	_ = d.Nack(why, parkTime) // an expired lease leads to a redelivery too
}

// fails marks the lane as retrying its event.
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

// errGoexit ends a feed after a callback called runtime.Goexit.
var errGoexit = errors.New("projections: a callback ended its goroutine (runtime.Goexit)")

// drive handles the jobs of a lane until the lane is empty.
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

// begin returns the next jobs of a lane. It removes the lane and returns nil if the lane is empty
// or the feed has ended.
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

// end settles jobs according to the result of their work.
func (f *feed) end(l *lane, jobs []job, err error) {
	if err != nil {
		f.fail(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.jobs -= len(jobs) // before the acks, which immediately make room for further events
	if err == nil {
		for _, j := range jobs {
			_ = j.Ack() // an expired lease leads to a redelivery, which the state then covers
		}
	}
	l.failing = false
	clear(jobs)
	l.queue, l.busy = l.queue[l.busy:], 0
}

// fail ends the feed with an error, unless the feed is already ending.
func (f *feed) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() == nil {
		f.failed = err
		f.cancel()
	}
}
