package jetstream

import (
	"context"
	"log/slog"
	"sync/atomic"

	"eventhub/jetstream/pacedlog"
)

// core is what all parts of a bus share: its life, its settings, and its connections. Open adds
// what the server has said; the settings do not change later.
type core struct {
	lifecycle

	cfg    Config
	limits Limits
	rules  []TopicRule
	log    *slog.Logger
	often  *pacedlog.Log // lines that clients or an outage can repeat
	obs    Observer
	tracer Tracer // nil: none
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

// newCore returns the core of a bus that is not connected. The values of ctx go on, but its end is
// not that of the bus.
func newCore(ctx context.Context, cfg Config) *core {
	c := &core{
		cfg: cfg, limits: cfg.Limits, rules: cfg.allRules(), log: cfg.Logger, often: pacedlog.New(cfg.Logger), obs: cfg.Observer, tracer: cfg.Tracer,
		clock: newClock(cfg.Clock, stallLimit(cfg.AckWait)),
	}
	c.beginLife(ctx)
	return c
}
