package jetstream

import (
	"fmt"
	"slices"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/topics"
)

const (
	// presenceSubject is the subject of core NATS at which hubs tell one another who is present.
	presenceSubject = "eventhub.presence"
	// presenceMessages and presenceBytes bound what waits for this hub to read it. Beyond them,
	// messages are lost, and told again.
	presenceMessages = 4096
	presenceBytes    = 16 << 20
)

// Hubs lets the hubs of a NATS tell one another who is present at topics whose rule has Presence.
// Messages are not stored, and may be lost. A Hubs is a small value that costs nothing to create.
// Its methods may be called concurrently.
type Hubs struct{ core *core }

// HubsOf returns the Hubs of a bus.
func HubsOf(b *Bus) Hubs { return Hubs{b.core} }

// Tell sends a message to all hubs that listen, this one included.
func (h Hubs) Tell(message []byte) error {
	if !h.present() {
		return nil
	}
	if err := h.core.conn.JS.Conn().Publish(presenceSubject, message); err != nil {
		return fmt.Errorf("jetstream: tell the other hubs: %w", err)
	}
	return nil
}

// Listen calls f with the messages of all hubs, one at a time, until stop is called. It does
// nothing unless a rule has Presence.
func (h Hubs) Listen(f func(message []byte)) (stop func(), err error) {
	if !h.present() {
		return func() {}, nil
	}
	nc := h.core.conn.JS.Conn()
	sub, err := nc.Subscribe(presenceSubject, func(m *nats.Msg) { f(m.Data) })
	if err == nil {
		err = sub.SetPendingLimits(presenceMessages, presenceBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: listen to the other hubs: %w", err)
	}
	return func() { _ = sub.Unsubscribe() }, nil
}

// present reports whether a rule has Presence.
func (h Hubs) present() bool {
	return slices.ContainsFunc(h.core.rules, func(r topics.Rule) bool { return r.Presence })
}
