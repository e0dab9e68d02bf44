package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/topics"
)

// core is what all parts of a bus share: its life, its settings, and its connections. Open adds
// what the server has said; the settings do not change later.
type core struct {
	lifecycle

	cfg    Config
	limits Limits
	rules  topics.Rules
	log    *slog.Logger
	often  *pacedlog.Log // lines that clients or an outage can repeat
	obs    event.Observer
	tracer event.Tracer // nil: none
	clock  *clock

	links      []*link
	linkHooks  linkHooks     // set before there are links
	turn       atomic.Uint32 // deals the links out
	js         manager       // over links[0]; for what is not hot
	api        string        // prefix of the JetStream API subjects
	maxPayload int           // in bytes

	// unstored is the storage failure of the embedded server; nil while it can write.
	unstored atomic.Pointer[StorageError]
}

// openCore checks the configuration, and returns the core of a bus that is not connected. After an
// error Config.Server is closed.
func openCore(ctx context.Context, cfg Config) (*core, error) {
	if err := cfg.validate(); err != nil {
		if cfg.Server != nil {
			err = errors.Join(err, cfg.Server.Close())
		}
		return nil, err
	}
	return newCore(ctx, cfg), nil
}

// newCore returns the core of a bus that is not connected. The values of ctx go on, but its end is
// not that of the bus.
func newCore(ctx context.Context, cfg Config) *core {
	c := &core{
		cfg: cfg, limits: cfg.Limits, rules: topics.WithBuiltin(cfg.Topics), log: cfg.Logger, often: pacedlog.New(cfg.Logger), obs: cfg.Observer, tracer: cfg.Tracer,
		clock: newClock(cfg.Clock, stallLimit(cfg.AckWait)),
	}
	ignore := func(*link) {}
	c.linkHooks = linkHooks{cut: ignore, lost: ignore, returning: func(*link, int64) {}, back: ignore, heard: ignore, changed: func(string) {}}
	c.beginLife(ctx)
	return c
}

// close waits for all work, and until ctx ends for what was asked over the connections. It then
// closes these and Config.Server. It is called once.
func (c *core) close(ctx context.Context) {
	c.endLife()
	for _, l := range c.links {
		l.drain(ctx)
		l.nc.Close()
		l.lost(nats.ErrConnectionClosed)
	}
	if c.cfg.Server != nil {
		_ = c.cfg.Server.Close() // it says in its log what it could not do
	}
	c.often.End()
}
