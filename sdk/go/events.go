package eventhub

import (
	"context"
	"iter"
)

// Events joins a group and gives its events one after the other, until ctx ends or the loop is
// left. To ask for the next event acknowledges the one before, unless it is settled already.
// Leaving the loop leaves the group, and gives back the event at hand unless Delivery.Ack was
// called.
//
// An error is the last of the sequence: the hub refused or ended the subscription, or the client
// has given up. The end of ctx, and Close, end the sequence without an error. Concurrency and
// Manual of the options are not used.
func (c *Client) Events(ctx context.Context, topic, group string, opts SubscribeOptions) iter.Seq2[*Delivery, error] {
	return func(yield func(*Delivery, error) bool) {
		type turn struct {
			delivery *Delivery
			done     chan struct{}
		}
		turns := make(chan turn)
		opts.Concurrency, opts.Manual = 1, false
		sub, err := c.Subscribe(ctx, topic, group, opts, func(ctx context.Context, d *Delivery) error {
			t := turn{d, make(chan struct{})}
			select {
			case turns <- t:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			<-t.done // the loop tells, when it is left as well
			return nil
		})
		if err != nil {
			if ctx.Err() == nil {
				yield(nil, err)
			}
			return
		}
		leave := func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
			defer cancel()
			_ = sub.Unsubscribe(ctx) // the event goes to others, later if the hub does not answer
		}
		for {
			select {
			case t := <-turns:
				goOn := false
				func() {
					defer func() {
						if !goOn { // also when the loop's body panics
							leave()
						}
						close(t.done)
					}()
					goOn = yield(t.delivery, nil)
				}()
				if !goOn {
					return
				}
			case <-sub.Done():
				if err := sub.Err(); err != nil {
					yield(nil, err)
				}
				return
			}
		}
	}
}
