// Package hubtest gives each test a complete hub of its own, in the process of the test, with
// nothing on disk.
//
//	func TestOrders(t *testing.T) {
//		hub := hubtest.New(t)
//		shop := NewShop(hub.WebSocket, hub.Token) // what is tested
//		...
//	}
//
// A hub is ready in some 50 ms and ends with its test, so each test can have a hub of its own, and
// tests may run in parallel. The hub behaves like `eventhub serve`, without TLS, the operations
// port, the outbox, /openapi.yaml and /asyncapi.yaml.
package hubtest

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net/http/httptest"
	"testing"
	"time"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topics"
	eventhub "eventhub/sdk/go"
	"eventhub/sdk/go/wire"
)

// dialWait bounds Hub.Dial.
const dialWait = 10 * time.Second

// Hub is a running hub.
type Hub struct {
	// WebSocket and HTTP are where clients reach the hub: ws://HOST:PORT and http://HOST:PORT.
	WebSocket string
	HTTP      string
	// NATS is the address for native NATS clients, which authenticate with Token. It is "" for a
	// hub on another NATS (Bus, On).
	NATS string
	// Token grants full access.
	Token string
	// Bus is the hub's bus, so that a test can publish, consume and inspect events directly.
	Bus *jetstream.Bus
	// Server is the hub's facade. The hub closes it; a test may do so earlier.
	Server *facade.Server

	tb testing.TB
}

// Option changes the hub that New starts.
type Option func(*config)

type config struct {
	token  string
	static []acl.StaticToken
	bus    jetstream.Config
	facade facade.Config

	changes []func(*facade.Config) // of Facade
	open    *jetstream.Bus         // of On
	err     error
}

// Token sets the token that grants full access. Default: a random token.
func Token(token string) Option { return func(c *config) { c.token = token } }

// Policy makes the hub accept a further token with the rights of the policy. name is the name of
// the principal in logs. policy is JSON, as in the protocol page.
func Policy(name, token, policy string) Option {
	return func(c *config) {
		p, err := acl.ParsePolicy([]byte(policy))
		if err != nil && c.err == nil {
			c.err = err
		}
		c.static = append(c.static, acl.StaticToken{Name: name, Token: token, Policy: p})
	}
}

// Topics adds rules for topics, such as those of the topics file that is used in production. All
// streams are in memory, whatever the rules say.
func Topics(rules ...topics.Rule) Option {
	return func(c *config) { c.bus.Topics = append(c.bus.Topics, rules...) }
}

// Logger receives the log of the hub. Default: warnings and errors go to the output of the test.
func Logger(log *slog.Logger) Option {
	return func(c *config) { c.bus.Logger, c.facade.Logger = log, log }
}

// Bus changes the configuration of the bus, such as its limits. With URL or Server set the hub runs
// on that NATS, so that several hubs may share one.
func Bus(change func(*jetstream.Config)) Option { return func(c *config) { change(&c.bus) } }

// On runs the hub on a bus that the test has opened, and closes after the hub.
func On(bus *jetstream.Bus) Option { return func(c *config) { c.open = bus } }

// Facade changes the configuration of the facade, such as its limits. Bus and Auth are filled in
// already, so that they can be wrapped.
func Facade(change func(*facade.Config)) Option {
	return func(c *config) { c.changes = append(c.changes, change) }
}

// New starts a hub that ends with the test, and returns when the hub accepts clients. The test
// fails when the hub does not start.
func New(tb testing.TB, opts ...Option) *Hub {
	tb.Helper()
	log := slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	cfg := &config{token: rand.Text()}
	cfg.bus.Logger, cfg.facade.Logger = log, log
	for _, option := range opts {
		option(cfg)
	}
	if cfg.err != nil {
		tb.Fatalf("hubtest: %v", cfg.err)
	}
	h := &Hub{Token: cfg.token, tb: tb}
	h.start(cfg)
	return h
}

// start starts the parts of the hub in the order in which they depend on each other; the test ends
// them in the reverse order.
func (h *Hub) start(cfg *config) {
	h.tb.Helper()
	ctx, tb := h.tb.Context(), h.tb
	check := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatalf("hubtest: %v", err)
		}
	}
	tokens, err := acl.NewVerifier(ctx, acl.Config{Static: append([]acl.StaticToken{{Name: "hub", Token: h.Token}}, cfg.static...)})
	check(err)
	tb.Cleanup(tokens.Close)
	end := func(f func() error) {
		tb.Cleanup(func() {
			if err := f(); err != nil {
				tb.Errorf("hubtest: %v", err)
			}
		})
	}
	if h.Bus = cfg.open; h.Bus == nil {
		if cfg.bus.URL == "" && cfg.bus.Server == nil {
			cfg.bus.Server, err = embedded.Start(ctx, embedded.Config{Listen: "127.0.0.1:0", Token: h.Token, Logger: cfg.bus.Logger})
			check(err)
		}
		h.Bus, err = jetstream.Open(ctx, cfg.bus)
		check(err)
		end(h.Bus.Close)
	}
	h.NATS = h.Bus.Admin().NATS().URL()
	cfg.facade.Auth, cfg.facade.Bus = facade.Tokens(tokens), facade.JetStream(h.Bus)
	for _, change := range cfg.changes {
		change(&cfg.facade)
	}
	h.Server, err = facade.New(cfg.facade)
	check(err)
	end(h.Server.Close)
	ws, rest := httptest.NewServer(h.Server.WebSocket()), httptest.NewServer(h.Server.HTTP())
	tb.Cleanup(func() {
		rest.CloseClientConnections()
		rest.Close()
		ws.Close()
	})
	h.WebSocket, h.HTTP = "ws"+ws.URL[len("http"):], rest.URL
}

// Connect connects a client that reconnects, and that is closed when the test ends. token is
// Hub.Token or the token of a Policy.
func (h *Hub) Connect(token string) *eventhub.Client {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(h.tb.Context(), dialWait)
	defer cancel()
	c, err := eventhub.Connect(ctx, h.WebSocket, eventhub.Options{Token: token})
	if err != nil {
		h.tb.Fatalf("hubtest: %v", err)
	}
	h.tb.Cleanup(func() { _ = c.Close() })
	return c
}

// Dial connects a client of one connection, which is closed when the test ends. token is Hub.Token
// or the token of a Policy.
func (h *Hub) Dial(token string) *wire.Conn {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(h.tb.Context(), dialWait)
	defer cancel()
	c, err := wire.Dial(ctx, h.WebSocket, wire.Options{Token: token})
	if err != nil {
		h.tb.Fatalf("hubtest: %v", err)
	}
	h.tb.Cleanup(func() { _ = c.Close() })
	return c
}
