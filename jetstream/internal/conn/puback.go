package conn

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// pubAck is the stream's answer to a publish.
type pubAck struct {
	Stream    string    `json:"stream"`
	Seq       uint64    `json:"seq"`
	Duplicate bool      `json:"duplicate"`
	Error     *APIError `json:"error"`
}

// StrayedError says that a message was stored, and in which other stream.
type StrayedError struct{ Stream string }

func (e *StrayedError) Error() string { return "the stream " + e.Stream + " took the message" }

// ParsePubAck reads the answer of a stream without a decoder where it has the usual form
// {"stream":"S","seq":N}. Another stream than that one answers if the stream is gone and the other
// was given its subject; the error is a *StrayedError then.
func ParsePubAck(data []byte, stream string) (pubAck, error) {
	const seq = `","seq":`
	if rest, ok := bytes.CutPrefix(data, []byte(`{"stream":"`)); ok && len(rest) > len(stream) && string(rest[:len(stream)]) == stream {
		if rest, ok = bytes.CutPrefix(rest[len(stream):], []byte(seq)); ok {
			var n uint64
			i := 0
			for ; i < len(rest) && '0' <= rest[i] && rest[i] <= '9' && i < 19; i++ {
				n = n*10 + uint64(rest[i]-'0')
			}
			if i > 0 && i+1 == len(rest) && rest[i] == '}' {
				return pubAck{Stream: stream, Seq: n}, nil
			}
		}
	}
	var ack pubAck
	if err := json.Unmarshal(data, &ack); err != nil {
		return pubAck{}, fmt.Errorf("nats: unreadable publish ack: %w", err)
	}
	if ack.Error != nil {
		return pubAck{}, ack.Error
	}
	if ack.Stream != stream {
		return pubAck{}, &StrayedError{ack.Stream}
	}
	return ack, nil
}
