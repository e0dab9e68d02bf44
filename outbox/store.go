package outbox

import (
	"context"
	"errors"
	"math"
	"time"
)

// ErrFull is returned by KVStore.Add when the entry of the record is full. Nothing was stored.
var ErrFull = errors.New("outbox: full")

// ErrExists is returned by KVStore.Add when a record with the same id and topic is still waiting.
// Nothing was stored.
var ErrExists = errors.New("outbox: a record with this id and topic exists")

// Store holds the records of an outbox. All methods may be called concurrently, by any number of
// processes. Times are those of the store's clock, so the clocks of drainers do not matter. Only
// Record.PublishBegan is by the NATS clock.
type Store interface {
	// Claim leases records to a worker. It sets PublishBegan in each record where it is unset, and
	// commits before it returns. Records of one lane (topic and key) are returned in order and
	// without gaps. A lane returns nothing while an earlier record waits for a retry, is claimed,
	// or is parked (see ClaimOptions.PassErrors).
	Claim(ctx context.Context, opts ClaimOptions) (Claim, error)
	// Renew extends the worker's leases of records to one lease from now, and returns the ids of
	// records that it did not renew: the worker no longer holds them, another transaction has
	// locked them, or the store refused to change them. Records of other topics may have the same
	// ids.
	Renew(ctx context.Context, worker string, lease time.Duration, records []*Record) (lost []string, err error)
	// Settle ends the worker's claims. It skips failed records that the worker no longer holds, but
	// marks sent records regardless, because they are in the stream whoever holds them. Settle does
	// not wait for records that another transaction has locked. It returns what it could not save
	// while it saved the rest. All other changes of a call are one transaction if the store has
	// transactions, unless the store refused some of them. After an error the outcome is unknown,
	// and Settle may be repeated.
	Settle(ctx context.Context, worker string, s Settlement) (Unsettled, error)
	// RequeueExpired makes records with expired leases pending and returns their number. If the
	// store refuses some of them, it returns an error as well as the number of the others. Drainers
	// call it periodically.
	RequeueExpired(ctx context.Context) (int, error)

	// Now returns the time of the store's clock.
	Now(ctx context.Context) (time.Time, error)
	// Stats counts the records that are not sent. It reads all of them.
	Stats(ctx context.Context) (Stats, error)
	// List returns records in order of sequence.
	List(ctx context.Context, opts ListOptions) ([]*Record, error)
	// Retry makes parked records pending with no attempts, and returns their number. Without ids it
	// retries all parked records, and otherwise those with one of the ids, whatever their topics. A
	// retried record is published without a look-up in the stream.
	Retry(ctx context.Context, ids ...string) (int, error)
	// Purge deletes sent or parked records and returns their number.
	Purge(ctx context.Context, opts PurgeOptions) (int, error)

	// Listen wakes the sleeper when records may have been added. It blocks until ctx ends or
	// listening fails, and returns the error. It returns ErrCannotListen if the store cannot detect
	// new records; the drainer then only polls.
	Listen(ctx context.Context, s Sleeper) error
}

// Sleeper connects a sleeping drainer to Store.Listen.
type Sleeper struct {
	// Asleep receives a value when the drainer has fallen asleep and needs at least one wake-up. A
	// store that detects records at no cost may wake the drainer at any time.
	Asleep <-chan struct{}
	// Listening must be called when the store has begun to detect new records. The drainer then
	// claims once, because records added just before may have gone undetected.
	Listening func()
	// Wake wakes the drainer.
	Wake func()
}

// ErrCannotListen is returned by Store.Listen when the store cannot detect new records.
var ErrCannotListen = errors.New("outbox: store cannot notify of new records")

// ClaimOptions selects the records that Claim returns.
type ClaimOptions struct {
	// Worker is the name of the claiming worker. It must be unique, also across restarts. Required.
	Worker string
	// Limit is the maximum number of records, 1 to 1,000.
	Limit int
	// Lease is how long the worker holds the records.
	Lease time.Duration
	// PassErrors lets a lane continue past its parked records. Otherwise the lane waits for Retry
	// or Purge.
	PassErrors bool
	// Bytes is the maximum total size of the payloads; a single larger record is still returned. 0
	// means no limit.
	Bytes int
	// ExceptTopics lists topics to skip, at most 1,000.
	ExceptTopics []string
	// MaxPayload is the largest payload in bytes to read. A record with a larger payload is
	// returned without it; see Record.TooLarge. Defaults to the limit of the store, which also
	// applies to List.
	MaxPayload int
	// Began is a time not later than now by the NATS clock, in epoch milliseconds, and is stored as
	// Record.PublishBegan. Defaults to the time of the store.
	Began int64
}

func (o *ClaimOptions) bytes() int {
	if o.Bytes <= 0 {
		return math.MaxInt
	}
	return o.Bytes
}

// Claim is the result of Store.Claim.
type Claim struct {
	// Records belong to the caller. Records of one lane are in order.
	Records []*Record
	// Now is the store's time of the claim, in epoch milliseconds.
	Now int64
	// Began is the PublishBegan of records that were claimed for the first time. A record with a
	// different value was claimed before.
	Began int64
	// More means that another claim may find more records right now.
	More bool
	// Failed lists lanes that failed to be claimed while others succeeded.
	Failed []LaneError
	// Unsettled gives back records behind one that another worker was first to claim. The store
	// could not do so itself, because the records are locked. The caller settles them.
	Unsettled Settlement
}

// LaneError is the error of claiming or settling one lane.
type LaneError struct {
	Lane string // topic/key, or /topic/id for a record without a key
	Err  error
}

// Settlement is the outcome of claimed records.
type Settlement struct {
	Sent   []*Record
	Failed []Failure
}

// add appends the outcomes of o.
func (s *Settlement) add(o *Settlement) {
	s.Sent = append(s.Sent, o.Sent...)
	s.Failed = append(s.Failed, o.Failed...)
}

// byLane divides a settlement by the lanes of its records.
func byLane(s *Settlement) map[string]*Settlement {
	lanes := make(map[string]*Settlement)
	of := func(r *Record) *Settlement {
		lane := lanes[r.lane()]
		if lane == nil {
			lane = new(Settlement)
			lanes[r.lane()] = lane
		}
		return lane
	}
	for _, r := range s.Sent {
		lane := of(r)
		lane.Sent = append(lane.Sent, r)
	}
	for i := range s.Failed {
		lane := of(s.Failed[i].Record)
		lane.Failed = append(lane.Failed, s.Failed[i])
	}
	return lanes
}

// Unsettled is the part of a Settlement that a store did not save. The records are still claimed
// until their leases end.
type Unsettled struct {
	// Locked holds records that another transaction has locked.
	Locked Settlement
	// Refused holds the records of lanes that the store refuses to change, and Failed the errors.
	Refused Settlement
	Failed  []LaneError
}

// Failure is the outcome of a record that was not published.
type Failure struct {
	Record *Record
	// Err is the cause. If empty, the record keeps its previous LastErr.
	Err string
	// Counts makes the failure count as an attempt.
	Counts bool
	// Unsent means that the record is known not to be in the stream, neither from this attempt nor
	// from an earlier one.
	Unsent bool
	// Park parks the record. Otherwise the record is retried after Delay.
	Park  bool
	Delay time.Duration

	// rationed means that the record's client may not make the topic yet.
	rationed bool
}

// Stats counts the records of a store, without sent records.
type Stats struct {
	// Pending counts waiting records, Claimed records that drainers hold, and Errors parked
	// records.
	Pending int `json:"pending"`
	Claimed int `json:"claimed"`
	Errors  int `json:"errors"`
	// OldestAge is the time since the oldest pending or claimed record was added, or 0 if there is
	// none.
	OldestAge time.Duration `json:"oldest_age_ns"`
}

// ListOptions selects the records that List returns.
type ListOptions struct {
	// Status is the status of the records. Required.
	Status Status
	// After is a sequence; only records with a higher sequence are returned.
	After int64
	// Limit is the maximum number of records, at most 1,000. Defaults to 100.
	Limit int
}

// PurgeOptions selects the records that Purge deletes.
type PurgeOptions struct {
	// Status is Sent or Errored. Required.
	Status Status
	// OlderThan is the minimum time since a record was sent or, for a parked record, added.
	OlderThan time.Duration
	// IDs restricts the purge to records with one of these ids, and Topic to records of a topic. If
	// empty, there is no restriction. Records of several topics may have the same id.
	IDs   []string
	Topic string
	// Limit is the maximum number of records per call. Defaults to 10,000.
	Limit int
}

// Limits of stores.
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
		return errors.New("outbox: only sent or parked records can be purged")
	}
	return nil
}

func (o *ClaimOptions) validate() error {
	switch {
	case o.Worker == "":
		return errors.New("outbox: claim: worker has no name")
	case o.Limit < 1 || o.Limit > maxClaim:
		return errors.New("outbox: claim: limit must be 1 to 1000")
	case o.Lease <= 0:
		return errors.New("outbox: claim: lease must be positive")
	}
	return nil
}
