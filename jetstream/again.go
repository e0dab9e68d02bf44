package jetstream

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
)

// A question about a stream or a consumer is asked anew after askFirst without an answer, then
// after twice as long each time, up to askMax.
const (
	askFirst = 500 * time.Millisecond
	askMax   = time.Second
)

// again asks NATS something that may be asked twice, and asks anew while no answer comes, until ctx
// ends, or publishWait at the latest. Nobody answers a question about a stream or a consumer that
// has no leader in that moment, and nobody answers it later: a client that asked once would wait
// in vain for all of its time. To make a stream or a consumer that is there already with the same
// settings is no error.
func again[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	for wait := askFirst; ; wait = min(2*wait, askMax) {
		asking, stop := context.WithTimeout(ctx, wait)
		answer, err := ask(asking)
		stop()
		unanswered := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout)
		if !unanswered || ctx.Err() != nil {
			return answer, err
		}
	}
}
