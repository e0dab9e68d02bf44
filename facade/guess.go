package facade

import (
	"context"
	"crypto/sha256"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream/quota"
)

const (
	// refusalWait is how long a refusal may wait for its turn, refusalsOfAddress the most refusals
	// of one address that wait, and refusalsOverHTTP the most in HTTP requests.
	refusalWait       = 5 * time.Second
	refusalsOfAddress = 256
	refusalsOverHTTP  = 1024
)

// guesses rations refused tokens by the address from which they come. Every token is checked at
// once, so that a valid token never waits, whoever else uses its address. Beyond the ration, a
// refusal waits for its turn, and the connection with it. When too many refusals of the address
// wait, the connection ends instead. A client that guesses therefore pays a turn or a connection
// for each check. Its methods may be called concurrently.
type guesses struct {
	refused *quota.Set    // refusals that are sent; nil: there is no limit
	longest time.Duration // that a refusal waits
	checked *quota.Set    // refused tokens, sent or not; nil: there is no limit
	max     int           // tokens in known

	overHTTP atomic.Int64 // refusals that wait

	mu    sync.Mutex
	known map[[sha256.Size]byte]time.Time // when they expire; zero: never
}

func newGuesses(s *Server) *guesses {
	l := s.cfg.Limits
	g := &guesses{
		refused: s.newQuota(l.BadTokenRate, l.BadTokenBurst), longest: refusalWait,
		checked: s.newQuota(l.TokenCheckRate, l.TokenCheckBurst),
		max:     l.KnownTokens, known: make(map[[sha256.Size]byte]time.Time),
	}
	if l.BadTokenRate != NoLimit {
		g.longest = min(g.longest, refusalsOfAddress*time.Second/time.Duration(l.BadTokenRate))
	}
	return g
}

// guesser is a client whose token is to be checked.
type guesser struct {
	address       string
	overHTTP      bool
	counted       bool // the request counts in Limits.Requests
	authenticated bool // the connection is: a refusal would end its subscriptions
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

// authenticate returns the principal of a token. The principal has not expired.
func (s *Server) authenticate(ctx context.Context, token string, who guesser) (Principal, *fault) {
	if token == "" {
		return s.verify(ctx, token, who.address)
	}
	g, hash := s.guesses, sha256.Sum256([]byte(token))
	if !who.authenticated && !g.recognizes(hash, time.Now()) {
		if wait := g.checked.Wait(who.address); wait > 0 {
			s.cfg.Observer.LimitReached("token_checks")
			return nil, &fault{code: codeRateLimited, msg: manyRefused, wait: max(wait, time.Second)}
		}
	}
	p, fail := s.verify(ctx, token, who.address)
	if g.keep(hash, p) {
		s.cfg.Observer.LimitReached("known_tokens")
	}
	if fail == nil || fail.code == codeInternal {
		return p, fail
	}
	g.checked.Reserve(who.address, 1)
	return nil, s.refuseInTurn(ctx, who, fail)
}

const manyRefused = "Too many tokens from this address were refused: try again later."

// refuseInTurn returns the fault of a refused token when it is the refusal's turn. When too many
// refusals wait, it returns at once a fault that ends the connection.
func (s *Server) refuseInTurn(ctx context.Context, who guesser, refusal *fault) *fault {
	g := s.guesses
	wait, ok := g.refused.ReserveWithin(who.address, g.longest)
	if ok && wait == 0 {
		return refusal
	}
	s.cfg.Observer.LimitReached("bad_tokens")
	tooMany := &fault{code: codeRateLimited, msg: manyRefused, wait: time.Second, ends: true}
	if !ok {
		return tooMany
	}
	if who.overHTTP {
		defer g.overHTTP.Add(-1)
		if g.overHTTP.Add(1) > refusalsOverHTTP {
			return tooMany
		}
	}
	if who.counted {
		// What waits here is no request that is served: else a few addresses could take all places.
		s.requests.Add(-1)
		defer s.requests.Add(1)
	}
	select {
	case <-time.After(wait):
		return refusal
	case <-ctx.Done():
		return tooMany
	}
}
