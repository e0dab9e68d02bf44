package outbox

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Config configures a Drainer. Only Store and Bus are required.
type Config struct {
	// Store holds the records. Bus publishes them; JetStream returns one.
	Store Store
	Bus   Bus
	// Worker is the name under which the drainer claims records, at most 128 bytes. The drainer
	// appends a random suffix, so that every drainer has a unique name. Defaults to the host name
	// and process id.
	Worker string
	// BatchSize is the maximum number of records the drainer holds, 1 to 1,000. Defaults to 200.
	// HeldBytes is the maximum total size of their payloads; a single larger record is still held.
	// Defaults to 16 MiB. While topics do not answer, the drainer may hold a quarter more of both.
	BatchSize int
	HeldBytes int
	// InFlight is the maximum number of concurrent publishes, 1 to 1,000. Each publish belongs to a
	// different lane, because a record is published only after the record before it in its lane was
	// confirmed. A topic uses at most three quarters of what other topics leave. Defaults to 64.
	InFlight int
	// Lease is how long the records of a dead drainer stay unavailable to other drainers. A live
	// drainer renews its leases every third of Lease. At least 100 ms. Defaults to 30 seconds.
	Lease time.Duration
	// Poll is the maximum interval between claims while the store is empty and nothing wakes the
	// drainer. After recent work, the drainer polls more often, starting at 10 ms. Defaults to
	// 250 ms.
	Poll time.Duration
	// MaxAttempts is the number of failed attempts after which a record is parked. A record that
	// the bus can never accept (bad topic, bad options, payload too large) is parked at once.
	// Failures while NATS is unavailable do not count. Defaults to 10.
	MaxAttempts int
	// RetryFirst is the delay after the first failure of a record. The delay doubles with each
	// further failure, up to RetryMax, and jitter shortens it by up to half. Defaults to 1 second
	// and 5 minutes.
	RetryFirst time.Duration
	RetryMax   time.Duration
	// PassErrors lets a lane continue past its parked records. By default, the lane waits until
	// they are retried or purged.
	PassErrors bool
	// PublishTimeout bounds one publish. The bus itself gives up after 10 seconds. Defaults to
	// 15 seconds.
	PublishTimeout time.Duration
	// Margin is subtracted from a topic's duplicate window, so that a slow publish still falls
	// inside the window. A record whose first publish may have begun before the shortened window is
	// looked up in the stream. Defaults to 30 seconds.
	Margin time.Duration
	// ClockSkew is the tolerated difference between clocks. The servers of a NATS cluster have
	// separate clocks, so a look-up starts this much before the first publish may have begun. The
	// drainer logs a warning when the store's clock and the NATS clock differ by more; it keeps
	// publishing, because nothing depends on the store's clock. Defaults to 1 minute.
	ClockSkew time.Duration
	// LookupMax is the maximum number of events whose headers one look-up reads. Defaults to
	// 1,000,000.
	LookupMax int
	// Patience is how long Drain continues while the store or the bus fails. A Drainer that runs by
	// Start never gives up. Defaults to 30 seconds.
	Patience time.Duration
	// StatsEvery is the interval between calls of Observer.Backlog. Defaults to 15 seconds.
	StatsEvery time.Duration
	// Observer receives metrics. Optional.
	Observer Observer
	// Tracer makes spans of attempts to publish a record. Optional.
	Tracer Tracer
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger
}

// maxWorker is the maximum length of Config.Worker in bytes.
const maxWorker = 128

func (c *Config) validate() error {
	ints := []struct {
		name      string
		v         *int
		def, most int
	}{
		{"batch size", &c.BatchSize, 200, maxClaim},
		{"held bytes", &c.HeldBytes, 16 << 20, 1 << 40},
		{"in flight", &c.InFlight, 64, 1_000},
		{"max attempts", &c.MaxAttempts, 10, 1_000_000},
		{"lookup most", &c.LookupMax, 1_000_000, 1 << 40},
	}
	times := []struct {
		name             string
		v                *time.Duration
		def, least, most time.Duration
	}{
		{"lease", &c.Lease, 30 * time.Second, 100 * time.Millisecond, 24 * time.Hour},
		{"poll", &c.Poll, 250 * time.Millisecond, time.Millisecond, time.Hour},
		{"retry first", &c.RetryFirst, time.Second, time.Millisecond, 24 * time.Hour},
		{"retry most", &c.RetryMax, 5 * time.Minute, time.Millisecond, 24 * time.Hour},
		{"publish timeout", &c.PublishTimeout, 15 * time.Second, 10 * time.Millisecond, time.Hour},
		{"margin", &c.Margin, 30 * time.Second, 0, time.Hour},
		{"clock skew", &c.ClockSkew, time.Minute, 0, 24 * time.Hour},
		{"patience", &c.Patience, 30 * time.Second, time.Millisecond, 24 * time.Hour},
		{"stats every", &c.StatsEvery, 15 * time.Second, 10 * time.Millisecond, time.Hour},
	}
	var errs []error
	if c.Store == nil {
		errs = append(errs, errors.New("Store is missing"))
	}
	if c.Bus == nil {
		errs = append(errs, errors.New("Bus is missing"))
	}
	for _, n := range ints {
		if *n.v == 0 {
			*n.v = n.def
		}
		if *n.v < 1 || *n.v > n.most {
			errs = append(errs, fmt.Errorf("%s %d: 1 to %d are allowed", n.name, *n.v, n.most))
		}
	}
	for _, d := range times {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < d.least || *d.v > d.most {
			errs = append(errs, fmt.Errorf("%s %v: %v to %v are allowed", d.name, *d.v, d.least, d.most))
		}
	}
	if c.Worker == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "drainer"
		}
		host = host[:min(len(host), maxWorker-24)] // leaves room for the process id
		c.Worker = host + "-" + strconv.Itoa(os.Getpid())
	}
	if len(c.Worker) > maxWorker || !utf8.ValidString(c.Worker) {
		errs = append(errs, fmt.Errorf("worker name of %d bytes: at most %d, in UTF-8, are allowed", len(c.Worker), maxWorker))
	}
	c.Worker += "-" + uuid.NewString()[:8]
	if c.Observer == nil {
		c.Observer = nobody{}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return errors.Join(errs...)
}
