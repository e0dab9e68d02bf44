package jetstream

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"eventhub/jetstream/natstest"
)

// guarded starts a server with the given settings.
func guarded(t *testing.T, opts *natsserver.Options) *natsserver.Server {
	t.Helper()
	return natstest.Run(t, func(o *natsserver.Options) {
		opts.Host, opts.Port, opts.NoLog, opts.NoSigs = o.Host, o.Port, o.NoLog, o.NoSigs
		*o = *opts
	})
}

// file writes a secret file.
func file(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// works publishes and consumes once.
func works(t *testing.T, cfg Config) {
	t.Helper()
	b := open(t, cfg)
	publishAll(t, b, "guarded", "1")
	if err := b.Group("guarded", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	if got := take(t, b, "guarded", "g", SubscribeOptions{}).payloads(1); got[0] != "1" {
		t.Errorf("got %q", got)
	}
}

func refused(t *testing.T, cfg Config) {
	t.Helper()
	cfg.openWait = time.Second
	b, err := Open(context.Background(), cfg)
	if err == nil {
		_ = b.Close()
		t.Error("it opens without what it needs")
	}
}

func TestNKeyAndTLSAndDomain(t *testing.T) {
	t.Parallel()
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	cert, key := certificate(t)
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cert)
	s := guarded(t, &natsserver.Options{
		JetStream: true, StoreDir: t.TempDir(), JetStreamDomain: "hub",
		Nkeys:      []*natsserver.NkeyUser{{Nkey: public}},
		TLSConfig:  &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12},
		TLSTimeout: 5,
	})
	ca := file(t, "ca.pem", cert)
	full := Config{
		URL: strings.Replace(s.ClientURL(), "nats://", "tls://", 1), NKeySeed: file(t, "user.nk", seed),
		TLSCA: ca, TLSCert: ca, TLSKey: file(t, "key.pem", key), Domain: "hub",
	}
	works(t, full)
	for _, without := range []func(*Config){
		func(c *Config) { c.NKeySeed = "" },
		func(c *Config) { c.TLSCA = "" },
		func(c *Config) { c.TLSCert, c.TLSKey = "", "" },
		func(c *Config) { c.Domain = "other" },
	} {
		part := full
		without(&part)
		refused(t, part)
	}
}

// certificate is one that signs itself, for 127.0.0.1.
func certificate(t *testing.T) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: kder})
}

func TestCredentialsFile(t *testing.T) {
	t.Parallel()
	pair := func(make func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
		k, err := make()
		if err != nil {
			t.Fatal(err)
		}
		p, err := k.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		return k, p
	}
	operator, operatorID := pair(nkeys.CreateOperator)
	account, accountID := pair(nkeys.CreateAccount)
	system, systemID := pair(nkeys.CreateAccount)
	_ = system
	user, userID := pair(nkeys.CreateUser)
	encode := func(c interface {
		Encode(nkeys.KeyPair) (string, error)
	}, by nkeys.KeyPair,
	) string {
		s, err := c.Encode(by)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	claims := jwt.NewAccountClaims(accountID)
	claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
	resolver := &natsserver.MemAccResolver{}
	if err := resolver.Store(accountID, encode(claims, operator)); err != nil {
		t.Fatal(err)
	}
	if err := resolver.Store(systemID, encode(jwt.NewAccountClaims(systemID), operator)); err != nil {
		t.Fatal(err)
	}
	op, err := jwt.DecodeOperatorClaims(encode(jwt.NewOperatorClaims(operatorID), operator))
	if err != nil {
		t.Fatal(err)
	}
	s := guarded(t, &natsserver.Options{
		JetStream: true, StoreDir: t.TempDir(), TrustedOperators: []*jwt.OperatorClaims{op}, AccountResolver: resolver, SystemAccount: systemID,
	})
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	creds, err := jwt.FormatUserConfig(encode(jwt.NewUserClaims(userID), account), seed)
	if err != nil {
		t.Fatal(err)
	}
	works(t, Config{URL: s.ClientURL(), Creds: file(t, "user.creds", creds)})
	refused(t, Config{URL: s.ClientURL()})
}

func TestAServerThatLacksSomethingIsRefused(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		opts *natsserver.Options
		want string
	}{
		"no JetStream":   {&natsserver.Options{}, "JetStream does not answer"},
		"no headers":     {&natsserver.Options{NoHeaderSupport: true}, "no_header_support"},
		"small messages": {&natsserver.Options{JetStream: true, StoreDir: t.TempDir(), MaxPayload: 64 << 10}, "max_payload"},
	} {
		_, err := Open(context.Background(), Config{URL: guarded(t, c.opts).ClientURL(), openWait: time.Second})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v", what, err)
		}
	}
}
