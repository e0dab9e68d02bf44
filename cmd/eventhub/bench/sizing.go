package bench

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Sizing is `eventhub bench sizing`.
type Sizing struct {
	Out   string   `default:"docs/sizing" type:"path" help:"Directory of sizing.csv."`
	Only  []string `help:"Run only these studies and keep the file's rows of the others: payload, rate, connections, groups, topics. Default: all."`
	Short bool     `help:"Run a small part of each study, as a test."`
}

// Help returns the detailed help text.
func (*Sizing) Help() string {
	return `Measures how the cost of events, connections, topics and groups grows, each study on separate hubs, and writes
one CSV file. On two cores it takes about 12 minutes, during which the machine must be otherwise idle.

  eventhub bench sizing --out docs/sizing && gnuplot docs/sizing/plot.gp
  eventhub bench sizing --only topics,groups`
}

// extent is the set of points that the studies measure.
type extent struct {
	sizes, rates, connections, groups, topics []int
	durabilities                              []durability
	rounds                                    int
	budget                                    time.Duration // duration of a round
	idle, settle                              time.Duration // as in Connections
}

// durability is a level of durability of confirmed events.
type durability struct {
	name     string
	replicas int
	sync     string
}

var (
	full = extent{
		sizes: []int{64, 256, 1 << 10, 16 << 10, 256 << 10, 1 << 20}, rates: []int{100, 1000, 5000, 20_000, 50_000},
		connections: []int{1, 10, 100, 1000, 10_000}, groups: []int{1, 10, 100, 1000}, topics: []int{1, 10, 100, 1000},
		durabilities: []durability{{"R1 2m", 1, "2m"}, {"R1 1s", 1, "1s"}, {"R1 always", 1, "always"}, {"R3 1s", 3, "1s"}, {"R3 always", 3, "always"}},
		rounds:       3, budget: 600 * time.Millisecond, idle: 3 * time.Second, settle: 15 * time.Second,
	}
	brief = extent{
		sizes: []int{256, 256 << 10}, rates: []int{1000}, connections: []int{1, 50}, groups: []int{1, 10}, topics: []int{1, 10},
		durabilities: []durability{{"R1 1s", 1, "1s"}, {"R3 1s", 3, "1s"}},
		rounds:       1, budget: 200 * time.Millisecond, idle: 200 * time.Millisecond, settle: time.Second,
	}
)

// study is a part of sizing.
type study struct {
	name string
	run  func(*sizer, context.Context) error
}

var studies = []study{
	{"payload", (*sizer).payload},
	{"rate", (*sizer).rate},
	{"connections", (*sizer).connections},
	{"groups", (*sizer).groups},
	{"topics", (*sizer).topics},
}

// sizer is the state of one study.
type sizer struct {
	extent
	env    Env
	target Target
	study  string
	rows   []row
}

// row is a point of a curve. A value of 0 was not measured.
type row struct {
	series string
	x      int
	n      int // events per round
	// events is the median number of events per second. low and high are the minimum and maximum of
	// the rounds.
	events, low, high    float64
	serverCPU, clientCPU float64 // µs per event
	p50, p99             float64 // ms
	// memoryMiB is the total memory of the servers. eachKiB and eachDiskKiB are the memory and disk
	// space per item.
	memoryMiB, eachKiB, eachDiskKiB float64
	idleCPU                         float64 // percent of a core
}

var header = []string{
	"study", "series", "x", "events_per_s", "least", "most", "server_cpu_us", "client_cpu_us", "p50_ms", "p99_ms",
	"memory_mib", "memory_kib_each", "disk_kib_each", "idle_cpu_percent",
}

func (r row) record(study string) []string {
	out := []string{study, r.series, strconv.Itoa(r.x)}
	for _, v := range []float64{r.events, r.low, r.high, r.serverCPU, r.clientCPU, r.p50, r.p99, r.memoryMiB, r.eachKiB, r.eachDiskKiB, r.idleCPU} {
		text := ""
		if v != 0 {
			text = strconv.FormatFloat(round(v, 3), 'f', -1, 64)
		}
		out = append(out, text)
	}
	return out
}

// Run runs the studies and updates the file after each.
func (cmd *Sizing) Run(ctx context.Context, env Env, target *Target) error {
	if target.URL != "" || target.NATSURL != "" || target.External || target.JSON {
		return errors.New("sizing starts its own hubs and excludes --url, --nats-url, --external-nats and --json")
	}
	for _, name := range cmd.Only {
		if !slices.ContainsFunc(studies, func(s study) bool { return s.name == name }) {
			return fmt.Errorf("--only %s: unknown study", name)
		}
	}
	e := full
	if cmd.Short {
		e = brief
	}
	if err := errors.Join(target.validate(), allowFiles(slices.Max(e.connections)+spareFiles), os.MkdirAll(cmd.Out, 0o755)); err != nil { //nolint:gosec // not security-relevant
		return err
	}
	file := filepath.Join(cmd.Out, "sizing.csv")
	for _, study := range studies {
		if len(cmd.Only) > 0 && !slices.Contains(cmd.Only, study.name) {
			continue
		}
		z := &sizer{extent: e, env: env, target: *target, study: study.name}
		if err := study.run(z, ctx); err != nil {
			if ctx.Err() != nil {
				return errInterrupted
			}
			return fmt.Errorf("%s: %w", study.name, err)
		}
		if err := z.save(file); err != nil {
			return fmt.Errorf("write %s: %w", file, err)
		}
	}
	return nil
}

// save replaces the rows of the study in the file.
func (z *sizer) save(file string) error {
	all := [][]string{header}
	if f, err := os.Open(file); err == nil { //nolint:gosec // the user names it
		old, err := csv.NewReader(f).ReadAll()
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		for _, line := range old[min(1, len(old)):] {
			if line[0] != z.study {
				all = append(all, line)
			}
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, r := range z.rows {
		all = append(all, r.record(z.study))
	}
	f, err := os.Create(file) //nolint:gosec // the user names it
	if err != nil {
		return err
	}
	return errors.Join(csv.NewWriter(f).WriteAll(all), f.Close())
}

// add stores a row and prints it.
func (z *sizer) add(r row) error {
	z.rows = append(z.rows, r)
	var text strings.Builder
	fmt.Fprintf(&text, "%-11s %-22s %7d ", z.study, r.series, r.x)
	for i, v := range r.record(z.study)[3:] {
		if v != "" {
			fmt.Fprintf(&text, " %s=%s", header[i+3], v)
		}
	}
	_, err := fmt.Fprintln(z.env.Out, text.String())
	return err
}

// with runs f against a new system.
func (z *sizer) with(ctx context.Context, change func(*Target), f func(*run) error) (err error) {
	target := z.target
	change(&target)
	sys, err := openSystem(ctx, z.env, &target, needs{hub: true, native: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.close()) }()
	return f(newRun(z.env, &target, sys))
}

// steady runs rounds that take about z.budget each. It first determines the number of events per
// round, between few and many.
func (z *sizer) steady(ctx context.Context, b *run, once roundFunc, s side, few, many int) (row, error) {
	n := min(few, many)
	for {
		r, err := b.round(ctx, once, s, "bench.sizing", n)
		if err != nil {
			return row{}, err
		}
		took := time.Duration(r.MS * float64(time.Millisecond))
		if took > z.budget/3 || n == many {
			n = min(max(few, int(r.MPS*z.budget.Seconds())), many)
			break
		}
		n = min(4*n, many)
	}
	var results []*Result
	for range z.rounds {
		r, err := b.round(ctx, once, s, "bench.sizing", n)
		if err != nil {
			return row{}, err
		}
		results = append(results, r)
	}
	return rowOf(results), nil
}

// rowOf summarizes rounds in a row.
func rowOf(results []*Result) row {
	m, rates := medians(results), values(results, rateMetric)
	out := row{
		n: max(m.N, m.Published), events: m.MPS, low: slices.Min(rates), high: slices.Max(rates),
		serverCPU: m.ServerCPU, clientCPU: m.ClientCPU, memoryMiB: m.ServerRSS / 1024,
	}
	if m.Quantiles != nil && !m.backlog {
		out.p50, out.p99 = m.P50, m.P99
	}
	return out
}
