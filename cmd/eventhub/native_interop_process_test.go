//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/native"
	"eventhub/sdk/go/wire"
)

// stored is a message that a native client has read.
type stored struct {
	subject string
	header  map[string]string
	body    []byte
	tries   int
	record  []byte // how the client decodes it; nil if it decodes nothing
}

// nativeTool is one kind of native client.
type nativeTool interface {
	// publish stores a message, and returns its place.
	publish(subject string, header map[string]string, body []byte) (stream string, seq uint64)
	// next takes one message as a member of a group, and settles it: by ack, nak or term.
	next(stream, consumer, settle string) stored
	// get reads a key; nil if there is none.
	get(bucket, key string) []byte
	// watch returns a function that waits for the next value of a key.
	watch(bucket, key string) (update func() []byte)
}

// inGo is nats.go.
type inGo struct {
	t  *testing.T
	js natsjs.JetStream
}

func newInGo(t *testing.T, hub *node) nativeTool {
	t.Helper()
	nc, err := nats.Connect(hub.nats, nats.Token(nodeToken))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &inGo{t, js}
}

func (g *inGo) publish(subject string, header map[string]string, body []byte) (string, uint64) {
	g.t.Helper()
	msg := &nats.Msg{Subject: subject, Header: nats.Header{}, Data: body}
	for name, value := range header {
		msg.Header[name] = []string{value}
	}
	ack, err := g.js.PublishMsg(g.t.Context(), msg)
	if err != nil {
		g.t.Fatal(err)
	}
	return ack.Stream, ack.Sequence
}

func (g *inGo) next(stream, consumer, settle string) stored {
	g.t.Helper()
	c, err := g.js.Consumer(g.t.Context(), stream, consumer)
	if err != nil {
		g.t.Fatal(err)
	}
	msg, err := c.Next(natsjs.FetchMaxWait(patience))
	if err != nil {
		g.t.Fatal(err)
	}
	meta, err := msg.Metadata()
	if err != nil {
		g.t.Fatal(err)
	}
	e, err := native.Decode(msg)
	if err != nil {
		g.t.Fatal(err)
	}
	s := stored{subject: msg.Subject(), header: map[string]string{}, body: msg.Data(), tries: int(meta.NumDelivered), record: e.AppendRecord(nil)}
	for name, values := range msg.Headers() {
		s.header[name] = values[0]
	}
	switch settle {
	case "ack":
		err = msg.DoubleAck(g.t.Context())
	case "nak":
		err = msg.Nak()
	case "term":
		err = msg.Term()
	}
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

func (g *inGo) bucket(name string) natsjs.KeyValue {
	g.t.Helper()
	kv, err := g.js.KeyValue(g.t.Context(), name)
	if err != nil {
		g.t.Fatal(err)
	}
	return kv
}

func (g *inGo) get(bucket, key string) []byte {
	g.t.Helper()
	e, err := g.bucket(bucket).Get(g.t.Context(), key)
	if err != nil {
		return nil
	}
	return e.Value()
}

func (g *inGo) watch(bucket, key string) func() []byte {
	g.t.Helper()
	w, err := g.bucket(bucket).Watch(g.t.Context(), key, natsjs.UpdatesOnly())
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = w.Stop() })
	return func() []byte {
		g.t.Helper()
		select {
		case e := <-w.Updates():
			return e.Value()
		case <-time.After(patience):
			g.t.Fatal("no update came")
			return nil
		}
	}
}

// inNode is nats.js, in the process of docs/examples/native-node/driver.mjs.
type inNode struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

func newInNode(t *testing.T, hub *node) nativeTool {
	t.Helper()
	dir := filepath.Join("..", "..", "docs", "examples", "native-node")
	run := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "NATS_URL="+hub.nats, "NATS_TOKEN="+nodeToken)
		return cmd
	}
	for _, args := range [][]string{{"npm", "ci", "--no-audit", "--no-fund"}, {"npm", "test"}} {
		if out, err := run(args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	cmd := run("node", "driver.mjs")
	cmd.Stderr = t.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	n := &inNode{t, in, bufio.NewReader(out)}
	n.answer(new(struct{})) // it is connected
	return n
}

func (n *inNode) answer(into any) {
	n.t.Helper()
	line, err := n.out.ReadBytes('\n')
	if err != nil {
		n.t.Fatalf("node has ended: %v", err)
	}
	var failed struct{ Error string }
	if err := json.Unmarshal(line, &failed); err != nil || failed.Error != "" {
		n.t.Fatalf("node answers %s (%v)", line, err)
	}
	if err := json.Unmarshal(line, into); err != nil {
		n.t.Fatal(err)
	}
}

func (n *inNode) ask(request map[string]any, into any) {
	n.t.Helper()
	line, err := json.Marshal(request)
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.in.Write(append(line, '\n')); err != nil {
		n.t.Fatal(err)
	}
	n.answer(into)
}

func (n *inNode) publish(subject string, header map[string]string, body []byte) (string, uint64) {
	n.t.Helper()
	var got struct {
		Stream string
		Seq    uint64
	}
	n.ask(map[string]any{"op": "publish", "subject": subject, "header": header, "body": body}, &got)
	return got.Stream, got.Seq
}

func (n *inNode) next(stream, consumer, settle string) stored {
	n.t.Helper()
	var got struct {
		Subject string
		Header  map[string]string
		Body    []byte
		Tries   int
		Record  json.RawMessage
	}
	n.ask(map[string]any{"op": "next", "stream": stream, "consumer": consumer, "settle": settle}, &got)
	return stored{got.Subject, got.Header, got.Body, got.Tries, got.Record}
}

func (n *inNode) get(bucket, key string) []byte {
	n.t.Helper()
	var got struct{ Body []byte }
	n.ask(map[string]any{"op": "get", "bucket": bucket, "key": key}, &got)
	return got.Body
}

func (n *inNode) watch(bucket, key string) func() []byte {
	n.t.Helper()
	n.ask(map[string]any{"op": "watch", "bucket": bucket, "key": key}, new(struct{}))
	return func() []byte {
		n.t.Helper()
		var got struct{ Body []byte }
		n.ask(map[string]any{"op": "update", "bucket": bucket}, &got)
		return got.Body
	}
}

// command is the nats command.
type command struct {
	t   *testing.T
	hub *node
}

func newCommand(t *testing.T, hub *node) nativeTool {
	t.Helper()
	return &command{t, hub}
}

// tool returns the path of the nats command, which .ci/setup installs.
func (c *command) tool() string {
	c.t.Helper()
	if path, err := filepath.Abs("../../.tools/nats"); err == nil {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	path, err := exec.LookPath("nats")
	if err != nil {
		c.t.Fatalf("there is no nats command: %v; install it with .ci/tools .tools nats", err)
	}
	return path
}

func (c *command) start(ctx context.Context, args ...string) *exec.Cmd {
	c.t.Helper()
	cmd := exec.CommandContext(ctx, c.tool(), args...)
	cmd.Env = append(os.Environ(), "NATS_URL="+c.hub.nats, "NATS_TOKEN="+nodeToken, "XDG_CONFIG_HOME="+c.t.TempDir(), "NO_COLOR=1")
	return cmd
}

func (c *command) run(body []byte, args ...string) (output []byte, ok bool) {
	c.t.Helper()
	cmd := c.start(c.t.Context(), args...)
	if body != nil {
		cmd.Stdin = bytes.NewReader(body)
	}
	output, err := cmd.CombinedOutput()
	if err != nil {
		output = append(output, err.Error()...)
	}
	return output, err == nil
}

func (c *command) publish(subject string, header map[string]string, body []byte) (string, uint64) {
	c.t.Helper()
	args := []string{"pub", "-J", subject, "--force-stdin", "--no-templates"}
	for name, value := range header {
		args = append(args, "-H", name+":"+value)
	}
	out, ok := c.run(body, args...)
	m := regexp.MustCompile(`Stored in Stream: (\S+) Sequence: (\d+)`).FindSubmatch(out)
	if !ok || m == nil {
		c.t.Fatalf("nats pub: %s", out)
	}
	seq, err := strconv.ParseUint(string(m[2]), 10, 64)
	if err != nil {
		c.t.Fatal(err)
	}
	return string(m[1]), seq
}

// next reads what the command prints: a line with the subject and the tries, perhaps headers, and
// the body.
func (c *command) next(stream, consumer, settle string) stored {
	c.t.Helper()
	out, ok := c.run(nil, "consumer", "next", stream, consumer, "--"+settle, "--timeout", patience.String())
	m := regexp.MustCompile(`(?s)subj: (\S+) / tries: (\d+) .*?\n\n(Headers:\n\n(.*?)\n\nData:\n\n\n?)?(.*?)\n\n[A-Z][a-z]+ .*message`).FindSubmatch(out)
	if !ok || m == nil {
		c.t.Fatalf("nats consumer next: %s", out)
	}
	tries, err := strconv.Atoi(string(m[2]))
	if err != nil {
		c.t.Fatal(err)
	}
	s := stored{subject: string(m[1]), header: map[string]string{}, body: m[5], tries: tries}
	for line := range strings.Lines(string(m[4])) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			s.header[name] = value
		}
	}
	return s
}

func (c *command) get(bucket, key string) []byte {
	c.t.Helper()
	out, ok := c.run(nil, "kv", "get", bucket, key, "--raw")
	if !ok {
		return nil
	}
	return out
}

func (c *command) watch(bucket, key string) func() []byte {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.t.Context())
	cmd := c.start(ctx, "kv", "watch", bucket, key)
	out, err := cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	lines := make(chan string, 100)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(out); s.Scan(); {
			if _, value, ok := strings.Cut(s.Text(), bucket+" > "+key+": "); ok {
				lines <- value
			}
		}
	}()
	c.t.Cleanup(func() {
		cancel()
		<-read
		_ = cmd.Wait()
	})
	return func() []byte {
		c.t.Helper()
		select {
		case line := <-lines:
			return []byte(line)
		case <-time.After(patience):
			c.t.Fatal("no update came")
			return nil
		}
	}
}

var _ = []nativeTool{(*inGo)(nil), (*inNode)(nil), (*command)(nil)}

// TestNATSInGo, TestNATSInNode and TestNATSCommand let a native client and clients of the hub
// exchange events, share a group, and read the newest event of a key.
func TestNATSInGo(t *testing.T) { testNativeTool(t, newInGo) }

func TestNATSInNode(t *testing.T) { testNativeTool(t, newInNode) }

func TestNATSCommand(t *testing.T) { testNativeTool(t, newCommand) }

func testNativeTool(t *testing.T, open func(*testing.T, *node) nativeTool) {
	t.Helper()
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte("topics:\n  - {topic: state, compaction: true}\n  - {topic: orders.placed}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--topics="+rules)
	tool := open(t, hub)
	c := hub.dial()
	nativeToHub(t, tool, c)
	hubToNative(t, tool, c)
	sharedGroup(t, tool, c)
	newestByKey(t, tool, c)
}

// asJSON decodes a record for a comparison.
func asJSON(t *testing.T, text []byte) (v map[string]any) {
	t.Helper()
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

// nativeToHub publishes messages, and compares the records that a client of the hub gets.
func nativeToHub(t *testing.T, tool nativeTool, c *wire.Conn) {
	t.Helper()
	events := subscribeTo(t, c, "orders.placed", "reader", wire.SubscribeOptions{})
	for _, m := range []struct {
		name, subject string
		header        map[string]string
		body, want    string // "" in id and ts: those of the place
	}{
		{"bare", "event.orders.placed", nil, `{"n":12345678901234567890}`, `"payload":{"n":12345678901234567890}`},
		{"key", "keyed.local=3A7.orders.placed", nil, `1`, `"key":"local:7","payload":1`},
		{
			"fields", "event.orders.placed",
			map[string]string{"Nats-Msg-Id": "o-1", "Event-Ts": "5", "Event-Sid": "s", "Event-Tags": `["a"]`, "Event-Caused-By": `["c"]`, "traceparent": "00-ab"},
			`{}`, `"sid":"s","headers":{"traceparent":"00-ab"},"caused_by":["c"],"tags":["a"],"payload":{}`,
		},
		{"text", "event.orders.placed", nil, "not JSON", `"headers":{"Event-Encoding":"text"},"payload":"not JSON"`},
		{"binary", "event.orders.placed", nil, "\xff\x00\x01", `"headers":{"Event-Encoding":"base64"},"payload":"/wAB"`},
	} {
		stream, seq := tool.publish(m.subject, m.header, []byte(m.body))
		e := events.next()
		id, ts := stream+"@"+strconv.FormatUint(seq, 10), e.TS
		if m.header["Nats-Msg-Id"] != "" {
			id = m.header["Nats-Msg-Id"]
		}
		if m.header["Event-Ts"] != "" {
			ts = 5
		}
		want := `{"id":"` + id + `","ts":` + strconv.FormatInt(ts, 10) + `,"topic":"orders.placed",` + m.want + `}`
		if string(e.Record) != want {
			t.Errorf("%s: the hub delivers %s, want %s", m.name, e.Record, want)
		}
		if err := e.AckWait(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// hubToNative publishes through the hub, and compares the messages that the native client gets.
func hubToNative(t *testing.T, tool nativeTool, c *wire.Conn) {
	t.Helper()
	// The hub makes the group; it is away when the events come.
	sub, err := c.Subscribe(t.Context(), "orders.placed", "native", wire.SubscribeOptions{}, func(wire.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	events := subscribeTo(t, c, "orders.placed", "reader beside", wire.SubscribeOptions{})
	for _, p := range []struct {
		payload string
		opts    wire.PublishOptions
		subject string
	}{
		{`{"n": 12345678901234567890, "s":"\u00e9"}`, wire.PublishOptions{}, "event.orders.placed"},
		{`"a string, ключ"`, wire.PublishOptions{Key: "host:7"}, "keyed.host=3A7.orders.placed"},
		{`null`, wire.PublishOptions{ID: "mine", Headers: map[string]string{"traceparent": "00-cd", "X-Team": "a b"}}, "event.orders.placed"},
	} {
		id, err := c.Publish(t.Context(), "orders.placed", []byte(p.payload), p.opts)
		if err != nil {
			t.Fatal(err)
		}
		got := tool.next("orders=2Eplaced", "native", "ack")
		if got.subject != p.subject || string(got.body) != p.payload || got.tries != 1 {
			t.Errorf("the native client gets %+v (%s), want %s on %s", got, got.body, p.payload, p.subject)
		}
		name := "Event-Id"
		if p.opts.ID != "" {
			name = "Nats-Msg-Id"
		}
		if got.header[name] != id {
			t.Errorf("the header %s is %q, want %q (%v)", name, got.header[name], id, got.header)
		}
		for name, value := range p.opts.Headers {
			if got.header[name] != value {
				t.Errorf("the header %s is %q, want %q", name, got.header[name], value)
			}
		}
		e := events.next()
		if want := asJSON(t, e.Record); got.record != nil && !reflect.DeepEqual(asJSON(t, got.record), want) {
			t.Errorf("the native client decodes %s, and the hub delivers %s", got.record, e.Record)
		}
		if err := e.AckWait(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// sharedGroup has a native member and one of the hub refuse an event in turn, until it is
// dead-lettered: attempts count together.
func sharedGroup(t *testing.T, tool nativeTool, c *wire.Conn) {
	t.Helper()
	most := 4
	events := &box{t: t, events: make(chan wire.Event, 100)}
	sub, err := c.Subscribe(t.Context(), "orders.placed", "shared", wire.SubscribeOptions{MaxAttempts: &most}, func(e wire.Event) { events.events <- e })
	if err != nil {
		t.Fatal(err)
	}
	letters := subscribeTo(t, c, "dlq.orders.placed", "letters", wire.SubscribeOptions{})
	pause := func() {
		t.Helper()
		if err := sub.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	pause()
	stream, seq := tool.publish("event.orders.placed", nil, []byte("1"))
	var attempts []int
	for len(attempts) < most {
		got := tool.next(stream, "shared", "nak")
		attempts = append(attempts, got.tries)
		if err := sub.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		e := events.next()
		attempts = append(attempts, e.Attempt)
		if len(attempts) < most {
			pause() // so that the native member has it next
		}
		if err := e.NackWait(t.Context(), "refused", 0); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(attempts, []int{1, 2, 3, 4}) {
		t.Errorf("the attempts are %v", attempts)
	}
	var letter struct {
		Topic, Group, Err string
		Attempts          int
		Original          struct{ ID string }
	}
	if err := json.Unmarshal(letters.next().Payload, &letter); err != nil {
		t.Fatal(err)
	}
	if want := stream + "@" + strconv.FormatUint(seq, 10); letter.Original.ID != want || letter.Attempts != most || letter.Group != "shared" || letter.Err != "refused" {
		t.Errorf("the dead letter is %+v", letter)
	}
}

// newestByKey reads and watches the newest event of a key, whoever published it.
func newestByKey(t *testing.T, tool nativeTool, c *wire.Conn) {
	t.Helper()
	update := tool.watch("latest_state", "host=3A7")
	ready := func(n int) func() bool { // the watch of a command takes a moment
		return func() bool {
			value := strconv.Itoa(n)
			n++
			tool.publish("keyed.host=3A7.state", nil, []byte(value))
			return bytes.Equal(tool.get("latest_state", "host=3A7"), []byte(value))
		}
	}
	waitFor(t, "the bucket", ready(0))
	waitFor(t, "the watch", func() bool { return len(update()) > 0 })
	if _, err := c.Publish(t.Context(), "state", []byte(`"from the hub"`), wire.PublishOptions{Key: "host:7"}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the value of the hub", func() bool { return string(tool.get("latest_state", "host=3A7")) == `"from the hub"` })
	waitFor(t, "the update by the hub", func() bool { return string(update()) == `"from the hub"` })
	tool.publish("keyed.host=3A7.state", map[string]string{"KV-Operation": "DEL"}, nil)
	waitFor(t, "the removal", func() bool { return tool.get("latest_state", "host=3A7") == nil })
}
