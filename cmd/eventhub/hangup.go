package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// hangUp handles SIGHUP for a hub without a certificate to reload. If the process has a terminal,
// the returned context ends when the terminal is closed. Otherwise SIGHUP is the request of a
// service manager to reload, which does not end the process, not even in its last moment. A process
// that ignores SIGHUP, as under nohup, goes on ignoring it. The caller must call stop.
func hangUp(ctx context.Context, log *slog.Logger) (_ context.Context, stop func()) {
	if signal.Ignored(syscall.SIGHUP) {
		return ctx, func() {}
	}
	if hasTerminal() {
		return signal.NotifyContext(ctx, syscall.SIGHUP)
	}
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-ended:
				return
			case <-hup:
				log.LogAttrs(ctx, slog.LevelInfo, "received SIGHUP; there is no TLS certificate to reload")
			}
		}
	})
	return ctx, func() {
		close(ended)
		wg.Wait()
	}
}

// hasTerminal reports whether the process has a controlling terminal.
func hasTerminal() bool {
	f, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	_ = f.Close() // read-only
	return true
}
