package outbox

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// outcome is the result of a job.
type outcome struct {
	job *job
	Settlement
	away  error         // NATS, or only the topic, was unavailable
	topic string        // the topic of that failure
	began time.Duration // when the failed publish began
}

// now returns the time of the drainer's monotonic clock.
func (d *Drainer) now() time.Duration { return time.Since(d.began) }

// loop is the state of run. Only run's goroutine uses it.
type loop struct {
	*Drainer
	once bool // end when nothing is left to publish

	ready   []*job            // jobs that wait for a goroutine
	held    map[*job]struct{} // jobs that are not settled, including those in ready
	owner   map[ref]*job      // record to the job of its latest claim, for all held records
	records int               // number of records in held
	bytes   int
	unsaved Settlement        // results not yet saved in the store
	ended   map[*job]struct{} // finished jobs whose results are in unsaved; still in held
	late    lateResults
	topics

	stopping bool
	idle     bool          // the last claim searched every lane and found nothing
	worked   time.Duration // time of the last claim that found records, or of the last wake-up
	slept    bool          // the store was asked for a wake-up and has sent none since
	claimAt  time.Duration // time of the next claim
	claimGap time.Duration // delay of claimAt after the next store failure
	awayGap  time.Duration // delay of claimAt after the next NATS failure
	away     bool          // NATS was unavailable: check it before the next claim
	skewAt   time.Duration // time of the next clock comparison
	skewed   bool          // the clocks were too far apart
	skewSaid time.Duration // time of the last log line about skew
	saveAt   time.Duration
	saveGap  time.Duration
	renewAt  time.Duration
	requeue  time.Duration // time of the next search for expired leases
	well     time.Duration // time of the last successful call of the store or the bus
	gaveUp   error         // set in a Drain that failed for longer than Config.Patience
	total    Drained
}

// run claims records, hands them to the publishing goroutines, and saves the results. It ends when
// Stop is called, when ctx ends, or, with once, when nothing is left. It returns an error when ctx
// ends or when a Drain ran out of patience.
func (d *Drainer) run(ctx context.Context, once bool) (Drained, error) {
	l := &loop{
		Drainer: d, once: once, held: make(map[*job]struct{}), owner: make(map[ref]*job), ended: make(map[*job]struct{}),
		topics:   topics{running: make(map[string]map[*job]struct{}), stalled: make(map[string]bool), paused: make(map[string]*topicPause)},
		claimGap: againFirst, awayGap: againFirst, saveGap: againFirst, renewAt: d.now() + d.cfg.Lease/3, well: d.now(), worked: d.now(),
	}
	jobs, outcomes := make(chan *job), make(chan *outcome, d.cfg.BatchSize)
	var workers sync.WaitGroup
	for range d.cfg.InFlight {
		workers.Go(func() {
			for j := range jobs {
				outcomes <- d.work(ctx, j) // never blocks: the buffer has room for every job
			}
		})
	}
	sweeping, end := context.WithCancel(ctx)
	workers.Go(func() { d.often.Run(sweeping) })
	defer workers.Wait()
	defer close(jobs)
	defer end()

	stop := d.stop
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		l.act(ctx)
		if l.over() {
			if len(l.late.results) > 0 {
				l.saveLate(ctx)
			}
			return l.total, cmp.Or(ctx.Err(), l.gaveUp)
		}
		timer.Reset(l.next())
		var to chan *job
		var first *job
		n := l.pick()
		if n >= 0 {
			to, first = jobs, l.ready[n]
			first.start(l.now())
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
			l.begin(n)
		case o := <-outcomes:
			l.take(ctx, o)
			for more := true; more; { // save all results that are ready together
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

// claimIfIdle makes the next claim due now if the drainer is idle. A busy drainer claims soon
// anyway.
func (l *loop) claimIfIdle() {
	if l.idle {
		l.claimAt = min(l.claimAt, l.now())
	}
}

// over reports whether run must end.
func (l *loop) over() bool {
	return l.gaveUp != nil || len(l.held) == 0 && (l.stopping || l.once && l.idle)
}

// failed records a failure of the store or the bus and gives up when a Drain has run out of
// patience.
func (l *loop) failed(err error) {
	if l.once && l.now()-l.well > l.cfg.Patience {
		l.gaveUp = err
	}
}

// hungry reports whether another claim may be made. After a failed save the outcome of the save is
// unknown, so records that it gave back must not be claimed until the save succeeds.
func (l *loop) hungry() bool {
	_, _, enough := l.room()
	return !l.stopping && l.saveGap == againFirst && enough
}

// act does all work that is due.
func (l *loop) act(ctx context.Context) {
	now := l.now()
	if len(l.running) > 0 && now >= l.checkAt {
		l.findStalls()
	}
	if len(l.ended) > 0 && (now >= l.saveAt || l.allEnded()) {
		l.save(ctx)
	}
	if len(l.late.results) > 0 && now >= l.late.at {
		l.saveLate(ctx)
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

// allEnded reports whether a save need not wait for further results. After a failed save it is
// false, so that the retry keeps its delay.
func (l *loop) allEnded() bool { return len(l.ended) == len(l.held) && l.saveGap == againFirst }

// next returns how long act has nothing to do.
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
	if len(l.running) > 0 {
		at = min(at, l.checkAt)
	}
	if len(l.late.results) > 0 {
		at = min(at, l.late.at)
	}
	return max(0, at-l.now())
}

// again returns the end of the wait that starts now, and doubles the gap for the next failure.
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
	if err != nil && ctx.Err() == nil {
		l.often.Log(ctx, slog.LevelWarn, "failed to requeue records with expired leases", "", slog.Any("error", err))
	}
	if n > 0 {
		l.often.Log(ctx, slog.LevelInfo, "requeued records with expired leases", "", slog.Int("records", n))
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
		l.log.InfoContext(ctx, "event bus is available again")
	}
	if err := l.lookAtClocks(ctx); err != nil {
		l.away = true
		l.claimAt = l.again(&l.awayGap)
		l.failed(err)
		l.log.WarnContext(ctx, "event bus is unavailable; pausing", slog.Any("error", err))
		return
	}
	began := l.now()
	records, bytes, _ := l.room()
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	c, err := l.cfg.Store.Claim(sctx, ClaimOptions{
		Worker: l.cfg.Worker, Limit: records, Bytes: bytes, Lease: l.cfg.Lease,
		PassErrors: l.cfg.PassErrors, ExceptTopics: l.exceptTopics(began), MaxPayload: l.cfg.Bus.MaxPayload(), Began: l.clock.earliest(began),
	})
	if err != nil {
		if ctx.Err() == nil {
			l.often.Log(ctx, slog.LevelWarn, "failed to claim records; retrying", "", slog.Any("error", err))
		}
		l.claimAt = l.again(&l.claimGap)
		l.failed(err)
		l.cfg.Observer.ClaimFailed()
		return
	}
	for _, f := range c.Failed {
		l.often.Log(ctx, slog.LevelError, "failed to claim a lane; skipping it for a while", f.Lane, slog.String("lane", f.Lane), slog.Any("error", f.Err))
		l.cfg.Observer.ClaimFailed()
	}
	l.setLate(ctx, &Unsettled{Locked: c.Unsettled})
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
	case len(c.Records) > 0 || l.once:
		l.claimAt = l.now()
	default: // some lanes are blocked: search past them soon, but for at most a quarter of the time
		l.claimAt = l.now() + max(searchWait, min(3*took, (l.now()-l.worked)/pollPart))
	}
}

// rest returns the delay before the next claim of an idle drainer: a fraction of the time since the
// last work, so that follow-up records are found soon, and at most Config.Poll. After sleepAfter
// without work it also asks the store to wake the drainer.
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

// deal turns the records of a claim into jobs.
func (l *loop) deal(c Claim, began time.Duration) {
	if len(l.held) == 0 {
		l.renewAt = began + l.cfg.Lease/3
	}
	lanes := make(map[string]*job)
	var jobs []*job
	for _, r := range c.Records {
		name, ordered := r.lane(), r.Key != ""
		if !ordered && r.PublishBegan != c.Began {
			name = "//" + r.Topic // one job, so that one look-up serves all of them
		}
		sent := l.late.drop(r.ref()) // sent before, but the store did not save that
		j := lanes[name]
		if j == nil || sent {
			j = &job{topic: r.Topic, ordered: ordered, claimed: c.Now, noted: c.Began, at: began}
			j.until.Store(int64(began + l.usable()))
			l.held[j] = struct{}{}
			if sent {
				l.end(j)
				l.unsaved.Sent = append(l.unsaved.Sent, r)
			} else {
				lanes[name] = j
				jobs = append(jobs, j)
			}
		}
		l.own(r, j)
		j.records = append(j.records, r)
		l.records++
		l.bytes += len(r.Payload)
	}
	l.enqueue(jobs)
}

// own assigns a record to a job. An earlier job with the same record has lost it because its lease
// expired, so a failure which that job reported no longer applies.
func (l *loop) own(r *Record, j *job) {
	if old := l.owner[r.ref()]; old != nil {
		old.lost.Store(true)
		l.unsaved.Failed = slices.DeleteFunc(l.unsaved.Failed, func(f Failure) bool { return f.Record.ref() == r.ref() })
	}
	l.owner[r.ref()] = j
}

// usable returns how long after a claim or renewal a publish may still begin: three quarters of the
// lease.
func (d *Drainer) usable() time.Duration { return d.cfg.Lease * 3 / 4 }

// end notes that the results of a job are in unsaved.
func (l *loop) end(j *job) {
	if len(l.ended) == 0 {
		l.saveAt = l.now() + saveWait
	}
	l.ended[j] = struct{}{}
}

// take records the outcome of a job.
func (l *loop) take(ctx context.Context, o *outcome) {
	l.ran(o.job)
	l.end(o.job)
	o.Failed = slices.DeleteFunc(o.Failed, func(f Failure) bool { return l.owner[f.Record.ref()] != o.job })
	l.unsaved.Sent = append(l.unsaved.Sent, o.Sent...)
	l.unsaved.Failed = append(l.unsaved.Failed, o.Failed...)
	for i := range o.Failed {
		switch f := &o.Failed[i]; {
		case f.Park:
			l.total.Parked++
			l.cfg.Observer.Failed(true)
			l.often.Log(ctx, slog.LevelError, "record parked", f.Record.Topic, recordAttrs(f)...)
		case f.Counts:
			l.total.Failed++
			l.cfg.Observer.Failed(false)
			l.often.Log(ctx, slog.LevelWarn, "failed to publish record; retrying", f.Record.Topic, recordAttrs(f)...)
		}
	}
	l.total.Published += len(o.Sent)
	if len(o.Sent) > 0 && !l.away {
		l.awayGap = againFirst
	}
	if len(o.Sent) > 0 {
		delete(l.paused, o.Sent[0].Topic) // the topic accepts events again
	}
	if o.away != nil {
		l.missed(ctx, o)
	}
}

func recordAttrs(f *Failure) []slog.Attr {
	return []slog.Attr{
		slog.String("id", f.Record.ID), slog.String("topic", f.Record.Topic), slog.Int("attempts", f.Record.Attempts+1), slog.String("error", f.Err),
	}
}

// save writes the collected results to the store.
func (l *loop) save(ctx context.Context) {
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	left, err := l.cfg.Store.Settle(sctx, l.cfg.Worker, l.unsaved)
	if err != nil {
		if ctx.Err() == nil {
			l.often.Log(ctx, slog.LevelWarn, "failed to save publish results; retrying", "", slog.Any("error", err))
			l.cfg.Observer.SettleFailed()
		}
		l.saveAt = l.again(&l.saveGap)
		l.failed(err)
		return
	}
	l.saveGap, l.well = againFirst, l.now()
	l.setLate(ctx, &left)
	for j := range l.ended {
		delete(l.held, j)
		l.records -= len(j.records)
		for _, r := range j.records {
			l.bytes -= len(r.Payload)
			if l.owner[r.ref()] == j {
				delete(l.owner, r.ref())
			}
		}
	}
	clear(l.ended)
	l.unsaved = Settlement{}
	if l.idle {
		l.claimAt = l.now() // settled lanes may be claimed again
		l.idle = false
	}
}

// renew extends the leases of all records in unfinished jobs.
func (l *loop) renew(ctx context.Context) {
	began := l.now()
	l.renewAt = began + l.cfg.Lease/3
	var records []*Record
	for j := range l.held {
		if _, ended := l.ended[j]; !ended {
			records = append(records, j.all()...)
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
			l.often.Log(ctx, slog.LevelWarn, "failed to renew leases; retrying", "", slog.Any("error", err))
		}
		l.renewAt = began + l.cfg.Lease/12
		return
	}
	gone := make(map[string]bool, len(lost))
	for _, id := range lost {
		gone[id] = true
	}
	for j := range l.held {
		for _, r := range j.all() {
			if gone[r.ID] { // or a record of another topic has the id: giving it back does no harm
				j.lost.Store(true)
			}
		}
		j.until.Store(int64(began + l.usable()))
	}
	if len(lost) > 0 {
		l.often.Log(ctx, slog.LevelWarn, "lost records to other drainers; leases were not renewed in time", "", slog.Int("records", len(lost)))
	}
}
