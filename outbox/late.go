package outbox

import (
	"context"
	"log/slog"
	"slices"
	"time"
)

const (
	// maxLate is the maximum number of results that a drainer keeps because the store did not save
	// them. Beyond that, it forgets the oldest: their records are claimed again when their leases
	// end.
	maxLate = maxClaim
	// lateBatch is the maximum number of such results that the drainer tries to save at a time.
	lateBatch = 100
	// latePart bounds the share of the time that the drainer spends on such attempts.
	latePart = 10
)

// lateResults holds the results that the store did not save while it saved others, because the
// record is locked or the store refuses to change it. They count neither as held nor against
// Config.BatchSize, so that they hold up no other records. Their leases are not renewed.
type lateResults struct {
	results []lateResult // the next to try first
	at      time.Duration
	gap     time.Duration
}

// lateResult is a result with only those fields of the record that identify it.
type lateResult struct {
	Failure
	sent bool
}

func lean(r *Record) *Record {
	return &Record{ID: r.ID, Topic: r.Topic, Key: r.Key, Attempts: r.Attempts}
}

// put adds results.
func (r *lateResults) put(st *Settlement) {
	for _, rec := range st.Sent {
		r.drop(rec.ref())
		r.results = append(r.results, lateResult{Failure: Failure{Record: lean(rec)}, sent: true})
	}
	for _, f := range st.Failed {
		r.drop(f.Record.ref())
		f.Record = lean(f.Record)
		r.results = append(r.results, lateResult{Failure: f})
	}
	r.results = r.results[max(0, len(r.results)-maxLate):]
}

// drop forgets the result of a record, and reports whether the record was sent.
func (r *lateResults) drop(of ref) (sent bool) {
	i := slices.IndexFunc(r.results, func(l lateResult) bool { return l.Record.ref() == of })
	if i < 0 {
		return false
	}
	sent = r.results[i].sent
	r.results = slices.Delete(r.results, i, i+1)
	return sent
}

// setLate notes the results that the store did not save.
func (l *loop) setLate(ctx context.Context, left *Unsettled) {
	if len(l.late.results) == 0 {
		l.late.gap = againFirst
		l.late.at = l.again(&l.late.gap)
	}
	l.late.put(&left.Locked)
	l.late.put(&left.Refused)
	for _, f := range left.Failed {
		l.often.Log(ctx, slog.LevelError, "store refuses to save publish results of a lane; retrying", f.Lane, slog.String("lane", f.Lane), slog.Any("error", f.Err))
		l.cfg.Observer.SettleFailed()
	}
	if n := len(left.Locked.Sent) + len(left.Locked.Failed); n > 0 {
		l.often.Log(ctx, slog.LevelInfo, "other transactions have locked records; saving their publish results later", "", slog.Int("records", n))
	}
}

// saveLate tries again to save late results.
func (l *loop) saveLate(ctx context.Context) {
	var st Settlement
	n := min(lateBatch, len(l.late.results))
	for _, r := range l.late.results[:n] {
		if r.sent {
			st.Sent = append(st.Sent, r.Record)
		} else {
			st.Failed = append(st.Failed, r.Failure)
		}
	}
	began := l.now()
	sctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	left, err := l.cfg.Store.Settle(sctx, l.cfg.Worker, st)
	switch {
	case err == nil:
		before := len(l.late.results)
		l.late.results = slices.Delete(l.late.results, 0, n)
		l.late.put(&left.Locked)
		l.late.put(&left.Refused)
		if l.idle && len(l.late.results) < before {
			l.claimAt = l.now() // settled lanes may be claimed again
		}
	case ctx.Err() == nil:
		l.often.Log(ctx, slog.LevelWarn, "failed to save publish results; retrying", "", slog.Any("error", err))
		l.cfg.Observer.SettleFailed()
	}
	l.late.at = max(l.again(&l.late.gap), l.now()+latePart*(l.now()-began))
}
