package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"eventhub/jetstream"
)

// work publishes the records of a job and returns the outcome of each.
func (d *Drainer) work(ctx context.Context, j *job) *outcome {
	o := &outcome{job: j}
	sure, err := d.lookUp(ctx, j)
	if err != nil {
		o.missed(j.topic, d.now(), err)
	}
	stopped := err != nil
	var wait time.Duration // until the topic's client may make it
	for {
		r, more := j.next(d.now())
		if !more {
			return o
		}
		known, looked := sure[r.ID]
		fresh := j.fresh(r)
		switch {
		case known == inStream:
			d.sent(j, o, r, true)
		case stopped || ctx.Err() != nil || !d.may(j):
			stopped = true
			o.Failed = append(o.Failed, Failure{Record: r, Unsent: fresh, Delay: wait})
		case r.undecodable == nil && !fresh && !looked && j.window > 0 && d.sinceBegan(r) > j.window-d.cfg.Margin:
			// the duplicate window may have passed: the record must be claimed again and looked up
			stopped = true
			o.Failed = append(o.Failed, Failure{Record: r})
		case known == unknown && looked:
			o.Failed = append(o.Failed, Failure{Record: r, Park: true, Counts: true, Err: errUnknown})
			stopped = j.ordered && !d.cfg.PassErrors
		default:
			if stopped = !d.publish(ctx, j, o, r, fresh || looked); stopped && rationed(o.Failed) {
				wait = o.Failed[len(o.Failed)-1].Delay
			}
		}
	}
}

// errUnknown is the last_err of a record that may or may not be in the stream.
const errUnknown = "the record may already have been published and the stream cannot say, because it dropped events of that time or holds too many; retry publishes the record, perhaps again; purge drops it"

// may reports whether the drainer is certain to hold the job's records still.
func (d *Drainer) may(j *job) bool { return !j.lost.Load() && int64(d.now()) < j.until.Load() }

func (o *outcome) missed(topic string, began time.Duration, err error) {
	o.away, o.topic, o.began = err, topic, began
}

func (d *Drainer) sent(j *job, o *outcome, r *Record, found bool) {
	o.Sent = append(o.Sent, r)
	d.cfg.Observer.Published(d.age(j, r), found)
}

// publish publishes one record and reports whether the job continues with the next. unsent means
// that the record was not in the stream before.
func (d *Drainer) publish(ctx context.Context, j *job, o *outcome, r *Record, unsent bool) bool {
	began := d.now()
	err := r.undecodable
	if err == nil {
		pctx, cancel := context.WithTimeout(ctx, d.cfg.PublishTimeout)
		err = d.attempt(pctx, r)
		cancel()
	}
	if err == nil {
		d.sent(j, o, r, false)
		return true
	}
	f := Failure{Record: r, Err: err.Error()}
	switch {
	case ctx.Err() == nil && code(err) == jetstream.CodeRateLimited:
		// The client that added the record makes topics too fast. The record waits for a part of
		// the time for which it has waited, and is never parked for that.
		f.Unsent, f.rationed = unsent, true
		f.Delay = jitter(min(max(d.age(j, r)/pollPart, d.cfg.RetryFirst), d.cfg.RetryMax))
		o.Failed = append(o.Failed, f)
		return false
	case ctx.Err() != nil || away(err):
		// The outcome may be unknown. The failure does not count as an attempt.
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
	f.Unsent = unsent && (permanent(err) || r.undecodable != nil || turnedDown(err))
	o.Failed = append(o.Failed, f)
	return !j.ordered || f.Park && d.cfg.PassErrors
}

// attempt publishes one record.
func (d *Drainer) attempt(ctx context.Context, r *Record) (err error) {
	if d.cfg.Tracer != nil {
		var end func(error)
		ctx, end = d.cfg.Tracer.Attempt(ctx, r.Topic, r.ID, r.Headers, r.Attempts)
		defer func() { end(err) }()
	}
	_, err = d.cfg.Bus.Publish(ctx, r.Topic, r.Payload, r.options())
	return err
}

// rationed reports whether the last failure is that of a topic that may not be made yet. No other
// record of the job can be published then.
func rationed(failed []Failure) bool { return len(failed) > 0 && failed[len(failed)-1].rationed }

// age returns how long ago a record was added.
func (d *Drainer) age(j *job, r *Record) time.Duration {
	return max(0, time.Duration(j.claimed-r.AddedAt)*time.Millisecond+d.now()-j.at)
}

// code returns the code of an error of the bus, or "".
func code(err error) string {
	e, _ := errors.AsType[*jetstream.Error](err)
	if e == nil {
		return ""
	}
	return e.Code
}

// backOff returns the delay before the next attempt of a record that has failed attempts times
// before.
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

// permanent reports whether every further attempt would fail too.
func permanent(err error) bool {
	e, ok := errors.AsType[*jetstream.Error](err)
	if !ok {
		return false
	}
	return e.Code == jetstream.CodeBadTopic || e.Code == jetstream.CodeBadOptions || errors.Is(err, jetstream.ErrTooLarge)
}

// turnedDown reports whether NATS, which is reachable, refused the event or the topic's stream.
func turnedDown(err error) bool {
	return jetstream.Refused(err) || errors.Is(err, jetstream.ErrNoStream)
}

// away reports whether the bus failed for a reason unrelated to the event.
func away(err error) bool {
	if errors.Is(err, jetstream.ErrClosed) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return true
	}
	e, ok := errors.AsType[*jetstream.Error](err)
	if ok && (e.Code == jetstream.CodeTopicFull || e.Code == jetstream.CodeStorageLow) {
		return true // until the topic, or NATS, has room
	}
	if !ok || turnedDown(err) || errors.Is(err, jetstream.ErrTooLarge) {
		return false
	}
	switch e.Code {
	case jetstream.CodePublishFailed, jetstream.CodeInternal, jetstream.CodeOverloaded:
		return true
	default:
		return false
	}
}

// presence is the result of looking up a record in the stream.
type presence int

const (
	unknown presence = iota
	inStream
	notInStream
)

// lookUp searches the stream for the records of a job that may have been published so long ago that
// the duplicate window no longer protects them. Records that need no search are absent from the
// result.
func (d *Drainer) lookUp(ctx context.Context, j *job) (sure map[string]presence, err error) {
	var ids []string
	var oldest, newest int64
	records := j.all()
	for _, r := range records {
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
	// All records of a job have the same topic.
	first := records[0]
	ctx, cancel := context.WithTimeout(ctx, d.lookupTimeout())
	defer cancel()
	history := d.cfg.Bus.History(first.Topic)
	window, err := history.DuplicateWindow(ctx)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return nil, nil // without a stream, no event is stored
	case permanent(err):
		return nil, nil // the publish will fail with the same error
	case err != nil:
		return nil, fmt.Errorf("outbox: read the duplicate window of %s: %w", first.Topic, err)
	}
	if err := d.askClock(ctx); err != nil {
		return nil, fmt.Errorf("outbox: look up records in %s: %w", first.Topic, err)
	}
	j.window = window
	now := d.now()
	wentBack := newest > d.clock.latest(now) // the NATS clock went back by an unknown amount
	if !wentBack && d.clock.latest(now)-oldest <= (window-d.cfg.Margin).Milliseconds() {
		return nil, nil
	}
	since := time.UnixMilli(min(oldest, d.clock.earliest(now))).Add(-d.cfg.ClockSkew)
	found, complete, err := history.FindIDs(ctx, jetstream.IDSearch{
		Key: first.Key, IDs: ids, Since: since, Max: d.cfg.LookupMax,
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: look up records in %s: %w", first.Topic, err)
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

// sinceBegan returns how long ago the publish of a record may have begun.
func (d *Drainer) sinceBegan(r *Record) time.Duration {
	return time.Duration(d.clock.latest(d.now())-r.PublishBegan) * time.Millisecond
}

// lookupTimeout returns the timeout of a look-up. A look-up may outlast a lease, because the
// drainer renews leases meanwhile.
func (d *Drainer) lookupTimeout() time.Duration { return 4 * d.cfg.PublishTimeout }
