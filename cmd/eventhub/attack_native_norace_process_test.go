//go:build unix && !race

package main

import (
	"testing"
	"time"
)

// TestNeighbourOfNativeAttacks runs each native attack beside a neighbour who publishes, uses the
// HTTP API and joins groups. The times of the neighbour stay near those beside the same load of a
// client within its rations. Short attacks leave more room to the machine.
func TestNeighbourOfNativeAttacks(t *testing.T) {
	f := newAttackedHub(t)
	lasts, least := max(*attackFor, 3*time.Second), 20*time.Millisecond
	if lasts >= attackTelling {
		least = time.Millisecond
	}
	for _, a := range nativeAttacks {
		t.Run(a.name, func(t *testing.T) {
			base := f.under(t, lasts, attack{name: a.name + likeSuffix, scopes: a.scopes, run: a.like})
			var got times
			near := func(now, base latency) bool { return now.p99 <= attackFactor*max(base.p99, least) }
			for range attackTries {
				got = f.under(t, lasts, a)
				if near(got.events, base.events) && near(got.requests, base.requests) && near(got.joins, base.joins) {
					return
				}
			}
			t.Errorf("the neighbour had to wait each time: %v; beside a permitted client: %v", got, base)
		})
	}
}
