package outbox

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// job is what one goroutine publishes, one record after the other.
type job struct {
	records []*Record
	// ordered: they are of one lane, so that none may be published when the one before was not.
	ordered bool
	// window is the topic's duplicate window, if it is known: those of records that were claimed before, and are not looked up,
	// must be published within it.
	window  time.Duration
	claimed int64         // the store's time of the claim, in epoch milliseconds
	noted   int64         // what the claim noted as PublishBegan where nothing was noted
	at      time.Duration // of the claim, by the drainer's clock

	until atomic.Int64 // by the drainer's clock: nothing may be published later, for the lease may end
	lost  atomic.Bool  // somebody else has some of them
}

// fresh says that the record was never claimed before, or is known not to have been published since. The clock of NATS may
// have gone back, so that the claim before this one can seem to be later.
func (j *job) fresh(r *Record) bool { return r.PublishBegan == j.noted }

// outcome is what became of a job.
type outcome struct {
	job *job
	Settlement
	away  error         // NATS, or just the topic, was not there
	topic string        // of which
	began time.Duration // when the publish that failed for it began
}

// now is the drainer's clock.
func (d *Drainer) now() time.Duration { return time.Since(d.began) }

// loop is the state of run. It belongs to its goroutine.
type loop struct {
	*Drainer
	once bool // end when there is nothing more

	ready   []*job            // that wait for a goroutine
	held    map[*job]struct{} // that are not settled, those in ready included
	owner   map[string]*job   // of the id of each record of held: the job that it was claimed for last
	records int               // in held
	bytes   int
	unsaved Settlement        // what the store does not know yet
	ended   map[*job]struct{} // the jobs of unsaved, which are still held
	paused  map[string]*topicPause

	stopping bool
	idle     bool          // the last claim found nothing, and looked everywhere
	worked   time.Duration // when a claim found something, or the store told of something, last
	slept    bool          // the store was asked to wake the drainer, and has not done so since
	claimAt  time.Duration // when to claim next
	claimGap time.Duration // how long the next failure of the store will delay that
	awayGap  time.Duration // how long the next failure of NATS will
	away     bool          // NATS was not there: ask before anything is claimed
	skewAt   time.Duration // when to compare the clocks next
	skewed   bool          // they were apart
	skewSaid time.Duration // when the log last said so
	saveAt   time.Duration
	saveGap  time.Duration
	renewAt  time.Duration
	requeue  time.Duration // when to look for leases that are over
	well     time.Duration // when the store and the bus did last what they were asked
	gaveUp   error         // with once: they did not for too long
	total    Drained
}

// topicPause keeps a topic from being claimed that NATS did not take events of while it took those of others.
type topicPause struct {
	until, gap time.Duration
}

// maxPaused bounds the topics that are paused; others are tried all the time then.
const maxPaused = 1_000

// run claims, deals out to the goroutines that publish, and settles, until it is stopped or, with once, nothing is left. It
// returns an error only when ctx ends.
func (d *Drainer) run(ctx context.Context, once bool) (Drained, error) {
	l := &loop{
		Drainer: d, once: once, held: make(map[*job]struct{}), owner: make(map[string]*job), ended: make(map[*job]struct{}), paused: make(map[string]*topicPause),
		claimGap: againFirst, awayGap: againFirst, saveGap: againFirst, renewAt: d.now() + d.cfg.Lease/3, well: d.now(), worked: d.now(),
	}
	jobs, outcomes := make(chan *job), make(chan *outcome, d.cfg.BatchSize)
	var workers sync.WaitGroup
	for range d.cfg.InFlight {
		workers.Go(func() {
			for j := range jobs {
				outcomes <- d.work(ctx, j) // never blocks: there are no more jobs than places
			}
		})
	}
	defer workers.Wait()
	defer close(jobs)

	stop := d.stop
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		l.act(ctx)
		if l.over() {
			return l.total, cmp.Or(ctx.Err(), l.gaveUp)
		}
		timer.Reset(l.next())
		var to chan *job
		var first *job
		if len(l.ready) > 0 {
			to, first = jobs, l.ready[0]
		}
		select {
		case <-ctx.Done():
			return l.total, ctx.Err()
		case <-stop:
			l.stopping, stop = true, nil
		case <-d.wake:
			l.worked, l.slept = d.now(), false
			l.claimIfIdle()
		case <-d.look:
			l.claimIfIdle()
		case to <- first:
			l.ready = l.ready[1:]
		case o := <-outcomes:
			l.take(ctx, o)
			for more := true; more; { // those that came meanwhile are settled together
				select {
				case o := <-outcomes:
					l.take(ctx, o)
				default:
					more = false
				}
			}
		case <-timer.C:
		}
	}
}

// claimIfIdle has the next claim be made now, unless one is to come soon anyway.
func (l *loop) claimIfIdle() {
	if l.idle {
		l.claimAt = min(l.claimAt, l.now())
	}
}

// over says that there is nothing left to do.
func (l *loop) over() bool {
	return l.gaveUp != nil || len(l.held) == 0 && (l.stopping || l.once && l.idle)
}

// failed notes that the store or the bus did not do what it was asked.
func (l *loop) failed(err error) {
	if l.once && l.now()-l.well > l.cfg.Patience {
		l.gaveUp = err
	}
}

// hungry says that there is room for another claim. While a save fails its outcome is unknown: what it gave back must not be
// claimed before it is repeated.
func (l *loop) hungry() bool {
	return !l.stopping && l.saveGap == againFirst && l.records <= l.cfg.BatchSize/2 && l.bytes <= l.cfg.HeldBytes/2
}

// act does what is due.
func (l *loop) act(ctx context.Context) {
	now := l.now()
	if len(l.ended) > 0 && (now >= l.saveAt || l.allEnded()) {
		l.save(ctx)
	}
	if len(l.held) > 0 && now >= l.renewAt {
		l.renew(ctx)
	}
	if !l.stopping && now >= l.requeue {
		l.requeueExpired(ctx)
	}
	if l.hungry() && l.now() >= l.claimAt {
		l.claim(ctx)
	}
}

// allEnded says that there is nothing to wait for before a save, which did not just fail.
func (l *loop) allEnded() bool { return len(l.ended) == len(l.held) && l.saveGap == againFirst }

// next is how long act has nothing to do.
func (l *loop) next() time.Duration {
	at := l.now() + time.Hour
	if !l.stopping {
		at = min(at, l.requeue)
	}
	if l.hungry() {
		at = min(at, l.claimAt)
	}
	if len(l.held) > 0 {
		at = min(at, l.renewAt)
	}
	if len(l.ended) > 0 {
		at = min(at, l.saveAt)
	}
	return max(0, at-l.now())
}

// again doubles a wait, and returns when it is over.
func (l *loop) again(gap *time.Duration) time.Duration {
	at := l.now() + jitter(*gap)
	*gap = min(2**gap, againMax)
	return at
}

func (l *loop) requeueExpired(ctx context.Context) {
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	n, err := l.cfg.Store.RequeueExpired(sctx)
	l.requeue = l.now() + jitter(l.cfg.Lease)/2
	switch {
	case err != nil && ctx.Err() == nil:
		l.log.WarnContext(ctx, "leases that are over were not looked for", slog.Any("error", err))
	case n > 0:
		l.log.InfoContext(ctx, "records of a drainer that is gone are pending again", slog.Int("records", n))
		l.claimAt = l.now()
	}
}

func (l *loop) claim(ctx context.Context) {
	if l.away {
		err := l.busReady(ctx)
		if err != nil {
			l.claimAt = l.again(&l.awayGap)
			l.failed(err)
			return
		}
		l.away = false
		l.log.InfoContext(ctx, "the event bus is there")
	}
	if err := l.lookAtClocks(ctx); err != nil {
		l.away = true
		l.claimAt = l.again(&l.awayGap)
		l.failed(err)
		l.log.WarnContext(ctx, "the event bus is away: records wait", slog.Any("error", err))
		return
	}
	began := l.now()
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	c, err := l.cfg.Store.Claim(sctx, ClaimOptions{
		Worker: l.cfg.Worker, Limit: l.cfg.BatchSize - l.records, Bytes: l.cfg.HeldBytes - l.bytes, Lease: l.cfg.Lease,
		PassErrors: l.cfg.PassErrors, ExceptTopics: l.exceptTopics(began), MaxPayload: l.cfg.Bus.MaxPayload(), Began: l.clock.earliest(began),
	})
	if err != nil {
		if ctx.Err() == nil {
			l.log.WarnContext(ctx, "nothing could be claimed: trying again", slog.Any("error", err))
		}
		l.claimAt = l.again(&l.claimGap)
		l.failed(err)
		l.cfg.Observer.ClaimFailed()
		return
	}
	for _, f := range c.Failed {
		l.log.ErrorContext(ctx, "records of a lane cannot be claimed; leaving them out for a while", slog.String("lane", f.Lane), slog.Any("error", f.Err))
		l.cfg.Observer.ClaimFailed()
	}
	l.claimGap, l.well = againFirst, l.now()
	took := l.now() - began
	if len(c.Records) > 0 {
		l.worked = l.now()
		l.cfg.Observer.Claimed(len(c.Records), took)
		l.deal(c, began)
	}
	switch l.idle = !c.More; {
	case l.idle:
		l.claimAt = l.now() + max(l.rest(), took)
	case len(c.Records) > 0:
		l.claimAt = l.now()
	default: // lanes that wait: soon, looking past them takes no more than a quarter of the time
		l.claimAt = l.now() + max(searchWait, min(3*took, (l.now()-l.worked)/pollPart))
	}
}

// rest is how long to wait for new records: a part of the time since there were some, so that those that follow are found soon,
// and Config.Poll at most. After sleepAfter, the store is asked to wake the drainer.
func (l *loop) rest() time.Duration {
	since := l.now() - l.worked
	if since >= sleepAfter && !l.slept {
		l.slept = true
		tell(l.asleep)
	}
	return jitter(min(max(pollFirst, since/pollPart), l.cfg.Poll))
}

func (d *Drainer) busReady(ctx context.Context) error {
	ready, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	if err := d.cfg.Bus.Ready(ready); err != nil {
		return err
	}
	return d.askClock(ctx)
}

// exceptTopics are the topics that are paused now.
func (l *loop) exceptTopics(now time.Duration) []string {
	var list []string
	for topic, p := range l.paused {
		if now < p.until {
			list = append(list, topic)
		} else if now > p.until+2*againMax {
			delete(l.paused, topic) // it was tried since, or has nothing more
		}
	}
	return list
}

// deal makes jobs of a claim.
func (l *loop) deal(c Claim, began time.Duration) {
	if len(l.held) == 0 {
		l.renewAt = began + l.cfg.Lease/3
	}
	lanes := make(map[string]*job)
	for _, r := range c.Records {
		name, ordered := r.lane(), r.Key != ""
		if !ordered && r.PublishBegan != c.Began {
			name = "//" + r.Topic // looked up together
		}
		j := lanes[name]
		if j == nil {
			j = &job{ordered: ordered, claimed: c.Now, noted: c.Began, at: began}
			j.until.Store(int64(began + l.usable()))
			lanes[name] = j
			l.ready = append(l.ready, j)
			l.held[j] = struct{}{}
		}
		l.own(r, j)
		j.records = append(j.records, r)
		l.records++
		l.bytes += len(r.Payload)
	}
}

// own notes that a job has a record. A job that had it before has lost it, for its lease was over: what became of it there is
// not what is becoming of it now.
func (l *loop) own(r *Record, j *job) {
	if old := l.owner[r.ID]; old != nil {
		old.lost.Store(true)
		l.unsaved.Failed = slices.DeleteFunc(l.unsaved.Failed, func(f Failure) bool { return f.Record.ID == r.ID })
	}
	l.owner[r.ID] = j
}

// usable is how long after a claim or a renewal was asked for publishes may begin.
func (d *Drainer) usable() time.Duration { return d.cfg.Lease * 3 / 4 }

// take notes what became of a job.
func (l *loop) take(ctx context.Context, o *outcome) {
	if len(l.ended) == 0 {
		l.saveAt = l.now() + saveWait
	}
	o.Failed = slices.DeleteFunc(o.Failed, func(f Failure) bool { return l.owner[f.Record.ID] != o.job })
	l.unsaved.Sent = append(l.unsaved.Sent, o.Sent...)
	l.unsaved.Failed = append(l.unsaved.Failed, o.Failed...)
	l.ended[o.job] = struct{}{}
	for i := range o.Failed {
		switch f := &o.Failed[i]; {
		case f.Park:
			l.total.Parked++
			l.cfg.Observer.Failed(true)
			l.log.ErrorContext(ctx, "a record was parked", recordAttrs(f)...)
		case f.Counts:
			l.total.Failed++
			l.cfg.Observer.Failed(false)
			l.log.WarnContext(ctx, "a record was not published: it is tried again", recordAttrs(f)...)
		}
	}
	l.total.Published += len(o.Sent)
	if len(o.Sent) > 0 && !l.away {
		l.awayGap = againFirst
	}
	if len(o.Sent) > 0 {
		delete(l.paused, o.Sent[0].Topic) // it took events since
	}
	if o.away != nil {
		l.missed(ctx, o)
	}
}

func recordAttrs(f *Failure) []any {
	return []any{
		slog.String("id", f.Record.ID), slog.String("topic", f.Record.Topic), slog.Int("attempts", f.Record.Attempts+1), slog.String("error", f.Err),
	}
}

// missed stops claims while NATS is away, and those of one topic while only that is.
func (l *loop) missed(ctx context.Context, o *outcome) {
	if ctx.Err() != nil || l.away {
		return
	}
	err := l.busReady(ctx)
	if err != nil {
		l.away, l.idle = true, false
		l.claimAt = l.again(&l.awayGap)
		l.giveBack(func(*job) bool { return true })
		l.log.WarnContext(ctx, "the event bus is away: records wait", slog.Any("error", o.away))
		return
	}
	p := l.paused[o.topic]
	switch {
	case p == nil && len(l.paused) >= maxPaused:
		return
	case p == nil:
		p = &topicPause{gap: againFirst}
		l.paused[o.topic] = p
	case o.began < p.until:
		return // it began before the pause
	}
	p.until = l.again(&p.gap)
	l.idle, l.claimAt = false, min(l.claimAt, p.until)
	l.giveBack(func(j *job) bool { return j.records[0].Topic == o.topic })
	l.log.WarnContext(ctx, "a topic takes no events now: its records wait", slog.String("topic", o.topic), slog.Any("error", o.away))
}

// giveBack settles the jobs that no goroutine has begun yet.
func (l *loop) giveBack(which func(*job) bool) {
	l.ready = slices.DeleteFunc(l.ready, func(j *job) bool {
		if !which(j) {
			return false
		}
		for _, r := range j.records {
			if l.owner[r.ID] == j {
				l.unsaved.Failed = append(l.unsaved.Failed, Failure{Record: r, Unsent: j.fresh(r)})
			}
		}
		l.ended[j] = struct{}{}
		return true
	})
}

// save tells the store what became of records.
func (l *loop) save(ctx context.Context) {
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	if err := l.cfg.Store.Settle(sctx, l.cfg.Worker, l.unsaved); err != nil {
		if ctx.Err() == nil {
			l.log.WarnContext(ctx, "what became of records was not saved: trying again", slog.Any("error", err))
		}
		l.saveAt = l.again(&l.saveGap)
		l.failed(err)
		return
	}
	l.saveGap, l.well = againFirst, l.now()
	for j := range l.ended {
		delete(l.held, j)
		l.records -= len(j.records)
		for _, r := range j.records {
			l.bytes -= len(r.Payload)
			if l.owner[r.ID] == j {
				delete(l.owner, r.ID)
			}
		}
	}
	clear(l.ended)
	l.unsaved = Settlement{}
	if l.idle {
		l.claimAt = l.now() // lanes are free that were not
		l.idle = false
	}
}

// renew prolongs the leases of all that is held.
func (l *loop) renew(ctx context.Context) {
	began := l.now()
	l.renewAt = began + l.cfg.Lease/3
	var records []*Record
	for j := range l.held {
		if _, ended := l.ended[j]; !ended {
			records = append(records, j.records...)
		}
	}
	if len(records) == 0 {
		return
	}
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	lost, err := l.cfg.Store.Renew(sctx, l.cfg.Worker, l.cfg.Lease, records)
	if err != nil {
		if ctx.Err() == nil {
			l.log.WarnContext(ctx, "leases were not renewed: trying again", slog.Any("error", err))
		}
		l.renewAt = began + l.cfg.Lease/12
		return
	}
	gone := make(map[string]bool, len(lost))
	for _, id := range lost {
		gone[id] = true
	}
	for j := range l.held {
		for _, r := range j.records {
			if gone[r.ID] {
				j.lost.Store(true)
			}
		}
		j.until.Store(int64(began + l.usable()))
	}
	if len(lost) > 0 {
		l.log.WarnContext(ctx, "others have taken records whose leases were not renewed in time", slog.Int("records", len(lost)))
	}
}
