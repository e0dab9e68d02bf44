package jetstream

import (
	"context"
	"sync"
	"sync/atomic"
)

// lifecycle is the time from Open to Close, and what Close has to wait for. Its methods may be
// called concurrently.
type lifecycle struct {
	ctx    context.Context // ends during Close, at the latest when endLife is called
	cancel context.CancelFunc

	// lifeMu is between work that begins and endLife, which waits for work. No lock is taken under
	// lifeMu.
	lifeMu sync.Mutex
	ended  atomic.Bool // written under lifeMu
	work   sync.WaitGroup
}

// beginLife makes the context, with the values of ctx.
func (l *lifecycle) beginLife(ctx context.Context) {
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
}

// closing reports whether endLife was called.
func (l *lifecycle) closing() bool { return l.ended.Load() }

// beginWork counts work that endLife has to wait for, until the caller calls endWork. It reports
// false when endLife was called; then there must be no such work.
func (l *lifecycle) beginWork() bool {
	l.lifeMu.Lock()
	defer l.lifeMu.Unlock()
	if l.ended.Load() {
		return false
	}
	l.work.Add(1)
	return true
}

// endWork is the end of what beginWork counted.
func (l *lifecycle) endWork() { l.work.Done() }

// start runs f in a goroutine that endLife waits for. It reports false, and runs nothing, when
// endLife was called.
func (l *lifecycle) start(f func()) bool {
	if !l.beginWork() {
		return false
	}
	go func() {
		defer l.endWork()
		f()
	}()
	return true
}

// apart is start for what has to run in any case. When endLife was called, f has to end soon, and
// whoever needs its end waits elsewhere, as Publisher.Flush does.
func (l *lifecycle) apart(f func()) {
	if !l.start(f) {
		go f()
	}
}

// endLife ends the context, and waits for all work. It is called once.
func (l *lifecycle) endLife() {
	l.lifeMu.Lock()
	l.ended.Store(true)
	l.lifeMu.Unlock()
	l.cancel()
	l.work.Wait()
}
