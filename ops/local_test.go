package ops

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestLocalMetricsAnswerNoOtherName(t *testing.T) {
	h := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Local: true})
	for host, want := range map[string]int{
		"127.0.0.1:8082":     http.StatusOK,
		"127.0.0.1":          http.StatusOK,
		"[::1]:8082":         http.StatusOK,
		"[::1]":              http.StatusOK,
		"localhost:8082":     http.StatusOK,
		"hub.localhost":      http.StatusOK,
		"evil.example:8082":  http.StatusForbidden,
		"127.0.0.1.evil.com": http.StatusForbidden,
		"localhost.evil.com": http.StatusForbidden,
		"":                   http.StatusForbidden,
	} {
		for path, want := range map[string]int{"/metrics": want, "/livez": http.StatusOK} {
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.Host = host
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, r)
			if rec.Code != want {
				t.Errorf("%s of host %q answered %d, want %d", path, host, rec.Code, want)
			}
		}
	}
}
