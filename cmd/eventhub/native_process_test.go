//go:build unix

package main

import (
	"bytes"
	"errors"
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/acl"
	"eventhub/sdk/go/wire"
)

// nativeBounds returns the rows of the table of bounds in docs/nats.md: whether each bound applies
// to native clients of the embedded server.
func nativeBounds(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/nats.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "\n### Bounds for native clients\n")
	if !found {
		t.Fatal("docs/nats.md has no table of bounds for native clients")
	}
	table, _, _ = strings.Cut(table, "\nHubs share")
	bounds := make(map[string]string)
	limit := regexp.MustCompile("`([A-Z_]+)`")
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 4 || strings.HasPrefix(cells[0], "-") || strings.TrimSpace(cells[0]) == "bound" {
			continue
		}
		names := []string{strings.TrimSpace(cells[0])}
		if limits := limit.FindAllStringSubmatch(cells[0], -1); limits != nil {
			names = nil
			for _, m := range limits {
				names = append(names, m[1])
			}
		}
		for _, name := range names {
			if _, twice := bounds[name]; twice {
				t.Errorf("docs/nats.md has %s twice", name)
			}
			bounds[name] = strings.TrimSpace(cells[1])
		}
	}
	return bounds
}

// nativeClient is a native NATS client of a hub's embedded server, and a client of the hub.
type nativeClient struct {
	url string
	nc  *nats.Conn
	js  natsjs.JetStream
	hub *wire.Conn
}

// triesOfTokens returns a try of a native client that shows wrong tokens until a limit is reached.
func triesOfTokens(limit, flag string) func(*testing.T, *nativeClient) {
	return func(t *testing.T, _ *nativeClient) {
		t.Helper()
		hub := startNode(t, "--nats-listen=127.0.0.1:0", flag)
		for range 3 {
			if nc, err := nats.Connect(hub.nats, nats.Token("wrong"), nats.Timeout(patience)); err == nil {
				nc.Close()
				t.Error("a wrong token is accepted")
			}
		}
		if _, text := request(t, http.MethodGet, hub.ops+"/metrics", nodeToken); !regexp.MustCompile(`eventhub_limit_reached_total\{limit="` + limit + `"\} [1-9]`).MatchString(text) {
			t.Errorf("%s is not reached", limit)
		}
	}
}

// triesOfRate is the try of a native client that takes half a second more of a rate than there is.
func triesOfRate(limit, rate string, try func(*testing.T, *nativeClient)) func(*testing.T, *nativeClient) {
	return func(t *testing.T, _ *nativeClient) {
		t.Helper()
		hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), rate)
		nativeGroup(t, &nativeClient{hub: hub.dial(), js: full(t, hub)}, "rated")
		nc, js := dialNative(t, hub.nats, scoped(t, "client", "*:rated"))
		other, _ := dialNative(t, hub.nats, scoped(t, "other", "*:rated"))
		began := time.Now()
		try(t, &nativeClient{nc: nc, js: js})
		if err := nc.FlushTimeout(patience); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < time.Second/2 {
			t.Errorf("what is half a second over the rate took %v", took)
		}
		if metricOf(t, hub, `eventhub_limit_reached_total{limit="`+limit+`"}`) < 1 {
			t.Errorf("%s is not reached", limit)
		}
		began = time.Now()
		if err := other.FlushTimeout(patience); err != nil || time.Since(began) > time.Second/2 {
			t.Errorf("another principal waits for %v: %v", time.Since(began), err)
		}
	}
}

// full is what the hub's own token may do natively.
func full(t *testing.T, hub *node) natsjs.JetStream {
	t.Helper()
	_, js := dialNative(t, hub.nats, nodeToken)
	return js
}

var nativeInFlight = flag.Bool("native.inflight", false, "have as many events in flight in TestBoundsOfNativeClients as the server allows; by default its setting is read")

// streamGroups is STREAM_GROUPS of the hub of TestBoundsOfNativeClients.
const streamGroups = 10

// nativeTries are the bounds that apply to native clients, and what a client does that meets each.
var nativeTries = map[string]func(t *testing.T, n *nativeClient){
	"CONNECTIONS": func(t *testing.T, _ *nativeClient) {
		t.Helper()
		hub := startNode(t, "--nats-listen=127.0.0.1:0", "--limit-connections=8")
		for range 6 { // three quarters, of one principal
			dialNative(t, hub.nats, nodeToken)
		}
		nc, err := nats.Connect(hub.nats, nats.Token(nodeToken), nats.NoReconnect())
		if err == nil {
			err = nc.FlushTimeout(patience)
			nc.Close()
		}
		if err == nil {
			t.Error("one principal has more than three quarters of the connections")
		}
	},
	"UNAUTHENTICATED": func(t *testing.T, _ *nativeClient) {
		t.Helper()
		hub := startNode(t, "--nats-listen=127.0.0.1:0", "--limit-unauthenticated=4")
		address := strings.TrimPrefix(hub.nats, "nats://")
		dialTCP(t, address)
		untilClosed(t, dialTCP(t, address)) // a quarter of them may come from one address
	},
	"`token`": func(t *testing.T, n *nativeClient) {
		t.Helper()
		foreign, err := acl.Sign([]byte(strings.Repeat("x", 32)), acl.Grant{Subject: "a", Scopes: []string{"*:**"}, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		for _, token := range []string{"", "wrong", foreign} {
			if nc, err := nats.Connect(n.url, nats.Token(token)); !errors.Is(err, nats.ErrAuthorization) {
				t.Errorf("a client with the token %.10q: %v", token, err)
				nc.Close()
			}
		}
	},
	"policies and `eventhub_revoked`": func(t *testing.T, n *nativeClient) {
		t.Helper()
		c := dialPlain(t, n.url, scoped(t, "few", "publish:few"))
		if c.publish("event.few", "", "1") || !c.publish("event.small", "", "1") {
			t.Error("a client may publish elsewhere than its policy says")
		}
	},
	"BAD_TOKENS":   triesOfTokens("bad_tokens", "--limit-bad-tokens=1/1"),
	"TOKEN_CHECKS": triesOfTokens("token_checks", "--limit-token-checks=1/1"),
	"NATIVE_MESSAGES": triesOfRate("native_messages", "--limit-native-messages=100/10", func(t *testing.T, n *nativeClient) {
		t.Helper()
		for range 60 {
			if err := n.nc.Publish("event.rated", nil); err != nil {
				t.Fatal(err)
			}
		}
	}),
	"NATIVE_REQUESTS": triesOfRate("native_requests", "--limit-native-requests=20/5", func(t *testing.T, n *nativeClient) {
		t.Helper()
		for range 15 {
			if _, err := n.js.Stream(t.Context(), "rated"); err != nil {
				t.Fatal(err)
			}
		}
	}),
	"PRINCIPAL_BYTES": triesOfRate("native_bytes", "--limit-principal-bytes=1000000/100000", func(t *testing.T, n *nativeClient) {
		t.Helper()
		for range 6 {
			if err := n.nc.Publish("event.rated", make([]byte, 100_000)); err != nil {
				t.Fatal(err)
			}
		}
	}),
	"SETTLES": triesOfRate("native_settles", "--limit-settles=20/5", func(t *testing.T, n *nativeClient) {
		t.Helper()
		for range 15 {
			if _, err := n.js.Publish(t.Context(), "event.rated", nil); err != nil {
				t.Fatal(err)
			}
		}
		group, err := n.js.Consumer(t.Context(), "rated", "g")
		if err != nil {
			t.Fatal(err)
		}
		batch, err := group.Fetch(15, natsjs.FetchMaxWait(patience))
		if err != nil {
			t.Fatal(err)
		}
		for m := range batch.Messages() {
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		}
	}),
	"`max_payload` of the server": func(t *testing.T, n *nativeClient) {
		t.Helper()
		if got := n.nc.MaxPayload(); got != 4<<20 {
			t.Errorf("the server takes %d bytes", got)
		}
		if err := n.nc.Publish("event.any", make([]byte, 4<<20+1)); !errors.Is(err, nats.ErrMaxPayload) {
			t.Errorf("more than 4 MiB: %v", err)
		}
	},
	"`max_payload` of a topic": func(t *testing.T, n *nativeClient) {
		t.Helper()
		_, err := n.js.Publish(t.Context(), "event.small", bytes.Repeat([]byte("1"), 66<<10))
		if api, ok := errors.AsType[*natsjs.APIError](err); !ok || api.ErrorCode != 10054 {
			t.Errorf("an event beyond the topic's max_payload: %v", err)
		}
	},
	"`retention` of a topic": func(t *testing.T, n *nativeClient) {
		t.Helper()
		for range 5 {
			if _, err := n.js.Publish(t.Context(), "event.few", []byte("1")); err != nil {
				t.Fatal(err)
			}
		}
		s, err := n.js.Stream(t.Context(), "few")
		if err != nil {
			t.Fatal(err)
		}
		if got := s.CachedInfo().State.Msgs; got != 3 {
			t.Errorf("the topic keeps %d events, want 3", got)
		}
	},
	"`on_full: reject` of a topic": func(t *testing.T, n *nativeClient) {
		t.Helper()
		sub, err := n.hub.Subscribe(t.Context(), "kept", "reader", wire.SubscribeOptions{}, func(wire.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		if err := sub.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := n.js.Publish(t.Context(), "event.kept", []byte("1")); err != nil {
				t.Fatal(err)
			}
		}
		_, err = n.js.Publish(t.Context(), "event.kept", []byte("1"))
		if api, ok := errors.AsType[*natsjs.APIError](err); !ok || api.ErrorCode != 10077 {
			t.Errorf("an event beyond the bound: %v", err)
		}
	},
	"`duplicate_window` of a topic": func(t *testing.T, n *nativeClient) {
		t.Helper()
		for i := range 2 {
			ack, err := n.js.Publish(t.Context(), "event.small", []byte("1"), natsjs.WithMsgID("one"))
			if err != nil || ack.Duplicate != (i > 0) {
				t.Errorf("publish %d of an id: %+v, %v", i+1, ack, err)
			}
		}
	},
	"headers of a message": func(t *testing.T, n *nativeClient) {
		t.Helper()
		_, err := n.js.PublishMsg(t.Context(), &nats.Msg{Subject: "event.small", Header: nats.Header{"a": {strings.Repeat("v", 64<<10)}}})
		if api, ok := errors.AsType[*natsjs.APIError](err); !ok || api.ErrorCode != 10097 {
			t.Errorf("64 KiB of headers: %v", err)
		}
	},
	"fields of requests": func(t *testing.T, n *nativeClient) {
		t.Helper()
		publishTo(t, n.hub, "asked", "1")
		_, js := dialNative(t, n.url, scoped(t, "reader", "subscribe:asked"))
		s, err := js.Stream(t.Context(), "asked")
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Info(t.Context(), natsjs.WithSubjectFilter(">"))
		if api, ok := errors.AsType[*natsjs.APIError](err); !ok || api.ErrorCode != 10025 {
			t.Errorf("all subjects of a stream: %v", err)
		}
	},
	"headers that remove or make events": func(t *testing.T, n *nativeClient) {
		t.Helper()
		for name, value := range map[string]string{"Nats-Rollup": "all", "Nats-TTL": "1s", "Nats-Schedule": "@at 2030-01-01T00:00:00Z", "Nats-Incr": "+1"} {
			_, err := n.js.PublishMsg(t.Context(), &nats.Msg{Subject: "event.small", Header: nats.Header{name: {value}}, Data: []byte("1")})
			if _, ok := errors.AsType[*natsjs.APIError](err); !ok {
				t.Errorf("%s: %v", name, err)
			}
		}
	},
	"pulls of a group": func(t *testing.T, n *nativeClient) {
		t.Helper()
		nativeGroup(t, n, "pulls")
		inbox := n.nc.NewInbox()
		answers, err := n.nc.SubscribeSync(inbox)
		if err != nil {
			t.Fatal(err)
		}
		for range 4_096 + 1 {
			if err := n.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.pulls.g", inbox, []byte(`{"batch":1,"expires":60000000000}`)); err != nil {
				t.Fatal(err)
			}
		}
		msg, err := answers.NextMsg(patience)
		if err != nil || msg.Header.Get("Status") != "409" {
			t.Errorf("one pull more: %+v, %v", msg, err)
		}
	},
	"ack wait of a group": func(t *testing.T, n *nativeClient) {
		t.Helper()
		group := nativeGroup(t, n, "waits")
		if got := group.CachedInfo().Config.AckWait; got != 30*time.Second {
			t.Errorf("the server waits for %v", got)
		}
	},
	"room for dead letters": func(t *testing.T, n *nativeClient) {
		t.Helper()
		s, err := n.js.Stream(t.Context(), "dlq")
		if err != nil {
			t.Fatal(err)
		}
		if cfg := s.CachedInfo().Config; cfg.MaxBytes != 4<<30 || cfg.Discard != natsjs.DiscardNew {
			t.Errorf("dead letters have room for %d bytes, and then: %s", cfg.MaxBytes, cfg.Discard)
		}
	},
	"STREAM_GROUPS": func(t *testing.T, n *nativeClient) {
		t.Helper()
		publishTo(t, n.hub, "crowded", "1")
		made := 0
		for ; made <= streamGroups+1_000; made++ {
			// By default, the first would be removed while the last are made.
			_, err := n.js.CreateConsumer(t.Context(), "crowded", natsjs.ConsumerConfig{
				MemoryStorage: true, AckPolicy: natsjs.AckExplicitPolicy, InactiveThreshold: time.Hour,
			})
			if api, ok := errors.AsType[*natsjs.APIError](err); ok && api.ErrorCode == natsjs.JSErrCodeMaximumConsumersLimit {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if made != streamGroups+1_000 {
			t.Errorf("a native client created %d consumers, want %d", made, streamGroups+1_000)
		}
	},
	"`ack_pending` of a group": func(t *testing.T, n *nativeClient) {
		t.Helper()
		const most = 65_536
		if _, err := n.hub.Subscribe(t.Context(), "many", "g", wire.SubscribeOptions{GroupTTLMS: time.Hour.Milliseconds()}, func(wire.Event) {}); err != nil {
			t.Fatal(err)
		}
		if err := n.hub.Close(); err != nil { // the native client is the only member
			t.Fatal(err)
		}
		group, err := n.js.Consumer(t.Context(), "many", "g")
		if err != nil {
			t.Fatal(err)
		}
		if got := group.CachedInfo().Config.MaxAckPending; got != most {
			t.Errorf("the server lets %d events be in flight, want %d", got, most)
		}
		if !*nativeInFlight {
			return // the server keeps to it
		}
		for range most + 10 {
			if err := n.nc.Publish("event.many", []byte("1")); err != nil {
				t.Fatal(err)
			}
		}
		if err := n.nc.Flush(); err != nil {
			t.Fatal(err)
		}
		got := 0
		fetch := func() {
			t.Helper()
			batch, err := group.Fetch(10_000, natsjs.FetchMaxWait(2*time.Second))
			if err != nil {
				t.Fatal(err)
			}
			for range batch.Messages() {
				got++
			}
		}
		// The server may not have stored yet what it has taken.
		for began := time.Now(); got < most && time.Since(began) < slowdown*patience; {
			fetch()
		}
		fetch() // there is no more
		if got != most {
			t.Errorf("%d events are in flight, want %d", got, most)
		}
	},
}

// nativeGroup is the group g of a topic, which a client of the hub has made.
func nativeGroup(t *testing.T, n *nativeClient, topic string) natsjs.Consumer {
	t.Helper()
	sub, err := n.hub.Subscribe(t.Context(), topic, "g", wire.SubscribeOptions{}, func(wire.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	group, err := n.js.Consumer(t.Context(), topic, "g")
	if err != nil {
		t.Fatal(err)
	}
	return group
}

// nativePasses are bounds that do not apply to native clients, and what a client does that passes
// each.
var nativePasses = map[string]func(t *testing.T, n *nativeClient){
	"`maxInFlight` of a subscription": func(t *testing.T, n *nativeClient) {
		t.Helper()
		group := nativeGroup(t, n, "greedy")
		for range 200 {
			if err := n.nc.Publish("event.greedy", []byte("1")); err != nil {
				t.Fatal(err)
			}
		}
		batch, err := group.Fetch(200, natsjs.FetchMaxWait(patience))
		if err != nil {
			t.Fatal(err)
		}
		got := 0
		for range batch.Messages() {
			got++
		}
		if got != 200 {
			t.Errorf("a native member gets %d events", got)
		}
	},
	"`maxAttempts` of a subscription": func(t *testing.T, n *nativeClient) {
		t.Helper()
		group := nativeGroup(t, n, "stubborn")
		if _, err := n.js.Publish(t.Context(), "event.stubborn", []byte("1")); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			msg, err := group.Next(natsjs.FetchMaxWait(patience))
			if err != nil {
				t.Fatal(err)
			}
			if err := msg.Nak(); err != nil {
				t.Fatal(err)
			}
		}
	},
	"headers of an event": func(t *testing.T, n *nativeClient) {
		t.Helper()
		events := subscribeTo(t, n.hub, "headers", "g", wire.SubscribeOptions{})
		h := nats.Header{"Event-Unknown": {"x"}}
		for i := range 100 {
			h["h"+strconv.Itoa(i)] = []string{strings.Repeat("v", 500)}
		}
		if _, err := n.js.PublishMsg(t.Context(), &nats.Msg{Subject: "event.headers", Header: h, Data: []byte("1")}); err != nil {
			t.Fatal(err)
		}
		if e := events.next(); len(e.Record) < 50_000 || bytes.Contains(e.Record, []byte("Unknown")) {
			t.Errorf("the record has %d bytes: %.200s", len(e.Record), e.Record)
		}
	},
	"streams, consumers and buckets of hubs": func(t *testing.T, n *nativeClient) {
		t.Helper()
		nativeGroup(t, n, "theirs")
		if err := n.js.DeleteStream(t.Context(), "theirs"); err != nil {
			t.Error(err)
		}
	},
}

// TestBoundsOfNativeClients compares the table with the limits of the hub, and meets each bound
// that applies.
func TestBoundsOfNativeClients(t *testing.T) {
	t.Parallel()
	bounds := nativeBounds(t)
	parser, err := kong.New(new(commands))
	if err != nil {
		t.Fatal(err)
	}
	limits := make(map[string]bool)
	for _, command := range parser.Model.Children {
		for _, flag := range command.Flags {
			for _, name := range flag.Envs {
				limit, ok := strings.CutPrefix(name, "EVENTHUB_LIMIT_")
				if command.Name != "serve" || !ok {
					continue
				}
				if _, there := bounds[limit]; !there {
					t.Errorf("the table in docs/nats.md lacks the limit %s", limit)
				}
				limits[limit] = true
			}
		}
	}
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte("topics:\n  - {topic: small, max_payload: 1KiB}\n  - {topic: few, retention: {messages: 3}}\n  - {topic: kept, retention: {messages: 3}, on_full: reject}\n  - {topic: many}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--topics="+rules, "--limit-stream-groups="+strconv.Itoa(streamGroups))
	nc, err := nats.Connect(hub.nats, nats.Token(nodeToken))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	limit := regexp.MustCompile(`^[A-Z_]+$`)
	for name, applies := range bounds {
		if limit.MatchString(name) && !limits[name] {
			t.Errorf("the table has the limit %s, which serve does not know", name)
		}
		try := nativeTries[name]
		switch {
		case applies == "yes" && try == nil:
			t.Errorf("the table says that %s applies, and no test meets it", name)
		case applies == "yes":
			t.Run(name, func(t *testing.T) { try(t, &nativeClient{url: hub.nats, nc: nc, js: js, hub: hub.dial()}) })
		case applies == "no" && nativePasses[name] != nil:
			t.Run(name, func(t *testing.T) {
				nativePasses[name](t, &nativeClient{url: hub.nats, nc: nc, js: js, hub: hub.dial()})
			})
		case try != nil || applies != "no":
			t.Errorf("the table says %q of %s", applies, name)
		}
	}
	for _, tries := range []map[string]func(*testing.T, *nativeClient){nativeTries, nativePasses} {
		for name := range tries {
			if bounds[name] == "" {
				t.Errorf("the table lacks %s", name)
			}
		}
	}
}

// TestLimitsThatNativeClientsPass has a native client pass limits of the hub that the table says do
// not apply, and a policy.
func TestLimitsThatNativeClientsPass(t *testing.T) {
	t.Parallel()
	bounds := nativeBounds(t)
	for _, name := range []string{"PAYLOAD", "NEW_TOPICS", "TOPIC_PUBLISHES", "PRINCIPAL_PUBLISHES"} {
		if bounds[name] != "no" {
			t.Errorf("the table says %q of %s", bounds[name], name)
		}
	}
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--limit-payload=1000", "--limit-new-topics=1", "--limit-topic-publishes=1/1", "--limit-principal-publishes=1/1")
	nc, err := nats.Connect(hub.nats, nats.Token(nodeToken))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	c := hub.dial()
	events := subscribeTo(t, c, "a", "g", wire.SubscribeOptions{})
	for range 20 {
		if _, err := js.Publish(t.Context(), "event.a", bytes.Repeat([]byte("1"), 2_000)); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range events.take(20) {
		if len(e.Record) < 2_000 {
			t.Errorf("an event has %d bytes", len(e.Record))
		}
	}
	for _, name := range []string{"one", "two", "three"} {
		if _, err := js.CreateStream(t.Context(), natsjs.StreamConfig{Name: name, Subjects: []string{"event." + name, "keyed.*." + name}}); err != nil {
			t.Errorf("a native client creates a stream: %v", err)
		}
	}
}
