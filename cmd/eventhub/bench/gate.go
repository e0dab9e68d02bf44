package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Gate is `eventhub bench gate`.
type Gate struct {
	File      string  `default:"cmd/eventhub/bench/testdata/ratios.json" type:"path" help:"File with the expected ratios."`
	Update    bool    `help:"Write the measured ratios to the file."`
	Rounds    int     `default:"9" help:"Rounds of each side. A failing benchmark is repeated once with twice as many rounds."`
	Tolerance float64 `default:"0.25" help:"Tolerated deterioration of a ratio, as a fraction."`

	// slower is how many times slower than usual nats.go publishes, at least 1, or 0 before that is
	// measured.
	slower float64
}

// usualRate is how many events a second nats.go publishes on the machine of the recorded ratios. A
// slower machine gets a lower rate for latencies: at the same rate, events would queue.
const usualRate = 180_000

// Help returns the detailed help text.
func (*Gate) Help() string {
	return `Compares the hub with nats.go on the same server, in short alternating rounds. Fails if a ratio is worse than the recorded one by more
than --tolerance: lower for a rate, higher for a cost. On a machine where nats.go publishes at half the usual rate, latency is measured
at half the rate. Each ratio is the median of the ratios of neighbouring rounds.

  eventhub bench gate
  eventhub bench gate --update --rounds 15`
}

// gatedRatio is a ratio that the gate checks.
type gatedRatio struct {
	name   string
	metric metric
	// falling means that a lower ratio is worse.
	falling bool
}

// gatedBench is a benchmark whose ratios the gate checks.
type gatedBench struct {
	load load
	// paced means that a round publishes its events in half a second, on the usual machine.
	paced  bool
	round  func(*load, *run) roundFunc
	ratios []gatedRatio
	// against is the other side: nats.go over TCP if empty, or viaNativeWS.
	against string
	// profile is the command for investigating a failure.
	profile string
	// keyed, if not nil, is run in place of the rounds of load, with one ratio per study.
	keyed *Keyed
}

// gatedBenches returns the benchmarks of the gate. Latency is measured at a rate where wake-ups
// dominate the cost. The gate checks the median and the CPU use, because the 99th percentile varies
// threefold between rounds.
func gatedBenches() []gatedBench {
	const group, publisher, rate = "bench", "async", 5000
	flatOut := load{N: 40_000, Topic: "bench.gate", Size: 256, Connections: 4, InFlight: 256}
	atRate := flatOut
	atRate.N = rate / 2 // half a second per round
	return []gatedBench{
		{
			load: flatOut, ratios: []gatedRatio{{"pub rate", rateMetric, true}},
			round: func(l *load, b *run) roundFunc {
				cmd := &Pub{load: *l, Batch: 1, NativePublisher: publisher}
				return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
					return cmd.round(ctx, b, s.via, topic, n)
				}
			},
			profile: "go test ./facade -run '^$' -bench Publish -benchtime 500000x -cpuprofile cpu.out && go tool pprof -top cpu.out",
		},
		{
			load: flatOut, ratios: []gatedRatio{{"sub rate", rateMetric, true}},
			round: func(l *load, b *run) roundFunc {
				cmd := &Sub{load: *l, Group: group, Fill: "own"}
				return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
					if err := cmd.fill(ctx, b, s.via, topic, n); err != nil {
						return nil, fmt.Errorf("fill the topic: %w", err)
					}
					return cmd.round(ctx, b, s.via, topic, newTally(n))
				}
			},
			profile: "go test ./facade -run '^$' -bench DeliverAndAck -benchtime 500000x -cpuprofile cpu.out && go tool pprof -top cpu.out",
		},
		{
			load: atRate, paced: true, ratios: []gatedRatio{{"latency p50", p50Metric, false}, {"latency CPU", allCPUMetric, false}},
			round: func(l *load, b *run) roundFunc {
				cmd := &Latency{load: *l, Rate: float64(2 * l.N), Group: group, NativePublisher: publisher}
				return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
					return cmd.round(ctx, b, s.via, topic, n)
				}
			},
			// Over TCP, the CPU use of nats.go at this rate varies by a third from minute to
			// minute.
			against: viaNativeWS,
			profile: "eventhub bench latency --compare native-ws --n 25000",
		},
		{
			keyed:   &Keyed{Keys: 20_000, Size: 128, Again: 0.1, Only: []string{"keys", "key", "watch"}},
			ratios:  []gatedRatio{{name: "keyed 1,000"}, {name: "keyed one"}, {name: "keyed watch"}},
			profile: "eventhub bench keyed --keys 200000",
		},
	}
}

// Run measures the ratios and compares them with the expected ones.
func (cmd *Gate) Run(ctx context.Context, env Env, target *Target) (err error) {
	switch {
	case cmd.Rounds < 3 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: must be 3 to 1000", cmd.Rounds)
	case cmd.Tolerance <= 0 || cmd.Tolerance >= 1:
		return fmt.Errorf("--tolerance %v: must be between 0 and 1", cmd.Tolerance)
	case target.JSON:
		return errors.New("the gate does not support --json")
	}
	var expected map[string]float64
	if !cmd.Update {
		if expected, err = readRatios(cmd.File); err != nil {
			return err
		}
	}
	if err := target.validate(); err != nil {
		return err
	}
	sys, err := openSystem(ctx, env, target, needs{hub: true, native: true, nativeWS: true})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	quiet := env
	quiet.Out = io.Discard // hides the rounds
	b := newRun(quiet, target, sys)
	try := func(of gatedBench, count int) ([]Ratio, error) { return of.measure(ctx, b, count, cmd.slower) }
	if cmd.Update {
		return cmd.record(env.Out, gatedBenches(), try)
	}
	return cmd.judge(env.Out, expected, gatedBenches(), try)
}

// measure runs the given number of rounds of both sides.
func (g gatedBench) measure(ctx context.Context, b *run, count int, slower float64) ([]Ratio, error) {
	if g.keyed != nil {
		return g.measureKeyed(ctx, b, count)
	}
	if g.paced {
		g.load.N = int(float64(g.load.N) / max(1, slower))
	}
	p := plan{name: "gate", sides: []side{{via: viaWS}, {via: cmp.Or(g.against, viaNative)}}, rounds: &rounds{Rounds: count, WarmUp: g.load.N}, load: &g.load}
	for _, r := range g.ratios {
		p.metrics = append(p.metrics, metric{r.name, r.metric.unit, r.metric.of})
	}
	report, err := b.rounds(ctx, p, g.round(&g.load, b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", g.ratios[0].name, err)
	}
	return report.Ratios, nil
}

// measureKeyed compares the mean time of a study's calls with the fastest nats.go variant.
func (g gatedBench) measureKeyed(ctx context.Context, b *run, count int) ([]Ratio, error) {
	results, _, err := g.keyed.run(ctx, b, count)
	if err != nil {
		return nil, fmt.Errorf("keyed: %w", err)
	}
	var ratios []Ratio
	for _, r := range results {
		if r.Counts && !r.median {
			r.Name = g.ratios[len(ratios)].name
			ratios = append(ratios, r.Ratio)
		}
	}
	return ratios, nil
}

// judge compares the ratios with the expected ones. A failing benchmark is repeated once with twice
// as many rounds, so that a short disturbance of the machine does not count. The second result
// decides.
func (cmd *Gate) judge(w io.Writer, expected map[string]float64, benches []gatedBench, try func(gatedBench, int) ([]Ratio, error)) error {
	var failures []string
	for _, g := range benches {
		var worse []string
		for _, count := range []int{cmd.Rounds, 2 * cmd.Rounds} {
			got, err := try(g, count)
			if err != nil {
				return err
			}
			if cmd.slower == 0 { // the first is publishing
				cmd.slower = max(1, usualRate/max(got[0].Other, 1))
			}
			if worse, err = cmd.compare(w, expected, g, got); err != nil {
				return err
			}
			if len(worse) == 0 {
				break
			}
		}
		failures = append(failures, worse...)
	}
	if len(failures) > 0 {
		return fmt.Errorf("performance regression: %s", strings.Join(failures, "; "))
	}
	return nil
}

// compare prints the ratios beside the expected ones and returns the failures.
func (cmd *Gate) compare(w io.Writer, expected map[string]float64, g gatedBench, got []Ratio) (worse []string, err error) {
	for i, held := range g.ratios {
		want, known := expected[held.name]
		if !known {
			return nil, fmt.Errorf("%s has no ratio %q; record it with --update", cmd.File, held.name)
		}
		r, bound, most, verdict := got[i], want*(1+cmd.Tolerance), "at most", "ok"
		if held.falling {
			bound, most = want*(1-cmd.Tolerance), "at least"
		}
		if !held.within(r.OfPairs, bound) {
			verdict = "WORSE"
			worse = append(worse, fmt.Sprintf("%s is %.3f of nats.go, %s %.3f allowed; to investigate: %s", held.name, r.OfPairs, most, bound, g.profile))
		}
		_, err := fmt.Fprintf(w, "%-12s expected %.3f, %s %.3f; got %.3f [%.3f, %.3f], %s against %s %s: %s\n",
			held.name, want, most, bound, r.OfPairs, r.Min, r.Max, short(r.Hub), short(r.Other), r.Unit, verdict)
		if err != nil {
			return nil, err
		}
	}
	return worse, nil
}

// within reports whether a ratio meets its bound. NaN does not.
func (r gatedRatio) within(got, bound float64) bool {
	if r.falling {
		return got >= bound
	}
	return got <= bound
}

// record writes the measured ratios to the file.
func (cmd *Gate) record(w io.Writer, benches []gatedBench, try func(gatedBench, int) ([]Ratio, error)) error {
	ratios := make(map[string]float64)
	for _, g := range benches {
		got, err := try(g, cmd.Rounds)
		if err != nil {
			return err
		}
		for _, r := range got {
			ratios[r.Name] = round(r.OfPairs, 3)
		}
	}
	text, err := json.MarshalIndent(ratios, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the ratios: %w", err)
	}
	if err := os.WriteFile(cmd.File, append(text, '\n'), 0o644); err != nil { //nolint:gosec // a source file
		return fmt.Errorf("write the ratios: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", text)
	return err
}

// readRatios reads a file that record wrote.
func readRatios(file string) (map[string]float64, error) {
	text, err := os.ReadFile(file) //nolint:gosec // the user names it
	if err != nil {
		return nil, fmt.Errorf("read the expected ratios: %w; set the file (--file) or create it (--update)", err)
	}
	var ratios map[string]float64
	if err := json.Unmarshal(text, &ratios); err != nil {
		return nil, fmt.Errorf("parse the expected ratios in %s: %w", file, err)
	}
	return ratios, nil
}
