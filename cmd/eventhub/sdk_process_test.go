//go:build unix && !race

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestTypeScriptClient runs the tests of sdk/ and of its macros for Sibilant, with this build as
// the hub. They need npm, and Chromium. The race detector has nothing to see in them: the hub's
// side has Go tests of its own.
func TestTypeScriptClient(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "eventhub") // under this name the binary is the program
	if err := os.Symlink(path, program); err != nil {
		t.Fatal(err)
	}
	sdk := filepath.Join("..", "..", "sdk")
	testIn := func(t *testing.T, dir string) {
		t.Helper()
		for _, args := range [][]string{{"ci", "--no-audit", "--no-fund"}, {"test"}} {
			cmd := exec.CommandContext(ctx, "npm", args...)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "EVENTHUB="+program, "CI=true")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("npm %s: %v\n%s", args[0], err, out)
			}
		}
	}
	testIn(t, sdk)
	t.Run("in Chromium", func(t *testing.T) { testTypeScriptClientInAPage(t, filepath.Join(sdk, "dist", "esm")) })
	t.Run("the example of a page", func(t *testing.T) { testTypeScriptExamplePage(t, sdk) })
	t.Run("in Sibilant", func(t *testing.T) { testIn(t, filepath.Join(sdk, "sibilant")) })
}
