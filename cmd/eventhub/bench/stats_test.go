package bench

import (
	"math"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{3}, 3},
		{[]float64{9, 1, 5}, 5},
		{[]float64{4, 1, 3, 2}, 2.5},
	} {
		before := append([]float64(nil), c.values...)
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v: %v, want %v", c.values, got, c.want)
		}
		for i := range before {
			if before[i] != c.values[i] {
				t.Errorf("median has changed its argument to %v", c.values)
			}
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing: %v", got)
	}
}

// A round that was slow on both sides moves the ratio of neither pair.
func TestRatioIsOfPairs(t *testing.T) {
	got := newRatio("rate", "events/s", []float64{100, 10, 120}, []float64{50, 5, 40})
	want := Ratio{
		Name: "rate", Unit: "events/s", Hub: 100, Other: 40,
		OfMedians: 2.5, OfPairs: 2, Min: 2, Max: 3,
	}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestMediansOfResults(t *testing.T) {
	got := medians([]*Result{
		{Via: "ws", MPS: 3, ClientCPU: 1, Quantiles: &Quantiles{P50: 9, P99: 1}},
		{Via: "ws", MPS: 1, ClientCPU: 3, Quantiles: &Quantiles{P50: 7, P99: 2}},
		{Via: "ws", MPS: 2, ClientCPU: 5, Quantiles: &Quantiles{P50: 8, P99: 3}},
	})
	if got.Via != "ws" || got.MPS != 2 || got.ClientCPU != 3 || got.P50 != 8 || got.P99 != 2 {
		t.Errorf("got %+v %+v", got, got.Quantiles)
	}
}

func TestQuantiles(t *testing.T) {
	a, b := newHistogram(), newHistogram()
	for i := int64(1); i <= 50; i++ {
		record(a, i*int64(time.Millisecond))
		record(b, (50+i)*int64(time.Millisecond))
	}
	q := newQuantiles(a, b)
	for name, c := range map[string]struct{ got, want float64 }{
		"p50": {q.P50, 50}, "p90": {q.P90, 90}, "p99": {q.P99, 99}, "max": {q.Max, 100}, "avg": {q.Avg, 50.5},
	} {
		if math.Abs(c.got-c.want) > c.want/500 {
			t.Errorf("%s is %v ms, want %v", name, c.got, c.want)
		}
	}
	if newQuantiles(newHistogram()) != nil {
		t.Error("quantiles of nothing")
	}
	over := newHistogram()
	record(over, int64(2*time.Hour))
	if got := newQuantiles(over).Max; math.Abs(got-3.6e6) > 3.6e3 {
		t.Errorf("two hours are %v ms", got)
	}
}
