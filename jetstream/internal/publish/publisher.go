package publish

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

// Publisher publishes for one client, in order. It is behind jetstream.Publisher, whose methods of
// the same names say what these do, and who may call them.
type Publisher struct {
	shared *Publishers
	link   *conn.Link
	client string // whose new topics are counted; "" for the hub itself

	inFlight conn.Gate    // of unanswered publishes
	advance  atomic.Int64 // bytes taken from the client's rations and not used
}

// CountFor makes the topics that this Publisher creates from now on count for a client.
func (p *Publisher) CountFor(client string) {
	p.client = client
	p.advance.Store(0)
}

// Publish is PublishAsync that waits.
func (p *Publisher) Publish(ctx context.Context, topic string, payload []byte, opts *Options) (event.Receipt, error) {
	return p.shared.wait(ctx, func(done func(event.Receipt, error)) error {
		return p.PublishAsync(ctx, topic, payload, opts, done)
	})
}

func (p *Publishers) newPublisher(client string) *Publisher {
	return &Publisher{shared: p, link: p.Conn.Link(), client: client}
}

// PublishAsync sends an event. After a nil error, done is called once. It keeps neither payload nor
// opts.
func (p *Publisher) PublishAsync(ctx context.Context, topic string, payload []byte, opts *Options, done func(event.Receipt, error)) error {
	if p.shared.Tracer != nil {
		return p.publishTraced(ctx, topic, payload, opts, done)
	}
	return p.publish(ctx, topic, payload, opts, done)
}

// publish is PublishAsync without a span.
func (p *Publisher) publish(ctx context.Context, topic string, payload []byte, opts *Options, done func(event.Receipt, error)) error {
	o := outgoing{Options: *opts, payload: payload}
	t, err := p.shared.admit(ctx, topic, &o, p.client)
	if err != nil {
		return err
	}
	if p.shared.Conn.Closing() {
		return event.ErrClosed
	}
	if err := opts.Validate(); err != nil {
		return err
	}
	if err := o.checkAdded(topic, p.shared.cloudSource(topic, t)); err != nil {
		return err
	}
	var at time.Time
	later := false
	if opts.Delayed() {
		at, later = opts.due(time.Now())
	}
	client := cmp.Or(opts.CountFor, p.client)
	if t == nil {
		if t, err = p.shared.Streams.Topic(ctx, topic, client); err != nil {
			return err
		}
		if o.broken {
			t.Obs.SchemaBroken(false)
		}
	}
	o.bytes = o.size()
	if err := p.shared.byteRations.admit(p, t.Stream, &o, client); err != nil {
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
		if err := p.shared.Hooks.AdmitLetter(client, len(payload)); err != nil {
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
		p.shared.Hooks.RefundLetter(client, len(payload))
	}
	return err
}

// refunding returns a done that gives back what AdmitLetter took for a letter that was not stored.
func (p *Publisher) refunding(client string, size int, done func(event.Receipt, error)) func(event.Receipt, error) {
	return func(r event.Receipt, err error) {
		if err != nil || r.Duplicate {
			p.shared.Hooks.RefundLetter(client, size)
		}
		done(r, err)
	}
}

// Admit checks an event that is to be published later, and stamps opts with the version of its
// schema.
func (p *Publisher) Admit(ctx context.Context, topic string, payload []byte, opts *Options) error {
	if err := opts.Validate(); err != nil {
		return err
	}
	o := outgoing{Options: *opts, payload: payload}
	t, err := p.shared.admit(ctx, topic, &o, cmp.Or(opts.CountFor, p.client))
	if err != nil {
		return err
	}
	if err := o.checkAdded(topic, p.shared.cloudSource(topic, t)); err != nil {
		return err
	}
	if p.shared.Embedded && p.shared.Streams.Headrooms.File.Low.Load() {
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
func (p *Publishers) admit(ctx context.Context, topic string, o *outgoing, client string) (t *streams.Topic, err error) {
	limit := p.Conn.MaxPayload
	var compacted bool
	if t = p.Streams.Known(topic); t != nil {
		limit, compacted = t.MaxPayload, t.Bucket != nil
	} else {
		if err := event.ValidTopic(topic); err != nil {
			return nil, err
		}
		rule := p.Rules.Of(topic)
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
		if err := o.validateDelay(time.Now(), p.Limits.MaxDelay); err != nil {
			return nil, err
		}
	}
	if o.Tombstone && len(o.payload) > 0 && string(o.payload) != "null" {
		return nil, event.BadOptions("opts.tombstone removes a key: the payload must be null, or left out")
	}
	if t == nil {
		return nil, o.compare(ctx, p.Schemas.Gate(topic, p.Rules.Of(topic)), client, nil)
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
	w.sent = p.shared.Clock.Now()
	// the answer may come, or be given up, while the message is still being written
	w.users.Store(2)
	if err := p.link.Ask(&w.msg, w.sent-p.shared.shortfall(ctx, w.sent), w); err != nil {
		p.release(t.Stream)
		w.free()
		t.Obs.PublishFailed()
		return notSent(err)
	}
	w.release()
	return nil
}

// shortfall returns by how much sooner than conn.PublishWait after now, in the bus's time, the
// context ends; 0 when it does not.
func (p *Publishers) shortfall(ctx context.Context, now int64) int64 {
	end, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return max(0, now+int64(conn.PublishWait)-int64(end.Sub(p.Clock.Base)))
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
	w.done(p.shared.confirmed(w.topic, w.id, reply, err, w.sent))
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
		sent := p.shared.Clock.Now()
		reply, err := p.link.RequestMsg(ctx, &w.msg)
		if err == nil && conn.NoResponders(reply) && ctx.Err() == nil {
			select {
			case <-time.After(wait):
				continue
			case <-ctx.Done():
			}
		}
		r, err := p.shared.confirmed(t, w.id, reply, err, sent)
		if err == nil {
			t.Stream.Ready[p.link.Index].Store(true)
		}
		p.shared.Conn.Apart(func() { // the caller may hold a lock that done takes
			w.done(r, err)
			w.free()
			p.release(t.Stream)
		})
		return nil
	}
}

// confirmed turns the answer to a publish into a receipt or an *Error.
func (p *Publishers) confirmed(t *streams.Topic, id string, reply *nats.Msg, err error, sent int64) (event.Receipt, error) {
	fail := func(msg string, cause error) (event.Receipt, error) {
		t.Obs.PublishFailed()
		return event.Receipt{}, &event.Error{Code: event.CodePublishFailed, Msg: msg, Err: cause}
	}
	if err != nil {
		return fail("the event store did not confirm in time: the outcome is unknown; with opts.id it may be repeated safely", err)
	}
	if conn.NoResponders(reply) {
		p.Streams.Forget(t.Stream)
		return fail("the event store has no leader for this topic now: nothing was stored, try again", nats.ErrNoResponders)
	}
	ack, err := conn.ParsePubAck(reply.Data, t.Stream.Name)
	if conn.KeyChanged(err) {
		return event.Receipt{}, event.ErrKeyChanged // no failure: it is what was asked for
	}
	if t.Stream.Keep != nil && streams.Beyond(err) {
		t.Obs.PublishFailed()
		return event.Receipt{}, t.Stream.Keep.Refused()
	}
	if refused, ok := errors.AsType[*conn.APIError](err); ok {
		if refused.ErrCode == errIDInProcess {
			return fail("the event store has not finished with an event of the same id: the outcome is unknown; repeat it with the id", err)
		}
		p.Often.Log(p.Conn.Ctx, slog.LevelWarn, "the stream refused an event", t.Name, slog.String("topic", t.Name), slog.Any("error", err))
		if streams.StoreFull(refused.ErrCode, refused.Description) {
			t.Obs.PublishFailed()
			t.Stream.Headroom.Set(true) // until NATS is asked again
			return event.Receipt{}, streams.StorageLow(err)
		}
		return fail("the event store refused the event: nothing was stored", err)
	}
	if strayed, ok := errors.AsType[*conn.StrayedError](err); ok {
		p.Streams.Forget(t.Stream) // the next publish looks where the topic is
		p.Often.Log(p.Conn.Ctx, slog.LevelError, "another stream took an event: it has a subject of the topic, whose stream is gone", t.Name,
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
	t.Obs.Published(time.Duration(p.Clock.Now() - sent))
	return event.Receipt{ID: id, Stream: ack.Stream, Sequence: ack.Seq, Duplicate: ack.Duplicate}, nil
}

func notSent(err error) error {
	return &event.Error{Code: event.CodePublishFailed, Msg: "the event store cannot be reached: nothing was stored, try again", Err: err}
}

// acquire waits until the stream and this Publisher have fewer unconfirmed publishes than they may
// have.
func (p *Publisher) acquire(ctx context.Context, s *streams.Stream) error {
	if limit := p.shared.Limits.SessionInFlight; !p.inFlight.TryAcquire(limit) {
		p.shared.Obs.LimitReached("session_in_flight")
		if err := p.inFlight.Acquire(ctx, limit); err != nil {
			return tooMany(err)
		}
	}
	select {
	case s.Slots <- struct{}{}:
		return nil
	default:
	}
	p.shared.Obs.LimitReached("publish_in_flight")
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

// Store stores an event of the hub's own with an id, which is not admitted, and waits until it is
// stored. original is the header of a dead letter that says where its event was stored, or "".
func (p *Publishers) Store(ctx context.Context, t *streams.Topic, payload []byte, id, original string) error {
	_, err := p.wait(ctx, func(done func(event.Receipt, error)) error {
		return p.own.send(ctx, t, &outgoing{Options: Options{ID: id}, payload: payload, original: original}, done)
	})
	return err
}

func (p *Publishers) wait(ctx context.Context, send func(func(event.Receipt, error)) error) (event.Receipt, error) {
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
