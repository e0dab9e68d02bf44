package projections

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"eventhub/jetstream"
)

// Projection derives a state for each key from the events of a topic. Run keeps it up to date.
//
// Each event of a key is applied once, in the order of the stream, whatever is killed when: a state
// replaces exactly the one that its writer knew (compare-and-set), and names the event that it
// follows from (its Position). Who comes second reads what is there, and sees whether its event is
// in it. So any number of instances may run the same projection: the group deals events out to
// them, and no two write the same state.
type Projection struct {
	// Name names the states. Default: Group. 1..100 of a-z, 0-9, _ and -.
	Name string
	// Topic is where the events come from, Group what holds the position in it. Required.
	Topic, Group string
	// From is where the group starts when it is new. Default: jetstream.FromLatest, the end of the
	// topic.
	From jetstream.Position
	// Snapshot, if not "", is a topic of snapshots of Topic (see Compactor) that a projection begins with which has no
	// group yet, instead of From: Apply is called with each snapshot as if it were the event it was made from, then with
	// the events after it.
	Snapshot string
	// Key gives the key of an event; "" passes over it. Default: the event's own key.
	//
	// A Key of the projection's own costs parallelism: the events of a key lie anywhere then, so all events are applied one
	// after the other. An event whose Key is an error goes to the dead letters; one at which Key panics does so after
	// Attempts tries. It must depend on nothing but the event.
	Key func(*jetstream.Event) (string, error)
	// Apply returns the state that follows from an event; nil removes the key. state is nil when there is none. It may be
	// called again for an event whose outcome was lost to another instance, so it should have no effect of its own.
	// It may be called concurrently for different keys.
	//
	// An error is tried again, Attempts times in all; later events of the key wait. Then, or at once when it is Permanent,
	// the event goes to the dead letters (dlq.<topic>, as any group's), and the state stays as it is. A panic counts as an
	// error: the log has its stack, the dead letter only says which function panicked. Required.
	Apply func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error)
	// Attempts is how often Apply is tried on an event: default 5.
	Attempts int
	// InFlight is the most events that one instance holds: 1..10,000, default 256. As many keys are worked on at a time.
	InFlight int
	// CacheKeys ("projection_cache_keys") and CacheBytes ("projection_cache_bytes") bound the states that are kept in
	// memory: default 100,000 and 64 MiB, keys included. The states of other keys are read when they are needed: slower,
	// and otherwise the same.
	CacheKeys  int
	CacheBytes int
	// Store opens where the states of a version are kept; version counts rebuilds, from 1. Default: OpenStates, in the
	// bucket StatesBucket(Name, version).
	Store func(ctx context.Context, version int) (Store, error)
	// Observer is told what happens. Default: nobody.
	Observer Observer
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
}

// Observer is told what projections do. Its methods may be called concurrently and must not block. A panic is logged and
// changes nothing.
type Observer interface {
	// Projected counts an event that was dealt with.
	Projected(projection string, outcome Outcome)
	// LimitReached counts what was slower because of the named limit.
	LimitReached(limit string)
}

// Outcome is what became of an event.
type Outcome = string

// The outcomes.
const (
	Applied  Outcome = "applied"
	Known    Outcome = "known"    // its state was there already: it came again, or another instance was first
	Poisoned Outcome = "poisoned" // it went to the dead letters
)

type nobody struct{}

func (nobody) Projected(string, Outcome) {}
func (nobody) LimitReached(string)       {}

const (
	// Failures that may pass are tried again after retryFirst, doubled each time up to retryMax.
	retryFirst = 50 * time.Millisecond
	retryMax   = 5 * time.Second
	// stopTimeout bounds the handing back of leases at the end.
	stopTimeout = 5 * time.Second
	// leaseTime is how long an event may take. A projection that stands still keeps its events for so long; those of a hub
	// that died come again after the server's AckWait.
	leaseTime = 12 * time.Hour
	// parkTime is when events come again that waited behind one whose Apply fails.
	parkTime = time.Second
)

var projectionName = regexp.MustCompile(`^[a-z0-9_-]{1,100}$`)

func (p *Projection) validate() error {
	if p.Name == "" {
		p.Name = p.Group
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&p.Attempts, 5)
	def(&p.InFlight, 256)
	def(&p.CacheKeys, 100_000)
	def(&p.CacheBytes, 64<<20)
	if p.Logger == nil {
		p.Logger = slog.New(slog.DiscardHandler)
	}
	p.Observer = guardObserver(p.Observer, p.Logger)
	var errs []error
	if !projectionName.MatchString(p.Name) {
		errs = append(errs, fmt.Errorf("name %q: 1 to 100 of a-z, 0-9, _ and - are allowed", p.Name))
	}
	if err := jetstream.ValidTopic(p.Topic); err != nil {
		errs = append(errs, err)
	}
	if err := jetstream.ValidGroup(p.Group); err != nil {
		errs = append(errs, err)
	} else if err := jetstream.ValidGroup(p.groupOf(maxVersion)); err != nil {
		errs = append(errs, fmt.Errorf("with the number of a version behind it: %w", err))
	}
	if p.Apply == nil {
		errs = append(errs, errors.New("function Apply is missing"))
	}
	for _, n := range []int{p.Attempts, p.InFlight, p.CacheKeys, p.CacheBytes} {
		if n < 0 {
			errs = append(errs, fmt.Errorf("limits must be positive, one is %d", n))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("projection %q: %w", p.Name, err)
	}
	return nil
}

// permanent marks an error that no other attempt will cure.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Permanent wraps an error of Apply that no other attempt will cure: the event goes to the dead letters at once.
func Permanent(err error) error { return permanent{err} }

// Run keeps the projection up to date until ctx ends, and then returns nil with its leases handed back. Failures of the bus
// are logged and tried again; an error is returned when the configuration is wrong or the bus is closed.
func Run(ctx context.Context, bus Bus, p Projection) error {
	if err := p.validate(); err != nil {
		return err
	}
	return newVersions(bus, &p).run(ctx)
}

// isRefused reports whether the bus will never take what it was given.
func isRefused(err error) bool {
	refused, ok := errors.AsType[*jetstream.Error](err)
	if !ok {
		return false
	}
	switch refused.Code {
	case jetstream.CodeBadOptions, jetstream.CodeBadTopic, jetstream.CodeBadGroup, jetstream.CodeUnknownID:
		return true
	}
	return errors.Is(err, jetstream.ErrTooLarge)
}

// insist tries f until it succeeds, fails for good, or ctx ends.
func insist(ctx context.Context, log *slog.Logger, what string, f func(context.Context) error) error {
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		err := f(ctx)
		if err == nil || isRefused(err) || errors.Is(err, jetstream.ErrClosed) || ctx.Err() != nil {
			return err
		}
		log.LogAttrs(ctx, slog.LevelWarn, "a projection failed at something and tries again", slog.String("what", what), slog.Any("error", err))
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

// pause waits, or returns the error of ctx.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
