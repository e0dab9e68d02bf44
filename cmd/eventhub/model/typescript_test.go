//go:build unix

package model

import (
	"testing"
	"time"
)

// TestTypeScriptClientInTheModel is a short form of TestModel with the TypeScript client, which
// needs Node and npm. The first fault of its seed, a second after the start, kills one of two hubs.
func TestTypeScriptClientInTheModel(t *testing.T) {
	t.Parallel()
	runPlan(t, newPlan(12, []string{"kill"}, []string{"ts", "pause"}, 4*time.Second))
}
