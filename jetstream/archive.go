package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats-server/v2/server/archive"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/native"
)

// Names of entries in the server's format.
const (
	archiveState     = "state.json"
	archiveConsumers = "consumers/"
	// maxArchiveJSON bounds an entry that is not a message.
	maxArchiveJSON = 64 << 20
	// maxTail is how many messages may be added to a stream while it is read.
	maxTail = 5_000_000
)

// errOldFormat says that the server of a backup is too old.
var errOldFormat = errors.New("the server's snapshots are of an old format; nats-server 2.15 or newer is needed")

// keptConsumer is a consumer in a backup, in the server's format: its configuration and its state.
type keptConsumer struct {
	name  string
	entry []byte
	reach uint64 // the last sequence that was delivered
	stays bool   // however long it has no member
}

// archived is what was written of a stream.
type archived struct {
	state    restoreState
	messages uint64
	config   json.RawMessage
}

// copiedStream is a stream that is copied.
type copiedStream struct {
	name     string
	info     *natsjs.StreamInfo
	grows    bool // what is added while it is read belongs to the copy
	replicas int  // of the copy; 0: as they are
}

// readConsumers reads what the consumers of a stream have settled.
func (k *backups) readConsumers(ctx context.Context, from *copiedStream) ([]keptConsumer, error) {
	handle, err := k.conn.JS.Stream(ctx, from.name)
	if err != nil {
		return nil, err
	}
	s, err := k.takeSnapshot(ctx, from.name, true)
	if err != nil {
		return nil, err
	}
	defer s.close()
	in := archive.NewReader(s2.NewReader(s))
	state, err := readState(in)
	if err != nil {
		return nil, err
	}
	var entries [][]byte
	for range state.consumers {
		hdr, err := in.Next()
		if err != nil {
			return nil, err
		}
		if !strings.HasPrefix(hdr.Name, archiveConsumers) {
			return nil, fmt.Errorf("the snapshot has %q where a consumer should be", hdr.Name)
		}
		entry, err := readEntry(in, hdr)
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry)
	}
	made := make(map[string]time.Time)
	list := handle.ListConsumers(ctx)
	for info := range list.Info() {
		made[info.Name] = native.ConsumerMade(info)
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		return nil, err
	}
	var kept []keptConsumer
	for _, entry := range entries {
		c, err := keepConsumer(entry, made, from.replicas)
		if err != nil {
			return nil, err
		}
		if c != nil {
			kept = append(kept, *c)
		}
	}
	return kept, nil
}

// keepConsumer returns a consumer as it is restored, or nil for one that is not: the readers of the
// moment, and those that were deleted meanwhile.
func keepConsumer(entry []byte, made map[string]time.Time, replicas int) (*keptConsumer, error) {
	var whole struct {
		Config map[string]json.RawMessage `json:"config"`
		State  json.RawMessage            `json:"state"`
	}
	var known struct {
		Config struct {
			Name     string            `json:"name"`
			Durable  string            `json:"durable_name"`
			TTL      int64             `json:"inactive_threshold"`
			Metadata map[string]string `json:"metadata"`
		} `json:"config"`
		State struct {
			Delivered struct {
				Stream uint64 `json:"stream_seq"`
			} `json:"delivered"`
		} `json:"state"`
	}
	if err := errors.Join(json.Unmarshal(entry, &whole), json.Unmarshal(entry, &known)); err != nil {
		return nil, err
	}
	at, exists := made[known.Config.Name]
	if known.Config.Durable == "" || !exists {
		return nil, nil //nolint:nilnil // not kept
	}
	metadata := known.Config.Metadata
	if metadata == nil {
		metadata = make(map[string]string)
	}
	metadata[native.MetaMade] = at.UTC().Format(time.RFC3339Nano)
	if err := setField(whole.Config, "metadata", metadata); err != nil {
		return nil, err
	}
	if replicas > 0 { // as many as its stream has
		if err := setField(whole.Config, "num_replicas", 0); err != nil {
			return nil, err
		}
	}
	out, err := json.Marshal(whole)
	return &keptConsumer{known.Config.Name, out, known.State.Delivered.Stream, known.Config.TTL == 0}, err
}

func setField(object map[string]json.RawMessage, name string, value any) error {
	text, err := json.Marshal(value)
	object[name] = text
	return err
}

// archiveHead is the first entry of a snapshot.
type archiveHead struct {
	raw       map[string]json.RawMessage
	state     restoreState
	consumers int
}

func readState(in *archive.Reader) (head archiveHead, err error) {
	hdr, err := in.Next()
	if errors.Is(err, archive.ErrInvalidArchive) {
		return head, errOldFormat
	}
	if err != nil {
		return head, err
	}
	text, err := readEntry(in, hdr)
	if err != nil {
		return head, err
	}
	var count struct {
		Consumers int `json:"consumer_count"`
	}
	if hdr.Name != archiveState {
		return head, errOldFormat
	}
	err = errors.Join(json.Unmarshal(text, &head.raw), json.Unmarshal(text, &head.state), json.Unmarshal(text, &count))
	head.consumers = count.Consumers
	return head, err
}

func readEntry(in *archive.Reader, hdr *archive.Header) ([]byte, error) {
	if size := hdr.HeaderSize + hdr.PayloadSize; size < 0 || size > maxArchiveJSON {
		return nil, fmt.Errorf("entry %q of the snapshot has %d bytes", hdr.Name, size)
	}
	return io.ReadAll(in)
}

// archiveWriter writes the server's format.
type archiveWriter struct {
	out *archive.Writer
}

func (w archiveWriter) entry(hdr archive.Header, body []byte) error {
	if err := w.out.WriteHeader(&hdr); err != nil {
		return err
	}
	_, err := w.out.Write(body)
	return err
}

// copyStream writes a stream to w in the server's format, with the consumers as they were read
// before. What was stored after until is left out, unless until is zero. progress is called with
// the messages that were written.
func (k *backups) copyStream(ctx context.Context, from *copiedStream, consumers []keptConsumer, until time.Time, w io.Writer, progress func(messages, bytes int)) (done archived, err error) {
	s, err := k.takeSnapshot(ctx, from.name, false)
	if err != nil {
		return done, err
	}
	defer s.close()
	defer func() {
		if err != nil && s.cut != nil {
			err = s.cut
		}
	}()
	if done.config, err = restoredConfig(s.config, from); err != nil {
		return done, err
	}
	in := archive.NewReader(s2.NewReader(s))
	head, err := readState(in)
	if err != nil {
		return done, err
	}
	done.state = head.state
	for _, c := range consumers { // they were read before
		done.state.LastSeq = max(done.state.LastSeq, c.reach)
	}
	// A stream that has never had a message has 0 here, behind which a restore takes no message.
	done.state.FirstSeq = max(done.state.FirstSeq, 1)
	if err := errors.Join(
		setField(head.raw, "consumer_count", len(consumers)),
		setField(head.raw, "first_seq", done.state.FirstSeq),
		setField(head.raw, "last_seq", done.state.LastSeq),
	); err != nil {
		return done, err
	}
	state, err := json.Marshal(head.raw)
	if err != nil {
		return done, err
	}
	packed := s2.NewWriter(w, s2.WriterConcurrency(1))
	out := archiveWriter{archive.NewWriter(packed)}
	if err := out.entry(archive.Header{Name: archiveState, Timestamp: time.Now().UnixNano(), PayloadSize: int64(len(state))}, state); err != nil {
		return done, err
	}
	for _, c := range consumers {
		if err := out.entry(archive.Header{Name: archiveConsumers + c.name, Timestamp: time.Now().UnixNano(), PayloadSize: int64(len(c.entry))}, c.entry); err != nil {
			return done, err
		}
	}
	last := uint64(0)
	write := func(hdr archive.Header, body []byte) error {
		last = hdr.Sequence
		if !until.IsZero() && hdr.Timestamp > until.UnixNano() {
			return nil
		}
		done.messages++
		progress(1, len(body))
		return out.entry(hdr, body)
	}
	if err := copyMessages(in, write); err != nil {
		return done, err
	}
	if from.grows {
		if err := k.copyTail(ctx, from.name, max(last, head.state.LastSeq), write); err != nil {
			return done, err
		}
		done.state.LastSeq = max(done.state.LastSeq, last)
	}
	if err := out.entry(archive.Header{}, nil); err != nil { // the end
		return done, err
	}
	return done, packed.Close()
}

// restoredConfig is the configuration of the copy of a stream.
func restoredConfig(config map[string]json.RawMessage, from *copiedStream) (json.RawMessage, error) {
	metadata := make(map[string]string)
	if text, ok := config["metadata"]; ok {
		if err := json.Unmarshal(text, &metadata); err != nil {
			return nil, err
		}
	}
	metadata[native.MetaMade] = native.StreamMade(from.info).UTC().Format(time.RFC3339Nano)
	for name := range metadata {
		if strings.HasPrefix(name, "_nats.") { // of the server that has it
			delete(metadata, name)
		}
	}
	if err := setField(config, "metadata", metadata); err != nil {
		return nil, err
	}
	if from.replicas > 0 {
		if err := setField(config, "num_replicas", from.replicas); err != nil {
			return nil, err
		}
	}
	return json.Marshal(config)
}

// copyMessages reads messages to the end of a snapshot.
func copyMessages(in *archive.Reader, write func(archive.Header, []byte) error) error {
	var body bytes.Buffer
	for {
		hdr, err := in.Next()
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // no mark of the end came
		}
		if err != nil {
			return err
		}
		if hdr.Sequence == 0 {
			if hdr.Name == "" && hdr.PayloadSize == 0 && hdr.HeaderSize == 0 {
				return nil
			}
			return fmt.Errorf("the snapshot has %q where a message should be", hdr.Name)
		}
		body.Reset()
		if _, err := body.ReadFrom(in); err != nil {
			return err
		}
		if err := write(*hdr, body.Bytes()); err != nil {
			return err
		}
	}
}

// copyTail adds what was stored since a snapshot began. A snapshot has the sequences up to its
// beginning: where a newer message has replaced an older one before the server came to that, it has
// neither. What replaces a message lies behind all others, so whoever reads on to the end has them
// all.
func (k *backups) copyTail(ctx context.Context, stream string, last uint64, write func(archive.Header, []byte) error) error {
	for n := 0; ; n++ {
		if n == maxTail {
			return fmt.Errorf("%d messages were stored while the stream was read: stop what writes so fast, or back up a hub that is stopped", maxTail)
		}
		ask, err := json.Marshal(map[string]any{"seq": last + 1, "next_by_subj": ">"})
		if err != nil {
			return err
		}
		var answer struct {
			Error   *natsjs.APIError `json:"error"`
			Message *struct {
				Subject  string    `json:"subject"`
				Sequence uint64    `json:"seq"`
				Header   []byte    `json:"hdrs"`
				Data     []byte    `json:"data"`
				Time     time.Time `json:"time"`
			} `json:"message"`
		}
		if err := k.askServer(ctx, "STREAM.MSG.GET."+stream, ask, &answer); err != nil {
			return err
		}
		if answer.Error != nil {
			if answer.Error.ErrorCode == natsjs.JSErrCodeMessageNotFound {
				return nil
			}
			return answer.Error
		}
		m := answer.Message
		last = m.Sequence
		hdr := archive.Header{
			Name: m.Subject, Timestamp: m.Time.UnixNano(), Sequence: m.Sequence, HeaderSize: int64(len(m.Header)), PayloadSize: int64(len(m.Data)),
		}
		if err := write(hdr, append(m.Header, m.Data...)); err != nil {
			return err
		}
	}
}

// lasting are the names of the consumers that stay without a member.
func lasting(consumers []keptConsumer) (names []string) {
	for _, c := range consumers {
		if c.stays {
			names = append(names, c.name)
		}
	}
	return names
}
