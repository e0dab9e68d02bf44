package jetstream

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// maxManifest bounds the manifest of a backup.
const maxManifest = 256 << 20

// compareWait is how long a restore waits until a cluster shows what was restored.
const compareWait = 2 * time.Minute

// Backup is a backup that was made by Admin.Backup. OpenBackup returns one.
type Backup struct {
	path string
	zip  *zip.ReadCloser
	manifest
}

// OpenBackup opens a backup and reads what it has. The caller closes the Backup.
func OpenBackup(path string) (*Backup, error) {
	z, err := zip.OpenReader(path)
	if err != nil {
		if errors.Is(err, zip.ErrFormat) {
			return nil, fmt.Errorf("%s is no backup, or was cut off: %w; use a file that eventhub backup has finished", path, err)
		}
		return nil, err
	}
	b := &Backup{path: path, zip: z}
	if err := b.readManifest(); err != nil {
		return nil, errors.Join(err, z.Close())
	}
	return b, nil
}

func (b *Backup) readManifest() error {
	f, err := b.zip.Open(manifestName)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s has no %s: it is no backup, or an unfinished one; use a file that eventhub backup has finished", b.path, manifestName)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", b.path, err)
	}
	defer func() { _ = f.Close() }() // read-only
	text, err := io.ReadAll(io.LimitReader(f, maxManifest))
	if err != nil {
		return fmt.Errorf("%s: %s: %w; the file is damaged: use another backup", b.path, manifestName, err)
	}
	var version struct{ Format int }
	if err := json.Unmarshal(text, &version); err != nil {
		return fmt.Errorf("%s: %s: %w; the file is damaged: use another backup", b.path, manifestName, err)
	}
	if version.Format != backupFormat {
		return fmt.Errorf("%s has format %d, and this version of eventhub reads format %d; restore it with the version that made it", b.path, version.Format, backupFormat)
	}
	if err := json.Unmarshal(text, &b.manifest); err != nil {
		return fmt.Errorf("%s: %s: %w; the file is damaged: use another backup", b.path, manifestName, err)
	}
	return nil
}

// Close closes the file.
func (b *Backup) Close() error { return b.zip.Close() }

// Made is when the backup was begun.
func (b *Backup) Made() time.Time { return b.manifest.Made }

// Contents returns the number of streams, of consumers and of messages.
func (b *Backup) Contents() (streams, consumers int, messages uint64) {
	for _, s := range b.Streams {
		consumers += len(s.Consumers)
		messages += s.Messages
	}
	return len(b.Streams), consumers, messages
}

// Verify reads all of the backup and compares its checksums.
func (b *Backup) Verify(ctx context.Context) error {
	check := func(what, entry, want string) error {
		hash := sha256.New()
		err := b.copyEntry(ctx, entry, hash)
		if err == nil && hex.EncodeToString(hash.Sum(nil)) != want {
			err = errors.New("the checksum differs")
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("%s: %s: %w; the file is damaged: use another backup", b.path, what, err)
		}
		return err
	}
	for _, f := range b.Files {
		if err := check(f.Name, f.Entry, f.SHA256); err != nil {
			return err
		}
	}
	for i := range b.Streams {
		if err := check("stream "+b.Streams[i].Name, b.Streams[i].Entry, b.Streams[i].SHA256); err != nil {
			return err
		}
	}
	return nil
}

func (b *Backup) copyEntry(ctx context.Context, entry string, w io.Writer) error {
	f, err := b.zip.Open(entry)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // read-only
	_, err = io.Copy(w, endingReader{ctx, f})
	return err
}

// endingReader is a reader that ends with a context.
type endingReader struct {
	ctx context.Context //nolint:containedctx // for the life of one copy
	r   io.Reader
}

func (r endingReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// File writes a file of BackupOptions.Files to w. found is false for one that the backup has not.
func (b *Backup) File(ctx context.Context, name string, w io.Writer) (found bool, err error) {
	for _, f := range b.Files {
		if f.Name == name {
			return true, b.copyEntry(ctx, f.Entry, w)
		}
	}
	return false, nil
}

// RestoreOptions are the options of Store.Restore and Store.MoveTo.
type RestoreOptions struct {
	// Replicas is the number of copies of each stream. Default: as in the backup.
	Replicas int
	// Progress, if not nil, is called with the messages that were restored, and with their number
	// in all where it is known.
	Progress func(done, all uint64)
}

func (o *RestoreOptions) progress(done, all uint64) {
	if o.Progress != nil {
		o.Progress(done, all)
	}
}

// Restore restores a backup, which is verified first, to a NATS that has nothing of a hub. A
// restore that fails removes what it has made, and says if something is left.
func (s *Store) Restore(ctx context.Context, b *Backup, opts RestoreOptions) error {
	if err := b.Verify(ctx); err != nil {
		return err
	}
	_, _, all := b.Contents()
	done := uint64(0)
	names := make([]string, len(b.Streams))
	for i := range b.Streams {
		names[i] = b.Streams[i].Name
	}
	return s.restore(ctx, opts, names, func(put func(*backedUp, func(io.Writer) error) error) error {
		for i := range b.Streams {
			at := &b.Streams[i]
			opts.progress(done, all)
			if err := put(at, func(w io.Writer) error { return b.copyEntry(ctx, at.Entry, w) }); err != nil {
				return err
			}
			done += at.Messages
		}
		opts.progress(done, all)
		return nil
	})
}

// restore makes the streams with these names between the mark and its removal: each calls put for
// all of them. It leaves all of them or none.
func (s *Store) restore(ctx context.Context, opts RestoreOptions, names []string, each func(put func(*backedUp, func(io.Writer) error) error) error) (err error) {
	if err := s.checkFree(ctx, names); err != nil {
		return err
	}
	unmark, err := s.mark(ctx, opts.Replicas)
	if err != nil {
		return err
	}
	var made []string
	var restored []backedUp
	defer func() {
		if err == nil {
			return
		}
		if left := s.clean(ctx, made, unmark); left != nil {
			err = fmt.Errorf("%w; %w", err, left)
		} else {
			err = fmt.Errorf("%w; nothing was restored", err)
		}
	}()
	err = each(func(at *backedUp, write func(io.Writer) error) error {
		begun, err := s.put(ctx, at, opts.Replicas, write)
		if begun {
			made = append(made, at.Name)
		}
		if err != nil {
			return fmt.Errorf("restore stream %s: %w", at.Name, err)
		}
		restored = append(restored, *at)
		return nil
	})
	if err != nil {
		return err
	}
	for i := range restored {
		if err := s.compare(ctx, &restored[i]); err != nil {
			return fmt.Errorf("restore stream %s: %w", restored[i].Name, err)
		}
	}
	if s.backups.cfg.Server == nil { // an embedded server does so when it starts
		if err := endOldLeases(ctx, s.backups.conn.JS); err != nil {
			return fmt.Errorf("give back the events that members held: %w", err)
		}
	}
	return unmark(ctx)
}

// put restores one stream.
func (s *Store) put(ctx context.Context, at *backedUp, replicas int, write func(io.Writer) error) (begun bool, err error) {
	config := at.Config
	if replicas > 0 {
		fields := make(map[string]json.RawMessage)
		if err := json.Unmarshal(config, &fields); err != nil {
			return false, err
		}
		if err := setField(fields, "num_replicas", replicas); err != nil {
			return false, err
		}
		if config, err = json.Marshal(fields); err != nil {
			return false, err
		}
	}
	r, w := io.Pipe()
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		w.CloseWithError(write(w)) // nil is the end
	}()
	begun, err = s.backups.putSnapshot(ctx, at.Name, config, at.State, r)
	_ = r.Close() // returns nil
	<-wrote
	return begun, err
}

// compare waits until the server shows the stream as it was.
func (s *Store) compare(ctx context.Context, at *backedUp) error {
	ctx, cancel := context.WithTimeout(ctx, compareWait)
	defer cancel()
	for {
		fault := s.differs(ctx, at)
		if fault == nil {
			return nil
		}
		if err := s.backups.conn.Pause(ctx, positionPause); err != nil {
			return fmt.Errorf("it is not what was backed up: %w", fault)
		}
	}
}

func (s *Store) differs(ctx context.Context, at *backedUp) error {
	handle, err := s.backups.conn.JS.Stream(ctx, at.Name)
	if err != nil {
		return err
	}
	info := handle.CachedInfo()
	if info.State.LastSeq < at.State.LastSeq {
		return fmt.Errorf("it ends at sequence %d, and not at %d", info.State.LastSeq, at.State.LastSeq)
	}
	if info.State.Msgs < at.Messages && !removes(&info.Config) {
		return fmt.Errorf("it has %d messages, and not %d", info.State.Msgs, at.Messages)
	}
	names := make(map[string]bool)
	list := handle.ConsumerNames(ctx)
	for name := range list.Name() {
		names[name] = true
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		return err
	}
	for _, name := range at.Consumers {
		if !names[name] && info.Config.Storage == natsjs.FileStorage {
			return fmt.Errorf("it has no consumer %s", name)
		}
	}
	return nil
}

// removes reports whether a stream may remove messages by itself.
func removes(cfg *natsjs.StreamConfig) bool {
	return cfg.MaxAge > 0 || cfg.MaxMsgs > 0 || cfg.MaxBytes > 0 || cfg.MaxMsgsPerSubject > 0 || cfg.AllowMsgTTL || cfg.AllowMsgSchedules ||
		cfg.Retention != natsjs.LimitsPolicy
}
