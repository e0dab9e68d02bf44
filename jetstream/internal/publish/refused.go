package publish

import (
	"errors"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// Refused reports whether err, the error of a publish, is a refusal by the stream: nothing was
// stored, and NATS is reachable. A NATS that has no room for any event refuses nothing.
func Refused(err error) bool {
	refused, ok := errors.AsType[*conn.APIError](err)
	return ok && refused.ErrCode != errNoClusterLeader && refused.ErrCode != errIDInProcess && !streams.StoreFull(refused.ErrCode, refused.Description)
}

const (
	// errNoClusterLeader is the server's error while its cluster has no leader.
	errNoClusterLeader natsjs.ErrorCode = 10008
	// errIDInProcess is the error of a stream with several copies that was given the id before, and
	// does not know yet whether that event is stored. A slow cluster of nats-server 2.15.2 was seen
	// to say so of some ids for over a minute, and to store other events meanwhile.
	errIDInProcess natsjs.ErrorCode = 10158
)
