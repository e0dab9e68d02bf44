package jetstream

import (
	"context"
	"crypto/hmac"
	"encoding/binary"
	"encoding/json"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/panics"
	"eventhub/jetstream/quota"
)

const (
	// forwardWait is how long another hub may take to settle deliveries.
	forwardWait = 3 * time.Second
	// forwardTotal is how long a settlement waits for its turn and for the other hubs.
	forwardTotal = 5 * time.Second
	// forwards ("forwards") is how many settlements may be on their way to other hubs, and
	// forwardsPerHub how many to one: a hub that stands still must not delay those to others.
	forwards, forwardsPerHub = 256, 32
	// forwardsWaiting is how many settlements to one hub may be under way or wait for their turn.
	forwardsWaiting = 256
)

// What another hub answers for each lease.
const (
	forwardSettled = '1'
	forwardOver    = '0'
)

// forwarded is what one hub asks another. The key of the handles signs it.
type forwarded struct {
	Leases []uint64      `json:"leases"`
	Op     SettleOp      `json:"op"`
	Reason string        `json:"reason,omitempty"`
	Delay  time.Duration `json:"delay,omitempty"`
	Extend time.Duration `json:"extend,omitempty"`
}

// forward has other hubs settle the leases that they hold, and fills in errs.
func (h *handleTable) forward(ctx context.Context, handles []Handle, away map[string][]int, what Settlement, errs []error) {
	ctx, cancel := context.WithTimeout(ctx, forwardTotal)
	defer cancel()
	hubs := slices.Collect(maps.Keys(away))
	_ = concurrently(len(hubs), func(i int) error {
		hub, which := hubs[i], away[hubs[i]]
		answer, err := h.ask(ctx, hub, handles, which, what)
		for n, at := range which {
			switch {
			case err != nil:
				errs[at] = err
			case answer[n] != forwardSettled:
				errs[at] = event.ErrNotLeased
			}
		}
		return nil
	})
}

// ask has one other hub settle leases. The answer has a byte for each.
func (h *handleTable) ask(ctx context.Context, hub string, handles []Handle, which []int, what Settlement) ([]byte, error) {
	if !h.forwards.Enter(ctx, hub, forwardsWaiting, func() { h.obs.LimitReached("forwards") }) {
		return nil, ErrHubSilent
	}
	defer h.forwards.Leave(hub)
	req := forwarded{Op: what.Op, Reason: what.Reason, Delay: what.Delay, Extend: what.Extend}
	for _, i := range which {
		req.Leases = append(req.Leases, handles[i].lease)
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	id := handles[which[0]].key
	key, err := h.keys.find(ctx, id, time.Time{})
	if err != nil || key == nil {
		return nil, ErrHubSilent
	}
	msg := binary.BigEndian.AppendUint32(nil, id)
	msg = append(append(msg, macOf(key, body)...), body...)
	ctx, cancel := context.WithTimeout(ctx, forwardWait)
	defer cancel()
	reply, err := h.conn.Link().Request(ctx, hubInbox+hub, msg)
	switch {
	case err != nil:
		h.log.DebugContext(ctx, "no answer from the hub that holds a lease; the client may settle again", slog.String("hub", hub), slog.Any("error", err))
		return nil, ErrHubSilent
	case conn.NoResponders(reply):
		return nil, event.ErrNotLeased // the hub is gone, or cut off, and its leases with it
	case len(reply.Data) != len(which):
		return nil, ErrHubSilent
	}
	return reply.Data, nil
}

// listen takes what other hubs forward, over all connections: one of them may be cut.
func (h *handleTable) listen() error {
	for _, l := range h.conn.Links {
		if _, err := l.NC.QueueSubscribe(hubInbox+h.hub, "hub", h.surviving("settlement of another hub", h.receive)); err != nil {
			return err
		}
	}
	return nil
}

// surviving returns a handler of questions over NATS whose panics leave a question without an
// answer.
func (c *core) surviving(name string, answer nats.MsgHandler) nats.MsgHandler {
	return func(m *nats.Msg) { panics.Run(c.often.By("func"), name, func() { answer(m) }) }
}

// receive settles what another hub forwards. It does not block. A request that it cannot trust gets
// no answer.
func (h *handleTable) receive(m *nats.Msg) {
	if len(m.Data) < 4+handleMAC || m.Reply == "" {
		return
	}
	id, mac, body := binary.BigEndian.Uint32(m.Data), m.Data[4:4+handleMAC], m.Data[4+handleMAC:]
	h.keys.mu.Lock()
	key := h.keys.known[id]
	h.keys.mu.Unlock()
	var req forwarded
	if key == nil || !hmac.Equal(mac, macOf(key, body)) || json.Unmarshal(body, &req) != nil {
		h.log.Debug("ignored a settlement from another hub: it is not signed with a key of the hubs")
		return
	}
	what := Settlement{Op: req.Op, Reason: req.Reason, Delay: req.Delay, Extend: req.Extend}
	answer := make([]byte, len(req.Leases))
	for i, lease := range req.Leases {
		if answer[i] = forwardOver; h.leases.settle(lease, what) {
			answer[i] = forwardSettled
		}
	}
	_ = m.Respond(answer) // fails only when the connection is down
}

// newForwards makes the places of settlements on their way to other hubs.
func newForwards() *quota.Places { return quota.NewPlaces(forwards, forwardsPerHub) }
