// Package tracing makes OpenTelemetry spans of publishes, deliveries, settlements, attempts of an
// outbox, and applied events. A Tracer implements the interfaces that jetstream, outbox and
// projections declare.
//
// Parents come from the header traceparent of the event, which its publisher set. The package adds
// no header to an event. Spans have the names and attributes of the conventions for messaging; no
// attribute has a payload, a key or a token.
package tracing

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"eventhub/jetstream"
)

// system is the value of messaging.system in all spans.
const system = "eventhub"

// maxState is how many bytes a tracestate may have to become part of spans. The header itself stays
// as it is.
const maxState = 512

// Attributes that the conventions do not have.
const (
	attemptKey    = attribute.Key("eventhub.attempt")
	outcomeKey    = attribute.Key("eventhub.outcome")
	projectionKey = attribute.Key("eventhub.projection")
	duplicateKey  = attribute.Key("eventhub.duplicate")
)

// Config configures a Tracer.
type Config struct {
	// Provider makes the spans. Required. The caller shuts it down after all users of the Tracer
	// have ended.
	Provider trace.TracerProvider
	// OpenSpans ("open_spans") is the most spans that have begun and not ended: default 10,000.
	// Beyond it, publishes and deliveries have no spans.
	OpenSpans int
	// Dropped counts spans that were not made because of OpenSpans. Default: nobody counts.
	Dropped func()
}

// Tracer makes spans. Its methods may be called concurrently and do not block.
type Tracer struct {
	tracer  trace.Tracer
	limit   int64
	dropped func()
	open    atomic.Int64
}

var _ jetstream.Tracer = (*Tracer)(nil)

// New returns a Tracer.
func New(cfg Config) (*Tracer, error) {
	if cfg.Provider == nil {
		return nil, errors.New("tracing: Config.Provider is missing")
	}
	if cfg.OpenSpans < 0 {
		return nil, errors.New("tracing: Config.OpenSpans must be positive")
	}
	if cfg.OpenSpans == 0 {
		cfg.OpenSpans = 10_000
	}
	if cfg.Dropped == nil {
		cfg.Dropped = func() {}
	}
	return &Tracer{
		tracer:  cfg.Provider.Tracer("eventhub", trace.WithSchemaURL(semconv.SchemaURL)),
		limit:   int64(cfg.OpenSpans),
		dropped: cfg.Dropped,
	}, nil
}

// span is a span that counts as open.
type span struct {
	trace.Span

	t     *Tracer
	topic string
	id    string // of the event; known at the end of a publish
	ended atomic.Bool
}

// start begins a span. It returns nil if the span is not sampled, or if too many are open.
func (t *Tracer) start(ctx context.Context, operation, topic string, kind trace.SpanKind, attrs ...attribute.KeyValue) *span {
	attrs = append(attrs,
		semconv.MessagingSystemKey.String(system),
		semconv.MessagingDestinationName(topic),
		semconv.MessagingOperationName(operation),
	)
	_, s := t.tracer.Start(ctx, operation+" "+topic, trace.WithSpanKind(kind), trace.WithAttributes(attrs...))
	if !s.IsRecording() {
		return nil
	}
	if t.open.Add(1) > t.limit {
		t.open.Add(-1)
		t.dropped() // nothing keeps a span that does not end
		return nil
	}
	return &span{Span: s, t: t, topic: topic}
}

// end ends the span once.
func (s *span) end() {
	if !s.ended.Swap(true) {
		s.Span.End()
		s.t.open.Add(-1)
	}
}

// fail notes why the operation failed: by the code of the error, because its text may name what is
// not for attributes.
func (s *span) fail(err error) {
	if err == nil {
		return
	}
	code := "_OTHER"
	switch refused, ok := errors.AsType[*jetstream.Error](err); {
	case ok:
		code = refused.Code
	case errors.Is(err, context.DeadlineExceeded):
		code = "timeout"
	case errors.Is(err, context.Canceled):
		code = "canceled"
	case errors.Is(err, jetstream.ErrClosed):
		code = "closed"
	}
	s.SetAttributes(semconv.ErrorTypeKey.String(code))
	s.SetStatus(codes.Error, code)
}

// Publish implements jetstream.Tracer.
func (t *Tracer) Publish(ctx context.Context, topic string, headers map[string]string) jetstream.PublishSpan {
	s := t.start(parent(ctx, headers), "publish", topic, trace.SpanKindProducer, semconv.MessagingOperationTypeSend)
	if s == nil {
		return nil
	}
	return publishSpan{s}
}

type publishSpan struct{ *span }

// End implements jetstream.PublishSpan.
func (s publishSpan) End(r jetstream.Receipt, err error) {
	if r.ID != "" {
		s.SetAttributes(messageID(r.ID))
	}
	if r.Duplicate {
		s.SetAttributes(duplicateKey.Bool(true))
	}
	s.fail(err)
	s.end()
}

// Deliver implements jetstream.Tracer.
func (t *Tracer) Deliver(e *jetstream.Event, group string, attempt int) jetstream.DeliverySpan {
	s := t.start(parent(context.Background(), e.Headers), "deliver", e.Topic, trace.SpanKindConsumer,
		semconv.MessagingOperationTypeProcess, messageID(e.ID), groupName(group), attemptKey.Int(attempt))
	if s == nil {
		return nil
	}
	s.id = e.ID
	return &deliverySpan{span: s, group: group}
}

type deliverySpan struct {
	*span

	group string
}

// Context implements jetstream.DeliverySpan.
func (s *deliverySpan) Context(ctx context.Context) context.Context {
	return trace.ContextWithSpan(ctx, s.Span)
}

// outcomes names the ends of leases, and those that a client asked for by a settlement.
var outcomes = map[jetstream.Outcome]struct{ name, settlement string }{
	jetstream.Acked:        {"acked", "ack"},
	jetstream.Nacked:       {"nacked", "nack"},
	jetstream.Expired:      {"expired", ""},
	jetstream.Returned:     {"returned", ""},
	jetstream.DeadLettered: {"dead_lettered", ""},
	jetstream.Dropped:      {"dropped", ""},
}

// End implements jetstream.DeliverySpan. A settlement of the subscriber has a span of its own.
func (s *deliverySpan) End(how jetstream.Outcome) {
	out := outcomes[how]
	if out.settlement != "" {
		ack := s.t.start(s.Context(context.Background()), out.settlement, s.topic, trace.SpanKindClient,
			semconv.MessagingOperationTypeSettle, messageID(s.id), groupName(s.group))
		if ack != nil {
			ack.end()
		}
	}
	s.SetAttributes(outcomeKey.String(out.name))
	if how != jetstream.Acked && how != jetstream.Returned {
		s.SetAttributes(semconv.ErrorTypeKey.String(out.name))
		s.SetStatus(codes.Error, out.name)
	}
	s.end()
}

// Attempt implements outbox.Tracer.
func (t *Tracer) Attempt(ctx context.Context, topic, id string, headers map[string]string, attempts int) (context.Context, func(error)) {
	return t.within(parent(ctx, headers), "outbox", topic, messageID(id), attemptKey.Int(attempts+1))
}

// Apply implements projections.Tracer.
func (t *Tracer) Apply(ctx context.Context, projection string, e *jetstream.Event) (context.Context, func(error)) {
	return t.within(parent(ctx, e.Headers), "apply", e.Topic, semconv.MessagingOperationTypeProcess, messageID(e.ID), projectionKey.String(projection))
}

// within begins a span of work in the process. It returns the context for that work, and a function
// that ends the span.
func (t *Tracer) within(ctx context.Context, operation, topic string, attrs ...attribute.KeyValue) (context.Context, func(error)) {
	s := t.start(ctx, operation, topic, trace.SpanKindInternal, attrs...)
	if s == nil {
		return ctx, func(error) {}
	}
	return trace.ContextWithSpan(ctx, s.Span), func(err error) {
		s.fail(err)
		s.end()
	}
}

// Handler returns a handler that makes the header traceparent of each request the parent of what
// the request publishes, as far as an event has no such header of its own.
func (*Tracer) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := map[string]string{"traceparent": strings.Join(r.Header["Traceparent"], ", ")}
		if state := r.Header["Tracestate"]; state != nil {
			given["tracestate"] = strings.Join(state, ",")
		}
		if ctx, ok := extract(r.Context(), given); ok {
			r = r.WithContext(ctx)
		}
		next.ServeHTTP(w, r)
	})
}

// parent returns the context whose span is the parent of a span about an event with these headers:
// the span of this process in ctx if it belongs to the trace of the headers, else the span that the
// headers name, else that of ctx.
func parent(ctx context.Context, headers map[string]string) context.Context {
	if len(headers) == 0 {
		return ctx
	}
	remote, ok := extract(ctx, headers)
	if !ok {
		return ctx
	}
	here, there := trace.SpanContextFromContext(ctx), trace.SpanContextFromContext(remote)
	if here.IsValid() && !here.IsRemote() && here.TraceID() == there.TraceID() {
		return ctx
	}
	return remote
}

// extract returns ctx with the span that headers name. It reports whether they name a valid one.
func extract(ctx context.Context, headers map[string]string) (context.Context, bool) {
	text := carrier(headers).Get("traceparent")
	if text == "" {
		return ctx, false
	}
	fields := propagation.MapCarrier{"traceparent": text}
	if state := carrier(headers).Get("tracestate"); state != "" && len(state) <= maxState {
		fields["tracestate"] = state
	}
	// A context without a span, so that what is found is from the headers.
	found := trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), fields))
	if !found.IsValid() {
		return ctx, false
	}
	return trace.ContextWithRemoteSpanContext(ctx, found), true
}

// carrier finds headers of an event by their names in any case.
type carrier map[string]string

// Get returns the header with a name in lower case, or "". If names differ only in case, the name
// in lower case wins; with several others, there is no such header.
func (c carrier) Get(name string) (value string) {
	if value, ok := c[name]; ok {
		return value
	}
	found := 0
	for have, v := range c {
		if strings.EqualFold(have, name) {
			value = v
			found++
		}
	}
	if found > 1 {
		return ""
	}
	return value
}

// messageID and groupName make attributes of names that a native client or a caller of the package
// may have chosen freely. A string that is not UTF-8 would keep a whole batch from being sent.
func messageID(id string) attribute.KeyValue {
	return semconv.MessagingMessageID(strings.ToValidUTF8(id, "\uFFFD"))
}

func groupName(group string) attribute.KeyValue {
	return semconv.MessagingConsumerGroupName(strings.ToValidUTF8(group, "\uFFFD"))
}
