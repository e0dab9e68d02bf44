package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/schemas"
)

// PublishOptions are the optional fields of an event. The zero value is a plain event: no key, id
// made by the hub. They are passed by value, because a pointer that passes through an interface
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
	// Brief has PublishAsync return ErrLong, without an effect, where the comparison with the
	// schema of the topic takes more than about a millisecond, or the client must wait for its
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

// Publisher publishes for one client in order. The stream stores events in the order of the calls,
// as long as no publish in between fails. A Publisher is pinned to one NATS connection of the bus's
// pool, which keeps that order. Events with a delay have no such order. PublishAsync, Publish and
// CountFor are for one goroutine at a time; the others may be called concurrently. Different
// Publishers are independent. A Publisher needs no closing.
type Publisher struct {
	publishing *publishing
	link       *conn.Link
	client     string // whose new topics are counted; "" for the hub itself

	inFlight conn.Gate    // of unanswered publishes
	advance  atomic.Int64 // bytes taken from the client's rations and not used
}

// NewPublisher returns a new Publisher. A Publisher is cheap; create one for each client session.
// Until CountFor names a client, the topics that the Publisher creates count for that Publisher
// alone (Limits.TopicsPerClient).
func (b *Bus) NewPublisher() *Publisher { return b.publishing.newPublisher(b.publishing.unnamed()) }

// CountFor makes the topics that this Publisher creates from now on count for a client
// (Limits.TopicsPerClient). All Publishers and subscriptions (SubscribeOptions.CountFor) with the
// same client share one count. client must not be empty and must not begin with NUL.
func (p *Publisher) CountFor(client string) {
	p.client = client
	p.advance.Store(0)
}

// Publish is PublishAsync that waits: it stores one event and returns once the stream has confirmed
// it. Errors are those of PublishAsync and of its done. When ctx ends first, the *Error
// (publish_failed) says that the outcome is unknown.
func (p *Publisher) Publish(ctx context.Context, topic string, payload []byte, opts PublishOptions) (event.Receipt, error) {
	return p.publishing.publishWait(ctx, func(done func(event.Receipt, error)) error {
		return p.PublishAsync(ctx, topic, payload, opts, done)
	})
}

func (p *publishing) newPublisher(client string) *Publisher {
	return &Publisher{publishing: p, link: p.conn.Link(), client: client}
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
	if p.publishing.tracer != nil {
		return p.publishTraced(ctx, topic, payload, &opts, done)
	}
	return p.publish(ctx, topic, payload, &opts, done)
}

// outgoing is an event that is being published, and what its topic adds to what the caller gave.
type outgoing struct {
	PublishOptions

	payload []byte
	bytes   int64 // in the store, once it was admitted
	version int   // of the schema, which the hub stamps the event with; 0: none
	// broken says that the event breaks the schema of a topic that this hub meets with it.
	broken bool
	// original is the header of a dead letter that says where its event was stored; "": none.
	original string
}

// publish is PublishAsync without a span.
func (p *Publisher) publish(ctx context.Context, topic string, payload []byte, opts *PublishOptions, done func(event.Receipt, error)) error {
	o := outgoing{PublishOptions: *opts, payload: payload}
	t, err := p.publishing.admit(ctx, topic, &o, p.client)
	if err != nil {
		return err
	}
	if p.publishing.conn.Closing() {
		return event.ErrClosed
	}
	if err := opts.Validate(); err != nil {
		return err
	}
	if err := o.checkAdded(topic, p.publishing.cloudSource(topic, t)); err != nil {
		return err
	}
	var at time.Time
	later := false
	if opts.Delayed() {
		at, later = opts.due(time.Now())
	}
	client := cmp.Or(opts.CountFor, p.client)
	if t == nil {
		if t, err = p.publishing.streams.Topic(ctx, topic, client); err != nil {
			return err
		}
		if o.broken {
			t.Obs.SchemaBroken(false)
		}
	}
	o.bytes = o.size()
	if err := p.publishing.byteRations.admit(p, t.Stream, &o, client); err != nil {
		return err
	}
	gates := gatesOf(t)
	if gates.derived != nil {
		if err := gates.derived.admit(payload, client); err != nil {
			return err
		}
	}
	switch {
	case gates.keys == nil || opts.Key == "":
	case opts.KeyExists:
		gates.keys.exists(opts.Key, opts.Tombstone)
	default:
		if err := gates.keys.admit(ctx, opts.Key, client, opts.Tombstone); err != nil {
			return err
		}
	}
	// A client has a ration of dead letters, from which is taken before, so that the client has no
	// more under way than that. What is not stored is given back.
	letter := t.Dead && conn.Rationed(client)
	if letter {
		if err := p.publishing.hooks.AdmitLetter(client, len(payload)); err != nil {
			return err
		}
		done = p.refunding(client, len(payload), done)
	}
	if later {
		err = p.schedule(ctx, t, &o, at, done)
	} else {
		err = p.send(ctx, t, &o, done)
	}
	if err != nil && letter {
		p.publishing.hooks.RefundLetter(client, len(payload))
	}
	return err
}

// refunding returns a done that gives back what AdmitLetter took for a letter that was not stored.
func (p *Publisher) refunding(client string, size int, done func(event.Receipt, error)) func(event.Receipt, error) {
	return func(r event.Receipt, err error) {
		if err != nil || r.Duplicate {
			p.publishing.hooks.RefundLetter(client, size)
		}
		done(r, err)
	}
}

// Admit checks an event that is to be published later, as PublishAsync would, as far as possible
// without asking the server. It checks the topic, the options, the size, the key that a compacted
// topic requires, and the schema, for which it may wait for some seconds. Where the topic's rule
// asks for schemas, Admit adds the version to opts.Headers, which it copies, so that the event is
// compared with the same version later.
func (p *Publisher) Admit(ctx context.Context, topic string, payload []byte, opts *PublishOptions) error {
	if err := opts.Validate(); err != nil {
		return err
	}
	o := outgoing{PublishOptions: *opts, payload: payload}
	t, err := p.publishing.admit(ctx, topic, &o, cmp.Or(opts.CountFor, p.client))
	if err != nil {
		return err
	}
	if err := o.checkAdded(topic, p.publishing.cloudSource(topic, t)); err != nil {
		return err
	}
	if p.publishing.cfg.Server != nil && p.publishing.streams.Headrooms.File.Low.Load() {
		return streams.StorageLow(nil) // what is published later waits on the same disk
	}
	o.stamp()
	opts.Headers = o.Headers
	return nil
}

// checkAdded reports an event that exceeds the limits of headers with those that the topic adds to
// it. Such an event could be stored, but not published again.
func (o *outgoing) checkAdded(topic, source string) error {
	if err := o.checkStamp(topic); err != nil {
		return err
	}
	return o.checkCloudEvent(topic, source)
}

// admit says what of a publish the topic does not take, before the topic is made for it. It returns
// the topic if this hub has met it, else nil. A comparison with a schema counts for the client.
func (p *publishing) admit(ctx context.Context, topic string, o *outgoing, client string) (t *streams.Topic, err error) {
	limit := p.conn.MaxPayload
	var compacted bool
	if t = p.streams.Known(topic); t != nil {
		limit, compacted = t.MaxPayload, t.Bucket != nil
	} else {
		if err := ValidTopic(topic); err != nil {
			return nil, err
		}
		rule := p.rules.Of(topic)
		compacted = rule.Compaction
		if rule.MaxPayload > 0 {
			limit = min(limit, rule.MaxPayload)
		}
	}
	if o.Wrapper {
		limit += wrapperMargin
	}
	if len(o.payload) > limit {
		return nil, &event.Error{Code: event.CodePublishFailed, Msg: fmt.Sprintf("the payload has %d bytes, at most %d are allowed", len(o.payload), limit), Err: event.ErrTooLarge}
	}
	if compacted && o.Key == "" {
		return nil, event.BadOptions("topic %s keeps the newest event of each key: give opts.key", topic)
	}
	if o.Delayed() {
		if err := o.validateDelay(time.Now(), p.limits.MaxDelay); err != nil {
			return nil, err
		}
	}
	if o.Tombstone && len(o.payload) > 0 && string(o.payload) != "null" {
		return nil, event.BadOptions("opts.tombstone removes a key: the payload must be null, or left out")
	}
	if t == nil {
		return nil, o.compare(ctx, p.schemas.Gate(topic, p.rules.Of(topic)), client, nil)
	}
	return t, o.compare(ctx, gatesOf(t).schema, client, t.Obs)
}

// compare compares an event with the schema of its topic, which gate has; nil: none.
func (o *outgoing) compare(ctx context.Context, gate *schemas.Gate, client string, obs event.TopicObserver) error {
	if gate == nil || o.Wrapper { // a dead letter has the payload of another topic
		return nil
	}
	e := event.Event{Headers: o.Headers, Tombstone: o.Tombstone, Payload: o.payload}
	stamp, broken, err := gate.Admit(ctx, &e, o.Brief, client, obs)
	o.version, o.broken = stamp, broken && obs == nil
	return err
}

// send is PublishAsync to a topic that takes the event.
func (p *Publisher) send(ctx context.Context, t *streams.Topic, o *outgoing, done func(event.Receipt, error)) error {
	if err := p.acquire(ctx, t.Stream); err != nil {
		return err
	}
	w, _ := inFlight.Get().(*flight)
	w.p, w.topic, w.done = p, t, done
	if err := w.fill(o); err != nil {
		p.release(t.Stream)
		w.free()
		return err
	}
	return p.transmit(ctx, w)
}

// transmit sends an event that has its place among the unconfirmed ones.
func (p *Publisher) transmit(ctx context.Context, w *flight) error {
	t := w.topic
	if !t.Stream.Ready[p.link.Index].Load() {
		return p.first(ctx, w)
	}
	w.sent = p.publishing.clock.Now()
	// the answer may come, or be given up, while the message is still being written
	w.users.Store(2)
	if err := p.link.Ask(&w.msg, w.sent-p.publishing.shortfall(ctx, w.sent), w); err != nil {
		p.release(t.Stream)
		w.free()
		t.Obs.PublishFailed()
		return notSent(err)
	}
	w.release()
	return nil
}

// shortfall returns by how much sooner than publishWait after now, in the bus's time, the context
// ends; 0 when it does not.
func (p *publishing) shortfall(ctx context.Context, now int64) int64 {
	end, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return max(0, now+int64(conn.PublishWait)-int64(end.Sub(p.clock.Base)))
}

// flight is an event on its way to the stream. They are pooled, with the message and its
// header.
type flight struct {
	p     *Publisher
	topic *streams.Topic
	done  func(event.Receipt, error)
	id    string
	sent  int64
	size  int64 // in the store
	msg   nats.Msg
	users atomic.Int32 // who still needs it: the sender and the answer

	// Most events have one header, their id, under one of two names: these headers are made once.
	idValue [1]string
	byHub   nats.Header
	byOwner nats.Header
}

var inFlight = sync.Pool{New: func() any {
	w := new(flight)
	w.byHub = nats.Header{headerID: w.idValue[:]}
	w.byOwner = nats.Header{headerMsgID: w.idValue[:]}
	return w
}}

func (w *flight) fill(o *outgoing) error {
	w.msg.Subject, w.msg.Data = w.topic.SubjectFor(o.Key), o.payload
	given := o.ID != ""
	if w.id = o.ID; !given {
		var err error
		if w.id, err = w.p.link.NewID(); err != nil {
			return &event.Error{Code: event.CodeInternal, Msg: "no id could be made", Err: err}
		}
	}
	w.idValue[0] = w.id
	switch plain := o.onlyID() && w.topic.Source == ""; {
	case plain && !given:
		w.msg.Header = w.byHub
	case plain && !w.topic.Stream.Family:
		w.msg.Header = w.byOwner
	default:
		w.msg.Header = o.header(w.topic, w.id, given)
	}
	if o.bytes == 0 { // an event of the hub's own, which was not admitted
		o.bytes = o.size()
	}
	w.size = o.bytes * w.topic.Stream.Copies
	w.topic.Stream.Headroom.Sent.Add(w.size)
	return nil
}

// Answer is called by the link with the stream's ack.
func (w *flight) Answer(reply *nats.Msg, err error) {
	p, s := w.p, w.topic.Stream
	w.done(p.publishing.confirmed(w.topic, w.id, reply, err, w.sent))
	w.release()
	p.release(s)
}

// release frees the event when its other user has released it too.
func (w *flight) release() {
	if w.users.Add(-1) == 0 {
		w.free()
	}
}

func (w *flight) free() {
	w.topic.Stream.Headroom.Answered.Add(w.size)
	w.msg.Subject, w.msg.Reply, w.msg.Header, w.msg.Data = "", "", nil, nil
	w.p, w.topic, w.done, w.id, w.idValue[0], w.size = nil, nil, nil, "", "", 0
	inFlight.Put(w)
}

// first sends the first publish to a stream over this connection, and waits for its answer: a
// stream that was just made may not be known everywhere yet, and sending again what was refused
// must not let a later publish overtake it.
func (p *Publisher) first(ctx context.Context, w *flight) error {
	t := w.topic
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		sent := p.publishing.clock.Now()
		reply, err := p.link.RequestMsg(ctx, &w.msg)
		if err == nil && conn.NoResponders(reply) && ctx.Err() == nil {
			select {
			case <-time.After(wait):
				continue
			case <-ctx.Done():
			}
		}
		r, err := p.publishing.confirmed(t, w.id, reply, err, sent)
		if err == nil {
			t.Stream.Ready[p.link.Index].Store(true)
		}
		p.publishing.conn.Apart(func() { // the caller may hold a lock that done takes
			w.done(r, err)
			w.free()
			p.release(t.Stream)
		})
		return nil
	}
}

// confirmed turns the answer to a publish into a receipt or an *Error.
func (p *publishing) confirmed(t *streams.Topic, id string, reply *nats.Msg, err error, sent int64) (event.Receipt, error) {
	fail := func(msg string, cause error) (event.Receipt, error) {
		t.Obs.PublishFailed()
		return event.Receipt{}, &event.Error{Code: event.CodePublishFailed, Msg: msg, Err: cause}
	}
	if err != nil {
		return fail("the event store did not confirm in time: the outcome is unknown; with opts.id it may be repeated safely", err)
	}
	if conn.NoResponders(reply) {
		p.streams.Forget(t.Stream)
		return fail("the event store has no leader for this topic now: nothing was stored, try again", nats.ErrNoResponders)
	}
	ack, err := conn.ParsePubAck(reply.Data, t.Stream.Name)
	if conn.KeyChanged(err) {
		return event.Receipt{}, event.ErrKeyChanged // no failure: it is what was asked for
	}
	if t.Stream.Keep != nil && beyond(err) {
		t.Obs.PublishFailed()
		return event.Receipt{}, t.Stream.Keep.Refused()
	}
	if refused, ok := errors.AsType[*conn.APIError](err); ok {
		if refused.ErrCode == errIDInProcess {
			return fail("the event store has not finished with an event of the same id: the outcome is unknown; repeat it with the id", err)
		}
		p.often.Log(p.conn.Ctx, slog.LevelWarn, "the stream refused an event", t.Name, slog.String("topic", t.Name), slog.Any("error", err))
		if streams.StoreFull(refused.ErrCode, refused.Description) {
			t.Obs.PublishFailed()
			t.Stream.Headroom.Set(true) // until NATS is asked again
			return event.Receipt{}, streams.StorageLow(err)
		}
		return fail("the event store refused the event: nothing was stored", err)
	}
	if strayed, ok := errors.AsType[*conn.StrayedError](err); ok {
		p.streams.Forget(t.Stream) // the next publish looks where the topic is
		p.often.Log(p.conn.Ctx, slog.LevelError, "another stream took an event: it has a subject of the topic, whose stream is gone", t.Name,
			slog.String("topic", t.Name), slog.String("stream", t.Stream.Name), slog.String("other", strayed.Stream))
		return fail("the event was stored outside the topic, which has lost its stream: nothing is in the topic", err)
	}
	if err != nil {
		return fail("the event store gave an answer that could not be read: the outcome is unknown", err)
	}
	if t.Stream.Keep != nil {
		t.Stream.Keep.OneStored()
	}
	if !ack.Duplicate {
		t.Stream.Published(ack.Seq, id)
	}
	t.Obs.Published(time.Duration(p.clock.Now() - sent))
	return event.Receipt{ID: id, Stream: ack.Stream, Sequence: ack.Seq, Duplicate: ack.Duplicate}, nil
}

func notSent(err error) error {
	return &event.Error{Code: event.CodePublishFailed, Msg: "the event store cannot be reached: nothing was stored, try again", Err: err}
}

// acquire waits until the stream and this Publisher have fewer unconfirmed publishes than they may
// have.
func (p *Publisher) acquire(ctx context.Context, s *streams.Stream) error {
	if limit := p.publishing.limits.SessionInFlight; !p.inFlight.TryAcquire(limit) {
		p.publishing.obs.LimitReached("session_in_flight")
		if err := p.inFlight.Acquire(ctx, limit); err != nil {
			return tooMany(err)
		}
	}
	select {
	case s.Slots <- struct{}{}:
		return nil
	default:
	}
	p.publishing.obs.LimitReached("publish_in_flight")
	select {
	case s.Slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		p.inFlight.Release()
		return tooMany(ctx.Err())
	}
}

func tooMany(err error) error {
	return &event.Error{Code: event.CodeOverloaded, Msg: "too many publishes wait for the event store: nothing was stored, try again", Err: err}
}

func (p *Publisher) release(s *streams.Stream) {
	<-s.Slots
	p.inFlight.Release()
}

// Flush waits until every publish of this Publisher has been answered, or returns the error of ctx.
func (p *Publisher) Flush(ctx context.Context) error { return p.inFlight.Empty(ctx) }

// Publish stores one event and returns once the stream has confirmed it. It may be called
// concurrently; concurrent calls have no order (use a Publisher for order). payload need not be
// JSON; see Publisher.PublishAsync, which also documents the errors. When ctx ends before the
// answer arrives, the *Error says that the outcome is unknown. A publish with PublishOptions.ID may
// then be repeated safely. If ctx has no deadline, Publish returns within 10 s.
func (b *Bus) Publish(ctx context.Context, topic string, payload []byte, opts PublishOptions) (event.Receipt, error) {
	return b.publishing.publish(ctx, topic, payload, opts)
}

// publish is Bus.Publish.
func (p *publishing) publish(ctx context.Context, topic string, payload []byte, opts PublishOptions) (event.Receipt, error) {
	return p.publishWait(ctx, func(done func(event.Receipt, error)) error {
		return p.publisher.PublishAsync(ctx, topic, payload, opts, done)
	})
}

// store stores an event of the hub's own with an id, which is not admitted, and waits until it is
// stored. original is the header of a dead letter that says where its event was stored, or "".
func (p *publishing) store(ctx context.Context, t *streams.Topic, payload []byte, id, original string) error {
	_, err := p.publishWait(ctx, func(done func(event.Receipt, error)) error {
		return p.publisher.send(ctx, t, &outgoing{PublishOptions: PublishOptions{ID: id}, payload: payload, original: original}, done)
	})
	return err
}

func (p *publishing) publishWait(ctx context.Context, send func(func(event.Receipt, error)) error) (event.Receipt, error) {
	type result struct {
		r   event.Receipt
		err error
	}
	ch := make(chan result, 1)
	if err := send(func(r event.Receipt, err error) { ch <- result{r, err} }); err != nil {
		return event.Receipt{}, err
	}
	select {
	case res := <-ch:
		return res.r, res.err
	case <-ctx.Done():
		return event.Receipt{}, &event.Error{Code: event.CodePublishFailed, Msg: "the caller did not wait for the event store: the outcome is unknown", Err: ctx.Err()}
	}
}
