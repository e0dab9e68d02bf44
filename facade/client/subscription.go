package client

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
)

// SubscribeOptions are the opts of SUBSCRIBE; zero fields are left to the hub's defaults.
type SubscribeOptions struct {
	// From is where a new group starts: latest (default), earliest, ts or afterId.
	From string `json:"from,omitempty"`
	// TS is in epoch milliseconds, AfterID an event's id; for From ts and afterId.
	TS      *int64 `json:"ts,omitempty"`
	AfterID string `json:"afterId,omitempty"`
	// BatchSize is the most events asked of the server at a time.
	BatchSize int `json:"batchSize,omitempty"`
	// MaxInFlight is the most events leased at a time.
	MaxInFlight int `json:"maxInFlight,omitempty"`
	// AckTimeoutMS is the length of a lease in milliseconds.
	AckTimeoutMS int64 `json:"ackTimeoutMs,omitempty"`
	// MaxAttempts is the attempt whose failure dead-letters an event; a pointer to 0 means never.
	MaxAttempts *int `json:"maxAttempts,omitempty"`
	// Topics are further topics of the same subscription.
	Topics []string `json:"topics,omitempty"`
	// GroupTTLMS makes a new group disappear when it has had no member for so long.
	GroupTTLMS int64 `json:"groupTtlMs,omitempty"`
}

// A subscription's queue has room for every lease that lives, and a few that have expired.
const (
	defaultInFlight = 100
	maxInFlight     = 10_000
	queueSlack      = 16
)

type subKey struct{ topic, group string }

// Subscription is this connection's membership of a group. Its methods may be called concurrently.
type Subscription struct {
	client       *Client
	topic, group string
	topicJSON    []byte // as strings of JSON, as the hub sends them
	groupJSON    []byte
	queue        chan Event
	ended        chan struct{}
	endOnce      sync.Once
}

// Subscribe joins the group on the topic. handler is called for each event, in the order of arrival and never
// concurrently for one subscription, on a goroutine of its own; it settles the event with Ack or Nack, then or later.
// A handler that blocks delays its own subscription, and the whole connection once more events are waiting than the
// hub leases at a time (which takes leases that expired unhandled).
//
// A refusal by the hub is an *Error. The subscription ends with Unsubscribe or with the connection.
func (c *Client) Subscribe(ctx context.Context, topic, group string, opts SubscribeOptions, handler func(Event)) (*Subscription, error) {
	options, err := json.Marshal(opts)
	if err != nil {
		return nil, fmt.Errorf("client: subscribe options: %w", err)
	}
	inFlight := opts.MaxInFlight
	if inFlight <= 0 {
		inFlight = defaultInFlight
	}
	s := &Subscription{
		client: c,
		topic:  topic,
		group:  group,
		// Another form of the same string, should a hub send one, is found too, by a longer way.
		topicJSON: appendString(nil, topic),
		groupJSON: appendString(nil, group),
		queue:     make(chan Event, min(inFlight, maxInFlight)+queueSlack),
		ended:     make(chan struct{}),
	}
	if err := c.join(s, handler); err != nil {
		return nil, err
	}
	err = c.request(ctx, func(b []byte) []byte {
		return append(append(s.frame(b, "SUBSCRIBE"), `,"opts":`...), options...)
	})
	if err != nil {
		c.forget(s)
		return nil, err
	}
	return s, nil
}

// join makes the subscription known before the hub is asked: its first event follows the OK at once.
func (c *Client) join(s *Subscription, handler func(Event)) error {
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

func (c *Client) forget(s *Subscription) {
	c.mu.Lock()
	if key := (subKey{s.topic, s.group}); c.subs[key] == s {
		delete(c.subs, key)
	}
	c.mu.Unlock()
	s.end()
}

func (s *Subscription) run(handler func(Event)) {
	for {
		select {
		case <-s.ended:
			return
		default:
		}
		select { // alone it costs a third of the one below
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

func (s *Subscription) end() { s.endOnce.Do(func() { close(s.ended) }) }

// Unsubscribe leaves the group. Events that are not settled go to other members at once. A handler that runs is not
// waited for; it is not called again.
func (s *Subscription) Unsubscribe(ctx context.Context) error {
	err := s.control(ctx, "UNSUBSCRIBE")
	s.client.forget(s)
	return err
}

// Pause stops the delivery; leases that were given stay valid.
func (s *Subscription) Pause(ctx context.Context) error { return s.control(ctx, "PAUSE") }

// Resume goes on after Pause.
func (s *Subscription) Resume(ctx context.Context) error { return s.control(ctx, "RESUME") }

// AckIDs settles up to 1,000 events in one frame and waits for the hub's answer.
func (s *Subscription) AckIDs(ctx context.Context, ids []string) error {
	list, err := json.Marshal(ids)
	if err != nil {
		return fmt.Errorf("client: ids: %w", err)
	}
	return s.client.request(ctx, func(b []byte) []byte {
		return append(append(s.frame(b, "ACK"), `,"ids":`...), list...)
	})
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
