//go:build unix

package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
	"eventhub/ops"
)

// traceSettingsOf returns the settings that serve reads of its flags, and what is wrong with them.
func traceSettingsOf(t *testing.T, flags ...string) (*traceSettings, error) {
	t.Helper()
	var all commands
	parser, err := kong.New(&all)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(append([]string{"serve"}, flags...)); err != nil {
		t.Fatal(err)
	}
	s, faults := all.Serve.traceFlags.settings()
	return s, errors.Join(faults...)
}

func TestTraceSettings(t *testing.T) {
	t.Parallel()
	const at = "--otlp-endpoint=http://127.0.0.1:4318"
	for name, c := range map[string]struct {
		flags string
		url   string // "": no tracing
		fault string
	}{
		"off":                   {"", "", ""},
		"off, whatever else":    {"--otlp-protocol=grpc --otel-traces-sampler=x --otlp-headers=x", "", ""},
		"disabled":              {at + " --otel-sdk-disabled=TRUE", "", ""},
		"no exporter":           {at + " --otel-traces-exporter=none", "", ""},
		"endpoint":              {at, "http://127.0.0.1:4318/v1/traces", ""},
		"endpoint with a path":  {"--otlp-endpoint=https://collector/otlp/", "https://collector/otlp/v1/traces", ""},
		"endpoint of traces":    {at + " --otlp-traces-endpoint=http://other/in", "http://other/in", ""},
		"ratio":                 {at + " --otel-traces-sampler=parentbased_traceidratio --otel-traces-sampler-arg=0.25", "http://127.0.0.1:4318/v1/traces", ""},
		"no url":                {"--otlp-endpoint=127.0.0.1:4318", "", "OTEL_EXPORTER_OTLP_ENDPOINT"},
		"a password in the url": {"--otlp-endpoint=http://user:hidden@collector", "", "belong into the headers"},
		"grpc":                  {at + " --otlp-protocol=grpc", "", "port 4318"},
		"exporter":              {at + " --otel-traces-exporter=zipkin", "", "OTEL_TRACES_EXPORTER"},
		"compression":           {at + " --otlp-compression=zstd", "", "OTEL_EXPORTER_OTLP_COMPRESSION"},
		"headers":               {at + " --otlp-headers=a=1,hidden", "", "entry 2 is not of the form NAME=VALUE"},
		"header encoding":       {at + " --otlp-headers=a=hidden%zz", "", "the value of a is not URL-encoded"},
		"header injection":      {at + " --otlp-headers=a=hidden%0d%0ab:1", "", "control characters"},
		"attributes":            {at + " --otel-resource-attributes=x", "", "OTEL_RESOURCE_ATTRIBUTES"},
		"sampler":               {at + " --otel-traces-sampler=jaeger_remote", "", "OTEL_TRACES_SAMPLER"},
		"sampler argument":      {at + " --otel-traces-sampler=traceidratio --otel-traces-sampler-arg=NaN", "", "OTEL_TRACES_SAMPLER_ARG"},
		"queue":                 {at + " --otel-bsp-max-queue-size=0", "", "OTEL_BSP_MAX_QUEUE_SIZE"},
		"certificate":           {at + " --otlp-certificate=/no/such/file", "", "OTEL_EXPORTER_OTLP_CERTIFICATE"},
		"half a certificate":    {at + " --otlp-client-certificate=/no/such/file", "", "requires its key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := traceSettingsOf(t, strings.Fields(c.flags)...)
			if c.fault == "" && err != nil || c.fault != "" && (err == nil || !strings.Contains(err.Error(), c.fault)) {
				t.Errorf("the fault is %v", err)
			}
			if err != nil {
				if strings.Contains(err.Error(), "hidden") {
					t.Errorf("the fault shows a secret: %v", err)
				}
				return
			}
			url := ""
			if s != nil {
				url = s.url
			}
			if url != c.url {
				t.Errorf("spans go to %q", url)
			}
		})
	}
}

// What waits for a batch is sent when the hub stops; what cannot be sent is given up, and a batch
// that waits for its next try holds nothing up.
func TestTracerAtTheEnd(t *testing.T) {
	t.Parallel()
	start := func(url string) *tracer {
		t.Helper()
		s, err := traceSettingsOf(t, "--otlp-endpoint="+url, "--otel-bsp-schedule-delay=3600000")
		if err != nil {
			t.Fatal(err)
		}
		made, err := newTracer(t.Context(), s, 10, ops.NewMetrics(prometheus.NewRegistry()), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			made.Publish(t.Context(), "t", nil).End(jetstream.Receipt{}, nil)
		}
		return made
	}
	r := startReceiver(t)
	for try := 1; ; try++ { // a machine that stands still for flushTimeout may lose one
		start(r.url).close(t.Context())
		r.mu.Lock()
		n := len(r.spans)
		r.mu.Unlock()
		if n > 0 {
			break
		}
		if try == 5 {
			t.Fatal("no span came")
		}
	}
	// The collector answers nothing before the test ends.
	ended := make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-ended }))
	t.Cleanup(func() { close(ended); silent.Close() })
	soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	start(silent.URL).close(soon)
	// It wants to be asked again in an hour.
	var asked atomic.Int64
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Header().Set("Retry-After", "3600")
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	t.Cleanup(busy.Close)
	start(busy.URL).close(t.Context())
	if n := asked.Load(); n > 1 {
		t.Errorf("a hub that stops has asked a busy collector %d times", n)
	}
}

// A batch is tried again while the collector is busy.
func TestSpansAreSentAgain(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(busy.Close)
	s, err := traceSettingsOf(t, "--otlp-endpoint="+busy.URL, "--otel-bsp-schedule-delay=1")
	if err != nil {
		t.Fatal(err)
	}
	made, err := newTracer(t.Context(), s, 10, ops.NewMetrics(prometheus.NewRegistry()), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer made.close(t.Context())
	made.Publish(t.Context(), "t", nil).End(jetstream.Receipt{}, nil)
	eventually(t, "the second try", func() bool { return asked.Load() > 1 })
}
