package event

import "time"

// Observer receives metrics of the bus. Its methods, and those of the observers that it returns,
// are called on the hot path from many goroutines: they must be safe for concurrent use and must
// not block.
type Observer interface {
	// Topic returns the observer of a topic. The bus calls Topic once per topic and keeps the
	// result.
	Topic(topic string) TopicObserver
	// Group returns the observer of one subscription on one topic. The bus keeps the result until
	// its Close. ephemeral means that the group was created with a TTL, so there may be very many
	// such names.
	Group(topic, group string, ephemeral bool) GroupObserver
	// LimitReached counts a refusal or a wait because of the named limit (see Limits).
	LimitReached(limit string)
	// ServerRestarted counts a restart of the embedded server by the hub.
	ServerRestarted()
	// JetStreamError counts a request to JetStream, or a publish, that failed: code is JetStream's
	// own number of the error (10059 is "stream not found"), NoResponders or NoReply.
	JetStreamError(code int)
	// Gauge sets a named state of the bus: GaugeConnected, GaugeTopics, GaugeSubscriptions,
	// GaugeBucketsBroken, GaugeKeysRemoved, GaugeStreamsFailed, GaugeDelayed.
	Gauge(name string, value float64)
}

// Codes of Observer.JetStreamError beside those of JetStream.
const (
	NoResponders = 503 // nothing listens: JetStream is off, or a stream has no leader
	NoReply      = 408 // no answer came in time
)

// Names of the gauges that a bus sets.
const (
	GaugeConnected     = "connected"     // 1 while every NATS connection is up, else 0
	GaugeTopics        = "topics"        // topics this hub knows
	GaugeSubscriptions = "subscriptions" // subscriptions open on this hub
	// GaugeBucketsBroken is the number of buckets of compacted topics known to this hub that are
	// not as they should be.
	GaugeBucketsBroken = "buckets_broken"
	// GaugeKeysRemoved is the number of removed keys of compacted topics known to this hub. The
	// server keeps a record of each.
	GaugeKeysRemoved = "keys_removed"
	// GaugeStreamsFailed is the number of streams of the embedded server that cannot be written, 1
	// also when it stores nothing any more.
	GaugeStreamsFailed = "streams_failed"
	// GaugeDelayed is the number of delayed events that wait, of all hubs together.
	GaugeDelayed = "delayed"
)

// TopicObserver receives metrics of the publishes to one topic.
type TopicObserver interface {
	// Published counts an event that the stream has stored. took is the time from the send to the
	// stream's ack.
	Published(took time.Duration)
	// PublishFailed counts a publish that was answered with an error.
	PublishFailed()
	// GroupIgnored counts a group that holds the events of a topic with OnFullReject no more,
	// because it had no member for topics.Rule.GroupAge. Each hub counts for itself.
	GroupIgnored()
	// SchemaBroken counts an event that breaks the schema of the topic: it was refused, or stored
	// all the same (SchemaWarn).
	SchemaBroken(refused bool)
	// SchemaUnversioned counts an event that a hub got for a group for the first time, and that
	// names no version although the topic's rule asks for schemas. Nobody compared the event with
	// its schema, or it broke the schema (SchemaWarn).
	SchemaUnversioned()
}

// GroupObserver receives metrics of the deliveries of one subscription on one topic.
type GroupObserver interface {
	// Delivered counts an event that was handed to the subscriber. attempt counts how often it was
	// handed to the group, from 1.
	Delivered(attempt int)
	// Settled counts the end of a lease. held is the time for which the subscriber had the event.
	// age is the time since the event was stored.
	Settled(how Outcome, held, age time.Duration)
	// InFlight adds delta to the number of leases held.
	InFlight(delta int)
	// Polled records how long a pull waited for its first event.
	Polled(took time.Duration)
	// Reset counts a group that had to start anew and may have missed events.
	Reset()
	// Lost counts events that were removed before the group was given them. Of all hubs, one counts
	// each event.
	Lost(events uint64)
	// Close ends the use of this observer.
	Close()
}

// Outcome is how a lease ended.
type Outcome int

// The ways in which a lease ends.
const (
	Acked        Outcome = iota // the subscriber acknowledged
	Nacked                      // the subscriber refused; it comes again after a back-off
	Expired                     // the lease ran out
	Returned                    // UNSUBSCRIBE, drain or a lost connection gave it back
	DeadLettered                // the last attempt failed; the event went to dlq.<topic>
	Dropped                     // the hub lost its right to it (cut off, stopped, seek)
)

// NopObserver is an Observer, a TopicObserver and a GroupObserver that ignores everything. An
// observer that needs some of the calls embeds it.
type NopObserver = nopObserver

type nopObserver struct{}

func (nopObserver) Topic(string) TopicObserver               { return nopObserver{} }
func (nopObserver) Group(string, string, bool) GroupObserver { return nopObserver{} }
func (nopObserver) LimitReached(string)                      {}
func (nopObserver) ServerRestarted()                         {}
func (nopObserver) JetStreamError(int)                       {}
func (nopObserver) Gauge(string, float64)                    {}
func (nopObserver) Published(time.Duration)                  {}
func (nopObserver) PublishFailed()                           {}
func (nopObserver) GroupIgnored()                            {}
func (nopObserver) SchemaBroken(bool)                        {}
func (nopObserver) SchemaUnversioned()                       {}
func (nopObserver) Delivered(int)                            {}
func (nopObserver) Settled(Outcome, time.Duration, time.Duration) {
}
func (nopObserver) InFlight(int)         {}
func (nopObserver) Polled(time.Duration) {}
func (nopObserver) Reset()               {}
func (nopObserver) Lost(uint64)          {}
func (nopObserver) Close()               {}
