package outbox

import (
	"sync"
	"sync/atomic"
	"time"
)

// job is a list of records that one goroutine publishes in turn.
type job struct {
	topic string
	// ordered marks records of a single lane: when one is not published, the records after it must
	// not be published either.
	ordered bool
	// window is the topic's duplicate window, if known. Records that were claimed before and are
	// not looked up must be published within it.
	window  time.Duration
	claimed int64         // the store's time of the claim, in epoch milliseconds
	noted   int64         // the PublishBegan that the claim set on records without one
	at      time.Duration // time of the claim by the drainer's clock

	// by the drainer's clock: no publish may begin later, because the lease may end
	until atomic.Int64
	lost  atomic.Bool // another drainer has claimed some of the records

	mu      sync.Mutex // guards the fields below
	records []*Record
	begun   int           // number of records that a goroutine has begun to publish
	since   time.Duration // when it began the last of them; at first, when it began the job
}

// all returns the records.
func (j *job) all() []*Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.records
}

// start notes that a goroutine begins the job.
func (j *job) start(now time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.since = now
}

// next begins the next record, if there is one.
func (j *job) next(now time.Duration) (*Record, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.begun == len(j.records) {
		return nil, false
	}
	r := j.records[j.begun]
	j.begun++
	j.since = now
	return r, true
}

// stalls reports whether the goroutine has worked on its record for longer than after.
func (j *job) stalls(now, after time.Duration) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return now-j.since > after
}

// cut removes the records that the goroutine has not begun, and returns them. While the goroutine
// looks records up, cut removes none: the look-up would only be repeated.
func (j *job) cut() []*Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.begun == 0 {
		return nil
	}
	rest := j.records[j.begun:]
	j.records = j.records[:j.begun:j.begun]
	return rest
}

// fresh reports whether the record cannot have been published before this claim. Comparing for
// equality is essential: the NATS clock may have gone back, so an earlier claim can carry a later
// time.
func (j *job) fresh(r *Record) bool { return r.PublishBegan == j.noted }
