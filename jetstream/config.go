package jetstream

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"time"

	"eventhub/jetstream/cputime"
	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/topics"
)

// Sizes that the bus is built around.
const (
	defaultMaxPayload = 1 << 20
	maxDelay          = 365 * 24 * time.Hour
)

// Config configures a Bus. Either URL or Server is needed.
type Config struct {
	// URL is the NATS server, or several separated by commas.
	URL string
	// Server is a NATS server in this process, started by embedded.Start; it replaces URL. The bus
	// owns the server from Open on: Close closes it, and so does an Open that fails.
	Server Server
	// Creds is the path of a credentials file, NKeySeed that of an nkey seed file; for URL only.
	Creds    string
	NKeySeed string
	// TLSCA, TLSCert and TLSKey are paths of PEM files; for URL only.
	TLSCA   string
	TLSCert string
	TLSKey  string
	// Domain is the JetStream domain; for URL only.
	Domain string
	// Replicas is the number of copies of each new stream: 1..5, default 1. More than 1 needs a
	// cluster.
	Replicas int
	// MemoryStorage keeps new streams in memory: they do not survive a restart of the server.
	MemoryStorage bool
	// AckWait is the time after which the server gives the events of a dead hub to other hubs.
	// 1 s..1 h, default 30 s. A group keeps the AckWait with which it was created.
	AckWait time.Duration
	// OwnerLease is how long a hub that is not heard of owns ordered groups: 1 s..1 min, default
	// 10 s. All hubs need the same.
	OwnerLease time.Duration
	// Connections is the size of the pool of NATS connections: 1..64, default 2.
	Connections int
	// Topics are rules for topics, the first match wins; after them come the built-in ones: dlq.**
	// is one stream that keeps 30 days and 4 GiB, and remembers ids for 24 h, heartbeat.received
	// keeps 3 days, process.state and process.state.snapshot are compacted and keep 7, all others
	// keep 7. A rule for ** comes after those, and before the last. New streams are made by them;
	// those that exist stay as they are until ApplyTopics.
	Topics []topics.Rule
	// Casters are casts in Go, by the name of a schema and the version to which each leads from the
	// version before. They replace the operations of that version in the registry. All hubs need
	// the same.
	Casters map[string]map[int]*upcast.Caster
	// Derived are the topics on which projections of this program make keys.
	Derived []DerivedKeys
	// Limits bound what the bus holds; zero fields take their defaults.
	Limits Limits
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
	// Observer receives metrics. Default: none.
	Observer event.Observer
	// Computing, when not nil, is the ration of time of Limits.ComputeTime. A program that computes
	// more for its clients shares it.
	Computing *cputime.Ration
	// Tracer makes spans of publishes and deliveries. Default: none.
	Tracer event.Tracer
	// Clock is read for the times of leases, and must not go backwards. Tests move it. Default:
	// time.Now, whose monotonic part counts, so that changes of the wall clock move no lease.
	Clock func() time.Time

	// Tests shorten these; their defaults are the constants in brackets.
	bucketCheck time.Duration // how often buckets are looked at (bucketCheckEvery)
	openWait    time.Duration // how long a question of Open waits for an answer (openWait)
	deadRetry   time.Duration // how long a dead letter that finds no room rests at most (deadRetry)
	dueRetry    time.Duration // how long a delayed event rests that was not stored
	askStorage  time.Duration // how often NATS is asked how much it may store (headroomEvery)
	watchOthers time.Duration // how often groups are looked at that are not in memory (watchOthers)
	moveWait    time.Duration // how long a move waits at most for leases of before (freshLimit)
}

// Limits bound what a bus holds. Zero fields take the default. Observer.LimitReached counts how
// often a limit is reached, under the name in parentheses.
type Limits struct {
	// Topics ("topics") is the most streams of topics this hub knows: default 10,000. Beyond it,
	// topics that are new to it get overloaded.
	Topics int
	// TopicsPerClient ("topics_per_client") is the most topics that one client may create, with all
	// Publishers and subscriptions that count for the client (Publisher.CountFor,
	// SubscribeOptions.CountFor): default 100 at once, and then one every 10 s. Beyond the limit,
	// new topics get rate_limited.
	TopicsPerClient int
	// ClientTopics ("client_topics") is the most streams of topics that one client has made and
	// that exist, on all hubs together: default a quarter of Topics. Beyond the limit, new topics
	// get rate_limited. A topic that is deleted counts no more at once.
	ClientTopics int
	// KeysPerClient ("keys_per_client") is the most keys of compacted topics that one client may
	// create, counted as TopicsPerClient is: default 100,000 at once, and then KeyRate a second,
	// default 1,000. Beyond the limit, new keys get rate_limited. Publishers without a client have
	// no such limit. KeyShare ("key_share") is the most that one client may create in 30 days:
	// default 5,000,000. The server keeps a record of each removed key, so the share bounds what a
	// client costs whose keys come and go.
	KeysPerClient, KeyRate, KeyShare int
	// DerivedKeysPerClient ("derived_keys_per_client") is the most keys that one client may make on
	// topics of Config.Derived, counted as TopicsPerClient is: default 100,000 at once, and then
	// DerivedKeyRate a second, default 1. Beyond the limit, events that make a new key get
	// rate_limited. The default is a tenth of the default of topics.Rule.MaxKeys, so that no client
	// alone makes such a topic take no more keys of others. Publishers without a client have no
	// such limit.
	DerivedKeysPerClient, DerivedKeyRate int
	// SchemasPerClient ("schemas_per_client") is the most versions of schemas that one client may
	// have registered. Default 500. schemas.MaxVersions bounds those of all clients.
	SchemasPerClient int
	// ComputeTime ("schema_time") is how much time of a processor one client may have payloads
	// compared with schemas and events cast in each second, and 100 ms at once: default 500 ms.
	// Beyond the limit, publishes wait, for up to 5 s, and then get rate_limited, and what is cast
	// comes later. Work of less than 20 µs is free, and work of more than about 0.1 ms needs a
	// place: there are half as many as processors, half of them for one client ("schema_places").
	// Publishers and subscriptions without a client have no such limits. ComputeTime is not used
	// with Config.Computing.
	ComputeTime time.Duration
	// GroupsPerClient ("groups_per_client") is the most groups that one client may create
	// (SubscribeOptions.CountFor): default 100 at once, and then one every 10 s. Beyond the limit,
	// new groups get rate_limited. It is free to join a group that exists, and to make a group
	// again that has ended by its TTL or was lost with its server.
	GroupsPerClient int
	// ClientGroups ("client_groups") is the most groups that one client has made and that exist, on
	// all hubs together: default 1,000. Beyond the limit, new groups get overloaded. On one stream,
	// a client may have made at most half of the groups that there is room for.
	ClientGroups int
	// StreamGroups ("stream_groups") is the most groups that clients may make on one stream, which
	// is a topic or a family: default 10,000. Beyond the limit, new groups get overloaded. Each
	// stream has room for 1,000 consumers more, which are for the program itself and for reads. A
	// stream that was made elsewhere has the limit of its NATS server, of which a tenth is kept.
	StreamGroups int
	// Subscriptions ("subscriptions") is the most subscriptions open on this hub: default 100,000.
	// Beyond it, new ones get overloaded.
	Subscriptions int
	// PublishInFlight ("publish_in_flight") is the most unconfirmed publishes to one stream:
	// default 16,384 (above about 100,000 from all hubs together, the server drops publishes
	// silently). Publishers wait at the limit.
	PublishInFlight int
	// SessionInFlight ("session_in_flight") is the most unconfirmed publishes of one Publisher:
	// default 4,096. The Publisher waits at it.
	SessionInFlight int
	// HeldBytes ("held_bytes") is how many bytes of fetched events one subscription may hold before
	// it stops fetching: default 8 MiB. Headers count, and events that were handed out do not. The
	// events of one pull may exceed the limit once.
	HeldBytes int
	// HeldTotal ("held_total") is how many such bytes all subscriptions of the hub may hold
	// together: default 128 MiB. Beyond the limit, subscriptions that hold events stop fetching.
	// Each pull brings no more than a subscription's share of the limit, or one event.
	HeldTotal int
	// OrderedWindow ("ordered_window") is the most events that the owner of an ordered group
	// fetches and that are not settled: 1..50,000, default 8,192. While events of one key fill the
	// window, other keys wait.
	OrderedWindow int
	// DeadLetters ("dead_letters") is the most events on their way to a dlq topic, including events
	// whose dead letter cannot be stored for now: default 10,000. Beyond the limit, the hub gives a
	// failed event back for 10 s, again and again until there is room, without delivering it. A
	// group whose dead letters are an eighth of the limit gets no further events until one is
	// stored ("group_dead_letters").
	DeadLetters int
	// DeadLetterRate and DeadLetterBurst ("dead_letter_rate") are how many bytes of dead letters a
	// second one client (SubscribeOptions.CountFor) may cause to be stored, and how many at once:
	// default 256 KiB and 16 MiB. DeadLetterShare ("dead_letter_share") is how many it may cause in
	// 30 days: default 1 GiB. Beyond the limits, dead letters wait, and their events are not
	// delivered again meanwhile. Dead letters of one client that wait are at most half of
	// DeadLetters. Subscriptions that count for nobody have no such limits. What a client publishes
	// to dlq topics counts with its dead letters, and is refused with rate_limited beyond them.
	DeadLetterRate, DeadLetterBurst, DeadLetterShare int
	// PutBack ("put_back") is the most dead-lettered events that were put back to one group and are
	// not settled: default 100,000. Beyond the limit, a redrive to the group ends with overloaded.
	PutBack int
	// PutBackBytes ("put_back_bytes") is the size of all such events of all groups together:
	// default 4 GiB. It is a bound of their stream, which keeps the one that it was made with.
	// PutBackShare ("put_back_share") is how many bytes one client (RedriveOptions.Client) may put
	// back in 30 days: default 1 GiB. Beyond the limits, a redrive ends with overloaded or
	// rate_limited, and the dead letters that are left stay.
	PutBackBytes, PutBackShare int
	// Redrives ("redrives") is the most redrives, discards and counts of dead letters that run at a
	// time: default 8, and half of them for one client. Further ones wait, and get overloaded after
	// 9 s.
	Redrives int
	// AttemptsKnown ("attempts_known") is the most failed events of one group whose attempts the
	// hub remembers: default 10,000. For other events, the hub asks the server at their redelivery.
	// The hub also remembers as many events that it settled after a redelivery, for twice AckWait,
	// and five times as many of all groups together whose last member here has left.
	AttemptsKnown int
	// StuckAfter ("stuck_after") is how long a group must get nothing, although an event and a
	// member's request for events wait, before the hub reports it as stuck: 1 s..1 h, default 30 s.
	// The hub asks the server about a group without events once in that time, at most about 1,200
	// groups.
	StuckAfter time.Duration
	// LingeringInboxes ("lingering_inboxes") is the most inboxes of paused or ended subscriptions
	// that the hub keeps in a cluster: default 100,000. The hub keeps an inbox until its pulls end,
	// up to 15 s, to give back the events on their way. Beyond the limit, such events are
	// redelivered after AckWait.
	LingeringInboxes int
	// RecentAcks ("recent_acks") is the most acknowledgements of one group that each connection of
	// the pool keeps, to send them again when the group's leader changes: for 5 to 10 s, or for
	// AckWait while nobody answers who leads. Beyond it the oldest are dropped, and an event may
	// come again that was acknowledged just before such a change. Without a cluster none are kept.
	// Default 16,384.
	RecentAcks int
	// ListingReaders ("listing_readers") is the most listings (Keys.List) for which the hub reads
	// ahead: default 16, with up to 4 MiB each. Pages of other listings take longer.
	ListingReaders int
	// IDSearches ("id_searches") is the most searches for an id (FromAfterID) that run at a time:
	// default 2. Further searches wait, and get overloaded after 9 s. IDSearchesPerClient is how
	// many of them may be of one client (SubscribeOptions.CountFor): default half of IDSearches. A
	// client with more than 64 searches gets rate_limited at once. A search reads at most 100,000
	// events, and 50,000 a second.
	IDSearches, IDSearchesPerClient int
	// IDsKnown ("ids_known") is the most ids that searches keep in memory, with 16 bytes each, so
	// that the next search on the same topic does not read the events again: default 2,000,000.
	// Beyond the limit, the topics whose last search is longest ago are forgotten. The hub keeps at
	// most as many of the ids that it has published itself, those that are no UUIDv7s.
	IDsKnown int
	// MaxDelay ("max_delay") is how far ahead an event may be delayed (PublishOptions.Delay and
	// At): default 365 days, which is also the most. Beyond the limit, a publish gets bad_options.
	MaxDelay time.Duration
	// Delayed ("delayed") is the most delayed events that wait, on all hubs together: default
	// 1,000,000. The server keeps about 1 KiB of memory for each. DelayedPerClient
	// ("delayed_per_client") is how many of them may be of one client: default 10,000. Publishers
	// without a client have no such limit. Beyond the limits, publishes with a delay get
	// overloaded. Hubs that publish at the same moment may exceed them a little together.
	Delayed, DelayedPerClient int
	// PublishRate and PublishBurst ("publish_rate") are how many bytes a second one client may
	// publish (Publisher.CountFor), and how many at once: default 128 MiB, which is more than a
	// network of 1 Gbit/s carries, and 256 MiB. Payload, key and headers count, and 128 bytes an
	// event. Beyond the limit, publishes get rate_limited. Publishers without a client have no such
	// limit.
	PublishRate, PublishBurst int
	// StorageReserve ("storage_reserve") is how many bytes of what NATS may store are for the
	// program itself: default a tenth, at most 1 GiB. While less is left, publishes of clients, and
	// topics that they would make, get storage_low. Acknowledgements, dead letters and removals of
	// keys go on. The room that is left is that of the account, and for Config.Server that of the
	// disk. Of a NATS without such bounds nothing is known until it refuses events.
	StorageReserve int64
	// StorageShare ("storage_share") is how many bytes one client may publish in 7 days, counted
	// as by PublishRate since Open: default a quarter of what NATS could store beyond the reserve
	// at Open, and at least the reserve. The limit applies only while less than twice the reserve
	// is left: publishes beyond it then get storage_low.
	StorageShare int
	// MaxPayload is the largest payload in bytes: default 1 MiB, less if the server's max_payload
	// demands it.
	MaxPayload int
}

// validate checks the configuration and fills in the defaults.
func (c *Config) validate() error {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	span := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	span(&c.bucketCheck, bucketCheckEvery)
	span(&c.openWait, conn.OpenWait)
	span(&c.deadRetry, deadRetry)
	span(&c.dueRetry, publish.DueRetry)
	span(&c.watchOthers, watchOthers)
	span(&c.moveWait, freshLimit)
	if c.OwnerLease == 0 {
		c.OwnerLease = ownerLease
	}
	if c.AckWait == 0 {
		c.AckWait = 30 * time.Second
	}
	def(&c.Replicas, 1)
	def(&c.Connections, 2)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Observer == nil {
		c.Observer = event.NopObserver{}
	}
	l := &c.Limits
	def(&l.Topics, 10_000)
	def(&l.TopicsPerClient, 100)
	def(&l.ClientTopics, max(l.Topics/4, 1))
	def(&l.KeysPerClient, 100_000)
	def(&l.KeyRate, 1_000)
	def(&l.KeyShare, 5_000_000)
	def(&l.DerivedKeysPerClient, 100_000)
	def(&l.SchemasPerClient, 500)
	if l.ComputeTime == 0 {
		l.ComputeTime = 500 * time.Millisecond
	}
	if c.Computing == nil {
		c.Computing = cputime.New(l.ComputeTime, runtime.GOMAXPROCS(0), l.Topics, c.Observer.LimitReached)
	}
	def(&l.DerivedKeyRate, 1)
	def(&l.GroupsPerClient, 100)
	def(&l.ClientGroups, 1_000)
	def(&l.StreamGroups, 10_000)
	def(&l.Subscriptions, 100_000)
	def(&l.PublishInFlight, 16_384)
	def(&l.SessionInFlight, 4_096)
	def(&l.HeldBytes, 8<<20)
	def(&l.HeldTotal, 128<<20)
	def(&l.OrderedWindow, 8_192)
	def(&l.DeadLetters, 10_000)
	def(&l.DeadLetterRate, 256<<10)
	def(&l.DeadLetterBurst, 16<<20)
	def(&l.DeadLetterShare, 1<<30)
	def(&l.PutBack, 100_000)
	def(&l.PutBackBytes, 4<<30)
	def(&l.PutBackShare, 1<<30)
	def(&l.Redrives, 8)
	def(&l.AttemptsKnown, 10_000)
	if l.StuckAfter == 0 {
		l.StuckAfter = 30 * time.Second
	}
	def(&l.LingeringInboxes, 100_000)
	def(&l.RecentAcks, 16_384)
	def(&l.ListingReaders, 16)
	def(&l.IDSearches, 2)
	def(&l.IDSearchesPerClient, (l.IDSearches+1)/2)
	def(&l.IDsKnown, 2_000_000)
	def(&l.Delayed, 1_000_000)
	def(&l.DelayedPerClient, 10_000)
	if l.MaxDelay == 0 {
		l.MaxDelay = maxDelay
	}
	def(&l.PublishRate, 128<<20)
	def(&l.PublishBurst, 256<<20)
	def(&l.MaxPayload, defaultMaxPayload)

	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.URL != "" || c.Server != nil, "no NATS server; set URL, or Server (embedded.Start)")
	check(c.URL == "" || c.Server == nil, "both URL and Server are set; choose one")
	check(c.AckWait >= time.Second && c.AckWait <= time.Hour, "ack wait %v: 1s to 1h are allowed", c.AckWait)
	check(c.OwnerLease >= time.Second && c.OwnerLease <= time.Minute, "owner lease %v: 1s to 1m are allowed", c.OwnerLease)
	check(c.Replicas >= 1 && c.Replicas <= 5, "replicas %d: 1 to 5 are allowed", c.Replicas)
	check(c.Server == nil || c.Replicas == 1, "replicas %d: more than 1 needs a cluster, and the embedded server is a single server", c.Replicas)
	check(c.Connections >= 1 && c.Connections <= 64, "connections %d: 1 to 64 are allowed", c.Connections)
	check((c.TLSCert == "") == (c.TLSKey == ""), "a TLS certificate and its key go together")
	for _, n := range []int{l.Topics, l.TopicsPerClient, l.ClientTopics, l.KeysPerClient, l.KeyRate, l.KeyShare, l.DerivedKeysPerClient, l.DerivedKeyRate, l.SchemasPerClient, l.GroupsPerClient, l.ClientGroups, l.StreamGroups, l.Subscriptions, l.PublishInFlight, l.SessionInFlight, l.HeldBytes, l.HeldTotal, l.OrderedWindow, l.DeadLetters, l.DeadLetterRate, l.DeadLetterBurst, l.DeadLetterShare, l.PutBack, l.PutBackBytes, l.PutBackShare, l.Redrives, l.AttemptsKnown, l.LingeringInboxes, l.RecentAcks, l.ListingReaders, l.IDSearches, l.IDSearchesPerClient, l.IDsKnown, l.Delayed, l.DelayedPerClient, int(l.MaxDelay), int(l.ComputeTime), l.MaxPayload} {
		check(n > 0, "limits must be positive, one is %d", n)
	}
	check(l.StuckAfter >= minStuckAfter && l.StuckAfter <= maxStuckAfter, "stuck after %v: %v to %v are allowed", l.StuckAfter, minStuckAfter, maxStuckAfter)
	check(l.OrderedWindow <= maxOrderedWindow, "ordered window %d: at most %d is allowed, because the server gives out 65536 events of a group at a time", l.OrderedWindow, maxOrderedWindow)
	check(l.MaxDelay <= maxDelay, "max delay %v: at most %v is allowed", l.MaxDelay, maxDelay)
	check(l.PublishInFlight <= 65_536, "publish in flight %d: at most 65536 are allowed, because the server drops publishes silently above about 100,000", l.PublishInFlight)
	if c.Server != nil && c.Server.InMemory() {
		c.MemoryStorage = true
		c.Topics = slices.Clone(c.Topics)
		for i := range c.Topics {
			c.Topics[i].Storage = ""
		}
	}
	for _, fault := range topics.Validate(c.Topics) {
		errs = append(errs, fault)
	}
	for _, r := range c.Topics {
		check(c.Server == nil || r.Replicas <= 1, "topic rule %q: replicas %d: more than 1 needs a cluster, and the embedded server is a single server", r.Pattern, r.Replicas)
	}
	return errors.Join(errs...)
}
