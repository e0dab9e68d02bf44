//go:build unix

package main

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"eventhub/sdk/go/wire"
)

// letterAttacks are the attacks by ids that nobody has, and by events that fail.
var letterAttacks = []attack{
	{name: "searches", scopes: []string{"*:attack.searches.**"}, run: attackSearches, like: permittedStarts},
	{name: "letters", scopes: []string{"*:attack.letters.**"}, run: attackLetters, check: checkLetters},
	{name: "letters published", scopes: []string{"publish:dlq.attack.**", "publish:attack.batches.**"}, run: attackPublishedLetters, like: permittedBatches, check: checkLetters},
}

// attackSearches fills a topic, and starts groups there after events that do not exist.
func attackSearches(ctx context.Context, a *attacker) {
	const connections, lines = 50, 5_000
	batch := strings.Repeat(`{"payload":1}`+"\n", lines)
	a.ask(ctx, http.MethodPost, "/publish/attack.searches.t", strings.NewReader("1"))
	var searches, found atomic.Int64
	a.crowd(ctx, 1+connections, func(worker, round int) {
		if worker == 0 {
			if round*lines < 100_000 {
				a.ask(ctx, http.MethodPost, "/publish/attack.searches.t", strings.NewReader(batch), "Content-Type", "application/x-ndjson")
				return
			}
			<-ctx.Done()
			return
		}
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		for id := 0; ctx.Err() == nil; id++ {
			after := "nobody-" + strconv.Itoa(id)
			if id%2 == 0 {
				after = uuid.Must(uuid.NewV7()).String()
			}
			_, err := c.Subscribe(ctx, "attack.searches.t", "g", wire.SubscribeOptions{From: "afterId", AfterID: after}, func(wire.Event) {})
			if err == nil {
				found.Add(1)
				return
			}
			searches.Add(1)
		}
	})
	a.report("%d searches, %d events found that do not exist", searches.Load(), found.Load())
}

// permittedStarts fills such a topic as well, and joins and leaves one group there.
func permittedStarts(ctx context.Context, a *attacker) {
	batch := strings.Repeat(`{"payload":1}`+"\n", 5_000)
	a.ask(ctx, http.MethodPost, "/publish/attack.searches.t", strings.NewReader(batch), "Content-Type", "application/x-ndjson")
	a.crowd(ctx, 50, func(int, int) {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		for ctx.Err() == nil {
			sub, err := c.Subscribe(ctx, "attack.searches.t", "latest", wire.SubscribeOptions{MaxInFlight: 1}, func(wire.Event) {})
			if err != nil || sub.Unsubscribe(ctx) != nil {
				return
			}
		}
	})
}

// attackLetters refuses all events of a topic for good, in ever new groups.
func attackLetters(ctx context.Context, a *attacker) {
	payload := `"` + strings.Repeat("x", 10_000) + `"`
	once := 1
	for range 200 {
		a.ask(ctx, http.MethodPost, "/publish/attack.letters.t", strings.NewReader(payload))
	}
	var refused atomic.Int64
	a.crowd(ctx, 4, func(worker, round int) {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		for n := 0; ctx.Err() == nil; n++ {
			group := strconv.Itoa(worker) + "-" + strconv.Itoa(round) + "-" + strconv.Itoa(n)
			sub, err := c.Subscribe(ctx, "attack.letters.t", group, wire.SubscribeOptions{From: "earliest", MaxAttempts: &once, MaxInFlight: 1000}, func(e wire.Event) {
				refused.Add(1)
				_ = e.Nack("no", 0)
			})
			if err != nil {
				return // too many groups, or the end
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
			_ = sub.Unsubscribe(ctx)
		}
	})
	a.report("%d events refused", refused.Load())
}

// attackPublishedLetters publishes dead letters itself.
func attackPublishedLetters(ctx context.Context, a *attacker) { publishBatches(ctx, a, "dlq.attack.") }

// permittedBatches publishes as many events that are no dead letters.
func permittedBatches(ctx context.Context, a *attacker) { publishBatches(ctx, a, "attack.batches.") }

func publishBatches(ctx context.Context, a *attacker, topics string) {
	batch := strings.Repeat(`"`+strings.Repeat("x", 10_000)+`"`+"\n", 50)
	a.crowd(ctx, 4, func(worker, _ int) {
		a.ask(ctx, http.MethodPost, "/publish/"+topics+strconv.Itoa(worker), strings.NewReader(batch), "Content-Type", "application/x-ndjson")
	})
}

// checkLetters has an event of somebody else fail: its dead letter does not wait behind those of
// the attacker.
func checkLetters(t *testing.T, f *floodedHub) {
	t.Helper()
	c := f.hub.dialWith(f.sign(t, "somebody", "*:somebody.**", "subscribe:dlq.somebody.**"))
	defer c.Abort()
	publishTo(t, c, "somebody.t", "1")
	began, once := time.Now(), 1
	if _, err := c.Subscribe(t.Context(), "somebody.t", "g", wire.SubscribeOptions{From: "earliest", MaxAttempts: &once}, func(e wire.Event) { _ = e.Nack("no", 0) }); err != nil {
		t.Fatal(err)
	}
	came := make(chan struct{}, 1)
	if _, err := c.Subscribe(t.Context(), "dlq.somebody.t", "g", wire.SubscribeOptions{From: "earliest"}, func(e wire.Event) {
		_ = e.Ack()
		select {
		case came <- struct{}{}:
		default:
		}
	}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-came:
		t.Logf("somebody's dead letter came after %v", time.Since(began).Round(time.Millisecond))
	case <-time.After(5 * time.Second):
		t.Error("somebody's dead letter waits behind those of the attacker")
	}
}
