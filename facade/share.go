package facade

import (
	"context"
	"sync"
)

// places lets so many at a time do something, and fewer for each principal; others wait for their
// turn. It knows only principals that have a place or wait for one. Its methods may be called
// concurrently.
type places struct {
	all chan struct{}
	own int // of one principal

	mu    sync.Mutex
	byKey map[string]*queue
}

// queue is the places of one principal.
type queue struct {
	places chan struct{}
	users  int // that have a place or wait for one
}

func newPlaces(all, own int) *places {
	if own == NoLimit {
		own = all
	}
	return &places{all: make(chan struct{}, all), own: min(own, all), byKey: make(map[string]*queue)}
}

// enter waits for a place until ctx ends. limit is the most that may have one or wait for one for
// this principal: beyond it, and when ctx ends, enter reports false. waited is called when there is
// no place at once. The caller calls leave after a true.
func (p *places) enter(ctx context.Context, key string, limit int, waited func()) bool {
	p.mu.Lock()
	q := p.byKey[key]
	if q == nil {
		q = &queue{places: make(chan struct{}, p.own)}
		p.byKey[key] = q
	}
	if q.users >= limit {
		p.mu.Unlock()
		waited()
		return false
	}
	q.users++
	p.mu.Unlock()
	if !into(ctx, q.places, waited) {
		p.forget(key, q)
		return false
	}
	if !into(ctx, p.all, waited) {
		<-q.places
		p.forget(key, q)
		return false
	}
	return true
}

// into takes an element of a semaphore.
func into(ctx context.Context, sem chan struct{}, waited func()) bool {
	select {
	case sem <- struct{}{}:
		return true
	default:
	}
	waited()
	select {
	case sem <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *places) leave(key string) {
	p.mu.Lock()
	q := p.byKey[key]
	p.mu.Unlock()
	<-p.all
	<-q.places
	p.forget(key, q)
}

func (p *places) forget(key string, q *queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q.users--; q.users == 0 {
		delete(p.byKey, key)
	}
}

// share is memory that principals share, of which none has more than its own part. It knows only
// principals that hold some. Its methods may be called concurrently.
type share struct {
	all, own int

	mu    sync.Mutex
	used  int
	byKey map[string]int
}

func newShare(all, own int) *share {
	if own == NoLimit {
		own = all
	}
	return &share{all: all, own: min(own, all), byKey: make(map[string]int)}
}

// take reports whether there are n bytes more for the principal, and counts them if so. mine
// reports that the principal's own part is what is used up.
func (s *share) take(key string, n int) (ok, mine bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.byKey[key]+n > s.own:
		return false, true
	case s.used+n > s.all:
		return false, false
	}
	s.used += n
	s.byKey[key] += n
	return true, false
}

// give returns n bytes that take counted.
func (s *share) give(key string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
	if s.byKey[key] -= n; s.byKey[key] == 0 {
		delete(s.byKey, key)
	}
}
