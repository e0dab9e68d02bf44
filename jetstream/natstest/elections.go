package natstest

import (
	"os"
	"time"
	_ "unsafe" // for linkname
)

// productionElections is the variable of the environment that, set to anything, leaves the times of
// elections to nats-server.
const productionElections = "EVENTHUB_TEST_PRODUCTION_ELECTIONS"

// The times of elections of nats-server, which has no options for them. Its own tests change them,
// too.
var (
	//go:linkname hbInterval github.com/nats-io/nats-server/v2/server.hbInterval
	hbInterval time.Duration
	//go:linkname minElectionTimeout github.com/nats-io/nats-server/v2/server.minElectionTimeout
	minElectionTimeout time.Duration
	//go:linkname maxElectionTimeout github.com/nats-io/nats-server/v2/server.maxElectionTimeout
	maxElectionTimeout time.Duration
	//go:linkname lostQuorumInterval github.com/nats-io/nats-server/v2/server.lostQuorumInterval
	lostQuorumInterval time.Duration
	//go:linkname lostQuorumCheck github.com/nats-io/nats-server/v2/server.lostQuorumCheck
	lostQuorumCheck time.Duration
)

// In production, a cluster elects a leader in 4 to 9 s, for which most tests of clusters would only
// wait. Servers of tests that are this program take a quarter of all these times.
func init() {
	if os.Getenv(productionElections) != "" {
		return
	}
	for _, d := range []*time.Duration{&hbInterval, &minElectionTimeout, &maxElectionTimeout, &lostQuorumInterval, &lostQuorumCheck} {
		*d /= 4
	}
}
