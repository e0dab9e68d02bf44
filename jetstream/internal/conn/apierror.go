package conn

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// errorHead bounds where the error is in an answer: only the type of the answer precedes it.
const errorHead = 160

var (
	errorField = []byte(`"error":{`)
	pubAckHead = []byte(`{"stream":"`) // begins the answer to nearly every publish
)

// errorCode returns JetStream's number of the error in an answer, or 0 if the answer has none. An
// answer with a header other than a status holds a stored message, whose payload may look like
// anything.
func errorCode(m *nats.Msg) int {
	switch {
	case NoResponders(m):
		return event.NoResponders
	case m.Header != nil || bytes.HasPrefix(m.Data, pubAckHead) || !bytes.Contains(m.Data[:min(len(m.Data), errorHead)], errorField):
		return 0
	}
	var got struct {
		Error APIError `json:"error"`
	}
	if json.Unmarshal(m.Data, &got) != nil {
		return 0
	}
	if got.Error.ErrCode == 0 {
		return got.Error.Code
	}
	return int(got.Error.ErrCode)
}

// countErrors counts the errors in answers that nats.go asked for. The hub's own questions are
// counted where their answers come in.
func (p *Pool) countErrors() *natsjs.ClientTrace {
	return &natsjs.ClientTrace{ResponseReceived: func(_ string, data []byte, header nats.Header) {
		if code := errorCode(&nats.Msg{Data: data, Header: header}); code != 0 {
			p.obs.JetStreamError(code)
		}
	}}
}

// APIError is an error of JetStream in an answer that this package reads itself.
type APIError struct {
	Code        int              `json:"code"`
	ErrCode     natsjs.ErrorCode `json:"err_code"`
	Description string           `json:"description"`
}

func (e *APIError) Error() string {
	return fmt.Sprintf("nats: %s (code %d, err_code %d)", e.Description, e.Code, e.ErrCode)
}

// Codes of the server's errors: of those that pass by themselves, and of those that do not.
const (
	codeUnavailable = 503
	CodeRefused     = 400
)

// Passing reports whether an error of the server passes by itself.
func Passing(err error) bool {
	refused, ok := errors.AsType[*natsjs.APIError](err)
	return ok && (refused.Code == codeUnavailable || refused.ErrorCode == errNoPeers)
}

// errNoPeers is the server's error when too few servers of a cluster are up for a stream.
const errNoPeers natsjs.ErrorCode = 10005

// KeyChanged reports whether a write was refused because the subject's last message, or the
// revision of the key, is not the one expected.
func KeyChanged(err error) bool {
	code := natsjs.ErrorCode(0)
	if own, ok := errors.AsType[*APIError](err); ok {
		code = own.ErrCode
	} else if api, ok := errors.AsType[*natsjs.APIError](err); ok {
		code = api.ErrorCode
	}
	return code == natsjs.JSErrCodeStreamWrongLastSequence || code == natsjs.JSErrCodeStreamWrongLastSequenceConstant || errors.Is(err, natsjs.ErrKeyExists)
}

// ErrCodeTooLarge is the server's error for a message beyond the stream's max_msg_size.
const ErrCodeTooLarge natsjs.ErrorCode = 10054

// TooLarge reports that a stream refused a message for its size.
func TooLarge(err error) bool {
	refused, ok := errors.AsType[*APIError](err)
	return ok && refused.ErrCode == ErrCodeTooLarge || errors.Is(err, nats.ErrMaxPayload)
}
