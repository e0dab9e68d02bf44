package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// limitFlags bound what clients may do. Reaching one is counted in eventhub_limit_reached_total.
type limitFlags struct {
	Connections          int `env:"CONNECTIONS" default:"20000" help:"WebSocket connections."`
	PrincipalConnections int `env:"PRINCIPAL_CONNECTIONS" placeholder:"N" help:"WebSocket connections of one principal: of the subject of a JWT, or of the hub's own token. Default: three quarters of all."`
	Unauthenticated      int `env:"UNAUTHENTICATED" placeholder:"N" help:"WebSocket connections without AUTH. Beyond it the oldest is closed. Default: a quarter of all."`
	WaitingConnections   int `env:"WAITING_CONNECTIONS" default:"2048" help:"Connections to a port that have sent no request yet, or are idle between two. Beyond it the oldest is closed."`
	Requests             int `env:"REQUESTS" default:"512" help:"HTTP requests at a time."`
	Subscriptions        int `env:"SUBSCRIPTIONS" default:"256" help:"Subscriptions of one connection."`
	Operations           int `env:"OPERATIONS" default:"64" help:"Frames of one connection that wait for NATS, or for one another, at a time."`
	Topics               int `env:"TOPICS" default:"10000" help:"Topics that this hub knows."`
	NewTopics            int `env:"NEW_TOPICS" default:"100" help:"Topics that one principal may bring into being at once; after that one every 10s."`
	Payload              int `env:"PAYLOAD" default:"1048576" help:"Bytes of a payload; fewer where NATS takes fewer."`
	Frame                int `env:"FRAME" placeholder:"BYTES" help:"Bytes of a frame that is read whole. Default: 4 MiB, or twice the payload."`
	InboundBytes         int `env:"INBOUND_BYTES" default:"268435456" help:"Bytes of frames that have begun to come and are not whole, over all connections."`
	HeldBytes            int `env:"HELD_BYTES" default:"134217728" help:"Bytes of events that were fetched and not handed out yet, over all subscriptions."`
	Pages                int `env:"PAGES" default:"8" help:"Pages of latest records that are read at a time; others wait."`
	PageBytes            int `env:"PAGE_BYTES" default:"16777216" help:"Bytes of a page of latest records, after which it ends early."`
	PageTotal            int `env:"PAGE_TOTAL" placeholder:"BYTES" help:"Bytes of pages that clients have not taken yet. Default: 256 MiB, or twice a page."`

	OutboxPending int `env:"OUTBOX_PENDING" default:"1000000" help:"Events that wait in the hub's own outbox, or are parked there. Beyond it POST /outbox is refused."`

	Frames             quota `env:"FRAMES" default:"10000/2000" placeholder:"RATE/BURST" help:"Frames of one connection but for ACK, NACK and MODACK: so many a second, and so many at once."`
	Settles            quota `env:"SETTLES" default:"200000/20000" placeholder:"RATE/BURST" help:"ACK, NACK and MODACK of one connection."`
	TopicPublishes     quota `env:"TOPIC_PUBLISHES" default:"off" placeholder:"RATE/BURST" help:"Publishes to one topic, through this hub; or off."`
	PrincipalPublishes quota `env:"PRINCIPAL_PUBLISHES" default:"off" placeholder:"RATE/BURST" help:"Publishes of one principal, through this hub; or off."`

	AuthTimeout  time.Duration `env:"AUTH_TIMEOUT" default:"10s" help:"How long a connection may be without AUTH."`
	PingInterval time.Duration `env:"PING_INTERVAL" default:"30s" help:"How long a connection may be silent before it is pinged."`
	PongTimeout  time.Duration `env:"PONG_TIMEOUT" default:"10s" help:"How long a pinged client may stay silent."`
}

// validate finds limits that would let nothing through.
func (f limitFlags) validate() (faults []error) {
	bad := func(name string, value any) {
		faults = append(faults, fmt.Errorf("limit %v: it must be positive (--limit-%s, EVENTHUB_LIMIT_%s)",
			value, name, strings.ToUpper(strings.ReplaceAll(name, "-", "_"))))
	}
	for _, l := range []struct {
		name         string
		value, least int
	}{
		{"connections", f.Connections, 1},
		{"principal-connections", f.PrincipalConnections, 0}, // 0 is the default, as for the frame
		{"unauthenticated", f.Unauthenticated, 0},
		{"inbound-bytes", f.InboundBytes, 1},
		{"held-bytes", f.HeldBytes, 1},
		{"pages", f.Pages, 1},
		{"page-bytes", f.PageBytes, 1},
		{"page-total", f.PageTotal, 0},
		{"waiting-connections", f.WaitingConnections, 1},
		{"requests", f.Requests, 1},
		{"subscriptions", f.Subscriptions, 1},
		{"operations", f.Operations, 1},
		{"topics", f.Topics, 1},
		{"new-topics", f.NewTopics, 1},
		{"payload", f.Payload, 1},
		{"frame", f.Frame, 0},
		{"outbox-pending", f.OutboxPending, 1},
	} {
		if l.value < l.least {
			bad(l.name, l.value)
		}
	}
	for _, l := range []struct {
		name  string
		value time.Duration
	}{
		{"auth-timeout", f.AuthTimeout},
		{"ping-interval", f.PingInterval},
		{"pong-timeout", f.PongTimeout},
	} {
		if l.value <= 0 {
			bad(l.name, l.value)
		}
	}
	return faults
}

// maxQuota bounds both numbers of a quota.
const maxQuota = 1_000_000_000

// quota is how many of something are let through: so many a second on average, and so many at once. The zero quota is off.
type quota struct{ rate, burst int }

// UnmarshalText reads RATE/BURST, RATE for the same burst, or off.
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
		return errors.New("give RATE/BURST, such as 1000/200 for so many a second and so many at once, or off")
	}
	return nil
}

// String is what UnmarshalText reads.
func (q quota) String() string {
	if q == (quota{}) {
		return "off"
	}
	return strconv.Itoa(q.rate) + "/" + strconv.Itoa(q.burst)
}

// limits are the two as the facade wants them.
func (q quota) limits() (rate, burst int) {
	if q == (quota{}) {
		return facade.NoLimit, 0
	}
	return q.rate, q.burst
}

// facade returns the limits of the side that clients see.
func (f limitFlags) facade() facade.Limits {
	l := facade.Limits{
		Connections: f.Connections, PrincipalConnections: f.PrincipalConnections,
		Unauthenticated: f.Unauthenticated, InboundBytes: f.InboundBytes,
		Requests: f.Requests, Subscriptions: f.Subscriptions, Operations: f.Operations, Frame: f.Frame,
		Pages: f.Pages, PageBytes: f.PageBytes, PageTotal: f.PageTotal,
		AuthTimeout: f.AuthTimeout, PingInterval: f.PingInterval, PongTimeout: f.PongTimeout,
	}
	l.FrameRate, l.FrameBurst = f.Frames.limits()
	l.SettleRate, l.SettleBurst = f.Settles.limits()
	l.TopicRate, l.TopicBurst = f.TopicPublishes.limits()
	l.PrincipalRate, l.PrincipalBurst = f.PrincipalPublishes.limits()
	return l
}

// bus returns the limits of the bus.
func (f limitFlags) bus() jetstream.Limits {
	return jetstream.Limits{Topics: f.Topics, TopicsPerClient: f.NewTopics, MaxPayload: f.Payload, HeldTotal: f.HeldBytes}
}

// lines shows the limits.
func (f limitFlags) lines() [][2]string {
	or := func(n int, byDefault string) string {
		if n == 0 {
			return byDefault
		}
		return strconv.Itoa(n)
	}
	return [][2]string{
		{"limits", fmt.Sprintf("connections %d, of one principal %s, without AUTH %s, waiting %d; requests %d; subscriptions %d, operations %d; waiting in the outbox %d", f.Connections, or(f.PrincipalConnections, "three quarters of them"), or(f.Unauthenticated, "a quarter of them"), f.WaitingConnections, f.Requests, f.Subscriptions, f.Operations, f.OutboxPending)},
		{"", fmt.Sprintf("frames %v; settles %v; publishes to a topic %v, of a principal %v", f.Frames, f.Settles, f.TopicPublishes, f.PrincipalPublishes)},
		{"", fmt.Sprintf("topics %d, new ones %d; payload %d bytes; frame %s; unfinished frames %d bytes, events held %d bytes; %d pages of %d bytes at a time", f.Topics, f.NewTopics, f.Payload, or(f.Frame, "4 MiB or twice the payload"), f.InboundBytes, f.HeldBytes, f.Pages, f.PageBytes)},
		{"", fmt.Sprintf("auth within %v, ping after %v, pong within %v", f.AuthTimeout, f.PingInterval, f.PongTimeout)},
	}
}
