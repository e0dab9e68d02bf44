package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
)

// Bounds of a snapshot and of a restore of one stream.
const (
	// snapshotChunk is the size of a message with a part of a snapshot, and snapshotWindow how many
	// of them the server sends ahead.
	snapshotChunk  = 128 << 10
	snapshotWindow = 64
	// snapshotAhead is how many parts are kept for a reader that stands still. The server gives a
	// snapshot up when nothing is acknowledged for 5 s, so one part more is acknowledged every
	// snapshotCredit while there is room: a reader may stand still for about 15 minutes.
	snapshotAhead  = 512
	snapshotCredit = 2 * time.Second
	// snapshotSilence is how long the server may send nothing that it owes.
	snapshotSilence = time.Minute
	// restoreSilence is how long a server may take for a part of a stream that is restored, and
	// restoreFinish for what comes after the last part.
	restoreSilence = time.Minute
	restoreFinish  = 10 * time.Minute
	// restoreTries is how often a restore is begun. Only the server that the cluster prefers as
	// leader of the new stream answers; if another is elected, no answer comes, and the stream
	// stays empty.
	restoreTries = 3
	// restoreInterest is how long the way to a server that restores may take to become known to the
	// other servers. The server gives a restore up when no part came for 5 s.
	restoreInterest = 5 * time.Second
	// restorePause is between two tries of the first part in that time.
	restorePause = 20 * time.Millisecond
)

// errNobodyRestores says that no server takes the parts of a restore.
var errNobodyRestores = errors.New("the server has given the restore up")

// errSnapshotCut says that the server has given a snapshot up. Another try may succeed.
var errSnapshotCut = errors.New("the server gave the snapshot up")

// snapshot is a stream on its way from the server: an io.Reader of the server's format.
type snapshot struct {
	config map[string]json.RawMessage

	parts chan []byte
	left  []byte
	err   error // after parts was closed
	cut   error // that Read has returned: readers of the format do not pass it on
	end   context.CancelFunc
	ended chan struct{}
}

// takeSnapshot has the server send a stream, with its consumers or without. The caller closes the
// snapshot.
func (k *backups) takeSnapshot(ctx context.Context, stream string, consumers bool) (*snapshot, error) {
	nc := k.conn.Links[0].NC
	inbox := nats.NewInbox()
	in := make(chan *nats.Msg, snapshotAhead+2*snapshotWindow)
	sub, err := nc.ChanSubscribe(inbox, in)
	if err != nil {
		return nil, err
	}
	stop := func() { _ = sub.Unsubscribe() } // fails only when the connection is gone
	ask, err := json.Marshal(map[string]any{
		"deliver_subject": inbox, "no_consumers": !consumers, "chunk_size": snapshotChunk, "window_size": snapshotChunk * snapshotWindow,
	})
	if err != nil {
		stop()
		return nil, err
	}
	var answer struct {
		Error  *natsjs.APIError           `json:"error"`
		Config map[string]json.RawMessage `json:"config"`
	}
	if err := k.askServer(ctx, "STREAM.SNAPSHOT."+stream, ask, &answer); err != nil {
		stop()
		return nil, err
	}
	if answer.Error != nil {
		stop()
		return nil, answer.Error
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &snapshot{config: answer.Config, parts: make(chan []byte, snapshotAhead), end: cancel, ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		defer stop()
		defer close(s.parts)
		s.err = s.receive(ctx, in)
	}()
	return s, nil
}

// askServer sends a request to the API of JetStream once.
func (k *backups) askServer(ctx context.Context, subject string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, conn.OpenWait)
	defer cancel()
	reply, err := k.conn.Links[0].NC.RequestWithContext(ctx, k.conn.API+subject, body)
	if err != nil {
		return err
	}
	return json.Unmarshal(reply.Data, into)
}

// receive takes what the server sends until the end of the snapshot.
func (s *snapshot) receive(ctx context.Context, in <-chan *nats.Msg) error {
	var owed []*nats.Msg // parts that are not acknowledged
	settle := func(n int) error {
		for _, m := range owed[:n] {
			if err := m.Respond(nil); err != nil {
				return err
			}
		}
		owed = append(owed[:0], owed[n:]...)
		return nil
	}
	tick := time.NewTicker(snapshotCredit / 4)
	defer tick.Stop()
	heard, credited := time.Now(), time.Now()
	for {
		select {
		case m := <-in:
			heard = time.Now()
			if len(m.Data) == 0 {
				if status := m.Header.Get("Status"); status != "" && status != "204" {
					return fmt.Errorf("%w: %s %s", errSnapshotCut, status, m.Header.Get("Description"))
				}
				return nil
			}
			select {
			case s.parts <- m.Data:
			case <-ctx.Done():
				return ctx.Err()
			}
			if m.Reply != "" {
				owed = append(owed, m)
			}
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		n, now := 0, time.Now()
		switch waiting := len(s.parts); {
		case waiting <= snapshotWindow/2:
			n = len(owed)
		case now.Sub(credited) >= snapshotCredit && waiting < snapshotAhead-snapshotWindow:
			n = min(len(owed), 1)
		}
		if n > 0 {
			credited = now
			if err := settle(n); err != nil {
				return err
			}
		}
		if len(owed) == 0 && now.Sub(heard) > snapshotSilence && len(s.parts) == 0 {
			return fmt.Errorf("%w: nothing came for %v", errSnapshotCut, snapshotSilence)
		}
	}
}

// Read implements io.Reader.
func (s *snapshot) Read(p []byte) (int, error) {
	for len(s.left) == 0 {
		part, more := <-s.parts
		if !more {
			if s.err != nil {
				s.cut = s.err
				return 0, s.err
			}
			return 0, io.EOF
		}
		s.left = part
	}
	n := copy(p, s.left)
	s.left = s.left[n:]
	return n, nil
}

// close ends the snapshot, complete or not.
func (s *snapshot) close() {
	s.end()
	<-s.ended
}

// restoreState is what a restore tells the server of a stream beforehand.
type restoreState struct {
	Messages uint64 `json:"messages"`
	Bytes    uint64 `json:"bytes"`
	FirstSeq uint64 `json:"first_seq"`
	LastSeq  uint64 `json:"last_seq"`
}

// putSnapshot makes a stream of what r has, which is in the server's format. begun says that the
// server has begun, so that there may be a stream after an error.
func (k *backups) putSnapshot(ctx context.Context, stream string, config json.RawMessage, state restoreState, r io.Reader) (begun bool, err error) {
	nc := k.conn.Links[0].NC
	ask, err := json.Marshal(map[string]any{"config": config, "state": state})
	if err != nil {
		return false, err
	}
	type restoreAnswer struct {
		Error   *natsjs.APIError `json:"error"`
		Deliver string           `json:"deliver_subject"`
	}
	begin := func() (restoreAnswer, error) {
		return conn.WhenUp(ctx, k.conn, func() (a restoreAnswer, err error) {
			ctx, cancel := context.WithTimeout(ctx, k.cfg.openWait/2)
			defer cancel()
			if err := k.askServer(ctx, "STREAM.RESTORE."+stream, ask, &a); err != nil {
				begun = true // perhaps
				return a, err
			}
			if a.Error != nil {
				return a, a.Error
			}
			return a, nil
		})
	}
	var answer restoreAnswer
	for try := 1; ; try++ {
		if answer, err = begin(); err == nil {
			break
		}
		if !errors.Is(err, context.DeadlineExceeded) || try == restoreTries || ctx.Err() != nil {
			return begun, err
		}
		if err := k.conn.JS.DeleteStream(ctx, stream); err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
			return true, err
		}
	}
	inbox := nats.NewInbox()
	replies := make(chan *nats.Msg, 2*snapshotWindow)
	sub, err := nc.ChanSubscribe(inbox+".*", replies)
	if err != nil {
		return true, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	await := func(limit time.Duration) (*nats.Msg, error) {
		late := time.NewTimer(limit)
		defer late.Stop()
		select {
		case m := <-replies:
			return m, nil
		case <-late.C:
			return nil, fmt.Errorf("the server did not answer for %v", limit)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	refused := func(m *nats.Msg) error {
		var said struct {
			Error *natsjs.APIError `json:"error"`
		}
		if len(m.Data) > 0 && json.Unmarshal(m.Data, &said) == nil && said.Error != nil {
			return said.Error
		}
		if m.Header.Get("Status") == "503" {
			return errNobodyRestores
		}
		return nil
	}
	// first sends the first part until a server takes it. In a cluster, the answer of the server
	// that restores may arrive before the other servers know its subscription.
	first := func(part []byte) error {
		deadline := time.Now().Add(restoreInterest)
		for i := 0; ; i++ {
			if err := nc.PublishMsg(&nats.Msg{Subject: answer.Deliver, Reply: inbox + ".first" + strconv.Itoa(i), Data: part}); err != nil {
				return err
			}
			m, err := await(restoreSilence)
			if err == nil {
				err = refused(m)
			}
			if !errors.Is(err, errNobodyRestores) || time.Now().After(deadline) {
				return err
			}
			if err := k.conn.Pause(ctx, restorePause); err != nil {
				return err
			}
		}
	}
	buf := make([]byte, snapshotChunk)
	unanswered := 0
	for i := 0; ; i++ {
		n, err := io.ReadFull(r, buf)
		switch {
		case n > 0 && i == 0:
			if err := first(buf[:n]); err != nil {
				return true, err
			}
		case n > 0:
			// the server reads one part after the other, and answers each
			if err := nc.PublishMsg(&nats.Msg{Subject: answer.Deliver, Reply: inbox + "." + strconv.Itoa(i), Data: buf[:n]}); err != nil {
				return true, err
			}
			unanswered++
		}
		for unanswered > 0 && (unanswered >= snapshotWindow/4 || len(replies) > 0 || err != nil) {
			m, err := await(restoreSilence)
			if err != nil {
				return true, err
			}
			if err := refused(m); err != nil {
				return true, err
			}
			unanswered--
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return true, err
		}
	}
	if err := nc.PublishMsg(&nats.Msg{Subject: answer.Deliver, Reply: inbox + ".end"}); err != nil {
		return true, err
	}
	m, err := await(restoreFinish)
	if err == nil {
		err = refused(m)
	}
	return true, err
}
