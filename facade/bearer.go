package facade

import (
	"crypto/sha256"
	"net/http"
	"strings"
	"sync"
	"time"
)

// bearerFresh is how long a token is taken without being verified anew: what makes it invalid before it expires, such as
// the withdrawal of its key, counts for HTTP after that at the latest. WebSocket connections verify each AUTH.
const bearerFresh = 30 * time.Second

// bearers remembers whose the tokens of HTTP requests are. Tokens themselves are not kept, nor those that were refused.
// Its methods may be called concurrently.
type bearers struct {
	max int

	mu    sync.Mutex
	known map[[sha256.Size]byte]bearer
}

type bearer struct {
	principal Principal
	verified  time.Time
}

func newBearers(limit int) *bearers {
	return &bearers{max: limit, known: make(map[[sha256.Size]byte]bearer)}
}

// find returns the owner of a token that was verified not long ago and has not expired, else nil.
func (b *bearers) find(hash [sha256.Size]byte, now time.Time) Principal {
	b.mu.Lock()
	defer b.mu.Unlock()
	who, ok := b.known[hash]
	if !ok || now.Sub(who.verified) >= bearerFresh || expired(who.principal, now) {
		return nil
	}
	return who.principal
}

// keep remembers what a verification found: nil is nobody. It reports whether another had to be forgotten.
func (b *bearers) keep(hash [sha256.Size]byte, p Principal, now time.Time) (full bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, hash)
	if p == nil {
		return false
	}
	for other := range b.known { // any other will do
		if len(b.known) < b.max {
			break
		}
		delete(b.known, other)
		full = true
	}
	b.known[hash] = bearer{p, now}
	return full
}

// bearer returns the owner of a request's token.
func (s *Server) bearer(r *http.Request) (Principal, *fault) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		token = ""
	}
	token = strings.TrimSpace(token)
	hash, now := sha256.Sum256([]byte(token)), time.Now()
	if p := s.bearers.find(hash, now); p != nil {
		return p, nil
	}
	p, fail := s.authenticate(r.Context(), token)
	if s.bearers.keep(hash, p, now) {
		s.cfg.Observer.LimitReached("bearers")
	}
	return p, fail
}
