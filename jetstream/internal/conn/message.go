package conn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// StoredMsg is a message read from a stream.
type StoredMsg struct {
	Subject string
	Seq     uint64
	Header  nats.Header
	Data    []byte
	Time    time.Time
	Size    int // as it was sent, in bytes, where a listing reads it
}

// LastBySubject reads the newest message of a subject at the stream's leader: it sees every
// confirmed publish, which a direct get from a replica does not.
func (p *Pool) LastBySubject(ctx context.Context, stream, subject string) (*StoredMsg, error) {
	return p.GetMsg(ctx, stream, map[string]any{"last_by_subj": subject})
}

// GetMsg asks the leader of a stream for one message, by a query of STREAM.MSG.GET. It returns
// ErrNotFound where there is none.
func (p *Pool) GetMsg(ctx context.Context, stream string, query map[string]any) (*StoredMsg, error) {
	req, err := json.Marshal(query)
	if err != nil {
		return nil, err
	}
	m, err := Again(ctx, func(ctx context.Context) (*StoredMsg, error) {
		for {
			reply, err := p.Link().Request(ctx, p.API+"STREAM.MSG.GET."+stream, req)
			if err != nil {
				return nil, err
			}
			m, err := ParseStored(reply)
			if !leaderless(err) || p.Pause(ctx, getPause) != nil {
				return m, err
			}
		}
	})
	if err != nil && !errors.Is(err, event.ErrNotFound) {
		return nil, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	return m, err
}

// getPause is how long GetMsg waits before it asks a stream again that has no leader.
const getPause = 100 * time.Millisecond

// leaderless reports whether an error of a read says that the stream, or the cluster, has no leader
// in that moment.
func leaderless(err error) bool {
	refused, ok := errors.AsType[*APIError](err)
	return ok && refused.Code == codeUnavailable
}

// ParseStored reads the answer to a request for a stored message. It returns ErrNotFound where
// there is none.
func ParseStored(reply *nats.Msg) (*StoredMsg, error) {
	if NoResponders(reply) {
		return nil, nats.ErrNoResponders
	}
	var got struct {
		Error   *APIError `json:"error"`
		Message struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(reply.Data, &got); err != nil {
		return nil, err
	}
	if got.Error != nil {
		if code := got.Error.ErrCode; code == natsjs.JSErrCodeMessageNotFound || code == natsjs.JSErrCodeStreamNotFound {
			return nil, event.ErrNotFound
		}
		return nil, got.Error
	}
	m := &StoredMsg{Subject: got.Message.Subject, Seq: got.Message.Seq, Data: got.Message.Data, Time: got.Message.Time}
	if len(got.Message.Header) > 0 {
		// A header that NATS clients cannot read is a native publisher's fault: what could be read
		// counts.
		m.Header, _ = nats.DecodeHeadersMsg(got.Message.Header)
	}
	return m, nil
}
