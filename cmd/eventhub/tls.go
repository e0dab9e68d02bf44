package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
)

// reloadEvery is the interval at which the certificate files are read again. SIGHUP reads them at
// once.
const reloadEvery = 10 * time.Second

// maxPEMBytes is the maximum size of a certificate or key file.
const maxPEMBytes = 1 << 20

// tlsFlags configure the TLS certificate of the hub.
type tlsFlags struct {
	Cert string `name:"tls-cert" env:"EVENTHUB_TLS_CERT" placeholder:"FILE" help:"Certificate chain (PEM) for WebSocket and HTTP. Reloaded when it changes. Default: no TLS."`
	Key  string `name:"tls-key" env:"EVENTHUB_TLS_KEY" placeholder:"FILE" help:"Private key of the certificate (PEM)."`
	Ops  bool   `name:"ops-tls" env:"EVENTHUB_OPS_TLS" help:"Also use the certificate on the ops port."`
}

// certificate loads the key pair. It returns nil if none is configured.
func (f tlsFlags) certificate() (*certificate, error) {
	switch {
	case f.Cert == "" && f.Key == "" && f.Ops:
		return nil, errors.New("--ops-tls requires a certificate and its key (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY)")
	case f.Cert == "" && f.Key == "":
		return nil, nil //nolint:nilnil // no certificate is not an error
	case f.Cert == "" || f.Key == "":
		return nil, errors.New("a TLS certificate requires its key, and vice versa; set both (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY)")
	}
	c := &certificate{certFile: f.Cert, keyFile: f.Key}
	if _, err := c.reload(); err != nil {
		return nil, fmt.Errorf("%w (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY)", err)
	}
	return c, nil
}

// certificate is a pair of files that may change while in use. New handshakes use the newest valid
// pair; open connections keep theirs.
type certificate struct {
	certFile, keyFile string

	current atomic.Pointer[tls.Certificate]
	// serving is the configuration that shows current.
	serving atomic.Pointer[tls.Config]
	// cert and key are the last contents of the files. Only one goroutine at a time may call
	// reload.
	cert, key []byte
	// hup receives SIGHUP after listen.
	hup chan os.Signal
}

// listen begins to receive SIGHUP, which would otherwise end the process. It receives until the
// process ends: a hub that drains ignores SIGHUP, also in its last moment.
func (c *certificate) listen() {
	c.hup = make(chan os.Signal, 1)
	signal.Notify(c.hup, syscall.SIGHUP)
}

// reload reads the files and uses them if they have changed. An invalid pair keeps the old one in
// use, and is reported as an error only once.
func (c *certificate) reload() (changed bool, err error) {
	cert, err := readBounded(c.certFile, "TLS certificate", false)
	if err != nil {
		return false, err
	}
	key, err := readBounded(c.keyFile, "TLS key", true)
	if err != nil {
		return false, err
	}
	if bytes.Equal(cert, c.cert) && bytes.Equal(key, c.key) {
		return false, nil
	}
	c.cert, c.key = cert, key
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return false, fmt.Errorf("TLS certificate %s with key %s: %w", c.certFile, c.keyFile, err)
	}
	c.current.Store(&pair)
	c.serving.Store(configOf(pair))
	return true, nil
}

// readBounded reads a file of the operator. secret says that no other user may read the file.
func readBounded(path, what string, secret bool) ([]byte, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, path, cause(err))
	}
	defer func() { _ = f.Close() }() // read-only
	if secret {
		if err := checkSecretFile(f); err != nil {
			return nil, fmt.Errorf("%s %w", what, err)
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, maxPEMBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", what, path, cause(err))
	case len(text) > maxPEMBytes:
		return nil, fmt.Errorf("%s %s exceeds %d bytes", what, path, maxPEMBytes)
	}
	return text, nil
}

// watch calls reload at every interval and after SIGHUP, until ctx ends.
func (c *certificate) watch(ctx context.Context, every time.Duration, log *slog.Logger) {
	c.warn(ctx, log)
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-c.hup:
			said = ""
		}
		changed, err := c.reload()
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			log.LogAttrs(ctx, slog.LevelError, "failed to load the new TLS certificate; keeping the old one", slog.Any("error", err))
		case changed:
			said = ""
			log.LogAttrs(ctx, slog.LevelInfo, "reloaded the TLS certificate", slog.Time("not_after", c.expires()))
			c.warn(ctx, log)
		}
	}
}

// warn logs a warning if the certificate has expired.
func (c *certificate) warn(ctx context.Context, log *slog.Logger) {
	if at := c.expires(); time.Now().After(at) {
		log.LogAttrs(ctx, slog.LevelWarn, "TLS certificate has expired; clients will refuse it", slog.Time("not_after", at))
	}
}

// expires returns the end of validity of the certificate in use.
func (c *certificate) expires() time.Time { return c.current.Load().Leaf.NotAfter }

// names returns the host names and addresses of the certificate in use.
func (c *certificate) names() []string {
	leaf := c.current.Load().Leaf
	names := leaf.DNSNames
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	return names
}

// config returns the TLS configuration of a listener.
func (c *certificate) config() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		NextProtos:         []string{"http/1.1"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.serving.Load(), nil },
	}
}

// configOf returns the configuration that shows a certificate. Its tickets have keys of their own,
// so a session that began with another certificate is not resumed: the client has to accept this
// certificate first.
func configOf(pair tls.Certificate) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, Certificates: []tls.Certificate{pair}}
	// Without these functions, crypto/tls would use the keys of the listener's configuration.
	c.WrapSession = c.EncryptTicket
	c.UnwrapSession = c.DecryptTicket
	return c
}
