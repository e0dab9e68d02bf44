package facade

import (
	"context"
	"crypto/sha256"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream/quota"
)

const (
	// guessWait is how long a token may wait to be checked.
	guessWait = 5 * time.Second
	// guessersOfAddress is the most tokens from one address that wait to be checked, those of
	// authenticated connections aside, and guessersOverHTTP the most in HTTP requests.
	guessersOfAddress = 256
	guessersOverHTTP  = 1024
)

// guesses rations the failed checks of tokens by the address from which they come. A check is free
// as long as few from its address have failed. After that, the tokens of the address are checked
// one after the other in the order of their arrival, as failures are allowed again: so a valid
// token that is new waits for its turn, whoever else uses its address. Tokens that were valid
// before, and have not expired, are known and never wait. Its methods may be called concurrently.
type guesses struct {
	failed *quota.Set    // nil: there is no limit
	turns  *quota.Places // one for each address
	max    int           // tokens in known

	overHTTP atomic.Int64

	mu    sync.Mutex
	known map[[sha256.Size]byte]time.Time // when they expire; zero: never
}

func newGuesses(s *Server) *guesses {
	l := s.cfg.Limits
	return &guesses{
		failed: s.newQuota(l.BadTokenRate, l.BadTokenBurst), turns: quota.NewPlaces(l.Quotas, 1),
		max: l.KnownTokens, known: make(map[[sha256.Size]byte]time.Time),
	}
}

// guesser is a client whose token is to be checked.
type guesser struct {
	address       string
	overHTTP      bool
	authenticated bool // the connection is: a refusal would end it
}

// sourceOf is the address by which a client's failures count: of IPv6 the first 64 bits, because a
// host has all that begin with them.
func sourceOf(remote string) string {
	host, ok := hostOf(remote)
	if !ok {
		return remote // no TCP
	}
	if host.Is4() {
		return host.String()
	}
	net, err := host.Prefix(64)
	if err != nil {
		return host.String()
	}
	return net.String()
}

// recognizes reports that a token was valid before and has not expired.
func (g *guesses) recognizes(hash [sha256.Size]byte, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	ends, ok := g.known[hash]
	return ok && (ends.IsZero() || now.Before(ends))
}

// keep notes the result of a check; nil means that the token was refused. It reports whether
// another token had to be forgotten.
func (g *guesses) keep(hash [sha256.Size]byte, p Principal) (full bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.known, hash)
	if p == nil {
		return false
	}
	for other := range g.known { // forgets any
		if len(g.known) < g.max {
			break
		}
		delete(g.known, other)
		full = true
	}
	g.known[hash] = p.Expires()
	return full
}

// mayGuess waits until a token that is not known may be checked. The caller calls done after the
// check.
func (s *Server) mayGuess(ctx context.Context, who guesser) (done func(), fail *fault) {
	g := s.guesses
	if g.failed == nil || g.turns.Users(who.address) == 0 && g.failed.Wait(who.address) == 0 {
		return func() {}, nil
	}
	s.cfg.Observer.LimitReached("bad_tokens")
	if who.overHTTP {
		// What waits here is no request that is served: else a few addresses could take all places.
		s.requests.Add(-1)
		crowd := g.overHTTP.Add(1)
		defer func() {
			g.overHTTP.Add(-1)
			if s.requests.Add(1) > int64(s.cfg.Limits.Requests) && fail == nil {
				s.cfg.Observer.LimitReached("requests")
				done()
				done, fail = nil, errTooManyRequests
			}
		}()
		if crowd > guessersOverHTTP {
			return nil, errTooManyRequests
		}
	}
	ctx, cancel := context.WithTimeout(ctx, guessWait)
	defer cancel()
	most := guessersOfAddress
	if who.authenticated {
		most = math.MaxInt
	}
	tooMany := &fault{code: codeRateLimited, msg: "Too many tokens from this address were refused: try again later.", wait: time.Second}
	if !g.turns.Enter(ctx, who.address, most, func() {}) {
		return nil, tooMany
	}
	for {
		wait := g.failed.Wait(who.address)
		if wait == 0 {
			return func() { g.turns.Leave(who.address) }, nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			g.turns.Leave(who.address)
			return nil, tooMany
		}
	}
}

// authenticate returns the principal of a token. The principal has not expired.
func (s *Server) authenticate(ctx context.Context, token string, who guesser) (Principal, *fault) {
	if token == "" {
		return s.verify(ctx, token)
	}
	g, hash := s.guesses, sha256.Sum256([]byte(token))
	if !g.recognizes(hash, time.Now()) {
		done, fail := s.mayGuess(ctx, who)
		if fail != nil {
			return nil, fail
		}
		defer done()
	}
	p, fail := s.verify(ctx, token)
	if fail != nil && fail.code != codeInternal {
		g.failed.Reserve(who.address, 1)
	}
	if g.keep(hash, p) {
		s.cfg.Observer.LimitReached("known_tokens")
	}
	return p, fail
}
