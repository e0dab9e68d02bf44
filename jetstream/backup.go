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
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// backupFormat is the version of the format of backups.
const backupFormat = 1

// Bounds of a backup.
const (
	// A stream whose snapshot the server gives up is read again, up to snapshotTries times. Groups
	// that are moved while their positions are read make Backup read these again, up to
	// positionTries times.
	snapshotTries = 3
	positionTries = 50
	positionPause = 100 * time.Millisecond
	// movesWait is how long Backup waits for redrives that are under way.
	movesWait = time.Minute
)

// manifestName is the last entry of a backup.
const manifestName = "manifest.json"

// manifest says what a backup has.
type manifest struct {
	Format  int            `json:"format"`
	Made    time.Time      `json:"made"`
	Server  string         `json:"server"`
	Streams []backedUp     `json:"streams"`
	Files   []backedUpFile `json:"files,omitempty"`
}

// backedUp is a stream in a backup.
type backedUp struct {
	Name      string          `json:"name"`
	Entry     string          `json:"entry"`
	Created   time.Time       `json:"created"`
	Consumers []string        `json:"consumers,omitempty"`
	Messages  uint64          `json:"messages"`
	State     restoreState    `json:"state"`
	Config    json.RawMessage `json:"config"`
	SHA256    string          `json:"sha256"`
}

// backedUpFile is a file besides the streams.
type backedUpFile struct {
	Name   string `json:"name"`
	Entry  string `json:"entry"`
	SHA256 string `json:"sha256"`
}

// BackupOptions are the options of Admin.Backup.
type BackupOptions struct {
	// Files are written before the streams, under their names: what they say to be published must
	// be in the streams.
	Files map[string]func(ctx context.Context, w io.Writer) error
	// Progress, if not nil, is called while messages are written, with their number in all. An
	// error ends the backup.
	Progress func(messages uint64) error
}

// backups makes and restores backups. Redrives and backups exclude each other.
type backups struct {
	*core

	running atomic.Bool
	moves   sync.RWMutex // read by those who move events from a stream to an earlier one
}

func newBackups(c *core) *backups { return &backups{core: c} }

var errBackupRuns = &event.Error{Code: event.CodeOverloaded, Msg: "A backup is being made: try again later."}

// enter begins a redrive.
func (k *backups) enter() (leave func(), err error) {
	k.moves.RLock()
	if k.running.Load() {
		k.moves.RUnlock()
		return nil, errBackupRuns
	}
	return k.moves.RUnlock, nil
}

// begin begins a backup, when the redrives that run have ended.
func (k *backups) begin(ctx context.Context) (end func(), err error) {
	if !k.running.CompareAndSwap(false, true) {
		return nil, errBackupRuns
	}
	deadline := time.Now().Add(movesWait)
	for !k.moves.TryLock() {
		if err = k.conn.Pause(ctx, positionPause); err == nil && time.Now().After(deadline) {
			err = &event.Error{Code: event.CodeOverloaded, Msg: "A redrive of dead letters is running: try again when it has ended."}
		}
		if err != nil {
			k.running.Store(false)
			return nil, err
		}
	}
	return func() { k.moves.Unlock(); k.running.Store(false) }, nil
}

// bookkeeping are the streams in which hubs note what is done.
var bookkeeping = []string{
	"KV_" + native.AttemptsBucket, "KV_" + records.MarksBucket, "KV_" + records.MakersBucket, "KV_" + records.BookmarksBucket, "KV_" + records.RetentionBucket,
	"KV_" + delaysBucket, "KV_" + handlesBucket, "KV_" + revokedBucket, "KV_" + schemasBucket, "KV_" + native.GroupsBucket,
}

// Backup writes everything that the embedded server has on its disk to w, while the bus works: all
// that was confirmed before, and what members had settled by then. ARCHITECTURE.md says why the
// order of streams keeps groups from missing anything. Redrives are refused meanwhile, and so is a
// second backup. An incomplete backup has no manifest, and cannot be restored.
func (n NATS) Backup(ctx context.Context, w io.Writer, opts BackupOptions) error {
	b := n.bus
	if b.cfg.Server == nil {
		return &event.Error{Code: event.CodeBadOptions, Msg: "This hub uses a NATS server of yours: back that up with the nats command (nats account backup)."}
	}
	if b.cfg.Server.InMemory() {
		return &event.Error{Code: event.CodeBadOptions, Msg: "This hub keeps everything in memory: there is nothing to back up."}
	}
	end, err := b.backups.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	m := &backupMaker{backups: b.backups, opts: opts, out: zip.NewWriter(w), made: manifest{Format: backupFormat, Made: time.Now().UTC(), Server: b.conn.Links[0].NC.ConnectedServerVersion()}}
	return m.run(ctx)
}

// backupMaker makes a backup.
type backupMaker struct {
	backups *backups
	opts    BackupOptions
	out     *zip.Writer
	made    manifest

	entries  int
	messages uint64
}

func (m *backupMaker) run(ctx context.Context) error {
	for name, write := range m.opts.Files {
		entry, sum, err := m.entry(func(w io.Writer) error { return write(ctx, w) })
		if err != nil {
			return fmt.Errorf("back up %s: %w", name, err)
		}
		m.made.Files = append(m.made.Files, backedUpFile{name, entry, sum})
	}
	sources, err := m.backups.sources(ctx, 0)
	if err != nil {
		return err
	}
	order := func(s *copiedStream) int {
		switch {
		case slices.Contains(bookkeeping, s.name):
			return 0
		case s.name == publish.DelayedStream, s.name == putBackStream:
			return 1
		case strings.HasPrefix(s.name, "KV_"):
			return 2
		default:
			return 3
		}
	}
	slices.SortStableFunc(sources, func(a, b *copiedStream) int { return order(a) - order(b) })
	first := slices.IndexFunc(sources, func(s *copiedStream) bool { return order(s) > 0 })
	if first < 0 {
		first = len(sources)
	}
	consumers, notes, err := m.positions(ctx, sources, sources[:first])
	if err != nil {
		return err
	}
	m.made.Streams = notes
	var until time.Time
	for _, s := range sources[first:] {
		if order(s) == 3 && until.IsZero() {
			until = time.Now()
		}
		limit := until
		if s.grows {
			limit = time.Time{}
		}
		done, err := m.stream(ctx, s, consumers[s.name], limit)
		if err != nil {
			return err
		}
		m.made.Streams = append(m.made.Streams, done)
	}
	return m.finish()
}

func (m *backupMaker) finish() error {
	text, err := json.MarshalIndent(m.made, "", "  ")
	if err != nil {
		return err
	}
	w, err := m.out.Create(manifestName)
	if err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	return m.out.Close()
}

// sources lists what is copied: every stream on a disk.
func (k *backups) sources(ctx context.Context, replicas int) (all []*copiedStream, err error) {
	inv, err := listStreams(ctx, k.core)
	if err != nil {
		return nil, err
	}
	for _, name := range inv.names() {
		info := inv.byName[name]
		if info.Config.Storage == natsjs.MemoryStorage {
			continue
		}
		all = append(all, &copiedStream{
			name: name, info: info, replicas: replicas,
			// a newer message may remove an older one
			grows: strings.HasPrefix(name, "KV_") || info.Config.MaxMsgsPerSubject > 0 || info.Config.Retention != natsjs.LimitsPolicy || info.Config.AllowMsgSchedules,
		})
	}
	return all, nil
}

// positions copies the notes about groups, and reads what all consumers have settled, until no
// group was moved meanwhile.
func (m *backupMaker) positions(ctx context.Context, all, notes []*copiedStream) (map[string][]keptConsumer, []backedUp, error) {
	for range positionTries {
		var done []backedUp
		moved := uint64(0)
		for _, s := range notes {
			one, err := m.stream(ctx, s, nil, time.Time{})
			if err != nil {
				return nil, nil, err
			}
			done = append(done, one)
			if s.name == "KV_"+native.GroupsBucket {
				moved = one.State.LastSeq
			}
		}
		consumers := make(map[string][]keptConsumer)
		for _, s := range all {
			if slices.Contains(notes, s) {
				continue
			}
			kept, err := m.backups.readConsumers(ctx, s)
			if err != nil {
				return nil, nil, fmt.Errorf("back up the groups of stream %s: %w", s.name, m.gone(err))
			}
			consumers[s.name] = kept
		}
		info, err := m.backups.conn.FindStream(ctx, "KV_"+native.GroupsBucket)
		if err != nil {
			return nil, nil, err
		}
		if info.State.LastSeq == moved {
			return consumers, done, nil
		}
		if err := m.backups.conn.Pause(ctx, positionPause); err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, &event.Error{Code: event.CodeOverloaded, Msg: "Groups are being moved all the time: try again later."}
}

// stream copies a stream into an entry.
func (m *backupMaker) stream(ctx context.Context, s *copiedStream, consumers []keptConsumer, until time.Time) (backedUp, error) {
	for try := 1; ; try++ {
		var done archived
		began := m.messages
		entry, sum, err := m.entry(func(w io.Writer) (err error) {
			done, err = m.backups.copyStream(ctx, s, consumers, until, w, func(messages, _ int) {
				m.messages += uint64(messages) //nolint:gosec // 1
			})
			return err
		})
		if errors.Is(err, errSnapshotCut) && try < snapshotTries && ctx.Err() == nil {
			m.messages = began
			continue
		}
		if err == nil && m.opts.Progress != nil {
			err = m.opts.Progress(m.messages)
		}
		if err != nil {
			return backedUp{}, fmt.Errorf("back up stream %s: %w", s.name, m.gone(err))
		}
		out := backedUp{Name: s.name, Entry: entry, Created: native.StreamMade(s.info), Messages: done.messages, State: done.state, Config: done.config, SHA256: sum, Consumers: lasting(consumers)}
		return out, nil
	}
}

// gone explains an error about a stream that was deleted meanwhile.
func (m *backupMaker) gone(err error) error {
	if api, ok := errors.AsType[*natsjs.APIError](err); ok && api.ErrorCode == natsjs.JSErrCodeStreamNotFound || errors.Is(err, natsjs.ErrStreamNotFound) {
		return &event.Error{Code: event.CodeOverloaded, Msg: "A topic was deleted while the backup was made: try again."}
	}
	return err
}

// entry writes an entry, and returns its name and its checksum.
func (m *backupMaker) entry(write func(io.Writer) error) (name, sum string, err error) {
	m.entries++
	name = "data/" + strconv.Itoa(m.entries)
	w, err := m.out.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Store})
	if err != nil {
		return "", "", err
	}
	hash := sha256.New()
	if err := write(io.MultiWriter(w, hash)); err != nil {
		return "", "", err
	}
	return name, hex.EncodeToString(hash.Sum(nil)), nil
}
