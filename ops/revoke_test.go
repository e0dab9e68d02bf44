package ops

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/jetstream"
)

// TestRevocationsEndpoint asks for revocations with tokens of several rights, and has some fail.
func TestRevocationsEndpoint(t *testing.T) {
	var stored []acl.Revocation
	var fails error
	handler := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Guard: Guard{Tokens: newVerifier(t)}, Revocations: &Revocations{
		Revoke: func(_ context.Context, r acl.Revocation) (acl.Revocation, error) {
			if err := r.Validate(); err != nil {
				return r, &RevocationError{Err: err}
			}
			if fails == nil {
				stored = append(stored, r)
			}
			return r, fails
		},
	}})
	const one = `{"jti":"1"}`
	for _, tt := range []struct {
		name, token, body string
		fails             error
		status            int
		want              string
	}{
		{"no token", "", one, nil, 401, `"code":"no_token"`},
		{"a subscriber", tokenFor(t, "subscribe:**"), one, nil, 403, `"code":"forbidden"`},
		{"an admin of topics", tokenFor(t, "admin:orders.**"), one, nil, 403, `"code":"forbidden"`},
		{"an admin of tokens", tokenFor(t, "admin:"+TokensTopic), one, nil, 200, one},
		{"the hub's own token", "own", `{"sub":"a","issued_before":1}`, nil, 200, `{"sub":"a","issued_before":1}`},
		{"neither jti nor sub", "own", `{}`, nil, 400, "either a jti or a sub"},
		{"an unknown field", "own", `{"jti":"1","subject":"a"}`, nil, 400, `"code":"bad_options"`},
		{"two objects", "own", one + one, nil, 400, `"code":"bad_options"`},
		{"too large", "own", `{"jti":"` + strings.Repeat("x", maxRevokeBytes) + `"}`, nil, 413, `"code":"bad_options"`},
		{"a full list", "own", one, jetstream.ErrRevocationsFull, 503, `"code":"overloaded"`},
		{"no NATS", "own", one, errors.New("secret"), 503, `"code":"internal"`},
	} {
		fails = tt.fails
		r := httptest.NewRequest(http.MethodPost, "/revocations", strings.NewReader(tt.body))
		if tt.token != "" {
			r.Header.Set("Authorization", "Bearer "+tt.token)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.want) || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("%s: %d %s, want %d %s", tt.name, w.Code, w.Body, tt.status, tt.want)
		}
	}
	if len(stored) != 2 {
		t.Errorf("%d revocations were stored, want 2", len(stored))
	}
	w := httptest.NewRecorder()
	described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry()}).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/revocations", strings.NewReader(one)))
	if w.Code != http.StatusNotFound {
		t.Errorf("a hub without JWTs answers with %d", w.Code)
	}
}
