package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"

	"eventhub/jetstream/jsonscan"
)

// PublishOptions are the optional fields of an event. The zero value is a plain event.
type PublishOptions struct {
	// ID makes the publish idempotent within the topic's duplicate window.
	ID string `json:"id,omitempty"`
	// TS is the record's ts in epoch milliseconds; nil leaves ts to the stream.
	TS       *int64            `json:"ts,omitempty"`
	Key      string            `json:"key,omitempty"`
	Headers  map[string]string `json:"headers,omitempty"`
	Tags     []string          `json:"tags,omitempty"`
	CausedBy []string          `json:"caused_by,omitempty"`
	SID      string            `json:"sid,omitempty"`
	// Tombstone removes Key from a compacted topic. The payload must then be nil or null.
	Tombstone bool `json:"tombstone,omitempty"`
	// DelayMS stores the event so many milliseconds later, and At at a time in epoch milliseconds.
	// Give one of them at most.
	DelayMS int64  `json:"delay_ms,omitempty"`
	At      *int64 `json:"at,omitempty"`
}

// Publish publishes one event and returns its id once the stream has stored the event, or once
// the event waits for its time. payload is
// JSON and arrives byte for byte; nil publishes null. If the hub refuses the event, the error is an
// *Error.
func (c *Conn) Publish(ctx context.Context, topic string, payload []byte, opts PublishOptions) (id string, err error) {
	type answer struct {
		id  string
		err error
	}
	answers := make(chan answer, 1)
	err = c.publish(ctx, topic, payload, opts, func(id string, err error) { answers <- answer{id, err} })
	if err != nil {
		return "", err
	}
	select {
	case a := <-answers:
		return a.id, a.err
	case <-ctx.Done():
		return "", fmt.Errorf("wire: publish: %w", context.Cause(ctx))
	}
}

// Tombstone removes a key from a compacted topic and returns the id of the event that does so: an
// event with that key and the payload null, which subscribers receive like any other. If the hub
// refuses the event, the error is an *Error.
func (c *Conn) Tombstone(ctx context.Context, topic, key string) (id string, err error) {
	return c.Publish(ctx, topic, nil, PublishOptions{Key: key, Tombstone: true})
}

// PublishAsync sends one event and returns. done is called once with the results of Publish. done
// must not block, because it runs on the reading goroutine. Events are stored in the order of the
// calls. PublishAsync waits while Options.PublishInFlight publishes are unanswered.
//
// If PublishAsync returns an error, nothing was sent, and done is not called.
func (c *Conn) PublishAsync(topic string, payload []byte, opts PublishOptions, done func(id string, err error)) error {
	return c.publish(context.Background(), topic, payload, opts, done)
}

func (c *Conn) publish(ctx context.Context, topic string, payload []byte, opts PublishOptions, done func(string, error)) error {
	if payload != nil && !jsonscan.Valid(payload) {
		return ErrPayload
	}
	var options []byte
	if !opts.idOnly() {
		var err error
		if options, err = json.Marshal(opts); err != nil {
			return fmt.Errorf("wire: encode publish options: %w", err)
		}
	}
	select {
	case c.slots <- struct{}{}:
	case <-c.done:
		return c.Err()
	case <-ctx.Done():
		return fmt.Errorf("wire: publish: %w", context.Cause(ctx))
	}
	_, err := c.send(func(b []byte) []byte {
		return publishFrame(b, topic, payload, opts.ID, options)
	}, call{slot: true, done: done})
	if err == nil {
		return nil
	}
	<-c.slots
	if errors.Is(err, net.ErrClosed) {
		<-c.done // is closed at once; Err then has the reason
		return c.Err()
	}
	return err
}

// publishFrame begins a PUBLISH. options are the encoded options, or nil if at most id is set.
func publishFrame(b []byte, topic string, payload []byte, id string, options []byte) []byte {
	b = appendField(append(b, `{"op":"PUBLISH"`...), "topic", topic)
	if payload != nil {
		b = append(append(b, `,"payload":`...), payload...)
	}
	switch {
	case options != nil:
		b = append(append(b, `,"opts":`...), options...)
	case id != "":
		b = append(appendString(append(b, `,"opts":{"id":`...), id), '}')
	}
	return b
}

// idOnly reports whether at most ID is set, which needs no encoder.
func (o *PublishOptions) idOnly() bool {
	return o.TS == nil && o.Key == "" && o.Headers == nil && o.Tags == nil && o.CausedBy == nil && o.SID == "" && !o.Tombstone && o.DelayMS == 0 && o.At == nil
}

// appendField appends a string field to an object that already has a field.
func appendField(b []byte, name, value string) []byte {
	b = append(b, `,"`...)
	b = append(b, name...)
	b = append(b, `":`...)
	return appendString(b, value)
}

// appendString appends s as a JSON string.
func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if s[i] < ' ' || s[i] >= 0x7f || s[i] == '"' || s[i] == '\\' {
			quoted, err := json.Marshal(s)
			if err != nil {
				return append(b, `""`...) // a string always has a JSON form
			}
			return append(b, quoted...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}
