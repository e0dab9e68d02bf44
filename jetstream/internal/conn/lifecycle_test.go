package conn

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
		if l.Ctx.Err() != nil {
			t.Error("the end of the context of Open ends the bus")
		}
		var late atomic.Bool
		l.Start(func() {
			<-l.Ctx.Done()
			if l.Start(func() { late.Store(true) }) || l.BeginWork() {
				t.Error("work began after the end")
			}
			time.Sleep(time.Minute)
		})
		if !l.BeginWork() {
			t.Fatal("no work before the end")
		}
		time.AfterFunc(2*time.Minute, l.EndWork)
		begun := time.Now()
		l.endLife()
		if took := time.Since(begun); took != 2*time.Minute {
			t.Errorf("the end took %v", took)
		}
		if late.Load() || !l.Closing() {
			t.Errorf("started after the end: %v; closing: %v", late.Load(), l.Closing())
		}
		ran := make(chan struct{})
		l.Apart(func() { close(ran) })
		<-ran
	})
}
