//go:build unix

package model

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"eventhub/jetstream/natstest"
)

func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{"hub": natstest.Told(runHub)})
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		removeSDK()
		os.Exit(code)
	}))
}
