package ops

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
)

var signingKey = []byte("0123456789abcdef0123456789abcdef")

func newVerifier(t *testing.T) *acl.Verifier {
	t.Helper()
	v, err := acl.NewVerifier(t.Context(), acl.Config{Static: []acl.StaticToken{{Token: "own"}}, Secret: signingKey})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	return v
}

func tokenFor(t *testing.T, scopes ...string) string {
	t.Helper()
	token, err := acl.Sign(signingKey, acl.Grant{Subject: "s", Scopes: scopes, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func ask(h http.Handler, method, target, authorization string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, nil)
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestGuard(t *testing.T) {
	served := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	g := Guard{Tokens: newVerifier(t)}
	shows, changes := g.Shows(QueryTarget, served), g.Changes(QueryTarget, served)
	policy, err := acl.Sign(signingKey, acl.Grant{TTL: time.Hour, Policy: []byte(
		`{"rules":[{"effect":"allow","action":"subscribe","topics":["a.*"],"groups":["g"]}]}`,
	)})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, authorization, query string
		show, change               int
		code                       string
	}{
		{"no token", "", "topic=a.b", 401, 401, "no_token"},
		{"another scheme", "Basic own", "topic=a.b", 401, 401, "no_token"},
		{"wrong token", "Bearer wrong", "topic=a.b", 401, 401, "bad_token"},
		{"no signature", "Bearer a.b.c", "topic=a.b", 401, 401, "jwt_invalid"},
		{"own token", "bearer own", "topic=a.b", 204, 204, ""},
		{"no topic", "Bearer own", "", 400, 400, "bad_topic"},
		{"wildcard", "Bearer own", "topic=a.**", 400, 400, "bad_topic"},
		{"publisher", "Bearer " + tokenFor(t, "publish:**"), "topic=a.b", 403, 403, "forbidden"},
		{"subscriber", "Bearer " + tokenFor(t, "subscribe:a.*"), "topic=a.b", 204, 403, "forbidden"},
		{"subscriber of another", "Bearer " + tokenFor(t, "subscribe:a.*"), "topic=b", 403, 403, "forbidden"},
		{"admin", "Bearer " + tokenFor(t, "admin:a.*"), "topic=a.b&group=g", 204, 204, ""},
		{"its group", "Bearer " + policy, "topic=a.b&group=g", 204, 403, "forbidden"},
		{"another group", "Bearer " + policy, "topic=a.b&group=h", 403, 403, "forbidden"},
		{"all groups", "Bearer " + policy, "topic=a.b", 403, 403, "forbidden"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			shown := ask(shows, http.MethodGet, "/x?"+tt.query, tt.authorization)
			if shown.Code != tt.show {
				t.Errorf("showing was answered with %d, want %d", shown.Code, tt.show)
			}
			changed := ask(changes, http.MethodPost, "/x?"+tt.query, tt.authorization)
			if changed.Code != tt.change || tt.code != "" && !strings.Contains(changed.Body.String(), `"code":"`+tt.code+`"`) {
				t.Errorf("changing was answered with %d %s, want %d %s", changed.Code, changed.Body, tt.change, tt.code)
			}
		})
	}
}

// down is a Verifier that cannot tell.
type down struct{ err error }

func (d down) Verify(context.Context, string) (*acl.Identity, error) { return nil, d.err }

func TestGuardWithoutKeys(t *testing.T) {
	for _, err := range []error{&acl.Error{Reason: acl.Unavailable, Msg: "later"}, errors.New("secret")} {
		w := ask(Guard{Tokens: down{err}}.Shows(QueryTarget, http.NotFoundHandler()), http.MethodGet, "/?topic=a", "Bearer x")
		if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("%v was answered with %d %s", err, w.Code, w.Body)
		}
	}
}

func TestMetricsBehindToken(t *testing.T) {
	guarded := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Metrics: &Guard{Tokens: newVerifier(t)}})
	for _, tt := range []struct {
		path, authorization string
		status              int
	}{
		{"/metrics", "", 401},
		{"/metrics", "Bearer own", 200},
		{"/metrics", "Bearer " + tokenFor(t, "subscribe:"+MetricsTopic), 200},
		{"/metrics", "Bearer " + tokenFor(t, "subscribe:a"), 403},
		{"/livez", "", 200},
		{"/readyz", "", 200},
		{"/healthz", "", 200},
	} {
		if w := ask(guarded, http.MethodGet, tt.path, tt.authorization); w.Code != tt.status {
			t.Errorf("%s with %q was answered with %d, want %d", tt.path, tt.authorization, w.Code, tt.status)
		}
	}
}

// TestGuardRefusesTwoTokens has a request say twice who sends it.
func TestGuardRefusesTwoTokens(t *testing.T) {
	g := Guard{Tokens: newVerifier(t)}.Shows(QueryTarget, http.NotFoundHandler())
	r := httptest.NewRequest(http.MethodGet, "/?topic=a", nil)
	r.Header["Authorization"] = []string{"Bearer own", "Bearer other"}
	w := httptest.NewRecorder()
	g.ServeHTTP(w, r)
	if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), `"code":"bad_options"`) {
		t.Errorf("two tokens were answered with %d %s", w.Code, w.Body)
	}
}
