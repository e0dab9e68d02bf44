package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"eventhub/jetstream"
)

// work publishes the records of a job, and says what became of each.
func (d *Drainer) work(ctx context.Context, j *job) *outcome {
	o := &outcome{job: j}
	sure, err := d.lookUp(ctx, j)
	if err != nil {
		o.missed(j.records[0].Topic, d.now(), err)
	}
	stopped := err != nil
	for _, r := range j.records {
		known, looked := sure[r.ID]
		fresh := j.fresh(r)
		switch {
		case known == inStream:
			d.sent(j, o, r, true)
		case stopped || ctx.Err() != nil || !d.may(j):
			stopped = true
			o.Failed = append(o.Failed, Failure{Record: r, Unsent: fresh})
		case r.undecodable == nil && !fresh && !looked && j.window > 0 && d.sinceBegan(r) > j.window-d.cfg.Margin:
			stopped = true // it took so long meanwhile: it is claimed again, and looked up
			o.Failed = append(o.Failed, Failure{Record: r})
		case known == unknown && looked:
			o.Failed = append(o.Failed, Failure{Record: r, Park: true, Counts: true, Err: errUnknown})
			stopped = j.ordered && !d.cfg.PassErrors
		default:
			stopped = !d.publish(ctx, j, o, r, fresh || looked)
		}
	}
	return o
}

// errUnknown is the last_err of a record that may be in the stream or not.
const errUnknown = "it may have been published before, and the stream cannot say: it has dropped events since, or has too many; retry publishes it (again), purge drops it"

// may reports whether the drainer surely has the job's records still.
func (d *Drainer) may(j *job) bool { return !j.lost.Load() && int64(d.now()) < j.until.Load() }

func (o *outcome) missed(topic string, began time.Duration, err error) {
	o.away, o.topic, o.began = err, topic, began
}

func (d *Drainer) sent(j *job, o *outcome, r *Record, found bool) {
	o.Sent = append(o.Sent, r)
	age := time.Duration(j.claimed-r.AddedAt)*time.Millisecond + d.now() - j.at
	d.cfg.Observer.Published(max(0, age), found)
}

// publish publishes one record, and reports whether to go on with the next. unsent says that it was not in the stream before.
func (d *Drainer) publish(ctx context.Context, j *job, o *outcome, r *Record, unsent bool) bool {
	began := d.now()
	err := r.undecodable
	if err == nil {
		pctx, cancel := context.WithTimeout(ctx, d.cfg.PublishTimeout)
		_, err = d.cfg.Bus.Publish(pctx, r.Topic, r.Payload, r.options())
		cancel()
	}
	if err == nil {
		d.sent(j, o, r, false)
		return true
	}
	f := Failure{Record: r, Err: err.Error()}
	switch {
	case ctx.Err() != nil || away(err):
		// Its outcome may be unknown. It costs the record nothing.
		o.missed(r.Topic, began, err)
		o.Failed = append(o.Failed, f)
		return false
	case permanent(err) || r.undecodable != nil:
		f.Park = true
	default:
		f.Park = r.Attempts+1 >= d.cfg.MaxAttempts
		f.Delay = d.backOff(r.Attempts)
	}
	f.Counts = true
	f.Unsent = unsent && (permanent(err) || r.undecodable != nil || jetstream.Refused(err))
	o.Failed = append(o.Failed, f)
	return !j.ordered || f.Park && d.cfg.PassErrors
}

// backOff is how long a record waits that has failed so often before.
func (d *Drainer) backOff(attempts int) time.Duration {
	wait := d.cfg.RetryFirst
	for range attempts {
		if wait >= d.cfg.RetryMax {
			break
		}
		wait *= 2
	}
	return jitter(min(wait, d.cfg.RetryMax))
}

// permanent says that no other try will do better.
func permanent(err error) bool {
	e, ok := errors.AsType[*jetstream.Error](err)
	if !ok {
		return false
	}
	return e.Code == jetstream.CodeBadTopic || e.Code == jetstream.CodeBadOptions || errors.Is(err, jetstream.ErrTooLarge)
}

// away says that the bus could not do its work, whatever the event.
func away(err error) bool {
	if errors.Is(err, jetstream.ErrClosed) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return true
	}
	e, ok := errors.AsType[*jetstream.Error](err)
	if !ok || jetstream.Refused(err) || errors.Is(err, jetstream.ErrTooLarge) {
		return false
	}
	switch e.Code {
	case jetstream.CodePublishFailed, jetstream.CodeInternal, jetstream.CodeOverloaded, jetstream.CodeRateLimited:
		return true
	default:
		return false
	}
}

// presence is what the stream says of a record.
type presence int

const (
	unknown presence = iota
	inStream
	notInStream
)

// lookUp asks the stream for those records of a job whose publish may have begun before, and so long ago that publishing
// them again might store them twice. Those that it was not asked for are not in sure.
func (d *Drainer) lookUp(ctx context.Context, j *job) (sure map[string]presence, err error) {
	var ids []string
	var oldest, newest int64
	for _, r := range j.records {
		if !j.fresh(r) && r.undecodable == nil {
			newest = max(newest, r.PublishBegan)
			if ids = append(ids, r.ID); oldest == 0 || r.PublishBegan < oldest {
				oldest = r.PublishBegan
			}
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	// All of a job are of one topic.
	first := j.records[0]
	ctx, cancel := context.WithTimeout(ctx, d.lookupTimeout())
	defer cancel()
	history := d.cfg.Bus.History(first.Topic)
	window, err := history.DuplicateWindow(ctx)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return nil, nil // there is no stream, so nothing is in it
	case permanent(err):
		return nil, nil // publishing will say so
	case err != nil:
		return nil, fmt.Errorf("outbox: duplicate window of %s: %w", first.Topic, err)
	}
	if err := d.askClock(ctx); err != nil {
		return nil, fmt.Errorf("outbox: look-up in %s: %w", first.Topic, err)
	}
	j.window = window
	now := d.now()
	wentBack := newest > d.clock.latest(now) // the clock of NATS did, and does not say how long ago it was
	if !wentBack && d.clock.latest(now)-oldest <= (window-d.cfg.Margin).Milliseconds() {
		return nil, nil
	}
	since := time.UnixMilli(min(oldest, d.clock.earliest(now))).Add(-d.cfg.ClockSkew)
	found, complete, err := history.FindIDs(ctx, jetstream.IDSearch{
		Key: first.Key, IDs: ids, Since: since, Max: d.cfg.LookupMax,
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: look-up in %s: %w", first.Topic, err)
	}
	sure = make(map[string]presence, len(ids))
	for _, id := range ids {
		switch {
		case found[id]:
			sure[id] = inStream
		case complete:
			sure[id] = notInStream
		default:
			sure[id] = unknown
		}
	}
	return sure, nil
}

// sinceBegan is how long ago a record's publish may have begun.
func (d *Drainer) sinceBegan(r *Record) time.Duration {
	return time.Duration(d.clock.latest(d.now())-r.PublishBegan) * time.Millisecond
}

// lookupTimeout bounds a look-up: it may take longer than a lease, which is renewed meanwhile.
func (d *Drainer) lookupTimeout() time.Duration { return 4 * d.cfg.PublishTimeout }
