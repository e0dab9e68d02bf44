// Package quota holds many to a rate each: topics, clients. It is small memory for few of them,
// however many there are.
package quota

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// sweepEvery is the least time between two looks for buckets that are full again.
const sweepEvery = time.Second

// Set is a token bucket for each name. Its methods may be called concurrently. A nil Set has no
// limit.
type Set struct {
	rate    rate.Limit
	burst   int
	max     int
	crowded func()

	mu      sync.Mutex
	buckets map[string]*rate.Limiter
	swept   time.Time
	rest    *rate.Limiter // shared by the names that found no room
}

// New makes a Set in which each name may take perSecond a second, and burst at once; both are above
// 0. It holds at most most buckets. One that is full again is dropped when another needs its room,
// which changes nothing for its name. While none is, further names share one bucket, and crowded is
// called for each of their takes; it must not block, and may be nil.
func New(perSecond float64, burst, most int, crowded func()) *Set {
	s := &Set{rate: rate.Limit(perSecond), burst: burst, max: most, crowded: crowded, buckets: make(map[string]*rate.Limiter)}
	s.rest = s.bucket()
	return s
}

func (s *Set) bucket() *rate.Limiter { return rate.NewLimiter(s.rate, s.burst) }

// Take takes one for name. It reports how long to wait when there is none: 0 means that it was
// taken.
func (s *Set) Take(name string) (wait time.Duration) { return s.TakeN(name, 1) }

// TakeN takes n for name, at most the burst, or nothing. It reports how long to wait until there
// are so many: 0 means that they were taken.
func (s *Set) TakeN(name string, n int) (wait time.Duration) {
	if s == nil {
		return 0
	}
	n = min(n, s.burst)
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // of which a bucket must not see an older one later
	b := s.findLocked(name, now)
	if b.AllowN(now, n) {
		return 0
	}
	missing := float64(n) - b.TokensAt(now)
	return max(time.Duration(missing/float64(s.rate)*float64(time.Second)), 1)
}

// Wait is WaitN for one.
func (s *Set) Wait(name string) time.Duration { return s.WaitN(name, 1) }

// WaitN returns how long to wait until there are n for name, or as many as there can be: 0 means
// that there are. It takes none.
func (s *Set) WaitN(name string, n int) time.Duration {
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // of which a bucket must not see an older one later
	b, ok := s.buckets[name]
	switch {
	case ok:
	case len(s.buckets) >= s.max:
		b = s.rest
	default:
		return 0
	}
	missing := float64(min(n, s.burst)) - b.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	return max(time.Duration(missing/float64(s.rate)*float64(time.Second)), 1)
}

// Reserve takes n for name, at most the burst, whether or not they are there, and reports when they
// will be: those who take later wait behind. back returns them as far as they are not there yet.
func (s *Set) Reserve(name string, n int) (wait time.Duration, back func()) {
	if s == nil {
		return 0, func() {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // of which a bucket must not see an older one later
	r := s.findLocked(name, now).ReserveN(now, min(n, s.burst))
	return r.DelayFrom(now), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		r.CancelAt(time.Now())
	}
}

// Spend takes n for name, which may be more than the burst, whether or not they are there. It
// reports when they will be: those who take later wait behind.
func (s *Set) Spend(name string, n int) (wait time.Duration) {
	if s == nil || n < 1 {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // of which a bucket must not see an older one later
	b := s.findLocked(name, now)
	for ; n > 0; n -= s.burst {
		wait = b.ReserveN(now, min(n, s.burst)).DelayFrom(now)
	}
	return wait
}

// GiveBack returns n to name, at most the burst, that TakeN or Reserve took.
func (s *Set) GiveBack(name string, n int) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // of which a bucket must not see an older one later
	s.findLocked(name, now).ReserveN(now, -min(n, s.burst))
}

// ReserveWithin takes one for name, and reports when it will be there. Where that is later than
// longest, it takes nothing and reports false.
func (s *Set) ReserveWithin(name string, longest time.Duration) (wait time.Duration, ok bool) {
	if s == nil {
		return 0, true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now() // of which a bucket must not see an older one later
	b := s.findLocked(name, now)
	if missing := 1 - b.TokensAt(now); missing/float64(s.rate) > longest.Seconds() {
		return 0, false
	}
	return b.ReserveN(now, 1).DelayFrom(now), true
}

func (s *Set) findLocked(name string, now time.Time) *rate.Limiter {
	if b, ok := s.buckets[name]; ok {
		return b
	}
	if len(s.buckets) >= s.max && now.Sub(s.swept) >= sweepEvery {
		s.swept = now
		for name, b := range s.buckets {
			if b.TokensAt(now) >= float64(s.burst) {
				delete(s.buckets, name)
			}
		}
	}
	if len(s.buckets) >= s.max {
		if s.crowded != nil {
			s.crowded()
		}
		return s.rest
	}
	b := s.bucket()
	s.buckets[name] = b
	return b
}
