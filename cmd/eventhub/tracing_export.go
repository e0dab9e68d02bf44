package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"eventhub/ops"
)

const (
	// maxReply is how many bytes of the collector's answer are read, and maxReplyText how many
	// characters of its message are logged.
	maxReply     = 64 << 10
	maxReplyText = 256
	// Delay between tries of a batch. It doubles, and jitter shortens it by up to half.
	resendFirst = time.Second
	resendMax   = 10 * time.Second
	// sayEvery is how often the log says at most that spans cannot be sent.
	sayEvery = time.Minute
)

// collector sends spans over OTLP/HTTP. It implements otlptrace.Client. The client of OpenTelemetry
// would link gRPC.
type collector struct {
	settings *traceSettings
	client   *http.Client
	// ending is closed by lastTries: from then on, nothing is tried again.
	ending    chan struct{}
	lastTries func() // called once
}

func newCollector(s *traceSettings) *collector {
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout, MaxIdleConns: 1, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true,
		MaxResponseHeaderBytes: maxReply,
	}
	if s.tls != nil {
		transport.TLSClientConfig = s.tls
	} else {
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	ending := make(chan struct{})
	return &collector{settings: s, ending: ending, lastTries: func() { close(ending) }, client: &http.Client{
		Transport: transport,
		// The headers may have a token, which is for this address alone.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Start implements otlptrace.Client.
func (*collector) Start(context.Context) error { return nil }

// Stop implements otlptrace.Client.
func (c *collector) Stop(context.Context) error {
	c.client.CloseIdleConnections()
	return nil
}

// rejectedError is the answer of a collector that took only a part of the spans.
type rejectedError struct {
	spans   int64
	message string
}

func (r *rejectedError) Error() string {
	return fmt.Sprintf("the collector rejected %d spans: %s", r.spans, r.message)
}

// UploadTraces implements otlptrace.Client. It repeats what may pass until ctx ends or the hub
// stops.
func (c *collector) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	// TracesData has the same encoding as ExportTraceServiceRequest, whose package needs gRPC.
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	if c.settings.gzip {
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		_, _ = w.Write(body) // a buffer takes everything
		_ = w.Close()
		body = packed.Bytes()
	}
	for wait := resendFirst; ; wait = min(2*wait, resendMax) {
		after, err := c.post(ctx, body)
		if err == nil || after < 0 || ctx.Err() != nil {
			return err
		}
		pause := max(after, wait/2+rand.N(wait/2)) //nolint:gosec // not security-relevant
		if end, ok := ctx.Deadline(); ok && time.Until(end) < pause {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-c.ending:
			return err
		case <-time.After(pause):
		}
	}
}

// post sends one request. If the request may be repeated, after is how long the collector wants to
// be left alone at least, otherwise it is negative.
func (c *collector) post(ctx context.Context, body []byte) (after time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.settings.timeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.settings.url, bytes.NewReader(body))
	if err != nil {
		return -1, err
	}
	r.Header = c.settings.headers.Clone()
	r.Header.Set("Content-Type", "application/x-protobuf")
	r.Header.Set("User-Agent", "eventhub")
	if c.settings.gzip {
		r.Header.Set("Content-Encoding", "gzip")
	}
	reply, err := c.client.Do(r)
	if err != nil {
		if web, ok := errors.AsType[*url.Error](err); ok {
			err = web.Err // the rest of it repeats the address, whose query may be a secret
		}
		return 0, err
	}
	defer func() { _ = reply.Body.Close() }() // read-only
	text, err := io.ReadAll(io.LimitReader(reply.Body, maxReply))
	switch {
	case reply.StatusCode == http.StatusTooManyRequests, reply.StatusCode == http.StatusBadGateway,
		reply.StatusCode == http.StatusServiceUnavailable, reply.StatusCode == http.StatusGatewayTimeout:
		seconds, _ := strconv.ParseUint(reply.Header.Get("Retry-After"), 10, 16)
		return time.Duration(seconds) * time.Second, errors.New("the collector answered " + reply.Status)
	case reply.StatusCode < 200 || reply.StatusCode > 299:
		return -1, errors.New("the collector answered " + reply.Status)
	case err != nil:
		return -1, nil // it has the spans
	}
	return -1, partial(text)
}

// partial returns a *rejectedError if the answer of a collector says that it did not take all
// spans. An answer that is no ExportTraceServiceResponse says nothing.
func partial(reply []byte) error {
	success, ok := field(reply, 1).([]byte)
	if !ok {
		return nil
	}
	spans, _ := field(success, 1).(uint64)
	message, _ := field(success, 2).([]byte)
	if int64(spans) <= 0 { //nolint:gosec // the field is an int64
		return nil
	}
	return &rejectedError{int64(spans), clip(string(message))} //nolint:gosec // as above
}

// clip makes a text of others fit for the log.
func clip(text string) string {
	runes := []rune(text)
	return string(runes[:min(len(runes), maxReplyText)])
}

// field returns the field of a protobuf message, as uint64 or []byte, or nil.
func field(message []byte, wanted protowire.Number) (value any) {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return nil
		}
		message = message[n:]
		size := protowire.ConsumeFieldValue(number, kind, message)
		if size < 0 {
			return nil
		}
		if number == wanted {
			switch kind {
			case protowire.VarintType:
				value, _ = protowire.ConsumeVarint(message)
			case protowire.BytesType:
				value, _ = protowire.ConsumeBytes(message)
			default: // no other kind is asked for
			}
		}
		message = message[size:]
	}
	return value
}

// spanExporter counts what an exporter does with spans, and ends its exports when the hub stops.
type spanExporter struct {
	sdktrace.SpanExporter

	metrics *ops.Metrics
	faults  *rareLog
	waiting atomic.Int64    // spans that have ended and were not exported
	ctx     context.Context // ends when no export may run any more
	giveUp  context.CancelFunc
}

func newSpanExporter(ctx context.Context, inner sdktrace.SpanExporter, metrics *ops.Metrics, faults *rareLog) *spanExporter {
	e := &spanExporter{SpanExporter: inner, metrics: metrics, faults: faults}
	e.ctx, e.giveUp = context.WithCancel(ctx)
	return e
}

// ExportSpans implements sdktrace.SpanExporter. It reports errors itself and returns none.
func (e *spanExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	defer e.waiting.Add(-int64(len(spans)))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)() //nolint:contextcheck // the end of the hub ends it, too
	err := e.SpanExporter.ExportSpans(ctx, spans)
	some, partly := errors.AsType[*rejectedError](err)
	switch {
	case err == nil:
		e.metrics.SpansExported(len(spans))
	case partly:
		lost := int(min(some.spans, int64(len(spans))))
		e.metrics.SpansExported(len(spans) - lost)
		e.metrics.SpansDropped("rejected", lost)
		e.faults.warn("the collector rejected spans", err, lost)
	default:
		e.metrics.SpansDropped("export", len(spans))
		e.faults.warn("failed to send spans to the collector", err, len(spans))
	}
	return nil
}

// boundedSpans drops and counts spans that end while limit spans wait. The queue behind it has room
// for all others, so it drops none by itself.
type boundedSpans struct {
	sdktrace.SpanProcessor

	exporter *spanExporter
	limit    int64
}

// OnEnd implements sdktrace.SpanProcessor.
func (b boundedSpans) OnEnd(s sdktrace.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	if b.exporter.waiting.Add(1) > b.limit {
		b.exporter.waiting.Add(-1)
		b.exporter.metrics.LimitReached("span_queue")
		b.exporter.metrics.SpansDropped("queue", 1)
		return
	}
	b.SpanProcessor.OnEnd(s)
}

// rareLog logs at most one warning in sayEvery.
type rareLog struct {
	ctx context.Context // of the log
	log *slog.Logger

	mu   sync.Mutex
	last time.Time
	lost int // spans since then
}

func (l *rareLog) warn(msg string, err error, lost int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost += lost
	if now := time.Now(); l.last.IsZero() || now.Sub(l.last) >= sayEvery {
		//nolint:sloglint // callers pass constants
		l.log.LogAttrs(l.ctx, slog.LevelWarn, msg, slog.Int("spans", l.lost), slog.Any("error", err))
		l.last, l.lost = now, 0
	}
}
