package tracing

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

const patience = 20 * time.Second

func TestMain(m *testing.M) {
	natstest.RunChild(nil)
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// newTracer returns a Tracer, and what gets its spans as they end.
func newTracer(tb testing.TB, cfg Config, opts ...sdktrace.TracerProviderOption) (*Tracer, *tracetest.InMemoryExporter) {
	tb.Helper()
	spans := tracetest.NewInMemoryExporter()
	cfg.Provider = sdktrace.NewTracerProvider(append(opts, sdktrace.WithSyncer(spans))...)
	t, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return t, spans
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func attr(s tracetest.SpanStub, key attribute.Key) string {
	for _, a := range s.Attributes {
		if a.Key == key {
			return a.Value.String()
		}
	}
	return ""
}

const (
	traceA, spanA = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	given         = "00-" + traceA + "-" + spanA + "-01"
)

// The parent of a span is the nearest one that is known: of this process if it is of the event's
// trace, else of the event, else of the request. What is no traceparent is none.
func TestParents(t *testing.T) {
	t.Parallel()
	state := func(n int) string { return "k=" + strings.Repeat("v", n) }
	for name, c := range map[string]struct {
		headers       map[string]string
		trace, parent string // none: ""
		state         string
	}{
		"none":                   {nil, "", "", ""},
		"given":                  {map[string]string{"traceparent": given}, traceA, spanA, ""},
		"in another case":        {map[string]string{"TraceParent": given}, traceA, spanA, ""},
		"in two cases":           {map[string]string{"TraceParent": given, "TRACEPARENT": given}, "", "", ""},
		"with a state":           {map[string]string{"traceparent": given, "tracestate": state(100)}, traceA, spanA, state(100)},
		"with a long state":      {map[string]string{"traceparent": given, "tracestate": strings.Repeat(state(200)[1:], 3)}, traceA, spanA, ""},
		"with an invalid state":  {map[string]string{"traceparent": given, "tracestate": "=,="}, traceA, spanA, ""},
		"a state alone":          {map[string]string{"tracestate": state(100)}, "", "", ""},
		"empty":                  {map[string]string{"traceparent": ""}, "", "", ""},
		"twice":                  {map[string]string{"traceparent": given + ", " + given}, "", "", ""},
		"zeros":                  {map[string]string{"traceparent": "00-00000000000000000000000000000000-0000000000000000-01"}, "", "", ""},
		"upper case":             {map[string]string{"traceparent": strings.ToUpper(given)}, "", "", ""},
		"an unknown version":     {map[string]string{"traceparent": "cc" + given[2:] + "-what"}, traceA, spanA, ""},
		"an impossible version":  {map[string]string{"traceparent": "ff" + given[2:]}, "", "", ""},
		"too long for a version": {map[string]string{"traceparent": given + "-what"}, "", "", ""},
		"not utf-8":              {map[string]string{"traceparent": "\xff" + given}, "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tracer, spans := newTracer(t, Config{})
			tracer.Publish(t.Context(), "t", c.headers).End(jetstream.Receipt{ID: "id"}, nil)
			got := spans.GetSpans()
			if len(got) != 1 {
				t.Fatalf("%d spans", len(got))
			}
			parent := got[0].Parent
			if c.trace == "" {
				if parent.IsValid() {
					t.Errorf("the parent is %v", parent)
				}
				return
			}
			if parent.TraceID().String() != c.trace || got[0].SpanContext.TraceID().String() != c.trace || parent.SpanID().String() != c.parent || parent.TraceState().String() != c.state {
				t.Errorf("the parent is %s-%s, %q", parent.TraceID(), parent.SpanID(), parent.TraceState())
			}
		})
	}
	t.Run("of the process", func(t *testing.T) {
		t.Parallel()
		tracer, spans := newTracer(t, Config{})
		headers := map[string]string{"traceparent": given}
		ctx, end := tracer.Attempt(t.Context(), "t", "id", headers, 0)
		tracer.Publish(ctx, "t", headers).End(jetstream.Receipt{}, nil)
		other := map[string]string{"traceparent": "00-11111111111111111111111111111111-2222222222222222-01"}
		tracer.Publish(ctx, "t", other).End(jetstream.Receipt{}, nil)
		end(nil)
		got := spans.GetSpans()
		if got[0].Parent.SpanID() != got[2].SpanContext.SpanID() || got[2].Parent.SpanID().String() != spanA {
			t.Errorf("the parents are %v, %v", got[0].Parent, got[2].Parent)
		}
		if got[1].Parent.SpanID().String() != "2222222222222222" {
			t.Errorf("the parent of an event of another trace is %v", got[1].Parent)
		}
	})
	t.Run("of the request", func(t *testing.T) {
		t.Parallel()
		tracer, spans := newTracer(t, Config{})
		h := tracer.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			tracer.Publish(r.Context(), "t", nil).End(jetstream.Receipt{}, nil)
			own := map[string]string{"traceparent": "00-11111111111111111111111111111111-2222222222222222-01"}
			tracer.Publish(r.Context(), "t", own).End(jetstream.Receipt{}, nil)
		}))
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Traceparent", given)
		h.ServeHTTP(httptest.NewRecorder(), r)
		r.Header.Add("Traceparent", given)
		h.ServeHTTP(httptest.NewRecorder(), r)
		got := spans.GetSpans()
		if got[0].Parent.SpanID().String() != spanA || got[1].Parent.SpanID().String() != "2222222222222222" {
			t.Errorf("the parents are %v, %v", got[0].Parent, got[1].Parent)
		}
		if got[2].Parent.IsValid() {
			t.Errorf("a header that is given twice makes the parent %v", got[2].Parent)
		}
	})
}

// Spans that are not sampled cost no place, and those beyond the limit are counted.
func TestOpenSpansAreBounded(t *testing.T) {
	t.Parallel()
	dropped := 0
	tracer, spans := newTracer(t, Config{OpenSpans: 2, Dropped: func() { dropped++ }}, sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.AlwaysSample())))
	unsampled := map[string]string{"traceparent": given[:len(given)-1] + "0"}
	for range 5 {
		if tracer.Publish(t.Context(), "t", unsampled) != nil {
			t.Fatal("a publish is traced that its publisher does not trace")
		}
	}
	one := tracer.Deliver(&jetstream.Event{Topic: "t"}, "g", 1)
	two := tracer.Publish(t.Context(), "t", nil)
	if tracer.Publish(t.Context(), "t", nil) != nil || tracer.Deliver(&jetstream.Event{Topic: "t"}, "g", 1) != nil || dropped != 2 {
		t.Errorf("there are more spans than the limit, %d were dropped", dropped)
	}
	two.End(jetstream.Receipt{}, errors.New("secret"))
	one.End(jetstream.Acked)
	if n := tracer.open.Load(); n != 0 {
		t.Errorf("%d spans are open", n)
	}
	for _, s := range spans.GetSpans() {
		if strings.Contains(fmt.Sprint(s), "secret") {
			t.Errorf("the span shows the text of an error: %v", s)
		}
	}
}

func openBus(tb testing.TB, tracer jetstream.Tracer) *jetstream.Bus {
	tb.Helper()
	bus, err := jetstream.Open(tb.Context(), jetstream.Config{Server: natstest.Embed(tb, tb.TempDir()), Tracer: tracer})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = bus.Close() })
	return bus
}

// Each span of a delivery ends with its lease, however that ends.
func TestDeliverySpansEnd(t *testing.T) {
	t.Parallel()
	tracer, spans := newTracer(t, Config{})
	bus := openBus(t, tracer)
	for _, topic := range []string{"expires", "returns", "closes", "dies", "taken.back"} {
		if _, err := bus.Publish(t.Context(), topic, []byte("1"), jetstream.PublishOptions{Headers: map[string]string{"traceparent": given}}); err != nil {
			t.Fatal(err)
		}
	}
	outcome := func(topic, want string) {
		t.Helper()
		eventually(t, topic+" "+want, func() bool {
			for _, s := range spans.GetSpans() {
				if s.Name == "deliver "+topic && attr(s, outcomeKey) == want {
					if s.Parent.SpanID().String() != spanA {
						t.Errorf("the parent is %v", s.Parent)
					}
					return true
				}
			}
			return false
		})
	}
	join := func(topic string, opts jetstream.SubscribeOptions, f func(*jetstream.Held)) *jetstream.Subscription {
		t.Helper()
		opts.From = jetstream.FromEarliest
		s, err := bus.Subscribe(t.Context(), topic, "g", opts, f)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	join("expires", jetstream.SubscribeOptions{AckTimeout: time.Second}, func(h *jetstream.Held) { h.Begin() })
	outcome("expires", "expired")
	begun := make(chan struct{}, 100)
	begin := func(h *jetstream.Held) {
		if _, ok := h.Begin(); ok {
			begun <- struct{}{}
		}
	}
	s := join("returns", jetstream.SubscribeOptions{}, begin)
	<-begun
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	outcome("returns", "returned")
	join("dies", jetstream.SubscribeOptions{MaxAttempts: 1}, func(h *jetstream.Held) {
		if d, ok := h.Begin(); ok {
			_ = d.Nack("no", 0)
		}
	})
	outcome("dies", "dead_lettered")
	join("taken.back", jetstream.SubscribeOptions{}, func(h *jetstream.Held) {
		if out, ok := h.BeginSend(); ok {
			out.TakeBack()
		}
	})
	outcome("taken.back", "returned")
	join("closes", jetstream.SubscribeOptions{}, begin)
	<-begun
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	if n := tracer.open.Load(); n != 0 {
		t.Errorf("%d spans are open after the end of the bus", n)
	}
}

// Spans of a handler are children of the delivery's.
func TestConsumeGivesTheSpan(t *testing.T) {
	t.Parallel()
	tracer, spans := newTracer(t, Config{})
	bus := openBus(t, tracer)
	if _, err := bus.Publish(t.Context(), "t", []byte("1"), jetstream.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	handled := make(chan trace.SpanContext, 1)
	s, err := bus.Consume(t.Context(), "t", "g", jetstream.SubscribeOptions{From: jetstream.FromEarliest}, func(ctx context.Context, _ *jetstream.Delivery) error {
		_, err := bus.Publish(ctx, "next", []byte("2"), jetstream.PublishOptions{})
		handled <- trace.SpanContextFromContext(ctx)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	in := <-handled
	if err := s.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	names := make(map[string]tracetest.SpanStub)
	for _, s := range spans.GetSpans() {
		names[s.Name] = s
	}
	if d := names["deliver t"]; d.SpanContext.SpanID() != in.SpanID() || names["publish next"].Parent.SpanID() != in.SpanID() || names["ack t"].Parent.SpanID() != in.SpanID() {
		t.Errorf("the handler has the span %v; there are %v", in, names)
	}
}

// A refused publish has a span that says why, and no text.
func TestRefusedPublish(t *testing.T) {
	t.Parallel()
	tracer, spans := newTracer(t, Config{})
	bus := openBus(t, tracer)
	if _, err := bus.Publish(t.Context(), "no topic", []byte("1"), jetstream.PublishOptions{}); err == nil {
		t.Fatal("the topic is valid")
	}
	got := spans.GetSpans()
	if len(got) != 1 || attr(got[0], "error.type") != jetstream.CodeBadTopic || tracer.open.Load() != 0 {
		t.Errorf("the spans are %v", got)
	}
}
