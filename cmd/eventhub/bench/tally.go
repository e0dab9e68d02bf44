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
	seen  []atomic.Uint64 // a bit for each event; nil: every delivery counts
	count atomic.Int64
	again atomic.Int64
	done  chan struct{} // closed when all are there
	fail  chan error    // receives once why the round cannot succeed
}

func newTally(want int) *tally {
	return &tally{want: int64(want), seen: make([]atomic.Uint64, (want+63)/64), done: make(chan struct{}), fail: make(chan error, 1)}
}

// newCount is a tally of deliveries, whatever they are.
func newCount(want int) *tally {
	t := newTally(want)
	t.seen = nil
	return t
}

// mark counts the event with this number, once.
func (t *tally) mark(seq int) {
	if t.seen != nil {
		if seq < 0 || seq >= int(t.want) {
			t.failed(fmt.Errorf("event %d was delivered, and %d were published", seq, t.want))
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

// failed ends the round. Only the first reason counts.
func (t *tally) failed(err error) {
	select {
	case t.fail <- err:
	default:
	}
}

// waitAll waits until the tallies are complete. It fails when one fails, when none makes progress for stallAfter, and
// with ctx.
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
					return fmt.Errorf("%d of %d events arrived, and none in the last %v", sum, want, stallAfter)
				}
			}
		}
	}
	return nil
}
