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

// Projection derives a state for each key from the events of a topic. Run keeps the states up to
// date.
//
// Each event of a key is applied once, in stream order, even if processes are killed at any point.
// A write replaces exactly the state that the writer knew (compare-and-set), and each state records
// the Position of its last event. A writer that loses the race reads the new state and sees whether
// its event is already included. Any number of instances may therefore run the same projection: the
// group distributes events among them, and conflicting writes are detected.
type Projection struct {
	// Name identifies the states: 1 to 100 characters of a-z, 0-9, _ and -. Defaults to Group.
	Name string
	// Topic is the source of the events. Group is the group that consumes it. Required.
	Topic, Group string
	// From is the position at which a new group starts. Defaults to jetstream.FromLatest, the end
	// of the topic.
	From jetstream.Position
	// Snapshot is a topic with snapshots of Topic; see Compactor. A projection whose group does not
	// exist yet starts with the snapshots instead of From: Apply receives each snapshot as if it
	// were its source event, and then the events after the snapshots. Optional.
	Snapshot string
	// Key returns the key of an event, or "" to skip the event. It must depend on nothing but the
	// event. Defaults to the event's own key.
	//
	// A custom Key costs parallelism: events of a key are not found by key, so all events are
	// applied one after another. If Key returns an error, the event goes to the dead letters. If
	// Key panics, the event goes there after Attempts attempts.
	Key func(*jetstream.Event) (string, error)
	// Apply returns the state that follows from an event, or nil to remove the key. state is nil if
	// the key has no state. Apply may be called again for the same event when another instance
	// wrote first, so it should have no side effects. It may be called concurrently for different
	// keys. Required.
	//
	// An error is retried up to Attempts attempts, while later events of the key wait. After that,
	// or at once for a Permanent error, the event goes to the dead letters (dlq.<topic>) and the
	// state stays unchanged. A panic counts as an error: the stack is logged, and the dead letter
	// names only the function that panicked.
	Apply func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error)
	// DropNewKeys drops events of new keys, instead of sending them to the dead letters, while the
	// topic of the states has as many keys as its rule allows (topics.Rule.MaxKeys). The
	// events are counted as Dropped, and the log names one of them a minute. It is for events that
	// repeat, such as heartbeats, if many may publish them: dead letters would take room from
	// others. Keys that exist are not affected either way.
	DropNewKeys bool
	// Attempts is the maximum number of calls of Apply for an event. Defaults to 5.
	Attempts int
	// InFlight is the maximum number of events, and so of keys in progress, of one instance, 1 to
	// 10,000. Defaults to 256.
	InFlight int
	// CacheKeys ("projection_cache_keys") and CacheBytes ("projection_cache_bytes") limit the
	// states cached in memory, keys included. Other states are read when they are needed, which is
	// slower but has no other effect. Default to 100,000 keys and 64 MiB.
	CacheKeys  int
	CacheBytes int
	// Store opens the store for the states of a version. version starts at 1, and each rebuild
	// increments it. Defaults to OpenStates with bucket StatesBucket(Name, version).
	Store func(ctx context.Context, version int) (Store, error)
	// Observer receives metrics. Optional.
	Observer Observer
	// Tracer makes spans of the processing of events. Optional.
	Tracer Tracer
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger

	// grace is rebuildGrace, except in tests.
	grace time.Duration
}

// Observer receives metrics of projections. Its methods may be called concurrently and must not
// block. A panic is logged and otherwise ignored.
type Observer interface {
	// Projected counts a processed event.
	Projected(projection string, outcome Outcome)
	// LimitReached counts work that was slower because of the named limit.
	LimitReached(limit string)
}

// Tracer makes spans of the processing of events, for distributed tracing. Its method may be
// called concurrently and must not block, change the event, or keep it.
type Tracer interface {
	// Apply begins the span of an event that is applied. It returns the context for what follows,
	// and a function that ends the span. The error given to that function says that the event was
	// neither applied nor sent to the dead letters.
	Apply(ctx context.Context, projection string, e *jetstream.Event) (context.Context, func(error))
}

// Outcome is the result of processing an event.
type Outcome = string

// The outcomes.
const (
	Applied Outcome = "applied"
	// already in its state: redelivered, or applied by another instance
	Known    Outcome = "known"
	Poisoned Outcome = "poisoned" // sent to the dead letters
	Dropped  Outcome = "dropped"  // see Projection.DropNewKeys
)

type nobody struct{}

func (nobody) Projected(string, Outcome) {}
func (nobody) LimitReached(string)       {}

const (
	// Temporary failures are retried after retryFirst; the delay doubles with each further failure,
	// up to retryMax.
	retryFirst = 50 * time.Millisecond
	retryMax   = 5 * time.Second
	// stopTimeout is the timeout for returning leases when a projection stops.
	stopTimeout = 5 * time.Second
	// leaseTime is the maximum time for handling an event. A projection that hangs keeps its events
	// for this long. The events of a dead hub are redelivered sooner, after the server's AckWait.
	leaseTime = 12 * time.Hour
	// parkTime is the redelivery delay of events that wait behind an event whose Apply fails.
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
		errs = append(errs, fmt.Errorf("name %q: must be 1 to 100 characters of a-z, 0-9, _ and -", p.Name))
	}
	if err := jetstream.ValidTopic(p.Topic); err != nil {
		errs = append(errs, err)
	}
	if err := jetstream.ValidGroup(p.Group); err != nil {
		errs = append(errs, err)
	} else if err := jetstream.ValidGroup(p.groupOf(maxVersion)); err != nil {
		errs = append(errs, fmt.Errorf("group with a version suffix: %w", err))
	}
	if p.Apply == nil {
		errs = append(errs, errors.New("field Apply is missing"))
	}
	for _, n := range []int{p.Attempts, p.InFlight, p.CacheKeys, p.CacheBytes} {
		if n < 0 {
			errs = append(errs, fmt.Errorf("limits must be positive; got %d", n))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("projection %q: %w", p.Name, err)
	}
	return nil
}

// permanent marks an error that recurs at every attempt.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Permanent wraps an error of Apply that would recur at every attempt. The event goes to the dead
// letters at once.
func Permanent(err error) error { return permanent{err} }

// Run keeps the projection up to date until ctx ends, then returns its leases and returns nil.
// Failures of the bus are logged and retried. Run returns an error only if the configuration is
// invalid or the bus is closed.
func Run(ctx context.Context, bus Bus, p Projection) error {
	if err := p.validate(); err != nil {
		return err
	}
	return newVersions(bus, &p).run(ctx)
}

// isRefused reports whether the bus would reject the same request every time.
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

// insist calls f until it succeeds, fails permanently, or ctx ends.
func insist(ctx context.Context, log *slog.Logger, what string, f func(context.Context) error) error {
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		err := f(ctx)
		if err == nil || isRefused(err) || errors.Is(err, jetstream.ErrClosed) || ctx.Err() != nil {
			return err
		}
		log.LogAttrs(ctx, slog.LevelWarn, "projection operation failed; retrying", slog.String("what", what), slog.Any("error", err))
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

// pause waits for d. It returns the error of ctx if ctx ends first.
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
