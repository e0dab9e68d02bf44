package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// maxHubs is the maximum number of hubs of `eventhub bench hubs`.
const maxHubs = 16

// Hubs is `eventhub bench hubs`.
type Hubs struct {
	load

	Rate   float64 `default:"1000" help:"Events per second, over all hubs together."`
	Hubs   []int   `default:"1,2,4" help:"Numbers of hubs to compare. The ratios compare with the first."`
	Rounds int     `default:"5" help:"Rounds of each number of hubs, after a warm-up round."`
}

// HubsReport compares numbers of hubs.
type HubsReport struct {
	Rate  float64        `json:"rate"`
	Sides []HubsMeasured `json:"sides"`
}

// HubsMeasured is the median of the rounds with a number of hubs. Ratios compare with the first
// number, round by round.
type HubsMeasured struct {
	Hubs   int       `json:"hubs"`
	Median *Result   `json:"median"`
	HubCPU float64   `json:"hub_cpu_us"`
	Ratios []Ratio   `json:"ratios,omitempty"`
	Rounds []*Result `json:"rounds"`
}

// Help returns the detailed help text.
func (*Hubs) Help() string {
	return `Starts hubs beside one cluster of three nats-servers with three replicas of each stream, and publishes as
` + "`eventhub bench latency`" + ` does, on one topic with one group. The connections are spread over one hub, then over two, then over
four, in turns, while the other hubs have no clients. The CPU time of the hubs and that of the nats-servers are reported apart.

  eventhub bench hubs --rate 1000 --n 10000 --connections 16`
}

// hubsSet are the metrics that are compared.
var hubsSet = []metric{p50Metric, p99Metric, hubMetric, natsMetric, clientMetric}

func (cmd *Hubs) validate(target *Target) error {
	switch {
	case target.URL != "" || target.NATSURL != "":
		return errors.New("hubs starts its own hubs and cluster, and excludes --url and --nats-url")
	case cmd.Rate <= 0:
		return errors.New("--rate must be positive")
	case cmd.Rounds < 1 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: must be 1 to 1000", cmd.Rounds)
	case len(cmd.Hubs) == 0 || slices.Min(cmd.Hubs) < 1 || slices.Max(cmd.Hubs) > maxHubs:
		return fmt.Errorf("--hubs: must be numbers from 1 to %d", maxHubs)
	case cmd.Connections < slices.Max(cmd.Hubs):
		return fmt.Errorf("--connections %d: must be at least one for each of %d hubs", cmd.Connections, slices.Max(cmd.Hubs))
	}
	return errors.Join(target.validate(), cmd.load.validate())
}

// Run runs the benchmark.
func (cmd *Hubs) Run(ctx context.Context, env Env, target *Target) (err error) {
	target.Replicas = max(target.Replicas, clusterSize)
	if err := cmd.validate(target); err != nil {
		return err
	}
	sys, err := openSystem(ctx, env, target, needs{hub: true})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	urls, pids := []string{sys.wsURL}, sys.hubPIDs[:1]
	for i := 1; i < slices.Max(cmd.Hubs); i++ {
		args := slices.Clone(sys.hubArgs)
		for n, arg := range args {
			if strings.HasPrefix(arg, "--data=") {
				args[n] = "--data=" + filepath.Join(sys.dir, "hub-"+strconv.Itoa(i+1))
			}
		}
		hub, err := sys.startHub(ctx, sys.hubEnv(), args...)
		if err != nil {
			return err
		}
		sys.owned = append(sys.owned, hub)
		urls, pids = append(urls, hub.said["websocket"]), append(pids, pidOf(hub))
	}
	b := newRun(env, target, sys)
	report, err := cmd.measure(ctx, b, func(hubs int) {
		sys.serving = urls[:hubs]
		sys.hubPIDs = append(slices.Clone(pids[:hubs]), sys.nativePIDs...)
	})
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, report)
	}
	var text strings.Builder
	for i := range report.Sides {
		side := &report.Sides[i]
		fmt.Fprintf(&text, "median, %d hubs: %s\n", side.Hubs, side.Median.line())
		for n := range side.Ratios {
			fmt.Fprintf(&text, "  %s\n", side.Ratios[n].line())
		}
	}
	_, err = fmt.Fprint(env.Out, text.String())
	return err
}

// measure runs the rounds. serve makes the first hubs take the clients.
func (cmd *Hubs) measure(ctx context.Context, b *run, serve func(hubs int)) (*HubsReport, error) {
	report := &HubsReport{Rate: cmd.Rate}
	for _, n := range cmd.Hubs {
		report.Sides = append(report.Sides, HubsMeasured{Hubs: n})
	}
	latency := &Latency{load: cmd.load, Rate: cmd.Rate, Group: "bench"}
	once := func(ctx context.Context, s side, topic string, n int) (*Result, error) {
		return latency.round(ctx, b, s.via, topic, n)
	}
	for i := -1; i < cmd.Rounds; i++ {
		for n := range report.Sides {
			measured := &report.Sides[n]
			serve(measured.Hubs)
			events := cmd.N
			if i < 0 { // a warm-up
				events = max(1, cmd.N/4)
			}
			result, err := b.round(ctx, once, side{via: viaWS}, cmd.Topic, events)
			if err != nil {
				return nil, fmt.Errorf("round %d, %d hubs: %w", i+1, measured.Hubs, err)
			}
			if i < 0 {
				continue
			}
			measured.Rounds = append(measured.Rounds, result)
			if !b.target.JSON {
				if _, err := fmt.Fprintf(b.env.Out, "%2d, %d hubs: %s\n", i+1, measured.Hubs, result.line()); err != nil {
					return nil, err
				}
			}
		}
	}
	for n := range report.Sides {
		measured := &report.Sides[n]
		measured.Median = medians(measured.Rounds)
		measured.HubCPU = median(values(measured.Rounds, hubMetric))
		for _, m := range hubsSet {
			first := values(report.Sides[0].Rounds, m)
			if n > 0 && !slices.Contains(first, 0) {
				measured.Ratios = append(measured.Ratios, newRatio(m.name, m.unit, values(measured.Rounds, m), first))
			}
		}
	}
	return report, nil
}
