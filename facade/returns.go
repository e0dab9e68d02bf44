package facade

import (
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// maxReturn is the longest pause that a hub that ends asks of a client.
const maxReturn = time.Minute

// returns spreads the clients of a hub that ends, so that the next hub does not have to greet all
// of them at once. Its methods may be called concurrently.
type returns struct {
	spread atomic.Int64 // a time.Duration
}

// begin sets the time over which the connections spread.
func (r *returns) begin(connections, perSecond int) {
	if perSecond == NoLimit {
		return
	}
	spread := float64(connections) / float64(perSecond) * float64(time.Second)
	r.spread.Store(int64(min(spread, float64(maxReturn))))
}

// pause returns how long one client is to wait: a random part of the spread.
func (r *returns) pause() time.Duration {
	return time.Duration(rand.Int64N(r.spread.Load() + 1)) //nolint:gosec // not security-relevant
}
