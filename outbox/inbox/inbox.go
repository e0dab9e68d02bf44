// Package inbox lets a consumer handle each event once, although an event may be delivered several
// times: when a lease expires while a handler runs, when an acknowledgement is lost, or when a
// process or a server dies.
//
// A store remembers which events each group has handled, for 7 days unless configured otherwise. An
// event is known by its topic, the group and its id. There are two stores:
//
//   - SQL marks an event in the handler's own transaction. The effects of the handler in that
//     database and the mark are committed together, so each event has its effects exactly once,
//     whatever dies in between. Use it where the effects are rows of a SQLite or PostgreSQL
//     database.
//   - KV marks an event in a bucket of NATS after the handler has returned. Two handlers never run
//     for the same event at the same time, and a handled event is not handled again. But a process
//     that dies, stands still for long or loses NATS between the effects and the mark lets the
//     event be handled once more. Use KV where the effects lie outside a database and may be
//     repeated safely: give the event's id along as an idempotency key where the other side takes
//     one.
//
// Handle of either store wraps a handler for Bus.Consume:
//
//	bus.Consume(ctx, "orders.placed", "billing", opts, store.Handle("billing", handler))
//
// A redelivery after the mark is acknowledged without a call of the handler. A handler that returns
// an error leaves no mark: the event comes again as always, and becomes a dead letter after its
// last attempt. A dead letter that is put back for the group keeps its id and has no mark, so it is
// handled.
//
// The time for which marks are kept must be longer than an event can come again: longer than the
// topic keeps events, if groups are moved back (Group.Seek). A group that is moved back over events
// that it has handled does not handle them again; use another name for the group in Handle to
// handle them once more.
package inbox

import (
	"cmp"
	"fmt"
	"time"
)

// DefaultTTL is how long an event is remembered by default.
const DefaultTTL = 7 * 24 * time.Hour

// minTTL is the shortest time for which an event can be remembered.
const minTTL = time.Second

func validTTL(ttl time.Duration) (time.Duration, error) {
	if ttl = cmp.Or(ttl, DefaultTTL); ttl < minTTL {
		return 0, fmt.Errorf("TTL %v: must be at least %v", ttl, minTTL)
	}
	return ttl, nil
}

// failure is an error of a store. Its text may end up in a dead letter, which subscribers read, so
// it has no cause.
type failure struct {
	what string
	err  error
}

func (f *failure) Error() string { return "inbox: " + f.what }
func (f *failure) Unwrap() error { return f.err }
