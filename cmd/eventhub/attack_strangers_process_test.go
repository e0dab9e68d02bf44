//go:build unix

package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// strangerAttacks are those by connections that say nothing, without a token.
var strangerAttacks = []attack{
	{name: "strangers", run: attackStrangers, like: permittedConnections, beside: keptAlive, alone: true},
}

// attackStrangers opens connections to the listeners for native clients and for HTTP, sends
// nothing, and keeps up to 6,000 of each. A connection that the hub has closed makes room for
// another.
func attackStrangers(ctx context.Context, a *attacker) {
	const workers, most = 16, 12_000
	addresses := []string{strings.TrimPrefix(a.nats, "nats://"), strings.TrimPrefix(a.http, "http://")}
	var opened atomic.Int64
	a.crowd(ctx, workers, func(worker, _ int) {
		held := make([]net.Conn, most/workers)
		defer func() {
			for _, conn := range held {
				drop(conn)
			}
		}()
		for i := 0; ctx.Err() == nil; i = (i + 1) % len(held) {
			drop(held[i])
			conn, err := net.DialTimeout("tcp", addresses[worker%2], patience)
			if err != nil {
				select {
				case <-ctx.Done():
				case <-time.After(10 * time.Millisecond):
				}
			} else {
				opened.Add(1)
			}
			held[i] = conn
		}
	})
	a.report("%d connections opened", opened.Load())
}

// permittedConnections opens WebSockets with its token, and closes them.
func permittedConnections(ctx context.Context, a *attacker) {
	a.crowd(ctx, 16, func(int, int) {
		if c := a.dial(ctx); c != nil {
			c.Abort()
		}
	})
}

// keptAlive publishes over HTTP connections that are idle for some time in between. A first request
// may have to be tried again, for its connection is a stranger's until then. Afterwards, the hub
// closes none of them to make room for strangers: without GetBody, the client repeats no request.
func keptAlive(t *testing.T, f *floodedHub, d time.Duration) latency {
	t.Helper()
	const clients = 20
	token := f.sign(t, "kept", "publish:kept")
	publish := func(over *http.Client) (status int, answer string) {
		return askThrough(t.Context(), over, token, http.MethodPost, f.hub.http+"/publish/kept", io.NopCloser(strings.NewReader("1")))
	}
	all := make([]*http.Client, clients)
	for i := range all {
		all[i] = &http.Client{Transport: &http.Transport{}}
		defer all[i].CloseIdleConnections()
		waitFor(t, "a newcomer is let in", func() bool {
			status, _ := publish(all[i])
			return status == http.StatusOK
		})
	}
	var took []time.Duration
	for began, i := time.Now(), 0; i < 2*clients || time.Since(began) < d; i++ {
		came := time.Now()
		if status, answer := publish(all[i%clients]); status != http.StatusOK {
			t.Errorf("request %d: %d %s", i, status, answer)
		}
		took = append(took, time.Since(came))
		f.pass(2 * neighbourEvery)
	}
	return latencyOf(took)
}
