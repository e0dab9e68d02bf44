//go:build !race || slowrace

package main

import (
	"math/rand/v2"
	"testing"
)

// The machine of a hub with an embedded server crashes under load, or its disk is full. What was
// answered OK is there afterwards, but for what the setting says; the group gets all that is there
// and that it has not acknowledged, and all that is published later. With the race detector, which
// is slow here, it runs with the long tests (-tags=slowrace).
func TestMachineCrash(t *testing.T) {
	t.Parallel()
	for _, setting := range crashSettings {
		t.Run(setting.name, func(t *testing.T) {
			t.Parallel()
			for round := range *crashRounds {
				crashOnce(t, setting, nil)
				if !setting.full { // a full disk keeps nothing by chance
					crashOnce(t, setting, rand.New(rand.NewPCG(*crashSeed, uint64(round))))
				}
			}
		})
	}
	for _, crash := range clusterCrashes {
		if !*crashCluster {
			break
		}
		t.Run(crash.name, func(t *testing.T) {
			for range *crashRounds {
				crashMachines(t, crash)
			}
		})
	}
}
