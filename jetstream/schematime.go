package jetstream

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"eventhub/jetstream/quota"
	"eventhub/jetstream/schema"
)

const (
	// comparedFree is the comparison that counts for nobody: it takes about as long as the rest of
	// a publish.
	comparedFree = 20 * time.Microsecond
	// comparedMost is the longest time that one comparison counts for, and what a client may use at
	// once.
	comparedMost = 100 * time.Millisecond
	// comparedWait is how long a publish waits for the ration of its client, and for a place.
	comparedWait = 5 * time.Second
	// comparedWaiting is how many long comparisons of one client may wait, or be made.
	comparedWaiting = 256
)

// ErrLong is returned by PublishAsync for PublishOptions.Brief: nothing was stored.
var ErrLong = errors.New("jetstream: the publish may wait, or take long to compare")

// comparing rations the time of the processor that clients have payloads compared with schemas, and
// leaves half of the processors to others: what takes longer than about 0.1 ms needs a place. A
// comparison that takes less than comparedFree costs neither a lock nor a look at the clock.
type comparing struct {
	bus    *Bus
	places *quota.Places // of those that are not quick
	time   *quota.Set    // microseconds by client
	// owing is until when some client owes time, in the clock of the bus.
	owing atomic.Int64
}

func newComparing(b *Bus) *comparing {
	all := max(runtime.GOMAXPROCS(0)/2, 1)
	return &comparing{
		bus: b, places: quota.NewPlaces(all, (all+1)/2),
		time: quota.New(float64(b.limits.CompareTime.Microseconds()), int(comparedMost.Microseconds()), b.limits.Topics, nil),
	}
}

// validate compares a payload for a client, "" for the hub itself. The error is that of a client
// that has used up its ration, or waits for too long, and ErrLong where brief is set.
func (c *comparing) validate(ctx context.Context, s *schema.Schema, payload []byte, client string, brief bool) (*schema.Violation, error) {
	counts := rationed(client)
	if wait := c.owes(client); counts && wait > 0 {
		if brief {
			return nil, ErrLong
		}
		if err := c.await(ctx, wait); err != nil {
			return nil, err
		}
	}
	broken, steps, done := s.Brief(payload, schema.QuickSteps)
	if !done && brief {
		if !c.places.TryEnter(client) {
			return nil, ErrLong
		}
		defer c.places.Leave(client)
		broken, steps, done = s.Brief(payload, schema.BriefSteps)
	}
	if took := time.Duration(steps) * schema.StepTime; counts && took > comparedFree {
		c.charge(client, took)
	}
	switch {
	case done:
		return broken, nil
	case brief:
		return nil, ErrLong
	case !counts:
		return s.Validate(payload), nil
	}
	if err := c.enter(ctx, client); err != nil {
		return nil, err
	}
	defer c.places.Leave(client)
	began, rested := time.Now(), time.Duration(0)
	broken = s.ValidateResting(payload, func() {
		rests := time.Now()
		c.places.Rest()
		rested += time.Since(rests)
	})
	c.charge(client, min(time.Since(began)-rested, comparedMost))
	return broken, nil
}

// enter waits for a place at a time at which the client owes none.
func (c *comparing) enter(ctx context.Context, client string) error {
	ctx, cancel := context.WithTimeout(ctx, comparedWait)
	defer cancel()
	for {
		if !c.places.Enter(ctx, client, comparedWaiting, func() { c.bus.obs.LimitReached("schema_places") }) {
			return &Error{Code: CodeOverloaded, Msg: "too many payloads that take long to compare with their schemas wait on this hub: nothing was stored, try again"}
		}
		wait := c.owes(client)
		if wait == 0 {
			return nil
		}
		c.places.Leave(client)
		if err := c.await(ctx, wait); err != nil {
			return err
		}
	}
}

// charge takes time from the ration of a client, which may owe it.
func (c *comparing) charge(client string, took time.Duration) {
	wait, _ := c.time.Reserve(client, max(int(took.Microseconds()), 1))
	if wait == 0 {
		return
	}
	c.bus.obs.LimitReached("schema_time")
	for until := c.bus.clock.now() + int64(wait); ; {
		before := c.owing.Load()
		if before >= until || c.owing.CompareAndSwap(before, until) {
			return
		}
	}
}

// owes returns how long a client has to wait until it owes no time.
func (c *comparing) owes(client string) time.Duration {
	if owing := c.owing.Load(); owing == 0 || owing <= c.bus.clock.now() {
		return 0
	}
	return c.time.Wait(client)
}

// await waits for a client's ration.
func (c *comparing) await(ctx context.Context, wait time.Duration) error {
	if wait <= comparedWait && c.bus.pause(ctx, wait) == nil {
		return nil
	}
	return &Error{Code: CodeRateLimited, Msg: "comparing this client's payloads with their schemas takes more time than it may: nothing was stored, slow down", Wait: wait}
}
