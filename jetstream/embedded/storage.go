package embedded

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Bounds of looking after what the server stores.
const (
	storageCheckEvery = 5 * time.Second
	storageSay        = time.Minute // how often the log repeats what is wrong
	// storageRoom is what must fit onto the disk before the server is restarted: as much as it
	// writes in one piece.
	storageRoom = 8 << 20
	// storageGapFirst is the minimum time between two restarts. While streams continue to fail for
	// another reason than a full disk, the time doubles up to storageGapMax.
	storageGapFirst = time.Minute
	storageGapMax   = time.Hour
)

// fault is what keeps the server from storing events.
type fault struct {
	streams []string // that cannot be written; none: all
	cause   string   // in the words of the operating system
}

// full reports whether the disk, a quota or the largest size of a file is the cause.
func (f *fault) full() bool {
	return f.cause == syscall.ENOSPC.Error() || f.cause == syscall.EDQUOT.Error() || f.cause == syscall.EFBIG.Error()
}

// storage looks after what the server stores. A stream of it that could not be written once is
// never written again by that server, whatever becomes of the disk: its store keeps the error until
// it is opened again.
type storage struct {
	server    *Server
	log       *slog.Logger
	restarted func(context.Context, *nats.Conn)
	failing   func(streams int, cause string)

	fault *fault
	said  time.Time // when the log last said so
	pace  pace
}

// pace decides when the server may be restarted.
type pace struct {
	gap   time.Duration
	began time.Time // the last restart
	full  bool      // since the last restart, the fault was a full disk
}

// note takes notice of the state of the streams.
func (p *pace) note(now time.Time, f *fault) {
	p.full = f != nil && (p.full || f.full())
	if f == nil && now.Sub(p.began) > 2*p.gap {
		p.gap = storageGapFirst
	}
}

// due reports whether a restart may follow the last one. A full disk that has room again is no
// reason to wait for long, however often it became full before.
func (p *pace) due(now time.Time) bool {
	gap := p.gap
	if p.full {
		gap = storageGapFirst
	}
	return p.began.IsZero() || now.Sub(p.began) >= gap
}

// restart notes a restart.
func (p *pace) restart(now time.Time) {
	if !p.began.IsZero() && !p.full {
		p.gap = min(2*p.gap, storageGapMax)
	}
	p.began, p.full = now, false
}

// Tend watches for streams that cannot be written, and restarts the server when the disk can be
// written again. It returns when ctx ends. After a restart, Tend calls restarted with a connection
// to the new server, before the bus can reach it. When the state of the streams changes, Tend calls
// failing with the number of streams that cannot be written (0 for all of them) and the cause. An
// empty cause means that all streams can be written. Streams in memory need no check.
func (e *Server) Tend(ctx context.Context, restarted func(context.Context, *nats.Conn), failing func(streams int, cause string)) {
	if e.InMemory() {
		<-ctx.Done()
		return
	}
	w := &storage{server: e, log: e.cfg.Logger, restarted: restarted, failing: failing, pace: pace{gap: storageGapFirst}}
	tick := time.NewTicker(e.cfg.StorageCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.check(ctx)
		if w.fault != nil && w.pace.due(time.Now()) && e.hasRoom() == nil {
			w.restart(ctx)
			w.check(ctx)
		}
	}
}

// check asks the server how its streams are.
func (w *storage) check(ctx context.Context) {
	was, now := w.fault, w.server.fault()
	w.fault = now
	w.pace.note(time.Now(), now)
	switch {
	case now == nil && was == nil:
	case now == nil:
		w.failing(0, "")
		w.log.InfoContext(ctx, "all streams can be written again")
	default:
		w.failing(len(now.streams), now.cause)
		if was == nil || len(was.streams) != len(now.streams) || was.cause != now.cause || time.Since(w.said) >= storageSay {
			w.said = time.Now()
			w.log.ErrorContext(ctx, "streams of the embedded nats server cannot be written; it is restarted when the disk has room",
				slog.Int("streams", len(now.streams)), slog.Any("first", now.streams[:min(len(now.streams), 10)]), slog.String("error", now.cause))
		}
	}
}

// restart opens all streams again, with the server. For the bus it is as if a NATS of its own had
// been restarted.
func (w *storage) restart(ctx context.Context) {
	w.log.WarnContext(ctx, "restarting the embedded nats server: the disk has room again, and its streams are opened again")
	began := time.Now()
	w.pace.restart(began)
	err := w.server.restart(ctx, func(s *natsserver.Server) {
		nc, err := nats.Connect("", nats.InProcessServer(s), nats.Token(w.server.cfg.Token), nats.NoReconnect())
		if err != nil {
			w.log.WarnContext(ctx, "failed to prepare the embedded nats server after its restart", slog.Any("error", err))
			return
		}
		defer nc.Close()
		w.restarted(ctx, nc)
	})
	if err != nil {
		return // the bus closes
	}
	w.log.InfoContext(ctx, "the embedded nats server runs again", slog.Duration("took", time.Since(began)))
}

// writeError is what the server says, before the cause, of a stream whose store has failed.
const writeError = " write error: "

// fault asks the server which streams it cannot write.
func (e *Server) fault() (found *fault) {
	s := e.server.Load()
	if s == nil {
		return &fault{cause: errRestarting.Error()}
	}
	if !s.JetStreamEnabled() { // the server itself ended it: some write errors do that
		err := e.hasRoom()
		if err == nil {
			err = errors.New("the embedded nats server has stopped storing")
		}
		return &fault{cause: innermost(err).Error()}
	}
	for _, h := range s.Healthz(&natsserver.HealthzOptions{Details: true}).Errors {
		_, text, failed := strings.Cut(h.Error, writeError)
		if !failed || h.Type != natsserver.HealthzErrorStream {
			continue // such as a stream that is being made right now
		}
		if found == nil {
			// What comes before the last colon are the operation and the path.
			found = &fault{cause: strings.TrimSpace(text[strings.LastIndex(text, ": ")+1:])}
		}
		found.streams = append(found.streams, h.Stream)
	}
	return found
}

// hasRoom finds out, by doing so, whether the server could write as much as it does in one piece.
func (e *Server) hasRoom() error {
	name := filepath.Join(e.dir, "room.check")
	// what is left is overwritten by the next check
	defer func() { _ = os.Remove(name) }()
	file, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600) //nolint:gosec // in the hub's own directory
	if err != nil {
		return err
	}
	for piece, left := make([]byte, 1<<20), storageRoom; left > 0 && err == nil; left -= len(piece) {
		_, err = file.Write(piece)
	}
	if err == nil {
		err = file.Sync()
	}
	if closed := file.Close(); err == nil {
		err = closed
	}
	return err
}
