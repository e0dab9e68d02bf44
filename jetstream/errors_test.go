package jetstream

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// An event that is repeated before the copies of its stream have the first is not refused: the
// first may be stored.
func TestTwoPublishesOfOneID(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: threeServers(t), Replicas: 3})
	publishAll(t, b, "orders", "0")
	p := b.NewPublisher()
	type outcome struct {
		r   event.Receipt
		err error
	}
	for early, n := 0, 1; early == 0; n++ {
		came := make(chan outcome, 2)
		for range 2 {
			if err := p.PublishAsync(t.Context(), "orders", []byte("1"), PublishOptions{ID: strconv.Itoa(n)}, func(r event.Receipt, err error) { came <- outcome{r, err} }); err != nil {
				t.Fatal(err)
			}
		}
		stored := 0
		for range 2 {
			switch o := <-came; {
			case o.err == nil:
				stored++
			case Refused(o.err) || !strings.Contains(o.err.Error(), "the outcome is unknown"):
				t.Errorf("the second is told: %v", o.err)
				fallthrough
			default:
				early++
			}
		}
		r, err := b.Publish(t.Context(), "orders", []byte("1"), PublishOptions{ID: strconv.Itoa(n)})
		if err != nil || !r.Duplicate || stored == 0 {
			t.Fatalf("the third of %d: %+v, %v; %d were answered", n, r, err, stored)
		}
	}
}

// TestFailuresThatPass tells refusals, which would be repeated, from failures that pass: a dead
// letter waits for a cluster that has no leader.
func TestFailuresThatPass(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want bool
	}{
		{&conn.APIError{Code: 400, ErrCode: conn.ErrCodeTooLarge}, true},
		{&conn.APIError{Code: 503, ErrCode: streams.ErrCodeStoreFailed}, true},
		{&conn.APIError{Code: 503, ErrCode: 10008, Description: "JetStream system temporarily unavailable"}, false},
		{&conn.APIError{Code: 409, ErrCode: 10158, Description: "duplicate message id is in process"}, false},
		{nats.ErrNoResponders, false},
		{errors.New("another"), false},
		{nil, false},
	} {
		for _, err := range []error{c.err, fmt.Errorf("jetstream: read of stream orders: %w", c.err)} {
			if got := Refused(err); got != c.want {
				t.Errorf("Refused(%v) = %v", err, got)
			}
		}
	}
}
