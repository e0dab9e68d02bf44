package jetstream

import (
	"cmp"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

// keepOf is the whole of a bound of which keepHigh and keepLow are parts.
const keepOf = 8

// usualEvent is the size of an event for the number of publishes after which a topic is looked at.
// Where events are larger, a refusal brings the next look.
const usualEvent = 4 << 10

// keeping is what a hub knows of a topic that rejects. It belongs to a stream.
type keeping struct {
	wake   chan struct{} // of the bus
	every  int64         // publishes after which it is looked at
	stored atomic.Int64  // since the last look
	due    atomic.Bool
	age    time.Duration // 0: none
	// groupAge is how long a group without members holds events.
	groupAge time.Duration

	// For the goroutine that looks.
	looked  int64
	rests   int64 // after a failure: until when nothing is looked at
	full    bool
	ignored map[string]bool // consumers that hold nothing; bounded by those of the stream
}

func (s *streams) newKeeping(rule *topics.Rule, cfg *natsjs.StreamConfig) *keeping {
	if rule.OnFull != topics.OnFullReject || cfg.Discard != natsjs.DiscardNew {
		return nil
	}
	every := int64(1 << 20)
	if cfg.MaxMsgs > 0 {
		every = min(every, cfg.MaxMsgs/(2*keepOf))
	}
	if cfg.MaxBytes > 0 {
		every = min(every, cfg.MaxBytes/(2*keepOf)/usualEvent)
	}
	return &keeping{wake: s.keepNow, every: max(every, 1), age: rule.MaxAge, groupAge: cmp.Or(rule.GroupAge, topics.DefaultGroupAge), ignored: make(map[string]bool)}
}

// oneStored counts an event that the stream has stored.
func (k *keeping) oneStored() {
	if k.stored.Add(1)%k.every == 0 {
		k.soon()
	}
}

// soon has the topic looked at.
func (k *keeping) soon() {
	if k.due.Swap(true) {
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// refused is what a publisher is told. The log says once that the topic is full (sayFull).
func (k *keeping) refused() error {
	k.soon()
	return &event.Error{Code: event.CodeTopicFull, Msg: "the topic is full, and groups have not acknowledged its oldest events: nothing was stored, try again later"}
}

// seenEvery is how often it is noted that a group has a member.
func (k *keeping) seenEvery() time.Duration { return min(k.groupAge/4, time.Hour) }
