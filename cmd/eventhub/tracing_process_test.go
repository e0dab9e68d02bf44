//go:build unix

package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"eventhub/sdk/go/wire"
)

// receivedSpan is a span as a collector gets it.
type receivedSpan struct {
	name, trace, id, parent string
	kind                    tracepb.Span_SpanKind
	failed                  bool
	attrs                   map[string]string
}

// otlpReceiver is a collector: a server of OTLP/HTTP that keeps what it gets.
type otlpReceiver struct {
	t   *testing.T
	url string

	mu       sync.Mutex
	spans    []receivedSpan
	bodies   bytes.Buffer // decompressed
	header   http.Header  // of the last request
	resource map[string]string
	more     chan struct{} // closed when spans come
}

func startReceiver(t *testing.T) *otlpReceiver {
	t.Helper()
	r := &otlpReceiver{t: t, more: make(chan struct{})}
	server := httptest.NewServer(http.HandlerFunc(r.serve))
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

func (r *otlpReceiver) serve(_ http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodPost || req.URL.Path != "/v1/traces" || req.Header.Get("Content-Type") != "application/x-protobuf" {
		r.t.Errorf("the collector got %s %s, %s", req.Method, req.URL.Path, req.Header.Get("Content-Type"))
	}
	var body io.Reader = req.Body
	if req.Header.Get("Content-Encoding") == "gzip" {
		unpacked, err := gzip.NewReader(body)
		if err != nil {
			r.t.Error(err)
			return
		}
		body = unpacked
	}
	text, err := io.ReadAll(body)
	if err != nil {
		return // the hub was killed
	}
	var data tracepb.TracesData
	if err := proto.Unmarshal(text, &data); err != nil {
		r.t.Error(err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.header = req.Header
	r.bodies.Write(text)
	for _, of := range data.GetResourceSpans() {
		r.resource = make(map[string]string)
		for _, a := range of.GetResource().GetAttributes() {
			r.resource[a.GetKey()] = a.GetValue().GetStringValue()
		}
		for _, in := range of.GetScopeSpans() {
			for _, s := range in.GetSpans() {
				got := receivedSpan{
					name: s.GetName(), trace: hex.EncodeToString(s.GetTraceId()), id: hex.EncodeToString(s.GetSpanId()), parent: hex.EncodeToString(s.GetParentSpanId()),
					kind: s.GetKind(), failed: s.GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR, attrs: make(map[string]string),
				}
				for _, a := range s.GetAttributes() {
					got.attrs[a.GetKey()] = a.GetValue().GetStringValue()
				}
				r.spans = append(r.spans, got)
			}
		}
	}
	close(r.more)
	r.more = make(chan struct{})
}

// find waits for a span of this name that fits.
func (r *otlpReceiver) find(name string, fits func(receivedSpan) bool) (found receivedSpan) {
	r.t.Helper()
	eventually(r.t, "the span "+name, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		i := slices.IndexFunc(r.spans, func(s receivedSpan) bool { return s.name == name && fits(s) })
		if i < 0 {
			return false
		}
		found = r.spans[i]
		return true
	})
	return found
}

// ofEvent fits the spans of an event.
func ofEvent(id string) func(receivedSpan) bool {
	return func(s receivedSpan) bool { return s.attrs["messaging.message.id"] == id }
}

// traced starts a hub that sends its spans to a collector.
func traced(t *testing.T, collector string, environ []string, flags ...string) *node {
	t.Helper()
	return startNodeWith(t, func(cmd *exec.Cmd) {
		cmd.Env = append(cmd.Env, "OTEL_EXPORTER_OTLP_ENDPOINT="+collector, "OTEL_BSP_SCHEDULE_DELAY=20")
		cmd.Env = append(cmd.Env, environ...)
	}, flags...)
}

// publisherSpan is the context that a publisher gives.
type publisherSpan struct{ trace, id, flags string }

func (p publisherSpan) header() string { return "00-" + p.trace + "-" + p.id + "-" + p.flags }

func headersOf(t *testing.T, record []byte) map[string]string {
	t.Helper()
	var e struct{ Headers map[string]string }
	if err := json.Unmarshal(record, &e); err != nil {
		t.Fatal(err)
	}
	return e.Headers
}

// publishAs publishes over a WebSocket with headers.
func publishAs(t *testing.T, c *wire.Conn, topic, payload string, headers map[string]string) (id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id, err := c.Publish(ctx, topic, []byte(payload), wire.PublishOptions{Headers: headers, Key: "key-in-no-span"})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// postTo posts to the HTTP port and returns the answer.
func postTo(t *testing.T, hub *node, path, contentType, body string, header map[string]string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, hub.http+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+nodeToken)
	r.Header.Set("Content-Type", contentType)
	for name, value := range header {
		r.Header.Set(name, value)
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode/100 != 2 {
		t.Fatalf("%s: %d %s %v", path, res.StatusCode, text, err)
	}
	return string(text)
}

func idIn(t *testing.T, answer string) string {
	t.Helper()
	var got struct{ ID string }
	if err := json.Unmarshal([]byte(answer), &got); err != nil {
		t.Fatalf("%q: %v", answer, err)
	}
	return got.ID
}

// Spans go to a collector, with the publisher's span as the parent; events have the headers that
// their publishers gave them, and no others.
func TestTracing(t *testing.T) {
	t.Parallel()
	r := startReceiver(t)
	hub := traced(t, r.url, []string{
		"OTEL_SERVICE_NAME=hub-1", "OTEL_RESOURCE_ATTRIBUTES=deployment.environment.name=a%20test", "OTEL_EXPORTER_OTLP_HEADERS=x-key=of%20the%20collector",
		"OTEL_EXPORTER_OTLP_COMPRESSION=gzip",
	}, "--projector")
	c := hub.dial()
	in := subscribeTo(t, c, "t", "g", wire.SubscribeOptions{})
	const payload = `"payload-in-no-span"`

	t.Run("websocket", func(t *testing.T) {
		by := publisherSpan{"0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "01"}
		given := map[string]string{"traceparent": by.header(), "tracestate": "vendor=value", "x-other": "1"}
		id := publishAs(t, c, "t", payload, given)
		e := in.next()
		if got := headersOf(t, e.Record); !maps.Equal(got, given) {
			t.Errorf("the event has the headers %v", got)
		}
		ackAll(t, []wire.Event{e})
		publish := r.find("publish t", ofEvent(id))
		deliver := r.find("deliver t", ofEvent(id))
		ack := r.find("ack t", ofEvent(id))
		for _, s := range []receivedSpan{publish, deliver} {
			if s.trace != by.trace || s.parent != by.id {
				t.Errorf("%s has trace %s and parent %s", s.name, s.trace, s.parent)
			}
		}
		if ack.trace != by.trace || ack.parent != deliver.id {
			t.Errorf("the ack has trace %s and parent %s, the delivery is %s", ack.trace, ack.parent, deliver.id)
		}
		if publish.kind != tracepb.Span_SPAN_KIND_PRODUCER || deliver.kind != tracepb.Span_SPAN_KIND_CONSUMER || ack.kind != tracepb.Span_SPAN_KIND_CLIENT {
			t.Errorf("the kinds are %v, %v, %v", publish.kind, deliver.kind, ack.kind)
		}
		want := map[string]string{
			"messaging.system": "eventhub", "messaging.destination.name": "t", "messaging.operation.name": "deliver", "messaging.operation.type": "process",
			"messaging.message.id": id, "messaging.consumer.group.name": "g", "eventhub.outcome": "acked", "eventhub.attempt": "",
		}
		if !maps.Equal(deliver.attrs, want) {
			t.Errorf("the delivery has %v", deliver.attrs)
		}
	})
	t.Run("no parent, and a nack", func(t *testing.T) {
		id := publishAs(t, c, "t", payload, nil)
		e := in.next()
		if got := headersOf(t, e.Record); got != nil {
			t.Errorf("the event has the headers %v", got)
		}
		if err := e.Nack("reason-in-no-span", 0); err != nil {
			t.Fatal(err)
		}
		again := in.next()
		ackAll(t, []wire.Event{again})
		publish := r.find("publish t", ofEvent(id))
		refused := r.find("deliver t", func(s receivedSpan) bool { return ofEvent(id)(s) && s.attrs["eventhub.outcome"] == "nacked" })
		taken := r.find("deliver t", func(s receivedSpan) bool { return ofEvent(id)(s) && s.attrs["eventhub.outcome"] == "acked" })
		nack := r.find("nack t", ofEvent(id))
		for _, s := range []receivedSpan{publish, refused, taken} {
			if s.parent != "" {
				t.Errorf("%s has the parent %s", s.name, s.parent)
			}
		}
		if !refused.failed || taken.failed || nack.parent != refused.id {
			t.Errorf("the refused delivery is %+v, the nack %+v", refused, nack)
		}
	})
	t.Run("invalid and unsampled parents", func(t *testing.T) {
		invalid := map[string]string{"traceparent": "00-0-0-01", "tracestate": "=,="}
		id := publishAs(t, c, "t", payload, invalid)
		unsampled := publisherSpan{"11111111111111111111111111111111", "2222222222222222", "00"}
		publishAs(t, c, "t", payload, map[string]string{"traceparent": unsampled.header()})
		events := in.take(2)
		ackAll(t, events)
		if got := headersOf(t, events[0].Record); !maps.Equal(got, invalid) {
			t.Errorf("the event has the headers %v", got)
		}
		if got := headersOf(t, events[1].Record); got["traceparent"] != unsampled.header() {
			t.Errorf("the event has the headers %v", got)
		}
		if s := r.find("deliver t", ofEvent(id)); s.parent != "" {
			t.Errorf("the parent is %s", s.parent)
		}
		last := publishAs(t, c, "t", payload, nil)
		ackAll(t, in.take(1))
		r.find("deliver t", ofEvent(last)) // all spans of before have come
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, s := range r.spans {
			if s.trace == unsampled.trace {
				t.Errorf("the span %s was not to be made", s.name)
			}
		}
	})
	t.Run("http", func(t *testing.T) {
		by := publisherSpan{"33333333333333333333333333333333", "4444444444444444", "01"}
		request := map[string]string{"traceparent": by.header()}
		one := idIn(t, postTo(t, hub, "/publish/t", "application/json", payload, request))
		e := in.next()
		if got := headersOf(t, e.Record)["traceparent"]; e.ID != one || got != by.header() {
			t.Errorf("event %s has the traceparent %q", e.ID, got)
		}
		lines := idIn(t, postTo(t, hub, "/publish/t", "application/x-ndjson", `{"payload":`+payload+"}\n", request))
		of := in.next()
		if got := headersOf(t, of.Record); of.ID != lines || got != nil {
			t.Errorf("event %s has the headers %v", of.ID, got)
		}
		ackAll(t, []wire.Event{e, of})
		for _, id := range []string{one, lines} {
			if s := r.find("publish t", ofEvent(id)); s.trace != by.trace || s.parent != by.id {
				t.Errorf("the publish has trace %s and parent %s", s.trace, s.parent)
			}
		}
		if s := r.find("deliver t", ofEvent(lines)); s.parent != "" {
			t.Errorf("the delivery has the parent %s: the event names none", s.parent)
		}
	})
	t.Run("outbox", func(t *testing.T) {
		by := publisherSpan{"55555555555555555555555555555555", "6666666666666666", "01"}
		id := idIn(t, postTo(t, hub, "/outbox/t", "application/json", payload, map[string]string{"traceparent": by.header()}))
		e := in.next()
		ackAll(t, []wire.Event{e})
		if got := headersOf(t, e.Record)["traceparent"]; got != by.header() {
			t.Errorf("the event has the traceparent %q", got)
		}
		attempt, publish := r.find("outbox t", ofEvent(id)), r.find("publish t", ofEvent(id))
		if attempt.trace != by.trace || attempt.parent != by.id || publish.trace != by.trace || publish.parent != attempt.id {
			t.Errorf("the attempt is %+v, the publish %+v", attempt, publish)
		}
	})
	t.Run("projection", func(t *testing.T) {
		by := publisherSpan{"77777777777777777777777777777777", "8888888888888888", "01"}
		id := publishAs(t, c, "heartbeat.received", `{"host":"h","name":"n","pid":1}`, map[string]string{"traceparent": by.header()})
		deliver, apply := r.find("deliver heartbeat.received", ofEvent(id)), r.find("apply heartbeat.received", ofEvent(id))
		state := r.find("publish process.state", func(s receivedSpan) bool { return s.trace == by.trace })
		// The projector reads events from their stream, too, perhaps before they are delivered.
		if deliver.parent != by.id || apply.parent != deliver.id && apply.parent != by.id || state.parent != apply.id {
			t.Errorf("the delivery is %+v, the projection %+v, the publish of the state %+v", deliver, apply, state)
		}
	})
	r.mu.Lock()
	if got := r.header.Get("X-Key"); got != "of the collector" {
		t.Errorf("the collector got the header %q", got)
	}
	if r.resource["service.name"] != "hub-1" || r.resource["deployment.environment.name"] != "a test" || r.resource["service.instance.id"] == "" {
		t.Errorf("the resource is %v", r.resource)
	}
	for _, secret := range []string{"in-no-span", nodeToken} {
		if bytes.Contains(r.bodies.Bytes(), []byte(secret)) {
			t.Errorf("spans contain %q", secret)
		}
	}
	r.mu.Unlock()
	hub.terminate()
}

// Without a collector, the hub works on, counts the spans that it drops, logs that once, and stops
// in time.
func TestTracingWithoutACollector(t *testing.T) {
	t.Parallel()
	nobody, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nobody.Close() }) // it accepts, and nobody answers
	refusing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	t.Cleanup(refusing.Close)
	partial := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		success := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1)
		success = protowire.AppendString(protowire.AppendTag(success, 2, protowire.BytesType), "too old")
		_, _ = w.Write(protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), success))
	}))
	t.Cleanup(partial.Close)
	for _, c := range []struct{ name, url, reason, log string }{
		{"silent", "http://" + nobody.Addr().String(), "queue", ""},
		{"absent", "http://127.0.0.1:1", "queue", ""},
		{"refusing", refusing.URL, "export", "403"},
		{"partial", partial.URL, "rejected", "too old"},
	} {
		t.Run(c.name, func(t *testing.T) {
			hub := traced(t, c.url, []string{"OTEL_BSP_MAX_QUEUE_SIZE=4"})
			client := hub.dial()
			dropped := `eventhub_spans_dropped_total{reason="` + c.reason + `"}`
			for round := range 3 { // it works on after spans were dropped
				for i := range 20 {
					publishTo(t, client, "t", fmt.Sprint(round, i)[:1])
				}
				eventually(t, dropped, func() bool { return metricOf(t, hub, dropped) > 0 })
			}
			hub.terminate()
			log := hub.log.String()
			if n := strings.Count(log, "level=WARN"); n > 1 {
				t.Errorf("the log has %d warnings:\n%s", n, log)
			}
			if !strings.Contains(log, c.log) {
				t.Errorf("the log does not say %q:\n%s", c.log, log)
			}
		})
	}
}

// metricOf returns the value of a series of a hub, or 0.
func metricOf(t *testing.T, hub *node, series string) (value float64) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, hub.ops+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			_, _ = fmt.Sscan(rest, &value)
		}
	}
	return value
}

// The headers of an event, traceparent among them, are the same in every copy of it.
func TestTraceparentIsKept(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	c := hub.dial()
	given := map[string]string{"traceparent": publisherSpan{"0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "01"}.header(), "tracestate": "a=b,c=d"}
	same := func(t *testing.T, what string, record []byte) {
		t.Helper()
		if got := headersOf(t, record); !maps.Equal(got, given) {
			t.Errorf("%s: the event has the headers %v", what, got)
		}
	}
	first, never := 1, 0
	letters := subscribeTo(t, c, "dlq.orders", "g", wire.SubscribeOptions{MaxAttempts: &never})
	in := subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{MaxAttempts: &first})
	publishAs(t, c, "orders", "1", given)
	e := in.next()
	same(t, "delivery", e.Record)
	if err := e.Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	var letter struct{ Original json.RawMessage }
	if err := json.Unmarshal(letters.next().Payload, &letter); err != nil {
		t.Fatal(err)
	}
	same(t, "dead letter", letter.Original)

	redrive := func(query string) {
		t.Helper()
		eventually(t, "a dead letter is put back", func() bool {
			put := false
			askOps(t, hub, http.MethodPost, "/dlq/redrive?topic=orders&all=1"+query, func(line string) bool {
				put = put || strings.Contains(line, `"done":1`)
				return true
			})
			return put
		})
	}
	redrive("")
	e = in.next()
	same(t, "redrive to the group", e.Record)
	if err := e.Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	letters.next()
	redrive("&to=topic")
	e = in.next()
	same(t, "redrive to the topic", e.Record)
	ackAll(t, []wire.Event{e})

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	later := subscribeTo(t, c, "later", "g", wire.SubscribeOptions{})
	if _, err := c.Publish(ctx, "later", []byte("1"), wire.PublishOptions{Headers: given, DelayMS: 100}); err != nil {
		t.Fatal(err)
	}
	same(t, "delayed event", later.next().Record)

	dir := t.TempDir()
	token, file := filepath.Join(dir, "token"), filepath.Join(dir, "events.ndjson")
	if err := os.WriteFile(token, []byte(nodeToken), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"export", "replay"} {
		lines := call(t, format, "orders", "--http-url="+hub.http, "--token-file="+token)
		n := 0
		for line := range strings.Lines(lines) {
			same(t, format, []byte(line))
			n++
		}
		if n != 2 { // the second one is from the redrive to the topic
			t.Fatalf("%s has %d events:\n%s", format, n, lines)
		}
		if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	copied := subscribeTo(t, c, "copied", "g", wire.SubscribeOptions{})
	call(t, "import", file, "--topic=copied", "--url="+hub.url, "--token-file="+token)
	for _, e := range copied.take(2) {
		same(t, "import", e.Record)
	}
	hub.terminate()
}
