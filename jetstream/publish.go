package jetstream

import (
	"context"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/publish"
)

// PublishOptions are the optional fields of an event. The zero value is a plain event: no key,
// id made by the hub. They are passed by value, because a pointer that passes through an interface
// would cost an allocation per publish.
type PublishOptions struct {
	// ID makes the publish idempotent within the topic's duplicate window (default 2 min):
	// 1..128 bytes, no control characters, no outer blanks, not of the form <stream>@<sequence>.
	ID string
	// TS is the record's ts in epoch milliseconds when HasTS is set; otherwise the moment of
	// storage counts.
	TS    int64
	HasTS bool
	// Key is any UTF-8 of 1..512 bytes, or "" for none.
	Key string
	// SID, Tags and CausedBy are carried along; their bytes count with those of Headers.
	SID string
	// Headers: names are RFC 9110 tokens, values have no control characters and no outer blanks; at
	// most 64, 16 KiB in all. Nats-*, Event-* and KV-* are reserved in any case.
	Headers  map[string]string
	Tags     []string
	CausedBy []string
	// Tombstone removes Key, which must be set, from a compacted topic. The payload must be empty
	// or null.
	Tombstone bool
	// Delay and At store the event later: Delay from now on, or at the time At, at most
	// Limits.MaxDelay ahead. Give one of them at most. A delay of 0 and a time that has passed mean
	// now. Until then the event is not in the topic: nobody sees it, and Publisher.Cancel removes
	// it. Its ts, unless given, is the moment at which it is stored in the topic, like the place
	// that it then has among the other events, those of its key included. An ID is compared with
	// the events of the topic that wait, and again when the event is due. The event is stored by a
	// bus that is open then, and otherwise by the next one. It needs a NATS server 2.12 or newer.
	Delay time.Duration
	At    time.Time
	// Wrapper means that the payload contains the payload of another event, and may therefore
	// exceed the limit by 16 KiB.
	Wrapper bool
	// Brief has PublishAsync return schemas.ErrLong, without an effect, where the comparison with
	// the schema of the topic takes more than about a millisecond, or the client must wait for its
	// ration (Limits.ComputeTime).
	Brief bool
	// CountFor, if not "", is the client for which the topic and the key count that this publish
	// creates, instead of that of the Publisher (Publisher.CountFor).
	CountFor string
	// ExpectKeySequence, when not nil, stores the event only if the newest event of Key has this
	// stream sequence (0: there is none yet). Otherwise the publish fails with ErrKeyChanged.
	ExpectKeySequence *uint64
	// Yield is for publishes of the program itself that lose nothing by waiting. They are refused
	// with storage_low like those of clients (Limits.StorageReserve).
	Yield bool
	// KeyExists tells that the caller has read a value of Key, so that Key counts as no new key of
	// a compacted topic, also if this hub has not heard of it.
	KeyExists bool
}

// Validate checks the options as a publish would, without a bus. It returns a bad_options *Error or
// nil. Publisher.Admit also checks what the topic requires.
func (o *PublishOptions) Validate() error { return (*publish.Options)(o).Validate() }

// Delayed reports whether Delay or At is set. Such a publish may wait for the event store before it
// is sent.
func (o *PublishOptions) Delayed() bool { return (*publish.Options)(o).Delayed() }

// Publisher publishes for one client in order. The stream stores events in the order of the calls,
// as long as no publish in between fails. A Publisher is pinned to one NATS connection of the bus's
// pool, which keeps that order. Events with a delay have no such order. PublishAsync, Publish and
// CountFor are for one goroutine at a time; the others may be called concurrently. Different
// Publishers are independent. A Publisher needs no closing.
type Publisher struct{ publisher *publish.Publisher }

// NewPublisher returns a new Publisher. A Publisher is cheap; create one for each client session.
// Until CountFor names a client, the topics that the Publisher creates count for that Publisher
// alone (Limits.TopicsPerClient).
func (b *Bus) NewPublisher() *Publisher { return &Publisher{b.publishers.Publisher()} }

// CountFor makes the topics that this Publisher creates from now on count for a client
// (Limits.TopicsPerClient). All Publishers and subscriptions (SubscribeOptions.CountFor) with the
// same client share one count. client must not be empty and must not begin with NUL.
func (p *Publisher) CountFor(client string) { p.publisher.CountFor(client) }

// Publish is PublishAsync that waits: it stores one event and returns once the stream has confirmed
// it. Errors are those of PublishAsync and of its done. When ctx ends first, the *Error
// (publish_failed) says that the outcome is unknown.
func (p *Publisher) Publish(ctx context.Context, topic string, payload []byte, opts PublishOptions) (event.Receipt, error) {
	return p.publisher.Publish(ctx, topic, payload, (*publish.Options)(&opts))
}

// PublishAsync sends the event and returns. done is called exactly once, from a goroutine of the
// bus, when the stream has stored the event or the publish has failed. After 10 s without an ack,
// or at the deadline of ctx if that is sooner, the outcome is unknown; a publish with an id may
// then be repeated safely. done must not block. The done of an earlier publish may be called after
// that of a later one; Receipt.Sequence is the order of the stream. PublishAsync does not keep
// payload and opts after it returns.
//
// payload is stored byte for byte. It need not be JSON, although clients of the hub get JSON. In a
// record (Event.AppendRecord), text that is not JSON becomes a JSON string, and other bytes become
// a string in base64; the header Event-Encoding names the encoding. An empty payload becomes null.
// ValidPayload reports whether a payload counts as JSON.
//
// An error returned by PublishAsync itself means that nothing was stored and done will not be
// called; it is ErrClosed or an *Error. The *Error is about a mistake of the client (bad_topic,
// bad_options, publish_failed with the cause ErrTooLarge, rate_limited), or about a failure that
// may pass (overloaded, storage_low, publish_failed, internal). The error given to done is an
// *Error (publish_failed, topic_full, storage_low), or ErrKeyChanged.
//
// PublishAsync waits while the topic is being created, until the first publish to a stream is
// confirmed, and while too many publishes are in flight (Limits.PublishInFlight per stream,
// Limits.SessionInFlight per Publisher).
func (p *Publisher) PublishAsync(ctx context.Context, topic string, payload []byte, opts PublishOptions, done func(event.Receipt, error)) error {
	return p.publisher.PublishAsync(ctx, topic, payload, (*publish.Options)(&opts), done)
}

// Admit checks an event that is to be published later, as PublishAsync would, as far as possible
// without asking the server. It checks the topic, the options, the size, the key that a compacted
// topic requires, and the schema, for which it may wait for some seconds. Where the topic's rule
// asks for schemas, Admit adds the version to opts.Headers, which it copies, so that the event is
// compared with the same version later.
func (p *Publisher) Admit(ctx context.Context, topic string, payload []byte, opts *PublishOptions) error {
	return p.publisher.Admit(ctx, topic, payload, (*publish.Options)(opts))
}

// Reserve counts a topic that does not exist for a client (Limits.TopicsPerClient), although an
// event that will make the topic is published only later, by anybody through this bus. The client
// must have made fewer topics that exist than Limits.ClientTopics. Further calls for the same topic
// count nothing. While NATS does not answer, every topic that this hub does not know counts. Of a
// topic that this hub has used, Reserve counts a new key (Limits.KeysPerClient and
// topics.Rule.MaxKeys). It returns an *Error (rate_limited, overloaded, bad_topic) when the client
// may not make the topic or the key. It may be called concurrently.
func (p *Publisher) Reserve(ctx context.Context, topic, key, client string) error {
	return p.publisher.Reserve(ctx, topic, key, client)
}

// Knows reports whether this hub has used the topic's stream. If not, a publish may make it.
func (p *Publisher) Knows(topic string) bool { return p.publisher.Knows(topic) }

// Cancel removes an event that was published with a delay and still waits. It returns ErrNotFound
// when no such event waits: it is unknown, was cancelled, or has been stored in its topic or is
// about to be. After a nil error, the event is never stored. After any other error the outcome is
// unknown, and Cancel may be repeated. Cancel may be called concurrently with all other methods.
func (p *Publisher) Cancel(ctx context.Context, topic, id string) error {
	return p.publisher.Cancel(ctx, topic, id)
}

// Flush waits until every publish of this Publisher has been answered, or returns the error of ctx.
func (p *Publisher) Flush(ctx context.Context) error { return p.publisher.Flush(ctx) }

// Publish stores one event and returns once the stream has confirmed it. It may be called
// concurrently; concurrent calls have no order (use a Publisher for order). payload need not be
// JSON; see Publisher.PublishAsync, which also documents the errors. When ctx ends before the
// answer arrives, the *Error says that the outcome is unknown. A publish with PublishOptions.ID may
// then be repeated safely. If ctx has no deadline, Publish returns within 10 s.
func (b *Bus) Publish(ctx context.Context, topic string, payload []byte, opts PublishOptions) (event.Receipt, error) {
	return b.publishers.Own().Publish(ctx, topic, payload, (*publish.Options)(&opts))
}

// ErrMaxKeys is the cause of the *Error (overloaded) for an event of a new key, when a compacted
// topic has as many keys as its rule allows (topics.Rule.MaxKeys). Nothing was stored.
var ErrMaxKeys = publish.ErrMaxKeys

// DerivedKeys tells the bus that a projection of this program makes keys from the events of a
// topic. The projection publishes for nobody, so new keys count for the publishers of the events
// (Limits.DerivedKeysPerClient).
type DerivedKeys struct {
	// From is the topic whose events make keys. Of is the compacted topic that has the keys.
	From, Of string
	// Key returns the key that an event with this payload makes, or "" for none. It is called for
	// each event that a client publishes to From, concurrently.
	Key func(payload []byte) string
}

// DelayedGroup is the group that dead letters of delayed events name: no group has had them.
const DelayedGroup = publish.DelayedGroup

// MaxDelayedPage is the maximum of the limit of Topic.Delayed.
const MaxDelayedPage = publish.MaxWaiting

// DelayedEvent is an event that waits to be stored in its topic.
type DelayedEvent struct {
	ID string
	// Key is "" for an event without a key.
	Key string
	// At is when the event is due.
	At time.Time
	// Published is when it was published.
	Published time.Time
	// Bytes is the size of the payload.
	Bytes int
}

// DelayedPage is a part of the events that wait for a topic.
type DelayedPage struct {
	Events []DelayedEvent
	// Next is for the next page; "" at the end.
	Next string
}

// Delayed lists the events that wait for the topic, in the order in which they were published. A
// page has at most limit events, and fewer where they are large. Events that are due are not among
// them. The topic need not exist. It returns a bad_options *Error for a limit or a next that is
// none.
func (t Topic) Delayed(ctx context.Context, next string, limit int) (page DelayedPage, err error) {
	page.Next, err = t.admin.publishers.Waiting(ctx, t.name, next, limit, func(w publish.Waiting) {
		page.Events = append(page.Events, DelayedEvent(w))
	})
	if err != nil {
		return DelayedPage{}, err
	}
	return page, nil
}

// CancelDelayed is Publisher.Cancel for operators.
func (t Topic) CancelDelayed(ctx context.Context, id string) error {
	return t.admin.publishers.Own().Cancel(ctx, t.name, id)
}
