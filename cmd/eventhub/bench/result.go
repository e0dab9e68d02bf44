package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
)

// Result is the measurement of a round. Fields that a mode does not measure are omitted.
type Result struct {
	Via    string `json:"via"`
	Groups int    `json:"groups,omitempty"`
	// Published is the number of events stored and confirmed. N is the number of events delivered
	// and acknowledged.
	Published int `json:"published,omitempty"`
	N         int `json:"n,omitempty"`
	// MS is the duration in milliseconds. MPS is the number of events per second.
	MS  float64 `json:"ms"`
	MPS float64 `json:"mps"`
	*Quantiles
	// Late is the 99th percentile of how late events were sent, in milliseconds. The latencies
	// include this delay.
	Late float64 `json:"late_p99,omitempty"`
	// Redelivered is the number of repeated deliveries.
	Redelivered int64 `json:"redelivered,omitempty"`
	// ClientCPU and ServerCPU are the CPU times of this process and of all servers, in microseconds
	// per event. NATSCPU is the part of ServerCPU of nats-servers behind a hub, if bench started
	// them. ServerRSS is the resident memory of all servers in KiB.
	ClientCPU float64 `json:"client_cpu_us"`
	ServerCPU float64 `json:"server_cpu_us,omitempty"`
	NATSCPU   float64 `json:"nats_cpu_us,omitempty"`
	ServerRSS float64 `json:"server_rss_kib,omitempty"`

	// backlog means that the quantiles show how long events lay in the stream, which the text
	// output omits.
	backlog bool
}

// metric is a field of Result that can be compared.
type metric struct {
	name, unit string
	of         func(*Result) float64
}

var (
	rateMetric    = metric{"rate", "events/s", func(r *Result) float64 { return r.MPS }}
	p50Metric     = metric{"p50", "ms", func(r *Result) float64 { return r.P50 }}
	p99Metric     = metric{"p99", "ms", func(r *Result) float64 { return r.P99 }}
	clientMetric  = metric{"client CPU", "µs/event", func(r *Result) float64 { return r.ClientCPU }}
	serverMetric  = metric{"server CPU", "µs/event", func(r *Result) float64 { return r.ServerCPU }}
	hubMetric     = metric{"hub CPU", "µs/event", func(r *Result) float64 { return r.ServerCPU - r.NATSCPU }}
	natsMetric    = metric{"NATS CPU", "µs/event", func(r *Result) float64 { return r.NATSCPU }}
	allCPUMetric  = metric{"all CPU", "µs/event", func(r *Result) float64 { return r.ClientCPU + r.ServerCPU }}
	throughputSet = []metric{rateMetric, clientMetric, serverMetric, allCPUMetric}
	latencySet    = []metric{p50Metric, p99Metric, clientMetric, serverMetric, allCPUMetric}
)

// medians returns a Result whose fields are the medians of all.
func medians(all []*Result) *Result {
	m := *all[0]
	of := func(f func(*Result) float64) float64 {
		values := make([]float64, len(all))
		for i, r := range all {
			values[i] = f(r)
		}
		return median(values)
	}
	m.MS = of(func(r *Result) float64 { return r.MS })
	m.MPS = of(func(r *Result) float64 { return r.MPS })
	m.Late = of(func(r *Result) float64 { return r.Late })
	m.ClientCPU = of(func(r *Result) float64 { return r.ClientCPU })
	m.ServerCPU = of(func(r *Result) float64 { return r.ServerCPU })
	m.NATSCPU = of(func(r *Result) float64 { return r.NATSCPU })
	m.ServerRSS = of(func(r *Result) float64 { return r.ServerRSS })
	if m.Quantiles != nil {
		m.Quantiles = &Quantiles{
			P50: of(func(r *Result) float64 { return r.P50 }), P90: of(func(r *Result) float64 { return r.P90 }),
			P99: of(func(r *Result) float64 { return r.P99 }), P999: of(func(r *Result) float64 { return r.P999 }),
			Max: of(func(r *Result) float64 { return r.Max }), Avg: of(func(r *Result) float64 { return r.Avg }),
		}
	}
	return &m
}

// line returns the result as text.
func (r *Result) line() string {
	var b strings.Builder
	n := max(r.Published, r.N)
	via := r.Via
	if r.Groups > 0 {
		via = fmt.Sprintf("%s, %d groups", r.Via, r.Groups)
	}
	fmt.Fprintf(&b, "%-9s  %9.0f events/s", via, r.MPS)
	if r.Quantiles != nil && !r.backlog {
		fmt.Fprintf(&b, "  p50 %.3f  p90 %.3f  p99 %.3f  p99.9 %.3f  max %.3f  avg %.3f ms", r.P50, r.P90, r.P99, r.P999, r.Max, r.Avg)
	}
	fmt.Fprintf(&b, "  (%d in %.0f ms)  CPU client %.2f", n, r.MS, r.ClientCPU)
	if r.ServerRSS > 0 {
		fmt.Fprintf(&b, ", server %.2f", r.ServerCPU)
		if r.NATSCPU > 0 {
			fmt.Fprintf(&b, " (hub %.2f, NATS %.2f)", r.ServerCPU-r.NATSCPU, r.NATSCPU)
		}
		fmt.Fprintf(&b, " µs/event; server %.0f MiB", r.ServerRSS/1024)
	} else {
		b.WriteString(" µs/event")
	}
	if r.Late > 0 {
		fmt.Fprintf(&b, "; sent late p99 %.3f ms", r.Late)
	}
	if r.Redelivered > 0 {
		fmt.Fprintf(&b, "; %d redelivered", r.Redelivered)
	}
	return b.String()
}

// line returns the ratio as text.
func (r *Ratio) line() string {
	return fmt.Sprintf("%-11s  %10s  %10s %-9s  ratio of medians %.3f, median of ratios %.3f, from %.3f to %.3f",
		r.Name, short(r.Hub), short(r.Other), r.Unit, r.OfMedians, r.OfPairs, r.Min, r.Max)
}

// short formats large numbers without decimals and small ones with three.
func short(v float64) string {
	if math.Abs(v) >= 1000 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

func round(v float64, decimals int) float64 {
	scale := math.Pow10(decimals)
	return math.Round(v*scale) / scale
}

func printJSON(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the result: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", text)
	return err
}
