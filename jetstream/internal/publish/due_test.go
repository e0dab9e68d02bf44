package publish

import (
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

func TestADelayedEventThatFindsNoRoomBecomesNoDeadLetter(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		&conn.APIError{Code: 503, ErrCode: streams.ErrCodeStoreFailed, Description: "maximum bytes exceeded"}:            false,
		&event.Error{Code: event.CodePublishFailed, Err: &conn.APIError{Code: 503, ErrCode: streams.ErrCodeStoreFailed}}: false,
		&event.Error{Code: event.CodePublishFailed, Err: natsjs.ErrStreamNotFound}:                                       false,
		&event.Error{Code: event.CodeTopicFull}:                                                                          false,
		&event.Error{Code: event.CodeOverloaded, Err: event.ErrNoStream}:                                                 false,
		conn.ErrNoReply: false,
		streams.StorageLow(&conn.APIError{Code: conn.CodeRefused, ErrCode: streams.ErrAccountResources}):                                          false,
		&event.Error{Code: event.CodePublishFailed, Err: &conn.APIError{Code: conn.CodeRefused, ErrCode: conn.ErrCodeTooLarge, Description: "x"}}: true,
		&event.Error{Code: event.CodeBadTopic, Err: event.ErrNoStream}:                                                                            true,
	} {
		if got := hopeless(err); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}
