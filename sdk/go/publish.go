package eventhub

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"sync"

	"eventhub/jetstream/jsonscan"
	"eventhub/sdk/go/wire"
)

// PublishOptions are the optional fields of an event. The zero value is a plain event. Without an
// ID the client makes a UUIDv7, so that it can repeat a publish safely.
type PublishOptions = wire.PublishOptions

// DefaultManyInFlight is how many events PublishMany has on their way at a time.
const DefaultManyInFlight = 256

// Outgoing is an event for PublishMany.
type Outgoing struct {
	Payload any
	Options PublishOptions
}

// Publish publishes an event, and returns its id when the hub has stored the event. The payload is
// encoded as JSON; a json.RawMessage is published byte for byte.
//
// While there is no connection, the event waits. After a break, an event without an answer is sent
// again under the same id, so it is stored once. Where sending again could store the event twice,
// the error has CodeOutcomeUnknown. If ctx ends, the event is taken back, or the outcome is unknown
// if the event had been sent already. Every error is an *Error.
func (c *Client) Publish(ctx context.Context, topic string, payload any, opts PublishOptions) (id string, err error) {
	type answer struct {
		id  string
		err error
	}
	if ctx.Err() != nil {
		return "", aborted(ctx)
	}
	answers := make(chan answer, 1)
	item, failure := c.pub.prepare(topic, payload, opts, func(id string, err error) { answers <- answer{id, err} })
	if failure == nil {
		failure = c.pub.enqueue(item)
	}
	if failure != nil {
		return "", failure
	}
	select {
	case a := <-answers:
		return a.id, a.err
	case <-ctx.Done():
	}
	if failure := c.pub.abandon(ctx, item); failure != nil {
		return "", failure
	}
	a := <-answers
	return a.id, a.err
}

// PublishAsync publishes an event and does not wait for the hub. done is called once, with the
// results of Publish; it must not block. Events are sent in the order of the calls.
//
// PublishAsync waits while the buffer is full (Options.BufferEvents, BufferBytes). If it returns an
// error, nothing was sent, and done is not called. ctx bounds this wait only.
func (c *Client) PublishAsync(ctx context.Context, topic string, payload any, opts PublishOptions, done func(id string, err error)) error {
	item, failure := c.pub.prepare(topic, payload, opts, done)
	if failure == nil {
		failure = c.enqueue(ctx, item)
	}
	if failure != nil {
		return failure
	}
	return nil
}

// enqueue waits for room.
func (c *Client) enqueue(ctx context.Context, item *pending) *Error {
	for {
		if ctx.Err() != nil {
			return aborted(ctx)
		}
		failure := c.pub.enqueue(item)
		if failure == nil || failure.Code != CodeBufferFull {
			return failure
		}
		if failure := c.pub.awaitRoom(ctx, item); failure != nil {
			return failure
		}
	}
}

// PublishMany publishes the events of a sequence, several at a time, and returns their ids in
// order. It asks for an event only when there is room for one, and sends in the order of the
// sequence.
//
// After the first failure no further event is taken. PublishMany then returns when those on their
// way have their answers; the id of an event that is not known to be stored is "".
func (c *Client) PublishMany(ctx context.Context, topic string, events iter.Seq[Outgoing]) (ids []string, err error) {
	m := &many{client: c, topic: topic, slots: make(chan struct{}, DefaultManyInFlight), flying: make(map[int]*pending)}
	for event := range events {
		if !m.publish(ctx, event) {
			break
		}
	}
	return m.wait(ctx)
}

// many is a PublishMany that runs.
type many struct {
	client *Client
	topic  string
	slots  chan struct{} // an entry for each publish without an answer

	mu     sync.Mutex
	ids    []string
	flying map[int]*pending // by index in ids
	first  error
}

// publish sends an event, and reports whether another may follow.
func (m *many) publish(ctx context.Context, event Outgoing) bool {
	select {
	case m.slots <- struct{}{}:
	case <-ctx.Done():
		m.fail(aborted(ctx))
		return false
	}
	m.mu.Lock()
	at, failed := len(m.ids), m.first != nil
	if failed {
		m.mu.Unlock()
		<-m.slots
		return false
	}
	m.ids = append(m.ids, "")
	m.mu.Unlock()
	item, failure := m.client.pub.prepare(m.topic, event.Payload, event.Options, func(id string, err error) { m.answered(at, id, err) })
	if failure == nil {
		m.mu.Lock()
		m.flying[at] = item
		m.mu.Unlock()
		failure = m.client.enqueue(ctx, item)
	}
	if failure != nil {
		m.answered(at, "", failure)
		return false
	}
	return true
}

func (m *many) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.first == nil {
		m.first = err
	}
}

func (m *many) answered(at int, id string, err error) {
	if err != nil {
		m.fail(err)
	}
	m.mu.Lock()
	m.ids[at] = id
	delete(m.flying, at)
	m.mu.Unlock()
	<-m.slots
}

// wait waits for all answers. When ctx ends, it takes back what was not sent.
func (m *many) wait(ctx context.Context) ([]string, error) {
	done := ctx.Done()
	for range cap(m.slots) {
		select {
		case m.slots <- struct{}{}:
		case <-done:
			m.abandon(ctx)
			m.slots <- struct{}{}
			done = nil
		}
	}
	return m.ids, m.first
}

func (m *many) abandon(ctx context.Context) {
	m.mu.Lock()
	flying := maps.Clone(m.flying)
	m.mu.Unlock()
	for at, item := range flying {
		if failure := m.client.pub.abandon(ctx, item); failure != nil {
			m.answered(at, "", failure)
		}
	}
}

// encode returns the JSON form of a payload.
func encode(payload any) ([]byte, *Error) {
	switch raw := payload.(type) {
	case json.RawMessage:
		if !jsonscan.Valid(raw) {
			return nil, newError(CodeInvalid, "the payload is not valid JSON", nil)
		}
		return bytes.Clone(raw), nil // the caller may use the bytes again
	case []byte:
		return nil, newError(CodeInvalid, "a payload of type []byte is ambiguous; use json.RawMessage for JSON, or a string", nil)
	}
	if v, ok := payload.(validator); ok {
		if err := v.Validate(); err != nil {
			return nil, invalidPayload(err)
		}
	}
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(payload); err != nil {
		return nil, newError(CodeInvalid, fmt.Sprintf("the payload has no JSON form: %v", err), err)
	}
	return bytes.TrimSuffix(text.Bytes(), []byte{'\n'}), nil
}

// validator is what a payload's type may implement. Publishes are checked before they are sent, and
// events of a Topic before they are handled.
type validator interface{ Validate() error }

func invalidPayload(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok && e.Code == CodeInvalid {
		return e
	}
	return newError(CodeInvalid, "invalid payload: "+err.Error(), err)
}
