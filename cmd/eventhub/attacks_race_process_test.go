//go:build unix && race

package main

import (
	"slices"
	"testing"
)

// TestAttacksAtOnce runs all attacks at a time. The neighbour loses nothing and is not refused, and
// the hub restarts. How long anybody waits is measured without the race detector.
func TestAttacksAtOnce(t *testing.T) {
	f := newAttackedHub(t, 10) // with the detector, to store all takes longer than the rest
	all := slices.Clone(attacks)
	for i := range all {
		all[i].beside = nil
	}
	f.under(t, *attackFor, all...)
	f.restart(t)
}
