// Package jetstream is an event bus on NATS JetStream. Topics are streams and groups are durable
// consumers; the bus adds leases with fencing, dead letters, seek, ids, and the newest event of
// each key. Native NATS clients see the same events.
//
// A program opens a Bus, publishes, and consumes in groups:
//
//	bus, err := jetstream.Open(ctx, jetstream.Config{URL: "nats://127.0.0.1:4222"})
//	...
//	_, err = bus.Publish(ctx, "orders.placed", payload, jetstream.PublishOptions{Key: "customer:1"})
//	sub, err := bus.Consume(ctx, "orders.placed", "mailer", jetstream.SubscribeOptions{Workers: 4}, handle)
//
// Each event of a topic goes to one member of each group. The bus delivers the event again until a
// member has acknowledged it, or until the last attempt has failed and the event is stored on
// dlq.<topic>. A handler may therefore see an event twice, and must tolerate repetitions.
//
// Everything else is reached through small handles: Bus.Group for a group's position, Bus.Keys for
// the newest event of each key, Bus.History for the stored events of a topic, Bus.Collections for
// the program's own state, Bus.Admin for the streams behind the topics. Bus.Subscribe and Held are
// for servers that hand events on to clients of their own.
//
// Errors that such a server may show to its clients are of type *Error, with one of the Code
// constants. The storage time of an event comes from the clock of the NATS server. Sizes are in
// bytes.
//
// The package is the only part of the hub that speaks NATS. Another program may import it.
package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/schemas"
)

// closeWait is how long Close waits for the server, so that a process that is told to end does so
// in time.
const closeWait = 3 * time.Second

// Bus is the event bus. Open returns one. Its methods may be called concurrently, but a handler
// must not call Close.
type Bus struct {
	*core
	streams    *streams.Streams
	reads      *reading.Reads
	access     *access
	backups    *backups
	records    *records.Records
	schemas    *schemas.Registry
	publishers *publish.Publishers
	burials    *burials
	queues     *queues
	letters    *letters
	admin      *admin

	owners       *owners
	orderings    sync.WaitGroup // ordered groups of this hub
	orderingsEnd atomic.Bool    // it gives up those that it owns
	dead         *deadLetters
	handles      *handleTable

	groups        *groupRegistry
	subscriptions *subscriptionRegistry
	lingering     *lingering
	returns       returns // of subscriptions without a Holder
	soon          soon
	probed        atomic.Int64 // when the paths were last asked, in the clock of the bus

	closed sync.Once
}

// Open connects to NATS, and checks that the server has what the bus needs. The end of ctx ends
// Open but not the Bus, which the caller closes. Errors name the operation, the object, the cause
// and the remedy. After an error nothing is left running, Config.Server included.
func Open(ctx context.Context, cfg Config) (*Bus, error) {
	b, err := newBus(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := b.open(ctx); err != nil {
		_ = b.Close() //nolint:contextcheck // what is half open is closed whatever ctx says; its error would hide the cause
		return nil, err
	}
	return b, nil
}

// newBus checks the configuration, and makes a Bus that is not connected.
func newBus(ctx context.Context, cfg Config) (*Bus, error) {
	c, err := openCore(ctx, cfg)
	if err != nil {
		return nil, err
	}
	b := &Bus{core: c}
	b.streams = streams.New(b.streamsConfig())
	b.reads = reading.New(b.readingConfig(b.streams))
	b.access = newAccess(b.core)
	b.backups = newBackups(b.core)
	b.records = records.New(b.recordsConfig(b.streams))
	b.schemas = schemas.New(b.core.schemasConfig())
	b.publishers = publish.New(b.publishConfig())
	b.burials = newBurials(b.core, b.streams, b.publishers)
	b.queues = newQueues(b.core, b.streams, b.records)
	b.letters = newLetters(b.core, b.streams, b.reads, b.records, b.publishers, b.queues, b.backups)
	b.admin = newAdmin(b.core, b.streams, b.reads, b.records, b.publishers)
	b.groups = newGroupRegistry(b.core)
	b.lingering = newLingering(b.groups)
	b.subscriptions = newSubscriptionRegistry(b.core, b.streams)
	b.handles = newHandleTable(b.core)
	b.conn.Hooks = conn.Hooks{
		Cut:       b.linkCut,
		Lost:      b.linkLost,
		Returning: b.linkReturning,
		Back:      b.linkBack,
		Heard:     b.linkHeard,
		Changed:   b.access.native.hubChanged,
	}
	b.streams.Hooks = streams.Hooks{
		Gates:          b.publishers.Gates,
		Note:           b.records.Makers.NoteTopic,
		Refusal:        b.records.Makers.TopicRefusal,
		Drifted:        b.reportDrift,
		FinishDeletion: b.admin.finishDeletion,
	}
	b.publishers.Hooks = publish.Hooks{
		EachKey:      b.eachKey,
		HasKey:       b.hasKey,
		EachID:       b.eachID,
		StoredIDs:    b.storedIDs,
		AdmitLetter:  b.burials.rations.admit,
		RefundLetter: b.burials.rations.refund,
		Bury:         b.burials.buryDelayed,
	}
	b.admin.adminHooks = adminHooks{
		members:     b.groups.countMembers,
		seen:        b.groups.seen,
		stuckSince:  b.groups.stuckSince,
		deleteGroup: func(ctx context.Context, topic, group string) error { return b.Group(topic, group).Delete(ctx) },
	}
	b.records.Hooks = records.Hooks{
		Held:         b.groups.answerHeld,
		TopicDeleted: b.subscriptions.topicDeleted,
		GroupMoved:   b.subscriptions.groupMoved,
		EndDeletion:  b.admin.endDeletion,
	}
	return b, nil
}

func (b *Bus) open(ctx context.Context) (err error) {
	if err := b.conn.Connect(); err != nil { //nolint:contextcheck // it lives until Close, not until Open returns
		return err
	}
	b.obs.Gauge(event.GaugeConnected, 1)
	if err := b.handles.listen(); err != nil {
		return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
	}
	if err := b.listenOrders(); err != nil {
		return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
	}
	if err := b.conn.CheckServer(ctx); err != nil {
		return err
	}
	if err := b.backups.checkRestored(ctx); err != nil {
		return err
	}
	if err := b.records.OpenGenerations(ctx); err != nil {
		return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
	}
	if b.owners, err = openOwners(ctx, b.core, b.handles.hub); err != nil {
		return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
	}
	if err := b.schemas.Open(ctx); err != nil {
		return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
	}
	if err := b.records.OpenOthers(ctx); err != nil {
		return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
	}
	if b.cfg.Server != nil {
		delays := natsjs.KeyValueConfig{Bucket: delaysBucket, Description: "eventhub: events refused with a delay", TTL: delaysAge, MaxBytes: delaysBytes}
		if _, err := b.ownBucket(ctx, delays); err != nil {
			return fmt.Errorf("nats at %s: %w", b.conn.Where(), err)
		}
	}
	if b.cfg.Server != nil {
		if err := endOldLeases(ctx, b.conn.JS); err != nil {
			b.log.WarnContext(ctx, "failed to end all leases from before the start; the rest ends after AckWait", slog.Any("error", err))
		}
	}
	b.streams.Headrooms.Begin()
	b.publishers.Begin()
	b.dead = startDeadLetters(b.burials, b.reads, b.records, &b.soon) //nolint:contextcheck // it lives until Close, not until Open returns
	b.clock.LastTick.Store(b.clock.Now())
	b.conn.Start(b.watchStalls)
	b.conn.Start(b.askAgain)
	b.conn.Start(b.records.Follow)
	b.owners.begin()
	b.conn.Start(b.sweepGroups)
	b.conn.Start(b.admin.lookAfterBuckets)
	b.probed.Store(b.clock.Now())
	b.conn.Start(b.probePaths)
	b.conn.Start(b.watchGroups)
	b.conn.Start(b.lookForStuck)
	if b.admin.rejects() {
		b.conn.Start(b.admin.keepTopics)
	}
	b.conn.Start(b.reads.TendListings)
	b.publishers.StoreDue()
	if s := b.cfg.Server; s != nil {
		b.conn.Start(func() { s.Tend(b.conn.Ctx, b.serverRestarted, b.serverFailing) })
	}
	return nil
}

// watchStalls keeps the clock, and gives up everything that is held after the process stood still.
// It does nothing else: what the hub has to do must not look like a stall.
func (b *Bus) watchStalls() {
	tick := time.NewTicker(time.Duration(b.clock.Limit / 4))
	defer tick.Stop()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
		}
		now := b.clock.Now()
		if b.clock.Stalled(now) {
			b.often.Log(b.conn.Ctx, slog.LevelWarn, "the process stood still: all leases are given up", "", slog.Duration("gap", time.Duration(now-b.clock.LastTick.Load())))
			b.subscriptions.eachSubscription((*Subscription).forget)
			// before anything is asked for: until then, what arrives is ignored
			b.clock.LastTick.Store(now)
			b.subscriptions.eachSubscription((*Subscription).restart)
			continue
		}
		// and not a later time: a stop since the check must be seen at the next
		b.clock.LastTick.Store(now)
	}
}

// askAgain asks again what was not answered, and gives up what waits for too long, until the bus
// closes.
func (b *Bus) askAgain() {
	tick := time.NewTicker(time.Duration(b.clock.Limit / 4))
	defer tick.Stop()
	swept := b.clock.Now()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
		}
		b.soon.run()
		if now := b.clock.Now(); now-swept > int64(time.Second) {
			swept = now
			for _, l := range b.conn.Links {
				l.Sweep(now)
			}
			b.lingering.sweepLingering(now)
			b.often.Sweep()
			if l := b.conn.Links[0]; l.Up.Load() {
				b.records.SaveUnsaved(l)
			}
		}
	}
}

// linkCut forgets what the server has not confirmed over a connection that broke: what was leased
// over it may be given to others from now on.
func (b *Bus) linkCut(l *conn.Link) {
	b.groups.eachKeeping(func(g *group) { g.paths[l.Index].forget() })
	b.lingering.forgetLingering(l)
	b.cutNative(l)
}

// linkLost gives up what the subscriptions have over a connection that broke.
func (b *Bus) linkLost(l *conn.Link) {
	b.subscriptions.eachSubscription(func(s *Subscription) {
		if s.link == l {
			s.forget()
		}
	})
}

// linkReturning tells each group that a connection was lost: silence counts from now on, and the
// delivery numbers of the server may be others.
func (b *Bus) linkReturning(l *conn.Link, now int64) {
	b.groups.eachGroup(func(g *group) {
		g.paths[l.Index].Reset(now)
		g.cutOff(l.Clustered())
	})
	b.cutNative(l)
}

// linkBack has the subscriptions of a connection that is back go on.
func (b *Bus) linkBack(l *conn.Link) {
	b.records.SaveUnsaved(l)
	b.subscriptions.eachSubscription(func(s *Subscription) {
		if s.link == l {
			s.restart()
		}
	})
}

// linkHeard sends what was kept while the server was silent.
func (b *Bus) linkHeard(l *conn.Link) {
	b.groups.eachKeeping(func(g *group) { g.paths[l.Index].open(g, l) })
}

// cutNative notes that advisories were lost, if they come over this link.
func (b *Bus) cutNative(l *conn.Link) {
	if l.Index == 0 {
		b.access.native.cut()
	}
}

// Close ends all subscriptions and gives their leases back. It waits for running handlers, and up
// to 3 s for publishes in flight. It then closes the connections and Config.Server. Close may be
// called twice, and returns nil.
func (b *Bus) Close() error {
	b.closed.Do(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(b.conn.Ctx), closeWait)
		defer cancel()
		var stops sync.WaitGroup
		done, end := context.WithCancel(ctx)
		end() // leases are not waited for
		for _, s := range b.subscriptions.lastSubscriptions() {
			// what could not be given back comes again after AckWait
			stops.Go(func() { _ = s.Drain(done) })
		}
		stops.Wait()
		b.stopOrderings(ctx)
		if b.dead != nil {
			b.dead.stop(ctx) // they are published, so this comes before publishing ends
		}
		b.core.close(ctx)
	})
	return nil
}

// Ready returns nil while the bus can serve: every connection is up, JetStream answers before ctx
// ends, and all streams of Config.Server can be written. The error about streams is a
// *StorageError. Ready is for readiness probes, and its errors are for operators.
func (b *Bus) Ready(ctx context.Context) error {
	if b.conn.Closing() {
		return event.ErrClosed
	}
	if err := b.unstored.Load(); err != nil {
		return err
	}
	if !b.conn.Connected() {
		return errors.New("not connected to NATS")
	}
	if _, err := b.conn.JS.AccountInfo(ctx); err != nil {
		return fmt.Errorf("JetStream does not answer: %w", err)
	}
	return nil
}

// Schemas gives access to the registry of schemas.
func (b *Bus) Schemas() *schemas.Registry { return b.schemas }

// MaxPayload returns the largest payload in bytes that a publish accepts. A topic may accept less
// (topics.Rule.MaxPayload).
func (b *Bus) MaxPayload() int { return b.conn.MaxPayload }
