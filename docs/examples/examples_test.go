// Package examples has no code: it tests the examples, as the README beside it has them.
package examples

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// patience bounds what a test waits for. Reaching it is a failure.
const patience = 60 * time.Second

var bin string // where the programs are

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if bin, err = os.MkdirTemp("", "eventhub-examples"); err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(bin) }()
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", bin, "../../cmd/eventhub", "./orders-go/service", "./orders-go/consumer")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		panic(err)
	}
	return m.Run()
}

// program is a program of ours that runs until the test ends.
type program struct {
	t     *testing.T
	name  string
	lines chan string // of its standard output
	stop  func()
	dies  bool // of the signal that ends it
}

// start starts a program in a directory.
func start(t *testing.T, dir string, env []string, name string, args ...string) *program {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), env...), t.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &program{t: t, name: filepath.Base(name), lines: make(chan string, 1_000)}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	stopped := false
	p.stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = cmd.Process.Signal(os.Interrupt)
		late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
		defer late.Stop()
		<-read
		err := cmd.Wait()
		if _, ended := errors.AsType[*exec.ExitError](err); err != nil && (!ended || !p.dies || cmd.ProcessState.Exited()) {
			t.Errorf("%s ended with: %v", p.name, err)
		}
	}
	t.Cleanup(p.stop)
	return p
}

// line returns the next line that has a text in it.
func (p *program) line(text string) string {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("%s ended without %q", p.name, text)
			}
			if strings.Contains(line, text) {
				return line
			}
		case <-timeout:
			p.t.Fatalf("%s does not print %q", p.name, text)
		}
	}
}

// startHub starts a hub that looks after the orders in a directory, and returns its WebSocket.
func startHub(t *testing.T, dir string) (hub *program, url string) {
	t.Helper()
	hub = start(t, dir, []string{"OUTBOX_DSN=sqlite:orders.db"}, filepath.Join(bin, "eventhub"),
		"serve", "--ws-port=0", "--http-port=0", "--ops-port=0")
	url = strings.Fields(hub.line("websocket"))[1]
	hub.line("token") // the last line
	return hub, url
}

// call runs a program to its end, and returns what it printed.
func call(t *testing.T, dir, name string, args ...string) (output string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// orders is an example of an order service.
type orders struct {
	place   func(t *testing.T, dir, number string) (output string, err error)
	consume func(t *testing.T, dir, url string) *program
	number  func(t *testing.T, line string) string // of the order that the consumer prints
}

// test goes through what the README has.
func (o *orders) test(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	place := func(number string) {
		t.Helper()
		if out, err := o.place(t, dir, number); err != nil || !strings.Contains(out, "order "+number+" is placed") {
			t.Fatalf("order %s: %v: %s", number, err, out)
		}
	}
	hub, url := startHub(t, dir)
	consumer := o.consume(t, dir, url)
	want := func(number string) {
		t.Helper()
		if line := consumer.line("ann"); o.number(t, line) != number {
			t.Errorf("the consumer prints %s, want order %s", line, number)
		}
	}
	place("1")
	place("2")
	want("1")
	want("2")
	if out, err := o.place(t, dir, "1"); err == nil || !strings.Contains(out, "place order 1") || !strings.Contains(out, "UNIQUE") {
		t.Errorf("an order that exists: %v: %s", err, out)
	}
	place("3")
	want("3") // nothing came of the one that was refused
	consumer.stop()
	hub.stop()

	place("4")
	_, url = startHub(t, dir)
	consumer = o.consume(t, dir, url)
	want("4")
	if out, err := call(t, dir, filepath.Join(bin, "eventhub"), "outbox", "list", "--dsn=sqlite:orders.db", "--status=sent"); err != nil || strings.Count(out, "orders.placed") != 4 {
		t.Errorf("the outbox lists (%v):\n%s", err, out)
	}
	for _, number := range []string{"x", ""} {
		if out, err := o.place(t, dir, number); err == nil || !strings.Contains(out, "integer") && !strings.Contains(out, "usage") {
			t.Errorf("order %q: %v: %s", number, err, out)
		}
	}
}

func TestOrdersInGo(t *testing.T) {
	t.Parallel()
	o := orders{
		place: func(t *testing.T, dir, number string) (string, error) {
			t.Helper()
			return call(t, dir, filepath.Join(bin, "service"), "orders.db", number, "ann")
		},
		consume: func(t *testing.T, dir, url string) *program {
			t.Helper()
			return start(t, dir, nil, filepath.Join(bin, "consumer"), "-url", url)
		},
		number: func(_ *testing.T, line string) string {
			return strings.TrimSuffix(strings.TrimPrefix(line, "order "), " of ann")
		},
	}
	o.test(t)
}

// TestOrdersInPython needs python3, and fails without.
func TestOrdersInPython(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("orders-python/orders.py")
	if err != nil {
		t.Fatal(err)
	}
	o := orders{
		place: func(t *testing.T, dir, number string) (string, error) {
			t.Helper()
			return call(t, dir, python, script, "orders.db", number, "ann")
		},
		consume: func(t *testing.T, dir, url string) *program {
			t.Helper()
			return start(t, dir, nil, filepath.Join(bin, "eventhub"), "sub", "orders.placed", "--group=printer", "--from=earliest", "--url="+url)
		},
		number: func(t *testing.T, line string) string {
			t.Helper()
			var record struct {
				Key     string
				Payload struct{ Order json.Number }
			}
			if err := json.Unmarshal([]byte(line), &record); err != nil || record.Key != "ann" {
				t.Errorf("%s: %v", line, err)
			}
			return record.Payload.Order.String()
		},
	}
	o.test(t)
}

// callWithHub is call for tests that start hubs.
func callWithHub(t *testing.T, env []string, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	// What a developer has set for other hubs is no matter of tests.
	cmd.Env = append(os.Environ(), append(env, "EVENTHUB="+filepath.Join(bin, "eventhub"), "EVENTHUB_DATA=nowhere")...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// TestTestingInNode needs node 20 or newer, and fails without. Node 22 needs no flag for WebSocket.
func TestTestingInNode(t *testing.T) {
	t.Parallel()
	out := callWithHub(t, nil, "node", "--experimental-websocket", "--test", "--test-reporter=tap", "testing-node/")
	if !strings.Contains(out, "# pass 2") || !strings.Contains(out, "# fail 0") {
		t.Error(out)
	}
}

// TestTestingInPython needs a python3 that has pytest, and fails without.
func TestTestingInPython(t *testing.T) {
	t.Parallel()
	// that of PATH may lack what the system's has
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.CommandContext(t.Context(), python, "-m", "pytest", "--version").Run() != nil {
			continue
		}
		out := callWithHub(t, []string{"PYTHONDONTWRITEBYTECODE=1"}, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "testing-python")
		if !strings.Contains(out, "2 passed") {
			t.Error(out)
		}
		return
	}
	t.Fatal("no python3 has pytest: install it (apt-get install python3-pytest, or pip install pytest)")
}
