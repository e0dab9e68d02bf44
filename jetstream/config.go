package jetstream

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"
)

// Sizes that the bus is built around.
const (
	embeddedMaxPayload = 4 << 20  // what the embedded server takes in one message
	payloadMargin      = 64 << 10 // what headers, and the wrapping of a dead letter, may add to a payload
	defaultMaxPayload  = 1 << 20
)

// Config configures a Bus. The zero value runs an embedded server in ./eventhub-data.
type Config struct {
	// URL is the NATS server, or several separated by commas. Empty: an embedded server runs in this process.
	URL string
	// Creds is the path of a credentials file, NKeySeed that of an nkey seed file; for URL only.
	Creds    string
	NKeySeed string
	// TLSCA, TLSCert and TLSKey are paths of PEM files; for URL only.
	TLSCA   string
	TLSCert string
	TLSKey  string
	// Domain is the JetStream domain; for URL only.
	Domain string
	// DataDir is where the embedded server keeps its streams. Default ./eventhub-data. One hub at a time may use it.
	DataDir string
	// Listen, when not empty, is the host:port where the embedded server also accepts native NATS clients, with
	// ListenToken as their token (which must then be set).
	Listen      string
	ListenToken string
	// SyncInterval is how often the embedded server flushes to disk; default 1 s. SyncAlways flushes before each ack
	// instead, and costs a factor of 25 or more.
	SyncInterval time.Duration
	SyncAlways   bool
	// Replicas is the number of copies of each new stream: 1..5, default 1. More than 1 needs a cluster.
	Replicas int
	// MemoryStorage keeps new streams in memory: they do not survive a restart of the server.
	MemoryStorage bool
	// AckWait is the net under a hub that died: the server gives a dead hub's events to others after it. 1 s..1 h,
	// default 30 s. A group keeps the AckWait that it was made with.
	AckWait time.Duration
	// Connections is the size of the pool of NATS connections: 1..64, default 2.
	Connections int
	// Topics are rules for new topics, the first match wins; after them come the built-in ones: dlq.** is one stream that
	// keeps 30 days and remembers ids for 24 h, heartbeat.received keeps 3 days, all others 7.
	Topics []TopicRule
	// Limits bound what the bus holds; zero fields take their defaults.
	Limits Limits
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
	// Observer is told what happens. Default: nobody.
	Observer Observer
}

// TopicRule says how the streams of matching topics are made.
type TopicRule struct {
	// Pattern is a topic, or a pattern in which * is one segment and ** at the end any number (none included).
	Pattern string
	// Family puts all matching topics into one stream of this name; empty: a stream for each topic.
	Family string
	// MaxAge, MaxBytes and MaxMsgs bound the stream; 0 means no bound. What is over goes, oldest first.
	MaxAge   time.Duration
	MaxBytes int64
	MaxMsgs  int64
	// DuplicateWindow is how long an id is remembered. Default 2 min.
	DuplicateWindow time.Duration
}

// Limits bound what a bus holds. Zero fields take the default. Reaching one is counted by Observer.LimitReached under
// the name given here.
type Limits struct {
	// Topics ("topics") is the most streams of topics this hub knows: default 10,000. Beyond it, topics that are new to
	// it get overloaded.
	Topics int
	// TopicsPerClient ("topics_per_client") is the most topics that one client may bring into being, with all Publishers
	// that count for it (Publisher.CountFor) and the subscriptions made Via them: default 100 at once, and then one every
	// 10 s. Beyond it, new topics get rate_limited.
	TopicsPerClient int
	// Subscriptions ("subscriptions") is the most subscriptions open on this hub: default 100,000. Beyond it, new ones
	// get overloaded.
	Subscriptions int
	// PublishInFlight ("publish_in_flight") is the most unconfirmed publishes to one stream: default 16,384 (the server
	// drops silently above about 100,000, from all hubs together). Publishers wait at it.
	PublishInFlight int
	// SessionInFlight ("session_in_flight") is the most unconfirmed publishes of one Publisher: default 4,096.
	// The Publisher waits at it.
	SessionInFlight int
	// HeldBytes ("held_bytes") is how many bytes of fetched events, headers included, that were not yet handed out one subscription
	// holds before it stops fetching: default 8 MiB. What one pull brings may go beyond it once.
	HeldBytes int
	// HeldTotal ("held_total") is how many such bytes all subscriptions of the hub hold together before those that hold
	// some stop fetching: default 128 MiB. Each pull brings no more than a subscription's share of it, or one event.
	HeldTotal int
	// DeadLetters ("dead_letters") is the most events on their way to a dlq topic: default 10,000. Beyond it, a
	// failed event is delivered once more instead.
	DeadLetters int
	// MaxPayload is the largest payload in bytes: default 1 MiB, less if the server's max_payload demands it.
	MaxPayload int
}

// prepare checks the configuration and fills in the defaults.
func (c *Config) prepare() error {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if c.DataDir == "" {
		c.DataDir = "eventhub-data"
	}
	if c.SyncInterval == 0 {
		c.SyncInterval = time.Second
	}
	if c.AckWait == 0 {
		c.AckWait = 30 * time.Second
	}
	def(&c.Replicas, 1)
	def(&c.Connections, 2)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Observer == nil {
		c.Observer = nopObserver{}
	}
	l := &c.Limits
	def(&l.Topics, 10_000)
	def(&l.TopicsPerClient, 100)
	def(&l.Subscriptions, 100_000)
	def(&l.PublishInFlight, 16_384)
	def(&l.SessionInFlight, 4_096)
	def(&l.HeldBytes, 8<<20)
	def(&l.HeldTotal, 128<<20)
	def(&l.DeadLetters, 10_000)
	def(&l.MaxPayload, defaultMaxPayload)

	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.SyncInterval > 0, "sync interval %v: it must be positive", c.SyncInterval)
	check(c.AckWait >= time.Second && c.AckWait <= time.Hour, "ack wait %v: 1s to 1h are allowed", c.AckWait)
	check(c.Replicas >= 1 && c.Replicas <= 5, "replicas %d: 1 to 5 are allowed", c.Replicas)
	check(c.URL != "" || c.Replicas == 1, "replicas %d: the embedded server is alone; more than 1 needs a cluster (NATS_URL)", c.Replicas)
	check(c.Connections >= 1 && c.Connections <= 64, "connections %d: 1 to 64 are allowed", c.Connections)
	check(c.Listen == "" || c.ListenToken != "", "the embedded server listens only with a token")
	check((c.TLSCert == "") == (c.TLSKey == ""), "a TLS certificate and its key go together")
	for _, n := range []int{l.Topics, l.TopicsPerClient, l.Subscriptions, l.PublishInFlight, l.SessionInFlight, l.HeldBytes, l.HeldTotal, l.DeadLetters, l.MaxPayload} {
		check(n > 0, "limits must be positive, one is %d", n)
	}
	check(l.PublishInFlight <= 65_536, "publish in flight %d: at most 65536, because the server drops silently above about 100,000", l.PublishInFlight)
	check(c.URL != "" || l.MaxPayload <= embeddedMaxPayload-payloadMargin, "max payload %d: the embedded server takes at most %d", l.MaxPayload, embeddedMaxPayload-payloadMargin)
	for i := range c.Topics {
		if err := c.Topics[i].check(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// allRules are the configured rules and then the built-in ones.
func (c *Config) allRules() []TopicRule {
	return slices.Concat(c.Topics, builtinRules)
}
