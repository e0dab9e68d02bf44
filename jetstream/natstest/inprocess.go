package natstest

import (
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"

	"eventhub/jetstream/embedded"
)

// Embed starts the server of package embedded on a directory, for jetstream.Config.Server. It ends
// with the bus that gets it, and with the test at the latest.
func Embed(tb testing.TB, dir string, change ...func(*embedded.Config)) *embedded.Server {
	tb.Helper()
	cfg := embedded.Config{DataDir: dir}
	for _, f := range change {
		f(&cfg)
	}
	s, err := embedded.Start(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Close() })
	return s
}

// Listening makes the server of Embed listen on a free port of loopback, with a token.
func Listening(token string) func(*embedded.Config) {
	return func(cfg *embedded.Config) { cfg.Listen, cfg.Token = "127.0.0.1:0", token }
}

// Run runs a nats-server in this process, as an operator would run it, for the time of the test,
// and returns when it takes connections. Several buses may share it, and nothing can kill it: Start
// is for that. A change may be made to its options, which are those of a server with JetStream on a
// free port of loopback.
func Run(tb testing.TB, change ...func(*natsserver.Options)) *natsserver.Server {
	tb.Helper()
	s := newServer(tb, change...)
	run(tb, s)
	return s
}

// Again is for Run: a server at the address of s, with what s has stored, when s has ended. Call
// Again while s runs.
func Again(s *natsserver.Server) func(*natsserver.Options) {
	_, text, _ := strings.Cut(strings.TrimPrefix(s.ClientURL(), "nats://"), ":")
	port, err := strconv.Atoi(text)
	if err != nil {
		panic(err) // a client URL has a port
	}
	dir := filepath.Dir(s.StoreDir()) // the server adds a directory of its own
	return func(o *natsserver.Options) { o.Port, o.StoreDir = port, dir }
}

// RunCluster is Run for a cluster of n servers, and returns when it has a leader that knows all.
func RunCluster(tb testing.TB, n int) []*natsserver.Server {
	tb.Helper()
	ports := FreePorts(tb, n)
	routes := make([]string, n)
	for i, port := range ports {
		routes[i] = url(port)
	}
	all := make([]*natsserver.Server, n)
	for i, port := range ports {
		all[i] = newServer(tb, func(o *natsserver.Options) {
			o.ServerName = "n" + strconv.Itoa(i)
			o.Cluster = natsserver.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: port, NoAdvertise: true}
			o.Routes = natsserver.RoutesFromStr(strings.Join(routes, ","))
		})
		all[i].Start()
	}
	for _, s := range all {
		await(tb, s)
	}
	leads := func(s *natsserver.Server) bool { return s.JetStreamIsLeader() && len(s.JetStreamClusterPeers()) == n }
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !slices.ContainsFunc(all, leads) {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatal("the cluster has no leader")
		}
	}
	return all
}

// newServer makes a server that ends with the test.
func newServer(tb testing.TB, change ...func(*natsserver.Options)) *natsserver.Server {
	tb.Helper()
	opts := &natsserver.Options{Host: net.IPv4(127, 0, 0, 1).String(), Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: tb.TempDir(), NoLog: true, NoSigs: true}
	for _, f := range change {
		f(opts)
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { embedded.Shutdown(s) })
	return s
}

func run(tb testing.TB, s *natsserver.Server) {
	tb.Helper()
	s.Start()
	await(tb, s)
}

func await(tb testing.TB, s *natsserver.Server) {
	tb.Helper()
	if !s.ReadyForConnections(patience) {
		tb.Fatal("the nats-server takes no connections")
	}
}

// ClientURLs are the addresses of servers that Run and RunCluster have started, with commas between
// them.
func ClientURLs(servers ...*natsserver.Server) string {
	urls := make([]string, len(servers))
	for i, s := range servers {
		urls[i] = s.ClientURL()
	}
	return strings.Join(urls, ",")
}

// Leaks are the goroutines that a server in the test's own process may leave, for goleak. One waits
// for the answer of a source, and ends some seconds after its server. Others are of a stream that
// was being made while the server shut down, and never end.
func Leaks() []goleak.Option {
	return []goleak.Option{
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.(*stream).trySetupSourceConsumer.func3"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	}
}
