package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gofrs/flock"
	natsserver "github.com/nats-io/nats-server/v2/server"
)

// embedded is the NATS server that runs in this process.
type embedded struct {
	*natsserver.Server
	lock *flock.Flock
}

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
	opts := &natsserver.Options{
		ServerName:    "eventhub",
		DontListen:    cfg.Listen == "",
		Authorization: cfg.ListenToken,
		JetStream:     true,
		StoreDir:      filepath.Join(cfg.DataDir, "nats"),
		MaxPayload:    embeddedMaxPayload,
		MaxPending:    256 << 20,
		SyncInterval:  cfg.SyncInterval,
		SyncAlways:    cfg.SyncAlways,
		NoSigs:        true,
	}
	if cfg.Listen != "" {
		host, port, err := net.SplitHostPort(cfg.Listen)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("nats listen address %q: %w: give HOST:PORT", cfg.Listen, err), lock.Unlock())
		}
		opts.Host = host
		if opts.Port, err = strconv.Atoi(port); err != nil {
			return nil, errors.Join(fmt.Errorf("nats listen address %q: the port is no number", cfg.Listen), lock.Unlock())
		}
		if opts.Port == 0 {
			opts.Port = natsserver.RANDOM_PORT
		}
	}
	if cfg.Listen != "" {
		// The server itself tries for long, and says why in its log only.
		probe, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("nats listen address %s: %w: choose another (--nats-listen, EVENTHUB_NATS_LISTEN)", cfg.Listen, innermost(err)), lock.Unlock())
		}
		if err := probe.Close(); err != nil {
			return nil, errors.Join(err, lock.Unlock())
		}
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("embedded nats server: %w", err), lock.Unlock())
	}
	s.SetLoggerV2(&serverLog{log: log}, false, false, false)
	s.Start()
	e := &embedded{Server: s, lock: lock}
	if !s.ReadyForConnections(20 * time.Second) {
		e.stop()
		return nil, fmt.Errorf("embedded nats server: it did not start in 20 s with the data in %s: see the log", cfg.DataDir)
	}
	return e, nil
}

// loopback is where the hub itself reaches a server that listens, or "". It goes through the socket then: in process each
// write waits for its reader, so that less is done at a time, which costs a tenth of the publishes (BENCHMARKS.md).
func (e *embedded) loopback() string {
	addr, ok := e.Addr().(*net.TCPAddr)
	if !ok {
		return ""
	}
	host := addr.IP
	if host.IsUnspecified() {
		host = net.IPv4(127, 0, 0, 1)
	}
	return "nats://" + net.JoinHostPort(host.String(), strconv.Itoa(addr.Port))
}

// stop ends the server and frees the directory.
func (e *embedded) stop() {
	e.Shutdown()
	e.WaitForShutdown()
	_ = e.lock.Unlock() // the lock ends with the process at the latest
}

// oldLeasesWait bounds what a start spends on old leases. Those that it does not come to end after AckWait.
const oldLeasesWait = 5 * time.Second

// endOldLeases gives back what hubs had leased when the server last stopped. The server remembers what was delivered but
// not what was refused, so without this even leases that a hub had handed back in order would wait for AckWait. It is
// right here only: the server was just started, so no hub holds a lease of it. Consumers that native clients made are
// left alone, for those clients keep what they hold. So are events that were refused with a delay: those the server
// remembers.
func (b *Bus) endOldLeases(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, oldLeasesWait)
	defer cancel()
	nc := b.links[0].nc
	delayed, err := b.delayed(ctx)
	if err != nil {
		return err
	}
	streams := b.js.ListStreams(ctx)
	for s := range streams.Info() {
		if s.State.Consumers == 0 {
			continue
		}
		handle, err := b.js.Stream(ctx, s.Config.Name)
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
