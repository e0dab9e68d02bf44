//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/native"
	"eventhub/sdk/go/wire"
)

// TestNativeClientsCannotEscape has a native client that may publish to a topic and join one of its
// groups try everything else that NATS has.
func TestNativeClientsCannotEscape(t *testing.T) {
	t.Parallel()
	hub := calloutHub(t)
	_, js := dialNative(t, hub.nats, nodeToken)
	token := scoped(t, "shop", "publish:shop.cart", "subscribe:shop.cart::billing", "subscribe:state", "publish:state", "subscribe:user.1.events", "publish:1", "subscribe:1::5")
	c := dialPlain(t, hub.nats, token)

	other := jetstream.NativeInbox(scoped(t, "other"))
	for _, subject := range []string{
		">", "*", "*.>", "event.>", "event.shop.cart", "keyed.>", "$JS.>", "$JS.API.>", "$JS.EVENT.>", "$JS.ACK.>", "$KV.>", "$KV.latest_state.>", "$SYS.>",
		"$SYS.REQ.USER.AUTH", "$EVENTHUB.>", "_INBOX.>", "_INBOX_*.>", other + ".>", other + ".*", "_R_.>", "$O.>", "$SRV.>", "eventhub.>",
		"$SYS.REQ.USER.AUTH eventhub", "event.shop.cart eventhub", // as a member of a queue group
	} {
		if !c.subscribe(subject) {
			t.Errorf("the client may subscribe to %s", subject)
		}
	}
	for _, subject := range []string{
		// other topics, and all of them
		"event.orders.placed", "keyed.k.orders.placed", "event.dlq.shop.cart", "event.shop.cart.snapshot", "event.shop", "event.>", "keyed.*.>", "event.shop.*",
		// streams and consumers of others
		"$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.STREAM.CREATE.shop=2Ecart", "$JS.API.STREAM.UPDATE.shop=2Ecart",
		"$JS.API.STREAM.DELETE.shop=2Ecart", "$JS.API.STREAM.PURGE.shop=2Ecart", "$JS.API.STREAM.MSG.DELETE.shop=2Ecart", "$JS.API.STREAM.SNAPSHOT.shop=2Ecart",
		"$JS.API.STREAM.RESTORE.x", "$JS.API.STREAM.LEADER.STEPDOWN.shop=2Ecart", "$JS.API.META.LEADER.STEPDOWN", "$JS.API.SERVER.REMOVE", "$JS.API.ACCOUNT.PURGE.$G",
		"$JS.API.STREAM.INFO.shop=2Ecart", "$JS.API.STREAM.MSG.GET.shop=2Ecart", "$JS.API.DIRECT.GET.shop=2Ecart", "$JS.API.DIRECT.GET.shop=2Ecart.event.shop.cart",
		"$JS.API.CONSUMER.CREATE.shop=2Ecart", "$JS.API.CONSUMER.CREATE.shop=2Ecart.billing", "$JS.API.CONSUMER.CREATE.shop=2Ecart.billing.event.shop.cart",
		"$JS.API.CONSUMER.DURABLE.CREATE.shop=2Ecart.billing", "$JS.API.CONSUMER.DELETE.shop=2Ecart.billing", "$JS.API.CONSUMER.PAUSE.shop=2Ecart.billing",
		"$JS.API.CONSUMER.NAMES.shop=2Ecart", "$JS.API.CONSUMER.LIST.shop=2Ecart", "$JS.API.CONSUMER.LEADER.STEPDOWN.shop=2Ecart.billing",
		"$JS.API.CONSUMER.UNPIN.shop=2Ecart.billing", "$JS.API.CONSUMER.RESET.shop=2Ecart.billing",
		"$JS.API.CONSUMER.INFO.shop=2Ecart.mail", "$JS.API.CONSUMER.MSG.NEXT.shop=2Ecart.mail", "$JS.API.CONSUMER.MSG.NEXT.*.billing", "$JS.API.CONSUMER.MSG.NEXT.shop=2Ecart.*",
		"$JS.API.CONSUMER.MSG.NEXT.orders=2Eplaced.billing", "$JS.API.>", "$JS.hub.API.CONSUMER.MSG.NEXT.shop=2Ecart.mail",
		// acknowledgements of others, in both forms, and one that would pass for the other form
		"$JS.ACK.shop=2Ecart.mail.1.1.1.1.1", "$JS.ACK.orders=2Eplaced.billing.1.1.1.1.1", "$JS.ACK._.hash.shop=2Ecart.mail.1.1.1.1.1", "$JS.ACK.>",
		"$JS.ACK.orders=2Eplaced.billing.1.5.1.1.1", "$JS.ACK.shop=2Ecart.billing.1.1.1.1.1.1", "$JS.ACK.shop=2Ecart.billing.1.1.1.1", "$JS.ACK.*.*.shop=2Ecart.billing",
		// topics of the same family, and the buckets
		"$JS.API.DIRECT.GET.users", "$JS.API.DIRECT.GET.users.event.user.2.events", "$JS.API.DIRECT.GET.users.keyed.k.user.2.events", "$JS.API.STREAM.INFO.users",
		"$JS.API.STREAM.MSG.GET.users", "event.user.1.events",
		"$KV.latest_state.k", "$KV.eventhub_groups.x", "$KV.eventhub_revoked.x", "$JS.API.CONSUMER.CREATE.KV_latest_state.w.$KV.latest_state.>", "$JS.API.CONSUMER.CREATE.KV_latest_state",
		"$JS.API.STREAM.INFO.KV_eventhub_groups", "$JS.API.DIRECT.GET.KV_eventhub_groups", "$JS.API.DIRECT.GET.KV_eventhub_groups.$KV.eventhub_groups.orders=2Eplaced.billing",
		"$JS.API.STREAM.MSG.GET.KV_eventhub_revoked", "$JS.FC.KV_latest_state.w.1",
		// the hubs, the system, and other clients
		"$EVENTHUB.putback.x", "eventhub.delayed.wait.x", "$SYS.REQ.USER.AUTH", "$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.CONNZ", "$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.x.KICK",
		"_INBOX.x", other + ".1", c.inbox + ".1", "_R_.x", "$NRG.x", "$SRV.PING",
	} {
		if !c.publish(subject, "", "{}") {
			t.Errorf("the client may publish to %s", subject)
		}
	}

	// What the client may do still works, and the reply subjects of requests lead nowhere else.
	counts := func() map[string]uint64 {
		found := make(map[string]uint64)
		for _, topic := range append(calloutTopics, "1") {
			stream, _ := places(topic, "")
			if s, err := js.Stream(t.Context(), stream); err == nil {
				found[stream] = s.CachedInfo().State.LastSeq
			}
		}
		return found
	}
	before := counts()
	mail, err := js.Consumer(t.Context(), "shop=2Ecart", "mail")
	if err != nil {
		t.Fatal(err)
	}
	taken, err := mail.Fetch(1, natsjs.FetchMaxWait(patience))
	if err != nil {
		t.Fatal(err)
	}
	held := <-taken.Messages()
	figures := func() string {
		found, err := js.Consumer(t.Context(), "shop=2Ecart", "mail")
		if err != nil {
			t.Fatal(err)
		}
		info := found.CachedInfo()
		return fmt.Sprint(info.Delivered.Consumer, info.NumAckPending, info.NumRedelivered, info.NumWaiting)
	}
	others := figures()
	const next, info = "$JS.API.CONSUMER.MSG.NEXT.shop=2Ecart.billing", "$JS.API.CONSUMER.INFO.shop=2Ecart.billing"
	forged := []string{
		"event.orders.placed", "keyed.k.orders.placed", "event.dlq.shop.cart", "$JS.API.STREAM.PURGE.orders=2Eplaced", "$JS.API.STREAM.DELETE.orders=2Eplaced",
		"$JS.API.CONSUMER.MSG.NEXT.shop=2Ecart.mail", "$JS.API.CONSUMER.DELETE.shop=2Ecart.mail", "$KV.latest_state.k", "$KV.eventhub_groups.x",
		"$JS.ACK.shop=2Ecart.mail.1.1.1.1.1",
	}
	sent := uint64(0)
	for _, reply := range forged {
		for _, body := range []string{"+ACK", `{"batch":1}`} {
			sent++
			_ = c.publish("event.shop.cart", reply, body)
			_ = c.publish(next, reply, `{"batch":1,"no_wait":true}`)
			_ = c.publish(info, reply, "")
			_ = c.publish("$JS.API.DIRECT.GET.state", reply, `{"seq":1}`)
		}
	}
	if _, refused := c.request("event.shop.cart", "last"); refused {
		t.Error("the client may not publish any more")
	}
	sent++
	waitFor(t, "the events that the client may publish", func() bool { return counts()["shop=2Ecart"] == before["shop=2Ecart"]+sent })
	after := counts()
	delete(before, "shop=2Ecart")
	delete(after, "shop=2Ecart")
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("streams that the client may not publish to have changed: %v, and then %v", before, after)
	}
	if got := figures(); got != others {
		t.Errorf("the group of others has changed: %s, and then %s", others, got)
	}
	if err := held.DoubleAck(t.Context()); err != nil {
		t.Error(err)
	}

	// Headers that change more than the event itself are refused, as the hub refuses them.
	for _, header := range []string{"Nats-Rollup: all", "Nats-Rollup: sub", "Nats-TTL: 1s", "Nats-Schedule: @at 2100-01-01T00:00:00Z", "Nats-Incr: 1", "Nats-Batch-Id: x"} {
		text := "NATS/1.0\r\n" + header + "\r\n\r\n"
		errs, messages := c.exchange(fmt.Sprintf("HPUB event.shop.cart %s.h %d %d\r\n%s1\r\n", c.inbox, len(text), len(text)+1, text))
		for errs == "" && len(messages) == 0 {
			m, _, err := c.read()
			if err != nil {
				t.Fatalf("%s: %v", header, err)
			}
			if m != nil {
				messages = append(messages, *m)
			}
		}
		if errs != "" || !strings.Contains(messages[0].text, `"error"`) {
			t.Errorf("an event with %s is answered %s %v", header, errs, messages)
		}
	}
	if got := counts()["shop=2Ecart"]; got != c.sequence(t) {
		t.Errorf("events with such headers were stored: the last sequence is %d", got)
	}
}

// sequence publishes an event to shop.cart, and returns the sequence before it.
func (p *plainNative) sequence(t *testing.T) uint64 {
	t.Helper()
	answer, refused := p.request("event.shop.cart", "x")
	var seq uint64
	if _, after, ok := strings.Cut(answer.text, `"seq":`); refused || !ok {
		t.Fatalf("publish: %s", answer.text)
	} else if _, err := fmt.Sscanf(after, "%d", &seq); err != nil {
		t.Fatal(err)
	}
	return seq - 1
}

// TestNativeClientsCannotEscapeByNames has topics and families whose names are made to be confused:
// the server reads wildcards in the names that a client asks for, and a topic that no stream stores
// can have the name of a stream that stores others.
func TestNativeClientsCannotEscapeByNames(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte("topics:\n  - {pattern: orders.*, family: orders}\n  - {pattern: user.**, family: users}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--topics="+rules)
	_, js := dialNative(t, hub.nats, nodeToken)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	foreign := natsjs.StreamConfig{Name: "accounts", Subjects: []string{"accounts.>"}, AllowDirect: true}
	if _, err := js.CreateStream(ctx, foreign); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "accounts.1", []byte(`"secret"`)); err != nil {
		t.Fatal(err)
	}
	for _, topic := range []string{"orders.placed", "user.1.secret", "user.7"} {
		for _, key := range []string{"", "k"} {
			if _, err := hub.dial().Publish(ctx, topic, []byte(`"secret"`), wire.PublishOptions{Key: key}); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Consumers that say they were for a group of a topic, and get other events.
	for stream, c := range map[string]natsjs.ConsumerConfig{
		"users":  {Durable: "g=40user=2E7", Metadata: map[string]string{native.MetaTopic: "user.7", native.MetaGroup: "g"}},
		"orders": {Durable: "g", Metadata: map[string]string{native.MetaTopic: "user.7", native.MetaGroup: "g"}},
	} {
		c.AckPolicy = natsjs.AckExplicitPolicy
		if _, err := js.CreateConsumer(ctx, stream, c); err != nil {
			t.Fatal(err)
		}
	}
	c := dialPlain(t, hub.nats, scoped(t, "shop", "subscribe:orders", "subscribe:accounts", "subscribe:user.*", "publish:user.*", "publish:orders", "subscribe:x.*.*"))
	for _, s := range []string{
		"STREAM.INFO.orders", "STREAM.MSG.GET.orders", "DIRECT.GET.orders", "DIRECT.GET.orders.event.orders.placed", "DIRECT.GET.orders.keyed.k.orders.placed",
		"STREAM.INFO.accounts", "STREAM.MSG.GET.accounts", "DIRECT.GET.accounts", "DIRECT.GET.accounts.accounts.1",
		"DIRECT.GET.users.event.user.>", "DIRECT.GET.users.keyed.k.user.>", "DIRECT.GET.users.keyed.*.user.>",
		"CONSUMER.MSG.NEXT.users.g=40user=2E7", "CONSUMER.MSG.NEXT.orders.g", "CONSUMER.INFO.orders.g",
	} {
		if !c.publish("$JS.API."+s, "", "") {
			t.Errorf("the client may ask %s", s)
		}
	}
	// A message trace goes where the client may publish, and nowhere else.
	for _, header := range []string{"Nats-Trace-Dest: event.orders.placed", "Nats-Trace-Dest: $JS.API.STREAM.DELETE.orders"} {
		text := "NATS/1.0\r\n" + header + "\r\n\r\n"
		if errs, _ := c.exchange(fmt.Sprintf("HPUB event.user.7 %d %d\r\n%s1\r\n", len(text), len(text)+1, text)); !c.violation(errs) {
			t.Errorf("the client may publish with %s", header)
		}
	}
	named := dialPlain(t, hub.nats, scoped(t, "named", "subscribe:user.7"))
	if m, refused := named.request("$JS.API.DIRECT.GET.users.event.user.7", ""); refused || !strings.Contains(m.text, "secret") {
		t.Errorf("a topic that the policy names cannot be read: %v %s", refused, m.text)
	}
}
