//go:build unix

package model

import (
	"testing"

	"go.uber.org/goleak"

	"eventhub/jetstream/natstest"
)

func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{"hub": natstest.Told(runHub)})
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}
