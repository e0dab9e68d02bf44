//go:build unix && !race

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"eventhub/sdk/sdktest"
)

// sdkDir is the TypeScript client.
var sdkDir = filepath.Join("..", "..", "sdk")

// programOfTest is a path of this test binary, under which it is the program.
func programOfTest(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "eventhub")
	if err := os.Symlink(path, program); err != nil {
		t.Fatal(err)
	}
	return program
}

// buildTypeScriptClient compiles the client, unless that was done before.
func buildTypeScriptClient(t *testing.T) {
	t.Helper()
	if err := sdktest.Build(t.Context(), sdkDir); err != nil {
		t.Fatal(err)
	}
}

// runInClient runs a program in sdk/ with this build as the hub.
func runInClient(t *testing.T, hub, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = sdkDir
	cmd.Env = append(os.Environ(), "EVENTHUB="+hub, "CI=true")
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
}

// testInNode runs a file of tests as `npm test` does, without the programs between.
func testInNode(t *testing.T, hub, file string) {
	t.Helper()
	runInClient(t, hub, "node", "--test-reporter=tap", file)
}

// TestTypeScriptClient runs the tests of sdk/ with this build as the hub, each file in a process of
// its own, and checks the package. They need npm. The race detector has nothing to see in them: the
// hub's side has Go tests of its own.
func TestTypeScriptClient(t *testing.T) {
	t.Parallel()
	buildTypeScriptClient(t)
	program := programOfTest(t)
	t.Run("the package", func(t *testing.T) {
		t.Parallel()
		runInClient(t, program, "npm", "run", "--silent", "check")
	})
	files, err := filepath.Glob(filepath.Join(sdkDir, "test", "*.test.mjs"))
	if err != nil || len(files) < 15 {
		t.Fatalf("%d files of tests: %v", len(files), err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		t.Run(strings.TrimSuffix(name, ".test.mjs"), func(t *testing.T) {
			t.Parallel()
			testInNode(t, program, "test/"+name)
		})
	}
}

// TestTypeScriptClientInChromium runs the compiled client in a page.
func TestTypeScriptClientInChromium(t *testing.T) {
	t.Parallel()
	buildTypeScriptClient(t)
	t.Run("all of it", func(t *testing.T) {
		t.Parallel()
		testTypeScriptClientInAPage(t, filepath.Join(sdkDir, "dist", "esm"))
	})
	t.Run("the example", func(t *testing.T) {
		t.Parallel()
		testTypeScriptExamplePage(t, sdkDir)
	})
}

// TestTypeScriptClientInSibilant runs the tests of the macros over the client.
func TestTypeScriptClientInSibilant(t *testing.T) {
	t.Parallel()
	buildTypeScriptClient(t)
	if err := sdktest.Install(t.Context(), filepath.Join(sdkDir, "sibilant")); err != nil {
		t.Fatal(err)
	}
	testInNode(t, programOfTest(t), "sibilant/eventhub.test.mjs")
}
