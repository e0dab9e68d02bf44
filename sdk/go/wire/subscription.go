package wire

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"sync"
)

// SubscribeOptions are the opts of SUBSCRIBE. Zero fields take the hub's defaults.
type SubscribeOptions struct {
	// From is where a new group starts: "latest", "earliest", "ts" or "afterId". Groups that exist
	// ignore it. Defaults to "latest".
	From string `json:"from,omitempty"`
	// TS is in epoch milliseconds, for From "ts". AfterID is an event's id, for From "afterId".
	TS      *int64 `json:"ts,omitempty"`
	AfterID string `json:"afterId,omitempty"`
	// BatchSize is the most events that the hub requests from NATS at a time.
	BatchSize int `json:"batchSize,omitempty"`
	// MaxInFlight is the most events leased at a time.
	MaxInFlight int `json:"maxInFlight,omitempty"`
	// AckTimeoutMS is the length of a lease in milliseconds.
	AckTimeoutMS int64 `json:"ackTimeoutMs,omitempty"`
	// MaxAttempts is the attempt whose failure dead-letters an event. A pointer to 0 means never.
	MaxAttempts *int `json:"maxAttempts,omitempty"`
	// Topics are further topics of the same subscription.
	Topics []string `json:"topics,omitempty"`
	// GroupTTLMS is how long, in milliseconds, a new group without members exists.
	GroupTTLMS int64 `json:"groupTtlMs,omitempty"`
	// Ordered is "key" for an ordered group: of each key, one event at a time is leased, in order.
	// Slots is the number of slots of a new one; the hub's default is 64.
	Ordered string `json:"ordered,omitempty"`
	Slots   int    `json:"slots,omitempty"`
	// SchemaVersion is the version of the schema in which events come.
	SchemaVersion SchemaVersion `json:"schemaVersion,omitzero"`
	// OnAssign, when not nil, is called when the slots of a member of an ordered group change:
	// before the first event of a new slot, and after the last lease of a lost one. It runs on the
	// goroutine that reads the connection, so it must neither block nor wait for answers.
	OnAssign func(Assignment) `json:"-"`
	// Extra are options that this version does not know.
	Extra map[string]any `json:"-"`
}

// SchemaVersion is a version of a schema, from 1 on, or LatestVersion.
type SchemaVersion int

// LatestVersion is the latest version at the moment of each event.
const LatestVersion SchemaVersion = -1

// MarshalJSON returns what the hub takes: a number, or "latest".
func (v SchemaVersion) MarshalJSON() ([]byte, error) {
	if v == LatestVersion {
		return []byte(`"latest"`), nil
	}
	return strconv.AppendInt(nil, int64(v), 10), nil
}

// An Assignment is all slots of a member of an ordered group on one topic. Epoch rises with each
// assignment of the group.
type Assignment struct {
	Topic string `json:"topic"`
	Group string `json:"group"`
	Slots []int  `json:"slots"`
	Epoch uint64 `json:"epoch"`
}

func (o *SubscribeOptions) encode() ([]byte, error) {
	known, err := json.Marshal(o)
	if err != nil || len(o.Extra) == 0 {
		return known, err
	}
	extra, err := json.Marshal(o.Extra)
	if err != nil || len(known) == len("{}") {
		return extra, err
	}
	return append(append(known[:len(known)-1], ','), extra[1:]...), nil
}

// The queue of a subscription has room for all live leases, and for a few that have expired.
const (
	defaultInFlight = 100
	maxInFlight     = 10_000
	queueSlack      = 16
)

type subKey struct{ topic, group string }

// Subscription is this connection's membership in a group. Its methods may be called concurrently.
type Subscription struct {
	client       *Conn
	topic, group string
	topicJSON    []byte // topic and group as JSON strings, as the hub sends them
	groupJSON    []byte
	options      []byte
	topics       []string // further ones
	assigned     func(Assignment)
	open         bool // the hub has accepted it; owned by the reader
	queue        chan Event
	ended        chan struct{}
	endOnce      sync.Once
}

// Subscribe joins the group on the topic. It calls handler for each event, in the order of arrival
// and never concurrently for one subscription, on a goroutine of its own. The event may be settled
// with Ack or Nack in the handler or later. A handler that blocks delays its own subscription. It
// delays the whole connection once more events wait than the hub leases at a time, which takes
// leases that expired unhandled.
//
// If the hub refuses the SUBSCRIBE, the error is an *Error. The subscription ends with Unsubscribe,
// with the connection, or when somebody deletes the group.
func (c *Conn) Subscribe(ctx context.Context, topic, group string, opts SubscribeOptions, handler func(Event)) (*Subscription, error) {
	answers := make(chan error, 1)
	s, err := c.Join(topic, group, opts, handler)
	if err != nil {
		return nil, err
	}
	if err := s.Start(func(err error) { answers <- err }); err != nil {
		return nil, err
	}
	select {
	case err = <-answers:
	case <-ctx.Done():
		err = fmt.Errorf("wire: wait for the hub's answer: %w", context.Cause(ctx))
	}
	if err != nil {
		c.forget(s)
		return nil, err
	}
	return s, nil
}

// Join is the first half of Subscribe: it reserves the name. Start sends the SUBSCRIBE.
func (c *Conn) Join(topic, group string, opts SubscribeOptions, handler func(Event)) (*Subscription, error) {
	options, err := opts.encode()
	if err != nil {
		return nil, fmt.Errorf("wire: encode subscribe options: %w", err)
	}
	inFlight := opts.MaxInFlight
	if inFlight <= 0 {
		inFlight = defaultInFlight
	}
	s := &Subscription{
		client: c,
		topic:  topic,
		group:  group,
		// A hub may send the same names in another JSON form; subOf then decodes them and uses its
		// map.
		topicJSON: appendString(nil, topic),
		groupJSON: appendString(nil, group),
		options:   options,
		topics:    opts.Topics,
		assigned:  opts.OnAssign,
		queue:     make(chan Event, min(inFlight, maxInFlight)+queueSlack),
		ended:     make(chan struct{}),
	}
	return s, c.join(s, handler)
}

// Start sends the SUBSCRIBE. done receives the answer, and must not block. If the hub refuses the
// SUBSCRIBE, or if Start returns an error, the subscription has ended.
func (s *Subscription) Start(done func(error)) error {
	_, err := s.client.send(s.subscribeFrame, call{done: func(_ string, err error) {
		if err != nil {
			s.client.forget(s)
		} else {
			s.open = true
		}
		done(err)
	}})
	if err != nil {
		s.client.forget(s)
	}
	return err
}

func (s *Subscription) subscribeFrame(b []byte) []byte {
	return append(append(s.frame(b, "SUBSCRIBE"), `,"opts":`...), s.options...)
}

// join registers the subscription before the SUBSCRIBE is sent, because the first event follows the
// OK at once.
func (c *Conn) join(s *Subscription, handler func(Event)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(); err != nil {
		return err
	}
	key := subKey{s.topic, s.group}
	if c.subs[key] != nil {
		return &Error{Code: "already_subscribed", Msg: s.topic + "::" + s.group}
	}
	c.subs[key] = s
	c.wg.Go(func() { s.run(handler) })
	return nil
}

func (c *Conn) forget(s *Subscription) {
	c.mu.Lock()
	if key := (subKey{s.topic, s.group}); c.subs[key] == s {
		delete(c.subs, key)
	}
	c.mu.Unlock()
	s.end()
}

// ended ends the subscription of that name, topic::group, or the broadcast of that topic.
func (c *Conn) ended(name string) {
	c.mu.Lock()
	delete(c.casts, name)
	var over *Subscription
	for key, s := range c.subs {
		if key.topic+"::"+key.group == name {
			over = s
		}
	}
	c.mu.Unlock()
	if over != nil {
		c.forget(over)
	}
}

func (s *Subscription) run(handler func(Event)) {
	for {
		select {
		case <-s.ended:
			return
		default:
		}
		select { // without the other case it costs a third of the select below
		case ev := <-s.queue:
			handler(ev)
			continue
		default:
		}
		select {
		case <-s.ended:
			return
		case ev := <-s.queue:
			handler(ev)
		}
	}
}

// Done is closed when the subscription has ended: by Unsubscribe, with the connection, or because
// somebody has deleted the group.
func (s *Subscription) Done() <-chan struct{} { return s.ended }

func (s *Subscription) end() { s.endOnce.Do(func() { close(s.ended) }) }

// Unsubscribe leaves the group. Unsettled events go to other members at once. Unsubscribe does not
// wait for a running handler, and the handler is not called again.
func (s *Subscription) Unsubscribe(ctx context.Context) error {
	err := s.control(ctx, "UNSUBSCRIBE")
	s.client.forget(s)
	return err
}

// UnsubscribeAsync is Unsubscribe, and done receives the answer. done must not block.
func (s *Subscription) UnsubscribeAsync(done func(error)) error {
	err := s.ControlAsync("UNSUBSCRIBE", done)
	s.client.forget(s)
	return err
}

// ControlAsync sends PAUSE or RESUME. done receives the answer, and must not block.
func (s *Subscription) ControlAsync(op string, done func(error)) error {
	return s.ask(func(b []byte) []byte { return s.frame(b, op) }, done)
}

// ask sends a frame whose answer done receives. If ask returns an error, done is not called.
func (s *Subscription) ask(build func([]byte) []byte, done func(error)) error {
	_, err := s.client.send(build, call{done: func(_ string, err error) { done(err) }})
	return err
}

// Pause stops the delivery of events. Leases stay valid.
func (s *Subscription) Pause(ctx context.Context) error { return s.control(ctx, "PAUSE") }

// Resume continues the delivery after Pause.
func (s *Subscription) Resume(ctx context.Context) error { return s.control(ctx, "RESUME") }

// AckIDs settles up to 1,000 events with one frame and waits for the hub's answer.
func (s *Subscription) AckIDs(ctx context.Context, ids []string) error {
	return s.client.request(ctx, s.ackMany(ids))
}

func (s *Subscription) control(ctx context.Context, op string) error {
	return s.client.request(ctx, func(b []byte) []byte { return s.frame(b, op) })
}

// frame begins a frame of this subscription.
func (s *Subscription) frame(b []byte, op string) []byte {
	b = append(b, `{"op":"`...)
	b = append(b, op...)
	b = append(b, '"')
	b = appendField(b, "topic", s.topic)
	return appendField(b, "group", s.group)
}
