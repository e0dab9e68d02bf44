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

// TestPythonClient runs the tests of sdk/python with this build as the hub. They need a python3
// that has the packages websockets and pytest. The race detector has nothing to see in them.
func TestPythonClient(t *testing.T) {
	t.Parallel()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "eventhub") // under this name the binary is the program
	if err := os.Symlink(path, program); err != nil {
		t.Fatal(err)
	}
	pythonInClient(t, "import pytest, websockets", "EVENTHUB="+program, "-m", "pytest", "-q")
}

// TestPythonClientTypes checks the types of sdk/python, and that the checker refuses wrong calls.
func TestPythonClientTypes(t *testing.T) {
	t.Parallel()
	pythonInClient(t, "import mypy", "MYPY_CACHE_DIR="+t.TempDir(), "-m", "mypy")
}

// pythonInClient runs the first python3 that has some packages, in sdk/python.
func pythonInClient(t *testing.T, packages, env string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.CommandContext(ctx, python, "-c", packages).Run() != nil {
			continue
		}
		cmd := exec.CommandContext(ctx, python, args...)
		cmd.Dir = filepath.Join("..", "..", "sdk", "python")
		cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", env)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", python, args, err, out)
		}
		return
	}
	t.Fatalf("no python3 can %s: run .ci/setup, or install the packages with pip", packages)
}
