package projections

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream"
)

// The full form of the crash test is -crash.kills=200 -crash.events=100000 -crash.keys=1000.
var (
	crashKills  = flag.Int("crash.kills", 12, "how often the crash test kills a projector in each of its variants; half as often where it kills the server too")
	crashEvents = flag.Int("crash.events", 5_000, "how many events the crash test projects")
	crashKeys   = flag.Int("crash.keys", 200, "how many keys they have")
	crashSeed   = flag.Uint64("crash.seed", 1, "seed of the crash test's random moments")
)

// childEnv says which program this test binary is to be: see TestMain.
const childEnv = "EVENTHUB_TEST_CHILD"

// runChild is a program that a test has started, and may kill. It ends with its standard input.
func runChild(what string) int {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	mode, arg, _ := strings.Cut(what, " ")
	err := fmt.Errorf("no such program: %q", mode)
	switch mode {
	case "server":
		err = childServer(ctx, arg)
	case "projector":
		err = childProjector(ctx, arg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// childServer is a server with "<port> <directory>".
func childServer(ctx context.Context, arg string) error {
	port, dir, _ := strings.Cut(arg, " ")
	n, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: n, JetStream: true, StoreDir: dir, NoLog: true, NoSigs: true, SyncInterval: time.Second})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		return errors.New("the server is not ready")
	}
	fmt.Println("ready")
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

// childProjector is a projector on the server of a URL.
func childProjector(ctx context.Context, url string) error {
	bus, err := jetstream.Open(ctx, jetstream.Config{URL: url, AckWait: time.Second})
	if err != nil {
		return err
	}
	defer func() { _ = bus.Close() }()
	fmt.Println("ready")
	return Run(ctx, bus, Projection{Topic: topicCounts, Group: "counter", From: Earliest, Apply: appendEvent, CacheKeys: 500})
}

// child is a program that runs.
type child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ready chan struct{} // closed when it says so, or ends
}

func startChild(tb testing.TB, what string) *child {
	tb.Helper()
	path, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	c := &child{cmd: exec.Command(path), ready: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), childEnv+"="+what)
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
	go func() {
		defer close(c.ready)
		_, _ = bufio.NewReader(out).ReadString('\n')
	}()
	tb.Cleanup(c.kill)
	return c
}

func (c *child) awaitReady(tb testing.TB) {
	tb.Helper()
	select {
	case <-c.ready:
	case <-time.After(patience):
		tb.Fatal("a child process is not ready")
	}
}

// kill kills it by SIGKILL, if it runs, and waits until it is gone.
func (c *child) kill() {
	if c.cmd.ProcessState != nil {
		return
	}
	_ = c.cmd.Process.Kill() // an error means that it has ended
	<-c.ready
	_ = c.cmd.Wait()
	_ = c.stdin.Close()
}

// TestCrash kills projectors at random moments while events come in, and wants the states that a fold of the stream gives:
// no event lost, none applied twice, none out of order.
func TestCrash(t *testing.T) {
	t.Run("one instance", func(t *testing.T) { testCrash(t, 1, *crashKills, false) })
	t.Run("two instances", func(t *testing.T) { testCrash(t, 2, *crashKills, false) })
	t.Run("the server too", func(t *testing.T) { testCrash(t, 2, (*crashKills+1)/2, true) })
}

func testCrash(t *testing.T, instances, kills int, killServer bool) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(*crashSeed, uint64(instances)))
	addr := freePort(t)
	url := "nats://127.0.0.1:" + addr
	what := "server " + addr + " " + t.TempDir()
	srv := startChild(t, what)
	srv.awaitReady(t)
	bus := openBus(t, jetstream.Config{URL: url})

	projectors := make([]*child, instances)
	for i := range projectors {
		projectors[i] = startChild(t, "projector "+url)
	}
	s := newStream(bus, topicCounts)
	s.lossy = killServer // what is cut off may be stored or not: the states follow what is
	publish := func(n int) {
		for range n {
			key := "k" + strconv.Itoa(rnd.IntN(*crashKeys))
			s.put(t, key)
		}
	}
	published, busy := 0, 0
	began := time.Now()
	for kill := range kills {
		i := rnd.IntN(instances)
		goal := *crashEvents * (kill + 1) / (kills + 1)
		publish(goal - published)
		published = goal
		// At any moment of its life: also before it has begun.
		if rnd.IntN(8) > 0 {
			projectors[i].awaitReady(t)
		}
		if err := pause(t.Context(), time.Duration(rnd.IntN(150))*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if b, err := bus.Backlog(t.Context(), topicCounts, "counter"); err == nil && b.Waiting+b.Leased > 0 {
			busy++
		}
		if killServer && kill%4 == 3 {
			srv.kill()
			srv = startChild(t, what)
			srv.awaitReady(t)
			poll(t, "the hub is connected", func() bool { return bus.Ready(t.Context()) == nil })
			continue
		}
		projectors[i].kill()
		projectors[i] = startChild(t, "projector "+url)
	}
	publish(*crashEvents - published)
	s.flush(t)
	workedOffIn(t, 4*patience, bus, "counter")
	t.Logf("%d kills, %d of them in the middle of work, %d events, %d keys: %v", kills, busy, *crashEvents, *crashKeys, time.Since(began).Round(time.Millisecond))
	want := fold(t, bus, 0, appendEvent)
	if len(want) < *crashKeys/2 {
		t.Fatalf("there are %d keys", len(want))
	}
	wantStates(t, viewed(t, bus, "counter"), want)
	if n := len(letters(t, bus)); n > 0 {
		t.Errorf("there are %d dead letters", n)
	}
}
