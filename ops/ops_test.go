package ops

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
)

// busState is a Bus in the given state.
type busState struct{ err error }

func (b busState) Ready(context.Context) error { return b.err }

func TestProbes(t *testing.T) {
	secret := errors.New("dial tcp 10.1.2.3:4222: refused")
	draining := errors.New("draining")
	tests := []struct {
		name   string
		bus    error
		hub    error
		status int
		body   string
	}{
		{"ready", nil, nil, http.StatusOK, `{"status":"ok","checks":{"bus":"ok","hub":"ok"}}`},
		{"draining", nil, draining, http.StatusServiceUnavailable, `{"status":"unavailable","checks":{"bus":"ok","hub":"draining"}}`},
		{"no bus", secret, nil, http.StatusServiceUnavailable, `{"status":"unavailable","checks":{"bus":"unavailable","hub":"ok"}}`},
		{"no disk", &jetstream.StorageError{Streams: 2, Cause: "no space left on device"}, nil, http.StatusServiceUnavailable, `{"status":"unavailable","checks":{"bus":"2 streams cannot be written: no space left on device","hub":"ok"}}`},
		{"neither", secret, draining, http.StatusServiceUnavailable, `{"status":"unavailable","checks":{"bus":"unavailable","hub":"draining"}}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var log bytes.Buffer
			server := described(t, Config{
				Bus:      busState{tt.bus},
				Registry: prometheus.NewRegistry(),
				Ready:    func() error { return tt.hub },
				Logger:   slog.New(slog.NewTextHandler(&log, nil)),
			})
			for _, path := range []string{"/readyz", "/healthz"} {
				rec := httptest.NewRecorder()
				server.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, path, nil))
				if rec.Code != tt.status || strings.TrimSpace(rec.Body.String()) != tt.body {
					t.Errorf("%s answered %d %s, want %d %s", path, rec.Code, rec.Body, tt.status, tt.body)
				}
			}
			rec := httptest.NewRecorder()
			server.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/livez", nil))
			if rec.Code != http.StatusOK || rec.Body.String() != "ok" {
				t.Errorf("/livez answered %d %s, want 200 ok", rec.Code, rec.Body)
			}
			// The change is logged once, with the cause that the answer does not show.
			want := 0
			if tt.status != http.StatusOK {
				want = 1
			}
			if got := strings.Count(log.String(), "not ready"); got != want {
				t.Errorf("the change was logged %d times, want %d:\n%s", got, want, log.String())
			}
			if tt.bus != nil && !strings.Contains(log.String(), tt.bus.Error()) {
				t.Errorf("the log does not name the cause:\n%s", log.String())
			}
		})
	}
}

// A client that leaves during a scrape is no reason to log something for each metric.
func TestScrapeThatIsBrokenOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		registry := prometheus.NewRegistry()
		gone, leave := context.WithCancel(t.Context())
		defer leave()
		answered := make(chan struct{})
		for i := range 3 {
			registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: fmt.Sprint("a", i)}, func() float64 {
				leave()
				<-answered
				return 1
			}))
		}
		handler := described(t, Config{Bus: busState{}, Registry: registry, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, httptest.NewRequestWithContext(gone, http.MethodGet, "/metrics", nil))
		close(answered)
		synctest.Wait()
		if rec.Code != http.StatusServiceUnavailable || log.Len() > 0 {
			t.Errorf("answered %d and logged %q, want 503 and nothing", rec.Code, &log)
		}
	})
}

// A part that waits is shown, and the hub is ready all the same.
func TestPartsThatWait(t *testing.T) {
	server := described(t, Config{
		Bus: busState{}, Registry: prometheus.NewRegistry(),
		Parts: func() map[string]string { return map[string]string{"outbox": "waiting for its database"} },
	})
	rec := httptest.NewRecorder()
	server.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	const want = `{"status":"ok","checks":{"bus":"ok","hub":"ok","outbox":"waiting for its database"}}`
	if got := strings.TrimSpace(rec.Body.String()); rec.Code != http.StatusOK || got != want {
		t.Errorf("/readyz answered %d %s, want 200 %s", rec.Code, got, want)
	}
}

func TestUnknownPathAndMethod(t *testing.T) {
	handler := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry()})
	for _, tt := range []struct {
		method, path string
		status       int
	}{
		{http.MethodGet, "/debug/pprof/", http.StatusNotFound},
		{http.MethodPost, "/metrics", http.StatusMethodNotAllowed},
		{http.MethodHead, "/readyz", http.StatusOK},
	} {
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, httptest.NewRequest(tt.method, tt.path, nil))
		if rec.Code != tt.status {
			t.Errorf("%s %s answered %d, want %d", tt.method, tt.path, rec.Code, tt.status)
		}
	}
}
