//go:build unix

package main

import (
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"eventhub/sdk/go/wire"
)

// TestTokenKinds gives a hub tokens of all kinds, over WebSocket, HTTP and the operations port.
func TestTokenKinds(t *testing.T) {
	t.Parallel()
	secret := []byte("0123456789abcdef0123456789abcdef")
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, append(secret, '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--jwt-secret-file="+file, "--jwt-aud=hub", "--jwt-iss=me", "--metrics-access=token")

	sign := func(method jwt.SigningMethod, key any, change func(jwt.MapClaims)) string {
		c := jwt.MapClaims{
			"sub": "s", "aud": "hub", "iss": "me", "exp": time.Now().Add(time.Hour).Unix(),
			"scopes": []string{"publish:a.*", "subscribe:eventhub.metrics"},
		}
		if change != nil {
			change(c)
		}
		token, err := jwt.NewWithClaims(method, c).SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	with := func(name string, value any) string {
		return sign(jwt.SigningMethodHS256, secret, func(c jwt.MapClaims) { c[name] = value })
	}
	for _, tt := range []struct {
		name, token string
		code        string // of AUTH and of HTTP; "" is taken
	}{
		{"the hub's own", nodeToken, ""},
		{"valid", with("sub", "s"), ""},
		{"expired within the tolerance", with("exp", time.Now().Add(-time.Second).Unix()), ""},
		{"none", "", "no_token"},
		{"wrong", "wrong", "bad_token"},
		{"expired", with("exp", time.Now().Add(-time.Minute).Unix()), "jwt_invalid"},
		{"without an end", with("exp", nil), "jwt_invalid"},
		{"not valid yet", with("nbf", time.Now().Add(time.Minute).Unix()), "jwt_invalid"},
		{"for another", with("aud", "other"), "jwt_invalid"},
		{"from another", with("iss", "other"), "jwt_invalid"},
		{"a scope without a colon", with("scopes", []string{"publish"}), "jwt_invalid"},
		{"not signed", sign(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, nil), "jwt_invalid"},
		{"signed by another", sign(jwt.SigningMethodHS256, []byte("another-secret-of-at-least-32-bytes"), nil), "jwt_invalid"},
		{"signed otherwise", sign(jwt.SigningMethodHS512, secret, nil), "jwt_invalid"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code := ""
			c, err := wire.Dial(t.Context(), hub.url, wire.Options{Token: tt.token})
			if err == nil {
				publishTo(t, c, "a.b", "1")
				_ = c.Close()
			} else if refused, ok := errors.AsType[*wire.Error](err); ok {
				code = refused.Code
			} else {
				t.Fatal(err)
			}
			if code != tt.code {
				t.Errorf("AUTH was answered with %q, want %q", code, tt.code)
			}
			status := http.StatusOK
			if tt.code != "" {
				status = http.StatusUnauthorized
			}
			for _, r := range [][2]string{{http.MethodPost, hub.http + "/publish/a.b"}, {http.MethodGet, hub.ops + "/metrics"}} {
				got, body := request(t, r[0], r[1], tt.token)
				if got != status || tt.code != "" && !strings.Contains(body, `"code":"`+tt.code+`"`) {
					t.Errorf("%s was answered with %d %.200s, want %d %s", r[1], got, body, status, tt.code)
				}
			}
		})
	}
	if log := hub.log.String(); strings.Contains(log, "eyJ") || strings.Contains(log, nodeToken) {
		t.Errorf("the log holds a token:\n%s", log)
	}
	hub.terminate()
}

func request(t *testing.T, method, url, token string) (status int, body string) {
	t.Helper()
	var payload io.Reader
	if method == http.MethodPost {
		payload = strings.NewReader("{}")
	}
	r, err := http.NewRequestWithContext(t.Context(), method, url, payload)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}
