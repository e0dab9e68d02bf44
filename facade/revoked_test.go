package facade_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
	"eventhub/facade"
)

// revokingRig is a rig that observes revocations. The functions sign a token with an id, and revoke
// an id.
func revokingRig(t *testing.T) (r *rig, token func(id string) string, revoke func(id string)) {
	t.Helper()
	list := acl.NewRevocations(100)
	v, err := acl.NewVerifier(t.Context(), acl.Config{Secret: jwtSecret, Audience: "hub", Revocations: list})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	r = newRig(t, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	token = func(id string) string {
		return sign(t, acl.Grant{Subject: "s", ID: id, Scopes: []string{"publish:**", "subscribe:**"}})
	}
	revoke = func(id string) {
		t.Helper()
		entry := acl.Revocation{ID: id}
		if err := list.Set(entry.Key(), fmt.Appendf(nil, `{"jti":%q}`, id)); err != nil {
			t.Fatal(err)
		}
	}
	return r, token, revoke
}

// TestRevokedConnectionsEnd revokes a token that a connection and HTTP requests use.
func TestRevokedConnectionsEnd(t *testing.T) {
	t.Parallel()
	r, token, revoke := revokingRig(t)
	other, changed, last := r.as(t, token("other")), r.as(t, token("old")), r.as(t, token("last"))
	p := r.as(t, token("one"))
	p.send(`{"op":"SUBSCRIBE","topic":"a","group":"g"}`)
	p.want(`{"op":"OK"}`)
	post := func(id string) (status int, body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+"/publish/b", strings.NewReader("1"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token(id))
		resp, err := r.http.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		text, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(text)
	}
	if status, body := post("one"); status != http.StatusOK {
		t.Fatal(status, body)
	}

	// A busy machine may be late, but not each time.
	best := time.Hour
	for try := 0; try < 5 && best > time.Second; try++ {
		id := "one"
		if try > 0 {
			id += strconv.Itoa(try)
			p = r.as(t, token(id))
		}
		begun := time.Now()
		revoke(id)
		p.want(`{"op":"ERR","code":"token_expired","msg":"The token has been revoked."}`)
		p.wantClose(4003)
		best = min(best, time.Since(begun))
	}
	if best > time.Second {
		t.Errorf("the connection ended after %v, at best", best)
	}
	if status, body := post("one"); status != http.StatusUnauthorized || strings.TrimSpace(body) != `{"error":"The token has been revoked.","code":"jwt_invalid"}` {
		t.Errorf("HTTP: %d %s", status, body)
	}
	late := r.dial(t)
	late.send(`{"op":"AUTH","token":"` + token("one") + `","corr":1}`)
	late.want(`{"op":"ERR","code":"jwt_invalid","msg":"The token has been revoked.","corr":1}`)

	// A connection that has changed its token does not end with the old one.
	changed.auth(token("new"))
	revoke("old")
	revoke("last")
	last.want(`{"op":"ERR","code":"token_expired","msg":"The token has been revoked."}`)
	last.wantClose(4003) // so the hub has looked at all connections since
	for _, alive := range []*peer{other, changed} {
		if got := alive.outcome(`{"op":"PUBLISH","topic":"c"}`); got != "OK" {
			t.Errorf("a connection with another token: %s", got)
		}
	}
}

// TestNDJSONEndsWithARevocation revokes the token of a request that goes on.
func TestNDJSONEndsWithARevocation(t *testing.T) {
	t.Parallel()
	r, token, revoke := revokingRig(t)
	body, lines := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+"/publish/a", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token("one"))
	req.Header.Set("Content-Type", "application/x-ndjson")
	resp, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answers := bufio.NewReader(resp.Body)
	ask := func() string {
		t.Helper()
		if _, err := io.WriteString(lines, `{"payload":1}`+"\n"); err != nil {
			t.Fatal(err)
		}
		answer, err := answers.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	if got := ask(); !strings.HasPrefix(got, `{"id":`) {
		t.Error(got)
	}
	revoke("one")
	if got := ask(); got != `{"error":"The token has been revoked.","code":"token_expired"}`+"\n" {
		t.Error(got)
	}
	_ = lines.Close()
}
