package jetstream

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

// storedMsg is a message read from a stream.
type storedMsg struct {
	subject string
	seq     uint64
	header  nats.Header
	data    []byte
	time    time.Time
	size    int // as it was sent, in bytes, where a listing reads it
}

// lastBySubject reads the newest message of a subject at the stream's leader: it sees every
// confirmed publish, which a direct get from a replica does not.
func (p *pool) lastBySubject(ctx context.Context, stream, subject string) (*storedMsg, error) {
	return p.getMsg(ctx, stream, map[string]any{"last_by_subj": subject})
}

func (p *pool) getMsg(ctx context.Context, stream string, query map[string]any) (*storedMsg, error) {
	req, err := json.Marshal(query)
	if err != nil {
		return nil, err
	}
	m, err := again(ctx, func(ctx context.Context) (*storedMsg, error) {
		for {
			reply, err := p.link().request(ctx, p.api+"STREAM.MSG.GET."+stream, req)
			if err != nil {
				return nil, err
			}
			m, err := parseStored(reply)
			if !leaderless(err) || p.pause(ctx, getPause) != nil {
				return m, err
			}
		}
	})
	if err != nil && !errors.Is(err, event.ErrNotFound) {
		return nil, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	return m, err
}

// getPause is how long getMsg waits before it asks a stream again that has no leader.
const getPause = 100 * time.Millisecond

// leaderless reports whether an error of a read says that the stream, or the cluster, has no leader
// in that moment.
func leaderless(err error) bool {
	refused, ok := errors.AsType[*apiError](err)
	return ok && refused.Code == codeUnavailable
}

// parseStored reads the answer to a request for a stored message. It returns ErrNotFound where
// there is none.
func parseStored(reply *nats.Msg) (*storedMsg, error) {
	if noResponders(reply) {
		return nil, nats.ErrNoResponders
	}
	var got struct {
		Error   *apiError `json:"error"`
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
	m := &storedMsg{subject: got.Message.Subject, seq: got.Message.Seq, data: got.Message.Data, time: got.Message.Time}
	if len(got.Message.Header) > 0 {
		// A header that NATS clients cannot read is a native publisher's fault: what could be read
		// counts.
		m.header, _ = nats.DecodeHeadersMsg(got.Message.Header)
	}
	return m, nil
}
