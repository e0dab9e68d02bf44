package ordered_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// TestCutWithBacklog cuts the connections of the owner while more waits in the stream than its
// window has: what it had comes again before anything else of the same key.
func TestCutWithBacklog(t *testing.T) {
	t.Parallel()
	srv := natstest.Run(t)
	b := startHubWith(t, srv.ClientURL(), 3*time.Second, func(cfg *jetstream.Config) { cfg.Limits.OrderedWindow = 20 })
	const keys, each = 10, 12
	publishKeys(t, b, keys, each)
	book := newOrderBook(t, keys*each)
	held, release := make(chan struct{}, keys*each), make(chan struct{})
	s := book.join(b, "m", func(*jetstream.Delivery) bool {
		select {
		case <-release:
		default:
			held <- struct{}{}
			<-release
		}
		return false
	})
	defer func() { _ = s.Stop(context.Background()) }()
	for range keys {
		<-held
	}
	cutAll(t, srv)
	book.forget()
	close(release)
	book.wait(wait)
	settledAll(t, b)
}

// cutAll cuts all connections of clients to the server.
func cutAll(t *testing.T, srv *natsserver.Server) {
	t.Helper()
	conns, err := srv.Connz(&natsserver.ConnzOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range conns.Conns {
		if err := srv.DisconnectClientByID(c.Cid); err != nil {
			t.Fatal(fmt.Errorf("connection %d: %w", c.Cid, err))
		}
	}
}

// forget notes that nobody holds anything any more.
func (o *orderBook) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.holder)
}
