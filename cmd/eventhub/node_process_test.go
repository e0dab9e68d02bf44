//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

const nodeToken = "s3cret"

// node is a hub in a process of its own: this test binary under the program's name (see TestMain).
type node struct {
	t     *testing.T
	cmd   *exec.Cmd
	url   string
	http  string
	ops   string
	nats  string // with a NATS listener
	demo  string // with --demo
	log   lockedBuffer
	ended chan struct{}
}

// lockedBuffer takes a process's log.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// startNode starts a hub on free ports and waits until it is ready. It is killed when the test
// ends.
func startNode(t *testing.T, flags ...string) *node {
	t.Helper()
	return startNodeWith(t, func(*exec.Cmd) {}, flags...)
}

// startNodeWith is startNode with a change to the command before it starts.
func startNodeWith(t *testing.T, change func(*exec.Cmd), flags ...string) *node {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, ended: make(chan struct{})}
	n.cmd = exec.Command(path)
	n.cmd.Args = append([]string{"eventhub", "serve", "--ws-port=0", "--http-port=0", "--ops-port=0"}, flags...)
	n.cmd.Env = append(os.Environ(), "WS_TOKEN="+nodeToken, natstest.RaceEnv())
	n.cmd.Dir = t.TempDir()
	n.cmd.Stderr = &n.log
	change(n.cmd)
	stdout, err := n.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.signal(syscall.SIGCONT)
		n.signal(syscall.SIGKILL)
		<-n.ended
		if t.Failed() {
			t.Logf("the log of %s:\n%s", n.url, n.log.String())
		}
	})
	// A start syncs many files, which a busy disk may make slow.
	limit := time.AfterFunc(3*patience, func() { n.signal(syscall.SIGKILL) })
	defer limit.Stop()
	lines := bufio.NewReader(stdout)
	for done := false; !done; {
		line, err := lines.ReadString('\n')
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "websocket":
			n.url = strings.TrimSpace(value)
		case "http":
			n.http = strings.TrimSpace(value)
		case "ops":
			n.ops = strings.TrimSpace(value)
		case "nats":
			n.nats = strings.TrimSpace(value)
		case "demo":
			n.demo = strings.TrimSpace(value)
		}
		done = err != nil || name == "token" // the last line
	}
	go func() {
		defer close(n.ended)
		_, _ = io.Copy(io.Discard, lines)
		_ = n.cmd.Wait()
	}()
	if n.url == "" {
		n.signal(syscall.SIGKILL)
		<-n.ended
		t.Fatalf("the hub did not start:\n%s", n.log.String())
	}
	return n
}

// fails only when the process has ended
func (n *node) signal(s syscall.Signal) { _ = n.cmd.Process.Signal(s) }

// stop sends SIGSTOP and waits until the process stands still: until then it may still work off
// what it is sent.
func (n *node) stop() {
	n.t.Helper()
	n.signal(syscall.SIGSTOP)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for {
		state, err := exec.Command("ps", "-o", "state=", "-p", strconv.Itoa(n.cmd.Process.Pid)).Output()
		if err != nil {
			n.t.Fatal(err)
		}
		if strings.HasPrefix(string(state), "T") {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			n.t.Fatal("the process does not stop")
		}
	}
}

// kill ends the process as a crash would.
func (n *node) kill() {
	n.signal(syscall.SIGKILL)
	<-n.ended
}

// terminate asks the hub to end, as an operator would, and wants it to do so in time and in order.
func (n *node) terminate() { n.terminateBy(syscall.SIGTERM) }

func (n *node) terminateBy(s syscall.Signal) { n.terminateWithin(s, 10*time.Second) }

func (n *node) terminateWithin(s syscall.Signal, d time.Duration) {
	n.t.Helper()
	n.signal(s)
	select {
	case <-n.ended:
	case <-time.After(d):
		n.t.Fatalf("the hub has not ended %v after %v:\n%s", d, s, n.log.String())
	}
	if code := n.cmd.ProcessState.ExitCode(); code != 0 {
		n.t.Errorf("the hub ended with exit code %d:\n%s", code, n.log.String())
	}
}

// dial connects a client, which is ended with the test.
func (n *node) dial() *wire.Conn {
	n.t.Helper()
	return n.dialWith(nodeToken)
}

func (n *node) dialWith(token string) *wire.Conn {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	c, err := wire.Dial(ctx, n.url, wire.Options{Token: token})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(c.Abort)
	return c
}

// box takes a subscription's events.
type box struct {
	t      *testing.T
	events chan wire.Event
}

func subscribeTo(t *testing.T, c *wire.Conn, topic, group string, opts wire.SubscribeOptions) *box {
	t.Helper()
	b := &box{t: t, events: make(chan wire.Event, 100_000)}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.Subscribe(ctx, topic, group, opts, func(e wire.Event) { b.events <- e }); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *box) next() wire.Event {
	b.t.Helper()
	select {
	case e := <-b.events:
		return e
	case <-time.After(patience):
		b.t.Fatalf("no event within %v", patience)
	}
	return wire.Event{}
}

func (b *box) take(n int) []wire.Event {
	b.t.Helper()
	var got []wire.Event
	for range n {
		got = append(got, b.next())
	}
	return got
}

// onlyMarker publishes one more event to the topic and wants it to be the next that comes.
func (b *box) onlyMarker(c *wire.Conn, topic string) {
	b.t.Helper()
	marker := publishTo(b.t, c, topic, `"marker"`)
	if e := b.next(); e.ID != marker {
		b.t.Errorf("on %s came %s (attempt %d), which should not have", topic, e.Record, e.Attempt)
	}
}

func publishTo(t *testing.T, c *wire.Conn, topic, payload string) (id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id, err := c.Publish(ctx, topic, []byte(payload), wire.PublishOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func publishNumbers(t *testing.T, c *wire.Conn, topic string, n int) {
	t.Helper()
	for i := range n {
		publishTo(t, c, topic, strconv.Itoa(i))
	}
}

func ackAll(t *testing.T, events []wire.Event) {
	t.Helper()
	for i := range events {
		if err := events[i].AckWait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// runNATS starts a NATS server in the test process.
func runNATS(t *testing.T) (url string) {
	t.Helper()
	return natstest.Run(t).ClientURL()
}
