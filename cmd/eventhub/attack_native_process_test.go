//go:build unix

package main

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
)

// nativeAttacks are the attacks of native clients.
var nativeAttacks = []attack{
	{name: "native searches", scopes: []string{"*:attack.native"}, run: attackNativeSearches, like: permittedNativeReads},
}

// nativeKeys is how many keys the topic of the native attacks has.
const nativeKeys = 100_000

// fillNatively stores events with as many keys in the topic of the native attacks.
func fillNatively(t *testing.T, f *floodedHub) {
	t.Helper()
	publishTo(t, f.hub.dial(), "attack.native", "1")
	nc, _ := dialNative(t, f.hub.nats, nodeToken)
	defer nc.Close()
	js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(4000))
	if err != nil {
		t.Fatal(err)
	}
	for i := range nativeKeys {
		if _, err := js.PublishAsync("keyed."+strconv.Itoa(i)+".attack.native", []byte("1"), natsjs.WithStallWait(patience)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(slowdown * patience):
		t.Fatal("the events of the native attacks were not stored")
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
			if nc.PublishRequest("$JS.API."+r[0], inbox, []byte(r[1])) == nil {
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
		[2]string{"STREAM.INFO.attack=2Enative", `{"subjects_filter":">"}`},
		[2]string{"DIRECT.GET.attack=2Enative", `{"seq":1,"batch":10000}`},
		[2]string{"DIRECT.GET.attack=2Enative", `{"multi_last":["keyed.1*.attack.native"]}`},
		[2]string{"STREAM.MSG.GET.attack=2Enative", `{"last_by_subj":"keyed.*.attack.native"}`},
		[2]string{"DIRECT.GET.attack=2Enative.keyed.*.attack.native", ""})
}

// permittedNativeReads asks as often for what it may have.
func permittedNativeReads(ctx context.Context, a *attacker) {
	askNatively(ctx, a, 20*time.Millisecond,
		[2]string{"STREAM.INFO.attack=2Enative", ""},
		[2]string{"DIRECT.GET.attack=2Enative", `{"seq":1}`},
		[2]string{"DIRECT.GET.attack=2Enative", `{"last_by_subj":"keyed.1.attack.native"}`},
		[2]string{"STREAM.MSG.GET.attack=2Enative", `{"last_by_subj":"keyed.1.attack.native"}`},
		[2]string{"DIRECT.GET.attack=2Enative.keyed.1.attack.native", ""})
}
