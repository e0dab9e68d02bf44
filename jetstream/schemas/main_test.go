package schemas_test

import (
	"testing"

	"go.uber.org/goleak"

	"eventhub/jetstream/natstest"
)

func TestMain(m *testing.M) {
	natstest.RunChild(nil)
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}
