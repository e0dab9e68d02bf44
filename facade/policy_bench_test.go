package facade_test

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

// hundredRules is a policy whose last rule is the one that allows topics below bench.
func hundredRules() []byte {
	var b strings.Builder
	b.WriteString(`{"rules":[`)
	for i := range 99 {
		n := strconv.Itoa(i)
		b.WriteString(`{"effect":"deny","action":"publish","topics":["bench.*.no` + n + `","other.` + n + `.**"]},`)
	}
	b.WriteString(`{"effect":"allow","action":"*","topics":["bench.**"]}]}`)
	return []byte(b.String())
}

// BenchmarkPublishPolicy publishes over one WebSocket with full rights and with a policy of 100
// rules; to one topic, whose decision the connection remembers, and to more topics than it
// remembers. Compare within one run only.
func BenchmarkPublishPolicy(b *testing.B) {
	bus := openBus(b, func(c *jetstream.Config) { c.MemoryStorage, c.Limits.TopicsPerClient = true, 1000 })
	hub := startHub(b, bus, unthrottled, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(newVerifier(b)) })
	payload := benchPayload()
	var topics []string
	for i := range 200 {
		topics = append(topics, "bench.policy.t"+strconv.Itoa(i))
		if _, err := bus.Publish(b.Context(), topics[i], payload, jetstream.PublishOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, token string
		topics      []string
	}{
		{"full rights/one topic", rigToken, topics[:1]},
		{"100 rules/one topic", sign(b, acl.Grant{Subject: "x", Policy: hundredRules()}), topics[:1]},
		{"full rights/200 topics", rigToken, topics},
		{"100 rules/200 topics", sign(b, acl.Grant{Subject: "x", Policy: hundredRules()}), topics},
	} {
		b.Run(c.name, func(b *testing.B) {
			conn, err := wire.Dial(b.Context(), hub.url, wire.Options{Token: c.token, PublishInFlight: benchInFlight})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			b.ReportAllocs()
			b.ResetTimer()
			var failed atomic.Int64
			var wg sync.WaitGroup
			wg.Add(b.N)
			for i := range b.N {
				if err := conn.PublishAsync(c.topics[i%len(c.topics)], payload, wire.PublishOptions{}, func(_ string, err error) {
					if err != nil {
						failed.Add(1)
					}
					wg.Done()
				}); err != nil {
					b.Fatal(err)
				}
			}
			wg.Wait()
			if failed.Load() > 0 {
				b.Fatalf("%d publishes failed", failed.Load())
			}
		})
	}
}
