package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"eventhub/jetstream"
	"eventhub/ops"
)

// partSuffix is that of the name of an unfinished backup.
const partSuffix = ".part"

// backups returns what POST /backup needs.
func (h *hub) backups() *ops.Backups {
	return &ops.Backups{Write: func(ctx context.Context, w io.Writer, alive func() error) error {
		opts := jetstream.BackupOptions{Progress: func(uint64) error { return alive() }}
		if h.own != nil {
			if box := h.own.opened(); box != nil {
				opts.Files = map[string]func(context.Context, io.Writer) error{ownOutboxName: func(ctx context.Context, w io.Writer) error {
					return copyOutbox(ctx, box, filepath.Dir(h.own.path), w)
				}}
			}
		}
		return h.bus.Admin().NATS().Backup(ctx, w, opts)
	}}
}

// copyOutbox writes a copy of the outbox as one transaction sees it.
func copyOutbox(ctx context.Context, box *openedOutbox, dir string, w io.Writer) (err error) {
	temp, err := os.MkdirTemp(dir, "backup-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	path := filepath.Join(temp, ownOutboxName)
	if _, err := box.db.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		return err
	}
	f, err := os.Open(path) //nolint:gosec // in a directory of its own
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // read-only
	_, err = io.Copy(w, f)
	return err
}

// backupCmd is `eventhub backup`.
type backupCmd struct {
	opsFlags

	File string `arg:"" help:"File to write, which must not exist yet."`
}

// Run writes the backup to FILE.part, verifies it, and gives it its name.
func (cmd *backupCmd) Run(ctx context.Context, std streams) error {
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	// Reserve the name, so that nothing is overwritten.
	if _, err := os.Lstat(cmd.File); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = fs.ErrExist
		}
		return fmt.Errorf("backup file %s: %w; choose another name", cmd.File, reason(err))
	}
	part := cmd.File + partSuffix
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the user names it
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("file %s exists: another backup is being written there, or was killed; remove it if none is", part)
	}
	if err != nil {
		return fmt.Errorf("create backup: %w", err)
	}
	made, err := cmd.write(ctx, hub, f, std)
	if err == nil {
		err = nameBackup(part, cmd.File)
	}
	if gone := os.Remove(part); !errors.Is(gone, fs.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	if err == nil {
		err = syncDir(filepath.Dir(cmd.File))
	}
	if err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted; no backup was written")
		}
		return fmt.Errorf("%w; no backup was written", err)
	}
	_, err = fmt.Fprintln(std.out, made)
	return err
}

// nameBackup gives a finished backup its name. A link overwrites nothing, unlike a renaming, which
// is for file systems that have no links.
func nameBackup(part, file string) error {
	err := os.Link(part, file)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	if _, there := os.Lstat(file); !errors.Is(there, fs.ErrNotExist) {
		return err
	}
	return os.Rename(part, file)
}

// write writes and verifies a backup, closes the file, and describes the backup.
func (cmd *backupCmd) write(ctx context.Context, hub *opsHub, f *os.File, std streams) (made string, err error) {
	progress := newTally(std.err, "backed up")
	err = hub.backup(ctx, f, func(n int) { progress.add(0, n) })
	progress.clear()
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	backup, err := jetstream.OpenBackup(f.Name())
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, backup.Close()) }()
	if err := backup.Verify(ctx); err != nil {
		return "", err
	}
	streams, groups, messages := backup.Contents()
	return fmt.Sprintf("backed up %d messages in %d streams with %d consumers, %.1f MB, to %s", messages, streams, groups, float64(progress.bytes)/1e6, cmd.File), nil
}

// syncDir makes the entries of a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir) //nolint:gosec // the user names it
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// backup has the hub make a backup, and writes it to w.
func (h *opsHub) backup(ctx context.Context, w io.Writer, progress func(bytes int)) error {
	h.client.Transport.(*http.Transport).ResponseHeaderTimeout = 0 //nolint:errcheck,forcetypeassert // see opsFlags.hub
	res, err := h.send(ctx, opsCall{method: http.MethodPost, path: []string{"backup"}, needs: "admin on " + ops.BackupTopic}, "application/zip")
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read-only
	buf := make([]byte, 256<<10)
	for {
		n, err := res.Body.Read(buf)
		if _, failed := w.Write(buf[:n]); failed != nil {
			return fmt.Errorf("write the backup: %w", failed)
		}
		progress(n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("hub at %s: the answer was cut off: %w", h.base.Redacted(), reason(err))
		}
	}
	if fault := res.Trailer.Get(ops.BackupError); fault != "" {
		return fmt.Errorf("hub at %s: %s", h.base.Redacted(), strings.TrimSuffix(fault, "."))
	}
	return nil
}

// restoreCmd is `eventhub restore`.
type restoreCmd struct {
	busFlags `group:"Bus"`

	File string `arg:"" help:"Backup to restore."`
}

// Run restores to NATS_URL, or to a new data directory.
func (cmd *restoreCmd) Run(ctx context.Context, std streams) error {
	if faults := cmd.validate(); len(faults) > 0 {
		return errors.Join(faults...)
	}
	backup, err := jetstream.OpenBackup(cmd.File)
	if err != nil {
		return err
	}
	defer func() { _ = backup.Close() }() // read-only
	if cmd.NATSURL != "" {
		err = cmd.toNATS(ctx, std, backup)
	} else {
		err = cmd.toData(ctx, std, backup)
	}
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; %w", err)
		}
		return err
	}
	streams, groups, messages := backup.Contents()
	where := cmd.Data
	if cmd.NATSURL != "" {
		where = "NATS"
	}
	_, err = fmt.Fprintf(std.out, "restored %d messages in %d streams with %d consumers, as of %s, to %s\n", messages, streams, groups, backup.Made().Format(time.RFC3339), where)
	return err
}

// toNATS restores the streams to NATS_URL, and the outbox to the data directory.
func (cmd *restoreCmd) toNATS(ctx context.Context, std streams, backup *jetstream.Backup) error {
	path := filepath.Join(cmd.Data, ownOutboxName)
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is an outbox at %s; restore beside an empty data directory (--data, EVENTHUB_DATA)", path)
	}
	store, err := cmd.store(ctx, std)
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }() //nolint:contextcheck // Close limits its own duration
	progress := newTally(std.err, "restored")
	defer progress.clear()
	if err := store.Restore(ctx, backup, jetstream.RestoreOptions{Replicas: cmd.Replicas, Progress: progress.portion}); err != nil {
		return err
	}
	return writeOutbox(ctx, backup, cmd.Data)
}

// toData restores to a directory beside the data directory, which then takes its place. Data is
// never half restored.
func (cmd *restoreCmd) toData(ctx context.Context, std streams, backup *jetstream.Backup) (err error) {
	target, err := filepath.Abs(cmd.Data)
	if err != nil {
		return err
	}
	switch entries, err := os.ReadDir(target); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("data directory %s: %w (--data, EVENTHUB_DATA)", cmd.Data, reason(err))
	case len(entries) > 0:
		return fmt.Errorf("data directory %s is not empty: it has %s; restore to an empty one, or to one that does not exist (--data, EVENTHUB_DATA)", cmd.Data, entries[0].Name())
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(target), filepath.Base(target)+".restore-")
	if err != nil {
		return fmt.Errorf("restore beside data directory %s: %w", cmd.Data, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(temp))
		}
	}()
	into := *cmd
	into.Data, into.NATSListen = temp, ""
	store, err := into.store(ctx, std)
	if err != nil {
		return err
	}
	progress := newTally(std.err, "restored")
	err = store.Restore(ctx, backup, jetstream.RestoreOptions{Progress: progress.portion})
	progress.clear()
	if err = errors.Join(err, store.Close()); err != nil { //nolint:contextcheck // Close limits its own duration
		return err
	}
	if err := errors.Join(writeOutbox(ctx, backup, temp), os.Remove(filepath.Join(temp, "hub.lock"))); err != nil {
		return err
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("data directory %s: %w", cmd.Data, reason(err))
	}
	if err := os.Rename(temp, target); err != nil {
		return err
	}
	return syncDir(filepath.Dir(target))
}

// writeOutbox restores the outbox of POST /outbox, if the backup has one.
func writeOutbox(ctx context.Context, backup *jetstream.Backup, dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	path := filepath.Join(dir, ownOutboxName)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the user names the directory
	if err != nil {
		return fmt.Errorf("restore the outbox: %w", err)
	}
	found, err := backup.File(ctx, ownOutboxName, f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil || !found {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// store opens NATS without a hub.
func (f busFlags) store(ctx context.Context, std streams) (*jetstream.Store, error) {
	log, err := logFlags{LogLevel: "warn", LogFormat: "text"}.logger(std.err)
	if err != nil {
		return nil, err
	}
	cfg := jetstream.Config{Logger: log, Replicas: f.Replicas}
	if f.NATSURL != "" {
		f.address(&cfg)
		store, err := jetstream.OpenStore(ctx, cfg)
		if err != nil {
			return nil, fmt.Errorf("%w (--nats-url, NATS_URL; --nats-creds, NATS_CREDS; --nats-domain, NATS_DOMAIN)", err)
		}
		return store, nil
	}
	server, err := f.embed(ctx, log)
	if err != nil {
		return nil, err
	}
	cfg.Server, cfg.Replicas = server, 0
	return jetstream.OpenStore(ctx, cfg)
}

// migrateCmd is `eventhub migrate`.
type migrateCmd struct {
	busFlags `group:"Bus"`
}

// Run copies the streams in the data directory to NATS_URL.
func (cmd *migrateCmd) Run(ctx context.Context, std streams) error {
	faults := cmd.validate()
	if cmd.NATSURL == "" {
		faults = append(faults, errors.New("the address of the new NATS is missing; set it (--nats-url, NATS_URL)"))
	}
	if _, err := os.Stat(filepath.Join(cmd.Data, "nats")); err != nil {
		faults = append(faults, fmt.Errorf("data directory %s is not that of a hub with NATS inside: %w (--data, EVENTHUB_DATA)", cmd.Data, reason(err)))
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	to, err := cmd.store(ctx, std)
	if err != nil {
		return err
	}
	defer func() { _ = to.Close() }() //nolint:contextcheck // Close limits its own duration
	if err := to.CheckEmpty(ctx); err != nil {
		return err
	}
	old := cmd.busFlags
	old.NATSURL, old.NATSListen, old.Replicas = "", "", 1
	from, err := old.store(ctx, std)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }() //nolint:contextcheck // Close limits its own duration
	progress := newTally(std.err, "migrated")
	var done uint64
	err = from.MoveTo(ctx, to, jetstream.RestoreOptions{Replicas: cmd.Replicas, Progress: func(n, all uint64) {
		done = n
		progress.portion(n, all)
	}})
	progress.clear()
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; %w", err)
		}
		return err
	}
	_, err = fmt.Fprintf(std.out, "migrated %d messages in %v; start the hub with NATS_URL now, and keep %s for its outbox\n", done, time.Since(progress.began).Round(time.Millisecond), cmd.Data)
	return err
}
