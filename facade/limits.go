package facade

import (
	"fmt"
	"time"
)

// NoLimit switches a limit off where its comment says that this can be done.
const NoLimit = -1

// Limits bound what a Server holds and how long it waits. Zero fields take the default. Reaching one is counted by
// Observer.LimitReached under the name given here.
//
// New topics are limited by the bus (jetstream.Limits.TopicsPerClient), for each principal, over all its connections and
// HTTP requests.
type Limits struct {
	// Connections ("connections") is the most WebSocket connections at a time: default 20,000. Beyond it, upgrades
	// get 503.
	Connections int
	// Unauthenticated ("unauthenticated") is the most connections without a successful AUTH: default a quarter of
	// Connections. One more closes the oldest of them, as AuthTimeout would.
	Unauthenticated int
	// Requests ("requests") is the most HTTP requests served at a time: default 512. Beyond it, they get 503.
	Requests int
	// PrincipalRequests ("principal_requests") is the most HTTP requests of one principal served at
	// a time: default a quarter of Requests, so that none shuts all others out; NoLimit for any
	// number. Beyond it, they get rate_limited. A request counts until its answer has been read, or
	// given up after AnswerStall. Clients with the same static token are one principal.
	PrincipalRequests int
	// Subscriptions ("subscriptions") is the most subscriptions of one connection: default 256. Beyond it, SUBSCRIBE
	// gets overloaded.
	Subscriptions int
	// Operations ("operations") is the most frames of one connection that wait for the event store
	// at a time, or for one another: default 64. They are SUBSCRIBE, UNSUBSCRIBE, PAUSE, the first
	// PUBLISH to a topic, and frames that must come after one of these. Beyond it, frames are not
	// read until one has ended.
	Operations int
	// Frame ("frame") is the largest message in bytes that is read whole: default 4 MiB, and at least twice the bus's
	// payload limit, so that a payload over that limit can be answered with its corr. A larger message is skipped and
	// answered without one.
	Frame int
	// Skip ("skip") is the largest message in bytes that is skipped: default 64 MiB. Beyond it, the connection is
	// closed.
	Skip int
	// InboundBytes ("inbound_bytes") is how many bytes of messages that are not complete yet the hub holds, over all
	// connections, beyond the first 64 KiB of each: default 256 MiB. Beyond it, a message that is larger is skipped and
	// gets overloaded, without a corr.
	InboundBytes int
	// OutboundBytes ("outbound_bytes") is how many bytes of replies wait for a connection before its frames are not
	// read any more: default 1 MiB.
	OutboundBytes int
	// Faults ("faults") is how many frames in a row that cannot be read or understood a connection may send: default
	// 100. Beyond it, the connection is closed.
	Faults int
	// AuthTries ("auth_tries") is how many AUTH in a row may be refused: default 10. Beyond it, the connection is
	// closed.
	AuthTries int
	// FrameRate ("frame_rate") is how many frames a second a connection may send, and FrameBurst how many at once: default
	// 10,000 and 2,000, NoLimit for any number. ACK, NACK and MODACK are not among them. A frame beyond it is answered
	// with rate_limited and has no effect; the connection lives on. Pings, pongs, and parts of messages of less than 128 bytes,
	// are counted apart ("part_rate"), with the same numbers: beyond them the connection is not read until the time has come.
	FrameRate, FrameBurst int
	// SettleRate ("settle_rate") is how many ACK, NACK and MODACK a second a connection may send, and SettleBurst how many
	// at once: default 200,000 and 20,000, NoLimit for any number. An ACK of many ids counts as many. Beyond it the frames
	// behind are not read until the time has come: none is refused, for that would cost the client its leases.
	SettleRate, SettleBurst int
	// TopicRate ("topic_rate") is how many events a second all clients of this hub together may publish to a topic, and
	// TopicBurst how many at once: default any number (NoLimit), and as many at once as in a second. A publish beyond it
	// gets rate_limited.
	TopicRate, TopicBurst int
	// PrincipalRate ("principal_rate") is how many events a second one principal may publish through this hub, over all
	// its connections and HTTP requests, and PrincipalBurst how many at once: default any number (NoLimit), and as many at
	// once as in a second. A publish beyond it gets rate_limited. Clients with the same static token are one principal.
	PrincipalRate, PrincipalBurst int
	// Quotas ("quotas") is the most topics, and the most principals, that may be short of their TopicRate or PrincipalRate
	// at a time: default 50,000. Beyond it, further ones share one quota.
	Quotas int
	// PrincipalConnections ("principal_connections") is the most connections that one principal may have authenticated at
	// a time: default three quarters of Connections, so that none shuts all others out; NoLimit for any number. Beyond it,
	// AUTH gets overloaded, and the connection may try again until AuthTimeout closes it: to close it at once would only
	// bring the client back sooner. Clients with the same static token are one principal.
	PrincipalConnections int
	// Bearers ("bearers") is the most tokens of HTTP requests that are remembered along with their policies, so that not
	// every request is verified: default 1,024. Beyond it, one is forgotten for another.
	Bearers int
	// Window ("window") is how many lines of one NDJSON request are in flight: default 1,024. Beyond it, the request
	// is not read any more.
	Window int
	// Pages ("pages") is the most pages of latest records (GET /snap/{topic}) that are read from the
	// bus at a time: default 8. Further ones wait, and get overloaded after 10 s; more than 64 of
	// one principal get overloaded at once.
	Pages int
	// PrincipalPages is the most pages of one principal that are read at a time: default a quarter
	// of Pages. Further ones wait as others do, and leave the other places free.
	PrincipalPages int
	// PageBytes ("page_bytes") is how many bytes of payloads, keys and headers a page of latest records has before it ends
	// early, after one record at least: default 16 MiB. A request for certain keys that have more gets bad_options.
	PageBytes int
	// PageTotal ("page_total") is how many such bytes of pages that clients have not taken yet the
	// hub holds: default 256 MiB, or 4 times PageBytes. A page that is being read counts with
	// PageBytes. Beyond it, pages get overloaded, and nothing is read.
	PageTotal int
	// PrincipalPageTotal ("principal_page_total") is how many of these bytes are for one principal:
	// default half of PageTotal. Beyond it, its pages get overloaded, and nothing is read.
	PrincipalPageTotal int
	// AuthTimeout is how long a connection may stay without a successful AUTH: default 10 s.
	AuthTimeout time.Duration
	// PingInterval is how long a connection may be silent before it is pinged: default 30 s.
	PingInterval time.Duration
	// PongTimeout is how long a pinged peer may stay silent: default 10 s. Beyond it, the connection is closed.
	PongTimeout time.Duration
	// WriteStall ("write_stall") is how long a peer may take no byte of what is sent: default 15 s.
	// Beyond it, the connection is closed as a slow consumer. The time counts from the last byte
	// that the kernel took, and begins anew with each; over TLS, with each 16 KiB. A peer that
	// reads slowly is not closed.
	WriteStall time.Duration
	// CloseGrace is how long a connection that is being closed has to take what is queued for it, and for the closing
	// handshake: default 3 s.
	CloseGrace time.Duration
	// BodyStall is how long an HTTP client may send no byte of a body: default 30 s. Beyond it, the
	// request ends.
	BodyStall time.Duration
	// BodyRate ("body_rate") is how many bytes a second an HTTP client must send of a body, or of a
	// line of NDJSON that has begun, on average and after the first BodyStall: default 1,024;
	// NoLimit for any number. Below it, the request ends.
	BodyRate int
	// AnswerStall is how long an HTTP client may take no byte of an answer: default 5 s. Beyond it,
	// the connection is closed.
	AnswerStall time.Duration
}

// validate sets what is left open and refuses what makes no sense.
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
		{"Window", &l.Window, 1024},
		{"Pages", &l.Pages, 8},
		{"PageBytes", &l.PageBytes, 16 << 20},
		{"PageTotal", &l.PageTotal, max(256<<20, 4*l.PageBytes)},
		{"PrincipalPages", &l.PrincipalPages, (l.Pages + 3) / 4},
		{"PrincipalPageTotal", &l.PrincipalPageTotal, (l.PageTotal + 1) / 2},
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
		{"BodyRate", &l.BodyRate, 1024},
		{"Unauthenticated", &l.Unauthenticated, (l.Connections + 3) / 4},
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
		{"AuthTimeout", &l.AuthTimeout, 10 * time.Second},
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
	if least := min(l.PageTotal, l.PrincipalPageTotal); least < l.PageBytes {
		return fmt.Errorf("facade: PageTotal and PrincipalPageTotal must not be less than PageBytes (%d): no page could be read", l.PageBytes)
	}
	return nil
}

func fill[T ~int | ~int64](name string, v *T, def T) error {
	if *v < 0 {
		return fmt.Errorf("facade: %s must not be negative, it is %d", name, *v)
	}
	if *v == 0 {
		*v = def
	}
	return nil
}
