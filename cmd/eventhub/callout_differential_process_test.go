//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
	"eventhub/sdk/go/wire"
)

var (
	calloutOperations = flag.Int("callout.operations", 600, "operations of TestNativeClientsMayDoWhatOthersMay")
	calloutSeed       = flag.Uint64("callout.seed", 0, "seed of TestNativeClientsMayDoWhatOthersMay; 0 takes a new one")
)

// operationsOfPolicy is how many operations are tried with each random policy.
const operationsOfPolicy = 30

// The topics and groups of the hub that tests of native permissions use.
var (
	calloutRules = `topics:
  - {pattern: user.*.events, family: users}
  - {topic: state, compaction: true}
`
	calloutTopics = []string{
		"orders.placed", "orders.paid", "orders.eu.placed", "shop.cart", "shop.cart.snapshot", "state", "user.1.events", "user.2.events",
		"dlq.orders.placed", "dlq.shop.cart", "dlq.shop.cart.snapshot",
	}
	calloutGroups = []string{"billing", "mail", "tab-1", "process-projector"}
)

// calloutHub is a hub with topics and groups, and with a listener for native clients.
func calloutHub(t *testing.T, flags ...string) *node {
	t.Helper()
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte(calloutRules), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, append([]string{"--nats-listen=127.0.0.1:0", "--jwt-secret-file=" + secretFile(t), "--topics=" + rules}, flags...)...)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	admin := hub.dial()
	for _, topic := range calloutTopics {
		if _, err := admin.Publish(ctx, topic, []byte("1"), wire.PublishOptions{Key: "k"}); err != nil {
			t.Fatal(err)
		}
		for _, group := range calloutGroups {
			s, err := admin.Subscribe(ctx, topic, group, wire.SubscribeOptions{From: "earliest", MaxAttempts: new(int)}, func(wire.Event) {})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Unsubscribe(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	return hub
}

// places returns the stream of a topic, and the consumer of a group of the topic.
func places(topic, group string) (stream, consumer string) {
	escape := strings.NewReplacer(".", "=2E", "@", "=40").Replace
	switch {
	case strings.HasPrefix(topic, "user."):
		return "users", escape(group + "@" + topic)
	case strings.HasPrefix(topic, "dlq."):
		return "dlq", escape(group + "@" + topic)
	}
	return escape(topic), escape(group)
}

// subject returns the subject of a topic's events.
func subject(topic, key string) string {
	if key == "" {
		return "event." + topic
	}
	return "keyed." + key + "." + topic
}

// randomPattern returns a pattern that may match topics of the hub.
func randomPattern(rng *rand.Rand) string {
	segments := strings.Split(calloutTopics[rng.IntN(len(calloutTopics))], ".")
	for i := range segments {
		switch rng.IntN(5) {
		case 0, 1:
			segments[i] = "*"
		case 2:
			segments[i] = "**"
		}
	}
	if rng.IntN(4) == 0 {
		segments = append(segments[:1+rng.IntN(len(segments))], "**")
	}
	return strings.Join(segments, ".")
}

// randomGrant returns a grant, and whether it has scopes, which deny nothing.
func randomGrant(rng *rand.Rand) (g acl.Grant, scopes bool) {
	actions := []string{"publish", "subscribe", "subscribe", "inspect", "presence", "admin", "*"}
	if rng.IntN(2) == 0 {
		for range 1 + rng.IntN(6) {
			scope := actions[rng.IntN(len(actions))] + ":" + randomPattern(rng)
			if strings.HasPrefix(scope, "subscribe:") && rng.IntN(2) == 0 {
				scope += "::" + []string{"billing", "tab-*", "*"}[rng.IntN(3)]
			}
			g.Scopes = append(g.Scopes, scope)
		}
		return g, true
	}
	var rules []map[string]any
	for range 1 + rng.IntN(7) {
		r := map[string]any{"effect": "allow", "action": actions[rng.IntN(len(actions))], "topics": []string{randomPattern(rng)}}
		if rng.IntN(3) == 0 {
			r["effect"] = "deny"
		}
		if a := r["action"]; (a == "subscribe" || a == "*") && rng.IntN(3) == 0 {
			r["groups"] = []string{calloutGroups[rng.IntN(len(calloutGroups))], calloutGroups[rng.IntN(len(calloutGroups))]}
		}
		rules = append(rules, r)
	}
	g.Policy, _ = json.Marshal(map[string]any{"rules": rules}) // strings never fail
	return g, false
}

// twoClients are a client of the hub and a native one, with the same token.
type twoClients struct {
	t      *testing.T
	hub    *node
	token  string
	ws     *wire.Conn
	native *plainNative
}

// forbidden reports whether an error of the hub says that the policy denies an operation.
func (c *twoClients) forbidden(err error) bool {
	c.t.Helper()
	if refused, ok := errors.AsType[*wire.Error](err); ok && refused.Code == "forbidden" {
		return true
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return false
}

// get reports whether the hub answers a request with 403.
func (c *twoClients) get(at string) (forbidden bool) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, at, http.NoBody)
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusForbidden {
		text, _ := io.ReadAll(resp.Body)
		c.t.Fatalf("%s: %s %s", at, resp.Status, text)
	}
	return resp.StatusCode == http.StatusForbidden
}

// operations are what both clients can do with a topic and a group. Each reports whether the hub,
// and whether NATS, refuses it.
var operations = map[string]func(ctx context.Context, c *twoClients, topic, group string) (hub, native bool){
	"publish": func(ctx context.Context, c *twoClients, topic, _ string) (hub, native bool) {
		key := ""
		if topic == "state" { // compacted: each event has a key
			key = "other"
		}
		_, err := c.ws.Publish(ctx, topic, []byte("1"), wire.PublishOptions{Key: key})
		answer, refused := c.native.request(subject(topic, key), "1")
		if !refused && !strings.Contains(answer.text, `"seq"`) {
			c.t.Errorf("the ack of a publish to %s is %s", topic, answer.text)
		}
		return c.forbidden(err), refused
	},
	"publish with a key": func(ctx context.Context, c *twoClients, topic, _ string) (hub, native bool) {
		_, err := c.ws.Publish(ctx, topic, []byte("1"), wire.PublishOptions{Key: "k"})
		_, refused := c.native.request(subject(topic, "k"), "1")
		return c.forbidden(err), refused
	},
	"pull": func(ctx context.Context, c *twoClients, topic, group string) (hub, native bool) {
		s, err := c.ws.Subscribe(ctx, topic, group, wire.SubscribeOptions{MaxInFlight: 1, MaxAttempts: new(int)}, func(wire.Event) {})
		if hub = c.forbidden(err); !hub {
			if err := s.Unsubscribe(ctx); err != nil {
				c.t.Fatal(err)
			}
		}
		stream, consumer := places(topic, group)
		answer, refused := c.native.request("$JS.API.CONSUMER.MSG.NEXT."+stream+"."+consumer, `{"batch":1,"no_wait":true}`)
		if strings.HasPrefix(answer.reply, "$JS.ACK.") {
			if _, refused := c.native.request(answer.reply, "-NAK"); refused {
				c.t.Errorf("%s gave an event, and refuses %s", group, answer.reply)
			}
		}
		return hub, refused
	},
	"settle": func(ctx context.Context, c *twoClients, topic, group string) (hub, native bool) {
		s, err := c.ws.Subscribe(ctx, topic, group, wire.SubscribeOptions{MaxInFlight: 1, MaxAttempts: new(int)}, func(wire.Event) {})
		if hub = c.forbidden(err); !hub {
			if err := s.Unsubscribe(ctx); err != nil {
				c.t.Fatal(err)
			}
		}
		stream, consumer := places(topic, group)
		v1 := c.native.publish("$JS.ACK."+stream+"."+consumer+".1.1000000.1.1.0", "", "+ACK")
		v2 := c.native.publish("$JS.ACK._.hash."+stream+"."+consumer+".1.1000000.1.1.0", "", "+ACK")
		if v1 != v2 {
			c.t.Errorf("the two forms of an ack of %s on %s: %v and %v", group, topic, v1, v2)
		}
		return hub, v1
	},
	"read": func(_ context.Context, c *twoClients, topic, _ string) (hub, native bool) {
		stream, _ := places(topic, "")
		_, refused := c.native.request("$JS.API.DIRECT.GET."+stream+"."+subject(topic, "k"), "")
		return c.get(c.hub.http + "/replay?limit=1&topic=" + url.QueryEscape(topic)), refused
	},
	"inspect": func(_ context.Context, c *twoClients, topic, group string) (hub, native bool) {
		stream, consumer := places(topic, group)
		_, refused := c.native.request("$JS.API.CONSUMER.INFO."+stream+"."+consumer, "")
		return c.get(c.hub.ops + "/groups/" + url.PathEscape(topic) + "/" + url.PathEscape(group)), refused
	},
}

// TestNativeClientsMayDoWhatOthersMay tries random operations with random policies, over WebSocket
// or HTTP and natively. NATS allows nothing that the hub refuses. It allows everything that scopes
// allow, and nearly everything that policies allow.
func TestNativeClientsMayDoWhatOthersMay(t *testing.T) {
	t.Parallel()
	seed := *calloutSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	hub := calloutHub(t, "--limit-bad-tokens=off")
	names := make([]string, 0, len(operations))
	for name := range operations {
		names = append(names, name)
	}
	slices.Sort(names)
	allowed, both, refused := 0, 0, 0
	for done := 0; done < *calloutOperations; {
		grant, scopes := randomGrant(rng)
		grant.Subject, grant.ID, grant.TTL = "s", strconv.Itoa(done), time.Hour
		token := granted(t, grant)
		c := &twoClients{t: t, hub: hub, token: token, ws: hub.dialWith(token), native: dialPlain(t, hub.nats, token)}
		for range operationsOfPolicy {
			done++
			name, topic, group := names[rng.IntN(len(names))], calloutTopics[rng.IntN(len(calloutTopics))], calloutGroups[rng.IntN(len(calloutGroups))]
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			byHub, byNATS := operations[name](ctx, c, topic, group)
			cancel()
			switch {
			case byHub && !byNATS:
				t.Errorf("seed %d: NATS allows to %s (topic %s, group %s), and the hub refuses that; scopes %v, policy %s", seed, name, topic, group, grant.Scopes, grant.Policy)
			case byHub:
				refused++
			case byNATS && scopes:
				t.Errorf("seed %d: NATS refuses to %s (topic %s, group %s), and the scopes %v allow that", seed, name, topic, group, grant.Scopes)
			case byNATS:
				allowed++
				t.Logf("narrowed: %s (topic %s, group %s), policy %s", name, topic, group, grant.Policy)
			default:
				allowed++
				both++
			}
		}
		c.ws.Abort()
		_ = c.native.conn.Close()
	}
	t.Logf("%d operations: %d refused by both, %d allowed by the hub, %d of them natively", *calloutOperations, refused, allowed, both)
	if allowed < *calloutOperations/10 || both*100 < allowed*95 {
		t.Errorf("seed %d: of %d operations that the hub allows, NATS allows %d; want 95 %%", seed, allowed, both)
	}
}
