package outbox

import (
	"context"
	"errors"
	"math"
	"time"
)

// ErrFull is returned by KVStore.Add when there is no room. Nothing was stored.
var ErrFull = errors.New("outbox: full")

// ErrExists is returned by KVStore.Add when a record of that id waits already. Nothing was stored.
var ErrExists = errors.New("outbox: a record with this id exists")

// Store is where the records of an outbox are. All methods may be called concurrently, by any number of processes. Times are
// those of the store's own clock, so that the clocks of drainers do not matter; only when a publish may have begun is told by
// the clock of NATS.
type Store interface {
	// Claim gives records to a worker for a lease. It notes in each, if nothing is noted yet, when a publish may begin, and
	// commits that before it returns. Records of one lane (topic and key) are handed out in order, without a gap, and none
	// while an earlier one of it waits, is claimed, or is parked (see ClaimOptions.PassErrors).
	Claim(ctx context.Context, opts ClaimOptions) (Claim, error)
	// Renew makes the leases of records that the worker has end lease from now, all at the same moment, and returns the ids
	// that it has no longer.
	Renew(ctx context.Context, worker string, lease time.Duration, records []*Record) (lost []string, err error)
	// Settle ends the worker's hold on records. Those it has no longer are left alone, but for those that were sent, which
	// is true whoever has them. What is settled at once is settled in one transaction, if the store has such.
	Settle(ctx context.Context, worker string, s Settlement) error
	// RequeueExpired makes records pending whose lease is over, and says how many. The drainers do it now and then.
	RequeueExpired(ctx context.Context) (int, error)

	// Now is the time by the store's clock.
	Now(ctx context.Context) (time.Time, error)
	// Stats says what waits. It looks at all that is not sent.
	Stats(ctx context.Context) (Stats, error)
	// List returns records in the order of their sequence.
	List(ctx context.Context, opts ListOptions) ([]*Record, error)
	// Retry makes parked records pending, as if they had never been tried, and says how many: those of the ids, or all
	// when there are none. What could not be found out about them is not asked again.
	Retry(ctx context.Context, ids ...string) (int, error)
	// Purge deletes records that are sent or parked, and says how many.
	Purge(ctx context.Context, opts PurgeOptions) (int, error)

	// Listen wakes a sleeper when records may have been added, until ctx ends or it cannot do so any longer, which it returns
	// as an error. It returns ErrCannotListen when it cannot tell: then there is only polling.
	Listen(ctx context.Context, s Sleeper) error
}

// Sleeper is a drainer that sleeps while there is nothing to do.
type Sleeper struct {
	// Asleep receives when it has fallen asleep: from then on it wants to be woken, at least once. A store that learns of
	// records for nothing may wake it at any time.
	Asleep <-chan struct{}
	// Listening is called when the store has begun to learn of records for one that is asleep. What was added just before may
	// have gone unnoticed, so the sleeper looks once.
	Listening func()
	// Wake wakes it.
	Wake func()
}

// ErrCannotListen is returned by Store.Listen of a store that does not know when records are added.
var ErrCannotListen = errors.New("outbox: the store tells nobody of new records")

// ClaimOptions say what Claim hands out.
type ClaimOptions struct {
	// Worker names who claims. It must not be the name of another, and not that of one from before a restart.
	Worker string
	// Limit is the most records: 1..1,000.
	Limit int
	// Lease is how long they are the worker's.
	Lease time.Duration
	// PassErrors lets a lane go on past records that are parked. Otherwise it waits for Retry or Purge.
	PassErrors bool
	// Bytes, if not 0, bounds the payloads of the claim; one record may be larger.
	Bytes int
	// ExceptTopics are topics to leave out: at most 1,000.
	ExceptTopics []string
	// MaxPayload is the largest payload in bytes that is read: a record with a larger one comes without (see Record.TooLarge).
	// 0: that of the store, which is the most that List reads.
	MaxPayload int
	// Began is the time by the clock of NATS, in epoch milliseconds, or earlier: it is noted as Record.PublishBegan. Default:
	// the store's own time.
	Began int64
}

func (o *ClaimOptions) bytes() int {
	if o.Bytes <= 0 {
		return math.MaxInt
	}
	return o.Bytes
}

// Claim is what Claim handed out.
type Claim struct {
	// Records are owned by the caller; those of one lane are in order.
	Records []*Record
	// Now was the store's time, in epoch milliseconds.
	Now int64
	// Began is what was noted where nothing was. A record with another PublishBegan was claimed before.
	Began int64
	// More says that another claim may find more right now.
	More bool
	// Failed are lanes whose records could not be claimed, though others could.
	Failed []LaneError
}

// LaneError is why the records of a lane could not be claimed.
type LaneError struct {
	Lane string // topic/key, or /topic/id of a record without a key
	Err  error
}

// Settlement says what became of records.
type Settlement struct {
	Sent   []*Record
	Failed []Failure
}

// Failure says what becomes of a record that was not published.
type Failure struct {
	Record *Record
	// Err says why. "" leaves what was said before.
	Err string
	// Counts counts an attempt.
	Counts bool
	// Unsent says that it is known not to be in the stream, neither by this try nor by an earlier one.
	Unsent bool
	// Park gives it up; otherwise it is tried again after Delay.
	Park  bool
	Delay time.Duration
}

// Stats says what is in a store, without what was sent.
type Stats struct {
	// Pending counts those that wait, Claimed those that drainers have, Errors those that are parked.
	Pending int `json:"pending"`
	Claimed int `json:"claimed"`
	Errors  int `json:"errors"`
	// OldestAge is how long ago the oldest was added that is pending or claimed; 0 when there is none.
	OldestAge time.Duration `json:"oldest_age_ns"`
}

// ListOptions say what List returns.
type ListOptions struct {
	// Status is that of the records. Required.
	Status Status
	// After is the sequence after which to begin, which leaves out others with that sequence.
	After int64
	// Limit is the most records: default 100, at most 1,000.
	Limit int
}

// PurgeOptions say what Purge deletes.
type PurgeOptions struct {
	// Status is Sent or Errored. Required.
	Status Status
	// OlderThan is how long ago they were sent; for parked ones, added.
	OlderThan time.Duration
	// IDs, if there are any, are the only ones.
	IDs []string
	// Limit is the most records of one call: default 10,000.
	Limit int
}

// Bounds of what stores are asked for.
const (
	maxClaim     = 1_000
	maxList      = 1_000
	defaultList  = 100
	defaultPurge = 10_000
	maxErrLen    = 1_000 // bytes of Record.LastErr
)

func (o *ListOptions) limit() int {
	if o.Limit <= 0 {
		return defaultList
	}
	return min(o.Limit, maxList)
}

func (o *PurgeOptions) limit() int {
	if o.Limit <= 0 {
		return defaultPurge
	}
	return o.Limit
}

func (o *PurgeOptions) validate() error {
	if o.Status != Sent && o.Status != Errored {
		return errors.New("outbox: only records that are sent or parked can be purged")
	}
	return nil
}

func (o *ClaimOptions) validate() error {
	switch {
	case o.Worker == "":
		return errors.New("outbox: claim: the worker has no name")
	case o.Limit < 1 || o.Limit > maxClaim:
		return errors.New("outbox: claim: 1 to 1000 records can be claimed")
	case o.Lease <= 0:
		return errors.New("outbox: claim: the lease is not positive")
	}
	return nil
}
