//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/native"
	"eventhub/sdk/go/wire"
)

// nativeAttacks are the attacks of native clients.
var nativeAttacks = []attack{
	{name: "native searches", scopes: []string{"*:attack.native"}, run: attackNativeSearches, like: permittedNativeReads},
	{name: "native requests", scopes: []string{"*:attack.native"}, run: attackNativeRequests, like: permittedNativeRequests},
	{name: "native settlements", scopes: []string{"*:attack.native"}, run: attackNativeSettlements, like: permittedNativeSettlements},
	{name: "native connections", scopes: []string{"*:attack.connections.**"}, run: attackNativeConnections, like: permittedNativeConnections},
	{name: "native publishes", scopes: []string{"publish:attack.native", "publish:attack.void"}, run: attackNativePublishes, like: permittedNativePublishes},
}

// nativeKeys is how many keys the topic of the native attacks has, and nativeTopics how many topics
// its connections find.
const (
	nativeKeys   = 100_000
	nativeTopics = 200
)

// fillNatively stores events with as many keys in the topic of the native attacks, and makes the
// topics, each divided by part.
func fillNatively(t *testing.T, f *floodedHub, part int) {
	t.Helper()
	publishTo(t, f.hub.dial(), "attack.native", "1")
	nc, _ := dialNative(t, f.hub.nats, nodeToken)
	defer nc.Close()
	js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(4000))
	if err != nil {
		t.Fatal(err)
	}
	for i := range nativeKeys / part {
		if _, err := js.PublishAsync("keyed."+strconv.Itoa(i)+".attack.native", []byte("1"), natsjs.WithStallWait(patience)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(slowdown * patience):
		t.Fatal("the events of the native attacks were not stored")
	}
	for i := range nativeTopics / part {
		topic := "attack.connections." + strconv.Itoa(i)
		cfg := natsjs.StreamConfig{Name: native.ObjectName(topic), Subjects: []string{native.Subject(topic, ""), native.KeyedPattern(topic)}}
		if _, err := js.CreateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
	}
}

// natively connects with the attacker's token, and drops what comes to the inbox, which it returns.
// It returns nil when ctx has ended.
func (a *attacker) natively(ctx context.Context, answered *atomic.Int64) (nc *nats.Conn, inbox string) {
	for ctx.Err() == nil {
		prefix := jetstream.NativeInbox(a.token)
		nc, err := nats.Connect(a.nats, nats.Token(a.token), nats.CustomInboxPrefix(prefix), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		if _, err := nc.Subscribe(prefix+".>", func(*nats.Msg) { answered.Add(1) }); err == nil {
			return nc, prefix + ".x"
		}
		nc.Close()
	}
	return nil, ""
}

// askNatively sends these requests every so often. Each is a subject and a body.
func askNatively(ctx context.Context, a *attacker, every time.Duration, requests ...[2]string) {
	var sent, answered atomic.Int64
	nc, inbox := a.natively(ctx, &answered)
	if nc == nil {
		return
	}
	defer nc.Close()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for ctx.Err() == nil {
		<-tick.C
		for _, r := range requests {
			reply := inbox
			if strings.HasPrefix(r[0], "$JS.ACK.") {
				reply = "" // nothing is asked
			}
			if nc.PublishMsg(&nats.Msg{Subject: r[0], Reply: reply, Data: []byte(r[1])}) == nil {
				sent.Add(1)
			}
		}
		_ = nc.Flush()
	}
	a.report("%d requests sent, %d answers came", sent.Load(), answered.Load())
}

// attackNativeSearches asks for all keys of a stream, for many events at a time, and for the newest
// one of a pattern.
func attackNativeSearches(ctx context.Context, a *attacker) {
	askNatively(ctx, a, 20*time.Millisecond,
		[2]string{"$JS.API.STREAM.INFO.attack=2Enative", `{"subjects_filter":">"}`},
		[2]string{"$JS.API.DIRECT.GET.attack=2Enative", `{"seq":1,"batch":10000}`},
		[2]string{"$JS.API.DIRECT.GET.attack=2Enative", `{"multi_last":["keyed.1*.attack.native"]}`},
		[2]string{"$JS.API.STREAM.MSG.GET.attack=2Enative", `{"last_by_subj":"keyed.*.attack.native"}`},
		[2]string{"$JS.API.DIRECT.GET.attack=2Enative.keyed.*.attack.native", ""})
}

// permittedNativeReads asks as often for what it may have.
func permittedNativeReads(ctx context.Context, a *attacker) {
	askNatively(ctx, a, 20*time.Millisecond,
		[2]string{"$JS.API.STREAM.INFO.attack=2Enative", ""},
		[2]string{"$JS.API.DIRECT.GET.attack=2Enative", `{"seq":1}`},
		[2]string{"$JS.API.DIRECT.GET.attack=2Enative", `{"last_by_subj":"keyed.1.attack.native"}`},
		[2]string{"$JS.API.STREAM.MSG.GET.attack=2Enative", `{"last_by_subj":"keyed.1.attack.native"}`},
		[2]string{"$JS.API.DIRECT.GET.attack=2Enative.keyed.1.attack.native", ""})
}

// pourNatively sends what a chunk of the protocol says on some connections, as fast as the server
// takes it.
func pourNatively(ctx context.Context, a *attacker, connections int, chunk []byte) {
	var chunks atomic.Int64
	a.crowd(ctx, connections, func(int, int) {
		conn, err := net.DialTimeout("tcp", strings.TrimPrefix(a.nats, "nats://"), patience)
		if err != nil {
			return
		}
		defer drop(conn)
		defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
		if _, err := fmt.Fprintf(conn, "CONNECT {\"auth_token\":%q,\"lang\":\"go\",\"headers\":true,\"no_responders\":true}\r\nSUB %s.> 1\r\n", a.token, jetstream.NativeInbox(a.token)); err != nil {
			return
		}
		go func() { _, _ = io.Copy(io.Discard, conn) }()
		for ctx.Err() == nil {
			if _, err := conn.Write(chunk); err != nil {
				break
			}
			chunks.Add(1)
		}
	})
	a.report("%d KiB sent", chunks.Load()*int64(len(chunk))>>10)
}

// permittedNatively sends messages at a pace.
func permittedNatively(ctx context.Context, a *attacker, perSecond int, subject, body string) {
	const every = 10 * time.Millisecond
	requests := make([][2]string, perSecond/int(time.Second/every))
	for i := range requests {
		requests[i] = [2]string{subject, body}
	}
	askNatively(ctx, a, every, requests...)
}

// requestOf is a request in the protocol.
func requestOf(a *attacker, subject, body string) string {
	return fmt.Sprintf("PUB $JS.API.%s %s.x %d\r\n%s\r\n", subject, jetstream.NativeInbox(a.token), len(body), body)
}

// attackNativeRequests asks the server as often as it can.
func attackNativeRequests(ctx context.Context, a *attacker) {
	all := requestOf(a, "STREAM.INFO.attack=2Enative", "") + requestOf(a, "STREAM.MSG.GET.attack=2Enative", `{"seq":1}`) +
		requestOf(a, "DIRECT.GET.attack=2Enative", `{"seq":1}`) + requestOf(a, "DIRECT.GET.attack=2Enative", `{"seq":1,"batch":1000}`)
	pourNatively(ctx, a, 4, []byte(strings.Repeat(all, 50)))
}

// permittedNativeRequests asks at nine tenths of the rate.
func permittedNativeRequests(ctx context.Context, a *attacker) {
	permittedNatively(ctx, a, 900, "$JS.API.STREAM.INFO.attack=2Enative", "")
}

// memberNatively makes the group g of the native attacks.
func memberNatively(ctx context.Context, a *attacker) {
	c := a.dial(ctx)
	if c == nil {
		return
	}
	defer c.Abort()
	if _, err := c.Subscribe(ctx, "attack.native", "g", wire.SubscribeOptions{}, func(wire.Event) {}); err != nil && ctx.Err() == nil {
		a.report("the group was not made: %v", err)
	}
}

// attackNativeSettlements acknowledges events that its group never got, and asks for the next ones
// each time.
func attackNativeSettlements(ctx context.Context, a *attacker) {
	memberNatively(ctx, a)
	const ack = "$JS.ACK.attack=2Enative.g.1.1.1.1.0"
	pourNatively(ctx, a, 4, []byte(strings.Repeat("PUB "+ack+" 4\r\n+ACK\r\nPUB "+ack+" "+jetstream.NativeInbox(a.token)+".x 4\r\n+NXT\r\n", 500)))
}

// permittedNativeSettlements acknowledges at half the rate.
func permittedNativeSettlements(ctx context.Context, a *attacker) {
	memberNatively(ctx, a)
	permittedNatively(ctx, a, 100_000, "$JS.ACK.attack=2Enative.g.1.1.1.1.0", "+ACK")
}

// attackNativePublishes publishes as much as it can to a subject that no stream stores, pings, and
// subscribes.
func attackNativePublishes(ctx context.Context, a *attacker) {
	pourNatively(ctx, a, 4, []byte(strings.Repeat("PUB event.attack.void 1\r\n1\r\n", 1_000)+strings.Repeat("PING\r\n", 100)+
		strings.Repeat("SUB "+jetstream.NativeInbox(a.token)+".y 7\r\nUNSUB 7\r\n", 50)))
}

// permittedNativePublishes publishes there at nine tenths of the rate.
func permittedNativePublishes(ctx context.Context, a *attacker) {
	permittedNatively(ctx, a, 9_000, "event.attack.void", "1")
}

// attackNativeConnections connects on eight connections at a time, and leaves again.
func attackNativeConnections(ctx context.Context, a *attacker) {
	var came atomic.Int64
	a.crowd(ctx, 8, func(int, int) {
		var answered atomic.Int64
		if nc, _ := a.natively(ctx, &answered); nc != nil {
			nc.Close()
			came.Add(1)
		}
	})
	a.report("connected %d times", came.Load())
}

// permittedNativeConnections connects about 25 times a second, one after the other.
func permittedNativeConnections(ctx context.Context, a *attacker) {
	a.crowd(ctx, 1, func(int, int) {
		var answered atomic.Int64
		if nc, _ := a.natively(ctx, &answered); nc != nil {
			nc.Close()
		}
		select {
		case <-ctx.Done():
		case <-time.After(30 * time.Millisecond):
		}
	})
}
