// Package natstest gives tests processes of their own, to kill: nats-servers, alone or as a
// cluster, and programs of the tests. Each is the test binary, run once more, so its TestMain must
// begin with RunChild.
package natstest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"eventhub/jetstream/natstest/freeport"
)

// serverRole is the role of nats-servers, which every test binary has.
const serverRole = "nats-server"

// Server is a nats-server with JetStream in a process of its own. However often it is started, it
// has its address, and what it has stored. Its methods are for one goroutine at a time.
type Server struct {
	tb    testing.TB
	opts  options
	child *Child
	pid   atomic.Int64 // of the child
}

// options are what the process of a server is told.
type options struct {
	Name, Store       string
	Port, ClusterPort int
	Routes            []string // to all servers of the cluster
	MaxPayload        int32    // in bytes; 0: the server's default
	Config            string   // a file; then nothing else counts but Name
	Program           string   // a nats-server to run; "": this program
	Sync              time.Duration
	SyncAlways        bool
	Metrics           string // an address; "" for none
}

// Storage is where a server stores, and how often it syncs.
type Storage struct {
	Dir    string
	Sync   time.Duration
	Always bool // before each ack, instead
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
	return started(Cluster(tb, n))
}

// StartStoring is StartCluster for a server with each storage.
func StartStoring(tb testing.TB, storage ...Storage) []*Server {
	tb.Helper()
	return started(storing(tb, storage))
}

func started(servers []*Server) []*Server {
	for _, s := range servers {
		s.Start()
	}
	return servers
}

// Cluster is StartCluster for servers of which none has started yet.
func Cluster(tb testing.TB, n int) []*Server {
	tb.Helper()
	dir, storage := tb.TempDir(), make([]Storage, n)
	for i := range storage {
		storage[i] = Storage{Dir: filepath.Join(dir, "n"+strconv.Itoa(i)), Sync: time.Second}
	}
	return storing(tb, storage)
}

// storing is a cluster of which no server has started yet.
func storing(tb testing.TB, storage []Storage) []*Server {
	tb.Helper()
	n := len(storage)
	ports := FreePorts(tb, 2*n)
	routes := make([]string, n)
	for i := range routes {
		routes[i] = url(ports[n+i])
	}
	servers := make([]*Server, n)
	for i, st := range storage {
		servers[i] = &Server{tb: tb, opts: options{
			Name: "n" + strconv.Itoa(i), Store: st.Dir, Port: ports[i], ClusterPort: ports[n+i], Routes: routes, Sync: st.Sync, SyncAlways: st.Always,
		}}
		tb.Cleanup(servers[i].Kill)
	}
	return servers
}

// Setup describes a cluster whose nodes can be partitioned, upgraded and robbed of their disks. Its
// clients need no credentials, and OperatorURL gives those of the system account.
type Setup struct {
	Nodes int
	// Route returns the address at which node from reaches node to, whose own address is given.
	Route func(from, to int, address string) string
	// Program is the nats-server that the nodes run at first. Default: the one in this program.
	Program string
	// Metrics has the nodes serve metrics of their processes, where Server.Metrics says. Nodes that
	// run Program have none.
	Metrics bool
	// Store returns the directory of a node's store.
	Store func(node int) string
}

// StartSetup starts a cluster for the time of the test, and returns when its servers take
// connections.
func StartSetup(tb testing.TB, setup Setup) []*Server {
	tb.Helper()
	n, dir := setup.Nodes, tb.TempDir()
	ports := FreePorts(tb, 2*n)
	servers := make([]*Server, n)
	for i := range servers {
		routes := make([]string, n)
		for j := range routes {
			routes[j] = "127.0.0.1:" + strconv.Itoa(ports[n+j])
			if i != j {
				routes[j] = setup.Route(i, j, routes[j])
			}
		}
		name := "n" + strconv.Itoa(i)
		s := &Server{tb: tb, opts: options{
			Name: name, Store: setup.Store(i), Port: ports[i], ClusterPort: ports[n+i], Routes: routes,
			Config: filepath.Join(dir, name+".conf"), Program: setup.Program,
		}}
		if setup.Metrics {
			s.opts.Metrics = FreeAddress(tb)
		}
		if err := os.WriteFile(s.opts.Config, []byte(s.opts.text()), 0o600); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(s.Kill)
		s.Start()
		servers[i] = s
	}
	return servers
}

// text is a configuration that all versions of nats-server read. The bound of the store is above
// what streams reserve, however small the disk is. The advertised address of the
// cluster is one that nobody listens at, so that nodes keep to their routes.
func (o *options) text() string {
	text := fmt.Sprintf(`server_name: %s
listen: "127.0.0.1:%d"
jetstream: {store_dir: %q, sync_interval: "1s", max_file: 64G}
accounts: {
  $SYS: {users: [{user: operator, password: operator}]}
  ALL: {jetstream: enabled, users: [{user: all, password: all}]}
}
no_auth_user: all
`, o.Name, o.Port, o.Store)
	if len(o.Routes) == 1 {
		return text
	}
	return text + fmt.Sprintf(`cluster: {
  name: test, listen: "127.0.0.1:%d", no_advertise: true, advertise: "127.0.0.1:1"
  routes: ["nats://%s"]
}
`, o.ClusterPort, strings.Join(o.Routes, `", "nats://`))
}

// OperatorURL is where the system account's user reaches the servers of a Setup.
func (s *Server) OperatorURL() string {
	return strings.Replace(s.URL(), "nats://", "nats://operator:operator@", 1)
}

// SetProgram is for the next Start: a nats-server to run, or "" for the one in this program.
func (s *Server) SetProgram(path string) { s.opts.Program = path }

// Wipe removes all that a server which does not run has stored.
func (s *Server) Wipe() {
	s.tb.Helper()
	entries, err := os.ReadDir(s.opts.Store)
	if err != nil {
		s.tb.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(s.opts.Store, e.Name())); err != nil {
			s.tb.Fatal(err)
		}
	}
}

// FreePorts returns n TCP ports of this host that nobody listens at, and that no other test is
// given meanwhile. The servers of a cluster must know each other's before they start, and keep
// theirs when they come back.
func FreePorts(tb testing.TB, n int) []int {
	tb.Helper()
	ports, release, err := freeport.Take(tb.Context(), n)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(release)
	return ports
}

// FreeAddress is an address of this host, HOST:PORT, with a port of FreePorts.
func FreeAddress(tb testing.TB) string {
	tb.Helper()
	return "127.0.0.1:" + strconv.Itoa(FreePorts(tb, 1)[0])
}

func url(port int) string { return "nats://127.0.0.1:" + strconv.Itoa(port) }

// URL is where clients reach it.
func (s *Server) URL() string { return url(s.opts.Port) }

// Metrics is the address that serves /metrics, or "" without Setup.Metrics.
func (s *Server) Metrics() string { return s.opts.Metrics }

// Name is what its cluster calls it.
func (s *Server) Name() string { return s.opts.Name }

// SetMaxPayload is for the next Start: the largest payload in bytes.
func (s *Server) SetMaxPayload(bytes int32) { s.opts.MaxPayload = bytes }

// Start starts it, also after it was killed or stopped, and returns when it takes connections.
func (s *Server) Start() {
	s.tb.Helper()
	if s.opts.Program != "" {
		s.child = startProgram(s.tb, Program{Path: s.opts.Program, Address: "127.0.0.1:" + strconv.Itoa(s.opts.Port), Args: []string{"-c", s.opts.Config}})
	} else {
		s.child = start(s.tb, serverRole, s.opts, nil)
	}
	s.pid.Store(int64(s.child.PID()))
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

// Strike sends SIGKILL, and does not wait until the server is gone, as Kill does.
func (s *Server) Strike() { s.child.strike() }

// Stop ends it in good order.
func (s *Server) Stop() {
	s.tb.Helper()
	s.child.Stop()
}

// serve is the process of a server.
func serve(ctx context.Context, o options) error {
	opts := &natsserver.Options{
		ServerName: o.Name, Host: "127.0.0.1", Port: o.Port, JetStream: true, StoreDir: o.Store, NoLog: true, NoSigs: true,
		MaxPayload: o.MaxPayload, SyncInterval: o.Sync, SyncAlways: o.SyncAlways,
	}
	if len(o.Routes) > 1 {
		opts.Cluster = natsserver.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: o.ClusterPort, NoAdvertise: true}
		opts.Routes = natsserver.RoutesFromStr(strings.Join(o.Routes, ","))
	}
	if o.Config != "" {
		var err error
		if opts, err = natsserver.ProcessConfigFile(o.Config); err != nil {
			return fmt.Errorf("%s: %w", o.Name, err)
		}
		opts.NoLog, opts.NoSigs = true, true
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return fmt.Errorf("%s: %w", o.Name, err)
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		return errors.New("it takes no connections")
	}
	if o.Metrics != "" {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Metrics)
		if err != nil {
			return fmt.Errorf("%s: %w", o.Name, err)
		}
		web := &http.Server{Handler: promhttp.Handler(), ReadHeaderTimeout: patience}
		var serving sync.WaitGroup
		serving.Go(func() { _ = web.Serve(l) })
		defer serving.Wait()
		defer func() { _ = web.Close() }()
	}
	Ready()
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

// PID is the number of the process that it was started in last. PID may be called at any time.
func (s *Server) PID() int { return int(s.pid.Load()) }
