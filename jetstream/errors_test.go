package jetstream

import (
	"errors"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestFailuresThatPass tells refusals, which would be repeated, from failures that pass: a dead
// letter waits for a cluster that has no leader.
func TestFailuresThatPass(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want bool
	}{
		{&apiError{Code: 400, ErrCode: errCodeTooLarge}, true},
		{&apiError{Code: 503, ErrCode: errCodeStoreFailed}, true},
		{&apiError{Code: 503, ErrCode: 10008, Description: "JetStream system temporarily unavailable"}, false},
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
