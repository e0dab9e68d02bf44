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

	Via      string  `default:"ws" enum:"ws,http,native,native-ws" help:"The way to the stream: ${enum}."`
	GivenIDs bool    `name:"given-ids" help:"Give each event an id of its own (natively Nats-Msg-Id), so that the server looks for duplicates."`
	Rate     float64 `help:"Events a second, sent on schedule whatever the answers (open loop); the time to the confirmation is measured from the moment that was due. Default: as fast as --in-flight allows."`
	Batch    int     `default:"1" help:"Over HTTP: events a request. More than 1 sends NDJSON."`

	NativePublisher string `name:"native-publisher" default:"async" enum:"async,inbox" help:"How native clients publish: async is nats.go's PublishAsync, inbox one reply inbox of our own."`
}

// Help is shown by --help.
func (*Pub) Help() string {
	return `Measures confirmed publishes a second, and fails unless the stream holds them all.

Over HTTP each connection has one request at a time, so --in-flight does not count there; --batch does.

  eventhub bench pub --compare native
  eventhub bench pub --given-ids --compare native --native-publisher inbox
  eventhub bench pub --via http --batch 500
  eventhub bench pub --rate 20000 --n 200000`
}

// Run measures.
func (cmd *Pub) Run(ctx context.Context, env Env, target *Target) error {
	switch {
	case cmd.Rate < 0:
		return fmt.Errorf("--rate %v: it cannot be negative", cmd.Rate)
	case cmd.Batch < 1 || cmd.Batch > 10_000:
		return fmt.Errorf("--batch %d: 1 to 10000 are allowed", cmd.Batch)
	case cmd.Batch > 1 && cmd.Via != viaHTTP:
		return errors.New("--batch is for --via http")
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

// prepare makes the topic where the hub does not do it, and returns how many events it holds.
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

// verifyStored fails unless the stream holds as many events, where that can be seen.
func (b *run) verifyStored(ctx context.Context, via, topic string, want int) error {
	a, err := b.sys.admin(via)
	if a == nil || err != nil {
		return err
	}
	got, err := a.stored(ctx, topic)
	if others := b.exact && got > want; err == nil && got != want && !others {
		err = fmt.Errorf("the stream of %s holds %d events, and %d were confirmed", topic, got, want)
	}
	return err
}

// publishers are the connections of a round.
type publishers struct {
	all   []publisher
	times []*hdrhistogram.Histogram
}

func (b *run) openPublishers(ctx context.Context, via string, connections int, how publishing) (*publishers, error) {
	p := &publishers{}
	for range connections {
		var times *hdrhistogram.Histogram
		if how.timed { // it takes 200 KiB
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

// close disconnects. What matters has been confirmed before.
func (p *publishers) close() {
	for _, one := range p.all {
		_ = one.close()
	}
}

// flatOut publishes events 0 to n-1, each connection its share and as fast as it can, and waits for the confirmations.
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

// onSchedule publishes events 0 to n-1 at a rate, over the connections in turn, and waits for the confirmations. What is
// sent late, because nothing may be sent or because this process did not get to it, still counts from when it was due.
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

// each runs f for each connection, all at a time, and returns the failures.
func (p *publishers) each(f func(i int, one publisher) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(p.all))
	for i, one := range p.all {
		wg.Go(func() { errs[i] = f(i, one) })
	}
	wg.Wait()
	return firstOf(errs)
}

// firstOf is the first failure: the others mostly say the same.
func firstOf(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
