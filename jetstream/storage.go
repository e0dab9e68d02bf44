package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Bounds of looking after what the embedded server stores.
const (
	storageCheckEvery = 5 * time.Second
	storageSay        = time.Minute // how often the log repeats what is wrong
	// storageRoom is what must fit onto the disk before the server is restarted: as much as it writes in one piece.
	storageRoom = 8 << 20
	// Between two restarts there is storageGapFirst, doubled up to storageGapMax while streams go
	// on to fail.
	storageGapFirst = time.Minute
	storageGapMax   = time.Hour
)

// StorageError is returned by Bus.Ready while the embedded server cannot store events. Its text names no topic and no path.
type StorageError struct {
	// Streams is how many streams cannot be written, 0 for all.
	Streams int
	// Cause says why, in the words of the operating system.
	Cause string
}

// Error implements error.
func (e *StorageError) Error() string {
	switch e.Streams {
	case 0:
		return "the streams cannot be written: " + e.Cause
	case 1:
		return "a stream cannot be written: " + e.Cause
	default:
		return fmt.Sprintf("%d streams cannot be written: %s", e.Streams, e.Cause)
	}
}

// storage looks after what the embedded server stores. A stream of it that could not be written once is never written again
// by that server, whatever becomes of the disk: its store keeps the error until it is opened anew.
type storage struct {
	bus   *Bus
	fault *StorageError
	said  time.Time     // when the log last said so
	gap   time.Duration // until the next restart, from
	began time.Time     // the last one
}

// lookAfterStore notices streams that cannot be written, and restarts the embedded server when they can be again.
func (b *Bus) lookAfterStore() {
	w := &storage{bus: b, gap: storageGapFirst}
	tick := time.NewTicker(b.cfg.storageCheck)
	defer tick.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case <-tick.C:
		}
		w.check(b.ctx)
		if w.fault != nil && (w.began.IsZero() || time.Since(w.began) >= w.gap) && b.server.hasRoom() == nil {
			w.restart(b.ctx)
			w.check(b.ctx)
		}
	}
}

// check asks the server how its streams are.
func (w *storage) check(ctx context.Context) {
	b := w.bus
	fault, names := b.server.fault()
	was := w.fault
	w.fault = fault
	b.unstored.Store(fault)
	switch {
	case fault == nil && was == nil:
		if time.Since(w.began) > 2*w.gap {
			w.gap = storageGapFirst
		}
	case fault == nil:
		b.obs.Gauge(GaugeStreamsFailed, 0)
		b.log.InfoContext(ctx, "all streams can be written again")
	default:
		b.obs.Gauge(GaugeStreamsFailed, float64(max(1, len(names))))
		if was == nil || *was != *fault || time.Since(w.said) >= storageSay {
			w.said = time.Now()
			b.log.ErrorContext(ctx, "streams of the embedded nats server cannot be written; it is restarted when the disk has room",
				slog.Int("streams", len(names)), slog.Any("first", names[:min(len(names), 10)]), slog.String("error", fault.Cause))
		}
	}
}

// restart opens all streams anew, with the server. For the hub it is as if a NATS of its own had been restarted: what was
// leased is given up and comes again, and what was confirmed is on the disk.
func (w *storage) restart(ctx context.Context) {
	b := w.bus
	b.log.WarnContext(ctx, "restarting the embedded nats server: the disk has room again, and its streams are opened anew")
	if !w.began.IsZero() {
		w.gap = min(2*w.gap, storageGapMax)
	}
	w.began = time.Now()
	err := b.server.restart(ctx, func(s *natsserver.Server) {
		if err := b.endLeasesOf(ctx, s); err != nil {
			b.log.WarnContext(ctx, "failed to end all leases from before the restart; the rest ends after AckWait", slog.Any("error", err))
		}
	})
	if err != nil {
		return // the bus closes
	}
	b.obs.ServerRestarted()
	b.log.InfoContext(ctx, "the embedded nats server runs again", slog.Duration("took", time.Since(w.began)))
}

// endLeasesOf is endOldLeases over a connection of its own: those of the hub must not be there before.
func (b *Bus) endLeasesOf(ctx context.Context, s *natsserver.Server) error {
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.Token(b.cfg.ListenToken), nats.NoReconnect())
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return err
	}
	return endOldLeases(ctx, js)
}

// writeError is what the server says, before the cause, of a stream whose store has failed.
const writeError = " write error: "

// fault asks the server which streams it cannot write.
func (e *embedded) fault() (fault *StorageError, streams []string) {
	s := e.server.Load()
	if s == nil {
		return &StorageError{Cause: errRestarting.Error()}, nil
	}
	if !s.JetStreamEnabled() { // the server itself ended it: some write errors do that
		err := e.hasRoom()
		if err == nil {
			err = errors.New("the embedded nats server has stopped storing")
		}
		return &StorageError{Cause: innermost(err).Error()}, nil
	}
	for _, h := range s.Healthz(&natsserver.HealthzOptions{Details: true}).Errors {
		_, text, found := strings.Cut(h.Error, writeError)
		if !found || h.Type != natsserver.HealthzErrorStream {
			continue // such as a stream that is being made right now
		}
		if fault == nil {
			// What comes before the last colon are the operation and the path.
			fault = &StorageError{Cause: strings.TrimSpace(text[strings.LastIndex(text, ": ")+1:])}
		}
		fault.Streams++
		streams = append(streams, h.Stream)
	}
	return fault, streams
}

// hasRoom finds out, by doing so, whether the server could write as much as it does in one piece.
func (e *embedded) hasRoom() error {
	name := filepath.Join(e.storeDir(), "room.check")
	defer func() { _ = os.Remove(name) }()                                    // what is left is overwritten by the next check
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
