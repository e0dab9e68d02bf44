package bench

import (
	"bufio"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"

	eventhub "eventhub/sdk/go"
	"eventhub/sdk/go/wire"
)

// joining is the number of subscriptions made at a time.
const joining = 16

// askEvery is how often the hub is asked how many subscriptions it has.
const askEvery = 500 * time.Millisecond

// Scale is `eventhub bench scale`.
type Scale struct {
	Connections int           `default:"10000" help:"Connections, each with one subscription."`
	Groups      int           `default:"2000" help:"Durable groups, a multiple of --topics."`
	Topics      int           `default:"500" help:"Topics, each with a stream of its own."`
	Rate        float64       `default:"200" help:"Events per second over all topics, while the hub has traffic."`
	Size        int           `default:"256" help:"Bytes of the JSON payload."`
	For         time.Duration `default:"10s" help:"Duration of each measurement of the CPU, idle and with traffic."`
	Settle      time.Duration `default:"15s" help:"Maximum time for memory to settle."`
	ReturnRate  int           `default:"1000" help:"Clients a second that the hub asks to come back."`
	Timeout     time.Duration `default:"2m" help:"Maximum time of each step."`
	Out         string        `type:"path" help:"File to which the measured rows are added, in the format of docs/sizing/scale.csv. Default: none."`
}

// Stage is what the hub and its nats-server take at one point. Each stage has what the one before
// has, and more.
type Stage struct {
	Name          string `json:"stage"`
	Connections   int    `json:"connections"`
	Topics        int    `json:"topics"`
	Groups        int    `json:"groups"`
	Subscriptions int    `json:"subscriptions"`
	// Hub and NATS are resident memory. Heap and Stacks are those of the hub that Go has in use,
	// garbage included.
	HubKiB     float64 `json:"hub_rss_kib"`
	HeapKiB    float64 `json:"hub_heap_kib"`
	StacksKiB  float64 `json:"hub_stacks_kib"`
	NATSKiB    float64 `json:"nats_rss_kib"`
	Goroutines float64 `json:"hub_goroutines"`
	HubFiles   float64 `json:"hub_files"`
	NATSFiles  float64 `json:"nats_files"`
	// HubCPU and NATSCPU are in percent of one core, without events.
	HubCPU  float64 `json:"hub_idle_cpu_percent"`
	NATSCPU float64 `json:"nats_idle_cpu_percent"`
	// MadeMS is how long it took to add what this stage adds.
	MadeMS float64 `json:"made_ms"`
}

// Traffic is the cost of events at a fixed rate.
type Traffic struct {
	Rate       float64 `json:"rate"`
	Published  int     `json:"published"`
	Deliveries int     `json:"deliveries"`
	*Quantiles
	HubCPU      float64 `json:"hub_cpu_us_per_delivery"`
	NATSCPU     float64 `json:"nats_cpu_us_per_delivery"`
	HubKiB      float64 `json:"hub_rss_kib"`
	NATSKiB     float64 `json:"nats_rss_kib"`
	Redelivered int64   `json:"redelivered"`
}

// Scaled is the report of `eventhub bench scale`.
type Scaled struct {
	Stages  []Stage  `json:"stages"`
	Traffic *Traffic `json:"traffic"`
	Return  *Return  `json:"return"`
	// SubscribedMS is the time from the end of the first hub until the next one had all
	// subscriptions, at most half a second too long. After is the traffic behind that.
	SubscribedMS float64  `json:"subscribed_ms"`
	After        *Traffic `json:"traffic_after"`
}

// Help returns the detailed help text.
func (*Scale) Help() string {
	return `Starts a nats-server and a hub beside it, and adds connections, topics, groups with a member each, and further members, one
after the other. After each, it measures memory, open files and goroutines, and the CPU time without events. Then it publishes to
all topics at a fixed rate, restarts the hub, and waits until all clients are connected and subscribed again. In the end, it publishes
again, and every group must get every event. The clients are Go clients, which ping the hub every 15 s.

  eventhub bench scale --connections 10000 --groups 2000 --topics 500`
}

func (cmd *Scale) validate(target *Target) error {
	switch {
	case target.URL != "" || target.NATSURL != "":
		return errors.New("scale starts its own hub and nats-server, and excludes --url and --nats-url")
	case cmd.Topics < 1 || cmd.Groups < cmd.Topics || cmd.Groups%cmd.Topics != 0:
		return fmt.Errorf("--groups %d: must be a multiple of --topics %d", cmd.Groups, cmd.Topics)
	case cmd.Connections < cmd.Groups || cmd.Connections > 15_000:
		return fmt.Errorf("--connections %d: must be at least one for each group, and at most 15000", cmd.Connections)
	case cmd.Rate <= 0 || cmd.For < 100*time.Millisecond || cmd.ReturnRate < 1:
		return errors.New("--rate and --return-rate must be positive, and --for at least 100ms")
	case cmd.Size < minPayload || cmd.Size > 1<<20:
		return fmt.Errorf("--size %d: must be %d to %d bytes", cmd.Size, minPayload, 1<<20)
	}
	return errors.Join(target.validate(), allowFiles(cmd.Connections+cmd.Topics+cmd.Groups+spareFiles))
}

// Run runs the benchmark.
func (cmd *Scale) Run(ctx context.Context, env Env, target *Target) (err error) {
	target.External = true
	if err := cmd.validate(target); err != nil {
		return err
	}
	sys := &system{target: target, admins: make(map[string]*admin)}
	defer func() { err = ended(ctx, err, sys) }()
	if err := sys.startNATS(ctx); err != nil {
		return err
	}
	z := &scaling{Scale: cmd, sys: sys, run: newRun(env, target, sys), times: &sharedTimes{all: newTimes(8)}}
	z.back = &returning{changed: make(chan struct{}, 1), dialled: make([]time.Time, cmd.Connections)}
	report, err := z.measure(ctx)
	err = errors.Join(err, z.close()) //nolint:contextcheck // Close has a time limit of its own
	if err != nil {
		return err
	}
	if cmd.Out != "" {
		if err := report.save(cmd.Out); err != nil {
			return fmt.Errorf("write %s: %w", cmd.Out, err)
		}
	}
	if target.JSON {
		return printJSON(env.Out, report)
	}
	return report.print(env)
}

// scaling is the state of a run.
type scaling struct {
	*Scale

	sys     *system
	run     *run
	hub     *process // nil while there is none
	servers []*psutil.Process
	clients []*eventhub.Client
	back    *returning
	times   *sharedTimes
	current atomic.Pointer[burst]
}

// burst are the events of one measurement with traffic.
type burst struct {
	begin int64
	tally *tally
}

func (z *scaling) close() error {
	closeAll(z.clients)
	if z.hub == nil {
		return nil
	}
	return z.hub.close()
}

// measure adds one thing after the other.
func (z *scaling) measure(ctx context.Context) (*Scaled, error) {
	port, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	vars := append(z.sys.hubEnv(), "EVENTHUB_LIMIT_RETURN_RATE="+strconv.Itoa(z.ReturnRate))
	if err := z.start(ctx, vars, port); err != nil {
		return nil, err
	}
	out := &Scaled{}
	for _, stage := range []struct {
		name string
		add  func(context.Context) error
	}{
		{"empty", z.warmUp}, {"connections", z.connect}, {"topics", z.makeTopics},
		{"groups", func(ctx context.Context) error { return z.subscribe(ctx, 0, z.Groups) }},
		{"members", func(ctx context.Context) error { return z.subscribe(ctx, z.Groups, z.Connections) }},
	} {
		began := time.Now()
		step, cancel := context.WithTimeout(ctx, z.Timeout)
		err := stage.add(step)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", stage.name, err)
		}
		s := Stage{Name: stage.name, MadeMS: round(float64(time.Since(began))/1e6, 0)}
		if err := z.look(ctx, &s); err != nil {
			return nil, fmt.Errorf("%s: %w", stage.name, err)
		}
		out.Stages = append(out.Stages, s)
	}
	if out.Traffic, err = z.traffic(ctx); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	if err := z.restart(ctx, vars, port, out); err != nil {
		return nil, fmt.Errorf("restart: %w", err)
	}
	if out.After, err = z.traffic(ctx); err != nil {
		return nil, fmt.Errorf("traffic after the restart: %w", err)
	}
	return out, nil
}

func (z *scaling) start(ctx context.Context, vars []string, port int) error {
	hub, err := z.sys.startHub(ctx, vars, "serve", "--ws-port="+strconv.Itoa(port), "--http-port=0", "--ops-port=0", "--log-level=warn",
		"--data="+filepath.Join(z.sys.dir, "hub"), "--nats-url="+z.sys.native.url)
	if err != nil {
		return err
	}
	z.hub, z.sys.wsURL = hub, hub.said["websocket"]
	z.servers = nil
	for _, pid := range append([]int32{pidOf(hub)}, z.sys.nativePIDs...) {
		p, err := psutil.NewProcess(pid)
		if err != nil {
			return fmt.Errorf("process %d: %w", pid, err)
		}
		z.servers = append(z.servers, p)
	}
	return nil
}

// warmUp makes a topic, a group, and a few connections, to exclude memory that all share.
func (z *scaling) warmUp(ctx context.Context) error {
	for range dialing {
		c, err := z.sys.dial(ctx, 1)
		if err != nil {
			return err
		}
		_, err = c.Publish(ctx, "bench.scale.warm", []byte(`{}`), wire.PublishOptions{})
		if err == nil {
			_, err = c.Subscribe(ctx, "bench.scale.warm", "bench", wire.SubscribeOptions{From: "latest"}, func(wire.Event) {})
		}
		if err = errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (z *scaling) connect(ctx context.Context) (err error) {
	z.clients, err = connectAll(ctx, z.sys.wsURL, z.sys.token, z.Connections, z.back)
	return err
}

func (*scaling) topic(i int) string { return fmt.Sprintf("bench.scale.%d", i) }

// makeTopics publishes an event to each topic, which makes its stream.
func (z *scaling) makeTopics(ctx context.Context) error {
	for i := range z.Topics {
		if _, err := z.clients[i%len(z.clients)].Publish(ctx, z.topic(i), struct{}{}, eventhub.PublishOptions{}); err != nil {
			return fmt.Errorf("publish to %s: %w", z.topic(i), err)
		}
	}
	return nil
}

// subscribe makes each client from first to before end a member of a group.
func (z *scaling) subscribe(ctx context.Context, first, end int) error {
	errs := make([]error, joining)
	var next atomic.Int64
	var wg sync.WaitGroup
	for worker := range joining {
		wg.Go(func() {
			for i := first + int(next.Add(1)) - 1; i < end && errs[worker] == nil; i = first + int(next.Add(1)) - 1 {
				group := i % z.Groups
				// The subscription is to outlive this step.
				sub, cancel := context.WithCancel(context.WithoutCancel(ctx))
				stop := context.AfterFunc(ctx, cancel)
				_, errs[worker] = z.clients[i].Subscribe(sub, z.topic(group%z.Topics), fmt.Sprintf("bench-%d", group),
					eventhub.SubscribeOptions{From: "latest"}, z.handler(group/z.Topics, i))
				stop()
				_ = cancel // the clients' Close ends the subscriptions
			}
		})
	}
	wg.Wait()
	return firstOf(errs)
}

// handler counts the events of the groups of a topic, of which each has a number.
func (z *scaling) handler(number, member int) eventhub.Handler {
	timed := z.times.stamped(member)
	return func(_ context.Context, d *eventhub.Delivery) error {
		b := z.current.Load()
		seq, at, err := readStamp(d.Payload)
		if err != nil || b == nil || at < b.begin {
			return nil //nolint:nilerr // the event that made the topic, or one of an earlier burst
		}
		if _, err := timed(d.Payload, 0); err != nil {
			b.tally.failed(err)
		}
		b.tally.mark(seq*(z.Groups/z.Topics) + number)
		return nil
	}
}

// gauges reads the metrics of the hub that have no labels.
func (z *scaling) gauges(ctx context.Context) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, z.hub.said["ops"]+"/metrics", http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("metrics of the hub: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("metrics of the hub: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // of an answer
	out := make(map[string]float64)
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil && !strings.ContainsAny(name, "{#") {
			out[name] = v
		}
	}
	if err := lines.Err(); err != nil || resp.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("metrics of the hub: status %d", resp.StatusCode), err)
	}
	return out, nil
}

// look measures what is there.
func (z *scaling) look(ctx context.Context, s *Stage) error {
	if _, _, err := settledKiB(ctx, z.servers, z.Settle); err != nil {
		return err
	}
	for i, cpu := range []*float64{&s.HubCPU, &s.NATSCPU} {
		used, err := cpuSeconds(z.servers[i])
		if err != nil {
			return err
		}
		*cpu = -used
	}
	began := time.Now()
	select {
	case <-time.After(z.For):
	case <-ctx.Done():
		return ctx.Err()
	}
	over := time.Since(began).Seconds()
	for i, of := range []struct{ cpu, kib, files *float64 }{{&s.HubCPU, &s.HubKiB, &s.HubFiles}, {&s.NATSCPU, &s.NATSKiB, &s.NATSFiles}} {
		used, err := cpuSeconds(z.servers[i])
		if err != nil {
			return err
		}
		*of.cpu = round(100*(*of.cpu+used)/over, 2)
		if *of.kib, err = residentKiB(z.servers[i : i+1]); err != nil {
			return err
		}
		files, err := z.servers[i].NumFDsWithContext(ctx)
		if err != nil {
			return fmt.Errorf("open files of process %d: %w", z.servers[i].Pid, err)
		}
		*of.files = float64(files)
	}
	g, err := z.gauges(ctx)
	if err != nil {
		return err
	}
	s.HeapKiB, s.StacksKiB = g["go_memstats_heap_inuse_bytes"]/1024, g["go_memstats_stack_inuse_bytes"]/1024
	s.Goroutines, s.Connections, s.Subscriptions = g["go_goroutines"], int(g["eventhub_connections"]), int(g["eventhub_subscriptions"])
	switch s.Name {
	case "members", "groups":
		s.Topics, s.Groups = z.Topics, z.Groups
	case "topics":
		s.Topics = z.Topics
	}
	return nil
}

// traffic publishes to all topics at the fixed rate until every group has every event.
func (z *scaling) traffic(ctx context.Context) (*Traffic, error) {
	p := &publishers{}
	defer p.close()
	const publishing4 = 4
	topics := make([]string, z.Topics)
	for i := range topics {
		topics[i] = z.topic(i)
	}
	for i := range publishing4 {
		w, err := z.sys.newWSPublisher(ctx, publishing{inFlight: 256}, nil)
		if err != nil {
			return nil, err
		}
		p.all = append(p.all, &manyTopics{wsPublisher: w, topics: topics, next: i * z.Topics / publishing4})
	}
	n := max(1, int(z.Rate*z.For.Seconds()))
	b := &burst{begin: now(), tally: newTally(n * (z.Groups / z.Topics))}
	for i := range z.times.all {
		z.times.mu[i].Lock()
		z.times.all[i].Reset()
		z.times.mu[i].Unlock()
	}
	z.current.Store(b)
	var before [2]float64
	for i := range before {
		var err error
		if before[i], err = cpuSeconds(z.servers[i]); err != nil {
			return nil, err
		}
	}
	if err := p.onSchedule(ctx, n, z.Size, z.Rate, ids{}, newHistogram()); err != nil {
		return nil, err
	}
	if err := waitAll(ctx, nil, b.tally); err != nil {
		return nil, err
	}
	out := &Traffic{Rate: z.Rate, Published: n, Deliveries: int(b.tally.want), Redelivered: b.tally.again.Load()}
	for i, of := range []struct{ cpu, kib *float64 }{{&out.HubCPU, &out.HubKiB}, {&out.NATSCPU, &out.NATSKiB}} {
		after, err := cpuSeconds(z.servers[i])
		if err != nil {
			return nil, err
		}
		*of.cpu = round((after-before[i])*1e6/float64(out.Deliveries), 1)
		if *of.kib, err = residentKiB(z.servers[i : i+1]); err != nil {
			return nil, err
		}
	}
	out.Quantiles = newQuantiles(z.times.all...)
	return out, nil
}

// restart restarts the hub, and waits for all clients and subscriptions.
func (z *scaling) restart(ctx context.Context, vars []string, port int, out *Scaled) error {
	z.back.forget()
	hub := z.hub
	z.hub = nil
	if err := hub.close(); err != nil {
		return err
	}
	end := time.Now()
	if err := z.start(ctx, vars, port); err != nil { // the hub outlives this step
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, z.Timeout)
	defer cancel()
	down := time.Since(end)
	peak := watchCPU(ctx, pidOf(z.hub))
	err := z.back.until(ctx, z.Connections)
	if err == nil {
		err = z.subscribed(ctx)
	}
	most := peak()
	if err != nil {
		return err
	}
	out.SubscribedMS = round(float64(time.Since(end))/1e6, 0)
	out.Return = z.back.summary(end)
	out.Return.ReturnRate, out.Return.DownMS, out.Return.PeakCPU = z.ReturnRate, round(float64(down)/1e6, 1), most
	return nil
}

// subscribed waits until the hub has all subscriptions.
func (z *scaling) subscribed(ctx context.Context) error {
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		g, err := z.gauges(ctx)
		if err != nil {
			return err
		}
		if int(g["eventhub_subscriptions"]) >= z.Connections {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("%.0f of %d clients are subscribed: %w", g["eventhub_subscriptions"], z.Connections, ctx.Err())
		}
	}
}

// scaleHeader are the columns of a file of rows.
var scaleHeader = []string{
	"stage", "connections", "topics", "groups", "subscriptions", "hub_rss_kib", "hub_heap_kib", "hub_stacks_kib", "nats_rss_kib",
	"hub_goroutines", "hub_files", "nats_files", "hub_idle_cpu_percent", "nats_idle_cpu_percent", "made_ms",
}

// save adds the stages to a file.
func (r *Scaled) save(file string) error {
	_, err := os.Stat(file)
	f, openErr := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644) //nolint:gosec // the user names it
	if openErr != nil {
		return openErr
	}
	w := csv.NewWriter(f)
	if errors.Is(err, os.ErrNotExist) {
		_ = w.Write(scaleHeader) // Flush keeps the error
	}
	for i := range r.Stages {
		s := &r.Stages[i]
		row := []string{s.Name}
		for _, v := range []float64{
			float64(s.Connections), float64(s.Topics), float64(s.Groups), float64(s.Subscriptions), s.HubKiB, s.HeapKiB, s.StacksKiB, s.NATSKiB,
			s.Goroutines, s.HubFiles, s.NATSFiles, s.HubCPU, s.NATSCPU, s.MadeMS,
		} {
			row = append(row, strconv.FormatFloat(round(v, 2), 'f', -1, 64))
		}
		_ = w.Write(row)
	}
	w.Flush()
	return errors.Join(w.Error(), f.Close())
}

// print writes the stages, what each thing costs, and the traffic.
func (r *Scaled) print(env Env) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%-11s %9s %9s %9s %9s %10s %9s %9s %8s %8s %9s\n",
		"", "hub MiB", "heap", "stacks", "NATS MiB", "goroutines", "files", "NATS f.", "hub %", "NATS %", "made in")
	for i := range r.Stages {
		s := &r.Stages[i]
		fmt.Fprintf(&b, "%-11s %9.1f %9.1f %9.1f %9.1f %10.0f %9.0f %9.0f %8.2f %8.2f %6.0f ms\n", s.Name,
			s.HubKiB/1024, s.HeapKiB/1024, s.StacksKiB/1024, s.NATSKiB/1024, s.Goroutines, s.HubFiles, s.NATSFiles, s.HubCPU, s.NATSCPU, s.MadeMS)
	}
	b.WriteString("each:\n")
	for i := 1; i < len(r.Stages); i++ {
		s, last := &r.Stages[i], &r.Stages[i-1]
		n := float64(max(1, max(s.Connections-last.Connections, s.Topics-last.Topics, s.Groups-last.Groups, s.Subscriptions-last.Subscriptions)))
		each := func(now, before float64) float64 { return (now - before) / n }
		fmt.Fprintf(&b, "%-11s %5.0f more: hub %.2f KiB (heap %.2f, stacks %.2f), NATS %.2f KiB; %.2f goroutines, %.2f and %.2f files; idle CPU %.2f and %.2f %% of a core per 1,000\n",
			s.Name, n, each(s.HubKiB, last.HubKiB), each(s.HeapKiB, last.HeapKiB), each(s.StacksKiB, last.StacksKiB), each(s.NATSKiB, last.NATSKiB),
			each(s.Goroutines, last.Goroutines), each(s.HubFiles, last.HubFiles), each(s.NATSFiles, last.NATSFiles),
			math.Round(each(s.HubCPU, last.HubCPU)*1e5)/100, math.Round(each(s.NATSCPU, last.NATSCPU)*1e5)/100)
	}
	r.Traffic.print(&b, "traffic")
	fmt.Fprintf(&b, "restart: no hub for %.0f ms, all back after %.0f ms, all subscribed after %.0f ms, %d failed attempts, at most %d back in a second;\n"+
		"  handshake p50 %.1f ms, p99 %.1f ms, max %.1f ms; peak CPU %.0f %% of a core\n",
		r.Return.DownMS, r.Return.BackMS, r.SubscribedMS, r.Return.Failed, r.Return.PeakPerSecond, r.Return.P50MS, r.Return.P99MS, r.Return.MaxMS, r.Return.PeakCPU)
	r.After.print(&b, "traffic after it")
	_, err := fmt.Fprint(env.Out, b.String())
	return err
}

func (t *Traffic) print(b *strings.Builder, name string) {
	fmt.Fprintf(b, "%s: %d events at %.0f/s, %d deliveries (%d again): p50 %.2f, p99 %.2f ms; CPU a delivery: hub %.1f, NATS %.1f µs; hub %.1f MiB, NATS %.1f MiB\n",
		name, t.Published, t.Rate, t.Deliveries, t.Redelivered, t.P50, t.P99, t.HubCPU, t.NATSCPU, t.HubKiB/1024, t.NATSKiB/1024)
}
