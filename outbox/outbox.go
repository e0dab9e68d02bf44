// Package outbox publishes rows that a service writes to a table of its own database. The service
// writes a row in the same transaction as its other changes, so either both happen or neither does.
// A Drainer then publishes each row to the event bus as exactly one event, even if processes are
// killed at any point.
//
// A service adds rows with SQLStore.Add in its own transaction. The Drainer runs in the service or
// in a hub. Several drainers may share one table.
//
// # Order
//
// Rows with the same topic and key form a lane and are published in the order of their sequence
// numbers. Each row is published after the row before it was stored. The database assigns a
// sequence number when a row is inserted, not when it is committed. A row inserted after another
// was committed is therefore published after it. Rows of one key from overlapping transactions are
// published in either order, and none is lost, because drainers select rows by status and not by a
// position. Rows without a key, and rows of different keys or topics, have no order.
//
// # Once
//
// The id of a row is the id of its event, so a second publish within the topic's duplicate window
// stores nothing. Before any publish, the claim notes in the row when a publish may begin. That
// time comes from the NATS clock, which also stamps events, so no other clock matters. If the row
// is claimed again after the duplicate window may have passed, the drainer searches the stream from
// the noted time on before it publishes again. If the search cannot decide (the stream has dropped
// events of that time, or holds too many), the drainer parks the row with an error that says so.
package outbox

import (
	"context"
	"time"

	"eventhub/jetstream"
)

// Bus is the event bus that a Drainer publishes to. JetStream returns the implementation for a
// *jetstream.Bus.
type Bus interface {
	// Publish stores one event and returns when the stream has confirmed it.
	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
	// History gives access to the stored events of a topic, for look-ups of rows that may have been
	// published before.
	History(topic string) History
	// MaxPayload is the largest payload in bytes that Publish accepts. The drainer does not even
	// read larger payloads.
	MaxPayload() int
	// Now returns the time by the clock that stamps stored events.
	Now(ctx context.Context) (time.Time, error)
	// Ready returns nil when the bus is available. The drainer calls it after a failed publish.
	Ready(ctx context.Context) error
}

// History searches the stored events of a topic. jetstream.History implements it.
type History interface {
	FindIDs(ctx context.Context, s jetstream.IDSearch) (found map[string]bool, complete bool, err error)
	DuplicateWindow(ctx context.Context) (time.Duration, error)
}

// JetStream returns a Bus that publishes to NATS JetStream. The caller owns bus and closes it after
// the Drainer has stopped.
func JetStream(bus *jetstream.Bus) Bus {
	if bus == nil {
		return nil
	}
	return onJetStream{bus}
}

type onJetStream struct{ *jetstream.Bus }

func (b onJetStream) History(topic string) History { return b.Bus.History(topic) }

func (b onJetStream) Now(ctx context.Context) (time.Time, error) { return b.Admin().NATS().Now(ctx) }

// Observer receives metrics of a Drainer. Its methods may be called concurrently and must not
// block.
type Observer interface {
	// Claimed reports a claim that found rows, and its duration.
	Claimed(rows int, took time.Duration)
	// ClaimFailed reports a failed claim, or a lane that a claim had to skip.
	ClaimFailed()
	// SettleFailed reports publish results that the store failed to save, or refused to save for a
	// lane.
	SettleFailed()
	// Published reports a row that is in the stream. age is the time since the row was added. found
	// means that a look-up found the event already stored.
	Published(age time.Duration, found bool)
	// Failed reports a failed attempt. parked means that it was the last attempt.
	Failed(parked bool)
	// Backlog receives the contents of the store, every Config.StatsEvery.
	Backlog(Stats)
	// ClockSkew receives how far the NATS clock is ahead of the store's clock, every 15 seconds
	// while the drainer claims. A negative value means behind.
	ClockSkew(time.Duration)
}

// Tracer makes spans of a Drainer's attempts, for distributed tracing. Its method may be called
// concurrently and must not block, change headers, or keep them.
type Tracer interface {
	// Attempt begins the span of an attempt to publish a record with these headers, which was
	// tried attempts times before. It returns the context for the publish, and a function that ends
	// the span with the result of the publish.
	Attempt(ctx context.Context, topic, id string, headers map[string]string, attempts int) (context.Context, func(error))
}

type nobody struct{}

func (nobody) Claimed(int, time.Duration)    {}
func (nobody) ClaimFailed()                  {}
func (nobody) SettleFailed()                 {}
func (nobody) Published(time.Duration, bool) {}
func (nobody) Failed(bool)                   {}
func (nobody) Backlog(Stats)                 {}
func (nobody) ClockSkew(time.Duration)       {}
