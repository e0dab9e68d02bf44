package facade

import (
	"fmt"
	"time"
)

// NoLimit disables a limit whose comment allows it.
const NoLimit = -1

// Bounds of Limits.Lease, from the protocol.
const (
	minLease = time.Second
	maxLease = 12 * time.Hour
)

// Limits bound what a Server holds and how long it waits. Zero fields take their defaults. Reaching
// a limit is counted by Observer.LimitReached under the name in parentheses.
//
// The bus limits new topics (jetstream.Limits.TopicsPerClient), for each principal, over all its
// connections and HTTP requests.
type Limits struct {
	// Connections ("connections") is the most concurrent WebSocket connections. Beyond the limit,
	// upgrades get 503. Defaults to 20,000.
	Connections int
	// Unauthenticated ("unauthenticated") is the most connections without a successful AUTH. One
	// more closes the oldest of them, as AuthTimeout would. Defaults to a quarter of Connections.
	Unauthenticated int
	// Requests ("requests") is the most concurrent HTTP requests. Beyond the limit, requests get
	// 503. Defaults to 512.
	Requests int
	// PrincipalRequests ("principal_requests") is the most concurrent HTTP requests of one
	// principal, so that no principal shuts out all others. Beyond the limit, requests get
	// rate_limited. A request counts until its answer has been read. Clients with the same static
	// token are one principal. Defaults to a quarter of Requests; may be NoLimit.
	PrincipalRequests int
	// Subscriptions ("subscriptions") is the most subscriptions of one connection. Beyond the
	// limit, SUBSCRIBE gets overloaded. Defaults to 256.
	Subscriptions int
	// CountOwnToken applies the quotas of new groups (jetstream.Limits.GroupsPerClient and
	// ClientGroups) to clients with a static token, too. By default these clients make as many
	// groups as the topics have room for.
	CountOwnToken bool
	// Joins ("joins") is the most SUBSCRIBEs that are carried out concurrently, over all
	// connections, and PrincipalJoins the most of one principal. Each asks NATS several times.
	// Further ones wait, and get overloaded after 10 s. Default to 256, and to a 32nd of Joins;
	// PrincipalJoins may be NoLimit.
	Joins, PrincipalJoins int
	// PrincipalHeld ("principal_held") is the most events that one principal may hold unsettled
	// through this hub, over all its connections. Beyond the limit, delivery to the principal
	// waits, and other members get the events. Clients with the same static token are one
	// principal. Defaults to 50,000; may be NoLimit: each subscription then holds up to its
	// maxInFlight.
	PrincipalHeld int
	// PrincipalUnread ("principal_unread") is the most events that this hub has fetched for one
	// principal and not written to a client, those included that it gives back. Beyond the limit,
	// subscriptions that have such events fetch no more. Others may exceed the limit by up to 100
	// events each, and beyond twice the limit by one event each. When clients end or are lost, the
	// hub gives back no more than twice the limit in a second. Defaults to 10,000; may be NoLimit.
	PrincipalUnread int
	// Lease is the longest lease: ackTimeoutMs, MODACK and the delay of a NACK are cut to it.
	// Defaults to 12 h, which is also the most; at least 1 s.
	Lease time.Duration
	// Operations ("operations") is the most frames of one connection that wait for the event store,
	// or for one another. These are SUBSCRIBE, UNSUBSCRIBE, PAUSE, the first PUBLISH to a topic,
	// and frames that must come after one of them. Beyond the limit, frames are not read until one
	// has ended. Defaults to 64.
	Operations int
	// Streams ("streams") is the most concurrent streams of server-sent events (GET /subscribe).
	// Beyond the limit, requests get overloaded. PrincipalStreams ("principal_streams") is the most
	// of one principal; beyond it, requests get rate_limited. A stream does not count among
	// Requests. Default to 4,096, and to a quarter of Streams; PrincipalStreams may be NoLimit.
	Streams, PrincipalStreams int
	// Pulls ("pulls") is the most pulls that wait for events, or whose events are not all settled.
	// Beyond the limit, requests get overloaded. PrincipalPulls ("principal_pulls") is the most of
	// one principal; beyond it, requests get rate_limited. A pull that waits does not count among
	// Requests. Default to 4,096, and to a quarter of Pulls; PrincipalPulls may be NoLimit.
	Pulls, PrincipalPulls int
	// Tails ("tails") is the most topics that are broadcast. Beyond the limit, a SUBSCRIBE of a
	// broadcast gets overloaded, unless nobody listens to one of the topics any more.
	// PrincipalTails ("principal_tails") is the most topics of which one principal was the first to
	// listen. Beyond the limit, the principal gets rate_limited. Default to 1,024, and to a quarter
	// of Tails; PrincipalTails may be NoLimit.
	Tails, PrincipalTails int
	// RingFrames and RingBytes ("ring") are how many of the newest events of a broadcast topic the
	// hub keeps, and how many bytes of them. A socket that is further behind gets what its
	// opts.slow says. RingTotal is how many bytes all topics have together; beyond the limit, a
	// topic keeps less, but the newest event always. Default to 8,192, 16 MiB and 256 MiB.
	RingFrames, RingBytes, RingTotal int
	// CatchUp ("catch_up") is how many events of the stream a broadcast may begin behind the end.
	// Beyond the limit, the broadcast begins at the end, and the client is told (too_far). Defaults
	// to 100,000.
	CatchUp int
	// CatchUpRate and CatchUpBurst ("catch_up_rate") are how many events a second, and how many at
	// once, the hub reads from the stream for all broadcasts of one principal that are behind the
	// newest events. Beyond the limit, they are read more slowly. Clients with the same static
	// token are one principal. Default to 50,000 and 100,000; CatchUpRate may be NoLimit.
	CatchUpRate, CatchUpBurst int
	// Presence ("presence") is how many names of clients the hub keeps for presence, of all topics
	// and all hubs. A name counts once for each topic and hub; further ones are left out. Defaults
	// to 100,000.
	Presence int
	// Frame ("frame") is the largest message in bytes that is read whole. A larger message is
	// skipped and answered without its corr. Defaults to 4 MiB, or twice the bus's payload limit if
	// that is more, so that a payload over the bus's limit can be answered with its corr.
	Frame int
	// Skip ("skip") is the largest message in bytes that is skipped. A larger one closes the
	// connection. Defaults to 64 MiB, or Frame if that is more.
	Skip int
	// InboundBytes ("inbound_bytes") is how many bytes of incomplete messages the hub holds over
	// all connections, not counting the first 64 KiB of each message. Beyond the limit, a message
	// larger than 64 KiB is skipped and gets overloaded, without a corr. Defaults to 256 MiB.
	InboundBytes int
	// OutboundBytes ("outbound_bytes") is how many bytes of replies may wait for a connection
	// before the connection's frames are no longer read. Defaults to 1 MiB.
	OutboundBytes int
	// Faults ("faults") is how many consecutive frames that cannot be read or understood a
	// connection may send. Beyond the limit, the connection is closed. Defaults to 100.
	Faults int
	// AuthTries ("auth_tries") is how many consecutive AUTH may be refused. Beyond the limit, the
	// connection is closed. Defaults to 10.
	AuthTries int
	// FrameRate ("frame_rate") is how many frames a second a connection may send, and FrameBurst
	// how many at once. ACK, NACK and MODACK do not count. A frame beyond the limit is answered
	// with rate_limited and has no effect; the connection lives on. Pings, pongs, and parts of
	// messages of less than 128 bytes are counted separately ("part_rate"), with the same numbers:
	// beyond them the connection is read more slowly. Defaults to 10,000 and 2,000; FrameRate may
	// be NoLimit.
	FrameRate, FrameBurst int
	// SettleRate ("settle_rate") is how many ACK, NACK and MODACK a second a connection may send,
	// and SettleBurst how many at once. An ACK counts once per id. Beyond the limit, later frames
	// are read more slowly, and none is refused: a refusal would cost the client its leases. Over
	// HTTP, the same numbers hold for all requests of a principal together, and requests wait.
	// Defaults to 200,000 and 20,000; SettleRate may be NoLimit.
	SettleRate, SettleBurst int
	// TopicRate ("topic_rate") is how many events a second all clients of this hub together may
	// publish to a topic, and TopicBurst how many at once. A publish beyond the limit gets
	// rate_limited. TopicRate defaults to NoLimit, and TopicBurst to TopicRate.
	TopicRate, TopicBurst int
	// PrincipalRate ("principal_rate") is how many events a second one principal may publish
	// through this hub, over all its connections and HTTP requests, and PrincipalBurst how many at
	// once. A publish beyond the limit gets rate_limited. Clients with the same static token are
	// one principal. PrincipalRate defaults to NoLimit, and PrincipalBurst to PrincipalRate.
	PrincipalRate, PrincipalBurst int
	// Quotas ("quotas") is the most topics, and the most principals, whose quota is partly used at
	// a time. Beyond the limit, further ones share one quota. Defaults to 50,000.
	Quotas int
	// PrincipalConnections ("principal_connections") is the most authenticated connections of one
	// principal, so that no principal locks all others out. Beyond the limit, AUTH gets overloaded,
	// and the connection may try again until AuthTimeout closes it: closing it at once would only
	// bring the client back sooner. Clients with the same static token are one principal. Defaults
	// to three quarters of Connections; may be NoLimit.
	PrincipalConnections int
	// Bearers ("bearers") is the most tokens of HTTP requests that are cached with their policies,
	// so that not every request is verified. Beyond the limit, a cached token is evicted. Defaults
	// to 1,024.
	Bearers int
	// BadTokenRate and BadTokenBurst ("bad_tokens") are how many tokens from one address (of IPv6,
	// its first 64 bits) are refused a second, over WebSocket, HTTP and on the operations port, and
	// how many at once. Beyond the limit, refusals wait for their turn, for up to 5 s and at most
	// 256 of an address.
	// Beyond that, the client gets rate_limited, and its connection ends. Valid tokens do not wait.
	// Default to 100 and 200; BadTokenRate may be NoLimit.
	BadTokenRate, BadTokenBurst int
	// TokenCheckRate and TokenCheckBurst ("token_checks") are how many bad tokens from one address
	// are checked a second, those of ended connections included, and how many at once. Beyond the
	// limit, the address gets rate_limited for all tokens that are not known, unseen; a connection
	// that is authenticated may still renew its token. A client needs a new connection for almost
	// every check beyond BadTokenRate, so the limit is far above what clients do by mistake.
	// Default to 10,000 and 20,000; TokenCheckRate may be NoLimit.
	TokenCheckRate, TokenCheckBurst int
	// OutboxRate and OutboxBurst ("outbox_rate") are how many bytes one principal may post to the
	// outbox a second, and how many at once. Each post counts 512 bytes besides its payload. A post
	// beyond the limit gets rate_limited. Default to 4 MiB and 32 MiB; OutboxRate may be NoLimit.
	OutboxRate, OutboxBurst int
	// KnownTokens ("known_tokens") is the most valid tokens that are remembered, by their hash, so
	// that they are checked beyond TokenCheckRate, too. Beyond the limit, any of them is forgotten.
	// Defaults to 50,000.
	KnownTokens int
	// Window ("window") is how many lines of one NDJSON request may be in flight. Beyond the limit,
	// the request is not read on. Defaults to 1,024.
	Window int
	// Pages ("pages") is the most pages of latest records (GET /snap/{topic}) that are read from
	// the bus concurrently. Further requests wait, and get overloaded after 10 s. A principal with
	// more than 64 requests gets overloaded at once. Defaults to 8.
	Pages int
	// PrincipalPages is the most pages that are read concurrently for one principal. Further
	// requests of the principal wait, and leave the other places free. Defaults to a quarter of
	// Pages; may be NoLimit.
	PrincipalPages int
	// PageBytes ("page_bytes") is how many bytes of payloads, keys and headers a page of latest
	// records may have. A larger page ends early, after at least one record. A request for given
	// keys that have more gets bad_options. Defaults to 16 MiB.
	PageBytes int
	// PageTotal ("page_total") is how many bytes of pages, and of answers to pulls, the hub holds
	// that clients have not taken yet. A page that is being read counts with PageBytes. Beyond the
	// limit, requests for pages get overloaded, and nothing is read for them. Must not be less than
	// PageBytes. Defaults to 256 MiB, or four times PageBytes if that is more.
	PageTotal int
	// PrincipalPageTotal ("principal_page_total") is how many of these bytes one principal may use.
	// Beyond the limit, the principal's requests for pages get overloaded. Must not be less than
	// PageBytes. Defaults to half of PageTotal; may be NoLimit.
	PrincipalPageTotal int
	// Exports ("exports") is the most replays and exports (GET /replay, GET /export) that are read
	// from the bus and sent concurrently. Each holds up to 2 MiB of events, however slowly its
	// client reads. Further requests wait, and get overloaded after 10 s. A principal with more
	// than 64 requests gets overloaded at once. Defaults to 32.
	Exports int
	// PrincipalExports is the most replays and exports of one principal at a time. Further requests
	// of the principal wait, and leave the other places free. Defaults to a quarter of Exports; may
	// be NoLimit.
	PrincipalExports int
	// AuthTimeout is how long a connection may stay without a successful AUTH. Defaults to 10 s.
	AuthTimeout time.Duration
	// StreamBeat is how long a stream of server-sent events may be silent before the hub sends a
	// comment. Proxies close what is silent for longer. Defaults to 15 s.
	StreamBeat time.Duration
	// PingInterval is how long a connection may be silent before it is pinged. Defaults to 30 s.
	PingInterval time.Duration
	// PongTimeout is how long a pinged peer may stay silent. Beyond the limit, the connection is
	// closed. Defaults to 10 s.
	PongTimeout time.Duration
	// WriteStall ("write_stall") is how long a peer may take no byte of what is sent. Beyond the
	// limit, the connection is closed as a slow consumer. The time begins again with each byte that
	// the kernel takes; over TLS, with each 16 KiB. A peer that reads slowly is not closed.
	// Defaults to 15 s.
	WriteStall time.Duration
	// CloseGrace is how long a connection that is being closed has for its queued messages and the
	// closing handshake. Defaults to 3 s.
	CloseGrace time.Duration
	// ReturnRate is how many clients a second a hub that ends asks to come back: clients with the
	// capability retry_after are told a random pause of up to the number of connections divided by
	// ReturnRate, and of at most one minute. Defaults to 1,000; may be NoLimit.
	ReturnRate int
	// BodyStall is how long an HTTP client may send no byte of a body. Beyond the limit, the
	// request ends. Defaults to 30 s.
	BodyStall time.Duration
	// BodyRate ("body_rate") is how many bytes a second an HTTP client must send on average, of a
	// body or of a started line of NDJSON, in addition to BodyStall. Below the limit, the request
	// ends. Defaults to 1,024; may be NoLimit.
	BodyRate int
	// AnswerStall is how long an HTTP client may take to read 16 KiB of an answer. Beyond the
	// limit, the connection is closed. Defaults to 5 s.
	AnswerStall time.Duration
}

// validate fills in defaults and refuses limits that make no sense.
func (l *Limits) validate(maxPayload int) error {
	for _, f := range []struct {
		name string
		v    *int
		def  int
	}{
		{"Connections", &l.Connections, 20_000},
		{"Requests", &l.Requests, 512},
		{"Subscriptions", &l.Subscriptions, 256},
		{"Operations", &l.Operations, 64},
		{"Joins", &l.Joins, 256},
		{"Streams", &l.Streams, 4096},
		{"Pulls", &l.Pulls, 4096},
		{"Tails", &l.Tails, 1024},
		{"RingFrames", &l.RingFrames, 8192},
		{"RingBytes", &l.RingBytes, 16 << 20},
		{"RingTotal", &l.RingTotal, max(256<<20, l.RingBytes)},
		{"CatchUp", &l.CatchUp, 100_000},
		{"Presence", &l.Presence, 100_000},
		{"Frame", &l.Frame, max(4<<20, 2*maxPayload)},
		{"Skip", &l.Skip, max(64<<20, l.Frame)},
		{"InboundBytes", &l.InboundBytes, 256 << 20},
		{"OutboundBytes", &l.OutboundBytes, 1 << 20},
		{"Faults", &l.Faults, 100},
		{"AuthTries", &l.AuthTries, 10},
		{"FrameBurst", &l.FrameBurst, 2_000},
		{"SettleBurst", &l.SettleBurst, 20_000},
		{"TopicBurst", &l.TopicBurst, max(l.TopicRate, 0)},
		{"PrincipalBurst", &l.PrincipalBurst, max(l.PrincipalRate, 0)},
		{"Quotas", &l.Quotas, 50_000},
		{"Bearers", &l.Bearers, 1024},
		{"BadTokenBurst", &l.BadTokenBurst, 200},
		{"TokenCheckBurst", &l.TokenCheckBurst, 20_000},
		{"OutboxBurst", &l.OutboxBurst, 32 << 20},
		{"CatchUpBurst", &l.CatchUpBurst, 100_000},
		{"KnownTokens", &l.KnownTokens, 50_000},
		{"Window", &l.Window, 1024},
		{"Pages", &l.Pages, 8},
		{"Exports", &l.Exports, 32},
		{"PageBytes", &l.PageBytes, 16 << 20},
		{"PageTotal", &l.PageTotal, max(256<<20, 4*l.PageBytes)},
	} {
		if err := fill(f.name, f.v, f.def); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name string
		v    *int
		def  int
	}{
		{"FrameRate", &l.FrameRate, 10_000},
		{"SettleRate", &l.SettleRate, 200_000},
		{"TopicRate", &l.TopicRate, NoLimit},
		{"PrincipalRate", &l.PrincipalRate, NoLimit},
		{"BadTokenRate", &l.BadTokenRate, 100},
		{"TokenCheckRate", &l.TokenCheckRate, 10_000},
		{"OutboxRate", &l.OutboxRate, 4 << 20},
		{"CatchUpRate", &l.CatchUpRate, 50_000},
		{"PrincipalHeld", &l.PrincipalHeld, 50_000},
		{"PrincipalUnread", &l.PrincipalUnread, 10_000},
		{"PrincipalJoins", &l.PrincipalJoins, (l.Joins + 31) / 32},
		{"BodyRate", &l.BodyRate, 1024},
		{"ReturnRate", &l.ReturnRate, 1000},
		{"Unauthenticated", &l.Unauthenticated, (l.Connections + 3) / 4},
		{"PrincipalPages", &l.PrincipalPages, (l.Pages + 3) / 4},
		{"PrincipalExports", &l.PrincipalExports, (l.Exports + 3) / 4},
		{"PrincipalPageTotal", &l.PrincipalPageTotal, (l.PageTotal + 1) / 2},
		{"PrincipalStreams", &l.PrincipalStreams, (l.Streams + 3) / 4},
		{"PrincipalTails", &l.PrincipalTails, (l.Tails + 3) / 4},
		{"PrincipalPulls", &l.PrincipalPulls, (l.Pulls + 3) / 4},
		{"PrincipalRequests", &l.PrincipalRequests, (l.Requests + 3) / 4},
		{"PrincipalConnections", &l.PrincipalConnections, (3*l.Connections + 3) / 4},
	} {
		if *f.v == NoLimit {
			continue
		}
		if err := fill(f.name, f.v, f.def); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"Lease", &l.Lease, maxLease},
		{"AuthTimeout", &l.AuthTimeout, 10 * time.Second},
		{"StreamBeat", &l.StreamBeat, 15 * time.Second},
		{"PingInterval", &l.PingInterval, 30 * time.Second},
		{"PongTimeout", &l.PongTimeout, 10 * time.Second},
		{"WriteStall", &l.WriteStall, 15 * time.Second},
		{"CloseGrace", &l.CloseGrace, 3 * time.Second},
		{"BodyStall", &l.BodyStall, 30 * time.Second},
		{"AnswerStall", &l.AnswerStall, 5 * time.Second},
	} {
		if err := fill(f.name, f.v, f.def); err != nil {
			return err
		}
	}
	if l.Lease < minLease || l.Lease > maxLease {
		return fmt.Errorf("facade: Lease must be %v to %v, it is %v", minLease, maxLease, l.Lease)
	}
	if l.PageTotal < l.PageBytes || l.PrincipalPageTotal != NoLimit && l.PrincipalPageTotal < l.PageBytes {
		return fmt.Errorf("facade: PageTotal and PrincipalPageTotal must be at least PageBytes (%d), or no page could be read", l.PageBytes)
	}
	return nil
}

func fill[T ~int | ~int64](name string, v *T, def T) error {
	if *v < 0 {
		return fmt.Errorf("facade: %s must not be negative; got %d", name, *v)
	}
	if *v == 0 {
		*v = def
	}
	return nil
}

// orAll returns the limit of one principal, which is that of all if it is NoLimit.
func orAll(own, all int) int {
	if own == NoLimit {
		return all
	}
	return own
}
