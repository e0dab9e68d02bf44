//go:build unix

package main

import (
	"context"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
)

// output runs a command that must succeed, and returns what it prints.
func output(t *testing.T, env []string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := eventhubCommand(ctx, t, env, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("eventhub %s: %v:\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

// TestJWTAsTheHubsOwnToken sets a client's JWT where the hub's own token belongs.
func TestJWTAsTheHubsOwnToken(t *testing.T) {
	t.Parallel()
	token, err := acl.Sign([]byte("0123456789abcdef0123456789abcdef"), acl.Grant{Scopes: []string{"publish:a"}, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, env := range []string{"WS_TOKEN=" + token, "WS_TOKEN_FILE=" + file} {
		for _, args := range [][]string{append([]string{"serve"}, ports...), {"serve", "--check"}} {
			got := refusal(t, []string{env}, args...)
			if !strings.Contains(got, "the hub's own token is a JWT") || !strings.Contains(got, "EVENTHUB_TOKEN") || strings.Contains(got, token) {
				t.Errorf("%s: %s", args, got)
			}
		}
	}
	output(t, []string{"WS_TOKEN=three.parts.only"}, "serve", "--check")
}

// TestClientsOfTheSameEnvironment starts clients with the variables of a hub.
func TestClientsOfTheSameEnvironment(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	u, err := url.Parse(hub.url)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(nodeToken), 0o600); err != nil {
		t.Fatal(err)
	}
	port := "WS_PORT=" + u.Port()
	for _, env := range [][]string{
		{port, "WS_TOKEN=" + nodeToken},
		{port, "WS_TOKEN_FILE=" + file},
		{port, "EVENTHUB_TOKEN=" + nodeToken, "WS_TOKEN=another"},
		{port, "EVENTHUB_TOKEN=" + nodeToken, "WS_TOKEN_FILE=nowhere"},
		{port, "EVENTHUB_TOKEN_FILE=" + file, "WS_TOKEN=another"},
		{"WS_PORT=1", "EVENTHUB_URL=" + hub.url, "WS_TOKEN=" + nodeToken},
	} {
		output(t, env, "pub", "a", "1")
	}
	for want, env := range map[string][]string{
		"bad_token":                  {port, "EVENTHUB_TOKEN=another", "WS_TOKEN=" + nodeToken},
		"hub at ws://127.0.0.1:1":    {"WS_PORT=1", "WS_TOKEN=" + nodeToken},
		"its port is not a number":   {"WS_PORT=0", "WS_TOKEN=" + nodeToken},
		"use either --token or":      {port, "EVENTHUB_TOKEN=a", "EVENTHUB_TOKEN_FILE=" + file},
		"invalid hub address \"ws:/": {"EVENTHUB_URL=ws://:8090", "WS_TOKEN=" + nodeToken},
	} {
		if got := refusal(t, env, "pub", "a", "1"); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", env, got, want)
		}
	}
}

// TestCheckOfVariables misspells variables of the hub.
func TestCheckOfVariables(t *testing.T) {
	t.Parallel()
	sh := shellOf(t)
	for name, hint := range map[string]string{
		"EVENTHUB_BINT":          "did you mean EVENTHUB_BIND?",
		"EVENTHUB_DATA_DIR":      "did you mean EVENTHUB_DATA?",
		"EVENTHUB_LIMIT_TOPIC":   "did you mean EVENTHUB_LIMIT_TOPICS?",
		"EVENTHUB_ORIGIN":        "did you mean EVENTHUB_ORIGINS?",
		"EVENTHUB_SOMETHING_NEW": "remove it",
	} {
		if got := sh.check(t, name+"=1"); got != "eventhub: unknown variable "+name+"; "+hint+"\n" {
			t.Errorf("%s: %s", name, got)
		}
	}
	// One of another command, and those of a service of this name in Kubernetes.
	output(t, []string{
		"EVENTHUB_TOKEN=x", "EVENTHUB_SERVICE_HOST=10.0.0.1", "EVENTHUB_SERVICE_PORT=8090", "EVENTHUB_SERVICE_PORT_HTTP=8081",
		"EVENTHUB_PORT=tcp://10.0.0.1:8090", "EVENTHUB_PORT_8090_TCP=tcp://10.0.0.1:8090", "EVENTHUB_PORT_8090_TCP_ADDR=10.0.0.1",
	}, "serve", "--check")
}

// TestCheckOfURLs gives everything that takes a URL one without a use.
func TestCheckOfURLs(t *testing.T) {
	t.Parallel()
	sh := shellOf(t)
	for _, c := range []struct{ env, want string }{
		{"EVENTHUB_URL=http://127.0.0.1:8090", `its scheme is "http"`},
		{"EVENTHUB_URL=127.0.0.1:8090", "it is not a URL"},
		{"EVENTHUB_URL=ws://", "it has no host"},
		{"EVENTHUB_URL=ws://:8090", "it has no host"},
		{"EVENTHUB_URL=ws://127.0.0.1:80900", "its port is not a number from 1 to 65535"},
		{"JWT_JWKS_URL=https://", "invalid JWKS URL"},
		{"JWT_JWKS_URL=https://:443/keys", "invalid JWKS URL"},
		{"JWT_JWKS_URL=https://keys.example:99999/keys", "invalid JWKS URL"},
		{"JWT_JWKS_URL=file:///etc/keys", "invalid JWKS URL"},
		{"JWT_JWKS_URL=keys.example/keys", "invalid JWKS URL"},
		{"NATS_URL=http://127.0.0.1:4222", `NATS URL 1: its scheme is "http"`},
		{"NATS_URL=nats://", "NATS URL 1: it has no host"},
		{"NATS_URL=nats://:4222", "NATS URL 1: it has no host"},
		{"NATS_URL=nats://a:4222,", "NATS URL 2: it has no host"},
		{"NATS_URL=nats://s3cret@a:0", "NATS URL 1: its port is not a number"},
		{"NATS_URL=nats://a:4222,ws://b:80", "NATS URLs mix WebSocket with other schemes"},
		{"EVENTHUB_ORIGINS=example.com", "use scheme://host"},
		{"OUTBOX_DSN=postgres:nowhere", "invalid PostgreSQL address"},
		{"OUTBOX_DSN=mysql://a/b", "unknown kind of outbox DSN"},
	} {
		if got := sh.check(t, c.env); !strings.Contains(got, c.want) || strings.Contains(got, "s3cret") {
			t.Errorf("%s: %s, want %s", c.env, got, c.want)
		}
	}
	output(t, []string{"NATS_URL=a:4222, tls://b", "EVENTHUB_URL=wss://hub.example", "JWT_JWKS_URL=https://keys.example/keys"}, "serve", "--check")
}
