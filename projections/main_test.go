package projections

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// ackWait is the AckWait of buses. It is much shorter than patience, because a hub that stood
// still, as it does on a slow machine, gives up the events that it holds, and they come again after
// AckWait. With a much shorter one, hubs would give up events after a moment.
const ackWait = 6 * time.Second

// patience bounds what a test waits for. Reaching it is a failure.
const patience = time.Minute

func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{"projector": natstest.Told(projector)})
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// openBus opens a bus with an embedded server on a directory.
func openBus(tb testing.TB, cfg jetstream.Config) *jetstream.Bus {
	tb.Helper()
	if cfg.AckWait == 0 {
		cfg.AckWait = ackWait
	}
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
