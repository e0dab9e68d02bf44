package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/gofrs/flock"
	natsserver "github.com/nats-io/nats-server/v2/server"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// startWait bounds how long the embedded server may take until it answers, after it has read its data.
const startWait = 20 * time.Second

// Between tries to start the embedded server again there is restartFirst, doubled each time up to
// restartMax.
const (
	restartFirst = time.Second
	restartMax   = 30 * time.Second
)

// embedded is the NATS server that runs in this process.
type embedded struct {
	cfg  *Config
	log  *slog.Logger
	lock *flock.Flock
	port int    // where it listens, also after a restart; with Config.Listen only
	url  string // for native clients; with Config.Listen only

	server atomic.Pointer[natsserver.Server] // nil while it is restarted
}

var errRestarting = errors.New("the embedded nats server is being restarted")

// startEmbedded starts a server on cfg.DataDir, which belongs to it alone until stop.
func startEmbedded(ctx context.Context, cfg *Config, log *slog.Logger) (*embedded, error) {
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory %s: %w: choose one that this user may write (--data, EVENTHUB_DATA)", cfg.DataDir, cause(err))
	}
	lock := flock.New(filepath.Join(cfg.DataDir, "hub.lock"))
	locked, err := lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w: choose one that this user may write (--data, EVENTHUB_DATA)", cfg.DataDir, cause(err))
	}
	if !locked {
		return nil, fmt.Errorf("data directory %s: %w: stop that one, or choose another directory (--data, EVENTHUB_DATA)", cfg.DataDir, ErrInUse)
	}
	e := &embedded{cfg: cfg, log: log, lock: lock}
	if err := e.start(ctx); err != nil {
		return nil, errors.Join(err, lock.Unlock())
	}
	return e, nil
}

// start starts the first server.
func (e *embedded) start(ctx context.Context) error {
	if e.cfg.Listen != "" {
		// The server itself tries for long, and says why in its log only.
		probe, err := (&net.ListenConfig{}).Listen(ctx, "tcp", e.cfg.Listen)
		if err != nil {
			return fmt.Errorf("nats listen address %s: %w: choose another (--nats-listen, EVENTHUB_NATS_LISTEN)", e.cfg.Listen, innermost(err))
		}
		if err := probe.Close(); err != nil {
			return err
		}
	}
	s, err := e.run()
	if err != nil {
		return err
	}
	if addr, ok := s.Addr().(*net.TCPAddr); ok && e.cfg.Listen != "" {
		e.port, e.url = addr.Port, s.ClientURL()
	}
	e.server.Store(s)
	return nil
}

// options are what each server is started with.
func (e *embedded) options() (*natsserver.Options, error) {
	opts := &natsserver.Options{
		ServerName:    "eventhub",
		DontListen:    e.cfg.Listen == "",
		Authorization: e.cfg.ListenToken,
		JetStream:     true,
		StoreDir:      e.storeDir(),
		// The server would take its limit from what is free on the disk when it starts, and never look again.
		JetStreamMaxStore: math.MaxInt64,
		MaxPayload:        embeddedMaxPayload,
		MaxPending:        256 << 20,
		SyncInterval:      e.cfg.SyncInterval,
		SyncAlways:        e.cfg.SyncAlways,
		NoSigs:            true,
	}
	if e.cfg.Listen == "" {
		return opts, nil
	}
	host, port, err := net.SplitHostPort(e.cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("nats listen address %q: %w: give HOST:PORT", e.cfg.Listen, err)
	}
	opts.Host = host
	if opts.Port, err = strconv.Atoi(port); err != nil {
		return nil, fmt.Errorf("nats listen address %q: the port is no number", e.cfg.Listen)
	}
	switch {
	case e.port != 0:
		opts.Port = e.port
	case opts.Port == 0:
		opts.Port = natsserver.RANDOM_PORT
	}
	return opts, nil
}

func (e *embedded) storeDir() string { return filepath.Join(e.cfg.DataDir, "nats") }

// run starts a server, and returns when it answers.
func (e *embedded) run() (*natsserver.Server, error) {
	opts, err := e.options()
	if err != nil {
		return nil, err
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("embedded nats server: %w", err)
	}
	s.SetLoggerV2(&serverLog{log: e.log}, false, false, false)
	s.Start()
	if !s.ReadyForConnections(startWait) || !s.JetStreamEnabled() {
		end(s)
		return nil, fmt.Errorf("embedded nats server: it did not start in %v with the data in %s: see the log", startWait, e.cfg.DataDir)
	}
	return s, nil
}

// restart ends the server, and starts another one on the same data and port. prepare is called before anybody but native
// clients reaches the new one. It goes on until one runs or ctx ends.
func (e *embedded) restart(ctx context.Context, prepare func(*natsserver.Server)) error {
	if old := e.server.Swap(nil); old != nil {
		end(old)
	}
	for wait := restartFirst; ; wait = min(2*wait, restartMax) {
		s, err := e.run()
		if err == nil {
			prepare(s)
			e.server.Store(s)
			return nil
		}
		e.log.ErrorContext(ctx, "failed to restart the embedded nats server; retrying", slog.Any("error", err), slog.Duration("in", wait))
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// InProcessConn implements nats.InProcessConnProvider: it connects to the server that runs now.
func (e *embedded) InProcessConn() (net.Conn, error) {
	s := e.server.Load()
	if s == nil {
		return nil, errRestarting
	}
	return s.InProcessConn()
}

// Dial implements nats.CustomDialer, for connections of the hub itself to a server that listens.
func (e *embedded) Dial(network, address string) (net.Conn, error) {
	if e.server.Load() == nil {
		return nil, errRestarting
	}
	return (&net.Dialer{Timeout: dialWait}).DialContext(context.Background(), network, address)
}

// loopback is where the hub itself reaches a server that listens, or "". It goes through the socket then: in process each
// write waits for its reader, so that less is done at a time, which costs a tenth of the publishes (BENCHMARKS.md).
func (e *embedded) loopback() string {
	if e.cfg.Listen == "" {
		return ""
	}
	host, _, err := net.SplitHostPort(e.cfg.Listen)
	if ip := net.ParseIP(host); err != nil || host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "nats://" + net.JoinHostPort(host, strconv.Itoa(e.port))
}

// stop ends the server and frees the directory.
func (e *embedded) stop() {
	if s := e.server.Swap(nil); s != nil {
		end(s)
	}
	_ = e.lock.Unlock() // the lock ends with the process at the latest
}

func end(s *natsserver.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}

// oldLeasesWait bounds what a start spends on old leases. Those that it does not come to end after AckWait.
const oldLeasesWait = 5 * time.Second

// endOldLeases gives back what hubs had leased when the server last stopped. The server remembers what was delivered but
// not what was refused, so without this even leases that a hub had handed back in order would wait for AckWait. It is
// right here only: the server was just started, so no hub holds a lease of it. Consumers that native clients made are
// left alone, for those clients keep what they hold. So are events that were refused with a delay: those the server
// remembers.
func endOldLeases(ctx context.Context, js natsjs.JetStream) error {
	ctx, cancel := context.WithTimeout(ctx, oldLeasesWait)
	defer cancel()
	nc := js.Conn()
	delayed, err := delayed(ctx, js)
	if err != nil {
		return err
	}
	streams := js.ListStreams(ctx)
	for s := range streams.Info() {
		if s.State.Consumers == 0 {
			continue
		}
		handle, err := js.Stream(ctx, s.Config.Name)
		if err != nil {
			return err
		}
		consumers := handle.ListConsumers(ctx)
		for c := range consumers.Info() {
			if _, ours := c.Config.Metadata["eventhub.group"]; !ours || c.NumAckPending == 0 {
				continue
			}
			// The server looks naks up by stream sequence; those of events that are settled have no effect.
			for seq := c.AckFloor.Stream + 1; seq <= c.Delivered.Stream && ctx.Err() == nil; seq++ {
				if delayed[eventKey(s.Config.Name, c.Name, c.Created, seq)] {
					continue
				}
				subject := fmt.Sprintf("$JS.ACK.%s.%s.1.%d.%d.0.0", s.Config.Name, c.Name, seq, c.Delivered.Consumer)
				if err := nc.Publish(subject, nakNow); err != nil {
					return err
				}
			}
		}
		if err := consumers.Err(); err != nil {
			return err
		}
	}
	if err := streams.Err(); err != nil {
		return err
	}
	return nc.FlushWithContext(ctx)
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

// serverLog passes the embedded server's warnings and errors on.
type serverLog struct{ log *slog.Logger }

func (l *serverLog) write(level slog.Level, format string, args []any) {
	l.log.Log(context.Background(), level, "embedded nats server", slog.String("text", fmt.Sprintf(format, args...)))
}

func (l *serverLog) Noticef(string, ...any)            {}
func (l *serverLog) Debugf(string, ...any)             {}
func (l *serverLog) Tracef(string, ...any)             {}
func (l *serverLog) Warnf(format string, args ...any)  { l.write(slog.LevelWarn, format, args) }
func (l *serverLog) Errorf(format string, args ...any) { l.write(slog.LevelError, format, args) }
func (l *serverLog) Fatalf(format string, args ...any) { l.write(slog.LevelError, format, args) }
