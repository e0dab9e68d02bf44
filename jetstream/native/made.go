package native

import (
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// MetaMade is the key in the metadata of a stream or of a consumer that was restored from a backup.
// Its value is the time at which the original was created. Notes about groups name streams and
// consumers by that time, and the server gives what it restores a new one.
const MetaMade = "eventhub.made"

// StreamMade returns the time that identifies a stream among those of its name.
func StreamMade(info *natsjs.StreamInfo) time.Time { return Made(info.Created, info.Config.Metadata) }

// ConsumerMade returns the time that identifies a consumer among those of its name.
func ConsumerMade(info *natsjs.ConsumerInfo) time.Time {
	return Made(info.Created, info.Config.Metadata)
}

// Made returns the time in the metadata, or created if there is none.
func Made(created time.Time, metadata map[string]string) time.Time {
	if text, restored := metadata[MetaMade]; restored {
		if at, err := time.Parse(time.RFC3339Nano, text); err == nil {
			return at
		}
	}
	return created
}
