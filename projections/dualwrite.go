package projections

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// DualWriteGroup is the group in which each DualWrite reads its topic. To join it, clients need the
// right to administer the topic.
const DualWriteGroup = "eventhub-mirrors"

const (
	// copyAttempts is the attempt whose failure sends an event to the dead letters.
	copyAttempts = 5
	// defaultCopies is DualWriteConfig.InFlight unless it is given.
	defaultCopies = 512
	// maxCopies is the most that DualWriteConfig.InFlight may be.
	maxCopies = 10_000
	// sayEvery is how often the log says at most that a DualWrite waits.
	sayEvery = time.Minute
)

// DualWriteConfig configures a DualWrite.
type DualWriteConfig struct {
	// Bus has the topic and its copies. Required.
	Bus Bus
	// Topic is the topic to copy. Required.
	Topic string
	// Versions are the versions of the topic's schema that get a copy each, from 1 on: 1 to
	// topics.MaxMirrors numbers. Required.
	Versions []int
	// InFlight is the maximum number of events that this instance copies at a time, 1 to 10,000.
	// Defaults to 512.
	InFlight int
	// Observer receives metrics, under the name DualWriteGroup: one outcome for each event and
	// version. Known is a copy that was there already, and Poisoned one that could not be made.
	// Optional.
	Observer Observer
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger
}

// DualWrite keeps a copy of a topic for each of some versions of its schema. The copy in version N
// is the topic topics.Mirror(topic, N). It is for consumers that cannot ask the hub for a
// version, such as native NATS clients.
//
// Each event is copied once, with its key, ts, sid, tags, headers and tombstone; the payload is
// cast, and the header x-schema-version says N. Copies of a key are in the order of the topic. The
// id of a copy is a hash of the event's place and the version. An event without a key is in no
// order, and copied once as well.
//
// An event that a version cannot be made of is retried up to 5 attempts, while later events of its
// key wait, and then goes to the dead letters as it was stored. Its other copies are made all the
// same. Such errors are those of casts, of the schema and the limits of a copy's topic. All other
// failures, such as those of NATS, are logged and retried, and cost no attempt.
//
// Any number of instances may run at the same time: they share the events of the group
// DualWriteGroup, which begins with the oldest event of the topic. A version that is added later
// gets the events from then on.
type DualWrite struct {
	cfg    DualWriteConfig
	wrong  error // the configuration error, if any
	copies []*versionCopy
}

// NewDualWrite returns a DualWrite that does nothing until Run, which reports an invalid
// configuration.
func NewDualWrite(cfg DualWriteConfig) *DualWrite {
	if cfg.InFlight == 0 {
		cfg.InFlight = defaultCopies
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Observer = guardObserver(cfg.Observer, cfg.Logger)
	w := &DualWrite{cfg: cfg}
	if err := cfg.validate(); err != nil {
		w.wrong = fmt.Errorf("copies of %s in other versions: %w", cfg.Topic, err)
		return w
	}
	for _, version := range cfg.Versions {
		w.copies = append(w.copies, newVersionCopy(&w.cfg, version))
	}
	return w
}

func (c *DualWriteConfig) validate() error {
	var errs []error
	if c.Bus == nil {
		errs = append(errs, errors.New("field Bus is missing"))
	}
	if err := jetstream.ValidTopic(c.Topic); err != nil {
		errs = append(errs, err)
	}
	if n := len(c.Versions); n < 1 || n > topics.MaxMirrors {
		errs = append(errs, fmt.Errorf("%d versions; 1 to %d are allowed", n, topics.MaxMirrors))
	}
	for i, version := range c.Versions {
		if version < 1 || version > topics.MaxSchemaVersions {
			errs = append(errs, fmt.Errorf("version %d: 1 to %d are allowed", version, topics.MaxSchemaVersions))
		}
		if slices.Contains(c.Versions[:i], version) {
			errs = append(errs, fmt.Errorf("version %d is given twice", version))
		}
	}
	if c.InFlight < 1 || c.InFlight > maxCopies {
		errs = append(errs, fmt.Errorf("in flight %d: 1 to %d are allowed", c.InFlight, maxCopies))
	}
	return errors.Join(errs...)
}

// Run copies events until ctx ends, then returns its leases, and returns nil when no event is being
// copied any more. It waits for versions that are not registered yet. Run returns an error only if
// the configuration is invalid or the bus is closed. It may be called only once.
func (w *DualWrite) Run(ctx context.Context) error {
	if w.wrong != nil {
		return w.wrong
	}
	err := w.run(ctx)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end of ctx is a normal stop
	}
	return fmt.Errorf("copies of %s in other versions: %w", w.cfg.Topic, err)
}

func (w *DualWrite) run(ctx context.Context) error {
	if err := w.openViews(ctx); err != nil {
		return err
	}
	var sub Subscription
	err := insist(ctx, w.cfg.Logger, "join the group of copies in other versions", func(ctx context.Context) (err error) {
		sub, err = w.cfg.Bus.Consume(ctx, w.cfg.Topic, DualWriteGroup, jetstream.SubscribeOptions{
			From: jetstream.FromEarliest, OrderByKey: true, Workers: w.cfg.InFlight,
			MaxInFlight: w.cfg.InFlight, BatchSize: w.cfg.InFlight, AckTimeout: leaseTime, MaxAttempts: copyAttempts,
		}, w.copy)
		return err
	})
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-sub.Done():
		err = jetstream.ErrClosed
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := sub.Stop(stop); err != nil && !errors.Is(err, jetstream.ErrClosed) {
		w.cfg.Logger.LogAttrs(stop, slog.LevelWarn, "failed to return the leases of copies in other versions", slog.String("topic", w.cfg.Topic), slog.Any("error", err))
	}
	return err
}

// openViews waits until all versions are registered.
func (w *DualWrite) openViews(ctx context.Context) error {
	var said time.Time
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		err := w.findViews(ctx)
		if err == nil || ctx.Err() != nil || errors.Is(err, jetstream.ErrClosed) {
			return err
		}
		if time.Since(said) >= sayEvery {
			said = time.Now()
			w.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "cannot copy a topic in other versions yet; retrying", slog.String("topic", w.cfg.Topic), slog.Any("error", err))
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

func (w *DualWrite) findViews(ctx context.Context) error {
	for _, c := range w.copies {
		view, err := w.cfg.Bus.SchemaView(ctx, w.cfg.Topic, c.version)
		if err != nil {
			return err
		}
		c.view = view
	}
	return nil
}

// copy copies an event in all versions. It refuses the event if a copy cannot be made. An error
// says that the subscription, the lease or the bus has ended.
func (w *DualWrite) copy(ctx context.Context, d *jetstream.Delivery) error {
	again := d.Redelivered || d.Attempt > 1
	var faults []string
	for _, c := range w.copies {
		outcome, err := c.write(ctx, &d.Event, again)
		switch {
		case err == nil:
			w.cfg.Observer.Projected(DualWriteGroup, outcome)
			continue
		case !hopeless(err):
			return err
		}
		faults = append(faults, c.topic+": "+reasonOf(err))
		if d.Attempt >= copyAttempts {
			w.cfg.Observer.Projected(DualWriteGroup, Poisoned)
		}
		w.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to copy an event in another version", slog.String("topic", c.topic),
			slog.String("id", d.Event.ID), slog.Int("attempt", d.Attempt), slog.Any("error", err))
	}
	if faults != nil {
		// An expired lease leads to a redelivery too. The hub may hear of a version meanwhile.
		_ = d.Nack(strings.Join(faults, "; "), parkTime)
	}
	return nil
}

// hopeless reports whether the copy of an event fails again, however healthy NATS is.
func hopeless(err error) bool {
	e, ok := errors.AsType[*jetstream.Error](err)
	return isRefused(err) || errors.Is(err, jetstream.ErrMaxKeys) || ok && e.Code == schemas.CodeInvalid
}

// reasonOf returns what clients may read of an error.
func reasonOf(err error) string {
	if e, ok := errors.AsType[*jetstream.Error](err); ok {
		return e.Msg
	}
	return "the copy was refused"
}
