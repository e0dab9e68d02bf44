//go:build unix

package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/acl"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

const revokeSecret = "0123456789abcdef0123456789abcdef"

// secretFile holds revokeSecret.
func secretFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(revokeSecret), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// signed is a token that may do everything.
func signed(t *testing.T, subject, id string) string {
	t.Helper()
	token, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: subject, ID: id, Scopes: []string{"*:**"}, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// connect authenticates with a token.
func (n *node) connect(token string) (*wire.Conn, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	c, err := wire.Dial(ctx, n.url, wire.Options{Token: token})
	if err == nil {
		n.t.Cleanup(c.Abort)
	}
	return c, err
}

// wantEnd wants a connection to end for its token within a second of begun.
func wantEnd(t *testing.T, c *wire.Conn, begun time.Time) {
	t.Helper()
	select {
	case <-c.Done():
	case <-time.After(patience):
		t.Fatal("the connection lives on")
	}
	if took := time.Since(begun); took > time.Second {
		t.Errorf("the connection ended after %v", took)
	}
	if closed, ok := errors.AsType[*wire.CloseError](c.Err()); !ok || closed.Code != 4003 {
		t.Errorf("the connection ended with %v", c.Err())
	}
}

// wantRefused wants AUTH, HTTP and the operations port to refuse a token.
func (n *node) wantRefused(token string) {
	n.t.Helper()
	_, err := n.connect(token)
	if refused, ok := errors.AsType[*wire.Error](err); !ok || refused.Code != "jwt_invalid" || !strings.Contains(refused.Error(), "revoked") {
		n.t.Errorf("AUTH is answered with %v", err)
	}
	for _, at := range [][2]string{{http.MethodPost, n.http + "/publish/a"}, {http.MethodGet, n.ops + "/metrics"}} {
		if status, body := request(n.t, at[0], at[1], token); status != http.StatusUnauthorized || !strings.Contains(body, "has been revoked") {
			n.t.Errorf("%s answers with %d %s", at[1], status, body)
		}
	}
}

// TestRevokedTokensOfTwoHubs revokes tokens at NATS and at a hub, while connections use them.
func TestRevokedTokensOfTwoHubs(t *testing.T) {
	dir := t.TempDir()
	at := func(port int) func(*natsserver.Options) {
		return func(o *natsserver.Options) { o.StoreDir, o.Port = dir, port }
	}
	server := natstest.Run(t, at(natsserver.RANDOM_PORT))
	nats := server.ClientURL()
	addr, ok := server.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatal("the server does not listen on TCP")
	}
	end := func() {
		embedded.Shutdown(server)
	}
	flags := []string{"--nats-url=" + nats, "--jwt-secret-file=" + secretFile(t), "--metrics-access=token"}
	one, two := startNode(t, flags...), startNode(t, flags...)
	hubs := []*node{one, two}
	users := func(token string) (connected []*wire.Conn) {
		t.Helper()
		for _, hub := range hubs {
			c, err := hub.connect(token)
			if err != nil {
				t.Fatal(err)
			}
			if status, body := request(t, http.MethodPost, hub.http+"/publish/a", token); status != http.StatusOK {
				t.Fatal(status, body)
			}
			connected = append(connected, c)
		}
		return connected
	}
	revoked := func(token string, clients []*wire.Conn, run func()) {
		t.Helper()
		run()
		begun := time.Now()
		for _, c := range clients {
			wantEnd(t, c, begun)
		}
		for _, hub := range hubs {
			hub.wantRefused(token)
		}
	}
	bystanders := users(signed(t, "bystander", "b"))

	first := signed(t, "a", "1")
	revoked(first, users(first), func() {
		if got := output(t, []string{"NATS_URL=" + nats}, "token", "revoke", first); !strings.HasPrefix(got, `revoked the token with jti "1", until `) {
			t.Error(got)
		}
	})
	second := signed(t, "a", "2")
	revoked(second, users(second), func() {
		output(t, []string{"EVENTHUB_OPS_URL=" + one.ops, "EVENTHUB_TOKEN=" + nodeToken}, "token", "revoke", "--jti=2")
	})
	third := signed(t, "a", "3")
	clients := users(third)
	end()
	server = natstest.Run(t, at(addr.Port))
	waitFor(t, "both hubs are ready", func() bool {
		for _, hub := range hubs {
			if status, _ := request(t, http.MethodGet, hub.ops+"/readyz", ""); status != http.StatusOK {
				return false
			}
		}
		return true
	})
	for _, hub := range hubs { // the list of before is known
		hub.wantRefused(first)
	}
	revoked(third, clients, func() {
		waitFor(t, "the revocation is stored", func() bool {
			// everything that was issued until a second from now, as iat counts seconds
			_, err := eventhubRun(t, []string{"EVENTHUB_OPS_URL=" + two.ops, "EVENTHUB_TOKEN=" + signed(t, "operator", "o")},
				"token", "revoke", "--sub=a", "--issued-before="+time.Now().Add(time.Second).UTC().Format(time.RFC3339))
			return err == nil
		})
	})
	// A hub that starts later knows the list, and tokens that are issued later are taken.
	late := startNode(t, flags...)
	late.wantRefused(second)
	for _, c := range bystanders {
		publishTo(t, c, "a", "1")
	}
	waitFor(t, "a new token is taken", func() bool {
		_, err := late.connect(signed(t, "a", "4"))
		return err == nil
	})
	// While NATS is away, hubs keep what they have.
	end()
	for _, hub := range hubs {
		if _, err := hub.connect(first); err == nil || !strings.Contains(err.Error(), "revoked") {
			t.Errorf("without NATS, AUTH is answered with %v", err)
		}
	}
}

// eventhubRun runs a command.
func eventhubRun(t *testing.T, env []string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := eventhubCommand(ctx, t, env, args...).CombinedOutput()
	return string(out), err
}

// TestRevokeAtAHub revokes tokens of a hub with an embedded server, and asks for what cannot be.
func TestRevokeAtAHub(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--jwt-secret-file="+secretFile(t))
	token := signed(t, "a", "1")
	c, err := hub.connect(token)
	if err != nil {
		t.Fatal(err)
	}
	at := "EVENTHUB_OPS_URL=" + hub.ops
	own := []string{at, "WS_TOKEN=" + nodeToken}
	output(t, own, "token", "revoke", token)
	wantEnd(t, c, time.Now())
	if got := output(t, own, "token", "revoke", "--sub=a"); !strings.HasPrefix(got, `revoked the tokens of "a" issued before `) {
		t.Error(got)
	}
	if _, body := request(t, http.MethodGet, hub.ops+"/metrics", ""); !strings.Contains(body, "eventhub_revocations 2\n") {
		t.Error("the metric does not count two revocations")
	}
	narrow, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: "b", Scopes: []string{"publish:**", "subscribe:**"}, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	neither, err := acl.Sign([]byte(revokeSecret), acl.Grant{Scopes: []string{"publish:**"}, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		want string
		env  []string
		args []string
	}{
		{"forbidden", []string{at, "EVENTHUB_TOKEN=" + narrow}, []string{"--jti=2"}},
		{"jwt_invalid: The token has been revoked", []string{at, "EVENTHUB_TOKEN=" + token}, []string{"--jti=2"}},
		{"bad_token", []string{at, "EVENTHUB_TOKEN=wrong"}, []string{"--jti=2"}},
		{"connection refused; check that the hub runs", []string{"OPS_PORT=1", "EVENTHUB_TOKEN=x"}, []string{"--jti=2"}},
		{"invalid address of the hub: its scheme", []string{"EVENTHUB_OPS_URL=ws://a", "EVENTHUB_TOKEN=x"}, []string{"--jti=2"}},
		{"name what to revoke", own, nil},
		{"name what to revoke", own, []string{"--jti=1", "--sub=a"}},
		{"--issued-before goes with --sub only", own, []string{"--jti=1", "--issued-before=2026-01-01T00:00:00Z"}},
		{"it is not a JWT", own, []string{nodeToken}},
		{"has neither jti nor sub, so it cannot be revoked", own, []string{neither}},
		{`no jti; revoke all tokens of its subject instead: --sub "b"`, own, []string{narrow}},
		{"at most 256 bytes", own, []string{"--jti=" + strings.Repeat("x", 257)}},
	} {
		if got := refusal(t, c.env, append([]string{"token", "revoke"}, c.args...)...); !strings.Contains(got, c.want) {
			t.Errorf("%s: %s, want %s", c.args, got, c.want)
		}
	}
	if _, err := hub.connect(neither); err != nil {
		t.Errorf("a token without jti and sub: %v", err)
	}
	long, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: "c", Scopes: []string{"publish:**"}, TTL: 8761 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hub.connect(long); err == nil || !strings.Contains(err.Error(), "lives for too long") {
		t.Errorf("a token that lives for longer than a year: %v", err)
	}
	if status, body := request(t, http.MethodPost, hub.ops+"/revocations", nodeToken); status != http.StatusBadRequest || !strings.Contains(body, "either a jti or a sub") {
		t.Errorf("an empty revocation: %d %s", status, body)
	}
	hub.terminate()
}
