package publish_test

import (
	"testing"

	"go.uber.org/goleak"

	"eventhub/jetstream/natstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, natstest.Leaks()...) }
