package schemas

import (
	"context"
	"errors"
	"math"
	"time"

	"eventhub/jetstream/cputime"
	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/schema"
	"eventhub/jetstream/schema/upcast"
)

const (
	// computedFree is the time that is not charged: about that of the rest of a publish.
	computedFree = 20 * time.Microsecond
	// comparedWait is how long a publish waits for the ration of its client, and for a place.
	comparedWait = 5 * time.Second
	// comparedWaiting is how many long comparisons of one client may wait, or be made.
	comparedWaiting = 256
	// castBrief is how many steps a cast may take without a place: about 0.1 ms.
	castBrief = int(100 * time.Microsecond / upcast.StepTime)
)

// ErrLong is returned by PublishAsync for PublishOptions.Brief: nothing was stored.
var ErrLong = errors.New("jetstream: this may wait, or take long to compute")

// computing compares payloads with schemas and casts events for clients, within their rations of
// time. Work of less than computedFree costs neither a lock nor a look at the clock.
type computing struct{ ration *cputime.Ration }

// payer returns the client whose ration is charged, or "" for clients that have none.
func payer(client string) string {
	if !conn.Rationed(client) {
		return ""
	}
	return client
}

// validate compares a payload for a client, "" for the hub itself. The error is that of a client
// that has used up its ration, or waits for too long, and ErrLong where brief is set.
func (c computing) validate(ctx context.Context, s *schema.Schema, payload []byte, client string, brief bool) (*schema.Violation, error) {
	client = payer(client)
	if c.ration.Owes(client) == 0 {
		broken, steps, done := s.Brief(payload, schema.QuickSteps)
		if !done && brief && c.ration.TryEnter(client) {
			defer c.ration.Leave(client)
			broken, steps, done = s.Brief(payload, schema.BriefSteps)
		}
		if c.charge(client, time.Duration(steps)*schema.StepTime); done {
			return broken, nil
		}
	}
	if brief {
		return nil, ErrLong
	}
	within, cancel := context.WithTimeout(ctx, comparedWait)
	defer cancel()
	switch err := c.ration.Enter(within, client, comparedWaiting); {
	case errors.Is(err, cputime.ErrOwes):
		return nil, &event.Error{Code: event.CodeRateLimited, Msg: "comparing this client's payloads with their schemas takes more time than it may: nothing was stored, slow down", Wait: max(c.ration.Owes(client), time.Second)}
	case err != nil:
		return nil, &event.Error{Code: event.CodeOverloaded, Msg: "too many payloads that take long to compare with their schemas wait on this hub: nothing was stored, try again"}
	}
	defer c.ration.Leave(client)
	began, rested := time.Now(), time.Duration(0)
	broken := s.ValidateResting(payload, func() { rested += c.ration.Rest(client) })
	c.ration.Charge(client, time.Since(began)-rested)
	return broken, nil
}

// castBriefly casts a document for a client, if that takes neither a place nor a wait. Else the
// error is ErrLong.
func (c computing) castBriefly(ctx context.Context, chain *upcast.Chain, doc []byte, from, to int, client string) ([]byte, error) {
	client = payer(client)
	if c.ration.Owes(client) > 0 {
		return nil, ErrLong
	}
	cast, steps, err := chain.CastWithin(ctx, doc, from, to, upcast.Budget{Steps: castBrief})
	c.charge(client, time.Duration(min(steps, castBrief))*upcast.StepTime)
	if steps > castBrief {
		return nil, ErrLong
	}
	return cast, err
}

// castSlowly casts what castBriefly did not. It waits as long as ctx allows for the ration of the
// client and for a place, and then returns an error of Ration.Enter.
func (c computing) castSlowly(ctx context.Context, chain *upcast.Chain, doc []byte, from, to int, client string) ([]byte, error) {
	client = payer(client)
	// No more wait than there are subscriptions and requests.
	if err := c.ration.Enter(ctx, client, math.MaxInt); err != nil {
		return nil, err
	}
	defer c.ration.Leave(client)
	ctx, cancel := begun(ctx)
	defer cancel()
	cast, steps, err := chain.CastWithin(ctx, doc, from, to, upcast.Budget{Steps: upcast.MaxWork, Rest: func() { c.ration.Rest(client) }})
	c.charge(client, time.Duration(steps)*upcast.StepTime)
	return cast, err
}

// begun returns the context of a cast that has begun. It ends when ctx is canceled, and not at the
// deadline of ctx, which is that of the wait: a cast that always began again would never end where
// the processors are busy. Its steps are bounded.
func begun(ctx context.Context) (context.Context, context.CancelFunc) {
	cast, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})
	return cast, func() {
		stop()
		cancel()
	}
}

// charge takes time from the ration of a client, if it is not too little.
func (c computing) charge(client string, took time.Duration) {
	if took > computedFree {
		c.ration.Charge(client, took)
	}
}
