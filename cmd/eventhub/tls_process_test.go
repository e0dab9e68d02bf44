//go:build unix

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// pairFiles is a certificate and its key in files, which a test can change.
type pairFiles struct {
	t         *testing.T
	cert, key string
	serial    int64
	roots     *x509.CertPool // has all that were made
}

func newPairFiles(t *testing.T) *pairFiles {
	t.Helper()
	dir := t.TempDir()
	p := &pairFiles{t: t, cert: filepath.Join(dir, "cert.pem"), key: filepath.Join(dir, "key.pem"), roots: x509.NewCertPool()}
	p.write(p.make())
	return p
}

// make makes the next pair, for 127.0.0.1.
func (p *pairFiles) make() (cert, key []byte) {
	p.t.Helper()
	p.serial++
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		p.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(p.serial), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		p.t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		p.t.Fatal(err)
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	p.roots.AppendCertsFromPEM(cert)
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})
}

func (p *pairFiles) write(cert, key []byte) {
	p.t.Helper()
	for name, text := range map[string][]byte{p.cert: cert, p.key: key} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			p.t.Fatal(err)
		}
	}
}

// served is the serial number of the certificate that a listener shows.
func (p *pairFiles) served(at string) int64 {
	p.t.Helper()
	_, at, _ = strings.Cut(at, "://")
	c, err := tls.Dial("tcp", at, &tls.Config{RootCAs: p.roots})
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
}

// client trusts all pairs that were made.
func (p *pairFiles) client() *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.roots}, ForceAttemptHTTP2: true}, Timeout: patience}
}

// TestTLS runs a hub over TLS and changes its certificate: once to a broken one, once to a good
// one.
func TestTLS(t *testing.T) {
	t.Parallel()
	pair := newPairFiles(t)
	hub := startNode(t, "--tls-cert="+pair.cert, "--tls-key="+pair.key, "--ops-tls")
	for _, url := range []string{hub.url, hub.http, hub.ops} {
		if !regexp.MustCompile(`^(wss|https)://`).MatchString(url) {
			t.Fatalf("the hub listens at %s", url)
		}
		if got := pair.served(url); got != 1 {
			t.Errorf("%s shows certificate %d", url, got)
		}
	}
	ws, _, err := websocket.Dial(t.Context(), hub.url, &websocket.DialOptions{HTTPClient: pair.client()}) //nolint:bodyclose // the library does it
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.CloseNow() }()
	say := func(frame, want string) {
		t.Helper()
		if err := ws.Write(t.Context(), websocket.MessageText, []byte(frame)); err != nil {
			t.Fatal(err)
		}
		if _, got, err := ws.Read(t.Context()); err != nil || !strings.HasPrefix(string(got), want) {
			t.Fatalf("%s is answered with %s: %v", frame, got, err)
		}
	}
	say(`{"op":"AUTH","token":"`+nodeToken+`"}`, `{"op":"OK"`)
	say(`{"op":"PUBLISH","topic":"t","payload":1}`, `{"op":"OK"`)

	t.Run("headers", func(t *testing.T) { checkHeaders(t, pair, hub) })
	t.Run("versions", func(t *testing.T) {
		for version, taken := range map[uint16]bool{tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
			for _, url := range []string{hub.url, hub.http, hub.ops} {
				_, at, _ := strings.Cut(url, "://")
				d := tls.Dialer{Config: &tls.Config{RootCAs: pair.roots, MinVersion: tls.VersionTLS10, MaxVersion: version}}
				c, err := d.DialContext(t.Context(), "tcp", at)
				if (err == nil) != taken {
					t.Errorf("%s over %s: %v", url, tls.VersionName(version), err)
				}
				if err == nil {
					_ = c.Close()
				}
			}
		}
	})

	cert, key := pair.make()
	pair.write(cert, []byte("no key"))
	hub.signal(syscall.SIGHUP)
	waitFor(t, "the broken pair is logged", func() bool { return strings.Contains(hub.log.String(), "keeping the old one") })
	if got := pair.served(hub.url); got != 1 {
		t.Errorf("after a broken pair certificate %d is shown", got)
	}
	pair.write(cert, key)
	hub.signal(syscall.SIGHUP)
	waitFor(t, "the new certificate", func() bool { return pair.served(hub.url) == 2 })
	for _, url := range []string{hub.http, hub.ops} {
		if got := pair.served(url); got != 2 {
			t.Errorf("%s shows certificate %d", url, got)
		}
	}
	say(`{"op":"PUBLISH","topic":"t","payload":2}`, `{"op":"OK"`) // over the connection from before
	_ = ws.CloseNow()                                             // else the hub waits for it
	hub.terminate()
}

// checkHeaders compares what every answer carries, and that each port speaks the versions of HTTP
// that it should.
func checkHeaders(t *testing.T, pair *pairFiles, hub *node) {
	t.Helper()
	c := pair.client()
	defer c.CloseIdleConnections()
	page := strings.Replace(hub.url, "wss", "https", 1)
	for _, url := range []string{hub.http + "/nothing", hub.ops + "/livez", page} {
		resp, err := c.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.ProtoMajor != 1 {
			t.Errorf("%s speaks %s", url, resp.Proto)
		}
		if url == page {
			continue
		}
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store",
			"Content-Security-Policy":   "default-src 'none'; frame-ancestors 'none'",
			"Strict-Transport-Security": "max-age=31536000",
		} {
			if got := resp.Header.Get(name); got != want {
				t.Errorf("%s answers with %s: %q, want %q", url, name, got, want)
			}
		}
	}
}

// TestCertificateIsReadAgain changes the files without a signal.
func TestCertificateIsReadAgain(t *testing.T) {
	pair := newPairFiles(t)
	c, err := tlsFlags{Cert: pair.cert, Key: pair.key}.certificate()
	if err != nil {
		t.Fatal(err)
	}
	var log lockedBuffer
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.listen()
		c.watch(ctx, time.Millisecond, slog.New(slog.NewTextHandler(&log, nil)))
	}()
	serial := func() int64 { return c.current.Load().Leaf.SerialNumber.Int64() }

	pair.write(pair.make())
	waitFor(t, "the second certificate", func() bool { return serial() == 2 })
	if err := os.Remove(pair.key); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the missing key is logged", func() bool { return strings.Contains(log.String(), "no such file") })
	pair.write(pair.make())
	waitFor(t, "the third certificate", func() bool { return serial() == 3 })
	cancel()
	<-ended
	if n := strings.Count(log.String(), "no such file"); n != 1 {
		t.Errorf("the missing key was logged %d times:\n%s", n, log.String())
	}
}
