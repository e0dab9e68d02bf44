package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream/internal/conn"
)

// askAgain returns the first answer to any of its questions, and ends the others before it returns.
func TestAskAgain(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for _, c := range []struct {
		name     string
		answered int // number of the question that is answered; 0: none
		err      error
		took     time.Duration // of that answer
		asked    int64
		after    time.Duration
	}{
		{name: "at once", answered: 1, asked: 1},
		{name: "an error", answered: 1, err: refused, asked: 1},
		{name: "late", answered: 1, took: 700 * time.Millisecond, asked: 2, after: 700 * time.Millisecond},
		{name: "the second", answered: 2, took: 100 * time.Millisecond, asked: 2, after: 600 * time.Millisecond},
		{name: "the fourth, by an error", answered: 4, err: refused, asked: 4, after: 2500 * time.Millisecond},
		{name: "none", err: context.DeadlineExceeded, asked: 4, after: 3 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var asked, open atomic.Int64
				begin := time.Now()
				got, err := conn.AskAgain(t.Context(), 3*time.Second, func(ctx context.Context) (int, error) {
					open.Add(1)
					defer open.Add(-1)
					if n := int(asked.Add(1)); n == c.answered {
						time.Sleep(c.took)
						return n, c.err
					}
					<-ctx.Done()
					return 0, fmt.Errorf("cut off: %w", ctx.Err())
				})
				if got != c.answered || !errors.Is(err, c.err) || (c.err == nil) != (err == nil) {
					t.Errorf("got %d, %v; want %d, %v", got, err, c.answered, c.err)
				}
				if after, asked, open := time.Since(begin), asked.Load(), open.Load(); asked != c.asked || open != 0 || after != c.after {
					t.Errorf("%d questions, %d of them open, after %v; want %d after %v", asked, open, after, c.asked, c.after)
				}
			})
		})
	}
}

// askAgain ends as soon as the context of its caller does.
func TestAskAgainUntilItsCallerEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin := time.Now()
		_, err := conn.AskAgain(ctx, time.Minute, func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		})
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took != time.Second {
			t.Errorf("%v after %v", err, took)
		}
	})
}
