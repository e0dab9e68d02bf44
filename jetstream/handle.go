package jetstream

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/quota"
)

// MaxHandle is the most bytes of a handle.
const MaxHandle = 768

const (
	// handleVersion is the first byte of a handle.
	handleVersion = 1
	// handleMAC is how many bytes of the HMAC-SHA256 a handle carries.
	handleMAC = 16
	// handleFixed is the size of what precedes the names: the version, the id of the key, the lease
	// and the hub.
	handleFixed = 1 + 4 + 8 + hubName
	// hubName is the size of the name of a hub, which is a NUID.
	hubName = 22
	// hubInbox is what the name of a hub becomes a subject with. Hubs may use inboxes in any case.
	hubInbox = "_INBOX."
)

var (
	// ErrBadHandle is returned for a handle that no hub of this NATS has made.
	ErrBadHandle = errors.New("jetstream: not a handle of this hub")
	// ErrHubSilent is returned when the hub that holds a lease did not answer in time. The
	// settlement may have happened; it may be repeated.
	ErrHubSilent = errors.New("jetstream: the hub that holds the lease does not answer")
)

// Handle names one delivery of one event: a later delivery of the same event has another handle.
// Held.Handle makes the text of one, and Handles.Read reads it, on any hub of the same NATS. It is
// signed, so that Topic and Group can be trusted, and names the hub that holds the lease.
type Handle struct {
	// Topic and Group are those of the delivery.
	Topic, Group string

	hub   string // the rest of its inbox
	lease uint64
	key   uint32 // with which it was signed
}

// Handle returns the handle of the delivery. Make it before BeginSend, and only with
// SubscribeOptions.Handles. It is valid until the lease has ended.
func (h *Held) Handle() string {
	d := (*Delivery)(h)
	s := d.m.sub
	s.mu.Lock()
	for d.handle == 0 {
		d.handle = rand.Uint64() //nolint:gosec // ChaCha8, seeded by the system; and the handle is signed
	}
	lease := d.handle
	s.mu.Unlock()
	return s.bus.handles.sign(d.Event.Topic, s.group, lease)
}

// Handles settles deliveries by their handles. It is a small value that costs nothing to create.
// Its methods may be called concurrently.
type Handles struct{ table *handleTable }

// HandlesOf returns the Handles of a bus.
func HandlesOf(b *Bus) Handles { return Handles{b.handles} }

// Read reads the texts of handles, and returns a handle or an error for each. The error is
// ErrBadHandle if no hub has made the handle, and ErrNotLeased if its key is gone, and its lease
// with it. Read asks NATS for keys that this hub does not know, once for all texts.
func (h Handles) Read(ctx context.Context, texts []string) ([]Handle, []error) {
	now := time.Now()
	handles, errs := make([]Handle, len(texts)), make([]error, len(texts))
	for i, text := range texts {
		handles[i], errs[i] = h.read(ctx, text, now)
	}
	return handles, errs
}

// read reads one text. A key that was not in the bucket after the time does not exist.
func (h Handles) read(ctx context.Context, text string, now time.Time) (Handle, error) {
	if len(text) > MaxHandle {
		return Handle{}, ErrBadHandle
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(raw) < handleFixed+handleMAC || raw[0] != handleVersion {
		return Handle{}, ErrBadHandle
	}
	body, mac := raw[:len(raw)-handleMAC], raw[len(raw)-handleMAC:]
	id := binary.BigEndian.Uint32(body[1:])
	key, err := h.table.keys.find(ctx, id, now)
	switch {
	case err != nil:
		return Handle{}, err
	case key == nil:
		return Handle{}, event.ErrNotLeased
	case !hmac.Equal(mac, macOf(key, body)):
		return Handle{}, ErrBadHandle
	}
	topic, group, ok := strings.Cut(string(body[handleFixed:]), "\x00")
	if !ok {
		return Handle{}, ErrBadHandle
	}
	return Handle{Topic: topic, Group: group, key: id, lease: binary.BigEndian.Uint64(body[5:]), hub: string(body[13:handleFixed])}, nil
}

func macOf(key, body []byte) []byte {
	m := hmac.New(sha256.New, key)
	_, _ = m.Write(body) // never fails
	return m.Sum(nil)[:handleMAC]
}

// handleTable holds the leases of this hub that have handles, and the keys that sign them.
type handleTable struct {
	*core
	hub      string // its name for other hubs
	keys     *handleKeys
	leases   leaseTable
	forwards *quota.Places // of settlements under way to other hubs, by hub
}

func newHandleTable(c *core) *handleTable {
	h := &handleTable{core: c, hub: strings.TrimPrefix(nats.NewInbox(), hubInbox), forwards: newForwards()}
	h.keys = &handleKeys{core: c, known: make(map[uint32][]byte)}
	h.leases.live = make(map[uint64]*Delivery)
	h.leases.settled = make(map[uint64]SettleOp)
	return h
}

// sign makes the text of a handle. Neither name can hold a NUL.
func (h *handleTable) sign(topic, group string, lease uint64) string {
	id, key := h.keys.newest()
	b := make([]byte, 0, handleFixed+len(topic)+1+len(group)+handleMAC)
	b = append(b, handleVersion)
	b = binary.BigEndian.AppendUint32(b, id)
	b = binary.BigEndian.AppendUint64(b, lease)
	b = append(b, h.hub...)
	b = append(b, topic...)
	b = append(b, 0)
	b = append(b, group...)
	return base64.RawURLEncoding.EncodeToString(append(b, macOf(key, b)...))
}

// SettleOp is what becomes of a delivery.
type SettleOp uint8

// The ways to settle a delivery by its handle.
const (
	SettleAck SettleOp = iota + 1
	SettleNack
	SettleExtend // which is no end of the lease
)

// A Settlement is what is to become of deliveries.
type Settlement struct {
	Op SettleOp
	// Reason and Delay are those of Delivery.Nack. Only the first 1 KiB of Reason is kept.
	Reason string
	Delay  time.Duration
	// Extend is that of Delivery.Extend.
	Extend time.Duration
}

// Settle settles deliveries that this hub or others hold, and returns one error for each: nil,
// ErrNotLeased when the lease has ended or its hub is gone, which settles nothing, or ErrHubSilent.
// A delivery that was settled in the same way a short time ago counts as settled, so that a request
// may be repeated. Settle returns within 5 s.
func (h Handles) Settle(ctx context.Context, handles []Handle, what Settlement) []error {
	own := h.table
	what.Reason = native.ShortReason(what.Reason) // NATS would not carry any length to other hubs
	errs := make([]error, len(handles))
	away := make(map[string][]int) // by hub
	for i, handle := range handles {
		if handle.hub == own.hub {
			errs[i] = leased(own.leases.settle(handle.lease, what))
		} else {
			away[handle.hub] = append(away[handle.hub], i)
		}
	}
	if len(away) > 0 {
		own.forward(ctx, handles, away, what, errs)
	}
	return errs
}
