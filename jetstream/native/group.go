package native

import (
	"slices"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Settings of the consumer of every group.
const (
	// MaxAckPending is more than the server's default, so that events in back-off do not block
	// fresh ones.
	MaxAckPending = 65_536
	// MaxWaiting is how many pulls may wait: one or two for each member.
	MaxWaiting = 4_096
	// DefaultAckWait is how long an event that nobody settles or keeps waits until it is delivered
	// again, unless the hub has another setting (EVENTHUB_ACK_WAIT).
	DefaultAckWait = 30 * time.Second
	// DefaultMaxAttempts is how many attempts an event has before it is dead-lettered.
	DefaultMaxAttempts = 5
)

// Keys of a consumer's metadata that say whose it is.
const (
	MetaGroup = "eventhub.group"
	MetaTopic = "eventhub.topic"
	// MetaSlots is the number of slots of an ordered group. Other groups have none. Events of an
	// ordered group are given out by one hub, its owner: nobody else pulls from the consumer.
	MetaSlots = "eventhub.slots"
)

// ConsumerConfig returns the configuration of the consumer of a group, but for the place where the
// group starts: the caller sets OptStartSeq. family says that the stream holds other topics too
// (IsFamily). name is ConsumerName for a group that was never moved.
func ConsumerConfig(topic, group, name string, family bool) natsjs.ConsumerConfig {
	cfg := natsjs.ConsumerConfig{
		Name:          name,
		Durable:       name,
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy,
		OptStartSeq:   1,
		AckPolicy:     natsjs.AckExplicitPolicy,
		AckWait:       DefaultAckWait,
		// hubs dead-letter; what the server gives up on would stay unsettled for ever
		MaxDeliver:    -1,
		MaxAckPending: MaxAckPending,
		MaxWaiting:    MaxWaiting,
		Metadata:      map[string]string{MetaGroup: group, MetaTopic: topic},
	}
	if family {
		cfg.FilterSubjects = Filters(topic)
	}
	return cfg
}

// IsFamily reports whether a stream that stores a topic holds other topics too.
func IsFamily(topic, stream string, subjects []string) bool {
	return stream != ObjectName(topic) || len(subjects) != len(Filters(topic)) || !slices.Contains(subjects, Subject(topic, ""))
}

// The delay of a Nack that leaves the delay to the package.
const (
	backoffFirst = 50 * time.Millisecond
	backoffMax   = 10 * time.Second
)

// Backoff returns the delay after a failed attempt: 50 ms, doubled per attempt up to 10 s.
func Backoff(attempt int) time.Duration {
	if attempt > 8 {
		return backoffMax
	}
	return min(backoffFirst<<max(attempt-1, 0), backoffMax)
}

// Margin returns how much earlier than the server a member counts a delivery as lost: 5 s, or a
// third of an AckWait below 15 s. The server matches acks by stream sequence alone, so one that
// comes late would settle the delivery of another member.
func Margin(ackWait time.Duration) time.Duration { return min(5*time.Second, ackWait/3) }
