//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"eventhub/sdk/go/wire"
)

// schemaAttacks are those by payloads that take long to compare with their schemas, or to cast.
var schemaAttacks = []attack{
	{name: "casts", scopes: []string{"*:attack.schemas.**"}, run: attackCasts, like: permittedCasts},
	{name: "comparisons", scopes: []string{"publish:attack.schemas.**", "schema:attack.schemas.**"}, run: attackComparisons, like: permittedComparisons},
}

// comparedSlowly are schemas, and a payload for each that takes long to compare with it.
var comparedSlowly = func() (all []struct{ schema, payload string }) {
	add := func(schema, payload string) { all = append(all, struct{ schema, payload string }{schema, payload}) }

	var branches []string
	for i := range 61 {
		branches = append(branches, fmt.Sprintf(`{"items":{"properties":{"a":{"const":%d}},"required":["a"]}}`, i))
	}
	add(`{"anyOf":[`+strings.Join(branches, ",")+`]}`, "["+strings.Repeat(`{"b":1,"a":60},`, 4000)+`{"a":61}]`)

	var numbers []string
	for i := range 30_000 {
		numbers = append(numbers, strconv.Itoa(i))
	}
	add(`{"items":{"enum":[`+strings.Join(numbers, ",")+`]}}`, "["+strings.Repeat("0.5e1,", 500)+"0.5]")

	add(`{"uniqueItems":true}`, "["+strings.Repeat(strings.Repeat("[", 50)+strings.Repeat("]", 50)+",", 9_000)+"1]")
	return all
}()

// comparers is how many payloads are published at a time, and comparedASecond how many of them the
// ration lets be compared.
const comparers, comparedASecond = 64, 100

// attackComparisons publishes such payloads.
func attackComparisons(ctx context.Context, a *attacker) {
	a.registerSchemas(ctx)
	var compared, refused atomic.Int64
	a.crowd(ctx, comparers, func(worker, _ int) {
		i := worker % len(comparedSlowly)
		switch status, _ := a.ask(ctx, http.MethodPost, "/publish/attack.schemas."+strconv.Itoa(i), strings.NewReader(comparedSlowly[i].payload)); status {
		case http.StatusOK, http.StatusUnprocessableEntity:
			compared.Add(1)
		case http.StatusTooManyRequests, http.StatusServiceUnavailable:
			refused.Add(1)
		}
	})
	a.report("%d payloads compared, %d refused", compared.Load(), refused.Load())
}

// permittedComparisons publishes the same payloads, as many at a time and about as many a second as
// are compared, to a topic without a schema.
func permittedComparisons(ctx context.Context, a *attacker) {
	a.registerSchemas(ctx)
	var stored atomic.Int64
	a.crowd(ctx, comparers, func(worker, _ int) {
		next := time.After(comparers * time.Second / comparedASecond)
		if status, _ := a.ask(ctx, http.MethodPost, "/publish/attack.schemas.without.any", strings.NewReader(comparedSlowly[worker%len(comparedSlowly)].payload)); status == http.StatusOK {
			stored.Add(1)
		}
		select {
		case <-next:
		case <-ctx.Done():
		}
	})
	a.report("%d payloads stored", stored.Load())
}

// registerSchemas registers the schemas of comparedSlowly.
func (a *attacker) registerSchemas(ctx context.Context) {
	for i, s := range comparedSlowly {
		body, err := json.Marshal(map[string]any{"schema": json.RawMessage(s.schema)})
		if err != nil {
			panic(err)
		}
		status, answer := a.ask(ctx, http.MethodPost, "/schemas/attack.schemas."+strconv.Itoa(i), strings.NewReader(string(body)))
		if status/100 != 2 && ctx.Err() == nil {
			a.report("schema %d: %d %.300s", i, status, answer)
		}
	}
}

const (
	castTopic  = "attack.schemas.cast"
	castEvents = 50
)

// registerCast registers two versions of a list, in the second of which the first 40 elements are
// removed, and publishes long lists of the first version.
func registerCast(ctx context.Context, a *attacker) {
	up := "[" + strings.Repeat(`{"remove":{"at":"/0"}},`, 39) + `{"remove":{"at":"/0"}}]`
	for _, draft := range []string{`{"schema":{"type":"array"}}`, `{"schema":{"type":"array"},"up":` + up + `}`} {
		if status, answer := a.ask(ctx, http.MethodPost, "/schemas/"+castTopic+"?force=true", strings.NewReader(draft)); status/100 != 2 && ctx.Err() == nil {
			a.report("%d %.300s", status, answer)
		}
	}
	list := "[" + strings.Repeat("10,", 40_000) + "1]"
	for range castEvents {
		if status, answer := a.ask(ctx, http.MethodPost, "/publish/"+castTopic, strings.NewReader(list), "X-Schema-Version", "1"); status != http.StatusOK && ctx.Err() == nil {
			a.report("%d %.300s", status, answer)
		}
	}
}

// attackCasts has the lists cast by replays, pulls, a subscription and a broadcast, and exports of
// them compressed.
func attackCasts(ctx context.Context, a *attacker) {
	registerCast(ctx, a)
	for i := range 4 {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		_, _ = c.Subscribe(ctx, castTopic, "g"+strconv.Itoa(i), wire.SubscribeOptions{From: "earliest", SchemaVersion: 2}, func(e wire.Event) { _ = e.Nack("again", 0) })
	}
	var read, pulled, refused atomic.Int64
	a.crowd(ctx, 80, func(worker, _ int) {
		var status int
		switch {
		case worker < 8:
			status, _ = a.ask(ctx, http.MethodGet, "/replay?schemaVersion=2&topic="+castTopic, nil)
		case worker < 16:
			status, _ = a.ask(ctx, http.MethodGet, "/export?ndjson=1&topic="+castTopic, nil, "Accept-Encoding", "zstd")
		default:
			status, _ = a.ask(ctx, http.MethodPost, "/groups/"+castTopic+"/p"+strconv.Itoa(worker)+"/pull", strings.NewReader(`{"max":10,"opts":{"from":"earliest","schemaVersion":2}}`))
			if status == http.StatusOK {
				pulled.Add(1)
				return
			}
		}
		if status == http.StatusOK {
			read.Add(1)
		} else {
			refused.Add(1)
		}
	})
	a.report("%d answers read, %d pulls, %d refused", read.Load(), pulled.Load(), refused.Load())
}

// permittedCasts reads lists in their second version, within the ration, one after the other.
func permittedCasts(ctx context.Context, a *attacker) {
	registerCast(ctx, a)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		<-tick.C
		a.ask(ctx, http.MethodGet, "/replay?limit=1&schemaVersion=2&topic="+castTopic, nil)
	}
}
