package bench

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"
)

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
