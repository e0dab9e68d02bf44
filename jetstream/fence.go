package jetstream

import (
	"time"

	"eventhub/jetstream/native"
)

// fence holds the times that keep a hub from settling what the server has given to another (see
// ARCHITECTURE.md, "Fencing"). All are derived from the consumer's AckWait.
type fence struct {
	ackWait time.Duration
	// a delivery may be settled until then, counted from the server's last sign of life for it
	usable time.Duration
	touch  time.Duration // from then on the hub asks the server to wait longer
	retry  time.Duration // an unanswered touch is sent again after this
	// while a question is unanswered for longer, nothing is sent about deliveries
	silence time.Duration
	// no lease begins when the consumer was last known to exist longer ago
	fresh time.Duration
}

// freshLimit bounds fence.fresh: how long a seek waits for leases of before. The hub asks consumers
// of which it holds something every second at the rarest.
const freshLimit = 3 * time.Second

// margin is how much earlier than the server the hub counts a delivery as lost.
func margin(ackWait time.Duration) time.Duration { return native.Margin(ackWait) }

func newFence(ackWait time.Duration) fence {
	m := margin(ackWait)
	return fence{ackWait: ackWait, usable: ackWait - m, touch: ackWait - 2*m, retry: m / 4, silence: m / 5, fresh: min(freshLimit, ackWait-m)}
}

// stallLimit is how long the process may stand still before the hub gives up all that it holds:
// what lay in socket buffers meanwhile looks fresh, and it must be younger than the margin of the
// fence.
func stallLimit(ackWait time.Duration) time.Duration { return min(2*time.Second, margin(ackWait)*3/5) }
