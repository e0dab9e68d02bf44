package cputime_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream/cputime"
)

// TestRation charges two clients. Each has its own ration, and may owe time.
func TestRation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reached := make(map[string]int)
		r := cputime.New(500*time.Millisecond, 2, 10, func(limit string) { reached[limit]++ })
		r.Charge("a", cputime.Burst)
		if owes := r.Owes("a"); owes > time.Millisecond || len(reached) > 0 {
			t.Errorf("a client within the burst owes %v, %v", owes, reached)
		}
		r.Charge("a", time.Hour) // counts for 400 ms
		if owes := r.Owes("a"); owes.Round(time.Millisecond) != 800*time.Millisecond || reached[cputime.LimitTime] != 1 {
			t.Errorf("a client that owes 400 ms of 500 ms a second has to wait %v, %v", owes, reached)
		}
		if owes := r.Owes("b"); owes != 0 {
			t.Errorf("another client owes %v", owes)
		}
		began := time.Now()
		if err := r.Await(t.Context(), "a"); err != nil || time.Since(began).Round(time.Millisecond) != 800*time.Millisecond {
			t.Errorf("waited %v, %v", time.Since(began), err)
		}
		r.Charge("a", cputime.Burst)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := r.Await(ctx, "a"); err == nil {
			t.Error("waited for longer than the context")
		}
	})
}

// TestPlaces has a client that owes time wait for a place while another has it.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := cputime.New(500*time.Millisecond, 2, 10, func(string) {})
		r.Charge("a", cputime.Burst)
		r.Charge("a", cputime.Burst)
		if err := r.Enter(t.Context(), "b", 1); err != nil {
			t.Fatal("no place for a client that owes nothing", err)
		}
		if err := r.Enter(t.Context(), "b", 1); !errors.Is(err, cputime.ErrPlaces) {
			t.Error("more calls than may wait", err)
		}
		var wg sync.WaitGroup
		began := time.Now()
		wg.Go(func() {
			if err := r.Enter(t.Context(), "a", 2); err != nil || time.Since(began).Round(time.Millisecond) != 200*time.Millisecond {
				t.Errorf("a client that owes time had a place after %v", time.Since(began))
			}
			r.Leave("a")
		})
		synctest.Wait()
		r.Rest("b")
		r.Leave("b")
		wg.Wait()
		r.Charge("a", cputime.Burst)
		r.Charge("a", cputime.Burst)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := r.Enter(ctx, "a", 2); !errors.Is(err, cputime.ErrOwes) {
			t.Error("entered after the end of the context", err)
		}
		if !r.TryEnter("b") {
			t.Error("a place was not given back")
		}
		r.Leave("b")
	})
}

// TestInTurn has many calls of a client that owes time wait. They go on one after the other, in
// order, each when the time of the one before is paid, and another client does not wait.
func TestInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls = 50
		r := cputime.New(500*time.Millisecond, 2, 10, func(string) {})
		r.Charge("a", cputime.Burst)
		var order []int
		var wg sync.WaitGroup
		began := time.Now()
		for i := range calls {
			wg.Go(func() {
				if err := r.Enter(t.Context(), "a", calls); err != nil {
					t.Error(err)
					return
				}
				order = append(order, i) // of one processor of two, there is one place
				r.Charge("a", 50*time.Millisecond)
				r.Leave("a")
			})
			synctest.Wait()
		}
		if err := r.Enter(t.Context(), "b", 1); err != nil || time.Since(began) > 0 {
			t.Errorf("another client waited for %v: %v", time.Since(began), err)
		}
		r.Leave("b")
		wg.Wait()
		if !slices.IsSorted(order) || len(order) != calls {
			t.Errorf("the calls went on as %v", order)
		}
		if took := time.Since(began); took < (calls-2)*100*time.Millisecond || took > (calls+1)*100*time.Millisecond {
			t.Errorf("%d calls of 50 ms took %v at 500 ms a second", calls, took)
		}
	})
}

// TestNobodyPays uses a Ration as the program itself, and none.
func TestNobodyPays(t *testing.T) {
	var none *cputime.Ration
	for _, r := range []*cputime.Ration{none, cputime.New(time.Millisecond, 2, 1, func(limit string) { t.Error(limit) })} {
		for range 3 {
			r.Charge("", time.Hour)
			if r.Owes("") != 0 || r.Await(t.Context(), "") != nil || !r.TryEnter("") || r.Enter(t.Context(), "", 0) != nil || r.Rest("") != 0 {
				t.Error("the program itself has to wait")
			}
			r.Leave("")
		}
	}
}
