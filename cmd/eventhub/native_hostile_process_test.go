//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

// rawNATS speaks the protocol of NATS without a client's checks.
type rawNATS struct {
	t    *testing.T
	conn net.Conn
}

func dialRawNATS(t *testing.T, hub *node) *rawNATS {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(hub.nats, "nats://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	r := &rawNATS{t, conn}
	go func() { _, _ = io.Copy(io.Discard, conn) }() // ends with the connection
	r.write(`CONNECT {"verbose":false,"headers":true,"no_responders":true,"auth_token":"` + nodeToken + "\"}\r\n")
	return r
}

func (r *rawNATS) write(text string) {
	r.t.Helper()
	if _, err := io.WriteString(r.conn, text); err != nil {
		r.t.Fatal(err)
	}
}

// publish sends a header block as it is, and no reply subject.
func (r *rawNATS) publish(subject, header, body string) {
	r.t.Helper()
	header += "\r\n\r\n"
	r.write(fmt.Sprintf("HPUB %s %d %d\r\n%s%s\r\n", subject, len(header), len(header)+len(body), header, body))
}

// oddMessages are headers that no client of a hub could set, on a topic with keys.
func oddMessages() map[string]func(r *rawNATS) {
	header := func(lines ...string) func(*rawNATS) {
		return func(r *rawNATS) { r.publish("event.odd", "NATS/1.0\r\n"+strings.Join(lines, "\r\n"), "1") }
	}
	return map[string]func(r *rawNATS){
		"name with a blank":            header("a b: c"),
		"name that is no UTF-8":        header("a\xff: c"),
		"no colon":                     header("abc"),
		"empty name":                   header(": c"),
		"no version":                   func(r *rawNATS) { r.publish("event.odd", "a: b", "1") },
		"status":                       func(r *rawNATS) { r.publish("event.odd", "NATS/1.0 503\r\na: b", "") },
		"status 100":                   func(r *rawNATS) { r.publish("event.odd", "NATS/1.0 100 Idle Heartbeat", "") },
		"value that is no UTF-8":       header("a: \xff\xfe"),
		"value with control":           header("a: b\x00\x01\x7f"),
		"id that is no UTF-8":          header("Nats-Msg-Id: \xff\xfe"),
		"id with control characters":   header("Nats-Msg-Id: a\x00\x1bb"),
		"id with blanks":               header("Nats-Msg-Id:    a b   "),
		"long id":                      header("Nats-Msg-Id: " + strings.Repeat("i", 60_000)),
		"id of 129 bytes":              header("Nats-Msg-Id: " + strings.Repeat("j", 129)),
		"place of another event":       header("Nats-Msg-Id: odd@1"),
		"empty id":                     header("Nats-Msg-Id: "),
		"two ids":                      header("Nats-Msg-Id: one", "Event-Id: two"),
		"Event-Id that is no UTF-8":    header("Event-Id: \xc3\x28"),
		"Event-Ts that is no number":   header("Event-Ts: soon"),
		"Event-Ts that is negative":    header("Event-Ts: -5"),
		"Event-Ts that is huge":        header("Event-Ts: 99999999999999999999"),
		"Event-Tags that are no JSON":  header("Event-Tags: a, b"),
		"Event-Tags with numbers":      header(`Event-Tags: ["a",1]`),
		"Event-Caused-By is an object": header(`Event-Caused-By: {"a":1}`),
		"Event-Sid that is no UTF-8":   header("Event-Sid: \xff"),
		"Event-Encoding":               header("Event-Encoding: base64"),
		"Event-Original":               header("Event-Original: odd 1 1 -t"),
		"Event-Letter":                 header("Event-Letter: odd 1 1", `Event-Group: ["odd","g"]`),
		"Event-Key":                    header("Event-Key: k"),
		"KV-Operation without a key":   header("KV-Operation: DEL"),
		"Nats-Subject":                 header("Nats-Subject: $KV.x", "Nats-Sequence: 77"),
		"many headers": func(r *rawNATS) {
			var lines []string
			for i := range 2_000 {
				lines = append(lines, "h"+strconv.Itoa(i)+": v")
			}
			header(lines...)(r)
		},
		"large header":         header("a: " + strings.Repeat("v", 60_000)),
		"key that is no UTF-8": func(r *rawNATS) { r.publish("keyed.a\xff.odd", "NATS/1.0", "1") },
		"key with escapes":     func(r *rawNATS) { r.publish("keyed.=00=FF=2E.odd", "NATS/1.0", "1") },
		"long key":             func(r *rawNATS) { r.publish("keyed."+strings.Repeat("k", 3_000)+".odd", "NATS/1.0", "1") },
		"JSON that is too deep": func(r *rawNATS) {
			r.publish("event.odd", "NATS/1.0", strings.Repeat("[", 20_000)+strings.Repeat("]", 20_000))
		},
		"control characters": func(r *rawNATS) { r.publish("event.odd", "NATS/1.0", strings.Repeat("\x01", 2<<20)) },
		"binary":             func(r *rawNATS) { r.publish("event.odd", "NATS/1.0", strings.Repeat("\xff", 3<<20)) },
	}
}

// TestOddMessagesOfNativeClients stores messages that no client of the hub could publish. Each is
// an event that a client of the hub can settle by its id, at the first attempt, and that HTTP
// shows as JSON. Events before and after come through.
func TestOddMessagesOfNativeClients(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte("topics:\n  - {topic: odd, compaction: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--topics="+rules)
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
	events := subscribeTo(t, c, "odd", "g", wire.SubscribeOptions{})
	stored := func() uint64 {
		t.Helper()
		s, err := js.Stream(t.Context(), "odd")
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.LastSeq
	}
	group := func() *natsjs.ConsumerInfo {
		t.Helper()
		consumer, err := js.Consumer(t.Context(), "odd", "g")
		if err != nil {
			t.Fatal(err)
		}
		return consumer.CachedInfo()
	}
	for name, publish := range oddMessages() {
		before := stored()
		raw := dialRawNATS(t, hub)
		publish(raw)
		waitFor(t, "the message of "+name, func() bool { return stored() > before })
		e := events.next()
		if e.Attempt != 1 {
			t.Errorf("%s: attempt %d of %.200s", name, e.Attempt, e.Record)
		}
		if !json.Valid(e.Record) {
			t.Errorf("%s: the record is no JSON: %.200s", name, e.Record)
		}
		if err := e.AckWait(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		deadline := time.Now().Add(patience)
		for ; group().NumAckPending > 0 && time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		}
		if group().NumAckPending > 0 {
			t.Errorf("%s: its ack by the id %.100q settles nothing", name, e.ID)
		}
	}
	marker, err := c.Publish(t.Context(), "odd", []byte(`"after"`), wire.PublishOptions{Key: "marker"})
	if err != nil {
		t.Fatal(err)
	}
	if e := events.next(); e.ID != marker {
		t.Errorf("after the odd messages came %.200s", e.Record)
	}
	for _, path := range []string{"/replay?topic=odd&limit=1000", "/export?topic=odd", "/snap/odd"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, hub.http+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+nodeToken)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil || res.StatusCode != http.StatusOK || !json.Valid(body) {
			t.Errorf("GET %s: %s, %v: %.300s", path, res.Status, err, body)
		}
	}
	if _, err := url.Parse(hub.http); err != nil || bytes.Contains([]byte(hub.log.String()), []byte("panic")) {
		t.Error("the hub panicked")
	}
}

// TestHeadersThatTheServerRefuses sends headers with which a client could remove events of others,
// or have its own removed.
func TestHeadersThatTheServerRefuses(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--nats-listen=127.0.0.1:0")
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
	publishTo(t, c, "orders", "1")
	for name, value := range map[string]string{"Nats-Rollup": "all", "Nats-TTL": "1s", "Nats-Batch-Id": "b", "Nats-Incr": "+1", "Nats-Stream-Source": "other 1 > > x", "a": strings.Repeat("v", 1<<20), "Nats-Schedule": "@at 2030-01-01T00:00:00Z"} {
		msg := &nats.Msg{Subject: "event.orders", Header: nats.Header{name: {value}}, Data: []byte("2")}
		_, err := js.PublishMsg(t.Context(), msg)
		if _, ok := errors.AsType[*natsjs.APIError](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	s, err := js.Stream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.CachedInfo().State.Msgs; got != 1 {
		t.Errorf("the topic has %d events", got)
	}
}

// TestNativeClientsHarmOnlyTheirGroup has a native client abuse the consumer of a group. Members of
// the group that have connected to the hub go on, or are refused with a clear error, and another
// group of the topic gets every event once.
func TestNativeClientsHarmOnlyTheirGroup(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--nats-listen=127.0.0.1:0")
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
	others := subscribeTo(t, c, "orders", "others", wire.SubscribeOptions{})
	events := &box{t: t, events: make(chan wire.Event, 1_000)}
	sub, err := c.Subscribe(t.Context(), "orders", "mine", wire.SubscribeOptions{}, func(e wire.Event) { events.events <- e })
	if err != nil {
		t.Fatal(err)
	}
	consumer := func() natsjs.Consumer {
		t.Helper()
		g, err := js.Consumer(t.Context(), "orders", "mine")
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	// native takes an event while the hub's member is paused, and settles it.
	native := func(id string, settle func(msg natsjs.Msg)) {
		t.Helper()
		msg, err := consumer().Next(natsjs.FetchMaxWait(patience))
		if err != nil {
			t.Fatal(err)
		}
		if got := msg.Headers().Get("Event-Id"); got != id {
			t.Errorf("the native member gets %s, want %s", got, id)
		}
		settle(msg)
	}
	// say waits for the answer to the last reply. The server takes replies in turn, but some time
	// after it has read them, so it could deliver the event between two of them.
	say := func(replies ...string) func(msg natsjs.Msg) {
		return func(msg natsjs.Msg) {
			last := len(replies) - 1
			for _, what := range replies[:last] {
				if err := nc.Publish(msg.Reply(), []byte(what)); err != nil {
					t.Error(err)
				}
			}
			if _, err := nc.Request(msg.Reply(), []byte(replies[last]), patience); err != nil {
				t.Errorf("the answer to %q: %v", replies[last], err)
			}
		}
	}
	settled := func(id string) {
		t.Helper()
		if e := others.next(); e.ID != id || e.Attempt != 1 {
			t.Errorf("the other group gets %s, attempt %d, want %s", e.ID, e.Attempt, id)
		} else if err := e.AckWait(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for _, abuse := range []struct {
		name    string
		replies []string
		again   bool // the event comes again, to the hub's member
	}{
		{"acks twice", []string{"+ACK", "+ACK", "+ACK"}, false},
		{"acks and refuses", []string{"+ACK", "-NAK"}, false},
		{"refuses and acks", []string{`-NAK {"delay":60000000000}`, "+ACK"}, false},
		{"ends", []string{"+TERM", "+TERM because", "+ACK"}, false},
		{"refuses twice", []string{"-NAK", "-NAK"}, true},
		{"refuses with an odd delay", []string{`-NAK {"delay":-5}`}, true},
		{"refuses with a delay that is none", []string{`-NAK {"delay":"soon"}`}, true},
		{"says what nobody knows", []string{"+WHAT", strings.Repeat("+", 1_000), "-NAK"}, true},
		{"says nothing, which is an ack", []string{""}, false},
		{"asks for the next in an ack", []string{"+WPI", "+WPI", "-NAK"}, true},
	} {
		if err := sub.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		id := publishTo(t, c, "orders", `"`+abuse.name+`"`)
		native(id, say(abuse.replies...))
		settled(id)
		if err := sub.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !abuse.again {
			// The next event is the next that comes.
			id = publishTo(t, c, "orders", `"after"`)
			settled(id)
		}
		e := events.next()
		if e.ID != id {
			t.Errorf("%s: the hub's member gets %s", abuse.name, e.Record)
		}
		if err := e.AckWait(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for name, change := range map[string]func(cfg *natsjs.ConsumerConfig){
		"gives up at once":   func(cfg *natsjs.ConsumerConfig) { cfg.MaxDeliver = 1 },
		"one at a time":      func(cfg *natsjs.ConsumerConfig) { cfg.MaxAckPending = 1 },
		"another time":       func(cfg *natsjs.ConsumerConfig) { cfg.AckWait = time.Minute },
		"no metadata":        func(cfg *natsjs.ConsumerConfig) { cfg.Metadata = nil },
		"headers only":       func(cfg *natsjs.ConsumerConfig) { cfg.HeadersOnly = true },
		"one pull at a time": func(cfg *natsjs.ConsumerConfig) { cfg.MaxRequestBatch = 1 },
	} {
		old := consumer().CachedInfo().Config
		cfg := old
		change(&cfg)
		if _, err := js.UpdateConsumer(t.Context(), "orders", cfg); err != nil {
			t.Logf("%s: the server refuses: %v", name, err)
			continue
		}
		id := publishTo(t, c, "orders", `"`+name+`"`)
		settled(id)
		e := events.next()
		if e.ID != id {
			t.Errorf("%s: the hub's member gets %s", name, e.Record)
		}
		if err := e.AckWait(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := js.UpdateConsumer(t.Context(), "orders", old); err != nil {
			t.Fatal(err)
		}
	}
	// The hub makes a group again whose consumer is gone, and loses nothing.
	if err := js.DeleteConsumer(t.Context(), "orders", "mine"); err != nil {
		t.Fatal(err)
	}
	id := publishTo(t, c, "orders", `"after the deletion"`)
	settled(id)
	for e := events.next(); ; e = events.next() {
		if err := e.AckWait(t.Context()); err != nil {
			t.Error(err)
		}
		if e.ID == id {
			break
		}
	}
	// What is no group is refused.
	if _, err := js.CreateConsumer(t.Context(), "orders", natsjs.ConsumerConfig{Durable: "noacks", AckPolicy: natsjs.AckNonePolicy}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Subscribe(t.Context(), "orders", "noacks", wire.SubscribeOptions{}, func(wire.Event) {}); err == nil || !strings.Contains(err.Error(), "subscribe_failed") {
		t.Errorf("a consumer without acks is a group: %v", err)
	}
	// A stream in the way of a topic.
	if _, err := js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "mine", Subjects: []string{"event.blocked"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Publish(t.Context(), "blocked", []byte("1"), wire.PublishOptions{}); err == nil || !strings.Contains(err.Error(), "bad_topic") {
		t.Errorf("a topic whose subject another stream takes: %v", err)
	}
	id = publishTo(t, c, "orders", `"at the end"`)
	settled(id)
}
