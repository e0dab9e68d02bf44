package jetstream

import (
	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// Event is one stored event: the record that clients see (protocol section 1), and where it lies.
// Native NATS clients read events as the same type, which package native describes.
type Event = native.Event

// Receipt is the result of a confirmed publish.
type Receipt = event.Receipt

// Error is an error that may be shown to a client.
type Error = event.Error

// Codes of errors of the bus. They are the codes of the wire protocol.
const (
	CodeBadTopic        = event.CodeBadTopic
	CodeBadGroup        = event.CodeBadGroup
	CodeBadOptions      = event.CodeBadOptions
	CodeUnknownID       = event.CodeUnknownID
	CodePublishFailed   = event.CodePublishFailed
	CodeSubscribeFailed = event.CodeSubscribeFailed
	CodeOverloaded      = event.CodeOverloaded
	CodeRateLimited     = event.CodeRateLimited
	CodeInternal        = event.CodeInternal
	CodeTopicFull       = event.CodeTopicFull
	CodeStorageLow      = event.CodeStorageLow
)

// Errors of the bus and of what it hands out. Package event says of each what has happened.
var (
	ErrClosed       = event.ErrClosed
	ErrNotLeased    = event.ErrNotLeased
	ErrKeyChanged   = event.ErrKeyChanged
	ErrTooLarge     = event.ErrTooLarge
	ErrNotCompacted = event.ErrNotCompacted
	ErrNoStream     = event.ErrNoStream
	ErrNotFound     = event.ErrNotFound
	ErrNoTopic      = event.ErrNoTopic
)

// Observer receives metrics of the bus.
type Observer = event.Observer

// TopicObserver receives metrics of the publishes to one topic.
type TopicObserver = event.TopicObserver

// GroupObserver receives metrics of the deliveries of one subscription on one topic.
type GroupObserver = event.GroupObserver

// Codes of Observer.JetStreamError beside those of JetStream.
const (
	NoResponders = event.NoResponders
	NoReply      = event.NoReply
)

// Names of the gauges that a bus sets.
const (
	GaugeConnected     = event.GaugeConnected
	GaugeTopics        = event.GaugeTopics
	GaugeSubscriptions = event.GaugeSubscriptions
	GaugeBucketsBroken = event.GaugeBucketsBroken
	GaugeKeysRemoved   = event.GaugeKeysRemoved
	GaugeStreamsFailed = event.GaugeStreamsFailed
	GaugeDelayed       = event.GaugeDelayed
)

// Outcome is how a lease ended.
type Outcome = event.Outcome

// The ways in which a lease ends.
const (
	Acked        = event.Acked
	Nacked       = event.Nacked
	Expired      = event.Expired
	Returned     = event.Returned
	DeadLettered = event.DeadLettered
	Dropped      = event.Dropped
)

// Tracer makes spans of publishes and deliveries, for distributed tracing.
type Tracer = event.Tracer

// PublishSpan is the span of one publish.
type PublishSpan = event.PublishSpan

// DeliverySpan is the span of one lease.
type DeliverySpan = event.DeliverySpan
