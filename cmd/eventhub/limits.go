package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	ration "eventhub/jetstream/quota"
)

// limitFlags limit what clients may do. Each time a limit applies, eventhub_limit_reached_total
// counts it.
type limitFlags struct {
	Connections          int `env:"CONNECTIONS" default:"20000" help:"WebSocket connections."`
	PrincipalConnections int `env:"PRINCIPAL_CONNECTIONS" placeholder:"N" help:"WebSocket connections per principal, which is a JWT subject or the hub's own token. Default: three quarters of all."`
	Unauthenticated      int `env:"UNAUTHENTICATED" placeholder:"N" help:"WebSocket connections without AUTH. A further one closes the oldest. Default: a quarter of all."`
	WaitingConnections   int `env:"WAITING_CONNECTIONS" default:"2048" help:"Connections per port without a current request. A further one closes the oldest."`
	Requests             int `env:"REQUESTS" default:"512" help:"Concurrent HTTP requests."`
	PrincipalRequests    int `env:"PRINCIPAL_REQUESTS" placeholder:"N" help:"Concurrent HTTP requests of one principal. Default: a quarter of all."`
	Streams              int `env:"STREAMS" default:"4096" help:"Concurrent streams of server-sent events."`
	PrincipalStreams     int `env:"PRINCIPAL_STREAMS" placeholder:"N" help:"Concurrent streams of one principal. Default: a quarter of all."`
	Pulls                int `env:"PULLS" default:"4096" help:"Pulls over HTTP that wait for events or have unsettled ones."`
	PrincipalPulls       int `env:"PRINCIPAL_PULLS" placeholder:"N" help:"Such pulls of one principal. Default: a quarter of all."`
	Tails                int `env:"TAILS" default:"1024" help:"Topics that are broadcast."`
	PrincipalTails       int `env:"PRINCIPAL_TAILS" placeholder:"N" help:"Topics that one principal was the first to have broadcast. Default: a quarter of all."`
	RingFrames           int `env:"RING_FRAMES" default:"8192" help:"Newest events of a broadcast topic that are kept for slow sockets."`
	RingBytes            int `env:"RING_BYTES" default:"16777216" help:"Bytes of these events of one topic."`
	RingTotal            int `env:"RING_TOTAL" default:"268435456" help:"Bytes of these events of all topics."`
	CatchUp              int `env:"CATCH_UP" default:"100000" help:"Events of the stream that a broadcast may begin behind the end."`
	Presence             int `env:"PRESENCE" default:"100000" help:"Names of clients that are kept for presence, each once for each topic and hub."`
	Subscriptions        int `env:"SUBSCRIPTIONS" default:"256" help:"Subscriptions per connection."`
	Operations           int `env:"OPERATIONS" default:"64" help:"Concurrent frames per connection that wait for NATS or for one another."`
	Topics               int `env:"TOPICS" default:"10000" help:"Topics known to this hub."`
	NewTopics            int `env:"NEW_TOPICS" default:"100" help:"Topics that a principal may create at once; then one every 10s."`
	PrincipalTopics      int `env:"PRINCIPAL_TOPICS" placeholder:"N" help:"Topics that a principal has created and that exist. Default: a quarter of all."`
	NewGroups            int `env:"NEW_GROUPS" default:"100" help:"Groups that a principal may create at once; then one every 10s."`
	PrincipalGroups      int `env:"PRINCIPAL_GROUPS" default:"1000" help:"Groups that a principal has created and that exist."`
	StreamGroups         int `env:"STREAM_GROUPS" default:"10000" help:"Groups that clients may create on one topic, or on one family of topics."`
	Joins                int `env:"JOINS" default:"256" help:"SUBSCRIBEs carried out concurrently; further ones wait."`
	PrincipalJoins       int `env:"PRINCIPAL_JOINS" placeholder:"N" help:"SUBSCRIBEs carried out concurrently for one principal. Default: a 32nd of all."`
	PrincipalHeld        int `env:"PRINCIPAL_HELD" placeholder:"N" help:"Events that a principal may hold unsettled through this hub. Default: 50000."`
	PrincipalUnread      int `env:"PRINCIPAL_UNREAD" placeholder:"N" help:"Events that the hub has fetched for a principal and not written to a client. Default: 10000."`
	Payload              int `env:"PAYLOAD" default:"1048576" help:"Bytes of a payload; NATS may set a lower limit."`
	Frame                int `env:"FRAME" placeholder:"BYTES" help:"Bytes of a frame. Default: 4 MiB or twice the payload, whichever is more."`
	InboundBytes         int `env:"INBOUND_BYTES" default:"268435456" help:"Bytes of partly received frames, over all connections."`
	HeldBytes            int `env:"HELD_BYTES" default:"134217728" help:"Bytes of fetched events that are not delivered yet, over all subscriptions."`
	OrderedWindow        int `env:"ORDERED_WINDOW" default:"8192" help:"Events of an ordered group that its hub has fetched and that are not settled: 1 to 50000."`
	Pages                int `env:"PAGES" default:"8" help:"Pages of latest records read concurrently; further requests wait."`
	PageBytes            int `env:"PAGE_BYTES" default:"16777216" help:"Bytes after which a page of latest records ends early."`
	PageTotal            int `env:"PAGE_TOTAL" placeholder:"BYTES" help:"Bytes of pages that clients have not taken yet. Default: 256 MiB, or four times a page if larger."`
	PrincipalPages       int `env:"PRINCIPAL_PAGES" placeholder:"N" help:"Pages that are read concurrently for one principal. Default: a quarter of all."`
	PrincipalPageTotal   int `env:"PRINCIPAL_PAGE_TOTAL" placeholder:"BYTES" help:"Bytes of pages that one principal has not taken yet. Default: half of all."`
	Exports              int `env:"EXPORTS" default:"32" help:"Replays and exports read concurrently; further requests wait."`
	PrincipalExports     int `env:"PRINCIPAL_EXPORTS" placeholder:"N" help:"Replays and exports that are read concurrently for one principal. Default: a quarter of all."`
	BodyRate             int `env:"BODY_RATE" default:"1024" help:"Bytes per second that an HTTP client must send of a body, on average."`

	IDSearches          int   `name:"id-searches" env:"ID_SEARCHES" default:"2" help:"Searches for an afterId at a time; further ones wait."`
	PrincipalIDSearches int   `name:"principal-id-searches" env:"PRINCIPAL_ID_SEARCHES" placeholder:"N" help:"Searches for an afterId at a time of one principal. Default: half of all."`
	DeadLetterBytes     quota `env:"DEAD_LETTER_BYTES" default:"262144/16777216" placeholder:"RATE/BURST" help:"Bytes of dead letters of one principal: per second, and at once; or off. Further ones wait."`
	DeadLetterShare     int   `env:"DEAD_LETTER_SHARE" default:"1073741824" help:"Bytes of dead letters of one principal in 30 days. Further ones wait."`
	BadTokens           quota `env:"BAD_TOKENS" default:"100/200" placeholder:"RATE/BURST" help:"Refused tokens per address (IPv6: per /64): per second, and at once; or off. Further refusals wait, or end the connection."`
	TokenChecks         quota `env:"TOKEN_CHECKS" default:"10000/20000" placeholder:"RATE/BURST" help:"Bad tokens per address that are checked: per second, and at once; or off. Further unknown tokens are refused unseen."`

	CatchUpRate            quota `env:"CATCH_UP_RATE" default:"50000/100000" placeholder:"RATE/BURST" help:"Events that the hub reads from streams for broadcasts of one principal that are behind: per second, and at once; or off."`
	OutboxRate             quota `env:"OUTBOX_RATE" default:"4194304/33554432" placeholder:"RATE/BURST" help:"Bytes that one principal may post to the hub's own outbox: per second, and at once; or off."`
	OutboxPending          int   `env:"OUTBOX_PENDING" default:"1000000" help:"Events waiting or parked in the hub's own outbox. Beyond it, POST /outbox is refused."`
	OutboxBytes            int   `env:"OUTBOX_BYTES" default:"1073741824" help:"Bytes of these events, with 512 for each. Beyond it, POST /outbox is refused."`
	PrincipalOutboxPending int   `env:"PRINCIPAL_OUTBOX_PENDING" placeholder:"N" help:"Events of one principal that wait or are parked in the hub's own outbox. Default: half of all."`
	PrincipalOutboxBytes   int   `env:"PRINCIPAL_OUTBOX_BYTES" placeholder:"BYTES" help:"Bytes of these events. Default: half of all."`

	Frames             quota         `env:"FRAMES" default:"10000/2000" placeholder:"RATE/BURST" help:"Frames per connection except ACK, NACK and MODACK: per second, and at once."`
	Settles            quota         `env:"SETTLES" default:"200000/20000" placeholder:"RATE/BURST" help:"ACK, NACK and MODACK per connection, and acknowledgements of a principal's native clients."`
	NativeMessages     quota         `env:"NATIVE_MESSAGES" default:"10000/2000" placeholder:"RATE/BURST" help:"Messages of a principal's native clients, except acknowledgements: per second, and at once; or off. Further ones wait."`
	NativeRequests     quota         `env:"NATIVE_REQUESTS" default:"1000/2000" placeholder:"RATE/BURST" help:"Requests of a principal's native clients to the NATS server, except pulls: per second, and at once; or off. Further ones wait."`
	NewKeys            quota         `env:"NEW_KEYS" default:"1000/100000" placeholder:"RATE/BURST" help:"Keys of compacted topics that a principal may create through this hub, or off."`
	KeyShare           int           `env:"KEY_SHARE" default:"5000000" help:"Keys of compacted topics that a principal may create in 30 days through this hub."`
	SchemaTime         time.Duration `env:"SCHEMA_TIME" default:"500ms" help:"Time of a processor in each second for which a principal may have payloads compared with schemas, events cast and answers compressed, and 100 ms at once. The rest waits."`
	PrincipalSchemas   int           `env:"PRINCIPAL_SCHEMAS" default:"500" help:"Versions of schemas that a principal may register."`
	NewProcesses       quota         `env:"NEW_PROCESSES" default:"1/100000" placeholder:"RATE/BURST" help:"Processes, as keys of process.state, that a principal may create through this hub by its heartbeats, or off."`
	TopicPublishes     quota         `env:"TOPIC_PUBLISHES" default:"off" placeholder:"RATE/BURST" help:"Publishes per topic through this hub, or off."`
	PrincipalPublishes quota         `env:"PRINCIPAL_PUBLISHES" default:"off" placeholder:"RATE/BURST" help:"Publishes per principal through this hub, or off."`

	PrincipalBytes  quota `env:"PRINCIPAL_BYTES" default:"134217728/268435456" placeholder:"RATE/BURST" help:"Bytes that a principal may publish through this hub, with 128 for each event, and bytes that its native clients may send: per second, and at once; or off."`
	PrincipalStored int   `env:"PRINCIPAL_STORED" placeholder:"BYTES" help:"Bytes that a principal may publish through this hub in 7 days, while less than twice the reserve is left. Default: a quarter of what is left at the start."`
	StorageReserve  int   `env:"STORAGE_RESERVE" placeholder:"BYTES" help:"Bytes of what NATS may store that clients leave to the hub. Default: a tenth, at most 1 GiB."`

	OpenSpans int `env:"OPEN_SPANS" default:"10000" help:"Spans that have begun and not ended. Further publishes and deliveries have no spans."`

	CountOwnToken bool `env:"COUNT_OWN_TOKEN" help:"Apply new-groups and principal-groups to the hub's own token, too."`

	Delayed          int `env:"DELAYED" default:"1000000" help:"Delayed events that wait."`
	PrincipalDelayed int `env:"PRINCIPAL_DELAYED" default:"10000" help:"Delayed events of one principal that wait."`

	ReturnRate int `env:"RETURN_RATE" default:"1000" help:"Clients a second that a hub that ends asks to come back, by a pause of at most one minute."`

	MaxDelay     time.Duration `env:"MAX_DELAY" default:"8760h" help:"How far ahead an event may be delayed, at most 8760h."`
	StuckAfter   time.Duration `env:"STUCK_AFTER" default:"30s" help:"How long a group gets nothing, although events and requests wait, before it is reported as stuck, 1s to 1h."`
	Lease        time.Duration `env:"LEASE" default:"12h" help:"Longest lease of an event, and longest delay of a NACK, 1s to 12h."`
	AuthTimeout  time.Duration `env:"AUTH_TIMEOUT" default:"10s" help:"How long a connection may stay open without AUTH."`
	StreamBeat   time.Duration `env:"STREAM_BEAT" default:"15s" help:"Silence after which a stream of server-sent events gets a comment."`
	PingInterval time.Duration `env:"PING_INTERVAL" default:"30s" help:"Silence after which a connection is pinged."`
	PongTimeout  time.Duration `env:"PONG_TIMEOUT" default:"10s" help:"How long a client has to answer a ping."`
}

// validate returns an error for each limit that is not positive.
func (f limitFlags) validate() (faults []error) {
	bad := func(name string, value any) {
		faults = append(faults, fmt.Errorf("limit %v: must be positive (--limit-%s, EVENTHUB_LIMIT_%s)",
			value, name, strings.ToUpper(strings.ReplaceAll(name, "-", "_"))))
	}
	for _, l := range []struct {
		name         string
		value, least int
	}{
		{"connections", f.Connections, 1},
		{"principal-connections", f.PrincipalConnections, 0}, // 0 selects the default
		{"unauthenticated", f.Unauthenticated, 0},
		{"open-spans", f.OpenSpans, 1},
		{"return-rate", f.ReturnRate, 1},
		{"inbound-bytes", f.InboundBytes, 1},
		{"held-bytes", f.HeldBytes, 1},
		{"ordered-window", f.OrderedWindow, 1},
		{"pages", f.Pages, 1},
		{"page-bytes", f.PageBytes, 1},
		{"page-total", f.PageTotal, 0},
		{"principal-pages", f.PrincipalPages, 0},
		{"principal-page-total", f.PrincipalPageTotal, 0},
		{"exports", f.Exports, 1},
		{"principal-exports", f.PrincipalExports, 0},
		{"body-rate", f.BodyRate, 1},
		{"principal-requests", f.PrincipalRequests, 0},
		{"waiting-connections", f.WaitingConnections, 1},
		{"requests", f.Requests, 1},
		{"streams", f.Streams, 1},
		{"principal-streams", f.PrincipalStreams, 0},
		{"pulls", f.Pulls, 1},
		{"principal-pulls", f.PrincipalPulls, 0},
		{"tails", f.Tails, 1},
		{"principal-tails", f.PrincipalTails, 0},
		{"ring-frames", f.RingFrames, 1},
		{"ring-bytes", f.RingBytes, 1},
		{"ring-total", f.RingTotal, 1},
		{"catch-up", f.CatchUp, 1},
		{"presence", f.Presence, 1},
		{"subscriptions", f.Subscriptions, 1},
		{"operations", f.Operations, 1},
		{"topics", f.Topics, 1},
		{"new-topics", f.NewTopics, 1},
		{"principal-topics", f.PrincipalTopics, 0},
		{"principal-schemas", f.PrincipalSchemas, 1},
		{"new-groups", f.NewGroups, 1},
		{"principal-groups", f.PrincipalGroups, 1},
		{"stream-groups", f.StreamGroups, 1},
		{"delayed", f.Delayed, 1},
		{"principal-delayed", f.PrincipalDelayed, 1},
		{"principal-held", f.PrincipalHeld, 0},
		{"principal-unread", f.PrincipalUnread, 0},
		{"joins", f.Joins, 1},
		{"principal-joins", f.PrincipalJoins, 0},
		{"payload", f.Payload, 1},
		{"frame", f.Frame, 0},
		{"id-searches", f.IDSearches, 1},
		{"principal-id-searches", f.PrincipalIDSearches, 0},
		{"dead-letter-share", f.DeadLetterShare, 1},
		{"outbox-pending", f.OutboxPending, 1},
		{"outbox-bytes", f.OutboxBytes, 1},
		{"principal-outbox-pending", f.PrincipalOutboxPending, 0},
		{"principal-outbox-bytes", f.PrincipalOutboxBytes, 0},
		{"principal-stored", f.PrincipalStored, 0},
		{"storage-reserve", f.StorageReserve, 0},
	} {
		if l.value < l.least {
			bad(l.name, l.value)
		}
	}
	if f.Lease < time.Second || f.Lease > 12*time.Hour {
		faults = append(faults, fmt.Errorf("limit %v: must be 1s to 12h (--limit-lease, EVENTHUB_LIMIT_LEASE)", f.Lease))
	}
	if f.StuckAfter < time.Second || f.StuckAfter > time.Hour {
		faults = append(faults, fmt.Errorf("limit %v: must be 1s to 1h (--limit-stuck-after, EVENTHUB_LIMIT_STUCK_AFTER)", f.StuckAfter))
	}
	if f.SchemaTime < time.Millisecond || f.SchemaTime > time.Hour {
		faults = append(faults, fmt.Errorf("limit %v: must be 1ms to 1h (--limit-schema-time, EVENTHUB_LIMIT_SCHEMA_TIME)", f.SchemaTime))
	}
	if f.MaxDelay < time.Millisecond || f.MaxDelay > 365*24*time.Hour {
		faults = append(faults, fmt.Errorf("limit %v: must be 1ms to 8760h (--limit-max-delay, EVENTHUB_LIMIT_MAX_DELAY)", f.MaxDelay))
	}
	for _, l := range []struct {
		name  string
		value time.Duration
	}{
		{"auth-timeout", f.AuthTimeout},
		{"stream-beat", f.StreamBeat},
		{"ping-interval", f.PingInterval},
		{"pong-timeout", f.PongTimeout},
	} {
		if l.value <= 0 {
			bad(l.name, l.value)
		}
	}
	return faults
}

// maxQuota is the maximum of both numbers of a quota.
const maxQuota = 1_000_000_000

// quota limits a rate, in events per second, with a burst. The zero quota means no limit.
type quota struct{ rate, burst int }

// UnmarshalText parses RATE/BURST, RATE with an equal burst, or off.
func (q *quota) UnmarshalText(text []byte) error {
	*q = quota{}
	if string(text) == "off" {
		return nil
	}
	rate, burst, two := strings.Cut(string(text), "/")
	if !two {
		burst = rate
	}
	var errs [2]error
	q.rate, errs[0] = strconv.Atoi(rate)
	q.burst, errs[1] = strconv.Atoi(burst)
	if errors.Join(errs[:]...) != nil || min(q.rate, q.burst) < 1 || max(q.rate, q.burst) > maxQuota {
		return errors.New("use RATE/BURST, such as 1000/200 for 1000 per second and 200 at once, or off")
	}
	return nil
}

// String returns the form that UnmarshalText parses.
func (q quota) String() string {
	if q == (quota{}) {
		return "off"
	}
	return strconv.Itoa(q.rate) + "/" + strconv.Itoa(q.burst)
}

// limits returns the rate and burst in the form of facade.Limits.
func (q quota) limits() (rate, burst int) {
	if q == (quota{}) {
		return facade.NoLimit, 0
	}
	return q.rate, q.burst
}

// facade returns the limits of the facade.
func (f limitFlags) facade() facade.Limits {
	l := facade.Limits{
		Connections: f.Connections, PrincipalConnections: f.PrincipalConnections,
		Unauthenticated: f.Unauthenticated, InboundBytes: f.InboundBytes,
		Requests: f.Requests, Subscriptions: f.Subscriptions, Operations: f.Operations, Frame: f.Frame,
		Pages: f.Pages, PageBytes: f.PageBytes, PageTotal: f.PageTotal,
		PrincipalRequests: f.PrincipalRequests, PrincipalPages: f.PrincipalPages,
		PrincipalPageTotal: f.PrincipalPageTotal, BodyRate: f.BodyRate,
		Exports: f.Exports, PrincipalExports: f.PrincipalExports,
		Streams: f.Streams, PrincipalStreams: f.PrincipalStreams, Pulls: f.Pulls, PrincipalPulls: f.PrincipalPulls,
		Tails: f.Tails, PrincipalTails: f.PrincipalTails, RingFrames: f.RingFrames, RingBytes: f.RingBytes, RingTotal: f.RingTotal, CatchUp: f.CatchUp, Presence: f.Presence,
		Joins: f.Joins, PrincipalJoins: f.PrincipalJoins, PrincipalHeld: f.PrincipalHeld, PrincipalUnread: f.PrincipalUnread, CountOwnToken: f.CountOwnToken, Lease: f.Lease,
		AuthTimeout: f.AuthTimeout, StreamBeat: f.StreamBeat, PingInterval: f.PingInterval, PongTimeout: f.PongTimeout, ReturnRate: f.ReturnRate,
	}
	l.FrameRate, l.FrameBurst = f.Frames.limits()
	l.SettleRate, l.SettleBurst = f.Settles.limits()
	l.TopicRate, l.TopicBurst = f.TopicPublishes.limits()
	l.PrincipalRate, l.PrincipalBurst = f.PrincipalPublishes.limits()
	l.BadTokenRate, l.BadTokenBurst = f.BadTokens.limits()
	l.TokenCheckRate, l.TokenCheckBurst = f.TokenChecks.limits()
	l.OutboxRate, l.OutboxBurst = f.OutboxRate.limits()
	l.CatchUpRate, l.CatchUpBurst = f.CatchUpRate.limits()
	return l
}

// native returns the rates of native clients. limitReached is called when more principals use them
// at a time than there may be connections.
func (f limitFlags) native(limitReached func(limit string)) embedded.Rates {
	rate := func(q quota) *ration.Set {
		if q == (quota{}) {
			return nil
		}
		return ration.New(float64(q.rate), q.burst, f.Connections, func() { limitReached("quotas") })
	}
	return embedded.Rates{Messages: rate(f.NativeMessages), Requests: rate(f.NativeRequests), Settles: rate(f.Settles), Bytes: rate(f.PrincipalBytes)}
}

// bus returns the limits of the bus.
func (f limitFlags) bus() jetstream.Limits {
	l := jetstream.Limits{
		Topics: f.Topics, TopicsPerClient: f.NewTopics, ClientTopics: f.PrincipalTopics, SchemasPerClient: f.PrincipalSchemas, ComputeTime: f.SchemaTime, GroupsPerClient: f.NewGroups, ClientGroups: f.PrincipalGroups,
		StreamGroups: f.StreamGroups, MaxPayload: f.Payload, HeldTotal: f.HeldBytes, OrderedWindow: f.OrderedWindow,
		IDSearches: f.IDSearches, IDSearchesPerClient: f.PrincipalIDSearches, DeadLetterShare: f.DeadLetterShare, KeyShare: f.KeyShare,
		Delayed: f.Delayed, DelayedPerClient: f.PrincipalDelayed, MaxDelay: f.MaxDelay, StuckAfter: f.StuckAfter,
		DeadLetterRate: f.DeadLetterBytes.rate, DeadLetterBurst: f.DeadLetterBytes.burst,
		StorageReserve: int64(f.StorageReserve), StorageShare: f.PrincipalStored,
	}
	if l.PublishRate, l.PublishBurst = f.PrincipalBytes.rate, f.PrincipalBytes.burst; f.PrincipalBytes == (quota{}) {
		l.PublishRate, l.PublishBurst = maxQuota, maxQuota
	}
	if f.DeadLetterBytes == (quota{}) {
		l.DeadLetterRate, l.DeadLetterBurst = maxQuota, maxQuota // more than any disk takes
	}
	if l.KeyRate, l.KeysPerClient = f.NewKeys.rate, f.NewKeys.burst; f.NewKeys == (quota{}) {
		l.KeyRate, l.KeysPerClient = maxQuota, maxQuota
	}
	if l.DerivedKeyRate, l.DerivedKeysPerClient = f.NewProcesses.rate, f.NewProcesses.burst; f.NewProcesses == (quota{}) {
		l.DerivedKeyRate, l.DerivedKeysPerClient = maxQuota, maxQuota
	}
	return l
}

// lines describes the limits.
func (f limitFlags) lines() [][2]string {
	or := func(n int, byDefault string) string {
		if n == 0 {
			return byDefault
		}
		return strconv.Itoa(n)
	}
	return [][2]string{
		{"limits", fmt.Sprintf("connections %d, of one principal %s, without AUTH %s, waiting %d; requests %d, of one principal %s; subscriptions %d, operations %d", f.Connections, or(f.PrincipalConnections, "three quarters of them"), or(f.Unauthenticated, "a quarter of them"), f.WaitingConnections, f.Requests, or(f.PrincipalRequests, "a quarter of them"), f.Subscriptions, f.Operations)},
		{"", fmt.Sprintf("streams %d, of one principal %s; pulls %d, of one principal %s", f.Streams, or(f.PrincipalStreams, "a quarter of them"), f.Pulls, or(f.PrincipalPulls, "a quarter of them"))},
		{"", fmt.Sprintf("broadcast topics %d, of one principal %s; %d of their events are kept, %d bytes, and %d bytes of all topics; a broadcast begins at most %d events behind the end; events that are read for broadcasts of a principal that are behind %v; %d names are kept for presence", f.Tails, or(f.PrincipalTails, "a quarter of them"), f.RingFrames, f.RingBytes, f.RingTotal, f.CatchUp, f.CatchUpRate, f.Presence)},
		{"", fmt.Sprintf("waiting in the outbox %d, of one principal %s; bytes %d, of one principal %s; bytes that a principal may post %v", f.OutboxPending, or(f.PrincipalOutboxPending, "half of them"), f.OutboxBytes, or(f.PrincipalOutboxBytes, "half of them"), f.OutboxRate)},
		{"", fmt.Sprintf("frames %v; settles %v; publishes to a topic %v, of a principal %v; of a principal's native clients, messages %v, requests %v", f.Frames, f.Settles, f.TopicPublishes, f.PrincipalPublishes, f.NativeMessages, f.NativeRequests)},
		{"", fmt.Sprintf("bytes that a principal publishes %v; bytes of storage for the hub alone %s; bytes of a principal in 7 days, while little is left, %s", f.PrincipalBytes, or(f.StorageReserve, "a tenth, at most 1 GiB"), or(f.PrincipalStored, "a quarter of what is left at the start"))},
		{"", fmt.Sprintf("topics %d, of one principal %s, new ones %d; new keys %v, in 30 days %d, new processes %v; payload %d bytes; frame %s; unfinished frames %d bytes, events held %d bytes, of an ordered group %d; %d pages of %d bytes, %d exports at a time", f.Topics, or(f.PrincipalTopics, "a quarter of them"), f.NewTopics, f.NewKeys, f.KeyShare, f.NewProcesses, f.Payload, or(f.Frame, "4 MiB or twice the payload"), f.InboundBytes, f.HeldBytes, f.OrderedWindow, f.Pages, f.PageBytes, f.Exports)},
		{"", fmt.Sprintf("groups of a principal %d, new ones %d, the hub's own token %s; of a stream %d; %d subscribe at a time, of one principal %s; events held by a principal %s, for %v at a time, and not read %s", f.PrincipalGroups, f.NewGroups, map[bool]string{true: "too", false: "any"}[f.CountOwnToken], f.StreamGroups, f.Joins, or(f.PrincipalJoins, "a 32nd of them"), or(f.PrincipalHeld, "50000"), f.Lease, or(f.PrincipalUnread, "10000"))},
		{"", fmt.Sprintf("searches for an afterId %d, of one principal %s; dead letters of a principal %v bytes, %d in 30 days; refused tokens of an address %v, checked %v", f.IDSearches, or(f.PrincipalIDSearches, "half of them"), f.DeadLetterBytes, f.DeadLetterShare, f.BadTokens, f.TokenChecks)},
		{"", fmt.Sprintf("delayed events %d, of one principal %d, up to %v ahead", f.Delayed, f.PrincipalDelayed, f.MaxDelay)},
		{"", fmt.Sprintf("auth within %v, ping after %v, pong within %v; %d clients a second come back", f.AuthTimeout, f.PingInterval, f.PongTimeout, f.ReturnRate)},
	}
}
