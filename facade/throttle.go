package facade

import (
	"math"
	"strconv"
	"time"

	"eventhub/jetstream/quota"
)

// maxBurst bounds bursts, so that the arithmetic of a token bucket cannot overflow.
const maxBurst = 1_000_000_000

// pace is the cost of one item and the capacity of a token bucket, both in time. The zero pace has
// no limit.
type pace struct {
	each, burst time.Duration
}

func newPace(perSecond, burst int) pace {
	if perSecond == NoLimit {
		return pace{}
	}
	each := time.Second / time.Duration(perSecond)
	return pace{each: each, burst: each * time.Duration(min(burst, maxBurst))}
}

// bucket is a token bucket for one goroutine. It stores only the time at which it will be full
// again. Times count from any fixed moment. The zero bucket is full.
type bucket struct {
	full time.Duration
}

// take takes one token and reports whether there was one.
func (b *bucket) take(p pace, now time.Duration) bool {
	full := max(b.full, now) + p.each
	if full-now > p.burst {
		return false
	}
	b.full = full
	return true
}

// spend takes n tokens, even if there are fewer. It returns how long to wait until the tokens are
// there, which may be negative.
func (b *bucket) spend(p pace, n int, now time.Duration) time.Duration {
	b.full = max(b.full, now) + time.Duration(n)*p.each
	return b.full - now - p.burst
}

// newQuota returns a quota of publishes, or nil for no limit.
func (s *Server) newQuota(perSecond, burst int) *quota.Set {
	if perSecond == NoLimit {
		return nil
	}
	return quota.New(float64(perSecond), burst, s.cfg.Limits.Quotas, func() { s.cfg.Observer.LimitReached("quotas") })
}

// throttle takes one publish from the quotas of its principal and its topic. A principal that
// exceeds its own quota takes nothing from the topic's quota, which it shares with others.
func (s *Server) throttle(p Principal, topic string) *fault {
	if fail := s.throttlePrincipal(p); fail != nil {
		return fail
	}
	return s.throttleTopic(topic)
}

func (s *Server) throttlePrincipal(p Principal) *fault {
	if s.byPrincipal != nil {
		if wait := s.byPrincipal.Take(p.Key()); wait > 0 {
			s.cfg.Observer.LimitReached("principal_rate")
			return tooFast("This client may publish", s.cfg.Limits.PrincipalRate, wait)
		}
	}
	return nil
}

func (s *Server) throttleTopic(topic string) *fault {
	if wait := s.byTopic.Take(topic); wait > 0 {
		s.cfg.Observer.LimitReached("topic_rate")
		return tooFast("To this topic all clients together may publish", s.cfg.Limits.TopicRate, wait)
	}
	return nil
}

// throttleOutbox takes the bytes of one post from the quota of its principal.
func (s *Server) throttleOutbox(p Principal, payload int) *fault {
	return s.tooMuchPosted(s.posted.TakeN(p.Key(), payload+postOverhead))
}

// mayPost refuses a post for which the quota of its principal has no room, before its body is read.
// A body of unknown length counts as the largest.
func (s *Server) mayPost(p Principal, length int64) *fault {
	most := s.cfg.Bus.MaxPayload()
	if length >= 0 {
		most = int(min(length, int64(most)))
	}
	return s.tooMuchPosted(s.posted.WaitN(p.Key(), most+postOverhead))
}

func (s *Server) tooMuchPosted(wait time.Duration) *fault {
	if wait == 0 {
		return nil
	}
	s.cfg.Observer.LimitReached("outbox_rate")
	return &fault{code: codeRateLimited, msg: "This client may post " + strconv.Itoa(s.cfg.Limits.OutboxRate) + " bytes a second to the outbox: slow down.", wait: wait}
}

// postOverhead is what a post counts besides its payload.
const postOverhead = 512

func tooFast(who string, perSecond int, wait time.Duration) *fault {
	return &fault{code: codeRateLimited, msg: who + " " + strconv.Itoa(perSecond) + " events a second: slow down.", wait: wait}
}

// retryAfter returns the Retry-After of a fault, in whole seconds, at least 1.
func (f *fault) retryAfter() string {
	return strconv.Itoa(max(1, int(math.Ceil(f.wait.Seconds()))))
}
