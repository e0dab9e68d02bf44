package quota

import (
	"context"
	"sync"
)

// Places lets so many at a time do something, and fewer under each name; others wait for their
// turn. It knows only names that have a place or wait for one. Its methods may be called
// concurrently.
type Places struct {
	all chan struct{}
	own int // under one name

	mu     sync.Mutex
	byName map[string]*queue
}

// queue is the places of one name.
type queue struct {
	places chan struct{}
	users  int // that have a place or wait for one
}

// NewPlaces makes Places for all at a time, and for at most own under one name; an own below 1 is
// no limit.
func NewPlaces(all, own int) *Places {
	if own < 1 {
		own = all
	}
	return &Places{all: make(chan struct{}, all), own: min(own, all), byName: make(map[string]*queue)}
}

// Enter waits for a place until ctx ends. limit is the most that may have one or wait for one under
// this name: beyond it, and when ctx ends, Enter reports false. waited is called when there is no
// place at once. The caller calls Leave after a true.
func (p *Places) Enter(ctx context.Context, name string, limit int, waited func()) bool {
	return p.EnterWhen(ctx, name, limit, func() bool { return true }, waited)
}

// EnterWhen is Enter for a name that may have to wait for something else, too: ready waits for
// that, and reports false to give up. The name's own place is taken before, and one of all
// afterwards, so that as many wait in ready as have a place of the name, and the others behind them
// in order.
func (p *Places) EnterWhen(ctx context.Context, name string, limit int, ready func() bool, waited func()) bool {
	p.mu.Lock()
	q := p.byName[name]
	if q == nil {
		q = &queue{places: make(chan struct{}, p.own)}
		p.byName[name] = q
	}
	if q.users >= limit {
		p.mu.Unlock()
		waited()
		return false
	}
	q.users++
	p.mu.Unlock()
	if !into(ctx, q.places, waited) {
		p.forget(name, q)
		return false
	}
	if !ready() || !into(ctx, p.all, waited) {
		<-q.places
		p.forget(name, q)
		return false
	}
	return true
}

// TryEnter takes a place if there is one at once. The caller calls Leave after a true.
func (p *Places) TryEnter(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.byName[name]
	if q == nil {
		q = &queue{places: make(chan struct{}, p.own)}
	}
	select {
	case q.places <- struct{}{}:
	default:
		return false
	}
	select {
	case p.all <- struct{}{}:
	default:
		<-q.places
		return false
	}
	q.users++
	p.byName[name] = q
	return true
}

// Rest lets those of other names who wait have the caller's place, and returns when it has one
// again. The caller has entered.
func (p *Places) Rest() {
	<-p.all
	p.all <- struct{}{}
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

// Leave frees a place that Enter took under the name.
func (p *Places) Leave(name string) {
	p.mu.Lock()
	q := p.byName[name]
	p.mu.Unlock()
	<-p.all
	<-q.places
	p.forget(name, q)
}

// Names returns how many names have a place or wait for one.
func (p *Places) Names() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.byName)
}

func (p *Places) forget(name string, q *queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q.users--; q.users == 0 {
		delete(p.byName, name)
	}
}
