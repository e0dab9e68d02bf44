package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// slow bounds what servers in processes of their own are waited for.
const slow = 60 * time.Second

// childEnv tells this program that it is to be a nats-server, and which.
const childEnv = "EVENTHUB_TEST_NATS_SERVER"

// childServer is what a nats-server in a process of its own is told.
type childServer struct {
	Name, Store       string
	Port, ClusterPort int
	Routes            []string
}

// TestChildServer is no test: it is the nats-server that tests start as a process of its own, and kill. It ends when its
// standard input does, thus with the test at the latest.
func TestChildServer(t *testing.T) {
	text := os.Getenv(childEnv)
	if text == "" {
		return
	}
	var c childServer
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		t.Fatal(err)
	}
	opts := &server.Options{
		ServerName: c.Name, Host: "127.0.0.1", Port: c.Port, JetStream: true, StoreDir: c.Store,
		SyncInterval: time.Second, NoLog: true, NoSigs: true,
	}
	if len(c.Routes) > 0 {
		opts.Cluster = server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: c.ClusterPort, NoAdvertise: true}
		opts.Routes = server.RoutesFromStr(strings.Join(c.Routes, ","))
	}
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	_, _ = io.Copy(io.Discard, os.Stdin)
	s.Shutdown()
	s.WaitForShutdown()
	os.Exit(0) // what this process has left running is no leak of a test
}

// natsProcesses are nats-servers in processes of their own: one alone, or a cluster.
type natsProcesses struct {
	tb    testing.TB
	nodes []*natsProcess
	conn  *nats.Conn
	js    natsjs.JetStream
}

// natsProcess is one of them.
type natsProcess struct {
	childServer
	cmd   *exec.Cmd
	stdin io.Closer
	log   bytes.Buffer
}

// startProcesses starts n servers, which the end of the test stops, and waits until they make streams with n copies.
func startProcesses(tb testing.TB, n int) *natsProcesses {
	tb.Helper()
	c := &natsProcesses{tb: tb}
	ports := freePorts(tb, 2*n)
	var routes []string
	for i := range n {
		if n > 1 {
			routes = append(routes, "nats://127.0.0.1:"+strconv.Itoa(ports[2*i+1]))
		}
	}
	dir := tb.TempDir()
	for i := range n {
		name := "n" + strconv.Itoa(i)
		c.nodes = append(c.nodes, &natsProcess{childServer: childServer{
			Name: name, Store: filepath.Join(dir, name), Port: ports[2*i], ClusterPort: ports[2*i+1], Routes: routes,
		}})
	}
	tb.Cleanup(func() {
		for i := range c.nodes {
			c.kill(i)
		}
	})
	for i := range c.nodes {
		c.start(i)
	}
	c.conn, c.js = stranger(tb, c.urls())
	c.until("streams can be made", func(ctx context.Context) bool {
		_, err := c.js.CreateStream(ctx, natsjs.StreamConfig{Name: "ready", Replicas: n})
		return err == nil
	})
	if err := c.js.DeleteStream(tb.Context(), "ready"); err != nil {
		tb.Fatal(err)
	}
	return c
}

// freePorts are TCP ports of this host that nobody listens at. The servers of a cluster must know each other's before they
// start, and keep theirs when they come back.
func freePorts(tb testing.TB, n int) []int {
	tb.Helper()
	ports := make([]int, n)
	for i := range ports {
		l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			tb.Fatal(err)
		}
		defer func() { _ = l.Close() }() // all at the end, so that they differ
		addr, ok := l.Addr().(*net.TCPAddr)
		if !ok {
			tb.Fatal("no TCP address")
		}
		ports[i] = addr.Port
	}
	return ports
}

func (n *natsProcess) url() string { return "nats://127.0.0.1:" + strconv.Itoa(n.Port) }

// urls are those of all servers, as Config.URL has them.
func (c *natsProcesses) urls() string {
	urls := make([]string, len(c.nodes))
	for i, n := range c.nodes {
		urls[i] = n.url()
	}
	return strings.Join(urls, ",")
}

// start runs a server, on what it has stored before, and waits until it takes connections.
func (c *natsProcesses) start(i int) {
	c.tb.Helper()
	self, err := os.Executable()
	if err != nil {
		c.tb.Fatal(err)
	}
	n := c.nodes[i]
	told, err := json.Marshal(n.childServer)
	if err != nil {
		c.tb.Fatal(err)
	}
	n.log.Reset()
	n.cmd = exec.Command(self, "-test.run=^TestChildServer$", "-test.count=1", "-test.timeout=0") // kill ends it
	n.cmd.Env = append(os.Environ(), childEnv+"="+string(told))
	n.cmd.Stdout, n.cmd.Stderr = &n.log, &n.log
	if n.stdin, err = n.cmd.StdinPipe(); err == nil {
		err = n.cmd.Start()
	}
	if err != nil {
		c.tb.Fatal(err)
	}
	c.until("server "+n.Name+" takes connections", func(context.Context) bool {
		nc, err := nats.Connect(n.url(), nats.Timeout(time.Second))
		if err != nil {
			return false
		}
		nc.Close()
		return true
	})
}

// kill ends a server at once, if it runs.
func (c *natsProcesses) kill(i int) {
	n := c.nodes[i]
	if n.cmd == nil || n.cmd.Process == nil || n.cmd.ProcessState != nil {
		return
	}
	_ = n.cmd.Process.Kill()
	_ = n.cmd.Wait() // it was killed
	_ = n.stdin.Close()
}

// stop ends a server in good order.
func (c *natsProcesses) stop(i int) {
	c.tb.Helper()
	n := c.nodes[i]
	_ = n.stdin.Close()
	if err := n.cmd.Wait(); err != nil {
		c.tb.Fatalf("server %s: %v\n%s", n.Name, err, n.log.String())
	}
}

// until waits for f, whose questions have a second each.
func (c *natsProcesses) until(what string, f func(context.Context) bool) {
	c.tb.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(slow)
	for {
		ctx, cancel := context.WithTimeout(c.tb.Context(), time.Second)
		done := f(ctx)
		cancel()
		if done {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			c.tb.Fatalf("waited in vain: %s", what)
		}
	}
}

// healthy waits until streams have a leader and all their copies are up to date.
func (c *natsProcesses) healthy(streams ...string) {
	c.tb.Helper()
	for _, name := range streams {
		c.until("stream "+name+" has all its copies", func(ctx context.Context) bool {
			info, err := c.info(ctx, name)
			if err != nil {
				return false
			}
			if len(c.nodes) == 1 {
				return true
			}
			if info.Cluster == nil || info.Cluster.Leader == "" || len(info.Cluster.Replicas) != len(c.nodes)-1 {
				return false
			}
			for _, r := range info.Cluster.Replicas {
				if !r.Current || r.Offline {
					return false
				}
			}
			return true
		})
	}
}

func (c *natsProcesses) info(ctx context.Context, stream string) (*natsjs.StreamInfo, error) {
	s, err := c.js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	return s.CachedInfo(), nil
}

// stepDown makes the leader of a stream hand over to another server.
func (c *natsProcesses) stepDown(ctx context.Context, stream string) error {
	m, err := c.conn.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil)
	if err != nil {
		return err
	}
	var answer struct {
		Success bool      `json:"success"`
		Error   *apiError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return err
	}
	if !answer.Success {
		return fmt.Errorf("step down of %s: %w", stream, answer.Error)
	}
	return nil
}
