package natstest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience bounds what a child process is waited for. Reaching it is a failure.
const patience = 30 * time.Second

// childEnv says that a process is a child, in which role, and what it is told: "<role> <JSON>".
const childEnv = "EVENTHUB_TEST_CHILD"

const readyLine = "ready\n"

// Role is a program that a child process runs, with the JSON that StartChild has made of what it is
// told. It calls Ready, and ends in good order with ctx, which ends with the process that started
// it at the latest.
type Role func(ctx context.Context, told []byte) error

// Told makes a role of a function that reads what it is told as a T.
func Told[T any](run func(ctx context.Context, told T) error) Role {
	return func(ctx context.Context, text []byte) error {
		var told T
		if err := json.Unmarshal(text, &told); err != nil {
			return err
		}
		return run(ctx, told)
	}
}

// RunChild runs the role of a child process, by its name, and exits. In any other process it does
// nothing. TestMain begins with it.
func RunChild(roles map[string]Role) {
	name, told, ok := strings.Cut(os.Getenv(childEnv), " ")
	if !ok {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	run, ok := roles[name]
	switch {
	case name == serverRole:
		run = Told(serve)
	case !ok:
		run = func(context.Context, []byte) error { return errors.New("there is no such role") }
	}
	if err := run(ctx, []byte(told)); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Ready says that the child process which calls it is ready. Lines that it prints from then on are
// heard.
func Ready() { _, _ = io.WriteString(os.Stdout, readyLine) }

// Child is the test binary in a process of its own, with a role. Its methods are for one goroutine
// at a time.
type Child struct {
	tb      testing.TB
	role    string
	cmd     *exec.Cmd
	stdin   io.Closer
	isReady bool
	ready   chan struct{} // closed when isReady is known
	ended   chan struct{} // closed when all that it printed was heard
}

// RaceEnv is a variable of the environment for processes that a test starts. A process with the
// race detector ends at once, not after a second, and leaves out the races that the test leaves
// out.
func RaceEnv() string { return "GORACE=atexit_sleep_ms=20 " + os.Getenv("GORACE") }

// StartChild starts a child process for the time of the test, and does not wait for it. heard may
// be nil: one goroutine calls it for each line that the child prints once it is ready. What it
// writes to its standard error is output of the test.
func StartChild(tb testing.TB, role string, told any, heard func(line string)) *Child {
	tb.Helper()
	c := start(tb, role, told, heard)
	tb.Cleanup(c.Kill)
	return c
}

// start leaves it to the caller to end the child.
func start(tb testing.TB, role string, told any, heard func(line string)) *Child {
	tb.Helper()
	path, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	text, err := json.Marshal(told)
	if err != nil {
		tb.Fatal(err)
	}
	c := &Child{tb: tb, role: role, ready: make(chan struct{}), ended: make(chan struct{})}
	c.cmd = exec.Command(path, "-test.run=^$") //nolint:gosec,noctx // this program, which runs no tests without RunChild either; Kill ends it
	c.cmd.Env = append(os.Environ(), childEnv+"="+role+" "+string(text), RaceEnv())
	c.cmd.Stderr = tb.Output()
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go c.listen(bufio.NewReader(out), heard)
	return c
}

// Program is another program, which takes a SIGTERM for its order to end. It is ready once it takes
// connections at Address.
type Program struct {
	Path, Address string
	Args          []string
	Log           io.Writer // takes what it writes to its standard error; nil: nobody
}

// StartProgram starts a program as a child process for the time of the test, and does not wait for
// it.
func StartProgram(tb testing.TB, p Program) *Child {
	tb.Helper()
	c := startProgram(tb, p)
	tb.Cleanup(c.Kill)
	return c
}

// startProgram leaves it to the caller to end the child.
func startProgram(tb testing.TB, p Program) *Child {
	tb.Helper()
	if p.Log == nil {
		p.Log = io.Discard
	}
	c := &Child{tb: tb, role: p.Path, ready: make(chan struct{}), ended: make(chan struct{})}
	c.cmd = exec.Command(p.Path, p.Args...) //nolint:gosec,noctx // a nats-server or a hub; Kill ends it
	c.stdin = terminator{c.cmd}
	out, err := c.cmd.StderrPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go func() {
		defer close(c.ended)
		_, _ = io.Copy(p.Log, out)
	}()
	go func() {
		defer close(c.ready)
		for {
			conn, err := net.Dial("tcp", p.Address) //nolint:noctx // on loopback
			if err == nil {
				_ = conn.Close()
				c.isReady = true
				return
			}
			select {
			case <-c.ended:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return c
}

// terminator ends a program in good order.
type terminator struct{ cmd *exec.Cmd }

// Close sends a SIGTERM.
func (t terminator) Close() error { return t.cmd.Process.Signal(syscall.SIGTERM) }

// listen reads what the child prints, to its end.
func (c *Child) listen(out *bufio.Reader, heard func(line string)) {
	defer close(c.ended)
	line, err := out.ReadString('\n')
	c.isReady = line == readyLine
	close(c.ready)
	for err == nil {
		// one without an end was cut off
		if line, err = out.ReadString('\n'); err == nil && heard != nil {
			heard(strings.TrimSuffix(line, "\n"))
		}
	}
}

// PID is the number of its process.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// AwaitReady waits until the child says that it is ready, and returns false if it has ended before.
func (c *Child) AwaitReady() bool {
	c.tb.Helper()
	select {
	case <-c.ready:
	case <-time.After(patience):
		c.tb.Fatalf("child process %s is not ready", c.role)
	}
	return c.isReady
}

// Kill ends the child by SIGKILL, if it runs, and returns when it is gone and all that it printed
// was heard.
func (c *Child) Kill() {
	if c.cmd.ProcessState != nil {
		return
	}
	c.strike()
	<-c.ended
	_ = c.cmd.Wait()
}

// strike sends SIGKILL.
func (c *Child) strike() { _ = c.cmd.Process.Kill() } // an error means that it has ended

// Stop ends the child in good order. The test fails when it does not end, or its role has returned
// an error.
func (c *Child) Stop() {
	c.tb.Helper()
	_ = c.stdin.Close()
	select {
	case <-c.ended:
	case <-time.After(patience):
		c.tb.Errorf("child process %s does not end", c.role)
		c.Kill()
		return
	}
	// Some versions of nats-server exit with 1 after a SIGTERM.
	if _, program := c.stdin.(terminator); c.cmd.Wait() != nil && !program {
		err := errors.New(c.cmd.ProcessState.String())
		c.tb.Errorf("child process %s: %v", c.role, err)
	}
}
