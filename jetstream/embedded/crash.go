package embedded

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// Directories and files of the server's store, below its directory: streams are at
// jetstream/ACCOUNT/streams/NAME, and their consumers at obs/NAME within.
const (
	streamsDir   = "streams"
	consumersDir = "obs"
	messagesDir  = "msgs"
)

// stateFile is the file in a consumer's directory with what is delivered and acknowledged.
const stateFile = "o.dat"

// lostDir is the directory in Config.DataDir for streams that were made in the last moments before
// a crash, and that the server cannot read.
const lostDir = "lost"

// settled is how old the last change of a directory must be, so that a further change is sure to
// give the directory another time.
const settled = 2 * time.Second

// errNotRecovered is returned when the server has not recovered a stream.
var errNotRecovered = errors.New("stream was not recovered")

// streamDirs are the directories of all streams.
func (e *Server) streamDirs() ([]string, error) {
	return glob(e.dir, natsserver.JetStreamStoreDir+"/*/"+streamsDir+"/*")
}

// glob is filepath.Glob below a directory whose own name may have any characters.
func glob(dir, pattern string) ([]string, error) {
	found, err := fs.Glob(os.DirFS(dir), pattern)
	for i, name := range found {
		found[i] = filepath.Join(dir, filepath.FromSlash(name))
	}
	return found, err
}

// consumerDirs are the directories of a stream's consumers.
func consumerDirs(stream string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(stream, consumersDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	dirs := make([]string, len(entries))
	for i, entry := range entries {
		dirs[i] = filepath.Join(stream, consumersDir, entry.Name())
	}
	return dirs, err
}

// clean removes what a crash of the machine has left of streams and consumers whose descriptions,
// and of consumers whose first state, were not synced. The server would pass over such a stream,
// and the next user of the topic would make the stream anew in the same directory, with remains of
// the old one. A stream goes to lostDir, and a consumer, which has no events, is deleted.
func (e *Server) clean(ctx context.Context) error {
	streams, err := e.streamDirs()
	if err != nil {
		return err
	}
	for _, stream := range streams {
		if undescribed(stream) {
			if err := e.setAside(ctx, stream); err != nil {
				return err
			}
			continue
		}
		consumers, err := consumerDirs(stream)
		if err != nil {
			return err
		}
		for _, consumer := range consumers {
			names := []any{slog.String("stream", filepath.Base(stream)), slog.String("consumer", filepath.Base(consumer))}
			switch state := filepath.Join(consumer, stateFile); {
			case undescribed(consumer):
				if err := os.RemoveAll(consumer); err != nil {
					return err
				}
				e.cfg.Logger.WarnContext(ctx, "removed the remains of a consumer; the machine crashed soon after the consumer was made", names...)
			case torn(state):
				if err := os.Remove(state); err != nil {
					return err
				}
				e.cfg.Logger.WarnContext(ctx, "removed the state of a consumer; the machine crashed while it was written; the consumer starts again", names...)
			}
		}
	}
	return nil
}

// torn reports whether the state of a consumer is there in parts. The server writes a new file for
// each state, and does not sync. A file system that replaces files by renaming keeps either the old
// or the new state, but of the first state it may keep any part. The server passes over a consumer
// whose state it cannot read, and refuses to make that consumer anew. The state has no checksum,
// and missing parts that read as zeros could pass for acknowledgements.
func torn(path string) bool {
	text, err := os.ReadFile(path) //nolint:gosec // in the hub's own directory
	if err != nil || len(text) == 0 {
		return false // the server takes an empty file for the state of a new consumer
	}
	const magic, version = 22, 2 // filestore.go and store.go of the server
	if len(text) < 2 || text[0] != magic {
		return true
	}
	if text[1] != version {
		return false // for the server to judge
	}
	rest, fits := text[2:], true
	number := func() uint64 {
		n, size := binary.Uvarint(rest)
		if size <= 0 {
			rest, fits = nil, false
			return 0
		}
		rest = rest[size:]
		return n
	}
	for range 4 { // what is acknowledged and what is delivered, in the consumer and in the stream
		number()
	}
	if pending := number(); pending > 0 {
		number() // the time to which those of the events relate
		for range pending {
			beyondFloor := number()
			number() // in the consumer
			number() // its time
			if !fits || beyondFloor == 0 {
				return true
			}
		}
	}
	for redelivered := number(); redelivered > 0 && fits; redelivered-- {
		number() // in the stream
		if times := number(); times == 0 {
			return true
		}
	}
	return !fits || len(rest) > 0
}

// undescribed reports whether the description of a stream or consumer was never synced: then one of
// its files is missing, empty, or has only zeros.
func undescribed(dir string) bool {
	for _, name := range []string{natsserver.JetStreamMetaFile, natsserver.JetStreamMetaFileSum} {
		text, err := os.ReadFile(filepath.Join(dir, name)) //nolint:gosec // in the hub's own directory
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(bytes.Trim(text, "\x00")) == 0 {
			return true
		}
	}
	return false
}

// setAside moves a stream to lostDir, or deletes a stream that has no message.
func (e *Server) setAside(ctx context.Context, stream string) error {
	bytes := int64(0)
	blocks, err := glob(stream, messagesDir+"/*.blk")
	if err != nil {
		return err
	}
	for _, block := range blocks {
		if info, err := os.Stat(block); err == nil {
			bytes += info.Size()
		}
	}
	if bytes == 0 {
		return os.RemoveAll(stream)
	}
	to := filepath.Join(e.cfg.DataDir, lostDir, time.Now().UTC().Format("20060102T150405.000000000Z"), filepath.Base(stream))
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	if err := os.Rename(stream, to); err != nil {
		return err
	}
	e.cfg.Logger.ErrorContext(ctx, "set a stream aside that the server cannot read; the machine crashed soon after the stream was made",
		slog.String("stream", filepath.Base(stream)), slog.String("directory", to), slog.Int64("bytes", bytes))
	return nil
}

// recovered returns an error if the server runs without a stream that is in its directory. Without
// that error, the stream would be made anew, and empty, by the next user of its topic.
func (e *Server) recovered(s *natsserver.Server) error {
	dirs, err := e.streamDirs()
	if err != nil {
		return err
	}
	info, err := s.Jsz(&natsserver.JSzOptions{Accounts: true, Streams: true})
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, account := range info.AccountDetails {
		for i := range account.Streams {
			there[account.Streams[i].Name] = true
		}
	}
	var missing []string
	for _, dir := range dirs {
		if !there[filepath.Base(dir)] {
			missing = append(missing, dir)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s; the log says why; restore the data directory from a backup, or move these directories elsewhere to start without their events",
		errNotRecovered, strings.Join(missing, ", "))
}

// descriptions syncs the descriptions of streams and consumers, which the server writes and does
// not sync unless it always syncs.
type descriptions struct {
	server *Server
	known  map[string]time.Time // when files and directories were last changed, as they were synced
}

// run syncs at each interval until ctx ends.
func (d *descriptions) run(ctx context.Context) {
	tick := time.NewTicker(d.server.cfg.SyncInterval)
	defer tick.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := d.sync()
		if err != nil && !failing {
			d.server.cfg.Logger.WarnContext(ctx, "failed to sync the descriptions of streams and consumers; retrying", slog.Any("error", err))
		}
		failing = err != nil
	}
}

// sync syncs what is new since the last time.
func (d *descriptions) sync() error {
	streams, err := d.server.streamDirs()
	if err != nil {
		return err
	}
	seen := make(map[string]time.Time, len(d.known))
	var errs []error
	for _, stream := range streams {
		consumers := filepath.Join(stream, consumersDir)
		if d.unchanged(filepath.Join(stream, natsserver.JetStreamMetaFile), seen) && d.unchanged(consumers, seen) {
			continue
		}
		dirs, err := consumerDirs(stream)
		errs = append(errs, err)
		for _, dir := range append([]string{stream}, dirs...) {
			if dir != stream && d.unchanged(filepath.Join(dir, natsserver.JetStreamMetaFile), seen) {
				continue
			}
			for _, name := range []string{natsserver.JetStreamMetaFile, natsserver.JetStreamMetaFileSum, "."} {
				errs = append(errs, syncPath(filepath.Join(dir, name)))
			}
		}
		errs = append(errs, syncPath(consumers), syncPath(filepath.Dir(stream)))
	}
	if err := errors.Join(errs...); err != nil {
		return err // all of it is done again
	}
	d.known = seen
	return nil
}

// unchanged reports whether a path has not changed since it was synced. It notes the time of its
// last change.
func (d *descriptions) unchanged(path string, seen map[string]time.Time) bool {
	info, err := os.Stat(path)
	if err != nil {
		return false
	}
	if time.Since(info.ModTime()) > settled {
		seen[path] = info.ModTime()
	}
	was, known := d.known[path]
	return known && was.Equal(info.ModTime())
}

// syncPath syncs a file or directory, unless it is gone.
func syncPath(path string) error {
	f, err := os.Open(path) //nolint:gosec // in the hub's own directory
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
