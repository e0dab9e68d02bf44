package jetstream

import (
	"slices"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/quota"
)

// letterRations are what clients may cause of dead letters, in bytes. The methods may be called
// concurrently.
type letterRations struct {
	*core
	rates, shares *quota.Set
}

// letterRation is one of them.
type letterRation struct {
	limit string // its name
	set   *quota.Set
}

func newLetterRations(c *core) *letterRations {
	l := c.limits
	return &letterRations{
		core: c, rates: quota.New(float64(l.DeadLetterRate), l.DeadLetterBurst, l.Topics, nil),
		shares: quota.New(float64(l.DeadLetterShare)/publish.ShareTime.Seconds(), l.DeadLetterShare, l.Topics, nil),
	}
}

func (r *letterRations) each() [2]letterRation {
	return [...]letterRation{{"dead_letter_rate", r.rates}, {"dead_letter_share", r.shares}}
}

// refund gives back what admit took for an event that was not stored.
func (r *letterRations) refund(client string, size int) {
	for _, one := range r.each() {
		one.set.GiveBack(client, size+deadOverhead)
	}
}

// admit counts an event that a client itself publishes to a dlq topic, or returns the refusal.
func (r *letterRations) admit(client string, size int) error {
	taken := r.each()
	slices.Reverse(taken[:]) // the share, which takes days to come back, is not taken from in vain
	for i, one := range taken {
		if wait, back := one.set.Reserve(client, size+deadOverhead); wait > 0 {
			back()
			for _, before := range taken[:i] {
				before.set.GiveBack(client, size+deadOverhead)
			}
			r.obs.LimitReached(one.limit)
			return &event.Error{Code: event.CodeRateLimited, Msg: "this client has caused as many bytes of dead letters as it may (" + one.limit + "): nothing was stored, try again later", Wait: wait}
		}
	}
	return nil
}
