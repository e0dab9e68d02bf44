package conn

import (
	"testing"

	"github.com/nats-io/nats.go"
)

// An answer with a stored message in its head or body has no error.
func TestErrorsInAnswers(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]int{
		`{"stream":"s","seq":1}`: 0,
		`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 1"},"stream":"s","seq":0}`:              10071,
		`{"type":"io.nats.jetstream.api.v1.stream_info_response","error":{"code":404,"err_code":10059,"description":"…"}}`: 10059,
		`{"type":"io.nats.jetstream.api.v1.stream_info_response","error":{"code":500}}`:                                    500,
		`{"type":"io.nats.jetstream.api.v1.consumer_info_response","config":{"metadata":{"a":"\"error\":{\"code\":1}"}}}`:  0,
		`{"error":{`: 0,
		``:           0,
	} {
		if got := errorCode(&nats.Msg{Data: []byte(data)}); got != want {
			t.Errorf("%s: %d, want %d", data, got, want)
		}
	}
	stored := &nats.Msg{Data: []byte(`{"error":{"err_code":1}}`), Header: nats.Header{"Nats-Stream": []string{"s"}}}
	if got := errorCode(stored); got != 0 {
		t.Errorf("a stored message is the error %d", got)
	}
}
