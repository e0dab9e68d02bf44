package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Words by which this program is started for something else than running tests.
const (
	// measure-cpu ROOT FILE PROGRAM ARGS...: run a test binary, and note its CPU time.
	measureCommand = "measure-cpu"
	// burn: compute until killed.
	burnCommand = "burn"
)

// measure runs a test binary, and appends its directory below ROOT and its CPU time to a file. It
// returns the binary's exit status.
func measure(args []string) int {
	root, file, program := args[0], args[1], args[2:]
	cmd := exec.Command(program[0], program[1:]...) //nolint:gosec,noctx // what "go test -exec" gives; go test ends it
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	if cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
		return 1
	}
	// The time of the process has that of the children it waited for in it.
	used := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if err := noteCPU(root, file, used); err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
	}
	return cmd.ProcessState.ExitCode()
}

func noteCPU(root, file string, used time.Duration) error {
	dir, err := os.Getwd() // go test starts a binary in the directory of its package
	if err != nil {
		return err
	}
	name, err := filepath.Rel(root, dir)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0) //nolint:gosec // of newCPUFile
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s %d\n", filepath.ToSlash(name), used)
	return errors.Join(err, f.Close())
}

// newCPUFile makes an empty file for measure.
func newCPUFile() (string, error) {
	f, err := os.CreateTemp("", "suite-cpu-*")
	if err != nil {
		return "", err
	}
	return f.Name(), f.Close()
}

// readCPU returns the CPU time of each package, by its path within the module. It removes the file.
func readCPU(file string) (map[string]time.Duration, error) {
	text, err := os.ReadFile(file) //nolint:gosec // made by newCPUFile
	if err != nil {
		return nil, err
	}
	used := make(map[string]time.Duration)
	for line := range strings.Lines(string(text)) {
		var name string
		var d time.Duration
		if _, err := fmt.Sscan(line, &name, &d); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, line, err)
		}
		used[name] += d
	}
	return used, os.Remove(file)
}

// startLoad starts n processes that compute, at the priority of the tests. end stops them, waits
// for them, and may be called twice.
func startLoad(ctx context.Context, n int) (end func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	var all []*exec.Cmd
	end = func() {
		cancel()
		for _, cmd := range all {
			_ = cmd.Wait() // killed, or waited for before
		}
	}
	self, err := os.Executable()
	if err != nil {
		return end, err
	}
	for range n {
		cmd := exec.CommandContext(ctx, self, burnCommand) //nolint:gosec // this program
		if err := cmd.Start(); err != nil {
			end()
			return end, err
		}
		all = append(all, cmd)
	}
	return end, nil
}

// burn computes until the process is killed, or its parent has ended.
func burn() {
	parent := os.Getppid()
	for {
		until := time.Now().Add(time.Second)
		for x := 1; time.Now().Before(until); x++ {
			x *= x
		}
		if os.Getppid() != parent {
			os.Exit(0)
		}
	}
}
