package jetstream

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestLifecycleWaitsForWhatItStarted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l lifecycle
		ctx, cancel := context.WithCancel(t.Context())
		l.beginLife(ctx)
		cancel()
		if l.ctx.Err() != nil {
			t.Error("the end of the context of Open ends the bus")
		}
		var late atomic.Bool
		l.start(func() {
			<-l.ctx.Done()
			if l.start(func() { late.Store(true) }) || l.beginWork() {
				t.Error("work began after the end")
			}
			time.Sleep(time.Minute)
		})
		if !l.beginWork() {
			t.Fatal("no work before the end")
		}
		time.AfterFunc(2*time.Minute, l.endWork)
		begun := time.Now()
		l.endLife()
		if took := time.Since(begun); took != 2*time.Minute {
			t.Errorf("the end took %v", took)
		}
		if late.Load() || !l.closing() {
			t.Errorf("started after the end: %v; closing: %v", late.Load(), l.closing())
		}
		ran := make(chan struct{})
		l.apart(func() { close(ran) })
		<-ran
	})
}
