package jetstream

import (
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// An account has limits for all streams, or for each number of replicas.
func TestTiersOfAnAccount(t *testing.T) {
	t.Parallel()
	limited := func(used uint64, most int64) natsjs.Tier {
		return natsjs.Tier{Store: used, Limits: natsjs.AccountLimits{MaxStore: most, MaxMemory: -1}}
	}
	plain := &natsjs.AccountInfo{Tier: limited(10, 100)}
	tiered := &natsjs.AccountInfo{Tier: natsjs.Tier{Store: 30}, Tiers: map[string]natsjs.Tier{"R1": limited(10, 40), "R3": limited(20, 20)}}
	for _, test := range []struct {
		account  *natsjs.AccountInfo
		replicas int
		left     int64
	}{{plain, 1, 90}, {plain, 3, 90}, {tiered, 1, 30}, {tiered, 3, 0}, {tiered, 5, -1}} {
		tier := tierOf(test.account, test.replicas)
		if got := left(tier.Limits.MaxStore, tier.Store); got != test.left {
			t.Errorf("%d replicas: %d bytes are left, want %d", test.replicas, got, test.left)
		}
	}
}
