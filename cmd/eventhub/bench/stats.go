package bench

import (
	"math"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// median returns the median of values. It returns the mean of the middle two for an even number of
// values, and NaN for none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

// Ratio compares a metric of two sides over the rounds.
type Ratio struct {
	Name string `json:"name"`
	Unit string `json:"unit"`
	// Hub and Other are the medians of the two sides.
	Hub   float64 `json:"hub"`
	Other float64 `json:"other"`
	// OfMedians is Hub / Other. OfPairs is the median of the ratios of neighbouring rounds; Min and
	// Max are their range.
	OfMedians float64 `json:"ratio_of_medians"`
	OfPairs   float64 `json:"median_of_ratios"`
	Min       float64 `json:"min"`
	Max       float64 `json:"max"`
}

// newRatio compares the values of paired rounds.
func newRatio(name, unit string, hub, other []float64) Ratio {
	pairs := make([]float64, len(hub))
	for i := range hub {
		pairs[i] = hub[i] / other[i]
	}
	r := Ratio{Name: name, Unit: unit, Hub: median(hub), Other: median(other), OfPairs: median(pairs)}
	r.OfMedians = r.Hub / r.Other
	if len(pairs) > 0 {
		r.Min, r.Max = slices.Min(pairs), slices.Max(pairs)
	}
	return r
}

// Quantiles are quantiles of a latency, in milliseconds.
type Quantiles struct {
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
	Avg  float64 `json:"avg"`
}

// newHistogram returns a histogram for 1 µs to 1 h in nanoseconds, with a precision of 3 digits.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(int64(time.Microsecond), int64(time.Hour), 3)
}

// record records a latency in nanoseconds, at most one hour.
func record(h *hdrhistogram.Histogram, ns int64) {
	_ = h.RecordValue(min(max(ns, 0), int64(time.Hour))) // in range
}

// newQuantiles returns the quantiles of all histograms together, or nil if they are empty.
func newQuantiles(all ...*hdrhistogram.Histogram) *Quantiles {
	sum := newHistogram()
	for _, h := range all {
		sum.Merge(h)
	}
	if sum.TotalCount() == 0 {
		return nil
	}
	ms := func(ns float64) float64 { return math.Round(ns/1e3) / 1e3 }
	at := func(p float64) float64 { return ms(float64(sum.ValueAtPercentile(p))) }
	return &Quantiles{P50: at(50), P90: at(90), P99: at(99), P999: at(99.9), Max: ms(float64(sum.Max())), Avg: ms(sum.Mean())}
}
