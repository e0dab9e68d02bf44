package jetstream

import (
	"time"

	"golang.org/x/time/rate"
)

// topicRefill is how long a client waits for one more new topic, once it has made Limits.TopicsPerClient.
const topicRefill = 10 * time.Second

// budget is how many topics one client may bring into being. A nil budget has no bound: it is the hub's own.
type budget struct {
	*rate.Limiter
}

func newBudget(n int) *budget {
	return &budget{rate.NewLimiter(rate.Every(topicRefill), n)}
}

func (g *budget) take() bool { return g == nil || g.Allow() }
