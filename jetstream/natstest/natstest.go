// Package natstest gives tests processes of their own, to kill: nats-servers, alone or as a
// cluster, and programs of the tests. Each is the test binary, run once more, so its TestMain must
// begin with RunChild.
package natstest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// serverRole is the role of nats-servers, which every test binary has.
const serverRole = "nats-server"

// Server is a nats-server with JetStream in a process of its own. However often it is started, it
// has its address, and what it has stored. Its methods are for one goroutine at a time.
type Server struct {
	tb    testing.TB
	opts  options
	child *Child
}

// options are what the process of a server is told.
type options struct {
	Name, Store       string
	Port, ClusterPort int
	Routes            []string // to all servers of the cluster
	MaxPayload        int32    // in bytes; 0: the server's default
}

// Start starts a server for the time of the test, and returns when it takes connections.
func Start(tb testing.TB) *Server {
	tb.Helper()
	return StartCluster(tb, 1)[0]
}

// StartCluster starts n servers for the time of the test, and returns when they take connections: a
// cluster, or, where n is 1, a server alone. A cluster may have no leader yet.
func StartCluster(tb testing.TB, n int) []*Server {
	tb.Helper()
	dir, ports := tb.TempDir(), freePorts(tb, 2*n)
	routes := make([]string, n)
	for i := range routes {
		routes[i] = url(ports[n+i])
	}
	servers := make([]*Server, n)
	for i := range servers {
		name := "n" + strconv.Itoa(i)
		s := &Server{tb: tb, opts: options{Name: name, Store: filepath.Join(dir, name), Port: ports[i], ClusterPort: ports[n+i], Routes: routes}}
		tb.Cleanup(s.Kill)
		s.Start()
		servers[i] = s
	}
	return servers
}

// Ports of servers lie below those that systems give to outgoing connections, so that a server that
// was killed finds its port free when it comes back.
const firstPort, lastPort = 16_000, 32_000

// freePorts are TCP ports of this host that nobody listens at, and that no other test is given
// meanwhile. The servers of a cluster must know each other's before they start, and keep theirs
// when they come back.
func freePorts(tb testing.TB, n int) []int {
	tb.Helper()
	var ports []int
	for range lastPort - firstPort {
		if len(ports) == n {
			return ports
		}
		port := firstPort + rand.IntN(lastPort-firstPort) //nolint:gosec // no secret
		address := "127.0.0.1:" + strconv.Itoa(port)
		// The UDP port of the same number is the sign for other tests, also those of other
		// processes.
		sign, err := (&net.ListenConfig{}).ListenPacket(tb.Context(), "udp", address)
		if err != nil {
			continue
		}
		tb.Cleanup(func() { _ = sign.Close() })
		l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", address)
		if err != nil {
			continue
		}
		_ = l.Close()
		ports = append(ports, port)
	}
	tb.Fatalf("of %d free ports only %d were found", n, len(ports))
	return nil
}

func url(port int) string { return "nats://127.0.0.1:" + strconv.Itoa(port) }

// URL is where clients reach it.
func (s *Server) URL() string { return url(s.opts.Port) }

// Name is what its cluster calls it.
func (s *Server) Name() string { return s.opts.Name }

// SetMaxPayload is for the next Start: the largest payload in bytes.
func (s *Server) SetMaxPayload(bytes int32) { s.opts.MaxPayload = bytes }

// Start starts it again when it was killed or stopped, and returns when it takes connections.
func (s *Server) Start() {
	s.tb.Helper()
	s.child = start(s.tb, serverRole, s.opts, nil)
	if !s.child.AwaitReady() {
		s.tb.Fatalf("nats-server %s has ended: does TestMain begin with RunChild?", s.opts.Name)
	}
}

// Kill ends it by SIGKILL, if it runs, and returns when it is gone.
func (s *Server) Kill() {
	if s.child != nil {
		s.child.Kill()
	}
}

// Stop ends it in good order.
func (s *Server) Stop() {
	s.tb.Helper()
	s.child.Stop()
}

// serve is the process of a server.
func serve(ctx context.Context, o options) error {
	opts := &natsserver.Options{
		ServerName: o.Name, Host: "127.0.0.1", Port: o.Port, JetStream: true, StoreDir: o.Store, SyncInterval: time.Second, NoLog: true, NoSigs: true,
		MaxPayload: o.MaxPayload,
	}
	if len(o.Routes) > 1 {
		opts.Cluster = natsserver.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: o.ClusterPort, NoAdvertise: true}
		opts.Routes = natsserver.RoutesFromStr(strings.Join(o.Routes, ","))
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Name, err)
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		return errors.New("it takes no connections")
	}
	Ready()
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}
