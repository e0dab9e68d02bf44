//go:build unix

package model

import (
	"testing"
	"time"
)

// TestTypeScriptClientInTheModel is a short form of TestModel with the TypeScript client, which
// needs Node and npm.
func TestTypeScriptClientInTheModel(t *testing.T) {
	t.Parallel()
	runPlan(t, newPlan(3, []string{"kill"}, []string{"ts", "pause"}, 8*time.Second))
}
