package projections

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// ackWait is the AckWait of buses in tests that leave events unsettled at a member, which others get
// after it: when a group is moved, or joined again.
const ackWait = 2 * time.Second

// patience bounds what a test waits for. Reaching it is a failure.
const patience = 30 * time.Second

// A server that is shut down while it sets a source up waits for that in a goroutine for up to
// 30 s.
func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{"projector": natstest.Told(projector)})
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.(*stream).trySetupSourceConsumer.func3"))
}

// openBus opens a bus with an embedded server on a directory.
func openBus(tb testing.TB, cfg jetstream.Config) *jetstream.Bus {
	tb.Helper()
	bus, err := jetstream.Open(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = bus.Close() })
	return bus
}

// startNATS starts a server that several buses share.
func startNATS(tb testing.TB) (url string) {
	tb.Helper()
	return natstest.Run(tb).ClientURL()
}
