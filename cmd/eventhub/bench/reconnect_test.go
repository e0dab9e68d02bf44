package bench

import (
	"testing"
	"time"
)

func TestMostWithin(t *testing.T) {
	for _, c := range []struct {
		ms   []int
		want int
	}{{nil, 0}, {[]int{0}, 1}, {[]int{0, 1000}, 2}, {[]int{0, 1001}, 1}, {[]int{0, 500, 1400, 1450, 1500, 3000}, 4}} {
		var times []time.Time
		for _, ms := range c.ms {
			times = append(times, time.UnixMilli(int64(ms)))
		}
		if got := mostWithin(times, time.Second); got != c.want {
			t.Errorf("%v: %d, want %d", c.ms, got, c.want)
		}
	}
}
