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
	// Store holds the records, and Bus takes them: see JetStream.
	Store Store
	Bus   Bus
	// Worker names the drainer in what it has claimed, in 128 bytes at most; something random is put behind it, so that no two
	// are the same. Default: host name and process id.
	Worker string
	// BatchSize is the most records that it holds: 1..1,000, default 200. HeldBytes bounds their payloads, except for one
	// record that is larger: default 16 MiB.
	BatchSize int
	HeldBytes int
	// InFlight is the most publishes at a time: 1..1,000, default 64. As many lanes are worked on at a time; records of one
	// lane follow each other, each after the one before is confirmed.
	InFlight int
	// Lease is how long others wait for a drainer that died: default 30 s, 100 ms at least. While it works on records it
	// renews their leases every third of it.
	Lease time.Duration
	// Poll is how often it looks for records when none have come for a while and nobody wakes it: default 250 ms. Soon after
	// there were some it looks more often: every 10 ms at first.
	Poll time.Duration
	// MaxAttempts is how often a record is tried before it is parked: default 10. What the bus will never take (a bad topic,
	// bad options, a payload that is too large) is parked at once. While NATS is away nothing is counted.
	MaxAttempts int
	// RetryFirst is how long a record waits after its first failure, doubled each time up to
	// RetryMax, and up to a half less by chance. Defaults: 1 s and 5 min.
	RetryFirst time.Duration
	RetryMax   time.Duration
	// PassErrors lets a key go on past records of it that are parked. Default: it waits until they are retried or purged.
	PassErrors bool
	// PublishTimeout bounds a publish: default 15 s. The bus itself gives up after 10 s.
	PublishTimeout time.Duration
	// Margin is how much earlier than a topic's duplicate window says the drainer stops to rely on it, so that a publish which
	// takes long is still within it: default 30 s. A record whose publish may have begun earlier is looked up in the stream.
	Margin time.Duration
	// ClockSkew is how far clocks may be apart: default 1 min. Records are looked up from so much earlier than their publish
	// may have begun, for the servers of a NATS cluster have a clock each. When that of the store is further from that of NATS,
	// the drainer says so; it publishes all the same, as nothing depends on the store's.
	ClockSkew time.Duration
	// LookupMax bounds how many events a look-up reads the headers of: default 1,000,000.
	LookupMax int
	// Patience is how long Drain goes on while the store or the bus fails: default 30 s. A started Drainer never gives up.
	Patience time.Duration
	// StatsEvery is how often Observer.Backlog is told: default 15 s.
	StatsEvery time.Duration
	// Observer is told what happens. Default: nobody.
	Observer Observer
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
}

// maxWorker bounds the name that a drainer is given, in bytes.
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
		host = host[:min(len(host), maxWorker-24)] // room for the number
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
