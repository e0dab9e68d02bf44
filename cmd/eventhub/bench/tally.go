package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// tally counts the events of a round. Its methods may be called concurrently.
type tally struct {
	want  int64
	seen  []atomic.Uint64 // a bit per event; nil counts every delivery
	count atomic.Int64
	again atomic.Int64
	done  chan struct{} // closed when the tally is complete
	fail  chan error    // receives at most one error that makes success impossible
}

func newTally(want int) *tally {
	return &tally{want: int64(want), seen: make([]atomic.Uint64, (want+63)/64), done: make(chan struct{}), fail: make(chan error, 1)}
}

// newCount returns a tally that counts every delivery.
func newCount(want int) *tally {
	t := newTally(want)
	t.seen = nil
	return t
}

// mark counts the event with the given number once.
func (t *tally) mark(seq int) {
	if t.seen != nil {
		if seq < 0 || seq >= int(t.want) {
			t.failed(fmt.Errorf("event %d was delivered, but only %d were published", seq, t.want))
			return
		}
		bit := uint64(1) << (seq % 64)
		if t.seen[seq/64].Or(bit)&bit != 0 {
			t.again.Add(1)
			return
		}
	}
	if t.count.Add(1) == t.want {
		close(t.done)
	}
}

// failed ends the round with an error. Only the first error is kept.
func (t *tally) failed(err error) {
	select {
	case t.fail <- err:
	default:
	}
}

// waitAll waits until all tallies are complete. It returns an error if one fails, if none makes
// progress for stallAfter, or if ctx ends.
func waitAll(ctx context.Context, fail <-chan error, tallies ...*tally) error {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	last, since := int64(-1), time.Now()
	for _, t := range tallies {
		for complete := false; !complete; {
			select {
			case <-t.done:
				complete = true
			case err := <-fail:
				return err
			case err := <-t.fail:
				return err
			case <-ctx.Done():
				return ctx.Err()
			case <-ticker.C:
				var sum, want int64
				for _, t := range tallies {
					sum += t.count.Load()
					want += t.want
				}
				if sum != last {
					last, since = sum, time.Now()
				} else if time.Since(since) > stallAfter {
					return fmt.Errorf("%d of %d events arrived; none in the last %v", sum, want, stallAfter)
				}
			}
		}
	}
	return nil
}
