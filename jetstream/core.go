package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// core is what all parts of a bus share: its life, its settings, and its connections. Open adds
// what the server has said; the settings do not change later.
type core struct {
	conn     *conn.Pool
	messages *reading.Messages

	cfg    Config
	limits Limits
	rules  topics.Rules
	log    *slog.Logger
	obs    event.Observer
	clock  *conn.Clock
	often  *pacedlog.Log // lines that clients or an outage can repeat
	tracer event.Tracer  // nil: none

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
	c := &core{cfg: cfg, limits: cfg.Limits, rules: topics.WithBuiltin(cfg.Topics), often: pacedlog.New(cfg.Logger), tracer: cfg.Tracer}
	own := conn.Config{
		URL: cfg.URL, Creds: cfg.Creds, NKeySeed: cfg.NKeySeed, TLSCA: cfg.TLSCA, TLSCert: cfg.TLSCert, TLSKey: cfg.TLSKey, Domain: cfg.Domain,
		Connections: cfg.Connections, MaxPayload: cfg.Limits.MaxPayload, Margin: margin(cfg.AckWait), OpenWait: cfg.openWait,
		Log: cfg.Logger, Obs: cfg.Observer, Clock: conn.NewClock(cfg.Clock, stallLimit(cfg.AckWait)),
		Warn: func(ctx context.Context, msg, key string, attrs ...slog.Attr) {
			c.often.Log(ctx, slog.LevelWarn, msg, key, attrs...)
		},
	}
	if cfg.Server != nil {
		own.Embedded = cfg.Server
	}
	c.conn = conn.New(ctx, own)
	c.messages = &reading.Messages{Conn: c.conn, Often: c.often}
	c.log, c.obs, c.clock = own.Log, own.Obs, own.Clock
	return c
}

// streamsConfig is what streams are given of the core.
func (c *core) streamsConfig() streams.Config {
	l := &c.limits
	return streams.Config{
		Conn: c.conn, Rules: c.rules, Replicas: c.cfg.Replicas, Memory: c.cfg.MemoryStorage, Unbounded: c.cfg.Server != nil,
		Limits: streams.Limits{
			Topics: l.Topics, TopicsPerClient: l.TopicsPerClient, StreamGroups: l.StreamGroups, PublishInFlight: l.PublishInFlight, IDsKnown: l.IDsKnown,
			StorageReserve: l.StorageReserve,
		},
		Stored: c.stored, AskStorage: c.cfg.askStorage,
		Log: c.log, Often: c.often, Obs: c.obs, Clock: c.clock,
	}
}

// readingConfig is what reads are given of the core.
func (c *core) readingConfig(s *streams.Streams) reading.Config {
	l := &c.limits
	return reading.Config{
		Conn: c.conn, Streams: s, Messages: c.messages, Replicas: c.cfg.Replicas, Memory: c.cfg.MemoryStorage,
		Limits: reading.Limits{ListingReaders: l.ListingReaders, IDSearches: l.IDSearches, IDSearchesPerClient: l.IDSearchesPerClient, IDsKnown: l.IDsKnown},
		Log:    c.log, Often: c.often, Obs: c.obs,
	}
}

// recordsConfig is what records are given of the core.
func (c *core) recordsConfig(s *streams.Streams) records.Config {
	l := &c.limits
	return records.Config{
		Conn: c.conn, Streams: s, Messages: c.messages, OpenBucket: c.ownBucket,
		Limits: records.Limits{Topics: l.Topics, ClientTopics: l.ClientTopics, ClientGroups: l.ClientGroups, GroupsPerClient: l.GroupsPerClient, AttemptsKnown: l.AttemptsKnown},
		Log:    c.log, Often: c.often, Obs: c.obs, Clock: c.clock,
	}
}

// publishConfig is what publishers are given of a bus.
func (b *Bus) publishConfig() publish.Config {
	l := &b.limits
	derived := make([]publish.DerivedKeys, 0, len(b.cfg.Derived))
	for _, d := range b.cfg.Derived {
		derived = append(derived, publish.DerivedKeys(d))
	}
	return publish.Config{
		Conn: b.conn, Streams: b.streams, Schemas: b.schemas, Rules: b.rules, Derived: derived,
		Embedded: b.cfg.Server != nil, Replicas: b.cfg.Replicas, Memory: b.cfg.MemoryStorage, AckWait: b.cfg.AckWait, DueRetry: b.cfg.dueRetry,
		Limits: publish.Limits{
			Topics: l.Topics, SessionInFlight: l.SessionInFlight, PublishInFlight: l.PublishInFlight,
			KeysPerClient: l.KeysPerClient, KeyRate: l.KeyRate, KeyShare: l.KeyShare, DerivedKeysPerClient: l.DerivedKeysPerClient, DerivedKeyRate: l.DerivedKeyRate,
			PublishRate: l.PublishRate, PublishBurst: l.PublishBurst, StorageShare: l.StorageShare,
			Delayed: l.Delayed, DelayedPerClient: l.DelayedPerClient, MaxDelay: l.MaxDelay,
		},
		Log: b.log, Often: b.often, Obs: b.obs, Clock: b.clock, Tracer: b.tracer,
	}
}

// schemasBucket is the KV bucket that holds the schemas of all hubs.
const schemasBucket = "eventhub_schemas"

// schemasConfig is what the registry of schemas is given of the core.
func (c *core) schemasConfig() schemas.Config {
	return schemas.Config{
		Conn: c.conn, Rules: c.rules, Bucket: c.sharedBucket(schemasBucket, "schemas of topics", schemas.MaxVersions), Casters: c.cfg.Casters, Computing: c.cfg.Computing,
		PerClient: c.limits.SchemasPerClient, OpenWait: c.cfg.openWait,
		Often: c.often, Obs: c.obs, Clock: c.clock,
	}
}

// sharedBucket returns a bucket of all hubs of which nothing but where it is is known.
func (c *core) sharedBucket(name, description string, entries int64) streams.SharedBucket {
	return streams.SharedBucket{
		Conn: c.conn, Often: c.often, Replicas: c.cfg.Replicas, Memory: c.cfg.Server != nil && c.cfg.Server.InMemory(),
		Name: name, Description: description, Max: entries,
	}
}

// ownBucket opens a bucket in which hubs keep what they share, and makes it if it is not there.
func (c *core) ownBucket(ctx context.Context, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error) {
	cfg.Replicas = c.cfg.Replicas
	if c.cfg.Server != nil && c.cfg.Server.InMemory() {
		cfg.Storage = natsjs.MemoryStorage
	}
	kv, err := conn.WhenUp(ctx, c.conn, func() (natsjs.KeyValue, error) { return openOrMake(ctx, c.conn.JS.Within(c.cfg.openWait), cfg) })
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w; check that the NATS user may create KV buckets, and that enough servers of the cluster are up for %d replicas", cfg.Bucket, err, c.cfg.Replicas)
	}
	return kv, nil
}

func openOrMake(ctx context.Context, js natsjs.JetStream, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error) {
	kv, err := js.KeyValue(ctx, cfg.Bucket)
	if errors.Is(err, natsjs.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, cfg)
		if errors.Is(err, natsjs.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, cfg.Bucket)
		}
	}
	return kv, err
}

// close waits for all work, and until ctx ends for what was asked over the connections. It then
// closes these and Config.Server. It is called once.
func (c *core) close(ctx context.Context) {
	c.conn.Close(ctx)
	if c.cfg.Server != nil {
		_ = c.cfg.Server.Close() // it says in its log what it could not do
	}
	c.often.End()
}
