package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"eventhub/ops"
	"eventhub/ops/tracing"
)

const (
	// flushTimeout limits how long a hub that stops waits for the collector, and flushLeast is the
	// part of it that is left after a slow shutdown.
	flushTimeout = 3 * time.Second
	flushLeast   = 500 * time.Millisecond
	// maxQueue is the largest allowed OTEL_BSP_MAX_QUEUE_SIZE. The queue of the SDK is allocated at
	// the start.
	maxQueue = 1 << 20
	// maxAttribute is how many characters an attribute of a span has at most.
	maxAttribute = 512
)

// traceFlags configure where spans go. The variables are those of OpenTelemetry; where a variable
// exists for traces alone, it wins.
type traceFlags struct {
	Endpoint       string `name:"otlp-endpoint" env:"OTEL_EXPORTER_OTLP_ENDPOINT" placeholder:"URL" help:"OpenTelemetry collector that receives spans over HTTP, such as http://127.0.0.1:4318. Default: no tracing."`
	TracesEndpoint string `name:"otlp-traces-endpoint" env:"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" placeholder:"URL" help:"The same with its whole path, such as http://127.0.0.1:4318/v1/traces."`
	Protocol       string `name:"otlp-protocol" env:"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,OTEL_EXPORTER_OTLP_PROTOCOL" default:"http/protobuf" help:"Protocol of the collector; only http/protobuf is supported."`
	OTLPHeaders    string `name:"otlp-headers" env:"OTEL_EXPORTER_OTLP_TRACES_HEADERS,OTEL_EXPORTER_OTLP_HEADERS" placeholder:"NAME=VALUE,..." help:"Headers of requests to the collector, with URL-encoded values."`
	Timeout        int    `name:"otlp-timeout" env:"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT,OTEL_EXPORTER_OTLP_TIMEOUT" default:"10000" placeholder:"MS" help:"How long one request to the collector may take, in milliseconds."`
	Compression    string `name:"otlp-compression" env:"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION,OTEL_EXPORTER_OTLP_COMPRESSION" default:"none" help:"Compression of these requests: none or gzip."`
	CA             string `name:"otlp-certificate" env:"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE,OTEL_EXPORTER_OTLP_CERTIFICATE" placeholder:"FILE" help:"CA certificates for the collector."`
	ClientCert     string `name:"otlp-client-certificate" env:"OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE,OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" placeholder:"FILE" help:"Client certificate for the collector."`
	ClientKey      string `name:"otlp-client-key" env:"OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY,OTEL_EXPORTER_OTLP_CLIENT_KEY" placeholder:"FILE" help:"Private key of the client certificate."`
	Exporter       string `name:"otel-traces-exporter" env:"OTEL_TRACES_EXPORTER" default:"otlp" help:"otlp, or none for no tracing."`
	Disabled       string `name:"otel-sdk-disabled" env:"OTEL_SDK_DISABLED" default:"false" help:"true for no tracing."`
	Service        string `name:"otel-service-name" env:"OTEL_SERVICE_NAME" placeholder:"NAME" help:"service.name of the spans. Default: that of the resource attributes, or eventhub."`
	Attributes     string `name:"otel-resource-attributes" env:"OTEL_RESOURCE_ATTRIBUTES" placeholder:"NAME=VALUE,..." help:"Further attributes of the hub in all spans, with URL-encoded values."`
	Sampler        string `name:"otel-traces-sampler" env:"OTEL_TRACES_SAMPLER" default:"parentbased_always_on" help:"Which spans are made: always_on, always_off, traceidratio, or one of these after parentbased_, which follows the publisher's decision."`
	SamplerArg     string `name:"otel-traces-sampler-arg" env:"OTEL_TRACES_SAMPLER_ARG" placeholder:"RATIO" help:"Ratio of the traces for traceidratio, 0 to 1. Default: 1."`
	Queue          int    `name:"otel-bsp-max-queue-size" env:"OTEL_BSP_MAX_QUEUE_SIZE" default:"2048" help:"Ended spans that wait for the collector. Further ones are dropped."`
	Batch          int    `name:"otel-bsp-max-export-batch-size" env:"OTEL_BSP_MAX_EXPORT_BATCH_SIZE" default:"512" help:"Spans in one request to the collector."`
	Delay          int    `name:"otel-bsp-schedule-delay" env:"OTEL_BSP_SCHEDULE_DELAY" default:"5000" placeholder:"MS" help:"How long spans wait for a batch to become full, in milliseconds."`
	ExportTimeout  int    `name:"otel-bsp-export-timeout" env:"OTEL_BSP_EXPORT_TIMEOUT" default:"30000" placeholder:"MS" help:"How long a batch is tried, in milliseconds."`
}

// traceSettings are checked traceFlags.
type traceSettings struct {
	url      string
	headers  http.Header
	tls      *tls.Config // nil: the default
	gzip     bool
	timeout  time.Duration
	resource []attribute.KeyValue
	sampler  sdktrace.Sampler
	queue    int
	batch    int
	delay    time.Duration
	export   time.Duration
}

// settings returns the checked flags, or nil if spans go nowhere, and then the other flags are not
// looked at: platforms set them for all programs.
func (f traceFlags) settings() (*traceSettings, []error) {
	if strings.EqualFold(f.Disabled, "true") || f.Exporter == "none" || f.Endpoint == "" && f.TracesEndpoint == "" {
		return nil, nil
	}
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	s := &traceSettings{
		gzip: f.Compression == "gzip", timeout: time.Duration(f.Timeout) * time.Millisecond,
		queue: f.Queue, batch: f.Batch, delay: time.Duration(f.Delay) * time.Millisecond, export: time.Duration(f.ExportTimeout) * time.Millisecond,
	}
	var err error
	if s.url, err = f.address(); err != nil {
		faults = append(faults, err)
	}
	if f.Exporter != "otlp" {
		fault("traces exporter %q is not supported; use otlp or none (--otel-traces-exporter, OTEL_TRACES_EXPORTER)", f.Exporter)
	}
	if f.Protocol != "http/protobuf" {
		fault("protocol %q of the collector is not supported; use http/protobuf, which collectors offer on port 4318 (--otlp-protocol, OTEL_EXPORTER_OTLP_PROTOCOL)", f.Protocol)
	}
	if f.Compression != "gzip" && f.Compression != "none" {
		fault("compression %q is not supported; use none or gzip (--otlp-compression, OTEL_EXPORTER_OTLP_COMPRESSION)", f.Compression)
	}
	if s.headers, err = f.headers(); err != nil {
		fault("headers for the collector: %w (--otlp-headers, OTEL_EXPORTER_OTLP_HEADERS)", err)
	}
	if s.tls, err = f.tls(); err != nil {
		faults = append(faults, err)
	}
	if s.resource, err = f.resource(); err != nil {
		fault("resource attributes: %w (--otel-resource-attributes, OTEL_RESOURCE_ATTRIBUTES)", err)
	}
	if s.sampler, err = f.sampler(); err != nil {
		faults = append(faults, err)
	}
	for _, n := range []struct {
		value, most int
		flag        string
	}{
		{f.Timeout, int(time.Hour / time.Millisecond), "--otlp-timeout, OTEL_EXPORTER_OTLP_TIMEOUT"},
		{f.Queue, maxQueue, "--otel-bsp-max-queue-size, OTEL_BSP_MAX_QUEUE_SIZE"},
		{f.Batch, maxQueue, "--otel-bsp-max-export-batch-size, OTEL_BSP_MAX_EXPORT_BATCH_SIZE"},
		{f.Delay, int(time.Hour / time.Millisecond), "--otel-bsp-schedule-delay, OTEL_BSP_SCHEDULE_DELAY"},
		{f.ExportTimeout, int(time.Hour / time.Millisecond), "--otel-bsp-export-timeout, OTEL_BSP_EXPORT_TIMEOUT"},
	} {
		if n.value < 1 || n.value > n.most {
			fault("%d: must be 1 to %d (%s)", n.value, n.most, n.flag)
		}
	}
	s.batch = min(s.batch, s.queue)
	return s, faults
}

// address returns the URL for spans.
func (f traceFlags) address() (string, error) {
	text, flag := f.TracesEndpoint, "--otlp-traces-endpoint, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	if text == "" {
		text, flag = f.Endpoint, "--otlp-endpoint, OTEL_EXPORTER_OTLP_ENDPOINT"
	}
	u, err := checkURL(text, "http", "https")
	if err == nil && u.User != nil {
		err = errors.New("it has a user name or a password, which belong into the headers")
	}
	if err != nil {
		return "", fmt.Errorf("address of the collector: %w; use http://HOST:PORT or https://HOST:PORT (%s)", err, flag)
	}
	if f.TracesEndpoint == "" {
		u = u.JoinPath("v1/traces")
	}
	u.Fragment = ""
	return u.String(), nil
}

// pairs splits NAME=VALUE,... with URL-encoded values. Its errors quote no value, which may be a
// secret.
func pairs(text string) (list [][2]string, err error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	for i, pair := range strings.Split(text, ",") {
		name, value, ok := strings.Cut(pair, "=")
		name = strings.TrimSpace(name)
		if !ok || name == "" {
			return nil, fmt.Errorf("entry %d is not of the form NAME=VALUE", i+1)
		}
		if value, err = url.PathUnescape(strings.TrimSpace(value)); err != nil {
			return nil, fmt.Errorf("the value of %s is not URL-encoded correctly", name)
		}
		list = append(list, [2]string{name, value})
	}
	return list, nil
}

func (f traceFlags) headers() (http.Header, error) {
	list, err := pairs(f.OTLPHeaders)
	if err != nil {
		return nil, err
	}
	headers := make(http.Header)
	for _, h := range list {
		if !validHeader(h[0], h[1]) {
			return nil, fmt.Errorf("%q is not a header name, or its value has control characters", h[0])
		}
		headers.Set(h[0], h[1])
	}
	return headers, nil
}

// validHeader reports whether net/http sends this header.
func validHeader(name, value string) bool {
	for _, c := range []byte(name) {
		letter, digit := 'a' <= c|0x20 && c|0x20 <= 'z', '0' <= c && c <= '9'
		if !letter && !digit && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return !strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f })
}

// tls returns the TLS configuration for the collector, or nil for the default.
func (f traceFlags) tls() (*tls.Config, error) {
	if f.CA == "" && f.ClientCert == "" && f.ClientKey == "" {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CA != "" {
		pem, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("file %s: %w (--otlp-certificate, OTEL_EXPORTER_OTLP_CERTIFICATE)", f.CA, cause(err))
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("file %s has no certificate in PEM (--otlp-certificate, OTEL_EXPORTER_OTLP_CERTIFICATE)", f.CA)
		}
	}
	const flags = "(--otlp-client-certificate, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE; --otlp-client-key, OTEL_EXPORTER_OTLP_CLIENT_KEY)"
	if (f.ClientCert == "") != (f.ClientKey == "") {
		return nil, errors.New("a client certificate for the collector requires its key; set both " + flags)
	}
	if f.ClientCert != "" {
		if err := readable(f.ClientKey, true); err != nil {
			return nil, fmt.Errorf("%w %s", err, flags)
		}
		pair, err := tls.LoadX509KeyPair(f.ClientCert, f.ClientKey)
		if err != nil {
			return nil, fmt.Errorf("client certificate %s for the collector: %w %s", f.ClientCert, err, flags)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

// resource returns what the spans tell of the hub.
func (f traceFlags) resource() ([]attribute.KeyValue, error) {
	list, err := pairs(f.Attributes)
	if err != nil {
		return nil, err
	}
	attrs := []attribute.KeyValue{
		semconv.ServiceName("eventhub"),
		semconv.ServiceVersion(cmp.Or(release, "unknown")),
		semconv.ServiceInstanceID(uuid.NewString()),
	}
	for _, a := range list { // the last one of a name counts
		attrs = append(attrs, attribute.String(strings.ToValidUTF8(a[0], "\uFFFD"), strings.ToValidUTF8(a[1], "\uFFFD")))
	}
	if f.Service != "" {
		attrs = append(attrs, semconv.ServiceName(strings.ToValidUTF8(f.Service, "\uFFFD")))
	}
	return attrs, nil
}

func (f traceFlags) sampler() (sdktrace.Sampler, error) {
	ratio := 1.0
	name, followsParent := strings.CutPrefix(strings.ToLower(f.Sampler), "parentbased_")
	var root sdktrace.Sampler
	switch name {
	case "always_on":
		root = sdktrace.AlwaysSample()
	case "always_off":
		root = sdktrace.NeverSample()
	case "traceidratio":
		if f.SamplerArg != "" {
			var err error
			if ratio, err = strconv.ParseFloat(f.SamplerArg, 64); err != nil || !(ratio >= 0 && ratio <= 1) {
				return nil, fmt.Errorf("sampler argument %q: must be a number from 0 to 1 (--otel-traces-sampler-arg, OTEL_TRACES_SAMPLER_ARG)", f.SamplerArg)
			}
		}
		root = sdktrace.TraceIDRatioBased(ratio)
	default:
		return nil, fmt.Errorf("sampler %q is not supported; use always_on, always_off or traceidratio, or one of these after parentbased_ (--otel-traces-sampler, OTEL_TRACES_SAMPLER)", f.Sampler)
	}
	if followsParent {
		root = sdktrace.ParentBased(root)
	}
	return root, nil
}

// tracer makes spans and sends them to the collector. Its parts are those of the SDK, with a count
// of what is dropped.
type tracer struct {
	*tracing.Tracer

	provider  *sdktrace.TracerProvider
	exporter  *spanExporter
	collector *collector
}

// newTracer starts to send spans. The end of ctx does not end the tracer: the caller must close the
// tracer after all users of it.
func newTracer(ctx context.Context, s *traceSettings, openSpans int, metrics *ops.Metrics, log *slog.Logger) (*tracer, error) {
	ctx = context.WithoutCancel(ctx)
	// The SDK would write to standard error, among other things headers that it cannot read.
	otel.SetLogger(logr.Discard())
	faults := &rareLog{ctx: ctx, log: log}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { faults.warn("tracing failed", err, 0) }))
	collector := newCollector(s)
	// Started here, because Shutdown does nothing for an exporter that was not started.
	inner, err := otlptrace.New(ctx, collector)
	if err != nil {
		return nil, err
	}
	e := newSpanExporter(ctx, inner, metrics, faults)
	batches := sdktrace.NewBatchSpanProcessor(e, sdktrace.WithMaxQueueSize(s.queue), sdktrace.WithMaxExportBatchSize(s.batch),
		sdktrace.WithBatchTimeout(s.delay), sdktrace.WithExportTimeout(s.export))
	known, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(s.resource...))
	if err != nil {
		return nil, errors.Join(err, batches.Shutdown(ctx))
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(known), sdktrace.WithSampler(s.sampler),
		sdktrace.WithRawSpanLimits(sdktrace.SpanLimits{
			AttributeValueLengthLimit: maxAttribute, AttributeCountLimit: 32, EventCountLimit: 8, LinkCountLimit: 8,
			AttributePerEventCountLimit: 8, AttributePerLinkCountLimit: 8,
		}),
		sdktrace.WithSpanProcessor(boundedSpans{batches, e, int64(s.queue)}))
	made, err := tracing.New(tracing.Config{Provider: provider, OpenSpans: openSpans, Dropped: func() {
		metrics.LimitReached("open_spans")
		metrics.SpansDropped("open_spans", 1)
	}})
	if err != nil {
		return nil, errors.Join(err, provider.Shutdown(ctx))
	}
	return &tracer{Tracer: made, provider: provider, exporter: e, collector: collector}, nil
}

// close sends what waits, and gives up after flushTimeout, or earlier if the end of ctx is nearer.
// It returns when no goroutine of the tracer runs.
func (t *tracer) close(ctx context.Context) {
	end := time.Now().Add(flushTimeout)
	if given, ok := ctx.Deadline(); ok && given.Before(end) {
		end = given
		if least := time.Now().Add(flushLeast); end.Before(least) {
			end = least
		}
	}
	t.collector.lastTries()
	limit := time.AfterFunc(time.Until(end), t.exporter.giveUp)
	defer limit.Stop()
	defer t.exporter.giveUp()
	// It waits for the exports, which giveUp ends.
	_ = t.provider.Shutdown(context.WithoutCancel(ctx)) // the exporter reports its errors itself
}
