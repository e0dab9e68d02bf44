//go:build unix

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/sdk/go/wire"
)

// unreadAttacks have the hub fetch all that many groups may hold, read nothing of it, and go.
var unreadAttacks = []attack{
	{name: "deliveries that are not read", scopes: []string{"*:attack.unread.**"}, run: attackUnread, like: readAndGo, check: checkUnread},
	{name: "streams that are not read", scopes: []string{"*:attack.unread.**"}, run: attackUnreadStreams, like: readStreamsAndGo, check: checkUnread},
}

const (
	unreadTopic       = "attack.unread.t"
	unreadEvents      = 10_000 // as many as a subscription may hold
	unreadGroups      = 64
	unreadConnections = 4
	// unreadFor is how long a client of the attack stays.
	unreadFor = 1500 * time.Millisecond
)

// prepareUnread publishes what is not read.
func prepareUnread(ctx context.Context, a *attacker) {
	c := a.dial(ctx)
	if c == nil {
		return
	}
	defer c.Abort()
	var stored atomic.Int64
	for i := range unreadEvents {
		err := c.PublishAsync(unreadTopic, []byte(`{"text":"`+strings.Repeat("x", 100)+`"}`), wire.PublishOptions{}, func(string, error) { stored.Add(1) })
		if err != nil || ctx.Err() != nil {
			return
		}
		for int64(i)-stored.Load() > 500 && ctx.Err() == nil {
			<-time.After(time.Millisecond)
		}
	}
	for stored.Load() < unreadEvents && ctx.Err() == nil {
		<-time.After(time.Millisecond)
	}
}

// attackUnread subscribes with connections that do not read, and closes them, again and again.
func attackUnread(ctx context.Context, a *attacker) {
	prepareUnread(ctx, a)
	rounds := 0
	for ; ctx.Err() == nil; rounds++ {
		crowd(unreadConnections, func(i int) {
			within, cancel := context.WithTimeout(ctx, unreadFor)
			defer cancel()
			ws, err := dialUnread(within, a.ws)
			if err != nil {
				return
			}
			defer ws.CloseNow() //nolint:errcheck // it is the purpose
			frames := []string{`{"op":"AUTH","token":"` + a.token + `"}`}
			for g := range unreadGroups / unreadConnections {
				frames = append(frames, fmt.Sprintf(`{"op":"SUBSCRIBE","topic":%q,"group":"g-%d-%d","opts":{"from":"earliest","maxInFlight":10000,"batchSize":10000}}`, unreadTopic, i, g))
			}
			for _, f := range frames {
				if ws.Write(within, websocket.MessageText, []byte(f)) != nil {
					return
				}
			}
			<-within.Done()
		})
	}
	a.report("%d rounds", rounds)
}

// readAndGo subscribes as often, and reads and settles what comes: the same events, and new ones
// all the while.
func readAndGo(ctx context.Context, a *attacker) {
	prepareUnread(ctx, a)
	var got atomic.Int64
	publishing := a.keepPublishing(ctx)
	for ctx.Err() == nil {
		crowd(unreadConnections, func(i int) {
			within, cancel := context.WithTimeout(ctx, unreadFor)
			defer cancel()
			c := a.dial(within)
			if c == nil {
				return
			}
			defer c.Abort()
			for g := range unreadGroups / unreadConnections {
				_, _ = c.Subscribe(within, unreadTopic, fmt.Sprintf("g-%d-%d", i, g), wire.SubscribeOptions{From: "earliest", MaxInFlight: 10_000, BatchSize: 10_000}, func(e wire.Event) {
					got.Add(1)
					_ = e.Ack()
				})
			}
			<-within.Done()
		})
	}
	<-publishing
	a.report("%d events read", got.Load())
}

// keepPublishing publishes new events until ctx ends, and then closes ended.
func (a *attacker) keepPublishing(ctx context.Context) (ended <-chan struct{}) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		for ctx.Err() == nil {
			for range 10 {
				_ = c.PublishAsync(unreadTopic, []byte(`{"text":"`+strings.Repeat("x", 100)+`"}`), wire.PublishOptions{}, func(string, error) {})
			}
			<-time.After(20 * time.Millisecond)
		}
	}()
	return done
}

// dialUnread connects with a small buffer, so that the kernel does not read for the client.
func dialUnread(ctx context.Context, to string) (*websocket.Conn, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(4096)
		}
		return conn, err
	}}
	ws, _, err := websocket.Dial(ctx, to, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}}) //nolint:bodyclose // the library closes it
	if err == nil {
		ws.SetReadLimit(-1)
	}
	return ws, err
}

// attackUnreadStreams opens streams of server-sent events, does not read them, and goes.
func attackUnreadStreams(ctx context.Context, a *attacker) {
	prepareUnread(ctx, a)
	a.crowd(ctx, unreadGroups, func(i, _ int) {
		conn, err := net.DialTimeout("tcp", strings.TrimPrefix(a.http, "http://"), patience)
		if err != nil {
			return
		}
		defer conn.Close() //nolint:errcheck // it is the purpose
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(4096)
		}
		if _, err := io.WriteString(conn, "GET "+streamPath(i)+" HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer "+a.token+"\r\n\r\n"); err != nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(unreadFor):
		}
	})
}

func streamPath(i int) string {
	return "/subscribe?" + url.Values{"topic": {unreadTopic}, "group": {fmt.Sprintf("s-%d", i)}, "from": {"earliest"}, "maxInFlight": {"10000"}, "batchSize": {"10000"}}.Encode()
}

// readStreamsAndGo opens as many, and reads and settles what comes: the same events, and new ones
// all the while.
func readStreamsAndGo(ctx context.Context, a *attacker) {
	prepareUnread(ctx, a)
	var got atomic.Int64
	publishing := a.keepPublishing(ctx)
	a.crowd(ctx, unreadGroups, func(i, _ int) {
		within, cancel := context.WithTimeout(ctx, unreadFor)
		defer cancel()
		req, err := http.NewRequestWithContext(within, http.MethodGet, a.http+streamPath(i), nil)
		if err != nil {
			return
		}
		req.Header.Set("Authorization", "Bearer "+a.token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return
		}
		defer resp.Body.Close() //nolint:errcheck // of a body that was read
		var handles []string
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			_, handle, event := strings.Cut(lines.Text(), `,"ack":`)
			if !event {
				continue
			}
			got.Add(1)
			if handles = append(handles, strings.TrimSuffix(handle, "}")); len(handles) == 100 {
				a.ask(within, http.MethodPost, "/ack", strings.NewReader(`{"ack":[`+strings.Join(handles, ",")+`]}`))
				handles = handles[:0]
			}
		}
	})
	<-publishing
	a.report("%d events read", got.Load())
}

// checkUnread looks for what the attack must not bring about.
func checkUnread(t *testing.T, f *floodedHub) {
	t.Helper()
	for line := range strings.Lines(f.hub.log.String()) {
		if strings.Contains(line, "stood still") {
			t.Errorf("the hub took its own work for a stall: %s", line)
		}
	}
}
