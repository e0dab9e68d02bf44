// Package cputime rations the time of the processor that clients have spent on their behalf.
package cputime

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"eventhub/jetstream/quota"
)

const (
	// Burst is the time that a client may use at once.
	Burst = 100 * time.Millisecond
	// most is the most that Charge takes: a process may stand still.
	most = 4 * Burst
)

// Names of the limits of a Ration, as it reports them.
const (
	LimitTime   = "schema_time"
	LimitPlaces = "schema_places"
)

// Ration rations the time of the processors by client, and has places for what takes long: half of
// the processors, and half of the places for one client. Clients are charged afterwards, and may
// owe time. The client "" is the program itself, which is not charged and needs no place; nor does
// anybody with a nil Ration. Its methods may be called concurrently.
type Ration struct {
	places  *quota.Places
	time    *quota.Set // microseconds by client
	reached func(limit string)
	began   time.Time
	// owing is until when some client owes time, in nanoseconds since began.
	owing atomic.Int64
}

// New makes a Ration of so much time in each second for each client, above 0, on so many
// processors. Clients beyond so many share one ration. reached is called with the name of a limit
// that makes a client wait, and must not block.
func New(perSecond time.Duration, processors, clients int, reached func(limit string)) *Ration {
	all := max(processors/2, 1)
	return &Ration{
		places: quota.NewPlaces(all, (all+1)/2), reached: reached, began: time.Now(),
		time: quota.New(float64(perSecond.Microseconds()), int(Burst.Microseconds()), clients, nil),
	}
}

func (r *Ration) counts(client string) bool { return r != nil && client != "" }

// Charge takes time from the ration of a client.
func (r *Ration) Charge(client string, took time.Duration) {
	if !r.counts(client) {
		return
	}
	wait := r.time.Spend(client, max(int(min(took, most).Microseconds()), 1))
	if wait == 0 {
		return
	}
	r.reached(LimitTime)
	for until := int64(time.Since(r.began) + wait); ; {
		before := r.owing.Load()
		if before >= until || r.owing.CompareAndSwap(before, until) {
			return
		}
	}
}

// Owes returns how long a client has to wait until it owes no time. It costs no lock while no
// client owes any.
func (r *Ration) Owes(client string) time.Duration {
	if !r.counts(client) {
		return 0
	}
	if owing := r.owing.Load(); owing == 0 || owing <= int64(time.Since(r.began)) {
		return 0
	}
	return r.time.Wait(client)
}

// Await waits until a client owes no time, or returns the error of ctx. All who wait at a time go
// on at a time: callers are few, or use Enter.
func (r *Ration) Await(ctx context.Context, client string) error {
	for {
		wait := r.Owes(client)
		if wait == 0 {
			return nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

// TryEnter takes a place for a client if there is one at once. The caller calls Leave.
func (r *Ration) TryEnter(client string) bool {
	return !r.counts(client) || r.places.TryEnter(client)
}

// Errors of Enter.
var (
	// ErrOwes says that the client owes time, or that others of its calls are before this one.
	ErrOwes = errors.New("cputime: the client has used up its time")
	// ErrPlaces says that others have the places, or that too many calls for the client wait.
	ErrPlaces = errors.New("cputime: no place is free")
)

// Enter waits for a place at a time at which the client owes none, one call for a client after the
// other. It returns ErrPlaces when so many calls for the client have a place or wait for one
// already, and ErrOwes or ErrPlaces when ctx ends. Without an error, the caller calls Leave.
func (r *Ration) Enter(ctx context.Context, client string, limit int) error {
	if !r.counts(client) {
		return nil
	}
	paid := false
	ready := func() bool {
		paid = r.Await(ctx, client) == nil
		return paid
	}
	switch {
	case r.places.EnterWhen(ctx, client, limit, ready, func() { r.reached(LimitPlaces) }):
		return nil
	case !paid && ctx.Err() != nil:
		return ErrOwes
	}
	return ErrPlaces
}

// Rest lets others have the place for a moment. It returns how long that was.
func (r *Ration) Rest(client string) time.Duration {
	if !r.counts(client) {
		return 0
	}
	began := time.Now()
	r.places.Rest()
	return time.Since(began)
}

// Leave gives a place back.
func (r *Ration) Leave(client string) {
	if r.counts(client) {
		r.places.Leave(client)
	}
}
