package quota_test

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream/quota"
)

func TestTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := quota.New(10, 2, 100, nil)
		for _, name := range []string{"a", "b"} { // each has its own
			for range 2 {
				if wait := s.Take(name); wait != 0 {
					t.Fatalf("%s waits %v within the burst", name, wait)
				}
			}
		}
		if wait := s.Take("a"); wait != 100*time.Millisecond {
			t.Fatalf("told to wait %v", wait)
		}
		<-time.After(40 * time.Millisecond)
		if wait := s.Take("a"); wait.Round(time.Millisecond) != 60*time.Millisecond {
			t.Fatalf("told to wait %v", wait)
		}
		<-time.After(60 * time.Millisecond)
		if wait := s.Take("a"); wait != 0 {
			t.Fatalf("told to wait %v after the wait", wait)
		}
	})
}

// TestManyAtOnce has many goroutines reserve under one name, all of which wait for one another.
// They get no more than the rate: none counts time that another has counted.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	const perSecond, burst, takers, ahead = 10_000, 10, 500, 10 * time.Millisecond
	s := quota.New(perSecond, burst, 10, nil)
	var took atomic.Int64
	began := time.Now()
	var wg sync.WaitGroup
	for range takers {
		wg.Go(func() {
			for time.Since(began) < time.Second/2 {
				if _, ok := s.ReserveWithin("a", ahead); ok {
					took.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if most := burst + 1 + int64(perSecond*(time.Since(began)+ahead).Seconds()); took.Load() > most {
		t.Errorf("%d were reserved, want at most %d", took.Load(), most)
	}
}

func TestNoLimit(t *testing.T) {
	var s *quota.Set
	if s.Take("a") != 0 {
		t.Fatal("a nil Set has a limit")
	}
}

func TestBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		crowded := 0
		s := quota.New(1, 1, 3, func() { crowded++ })
		for i := range 3 {
			if s.Take(strconv.Itoa(i)) != 0 {
				t.Fatal("refused", i)
			}
		}
		// There is no room: the rest has one bucket.
		if s.Take("x") != 0 || s.Take("y") == 0 || crowded != 2 {
			t.Fatalf("beyond the bound, %d", crowded)
		}
		// Nobody gets a second token by being forgotten.
		if s.Take("0") == 0 {
			t.Fatal("a bucket in use was dropped")
		}
		<-time.After(time.Second)
		for _, name := range []string{"x", "y", "0"} {
			if s.Take(name) != 0 {
				t.Fatal("refused", name)
			}
		}
		if crowded != 2 {
			t.Fatal("full buckets were kept")
		}
	})
}

func TestReserveWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := quota.New(1, 2, 10, nil)
		want := func(wait time.Duration, ok bool) {
			t.Helper()
			if gotWait, gotOK := s.ReserveWithin("a", 2*time.Second); gotWait != wait || gotOK != ok {
				t.Fatalf("%v, %v, want %v, %v", gotWait, gotOK, wait, ok)
			}
		}
		want(0, true)
		want(0, true)
		want(time.Second, true)
		want(2*time.Second, true)
		for range 3 {
			want(0, false) // takes nothing
		}
		<-time.After(time.Second)
		want(2*time.Second, true)
		s = nil
		want(0, true)
	})
}

func BenchmarkTake(b *testing.B) {
	s := quota.New(1e9, 1e9, 1000, nil)
	b.ReportAllocs()
	for b.Loop() {
		s.Take("heartbeat.received")
	}
}

// TestGiveBack returns what was taken, and no more than the burst.
func TestGiveBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := quota.New(1, 10, 5, nil)
		if wait, _ := s.Reserve("a", 10); wait != 0 {
			t.Fatal("a new name has to wait")
		}
		s.GiveBack("a", 4)
		if wait := s.TakeN("a", 4); wait != 0 {
			t.Errorf("what was given back is not there for %v", wait)
		}
		if wait := s.TakeN("a", 1); wait == 0 {
			t.Error("more is there than was given back")
		}
		s.GiveBack("a", 10)
		s.GiveBack("a", 10)
		time.Sleep(time.Second)
		for i := range 11 {
			if wait := s.TakeN("a", 1); (wait == 0) != (i < 10) {
				t.Errorf("take %d waits for %v", i+1, wait)
			}
		}
		var none *quota.Set
		none.GiveBack("a", 1)
	})
}

func TestSpend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := quota.New(10, 2, 10, nil)
		for _, spent := range []struct {
			n    int
			wait time.Duration
		}{{0, 0}, {1, 0}, {10, 900 * time.Millisecond}, {1, time.Second}} {
			if wait := s.Spend("a", spent.n); wait.Round(time.Millisecond) != spent.wait {
				t.Errorf("%d are there after %v, want %v", spent.n, wait, spent.wait)
			}
		}
		if wait := s.Spend("b", 2); wait != 0 {
			t.Errorf("another name waits %v", wait)
		}
		<-time.After(1200 * time.Millisecond)
		if wait := s.Spend("a", 2); wait != 0 {
			t.Errorf("after the wait, %v more", wait)
		}
		s = nil
		if s.Spend("a", 1) != 0 {
			t.Error("a nil Set has a limit")
		}
	})
}
