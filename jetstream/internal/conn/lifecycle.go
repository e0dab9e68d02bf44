package conn

import (
	"context"
	"sync"
	"sync/atomic"
)

// lifecycle is the time from Open to Close, and what Close has to wait for. Its methods may be
// called concurrently.
type lifecycle struct {
	Ctx    context.Context // ends during Close, at the latest when endLife is called
	Cancel context.CancelFunc

	// lifeMu is between work that begins and endLife, which waits for work. No lock is taken under
	// lifeMu.
	lifeMu sync.Mutex
	ended  atomic.Bool // written under lifeMu
	work   sync.WaitGroup
}

// beginLife makes the context, with the values of ctx.
func (l *lifecycle) beginLife(ctx context.Context) {
	l.Ctx, l.Cancel = context.WithCancel(context.WithoutCancel(ctx))
}

// Closing reports whether endLife was called.
func (l *lifecycle) Closing() bool { return l.ended.Load() }

// BeginWork counts work that endLife has to wait for, until the caller calls EndWork. It reports
// false when endLife was called; then there must be no such work.
func (l *lifecycle) BeginWork() bool {
	l.lifeMu.Lock()
	defer l.lifeMu.Unlock()
	if l.ended.Load() {
		return false
	}
	l.work.Add(1)
	return true
}

// EndWork is the end of what BeginWork counted.
func (l *lifecycle) EndWork() { l.work.Done() }

// Start runs f in a goroutine that endLife waits for. It reports false, and runs nothing, when
// endLife was called.
func (l *lifecycle) Start(f func()) bool {
	if !l.BeginWork() {
		return false
	}
	go func() {
		defer l.EndWork()
		f()
	}()
	return true
}

// Apart is Start for what has to run in any case. When endLife was called, f has to end soon, and
// whoever needs its end waits elsewhere, as Publisher.Flush does.
func (l *lifecycle) Apart(f func()) {
	if !l.Start(f) {
		go f()
	}
}

// endLife ends the context, and waits for all work. It is called once.
func (l *lifecycle) endLife() {
	l.lifeMu.Lock()
	l.ended.Store(true)
	l.lifeMu.Unlock()
	l.Cancel()
	l.work.Wait()
}
