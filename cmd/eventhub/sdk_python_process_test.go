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
)

var pythonDir = filepath.Join("..", "..", "sdk", "python")

// TestPythonClient runs the tests of sdk/python with this build as the hub, each file in a process
// of its own. They need a python3 that has the packages websockets and pytest. The race detector
// has nothing to see in them: the hub's side has Go tests of its own.
func TestPythonClient(t *testing.T) {
	t.Parallel()
	python := pythonWith(t, "pytest, websockets")
	program := programOfTest(t)
	files, err := filepath.Glob(filepath.Join(pythonDir, "tests", "test_*.py"))
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files of tests: %v", len(files), err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		t.Run(strings.TrimSuffix(strings.TrimPrefix(name, "test_"), ".py"), func(t *testing.T) {
			t.Parallel()
			pythonInClient(t, python, "EVENTHUB="+program, "-m", "pytest", "-q", "tests/"+name)
		})
	}
}

// TestPythonClientTypes checks the types of sdk/python, and that the checker refuses wrong calls.
func TestPythonClientTypes(t *testing.T) {
	t.Parallel()
	pythonInClient(t, pythonWith(t, "mypy, websockets"), "MYPY_CACHE_DIR="+t.TempDir(), "-m", "mypy")
}

// pythonWith is the first python3 that has some packages.
func pythonWith(t *testing.T, packages string) string {
	t.Helper()
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.CommandContext(t.Context(), python, "-c", "import "+packages).Run() == nil {
			return python
		}
	}
	t.Fatalf("no python3 has the packages %s: run .ci/setup, or install them with pip", packages)
	return ""
}

// pythonInClient runs a python3 in sdk/python.
func pythonInClient(t *testing.T, python, env string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, args...)
	cmd.Dir = pythonDir
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", env)
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", python, args, err, out)
	}
}
