//go:build unix

package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/sdk/go/wire"
)

// outboxAttacks are those through POST /outbox, and on the keys of compacted topics.
var outboxAttacks = []attack{
	{name: "topics", scopes: []string{"publish:attack.topics.**"}, run: attackTopics, check: checkTopics},
	{name: "topics of an operator", scopes: []string{"admin:attack.operators.**"}, run: attackOperators, check: checkOperators},
	{name: "outbox", scopes: []string{"publish:attack.outbox"}, run: attackOutbox, like: permittedPosts, disk: 1100},
	{name: "keys", scopes: []string{"publish:attack.keys"}, run: attackKeys, memory: 512, disk: 256},
	{name: "removed keys", scopes: []string{"*:attack.removed"}, run: attackRemovedKeys, like: permittedKeys, memory: 512, disk: 256},
}

// attackTopics posts to ever new topics.
func attackTopics(ctx context.Context, a *attacker) {
	makeTopics(ctx, a, func(name string) (status int) {
		status, _ = a.ask(ctx, http.MethodPost, "/outbox/attack.topics."+name, strings.NewReader("1"))
		return status
	})
}

// makeTopics makes topics until ctx ends, each with another name.
func makeTopics(ctx context.Context, a *attacker, ask func(name string) (status int)) {
	var made, refused atomic.Int64
	a.crowd(ctx, 16, func(w, round int) {
		switch ask(fmt.Sprintf("%d.%d", w, round)) {
		case http.StatusOK, http.StatusCreated, http.StatusAccepted:
			made.Add(1)
		case http.StatusTooManyRequests:
			refused.Add(1)
		}
	})
	a.report("%d topics, %d refused", made.Load(), refused.Load())
}

// checkTopics counts the topics that the attack made. A long attack may make some more.
func checkTopics(t *testing.T, f *floodedHub) {
	t.Helper()
	limit := 100 + int(attackFor.Seconds()/10) + 1
	made := func() int { return strings.Count(f.hub.log.String(), `msg="topic made" topic=attack.topics.`) }
	waitFor(t, "what the attacker posted is published", func() bool { return made() > 0 })
	if n := made(); n > limit {
		t.Errorf("%d topics were made, at most %d may be", n, limit)
	}
}

// attackOperators makes ever new topics over the ops port.
func attackOperators(ctx context.Context, a *attacker) {
	makeTopics(ctx, a, func(name string) (status int) {
		status, _ = askWith(ctx, a.token, http.MethodPut, a.ops+"/topics/attack.operators."+name, nil)
		return status
	})
}

// checkOperators has somebody else make a topic.
func checkOperators(t *testing.T, f *floodedHub) {
	t.Helper()
	publishTo(t, f.hub.dialWith(f.sign(t, "somebody", "*:somebody.**")), "somebody.new", "1")
}

// attackOutbox posts events of nearly the largest size, faster than they can be published, with ids
// that others may use.
func attackOutbox(ctx context.Context, a *attacker) {
	body := `"` + strings.Repeat("x", 900_000) + `"`
	var stored, refused atomic.Int64
	a.crowd(ctx, 4, func(w, round int) {
		switch status, _ := a.ask(ctx, http.MethodPost, "/outbox/attack.outbox", strings.NewReader(body), "Event-Id", fmt.Sprintf("order-%d", 4*round+w), "Event-Key", "k"); status {
		case http.StatusAccepted:
			stored.Add(1)
		case http.StatusServiceUnavailable:
			refused.Add(1)
		}
	})
	a.report("%d events stored, %d refused", stored.Load(), refused.Load())
}

// permittedPosts posts events of the same size within its rate: as many as that allows at once, and
// then one after the other.
func permittedPosts(ctx context.Context, a *attacker) {
	body := `"` + strings.Repeat("x", 900_000) + `"`
	const atOnce = 32 << 20 / 900_000
	crowd(4, func(int) {
		for range atOnce / 4 {
			a.ask(ctx, http.MethodPost, "/outbox/attack.outbox", strings.NewReader(body), "Event-Key", "k")
		}
	})
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		a.ask(ctx, http.MethodPost, "/outbox/attack.outbox", strings.NewReader(body), "Event-Key", "k")
	}
}

// attackKeys publishes to ever new keys of a compacted topic.
func attackKeys(ctx context.Context, a *attacker) { publishKeys(ctx, a, "attack.keys", false) }

// publishKeys publishes to new keys, and removes each again if remove is set, until ctx ends.
func publishKeys(ctx context.Context, a *attacker, topic string, remove bool) {
	c := a.dial(ctx)
	if c == nil {
		return
	}
	defer c.Abort()
	var made, refused atomic.Int64
	done := func(_ string, err error) {
		if err == nil {
			made.Add(1)
		} else {
			refused.Add(1)
		}
	}
	for n := 0; ctx.Err() == nil; n++ {
		key := fmt.Sprintf("%s-%d", a.name, n)
		if c.PublishAsync(topic, []byte("1"), wire.PublishOptions{Key: key}, done) != nil {
			break
		}
		if remove && c.PublishAsync(topic, []byte("null"), wire.PublishOptions{Key: key, Tombstone: true}, done) != nil {
			break
		}
	}
	a.report("%d events stored, %d refused", made.Load(), refused.Load())
}

// attackRemovedKeys makes and removes keys, and asks for the page behind them.
func attackRemovedKeys(ctx context.Context, a *attacker) {
	a.ask(ctx, http.MethodPost, "/publish/attack.removed", strings.NewReader("1"), "Event-Key", "first")
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { publishKeys(ctx, a, "attack.removed", true) })
	a.crowd(ctx, 16, func(int, int) {
		a.ask(ctx, http.MethodGet, "/snap/attack.removed?limit=1", nil)
		a.ask(ctx, http.MethodGet, "/snap/attack.removed?limit=1&next=", nil)
	})
}

// permittedKeys writes a thousand keys again and again, and reads pages with as many requests at a
// time as a principal may have.
func permittedKeys(ctx context.Context, a *attacker) {
	c := a.dial(ctx)
	if c == nil {
		return
	}
	defer c.Abort()
	a.crowd(ctx, 3, func(worker, round int) {
		if worker > 0 {
			a.ask(ctx, http.MethodGet, "/snap/attack.removed?limit=1000", nil)
			return
		}
		_ = c.PublishAsync("attack.removed", []byte("1"), wire.PublishOptions{Key: fmt.Sprint("k", round%1000)}, func(string, error) {})
	})
}
