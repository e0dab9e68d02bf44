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
	File      string  `default:"cmd/eventhub/bench/testdata/ratios.json" type:"path" help:"The expected ratios."`
	Update    bool    `help:"Write the ratios that are measured to the file."`
	Rounds    int     `default:"9" help:"Rounds of each side. What fails is measured once more, with twice as many, before the gate fails."`
	Tolerance float64 `default:"0.25" help:"How much worse than expected a ratio may be, as a fraction."`
}

// Help is shown by --help.
func (*Gate) Help() string {
	return `Compares the hub with nats.go on the same server, in short alternating rounds, and fails when a ratio is more than --tolerance
worse than the recorded one: lower for rates, higher for what an event costs. Ratios are medians of those of neighbouring rounds.

  eventhub bench gate
  eventhub bench gate --update --rounds 15`
}

// gatedRatio is a ratio that the gate holds.
type gatedRatio struct {
	name   string
	metric metric
	// falling is whether less is worse.
	falling bool
}

// gatedBench is a benchmark whose ratios the gate holds.
type gatedBench struct {
	load   load
	round  func(*load, *run) roundFunc
	ratios []gatedRatio
	// against is nats.go over TCP (""), or viaNativeWS.
	against string
	// profile shows where to look when one of them fails.
	profile string
	// keyed is what is run in place of the rounds of load, if it is not nil. There is a ratio for each of its studies.
	keyed *Keyed
}

// gatedBenches are what the gate runs. Latency is taken at a rate at which the cost is wake-ups, not work; its median and its
// CPU are held, because its 99th percentile is three times as high in one round as in the next.
func gatedBenches() []gatedBench {
	const group, publisher, rate = "bench", "async", 5000
	flatOut := load{N: 40_000, Topic: "bench.gate", Size: 256, Connections: 4, InFlight: 256}
	atRate := flatOut
	atRate.N = rate / 2 // rounds of half a second
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
			load: atRate, ratios: []gatedRatio{{"latency p50", p50Metric, false}, {"latency CPU", allCPUMetric, false}},
			round: func(l *load, b *run) roundFunc {
				cmd := &Latency{load: *l, Rate: rate, Group: group, NativePublisher: publisher}
				return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
					return cmd.round(ctx, b, s.via, topic, n)
				}
			},
			// Over TCP, the CPU that nats.go takes at this rate is a third more in one minute than in the next.
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

// Run measures and judges.
func (cmd *Gate) Run(ctx context.Context, env Env, target *Target) (err error) {
	switch {
	case cmd.Rounds < 3 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: 3 to 1000 are allowed", cmd.Rounds)
	case cmd.Tolerance <= 0 || cmd.Tolerance >= 1:
		return fmt.Errorf("--tolerance %v: it must be between 0 and 1", cmd.Tolerance)
	case target.JSON:
		return errors.New("the gate prints text only: leave --json")
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
	quiet.Out = io.Discard // the rounds are not shown
	b := newRun(quiet, target, sys)
	try := func(of gatedBench, count int) ([]Ratio, error) { return of.measure(ctx, b, count) }
	if cmd.Update {
		return cmd.record(env.Out, gatedBenches(), try)
	}
	return cmd.judge(env.Out, expected, gatedBenches(), try)
}

// measure runs a number of rounds of both sides.
func (g gatedBench) measure(ctx context.Context, b *run, count int) ([]Ratio, error) {
	if g.keyed != nil {
		return g.measureKeyed(ctx, b, count)
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

// measureKeyed takes the mean of a study's calls, against the fastest way with nats.go.
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

// judge compares. What is worse than allowed is measured once more with twice as many rounds, so that a moment in which
// the machine was busy does not count; the second result decides.
func (cmd *Gate) judge(w io.Writer, expected map[string]float64, benches []gatedBench, try func(gatedBench, int) ([]Ratio, error)) error {
	var failures []string
	for _, g := range benches {
		var worse []string
		for _, count := range []int{cmd.Rounds, 2 * cmd.Rounds} {
			got, err := try(g, count)
			if err != nil {
				return err
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
		return fmt.Errorf("slower than before: %s", strings.Join(failures, "; "))
	}
	return nil
}

// compare prints ratios beside what is expected, and returns those that are too bad.
func (cmd *Gate) compare(w io.Writer, expected map[string]float64, g gatedBench, got []Ratio) (worse []string, err error) {
	for i, held := range g.ratios {
		want, known := expected[held.name]
		if !known {
			return nil, fmt.Errorf("%s has no ratio %q: record it (--update)", cmd.File, held.name)
		}
		r, bound, most, verdict := got[i], want*(1+cmd.Tolerance), "at most", "ok"
		if held.falling {
			bound, most = want*(1-cmd.Tolerance), "at least"
		}
		if !held.within(r.OfPairs, bound) {
			verdict = "WORSE"
			worse = append(worse, fmt.Sprintf("%s is %.3f of that of nats.go, %s %.3f is allowed; to look further: %s", held.name, r.OfPairs, most, bound, g.profile))
		}
		_, err := fmt.Fprintf(w, "%-12s expected %.3f, %s %.3f; got %.3f [%.3f, %.3f], %s against %s %s: %s\n",
			held.name, want, most, bound, r.OfPairs, r.Min, r.Max, short(r.Hub), short(r.Other), r.Unit, verdict)
		if err != nil {
			return nil, err
		}
	}
	return worse, nil
}

// within reports whether a ratio is no worse than its bound. What is no number is not.
func (r gatedRatio) within(got, bound float64) bool {
	if r.falling {
		return got >= bound
	}
	return got <= bound
}

// record writes the ratios to the file.
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
		return fmt.Errorf("the ratios as JSON: %w", err)
	}
	if err := os.WriteFile(cmd.File, append(text, '\n'), 0o644); err != nil { //nolint:gosec // a file of the sources
		return fmt.Errorf("record the ratios: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", text)
	return err
}

// readRatios reads what record wrote.
func readRatios(file string) (map[string]float64, error) {
	text, err := os.ReadFile(file) //nolint:gosec // the user names it
	if err != nil {
		return nil, fmt.Errorf("the expected ratios: %w: name the file (--file), or make it (--update)", err)
	}
	var ratios map[string]float64
	if err := json.Unmarshal(text, &ratios); err != nil {
		return nil, fmt.Errorf("the expected ratios: %s: %w", file, err)
	}
	return ratios, nil
}
