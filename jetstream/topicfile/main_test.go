package topicfile

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// A server that stops right after it was given a source leaves the goroutine that waits for
	// that, for some seconds.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.(*stream).trySetupSourceConsumer.func3"))
}
