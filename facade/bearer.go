package facade

import (
	"crypto/sha256"
	"net/http"
	"strings"
	"sync"
	"time"
)

// bearerFresh is how long HTTP requests accept a token without verifying it again. It is the
// longest time until HTTP notices that the key of a token was withdrawn. A revoked token is refused
// at once. WebSocket connections verify each AUTH.
const bearerFresh = 30 * time.Second

// bearers caches the principals of the tokens of HTTP requests. It keeps neither the tokens
// themselves nor refused tokens. Its methods may be called concurrently.
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

// find returns the principal of a token that was verified recently, and has neither expired nor
// been revoked, else nil.
func (b *bearers) find(hash [sha256.Size]byte, now time.Time) Principal {
	b.mu.Lock()
	defer b.mu.Unlock()
	who, ok := b.known[hash]
	if !ok || now.Sub(who.verified) >= bearerFresh || expired(who.principal, now) || revoked(who.principal) {
		return nil
	}
	return who.principal
}

// keep caches the result of a verification; nil means that the token was refused. It reports
// whether another token had to be evicted.
func (b *bearers) keep(hash [sha256.Size]byte, p Principal, now time.Time) (full bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, hash)
	if p == nil {
		return false
	}
	for other := range b.known { // evicts an arbitrary token
		if len(b.known) < b.max {
			break
		}
		delete(b.known, other)
		full = true
	}
	b.known[hash] = bearer{p, now}
	return full
}

// principalOf returns the client of a request that identify let through.
func principalOf(r *http.Request) Principal {
	if n, ok := r.Context().Value(servedKey{}).(*served); ok {
		return n.principal
	}
	return nil
}

// identify finds out whose request it is, and holds the requests of each principal that are served
// at a time to Limits.PrincipalRequests. A request whose answer nobody reads is served until then.
func (s *Server) identify(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Authorization")
		p, fail := s.bearer(r)
		if fail != nil {
			s.refuse(w, fail)
			return
		}
		if s.cfg.Accepted != nil {
			s.cfg.Accepted(r, p.Key())
		}
		n, ok := r.Context().Value(servedKey{}).(*served)
		if !ok {
			s.refuse(w, errTooManyRequests) // admit comes first
			return
		}
		if ok, _ := s.requesters.take(p.Key(), 1); !ok { // admit has seen to those of all
			s.cfg.Observer.LimitReached("principal_requests")
			s.refuse(w, &fault{code: codeRateLimited, msg: "The hub serves as many requests of this client at a time as it takes."})
			return
		}
		n.principal = p
		n.places = append(n.places, func() { s.requesters.give(p.Key(), 1) })
		next.ServeHTTP(w, r)
	})
}

// bearer returns the owner of a request's token.
func (s *Server) bearer(r *http.Request) (Principal, *fault) {
	given := r.Header["Authorization"]
	if len(given) > 1 {
		return nil, &fault{code: codeBadOptions, msg: "The header Authorization is given more than once."}
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		token = ""
	}
	token = strings.TrimSpace(token)
	hash, now := sha256.Sum256([]byte(token)), time.Now()
	if p := s.bearers.find(hash, now); p != nil {
		return p, nil
	}
	p, fail := s.authenticateRequest(r, token, "http")
	if s.bearers.keep(hash, p, now) {
		s.cfg.Observer.LimitReached("bearers")
	}
	return p, fail
}

// authenticateRequest returns the owner of the token of a request. over names the port.
func (s *Server) authenticateRequest(r *http.Request, token, over string) (Principal, *fault) {
	remote := s.remoteOf(r)
	p, fail := s.authenticate(r.Context(), token, guesser{address: sourceOf(remote), overHTTP: true, counted: over == "http"})
	if fail != nil {
		s.refusedToken(r.Context(), remote, over, fail)
	}
	return p, fail
}
