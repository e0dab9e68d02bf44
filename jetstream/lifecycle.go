package jetstream

import (
	"context"
	"sync"
	"sync/atomic"
)

// lifecycle is the time from Open to Close, and the goroutines of the bus in it. Its methods may be
// called concurrently.
type lifecycle struct {
	ctx    context.Context // ends when Close has begun
	cancel context.CancelFunc

	// mu is between work that begins and Close, which waits for that. No lock is taken under mu.
	mu    sync.Mutex
	ended atomic.Bool // written under mu
	wg    sync.WaitGroup
}

// begin makes the context, with the values of ctx.
func (l *lifecycle) begin(ctx context.Context) {
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
}

// closing reports whether end was called.
func (l *lifecycle) closing() bool { return l.ended.Load() }

// enter counts work that end has to wait for, until the caller calls leave. It reports false when
// end was called; then there must be no such work.
func (l *lifecycle) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended.Load() {
		return false
	}
	l.wg.Add(1)
	return true
}

// leave is the end of what enter counted.
func (l *lifecycle) leave() { l.wg.Done() }

// start runs f in a goroutine that end waits for. It reports false, and runs nothing, when end was
// called.
func (l *lifecycle) start(f func()) bool {
	if !l.enter() {
		return false
	}
	go func() {
		defer l.leave()
		f()
	}()
	return true
}

// apart is start for what has to run in any case, and soon ends. When end was called, nobody waits
// for f here.
func (l *lifecycle) apart(f func()) {
	if !l.start(f) {
		go f()
	}
}

// end ends the context, and waits for all that was started. It is called once.
func (l *lifecycle) end() {
	l.mu.Lock()
	l.ended.Store(true)
	l.mu.Unlock()
	l.cancel()
	l.wg.Wait()
}
