package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Pub is `eventhub bench pub`.
type Pub struct {
	load
	rounds

	Via      string  `default:"ws" enum:"ws,http,native,native-ws" help:"Way to reach the stream: ${enum}."`
	GivenIDs bool    `name:"given-ids" help:"Give each event a unique id (natively Nats-Msg-Id), so that the server checks for duplicates."`
	Rate     float64 `help:"Events per second, sent on schedule regardless of the answers (open loop), with confirmation latency measured from the time each event was due. Default: as fast as --in-flight allows."`
	Batch    int     `default:"1" help:"Over HTTP: events per request. More than 1 sends NDJSON."`

	NativePublisher string `name:"native-publisher" default:"async" enum:"async,inbox" help:"How native clients publish: async uses PublishAsync of nats.go, inbox uses a single reply inbox."`
}

// Help returns the detailed help text.
func (*Pub) Help() string {
	return `Measures confirmed publishes per second. Fails unless the stream holds every event.

Over HTTP, each connection has one request at a time, so --batch applies instead of --in-flight.

  eventhub bench pub --compare native
  eventhub bench pub --given-ids --compare native --native-publisher inbox
  eventhub bench pub --via http --batch 500
  eventhub bench pub --rate 20000 --n 200000`
}

// Run runs the benchmark.
func (cmd *Pub) Run(ctx context.Context, env Env, target *Target) error {
	switch {
	case cmd.Rate < 0:
		return fmt.Errorf("--rate %v: must not be negative", cmd.Rate)
	case cmd.Batch < 1 || cmd.Batch > 10_000:
		return fmt.Errorf("--batch %d: must be 1 to 10000", cmd.Batch)
	case cmd.Batch > 1 && cmd.Via != viaHTTP:
		return errors.New("--batch requires --via http")
	}
	metrics := throughputSet
	if cmd.Rate > 0 {
		metrics = latencySet
	}
	return measure(ctx, env, target, plan{name: "pub", sides: cmd.sidesOf(cmd.Via), rounds: &cmd.rounds, load: &cmd.load, metrics: metrics}, func(b *run) roundFunc {
		return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
			return cmd.round(ctx, b, s.via, topic, n)
		}
	})
}

func (cmd *Pub) round(ctx context.Context, b *run, via, topic string, n int) (*Result, error) {
	before, err := b.prepare(ctx, via, topic)
	if err != nil {
		return nil, err
	}
	how := publishing{topic: topic, inFlight: cmd.InFlight, batch: cmd.Batch, native: cmd.NativePublisher, timed: cmd.Rate > 0}
	p, err := b.openPublishers(ctx, via, cmd.Connections, how)
	if err != nil {
		return nil, err
	}
	defer p.close()
	given := ids{}
	if cmd.GivenIDs {
		given.prefix = fmt.Sprintf("%s-%d-", b.id, b.count)
	}
	m, err := b.sys.newMeter(via)
	if err != nil {
		return nil, err
	}
	result := &Result{Published: n}
	late := newHistogram()
	if cmd.Rate > 0 {
		err = p.onSchedule(ctx, n, cmd.Size, cmd.Rate, given, late)
	} else {
		err = p.flatOut(ctx, n, cmd.Size, given)
	}
	if err != nil {
		return nil, err
	}
	if err := m.stop(n, result); err != nil {
		return nil, err
	}
	if cmd.Rate > 0 {
		result.Quantiles = newQuantiles(p.times...)
		result.Late = newQuantiles(late).P99
	}
	return result, b.verifyStored(ctx, via, topic, before+n)
}

// prepare creates the topic if the hub does not, and returns the number of events that it holds.
func (b *run) prepare(ctx context.Context, via, topic string) (int, error) {
	a, err := b.sys.admin(via)
	if a == nil || err != nil {
		return 0, err
	}
	n, err := a.stored(ctx, topic)
	if err == nil && n == 0 && isNative(via) {
		err = a.makeStream(ctx, topic, b.target.Replicas)
	}
	return n, err
}

// verifyStored returns an error unless the stream holds want events, if the number can be read
// natively.
func (b *run) verifyStored(ctx context.Context, via, topic string, want int) error {
	a, err := b.sys.admin(via)
	if a == nil || err != nil {
		return err
	}
	got, err := a.stored(ctx, topic)
	if others := b.exact && got > want; err == nil && got != want && !others {
		err = fmt.Errorf("stream of %s holds %d events, but %d were confirmed", topic, got, want)
	}
	return err
}

// publishers are the publishing connections of a round.
type publishers struct {
	all   []publisher
	times []*hdrhistogram.Histogram
}

func (b *run) openPublishers(ctx context.Context, via string, connections int, how publishing) (*publishers, error) {
	p := &publishers{}
	for range connections {
		var times *hdrhistogram.Histogram
		if how.timed { // a histogram takes 200 KiB
			times = newHistogram()
		}
		one, err := b.sys.newPublisher(ctx, via, how, times)
		if err != nil {
			p.close()
			return nil, err
		}
		p.all, p.times = append(p.all, one), append(p.times, times)
	}
	return p, nil
}

// close disconnects. All events have been confirmed before.
func (p *publishers) close() {
	for _, one := range p.all {
		_ = one.close()
	}
}

// flatOut publishes events 0 to n-1 as fast as possible, divided among the connections, and waits
// for the confirmations.
func (p *publishers) flatOut(ctx context.Context, n, size int, given ids) error {
	return p.each(func(i int, one publisher) error {
		payload := newPayload(size)
		for seq := i; seq < n; seq += len(p.all) {
			if seq%1024 < len(p.all) && ctx.Err() != nil {
				return ctx.Err()
			}
			at := now()
			stamp(payload, seq, at)
			if err := one.send(payload, given.of(seq), at); err != nil {
				return fmt.Errorf("publish event %d: %w", seq, err)
			}
		}
		return one.drain(ctx)
	})
}

// onSchedule publishes events 0 to n-1 at a fixed rate, over the connections in turn, and waits for
// the confirmations. The latency of an event that is sent late, for any reason, still counts from
// the time it was due.
func (p *publishers) onSchedule(ctx context.Context, n, size int, rate float64, given ids, late *hdrhistogram.Histogram) error {
	defer pin()()
	payload := newPayload(size)
	begin, step := now()+int64(time.Millisecond), 1e9/rate
	for seq := range n {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		due := begin + int64(float64(seq)*step)
		sleepUntil(due)
		record(late, now()-due)
		stamp(payload, seq, due)
		if err := p.all[seq%len(p.all)].send(payload, given.of(seq), due); err != nil {
			return fmt.Errorf("publish event %d: %w", seq, err)
		}
	}
	return p.each(func(_ int, one publisher) error { return one.drain(ctx) })
}

// each runs f for all connections concurrently and returns the first error.
func (p *publishers) each(f func(i int, one publisher) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(p.all))
	for i, one := range p.all {
		wg.Go(func() { errs[i] = f(i, one) })
	}
	wg.Wait()
	return firstOf(errs)
}

// firstOf returns the first error, because the others usually have the same cause.
func firstOf(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
