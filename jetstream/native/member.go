package native

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/panics"
)

// GroupOptions are what a member says when it joins a group. The zero value is fine.
type GroupOptions struct {
	// Earliest makes a new group start at the first event of the topic instead of after the last
	// one. It says nothing to a group that exists.
	Earliest bool
	// AckWait is how long an event that nobody settles or keeps waits until it is delivered again:
	// 1 s..1 h, default DefaultAckWait. It is a setting of a new group; set it to what the hubs
	// have (EVENTHUB_ACK_WAIT).
	AckWait time.Duration
	// MaxAttempts is after how many attempts of this member's deliveries an event is dead-lettered:
	// default DefaultMaxAttempts. NeverGiveUp dead-letters none.
	MaxAttempts int
	// Workers is how many handlers Consume runs at a time: 1..10,000, default 1.
	Workers int
	// Logger gets what Consume cannot return. Default: none.
	Logger *slog.Logger
}

// NeverGiveUp as GroupOptions.MaxAttempts delivers an event until it is settled.
const NeverGiveUp = -1

const maxWorkers = 10_000

func (o *GroupOptions) validate() error {
	if o.AckWait == 0 {
		o.AckWait = DefaultAckWait
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = DefaultMaxAttempts
	}
	if o.Workers == 0 {
		o.Workers = 1
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case o.AckWait < time.Second || o.AckWait > time.Hour:
		return fmt.Errorf("native: ack wait %v: 1s to 1h are allowed", o.AckWait)
	case o.MaxAttempts < NeverGiveUp:
		return fmt.Errorf("native: max attempts %d: give a positive number, or NeverGiveUp", o.MaxAttempts)
	case o.Workers < 0 || o.Workers > maxWorkers:
		return fmt.Errorf("native: %d workers: 1 to %d are allowed", o.Workers, maxWorkers)
	}
	return nil
}

// Group is a group of a topic that a program is a member of. Client.Group returns one. Its methods
// may be called concurrently. It needs no closing: a group outlives its members.
type Group struct {
	client      *Client
	topic, name string
	opts        GroupOptions

	mu    sync.Mutex
	now   place
	noted time.Time // until then, nobody asks for notes; see Delivery.note
}

// place is where a group is at present.
type place struct {
	made     time.Time // of the stream, see StreamMade; zero for a user that may not see it
	consumer natsjs.Consumer
	settled  []Span
	tried    []Tries
}

// Group joins a group, and makes it if there is none. It returns ErrNoTopic when no stream stores
// the topic, and ErrGroupGone for a group that was deleted in the last 24 hours, or that was moved
// and then lost its consumer, and ErrOrdered for an ordered group. A user that may not see the
// stream can join a group that exists, of a topic with a stream of its own; otherwise Group returns
// ErrNotPermitted.
func (c *Client) Group(ctx context.Context, topic, group string, opts GroupOptions) (*Group, error) {
	if err := CheckTopic(topic); err != nil {
		return nil, fmt.Errorf("native: %w", err)
	}
	if err := CheckGroup(group); err != nil {
		return nil, fmt.Errorf("native: %w", err)
	}
	if err := opts.validate(); err != nil {
		return nil, err
	}
	g := &Group{client: c, topic: topic, name: group, opts: opts}
	if err := g.find(ctx, true); err != nil {
		return nil, err
	}
	return g, nil
}

// Consumer returns the consumer that the group is at present. A seek makes another one: the pulls
// of this one then end with natsjs.ErrConsumerDeleted, and Refresh finds the new one.
func (g *Group) Consumer() natsjs.Consumer { return g.at().consumer }

func (g *Group) at() place {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.now
}

// Refresh looks up which consumer the group is now. It returns ErrGroupGone when the group has
// none, and creates nothing.
func (g *Group) Refresh(ctx context.Context) error { return g.find(ctx, false) }

// find looks the group's consumer up. With create, it makes the consumer of a group that never was.
func (g *Group) find(ctx context.Context, create bool) error {
	ctx, cancel := within(ctx)
	defer cancel()
	for range 4 {
		stream, err := g.client.stream(ctx, g.topic)
		if errors.Is(err, ErrNotPermitted) { // what is its own may still be seen
			stream, create = &natsjs.StreamInfo{Config: natsjs.StreamConfig{Name: ObjectName(g.topic), Subjects: Filters(g.topic)}}, false
		} else if err != nil {
			return err
		}
		gen, moved, err := g.generation(ctx, stream)
		if err != nil {
			return err
		}
		if gen.Deleted {
			return fmt.Errorf("group %s of %s was deleted: %w", g.name, g.topic, ErrGroupGone)
		}
		var consumer natsjs.Consumer
		err = g.client.ask(ctx, "CONSUMER.INFO."+stream.Config.Name+"."+gen.Consumer, func(ctx context.Context) (err error) {
			consumer, err = g.client.js.Consumer(ctx, stream.Config.Name, gen.Consumer)
			return err
		})
		missing := errors.Is(err, natsjs.ErrConsumerNotFound)
		switch {
		case missing && (moved || !create):
			return fmt.Errorf("group %s of %s: %w", g.name, g.topic, ErrGroupGone)
		case missing:
			if err := g.create(ctx, stream, gen.Consumer); err != nil {
				return err
			}
			create = false // once more: a seek may have come between
			continue
		case err != nil:
			return fmt.Errorf("native: find group %s of %s: %w", g.name, g.topic, err)
		}
		if cfg := consumer.CachedInfo().Config; cfg.AckPolicy != natsjs.AckExplicitPolicy {
			return fmt.Errorf("native: consumer %s is no group: it has no explicit acks; choose another group name", gen.Consumer)
		}
		if consumer.CachedInfo().Config.Metadata[MetaSlots] != "" {
			return fmt.Errorf("group %s of %s: %w", g.name, g.topic, ErrOrdered)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.now = place{StreamMade(stream), consumer, gen.Settled, gen.Tried}
		return nil
	}
	return fmt.Errorf("group %s of %s is being moved again and again: %w", g.name, g.topic, ErrGroupGone)
}

// generation reads which consumer the group is. moved says that a hub has noted one.
func (g *Group) generation(ctx context.Context, stream *natsjs.StreamInfo) (gen Generation, moved bool, err error) {
	plain := Generation{Number: 1, Consumer: ConsumerName(g.topic, g.name, IsFamily(g.topic, stream.Config.Name, stream.Config.Subjects))}
	value, err := g.client.entry(ctx, GroupsBucket, GroupKey(stream.Config.Name, plain.Consumer))
	if errors.Is(err, errNoEntry) {
		return plain, false, nil // it was never moved, or no hub has run here yet
	}
	if err != nil {
		return gen, false, fmt.Errorf("native: read where group %s of %s is: %w", g.name, g.topic, err)
	}
	if err := json.Unmarshal(value, &gen); err != nil {
		return gen, false, fmt.Errorf("native: read where group %s of %s is: %w", g.name, g.topic, err)
	}
	if made := StreamMade(stream); !made.IsZero() && !gen.Stream.Equal(made) {
		return plain, false, nil
	}
	return gen, true, nil
}

// create makes the consumer in one request: that of another who is first stays as it is.
func (g *Group) create(ctx context.Context, stream *natsjs.StreamInfo, name string) error {
	cfg := ConsumerConfig(g.topic, g.name, name, IsFamily(g.topic, stream.Config.Name, stream.Config.Subjects))
	cfg.AckWait = g.opts.AckWait
	if !g.opts.Earliest {
		cfg.OptStartSeq = stream.State.LastSeq + 1
	}
	_, err := g.client.js.CreateConsumer(ctx, stream.Config.Name, cfg)
	if err != nil && !errors.Is(err, natsjs.ErrConsumerExists) {
		return fmt.Errorf("native: create group %s of %s: %w", g.name, g.topic, err)
	}
	return nil
}

// How Consume pulls: a pull waits for pullWait, and after an error Consume waits for retryFirst,
// doubled up to retryMax. A group without a consumer is given up after gonePatience.
const (
	pullWait     = 2 * time.Second
	retryFirst   = 50 * time.Millisecond
	retryMax     = 5 * time.Second
	gonePatience = 10 * time.Second
)

// Consume runs handle for each event that the group gives to this member, opts.Workers at a time,
// until ctx ends; Consume then returns nil. While a handler runs, its event is kept. The event is
// acknowledged when handle returns nil. When handle returns an error, or panics, the event is
// refused with DefaultDelay, or dead-lettered if that was the last attempt. A handler may also
// settle the delivery itself. Its context ends when the event is lost to another member.
//
// After ctx has ended, Consume waits for the handlers that run, and up to 2 s for its last pull,
// and gives back what that brings. Consume follows a group that is moved. It returns ErrGroupGone
// when the group is deleted, and ErrNotPermitted when the user may not follow the group: connect
// again, and join again. It goes on after any other error.
func (g *Group) Consume(ctx context.Context, handle func(context.Context, *Delivery) error) error {
	free := make(chan struct{}, g.opts.Workers)
	for range g.opts.Workers {
		free <- struct{}{}
	}
	often := pacedlog.New(g.opts.Logger.With(slog.String("topic", g.topic), slog.String("group", g.name)))
	sweeping, end := context.WithCancel(ctx)
	defer often.End()
	var running sync.WaitGroup
	running.Go(func() { often.Run(sweeping) })
	defer running.Wait()
	defer end()
	var goneSince time.Time
	retry := retryFirst
	for {
		select {
		case <-free:
		case <-ctx.Done():
			return nil
		}
		n := 1
		for ; n < g.opts.Workers && len(free) > 0; n++ {
			<-free
		}
		left, err := g.pull(ctx, n, func(msg natsjs.Msg) {
			running.Go(func() {
				defer func() { free <- struct{}{} }()
				g.work(ctx, often, msg, handle)
			})
		})
		for range left {
			free <- struct{}{}
		}
		if err == nil {
			retry, goneSince = retryFirst, time.Time{}
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retry):
		}
		retry = min(2*retry, retryMax)
		err = g.Refresh(ctx)
		if !errors.Is(err, ErrGroupGone) && !errors.Is(err, ErrNotPermitted) {
			goneSince = time.Time{}
			continue // an interruption passes
		}
		if goneSince.IsZero() {
			goneSince = time.Now()
		}
		if time.Since(goneSince) > gonePatience {
			return err
		}
	}
}

// pull hands out up to n messages as they arrive, and returns how many did not come.
func (g *Group) pull(ctx context.Context, n int, hand func(natsjs.Msg)) (left int, err error) {
	if ctx.Err() != nil {
		return n, ctx.Err()
	}
	// Not with ctx: the server would send messages to an inbox that nobody listens to any more.
	batch, err := g.Consumer().Fetch(n, natsjs.FetchMaxWait(pullWait))
	if err != nil {
		return n, err
	}
	for msg := range batch.Messages() {
		if n--; ctx.Err() != nil {
			_ = msg.Nak()
			n++
			continue
		}
		hand(msg)
	}
	return n, batch.Error()
}

// work runs the handler for one message, and keeps the event meanwhile.
func (g *Group) work(ctx context.Context, often *pacedlog.Log, msg natsjs.Msg, handle func(context.Context, *Delivery) error) {
	arrived := time.Now()
	d, err := g.receive(ctx, msg, arrived)
	if err != nil || d == nil {
		if err != nil {
			often.Log(ctx, slog.LevelWarn, "failed to take a delivery; it comes again", "", slog.Any("error", err))
		}
		return
	}
	// A handler that runs when ctx ends is let finish.
	held, lose := context.WithCancel(context.WithoutCancel(ctx))
	var keeping sync.WaitGroup
	keeping.Go(func() { d.keepWhile(held, lose) })
	stop := func() { lose(); keeping.Wait() }
	defer stop() // a handler may end its goroutine
	err = panics.Call(often.By("func"), "handler", func() error { return handle(held, d) })
	stop()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.ackWait()+requestWait)
	defer cancel()
	settle := d.Ack
	if failure := err; failure != nil {
		settle = func() error { return d.Nack(ctx, failure.Error(), DefaultDelay) }
	} else if r := d.unsent(); r != nil {
		settle = func() error { return d.Nack(ctx, r.reason, r.delay) }
	}
	err = d.whenConnected(ctx, settle)
	if err != nil && !errors.Is(err, ErrNotHeld) { // settled by the handler, or another member's
		often.Log(ctx, slog.LevelWarn, "failed to settle an event; it comes again", "", slog.String("id", d.Event.ID), slog.Any("error", err))
	}
}
