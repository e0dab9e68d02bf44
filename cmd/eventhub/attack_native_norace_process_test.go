//go:build unix && !race

package main

import (
	"testing"
	"time"
)

// TestNeighbourOfNativeAttacks runs each native attack beside a neighbour who publishes, uses the
// HTTP API and joins groups. The times of the neighbour stay near those beside the same load of a
// client within its rates. Short attacks leave more room to the machine.
func TestNeighbourOfNativeAttacks(t *testing.T) {
	lasts, least := max(*attackFor, 3*time.Second), 50*time.Millisecond
	if lasts >= attackTelling {
		least = time.Millisecond
	}
	for _, a := range nativeAttacks {
		t.Run(a.name, func(t *testing.T) {
			near := func(now, base latency) bool {
				return now.p50 <= attackFactor*max(base.p50, 3*time.Millisecond) && now.p99 <= attackFactor*max(base.p99, least)
			}
			for range attackTries {
				f := newAttackedHub(t) // which has nothing of another attack to do
				base := f.under(t, lasts, attack{name: a.name + likeSuffix, scopes: a.scopes, run: a.like})
				got := f.under(t, lasts, a)
				f.neighbour.stop()
				f.hub.terminate()
				if near(got.events, base.events) && near(got.requests, base.requests) && near(got.joins, base.joins) {
					return
				}
			}
			t.Error("the neighbour had to wait each time")
		})
	}
}
