package conn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// Bounds of one direct get.
const (
	// messages in its answer; the server allows 1,024 where it is asked for several subjects
	MaxDirect   = 1_000
	directBytes = 8 << 20 // of its answer, which may go beyond it by one message
	// directWait is how long a stream that allows direct gets may answer none, as right after it
	// was made, and directPause how long direct waits before it asks again.
	directWait  = 2 * time.Second
	directPause = 20 * time.Millisecond
)

// ErrNoDirect is returned for a stream that does not exist, does not allow direct gets, or has
// answered none for directWait.
var ErrNoDirect = errors.New("jetstream: the stream answers no direct gets")

// DirectQuery asks any replica of a stream for several messages at once: see ADR-31 of NATS.
type DirectQuery struct {
	Seq        uint64   `json:"seq,omitempty"`
	Batch      int      `json:"batch,omitempty"`
	MaxBytes   int      `json:"max_bytes,omitempty"`
	NextBySubj string   `json:"next_by_subj,omitempty"`
	MultiLast  []string `json:"multi_last,omitempty"`
}

// DirectEnd is how a direct get ended.
type DirectEnd struct {
	Got     int
	Pending uint64 // messages that the answer had no room for
	Last    uint64 // sequence of the last message in it
	UpTo    uint64 // of several subjects: what was taken for the end of the stream
	// it had messages whose header no NATS client can read: a native publisher's fault
	Garbled bool
}

// Direct sends a query and calls f for each message of the answer, in order of sequence. It asks a
// stream again that answers no direct gets yet.
func (p *Pool) Direct(ctx context.Context, stream string, q *DirectQuery, f func(m *StoredMsg, pending uint64) error) (DirectEnd, error) {
	for deadline := time.Now().Add(directWait); ; {
		end, err := p.directOnce(ctx, stream, q, f)
		if !errors.Is(err, ErrNoDirect) || time.Now().After(deadline) {
			return end, err
		}
		info, asked := p.FindStream(ctx, stream)
		if asked != nil || !info.Config.AllowDirect || p.Pause(ctx, directPause) != nil {
			return end, err
		}
	}
}

// directOnce is direct, and returns ErrNoDirect where no replica answers.
func (p *Pool) directOnce(ctx context.Context, stream string, q *DirectQuery, f func(m *StoredMsg, pending uint64) error) (DirectEnd, error) {
	var end DirectEnd
	fail := func(err error) (DirectEnd, error) {
		return end, fmt.Errorf("jetstream: direct get from stream %s: %w", stream, err)
	}
	if q.MaxBytes == 0 {
		q.MaxBytes = directBytes
	}
	req, err := json.Marshal(q)
	if err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithTimeout(ctx, PublishWait)
	defer cancel()
	l := p.Link()
	// all that may come, so that nothing is ever dropped
	answers := make(chan *nats.Msg, MaxDirect+1)
	inbox := nats.NewInbox()
	sub, err := l.NC.ChanSubscribe(inbox, answers)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := l.NC.PublishMsg(&nats.Msg{Subject: p.API + "DIRECT.GET." + stream, Reply: inbox, Data: req}); err != nil {
		return fail(err)
	}
	size := 0
	alive := time.NewTicker(250 * time.Millisecond)
	defer alive.Stop()
	for {
		var m *nats.Msg
		select {
		case m = <-answers:
		case <-ctx.Done():
			return fail(ctx.Err())
		case <-alive.C:
			if !l.Up.Load() {
				return fail(ErrCut)
			}
			continue
		}
		if m.Header == nil {
			end.Garbled = true
			continue
		}
		if m.Header[headerSequence] == nil {
			switch status := m.Header.Get("Status"); status {
			case "204":
				end.Pending, end.Last, end.UpTo = headerNumber(m, headerPending), headerNumber(m, headerLastSequence), headerNumber(m, headerUpTo)
				if size >= q.MaxBytes && q.MultiLast != nil {
					end.Pending = max(1, end.Pending) // nats-server 2.11 counts one too few
				}
				return end, nil
			case "404":
				if end.Got > 0 {
					end.Pending = 1 // what it was about to send was removed
				}
				return end, nil // there is nothing, or no more
			case "503":
				return fail(ErrNoDirect)
			default:
				return fail(fmt.Errorf("status %s: %s", status, m.Header.Get("Description")))
			}
		}
		end.Got++
		size += m.Size()
		at, err := time.Parse(time.RFC3339Nano, Last(m.Header[headerTime]))
		if err != nil {
			return fail(err)
		}
		stored := &StoredMsg{Subject: Last(m.Header[headerSubject]), Seq: headerNumber(m, headerSequence), Header: m.Header, Data: m.Data, Time: at, Size: m.Size()}
		if err := f(stored, headerNumber(m, headerPending)); err != nil {
			return end, err
		}
		end.Last = stored.Seq
	}
}

// Headers of the answers.
const (
	headerSubject      = "Nats-Subject"
	headerSequence     = "Nats-Sequence"
	headerTime         = "Nats-Time-Stamp"
	headerPending      = "Nats-Num-Pending"
	headerLastSequence = "Nats-Last-Sequence"
	headerUpTo         = "Nats-UpTo-Sequence"
)

func headerNumber(m *nats.Msg, name string) uint64 {
	n, _ := strconv.ParseUint(Last(m.Header[name]), 10, 64)
	return n
}

// Last is the value that counts of a header that the server adds: one of the same name that a
// publisher set comes before.
func Last(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}
