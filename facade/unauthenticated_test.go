package facade_test

import (
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade"
)

// Those who never authenticate shut nobody out: the oldest of them goes when one more comes.
func TestTheUnauthenticatedShutNobodyOut(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Limits.Connections, cfg.Limits.Unauthenticated, cfg.Limits.AuthTimeout = 40, 2, time.Hour
	})
	friend := r.login(t)
	first := r.dial(t)
	for range 20 {
		_ = r.dial(t)
	}
	first.wantClose(4002)
	r.seen.await(t, "limit unauthenticated", 18)
	newcomer := r.login(t)
	for _, p := range []*peer{friend, newcomer} {
		p.send(`{"op":"PUBLISH","topic":"a","payload":1}`)
		p.next("OK", "")
	}
	_ = newcomer.conn.Close(websocket.StatusNormalClosure, "")
}
