// Package embedded runs a NATS server with JetStream in this process, for a Bus of package
// jetstream:
//
//	server, err := embedded.Start(ctx, embedded.Config{DataDir: "eventhub-data"})
//	...
//	bus, err := jetstream.Open(ctx, jetstream.Config{Server: server})
//
// The bus closes the server. A program that connects to a NATS does not need this package, and then
// links no server.
package embedded

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gofrs/flock"
	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"github.com/shirou/gopsutil/v4/disk"

	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
)

// MaxMessage is the largest message in bytes, headers included, that the server accepts.
const MaxMessage = 4 << 20

// loopback is the host at which the bus, and the guard, reach a server that listens.
const loopback = "127.0.0.1"

// startWait bounds how long the server may take until it answers, after it has read its data.
const startWait = 20 * time.Second

// ownLinks is how many connections the bus may have to a server without a guard, which counts them.
const ownLinks = 128

// dialWait bounds one connection of the bus to the server.
const dialWait = 5 * time.Second

// Between tries to start the server again there is restartFirst, doubled each time up to
// restartMax.
const (
	restartFirst = time.Second
	restartMax   = 30 * time.Second
)

var (
	// ErrInUse is returned by Start when another server runs on Config.DataDir. Nothing was
	// touched.
	ErrInUse = errors.New("another hub is using it")
	// ErrDataDir is among the causes of an error about Config.DataDir.
	ErrDataDir = errors.New("data directory")
	// ErrListen is among the causes of an error about Config.Listen.
	ErrListen = errors.New("nats listen address")
)

var errRestarting = errors.New("the embedded nats server is restarting")

// Config configures a Server. The zero value keeps everything in memory, and does not listen.
type Config struct {
	// DataDir is the directory in which the server keeps its streams. One server at a time may use
	// it. If empty, the streams are in memory and nothing is written to disk.
	DataDir string
	// Listen, when not empty, is the host:port at which the server also accepts native NATS
	// clients. They authenticate with Token, or as Callout says; one of both must then be set. Port
	// 0 stands for any free port.
	Listen string
	Token  string
	// Callout, when not nil, has the bus decide about each native client (auth callout).
	Callout *Callout
	// Clients is how many native clients may be connected through the guard (Callout.Guarded), each
	// of which takes three descriptors; default 20,000, at most three quarters of them of one
	// principal. Strangers is how many of them may not have sent CONNECT, a quarter of these from
	// one address; default a quarter of Clients. One more stranger closes the oldest.
	Clients, Strangers int
	// Rates are how much a principal may send through the guard.
	Rates Rates
	// LimitReached, when not nil, is called when one of the two is reached, with its name
	// (native_connections, native_strangers), and each time a rate has a connection wait. It must
	// not block.
	LimitReached func(limit string)
	// TLS, when not nil, is the TLS configuration of that listener. Clients then cannot connect
	// without TLS. It may change its certificate by GetCertificate.
	TLS *tls.Config
	// SyncInterval is how often the server flushes to disk; default 1 s. SyncAlways flushes before
	// each ack instead, and costs a factor of 25 or more.
	SyncInterval time.Duration
	SyncAlways   bool
	// StorageCheck is the interval between checks for failed writes of streams; default 5 s.
	StorageCheck time.Duration
	// Logger receives the warnings and errors of the server. Default: nothing is logged.
	Logger *slog.Logger
}

// Rates are how much one principal of native clients may send through the guard, over all its
// connections. Beyond a rate, the guard reads them more slowly, and whatever follows on such a
// connection waits, too. The names in a Set are those of principals; a nil Set has no limit.
// Clients with full access have none.
type Rates struct {
	// Messages ("native_messages") are the operations except settlements: publishes, requests,
	// subscriptions, and pings.
	Messages *quota.Set
	// Requests ("native_requests") are requests to the server, except pulls. They also count among
	// the Messages.
	Requests *quota.Set
	// Settles ("native_settles") are acknowledgements, of each kind, that want no answer.
	Settles *quota.Set
	// Bytes ("native_bytes") are all bytes that the server gets.
	Bytes *quota.Set
}

// validate checks the configuration and fills in the defaults.
func (c *Config) validate() error {
	if c.SyncInterval == 0 {
		c.SyncInterval = time.Second
	}
	if c.StorageCheck == 0 {
		c.StorageCheck = storageCheckEvery
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Clients == 0 {
		c.Clients = 20_000
	}
	if c.Strangers == 0 {
		c.Strangers = max(c.Clients/4, 1)
	}
	if c.LimitReached == nil {
		c.LimitReached = func(string) {}
	}
	switch {
	case c.Clients < 0 || c.Strangers < 0:
		return fmt.Errorf("%d native clients and %d strangers: must be positive", c.Clients, c.Strangers)
	case c.SyncInterval < 0:
		return fmt.Errorf("sync interval %v: must be positive", c.SyncInterval)
	case c.StorageCheck < 0:
		return fmt.Errorf("storage check interval %v: must be positive", c.StorageCheck)
	case c.Listen == "":
		return nil
	case (c.Token == "") == (c.Callout == nil):
		return errors.New("the embedded server needs either a token or an auth callout to listen")
	}
	_, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return &placeError{ErrListen, fmt.Sprintf("%q: %v: give HOST:PORT", c.Listen, err), err}
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return &placeError{ErrListen, fmt.Sprintf("%q: the port is no number from 0 to 65535", c.Listen), err}
	}
	return nil
}

// placeError is an error about the directory or the address of a server.
type placeError struct {
	what error // ErrDataDir or ErrListen
	text string
	err  error
}

func (e *placeError) Error() string { return e.what.Error() + " " + e.text }

func (e *placeError) Unwrap() []error { return []error{e.what, e.err} }

// Server is a NATS server in this process: a jetstream.Server. Its methods may be called
// concurrently.
type Server struct {
	cfg    Config
	often  *pacedlog.Log // lines that clients can repeat
	dir    string        // of the streams
	lock   *flock.Flock
	port   int    // where it listens, also after a restart; with Config.Listen only
	url    string // for native clients; with Config.Listen only
	closed sync.Once

	user  nkeys.KeyPair // the bus; with Config.Callout only
	guard *guard        // with Callout.Guarded only

	server atomic.Pointer[natsserver.Server] // nil while it is restarted

	stop context.CancelFunc // ends what runs beside the server
	wait sync.WaitGroup
}

// Start starts a server, and returns when the server answers. The server has exclusive use of the
// data directory until Close. The end of ctx ends Start but not the server. Errors name the
// operation, the object, the cause and the remedy; ErrInUse, ErrDataDir and ErrListen are among
// their causes. After an error nothing is left running.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Server{cfg: cfg, often: pacedlog.New(cfg.Logger)}
	if cfg.Listen != "" && cfg.Callout != nil {
		var err error
		if e.user, err = nkeys.CreateUser(); err != nil {
			return nil, fmt.Errorf("embedded nats server: %w", err)
		}
	}
	if err := e.take(); err != nil {
		return nil, err
	}
	if err := e.start(ctx); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// InMemory is whether the server keeps nothing on disk.
func (e *Server) InMemory() bool { return e.cfg.DataDir == "" }

// take makes the directory of the server, and locks it.
func (e *Server) take() error {
	if e.InMemory() {
		dir, err := os.MkdirTemp("", "eventhub-memory")
		e.dir = dir
		return err
	}
	fault := func(err error, advice string) error {
		return &placeError{ErrDataDir, fmt.Sprintf("%s: %v: %s", e.cfg.DataDir, cause(err), advice), err}
	}
	const unwritable = "choose one that this user may write"
	if err := os.MkdirAll(e.cfg.DataDir, 0o700); err != nil {
		return fault(err, unwritable)
	}
	lock := flock.New(filepath.Join(e.cfg.DataDir, "hub.lock"))
	locked, err := lock.TryLock()
	if err != nil {
		return fault(err, unwritable)
	}
	if !locked {
		return fault(ErrInUse, "stop that one, or choose another directory")
	}
	e.lock, e.dir = lock, filepath.Join(e.cfg.DataDir, "nats")
	return nil
}

// start starts the first server.
func (e *Server) start(ctx context.Context) error {
	if e.guarded() {
		var err error
		if e.guard, err = newGuard(ctx, e); err != nil {
			return err
		}
		e.url = e.guard.url()
	} else if e.cfg.Listen != "" {
		// The server itself tries for long, and says why in its log only.
		probe, err := (&net.ListenConfig{}).Listen(ctx, "tcp", e.cfg.Listen)
		if err != nil {
			return &placeError{ErrListen, fmt.Sprintf("%s: %v: choose another", e.cfg.Listen, innermost(err)), err}
		}
		if err := probe.Close(); err != nil {
			return err
		}
	}
	s, err := e.run(ctx)
	if err != nil {
		return err
	}
	if addr, ok := s.Addr().(*net.TCPAddr); ok && e.guard == nil {
		e.port, e.url = addr.Port, s.ClientURL()
	}
	e.server.Store(s)
	if e.guard != nil {
		e.guard.run()
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx)) // it ends with the server
	e.stop = stop
	e.wait.Go(func() { e.often.Run(running) })
	if !e.InMemory() && !e.cfg.SyncAlways {
		e.wait.Go(func() { (&descriptions{server: e}).run(running) })
	}
	if e.InMemory() {
		// The server wants a directory when it starts, and streams in memory never use it. So
		// nothing is left by a process that is killed.
		return os.RemoveAll(e.dir)
	}
	return nil
}

// guarded reports whether clients reach the server through the guard. The server itself then
// listens on a port of loopback, for the guard and the bus.
func (e *Server) guarded() bool {
	return e.cfg.Listen != "" && e.cfg.Callout != nil && e.cfg.Callout.Guarded
}

// options are what each server is started with. The configuration has been checked.
func (e *Server) options() *natsserver.Options {
	opts := &natsserver.Options{
		ServerName:    "eventhub",
		DontListen:    e.cfg.Listen == "",
		Authorization: e.cfg.Token,
		JetStream:     true,
		StoreDir:      e.dir,
		// The server would take its limit from what is free on the disk when it starts, and never
		// look again.
		JetStreamMaxStore: math.MaxInt64,
		// The bus limits the consumers of a stream.
		JetStreamLimits: natsserver.JSLimitOpts{DefaultMaxConsumers: -1},
		// Each ack, and each publish with a key, has a subject of its own. A cache of subjects only
		// grows and is emptied again.
		NoSublistCache: true,
		MaxPayload:     MaxMessage,
		MaxPending:     256 << 20,
		SyncInterval:   e.cfg.SyncInterval,
		SyncAlways:     e.cfg.SyncAlways,
		NoSigs:         true,
	}
	if e.cfg.Listen == "" {
		return opts
	}
	if e.user != nil {
		e.cfg.Callout.configure(opts, e.userName())
	}
	if e.guarded() {
		opts.Host, opts.Port = loopback, natsserver.RANDOM_PORT
		return opts
	}
	host, port, _ := net.SplitHostPort(e.cfg.Listen)
	opts.Host, opts.MaxConn = host, e.cfg.Clients+e.cfg.Strangers+ownLinks
	opts.Port, _ = strconv.Atoi(port)
	switch {
	case e.port != 0:
		opts.Port = e.port
	case opts.Port == 0:
		opts.Port = natsserver.RANDOM_PORT
	}
	opts.TLSConfig = e.cfg.TLS
	return opts
}

// run starts a server, and returns when it answers.
func (e *Server) run(ctx context.Context) (*natsserver.Server, error) {
	if err := e.clean(ctx); err != nil {
		return nil, fmt.Errorf("embedded nats server: clean up after a crash: %w", err)
	}
	s, err := natsserver.NewServer(e.options())
	if err != nil {
		return nil, fmt.Errorf("embedded nats server: %w", err)
	}
	s.SetLoggerV2(serverLog{e.often}, false, false, false)
	s.Start()
	if !s.ReadyForConnections(startWait) || !s.JetStreamEnabled() {
		Shutdown(s)
		return nil, fmt.Errorf("embedded nats server: not ready after %v with the data in %s; see the log", startWait, e.dir)
	}
	if err := e.recovered(s); err != nil {
		Shutdown(s)
		return nil, fmt.Errorf("embedded nats server: %w", err)
	}
	if e.user != nil {
		if err := e.cfg.Callout.connect(s); err != nil {
			Shutdown(s)
			return nil, fmt.Errorf("embedded nats server: accounts: %w", err)
		}
	}
	return s, nil
}

// restart ends the server, and starts another one on the same data and port. prepare is called
// before anybody but native clients reaches the new one. It goes on until one runs or ctx ends.
func (e *Server) restart(ctx context.Context, prepare func(*natsserver.Server)) error {
	if old := e.server.Swap(nil); old != nil {
		Shutdown(old)
	}
	for wait := restartFirst; ; wait = min(2*wait, restartMax) {
		s, err := e.run(ctx)
		if err == nil {
			prepare(s)
			e.server.Store(s)
			return nil
		}
		e.cfg.Logger.ErrorContext(ctx, "failed to restart the embedded nats server; retrying", slog.Any("error", err), slog.Duration("in", wait))
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// NATS returns the current server, or nil during a restart.
func (e *Server) NATS() *natsserver.Server { return e.server.Load() }

// ClientURL returns the address at which native clients reach the server, or "" if the server does
// not listen.
func (e *Server) ClientURL() string { return e.url }

// DiskFree returns how many bytes the disk of DataDir has left for this process.
func (e *Server) DiskFree(ctx context.Context) (uint64, error) {
	usage, err := disk.UsageWithContext(ctx, e.dir)
	if err != nil {
		return 0, err
	}
	return usage.Free, nil
}

// Connection returns the URL, which may be empty, and the options with which the bus connects. The
// bus reaches a server that listens without TLS through its socket. In process, each write waits
// for its reader, so less is done at a time, which costs a tenth of the publishes (BENCHMARKS.md).
func (e *Server) Connection() (url string, options []nats.Option) {
	options = []nats.Option{nats.Token(e.cfg.Token)}
	if e.user != nil {
		options = []nats.Option{nats.Nkey(e.userName(), e.user.Sign)}
	}
	if e.guarded() {
		return "nats://" + loopback, append(options, nats.SetCustomDialer(e))
	}
	if e.cfg.Listen == "" || e.cfg.TLS != nil {
		return "", append(options, nats.InProcessServer(e))
	}
	host, _, err := net.SplitHostPort(e.cfg.Listen)
	if ip := net.ParseIP(host); err != nil || host == "" || ip != nil && ip.IsUnspecified() {
		host = loopback
	}
	return "nats://" + net.JoinHostPort(host, strconv.Itoa(e.port)), append(options, nats.SetCustomDialer(e))
}

// userName is the public key of the bus.
func (e *Server) userName() string {
	name, _ := e.user.PublicKey() // fails only for keys without one
	return name
}

// InProcessConn implements nats.InProcessConnProvider: it connects to the current server.
func (e *Server) InProcessConn() (net.Conn, error) {
	s := e.server.Load()
	if s == nil {
		return nil, errRestarting
	}
	return s.InProcessConn()
}

// Dial implements nats.CustomDialer, for connections of the bus to a server that listens.
func (e *Server) Dial(network, address string) (net.Conn, error) {
	return e.dial(context.Background(), network, address)
}

// dial connects the bus or the guard to the server. The port of a guarded server changes when it is
// restarted.
func (e *Server) dial(ctx context.Context, network, address string) (net.Conn, error) {
	s := e.server.Load()
	if s == nil {
		return nil, errRestarting
	}
	if e.guarded() {
		at := s.Addr()
		if at == nil { // the server ends
			return nil, errRestarting
		}
		address = at.String()
	}
	return (&net.Dialer{Timeout: dialWait}).DialContext(ctx, network, address)
}

// Close ends the server, frees the directory, and waits for both. It may be called twice, and
// returns nil. Tend must have ended before.
func (e *Server) Close() error {
	e.closed.Do(func() {
		if e.guard != nil {
			e.guard.close()
		}
		if e.stop != nil {
			e.stop()
			e.wait.Wait()
		}
		if s := e.server.Swap(nil); s != nil {
			Shutdown(s)
		}
		e.often.End()
		if e.InMemory() {
			// only a native client's stream on disk would have made it again
			_ = os.RemoveAll(e.dir)
			return
		}
		_ = e.lock.Unlock() // the lock ends with the process at the latest
	})
	return nil
}

const (
	// idleWait bounds how long Shutdown waits for requests that the server still serves, and
	// idleCheck is how often Shutdown looks.
	idleWait  = 2 * time.Second
	idleCheck = 5 * time.Millisecond
)

// Shutdown stops a server of this process, and returns when the server has stopped. A server that
// stops while it makes a stream leaves the goroutines of the stream's store, so Shutdown first
// waits for the requests that the server has taken, for at most 2 s. Later lines of the server are
// not logged. Shutdown may be called twice.
func Shutdown(s *natsserver.Server) {
	for began := time.Now(); time.Since(began) < idleWait; <-time.After(idleCheck) {
		if info, err := s.Jsz(nil); err != nil || info.API.Inflight == 0 {
			break
		}
	}
	s.Shutdown()
	s.WaitForShutdown()
	s.SetLoggerV2(nil, false, false, false) // a snapshot is not waited for
}

// innermost is the error at the end of a chain: what was tried, and on what, is said already.
func innermost(err error) error {
	for next := errors.Unwrap(err); next != nil; next = errors.Unwrap(next) {
		err = next
	}
	return err
}

// cause is the innermost error of a file operation: the path is named already.
func cause(err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		return pe.Err
	}
	return err
}

// clientInfo begins lines about a client: address and number of the connection, and what the client
// said of itself. Only the host is the same for a client that connects again.
var clientInfo = regexp.MustCompile(`^(\S+):\d+ - \w+:\d+( - "(\\.|[^"\\])*")*`)

// serverLog passes the embedded server's warnings and errors on. The server logs each subject that
// it refuses to a native client, and clients must not fill the log.
type serverLog struct{ often *pacedlog.Log }

func (l serverLog) write(level slog.Level, format string, args []any) {
	kind := clientInfo.ReplaceAllString(format, "$1") // a format may have a client in it
	l.often.Log(context.Background(), level, "embedded nats server", kind, slog.String("text", fmt.Sprintf(format, args...)))
}

func (l serverLog) Noticef(string, ...any)            {}
func (l serverLog) Debugf(string, ...any)             {}
func (l serverLog) Tracef(string, ...any)             {}
func (l serverLog) Warnf(format string, args ...any)  { l.write(slog.LevelWarn, format, args) }
func (l serverLog) Errorf(format string, args ...any) { l.write(slog.LevelError, format, args) }
func (l serverLog) Fatalf(format string, args ...any) { l.write(slog.LevelError, format, args) }
