package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"eventhub/jetstream"
)

// Ordered is `eventhub bench ordered`.
type Ordered struct {
	Keys    int `default:"10000" help:"Number of keys."`
	N       int `name:"n" default:"50000" help:"Events in a round."`
	Size    int `default:"128" help:"Bytes of the payload."`
	Members int `default:"8" help:"Members of a group."`
	Rounds  int `default:"5" help:"Rounds of the rates, after a warm-up round. All ways run in each round."`
	Blocked int `default:"9" help:"Rounds of the latency beside a key that is never acknowledged, in turn with rounds without one; 0 leaves them out."`

	HandOvers int `name:"hand-overs" default:"9" help:"Clean hand-overs of a group to another hub; 0 leaves them out."`
	Idle      int `default:"1000" help:"Ordered groups without events, to see what one costs; 0 leaves them out."`
}

// Help returns the detailed help text.
func (*Ordered) Help() string {
	return `Compares ordered groups with groups that are not, by the Go API: two buses in this process, each with its own connections, beside one
nats-server. In turn, the members of a group read and acknowledge the same number of stored events:

  plain      a group that is not ordered
  ordered    an ordered group, with all members on the hub that owns it
  forwarded  an ordered group, with all members on the other hub

Then events are published at a third of the rate of "ordered", with and without a key whose event nobody acknowledges, and the time from
publish to delivery of the other keys is compared. Then the hub that owns a group is closed while 1,000 events a second come, again and
again, and the longest time from publish to delivery is reported. At the end, the cost of groups without events is measured.

  eventhub bench ordered
  eventhub bench ordered --keys 1000 --rounds 9 --blocked 0`
}

func (cmd *Ordered) validate() error {
	switch {
	case cmd.Keys < 1 || cmd.Keys > 1_000_000:
		return fmt.Errorf("--keys %d: must be 1 to 1000000", cmd.Keys)
	case cmd.N < 1000 || cmd.N > 10_000_000:
		return fmt.Errorf("--n %d: must be 1000 to 10000000", cmd.N)
	case cmd.Size < minPayload || cmd.Size > 1<<20:
		return fmt.Errorf("--size %d: must be %d to %d bytes", cmd.Size, minPayload, 1<<20)
	case cmd.Members < 1 || cmd.Members > 1000:
		return fmt.Errorf("--members %d: must be 1 to 1000", cmd.Members)
	case cmd.HandOvers < 0 || cmd.HandOvers > 1000 || cmd.Idle < 0 || cmd.Idle > 10_000:
		return errors.New("--hand-overs must be at most 1000, and --idle at most 10000")
	case cmd.Rounds < 1 || cmd.Rounds > 1000 || cmd.Blocked < 0 || cmd.Blocked > 1000:
		return errors.New("--rounds and --blocked must be at most 1000, and --rounds at least 1")
	}
	return nil
}

// orderedReport is the JSON report of the benchmark.
type orderedReport struct {
	// Plain, Local and Forwarded are medians, in events per second.
	Plain     float64 `json:"plain"`
	Local     float64 `json:"ordered"`
	Forwarded float64 `json:"forwarded"`
	Ratios    []Ratio `json:"ratios"`
	// Rate is that of the latency, in events per second.
	Rate float64 `json:"rate,omitempty"`
	// HandOvers are the longest times to delivery around each hand-over, in milliseconds.
	HandOvers []float64 `json:"hand_overs_ms,omitempty"`
	Idle      *idleCost `json:"idle,omitempty"`
}

// Run runs the benchmark.
func (cmd *Ordered) Run(ctx context.Context, env Env, target *Target) (err error) {
	if err := errors.Join(target.validate(), cmd.validate()); err != nil {
		return err
	}
	sys, err := openSystem(ctx, env, target, needs{native: true})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	b := newRun(env, target, sys)
	o := &orderedRun{cmd: cmd, run: b}
	defer func() { err = errors.Join(err, o.close()) }() //nolint:contextcheck // Bus.Close bounds itself
	for i := range o.hubs {
		o.hubs[i], err = jetstream.Open(ctx, jetstream.Config{URL: sys.native.url, Replicas: target.Replicas})
		if err != nil {
			return err
		}
	}
	report, err := o.measure(ctx)
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, report)
	}
	return report.print(env.Out, cmd, sys.describe(side{via: viaNative}))
}

func (r *orderedReport) print(w io.Writer, cmd *Ordered, system string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%d events of %d bytes, %d keys, %d members; %s\n", cmd.N, cmd.Size, cmd.Keys, cmd.Members, system)
	fmt.Fprintf(&b, "plain %.0f/s, ordered %.0f/s, forwarded %.0f/s\n", r.Plain, r.Local, r.Forwarded)
	if r.Rate > 0 {
		fmt.Fprintf(&b, "latency of the other keys at %.0f/s\n", r.Rate)
	}
	for _, ratio := range r.Ratios {
		fmt.Fprintf(&b, "%-34s %10.3f %10.3f %-5s ratio of the pairs %.3f [%.3f, %.3f]\n", ratio.Name, ratio.Hub, ratio.Other, ratio.Unit, ratio.OfPairs, ratio.Min, ratio.Max)
	}
	if len(r.HandOvers) > 0 {
		fmt.Fprintf(&b, "longest time to delivery around %d hand-overs: median %.0f ms, at most %.0f ms\n", len(r.HandOvers), median(r.HandOvers), slices.Max(r.HandOvers))
	}
	if i := r.Idle; i != nil {
		fmt.Fprintf(&b, "%d groups without events: %d consumers; each takes %.1f KiB and %.0f µs of CPU a second in the hub, and %.0f µs in NATS\n", i.Groups, i.Consumers, i.KiB, i.HubCPU, i.NATSCPU)
	}
	_, err := fmt.Fprint(w, b.String())
	return err
}

// orderedRun measures with two hubs.
type orderedRun struct {
	cmd  *Ordered
	run  *run
	hubs [2]*jetstream.Bus
	next int // number of the next topic

	slots []atomic.Int64 // how many each member of the last group has
}

func (o *orderedRun) close() (err error) {
	for _, hub := range o.hubs {
		if hub != nil {
			err = errors.Join(err, hub.Close())
		}
	}
	return err
}

func (o *orderedRun) topic() string {
	o.next++
	return fmt.Sprintf("bench.ordered.%s.%d", o.run.id, o.next)
}

// orderedWays are the kinds of groups that are compared.
var orderedWays = [...]string{"plain", "ordered", "forwarded"}

func (o *orderedRun) measure(ctx context.Context) (*orderedReport, error) {
	rates := make([][]float64, len(orderedWays))
	for i := range o.cmd.Rounds + 1 {
		for turn := range orderedWays {
			way := (turn + i) % len(orderedWays)
			stop := o.run.progress(orderedWays[way])
			rate, err := o.rate(ctx, orderedWays[way])
			stop()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", orderedWays[way], err)
			}
			if i > 0 {
				rates[way] = append(rates[way], rate)
			}
		}
	}
	report := &orderedReport{Plain: median(rates[0]), Local: median(rates[1]), Forwarded: median(rates[2])}
	report.Ratios = append(report.Ratios, newRatio("rate, ordered to plain", "1/s", rates[1], rates[0]), newRatio("rate, forwarded to plain", "1/s", rates[2], rates[0]))
	if o.cmd.Blocked > 0 {
		if err := o.blocked(ctx, report); err != nil {
			return nil, fmt.Errorf("latency: %w", err)
		}
	}
	for range o.cmd.HandOvers {
		took, err := o.handOver(ctx)
		if err != nil {
			return nil, fmt.Errorf("hand-over: %w", err)
		}
		report.HandOvers = append(report.HandOvers, took)
	}
	if o.cmd.Idle > 0 {
		idle, err := o.idle(ctx, o.cmd.Idle)
		if err != nil {
			return nil, fmt.Errorf("idle groups: %w", err)
		}
		report.Idle = idle
	}
	return report, nil
}

// blocked compares the latency with and without a key that is never acknowledged.
func (o *orderedRun) blocked(ctx context.Context, report *orderedReport) error {
	report.Rate = report.Local / 3
	var with, without []float64
	for i := range 2 * o.cmd.Blocked {
		blocked := (i+i/2)%2 == 0 // both orders
		p99, err := o.latency(ctx, report.Rate, blocked)
		if err != nil {
			return err
		}
		if blocked {
			with = append(with, p99)
		} else {
			without = append(without, p99)
		}
	}
	report.Ratios = append(report.Ratios, newRatio("p99, with a blocked key to without", "ms", with, without))
	return nil
}

// join has the members of a group read a topic. leave ends them.
func (o *orderedRun) join(ctx context.Context, topic, way string, handle func(*jetstream.Held)) (leave func() error, err error) {
	var subs []*jetstream.Subscription
	leave = func() (err error) {
		for _, s := range subs {
			err = errors.Join(err, s.Stop(ctx))
		}
		return err
	}
	opts := jetstream.SubscribeOptions{
		From: jetstream.FromEarliest, MaxInFlight: 1000, BatchSize: 500, AckTimeout: 5 * time.Minute, OrderByKey: way != "plain",
	}
	hub := o.hubs[0]
	if way == "forwarded" { // a member that is paused makes the other hub the owner
		paused := opts
		paused.Paused = true
		s, err := o.hubs[0].Subscribe(ctx, topic, "bench", paused, func(*jetstream.Held) {})
		if err != nil {
			return nil, err
		}
		subs = append(subs, s)
		hub = o.hubs[1]
		for begin := time.Now(); ; {
			info, err := hub.Group(topic, "bench").Info(ctx)
			if err == nil && info.InFlight > 0 { // it pulls
				break
			}
			if time.Since(begin) > 10*time.Second {
				return leave, errors.Join(errors.New("no hub owns the group"), err)
			}
			if err := sleep(ctx, 10*time.Millisecond); err != nil {
				return leave, err
			}
		}
	}
	o.slots = make([]atomic.Int64, o.cmd.Members)
	for i := range o.cmd.Members {
		if opts.OrderByKey {
			opts.Slots = orderedSlots
			opts.OnAssign = func(a jetstream.Assignment) { o.slots[i].Store(int64(len(a.Slots))) }
		}
		s, err := hub.Subscribe(ctx, topic, "bench", opts, handle)
		if err != nil {
			return leave, err
		}
		subs = append(subs, s)
	}
	return leave, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// fill publishes events of all keys in turn, each with the number of its key.
func (o *orderedRun) fill(ctx context.Context, topic string, n int) error {
	p := o.hubs[0].NewPublisher()
	var failed atomic.Pointer[error]
	payload := newPayload(o.cmd.Size)
	for i := range n {
		err := p.PublishAsync(ctx, topic, payload, jetstream.PublishOptions{Key: keyName(i % o.cmd.Keys)}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				failed.Store(&err)
			}
		})
		if err != nil {
			return err
		}
	}
	if err := p.Flush(ctx); err != nil {
		return err
	}
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// rate is how many events per second a group settles.
func (o *orderedRun) rate(ctx context.Context, way string) (float64, error) {
	topic := o.topic()
	if err := o.fill(ctx, topic, o.cmd.N); err != nil {
		return 0, err
	}
	runtime.GC()
	var got atomic.Int64
	done := make(chan struct{})
	began := time.Now()
	leave, err := o.join(ctx, topic, way, func(h *jetstream.Held) {
		d, ok := h.Begin()
		if !ok {
			return
		}
		if d.Ack() == nil && got.Add(1) == int64(o.cmd.N) {
			close(done)
		}
	})
	if err == nil {
		err = await(ctx, done)
	}
	took := time.Since(began)
	if leave != nil {
		err = errors.Join(err, leave())
	}
	if err == nil {
		err = o.run.remove(ctx, viaNative, topic)
	}
	return float64(o.cmd.N) / took.Seconds(), err
}

// dealt waits until all members have as many slots, but for one.
func (o *orderedRun) dealt(ctx context.Context) error {
	least := int64(orderedSlots / o.cmd.Members)
	for begin := time.Now(); ; {
		even := true
		for i := range o.slots {
			n := o.slots[i].Load()
			even = even && n >= least && n <= least+1
		}
		if even {
			return nil
		}
		if time.Since(begin) > 10*time.Second {
			return errors.New("the members have not shared the slots")
		}
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

func await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(5 * time.Minute):
		return errors.New("not all events came")
	}
}

// orderedSlots is the number of slots of ordered groups.
const orderedSlots = 64

// latencyTime is how long the latency is measured in a round.
const latencyTime = 4 * time.Second

// latency is the 99th percentile of the time from when an event was due to its delivery, in
// milliseconds, of all keys but one that may be blocked.
func (o *orderedRun) latency(ctx context.Context, rate float64, blocked bool) (float64, error) {
	topic := o.topic()
	const hot = "blocked"
	if err := o.hubs[0].Admin().Topic(topic).Create(ctx); err != nil {
		return 0, err
	}
	n := int(rate * latencyTime.Seconds())
	var mu sync.Mutex
	times := hdrhistogram.New(1, int64(time.Minute), 3)
	got := 0
	var once sync.Once
	done, held := make(chan struct{}), make(chan struct{})
	began := time.Now()
	leave, err := o.join(ctx, topic, "ordered", func(h *jetstream.Held) {
		d, ok := h.Begin()
		if !ok {
			return
		}
		if d.Event.Key == hot {
			once.Do(func() { close(held) })
			if !blocked {
				_ = d.Ack()
			}
			return
		}
		took := time.Since(began) - time.Duration(binary.LittleEndian.Uint64(d.Event.Payload)) //nolint:gosec // 63 bits
		mu.Lock()
		defer mu.Unlock()
		_ = times.RecordValue(max(int64(took), 1))
		if got++; got == n {
			close(done)
		}
		_ = d.Ack()
	})
	if err == nil {
		err = o.dealt(ctx)
	}
	if err == nil { // a slot does not move while a member has an event of it
		_, err = o.hubs[0].Publish(ctx, topic, newPayload(o.cmd.Size), jetstream.PublishOptions{Key: hot})
	}
	if err == nil {
		err = await(ctx, held)
	}
	if err == nil {
		err = o.paced(ctx, topic, hot, n, rate, began)
	}
	if err == nil {
		err = await(ctx, done)
	}
	if leave != nil {
		err = errors.Join(err, leave())
	}
	if err == nil {
		err = o.run.remove(ctx, viaNative, topic)
	}
	return float64(times.ValueAtQuantile(99)) / 1e6, err
}

// pacedKeys is paced without a key that may be blocked.
func (o *orderedRun) pacedKeys(ctx context.Context, topic string, n int, rate float64, began time.Time) error {
	return o.paced(ctx, topic, "", n, rate, began)
}

// paced publishes n events on schedule, and one of the key that may be blocked, unless it is "",
// beside each hundredth. Their payloads begin with when they were due.
func (o *orderedRun) paced(ctx context.Context, topic, hot string, n int, rate float64, began time.Time) error {
	p := o.hubs[0].NewPublisher()
	var failed atomic.Pointer[error]
	publish := func(key string, payload []byte) error {
		return p.PublishAsync(ctx, topic, payload, jetstream.PublishOptions{Key: key}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				failed.Store(&err)
			}
		})
	}
	start := time.Now()
	for i := range n {
		due := start.Add(time.Duration(float64(i) / rate * 1e9))
		if wait := time.Until(due); wait > 0 {
			if err := sleep(ctx, wait); err != nil {
				return err
			}
		}
		payload := make([]byte, o.cmd.Size)
		binary.LittleEndian.PutUint64(payload, uint64(due.Sub(began))) //nolint:gosec // it is after began
		if err := publish(keyName(i%o.cmd.Keys), payload); err != nil {
			return err
		}
		if i%100 == 0 && hot != "" {
			if err := publish(hot, payload); err != nil {
				return err
			}
		}
	}
	if err := p.Flush(ctx); err != nil {
		return err
	}
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}
