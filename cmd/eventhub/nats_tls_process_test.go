//go:build unix

package main

import (
	"crypto/tls"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestNativeClientsOverTLS has a native client connect with the hub's certificate, before and after
// the certificate changes. Without TLS, or without trust, none connects, and the token is not sent.
func TestNativeClientsOverTLS(t *testing.T) {
	t.Parallel()
	pair := newPairFiles(t)
	hub := startNode(t, "--tls-cert="+pair.cert, "--tls-key="+pair.key, "--nats-listen=127.0.0.1:0", "--nats-listen-tls=on")
	if !strings.HasPrefix(hub.nats, "tls://") {
		t.Fatalf("the hub's NATS listens at %s", hub.nats)
	}
	trusted := nats.Secure(&tls.Config{RootCAs: pair.roots})
	connect := func() (serial int64) {
		t.Helper()
		nc, err := nats.Connect(hub.nats, nats.Token(nodeToken), trusted)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		state, err := nc.TLSConnectionState()
		if err != nil {
			t.Fatal(err)
		}
		js, err := nc.JetStream()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := js.AccountInfo(); err != nil {
			t.Error(err)
		}
		return state.PeerCertificates[0].SerialNumber.Int64()
	}
	if got := connect(); got != 1 {
		t.Errorf("certificate %d is shown", got)
	}
	if nc, err := nats.Connect(hub.nats, nats.Token("another token"), trusted); err == nil {
		nc.Close()
		t.Error("a wrong token is accepted")
	}
	if nc, err := nats.Connect(hub.nats, nats.Token(nodeToken)); err == nil {
		nc.Close()
		t.Error("a client trusts a certificate that it does not know")
	}
	// A client that speaks without TLS gets no further than the server's greeting.
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(hub.nats, "tls://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	greeting := make([]byte, 4096)
	n, err := conn.Read(greeting)
	if err != nil || !strings.Contains(string(greeting[:n]), `"tls_required":true`) {
		t.Errorf("the server greets with %s, %v", greeting[:n], err)
	}
	pair.write(pair.make())
	hub.signal(syscall.SIGHUP)
	waitFor(t, "the new certificate", func() bool { return connect() == 2 })
	// The hub itself is served as before.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, hub.http+"/publish/t", strings.NewReader("1"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+nodeToken)
	web := pair.client()
	defer web.CloseIdleConnections()
	resp, err := web.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("publishing is answered with %s", resp.Status)
	}
	hub.terminate()
}
