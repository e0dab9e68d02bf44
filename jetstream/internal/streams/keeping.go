package streams

import (
	"cmp"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/topics"
)

// KeepOf is how many parts a bound is divided into, for how far a topic that rejects is filled and
// emptied.
const KeepOf = 8

// usualEvent is the size of an event for the number of publishes after which a topic is looked at.
// Where events are larger, a refusal brings the next look.
const usualEvent = 4 << 10

// keeping is what a hub knows of a topic that rejects. It belongs to a stream.
type keeping struct {
	wake   chan struct{} // of the bus
	every  int64         // publishes after which it is looked at
	stored atomic.Int64  // since the last look
	Due    atomic.Bool
	Age    time.Duration // 0: none
	// GroupAge is how long a group without members holds events.
	GroupAge time.Duration

	// For the goroutine that looks.
	Looked  int64
	Rests   int64 // after a failure: until when nothing is looked at
	Full    bool
	Ignored map[string]bool // consumers that hold nothing; bounded by those of the stream
}

// NewKeeping returns what is known of a stream by its rule, or nil if the topic does not reject.
func (s *Streams) NewKeeping(rule *topics.Rule, cfg *natsjs.StreamConfig) *keeping {
	if rule.OnFull != topics.OnFullReject || cfg.Discard != natsjs.DiscardNew {
		return nil
	}
	every := int64(1 << 20)
	if cfg.MaxMsgs > 0 {
		every = min(every, cfg.MaxMsgs/(2*KeepOf))
	}
	if cfg.MaxBytes > 0 {
		every = min(every, cfg.MaxBytes/(2*KeepOf)/usualEvent)
	}
	return &keeping{wake: s.KeepNow, every: max(every, 1), Age: rule.MaxAge, GroupAge: cmp.Or(rule.GroupAge, topics.DefaultGroupAge), Ignored: make(map[string]bool)}
}

// OneStored counts an event that the stream has stored.
func (k *keeping) OneStored() {
	if k.stored.Add(1)%k.every == 0 {
		k.soon()
	}
}

// soon has the topic looked at.
func (k *keeping) soon() {
	if k.Due.Swap(true) {
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Refused is what a publisher is told. The log says once that the topic is full.
func (k *keeping) Refused() error {
	k.soon()
	return &event.Error{Code: event.CodeTopicFull, Msg: "the topic is full, and groups have not acknowledged its oldest events: nothing was stored, try again later"}
}

// SeenEvery is how often it is noted that a group has a member.
func (k *keeping) SeenEvery() time.Duration { return min(k.GroupAge/4, time.Hour) }

// Beyond reports whether a stream refused a message because of its bounds, and not for want of disk
// space.
func Beyond(err error) bool {
	refused, ok := errors.AsType[*conn.APIError](err)
	return ok && refused.ErrCode == ErrCodeStoreFailed && strings.HasPrefix(refused.Description, "maximum ")
}
