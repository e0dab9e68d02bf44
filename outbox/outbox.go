// Package outbox publishes what a service wrote into a table of its own database, in the transaction that changed the rest of
// it: either both happen or neither does. A Drainer moves the rows to the event bus: each is published, and as one event,
// whatever is killed when.
//
// A service adds with SQLStore.Add in its own transaction, and a Drainer, in the service or in a hub, does the rest. Several
// may work on one table.
//
// # Order
//
// Rows of one topic and key are published in the order of their sequence numbers, each after the one before was stored. The
// database gives the numbers out when rows are added, not when they are committed. So a row that was added after another was
// committed comes after it. Rows of one key that were added by transactions that overlap come in either order; none is lost,
// for what is published is found by its state and not by a number that was reached. Rows without a key, and rows of different
// keys or topics, have no order.
//
// # Once
//
// The id of a row is the id of its event, so that a second publish within the topic's duplicate window stores nothing. A claim
// notes when a publish may begin, before it does, by the clock of NATS, with which events are stored: what other clocks say, and
// how they are set, does not matter. A row that is claimed again later than the window may remember is looked up in the stream
// from that moment on, before it is published again. When even that cannot say whether it was published (the
// stream has dropped events of that time, or has too many), the row is parked as an error instead, and says so.
package outbox

import (
	"context"
	"time"

	"eventhub/jetstream"
)

// Bus is what a Drainer needs of the event bus. JetStream makes one of a *jetstream.Bus.
type Bus interface {
	// Publish stores one event and returns when the stream has confirmed it.
	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
	// History is asked about rows whose publish may have begun before.
	History(topic string) History
	// MaxPayload is the largest payload in bytes that Publish takes. Those of larger ones are not even read.
	MaxPayload() int
	// Now is the time by the clock that events are stored with.
	Now(ctx context.Context) (time.Time, error)
	// Ready is nil while the bus can serve. It is asked after it could not.
	Ready(ctx context.Context) error
}

// History is what a Drainer asks of the events of a topic. jetstream.History is one.
type History interface {
	FindIDs(ctx context.Context, s jetstream.IDSearch) (found map[string]bool, complete bool, err error)
	DuplicateWindow(ctx context.Context) (time.Duration, error)
}

// JetStream is the Bus that publishes to NATS JetStream. The caller closes bus, after the Drainer.
func JetStream(bus *jetstream.Bus) Bus {
	if bus == nil {
		return nil
	}
	return onJetStream{bus}
}

type onJetStream struct{ *jetstream.Bus }

func (b onJetStream) History(topic string) History { return b.Bus.History(topic) }

func (b onJetStream) Now(ctx context.Context) (time.Time, error) { return b.Admin().Now(ctx) }

// Observer is told what a Drainer does. Its methods may be called concurrently and must not block.
type Observer interface {
	// Claimed is told of each claim that found rows, and how long it took.
	Claimed(rows int, took time.Duration)
	// ClaimFailed is told of each claim that failed, and of each lane that a claim had to leave out.
	ClaimFailed()
	// Published counts a row that is in the stream. age is how long ago it was added; found says that it was there already.
	Published(age time.Duration, found bool)
	// Failed counts a try that failed; parked says that it was the last one.
	Failed(parked bool)
	// Backlog is told, every Config.StatsEvery, what is in the store.
	Backlog(Stats)
	// ClockSkew is told now and then how far the clock of NATS is ahead of the store's; it is negative when it is behind.
	ClockSkew(time.Duration)
}

type nobody struct{}

func (nobody) Claimed(int, time.Duration)    {}
func (nobody) ClaimFailed()                  {}
func (nobody) Published(time.Duration, bool) {}
func (nobody) Failed(bool)                   {}
func (nobody) Backlog(Stats)                 {}
func (nobody) ClockSkew(time.Duration)       {}
