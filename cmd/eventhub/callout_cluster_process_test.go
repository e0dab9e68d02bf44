//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"eventhub/acl"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// command runs a command of the program in this process, and returns what it prints.
func runCommand(t *testing.T, args ...string) string {
	t.Helper()
	var out, log bytes.Buffer
	if code := run(t.Context(), args, streams{in: strings.NewReader(""), out: &out, err: &log}); code != 0 {
		t.Fatalf("%v ends with %d: %s", args, code, log.String())
	}
	return out.String()
}

// TestAuthCalloutOfOtherServers runs a NATS server with the configuration that the program prints,
// and two hubs with the variables that it names. Native clients use tokens, until these expire, are
// revoked, or the hubs are gone.
func TestAuthCalloutOfOtherServers(t *testing.T) {
	for _, isolation := range []string{"on", "off"} {
		t.Run(isolation, func(t *testing.T) {
			t.Parallel() // tokens expire meanwhile
			dir := filepath.Join(t.TempDir(), "keys")
			config := runCommand(t, "auth-callout", "config", "--dir="+dir, "--nats-isolation="+isolation)
			server := natstest.Run(t, func(o *natsserver.Options) {
				if err := o.ProcessConfigString(config); err != nil {
					t.Fatalf("%v in\n%s", err, config)
				}
				o.AuthTimeout = 2 // the end of the server waits for it
			})
			var variables []string
			for line := range strings.Lines(config) {
				if name, value, ok := strings.Cut(strings.TrimSpace(strings.TrimPrefix(line, "#")), "="); ok && strings.HasPrefix(line, "#   ") {
					variables = append(variables, name+"="+value)
				}
			}
			start := func() *node {
				return startNodeWith(t, func(c *exec.Cmd) { c.Env = append(c.Env, variables...) }, "--nats-url="+server.ClientURL(), "--jwt-secret-file="+secretFile(t))
			}
			one, two := start(), start()
			publishTo(t, one.dial(), "orders.placed", `"first"`)
			publishTo(t, one.dial(), "orders.paid", `"first"`)

			// ended waits for the server to end a connection.
			ended := func(token string) <-chan error {
				closed := make(chan error, 1)
				dialNative(t, server.ClientURL(), token, nats.NoReconnect(), nats.ClosedHandler(func(nc *nats.Conn) { closed <- nc.LastError() }))
				return closed
			}
			expiring, ttl := make(chan error, 1), time.Duration(0)
			eventually(t, "a client connects before its token expires", func() bool {
				ttl += time.Second
				brief := granted(t, acl.Grant{Subject: "s", Scopes: []string{"publish:a"}, TTL: ttl})
				nc, err := nats.Connect(server.ClientURL(), nats.Token(brief), nats.Timeout(patience), nats.NoReconnect(),
					nats.ClosedHandler(func(nc *nats.Conn) { expiring <- nc.LastError() }))
				if err != nil {
					return false
				}
				t.Cleanup(nc.Close)
				return true
			})
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			token := scoped(t, "shop", "publish:orders.placed", "subscribe:orders.placed")
			_, js := dialNative(t, server.ClientURL(), token)
			if ack, err := js.Publish(ctx, "event.orders.placed", []byte("1")); err != nil || ack.Sequence != 2 {
				t.Errorf("publish: %+v, %v", ack, err)
			}
			plain := dialPlain(t, server.ClientURL(), token)
			if m, refused := plain.request("$JS.API.DIRECT.GET.orders=2Eplaced", `{"seq":1}`); refused || !strings.Contains(m.text, `"first"`) {
				t.Errorf("read: %v %s", refused, m.text)
			}
			if !plain.publish("event.orders.paid", "", "1") {
				t.Error("the client may publish to another topic")
			}
			_, full := dialNative(t, server.ClientURL(), nodeToken)
			_ = plain.publish("event.orders.placed", "event.orders.paid", "1")
			if _, refused := plain.request("event.orders.placed", "1"); refused {
				t.Error("a publish was refused")
			}
			waitFor(t, "the publishes", func() bool {
				s, err := full.Stream(ctx, "orders=2Eplaced")
				return err == nil && s.CachedInfo().State.LastSeq == 4
			})
			// In the account of the hub, NATS lets a client have answers sent to any subject. That
			// answer was sent before the one to the request, and comes before the next publish.
			next := uint64(2)
			if isolation == "off" {
				next++
			}
			if ack, err := full.Publish(ctx, "event.orders.paid", []byte("1")); err != nil || ack.Sequence != next {
				t.Errorf("the next event of the other topic: %+v, %v; want sequence %d", ack, err, next)
			}

			seed := "--nats-nkey-seed=" + filepath.Join(dir, hubFile)
			explained := runCommand(t, "auth-callout", "explain", token, "--nats-url="+server.ClientURL(), seed, "--jwt-secret-file="+secretFile(t))
			for _, want := range []string{jetstream.NativeInbox(token) + ".>", "  event.orders.placed\n", "  $JS.API.DIRECT.GET.orders=2Eplaced\n"} {
				if !strings.Contains(explained, want) {
					t.Errorf("auth-callout explain lacks %q:\n%s", want, explained)
				}
			}
			if strings.Contains(explained, "orders.paid") || strings.Contains(explained, "narrowed") {
				t.Errorf("auth-callout explain says too much:\n%s", explained)
			}

			await := func(what string, closed <-chan error) {
				t.Helper()
				select {
				case <-closed:
				case <-time.After(patience):
					t.Errorf("a client whose token %s stays connected", what)
				}
			}
			live := ended(token)
			runCommand(t, "token", "revoke", token, "--nats-url="+server.ClientURL(), seed)
			await("is revoked", live)
			refusedAt := func(token string) error {
				nc, err := nats.Connect(server.ClientURL(), nats.Token(token), nats.Timeout(patience))
				if err == nil {
					nc.Close()
				}
				return err
			}
			for _, bad := range []string{token, "", "wrong", scoped(t, "s") + "x"} {
				if err := refusedAt(bad); !errors.Is(err, nats.ErrAuthorization) {
					t.Errorf("a client with the token %.10q: %v", bad, err)
				}
			}
			await("expires", expiring)
			// One hub is enough, and without hubs nobody new connects.
			one.kill()
			other := scoped(t, "other", "publish:orders.placed")
			_, js = dialNative(t, server.ClientURL(), other)
			if _, err := js.Publish(ctx, "event.orders.placed", []byte("1")); err != nil {
				t.Error(err)
			}
			two.terminate()
			nc, err := nats.Connect(server.ClientURL(), nats.Token(other), nats.Timeout(time.Second))
			if err == nil {
				nc.Close()
				t.Error("a client connects without a hub")
			}
			if _, err := js.Publish(ctx, "event.orders.placed", []byte("1")); err != nil {
				t.Errorf("a client that is connected, without a hub: %v", err)
			}
		})
	}
}

// TestAuthCalloutConfigKeepsKeys has the program make keys that nobody else can read, and never
// replace them.
func TestAuthCalloutConfigKeepsKeys(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "keys")
	config := runCommand(t, "auth-callout", "config", "--dir="+dir)
	for _, name := range []string{issuerFile, xkeyFile, hubFile} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
		seed, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || strings.Contains(config, strings.TrimSpace(string(seed))) {
			t.Errorf("the configuration contains the seed of %s, or: %v", name, err)
		}
	}
	for _, tt := range []struct{ want, args string }{
		{"never replaced", "--dir=" + dir},
		{"two of the accounts", "--dir=x --hub-account=SYS"},
		{"use letters", "--dir=x --client-account=a.b"},
		{"below 1", "--dir=x --max-subs=0"},
	} {
		var log bytes.Buffer
		args := append([]string{"auth-callout", "config"}, strings.Fields(tt.args)...)
		if code := run(t.Context(), args, streams{in: strings.NewReader(""), out: &bytes.Buffer{}, err: &log}); code == 0 || !strings.Contains(log.String(), tt.want) {
			t.Errorf("%s: %d %s", tt.args, code, log.String())
		}
	}
}
