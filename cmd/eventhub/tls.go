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

// reloadEvery is how often the files of the certificate are read again. SIGHUP does so at once.
const reloadEvery = 10 * time.Second

// maxPEMBytes bounds a file with a certificate or its key.
const maxPEMBytes = 1 << 20

// tlsFlags say with which certificate the hub speaks TLS.
type tlsFlags struct {
	Cert string `name:"tls-cert" env:"EVENTHUB_TLS_CERT" placeholder:"FILE" help:"Certificate chain (PEM) for WebSocket and HTTP. It is read again when it changes. Default: no TLS."`
	Key  string `name:"tls-key" env:"EVENTHUB_TLS_KEY" placeholder:"FILE" help:"Key of the certificate (PEM)."`
	Ops  bool   `name:"ops-tls" env:"EVENTHUB_OPS_TLS" help:"Use the certificate on the operations port, too."`
}

// certificate loads the pair. It is nil when none is configured.
func (f tlsFlags) certificate() (*certificate, error) {
	switch {
	case f.Cert == "" && f.Key == "" && f.Ops:
		return nil, errors.New("--ops-tls needs a certificate: name it and its key (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY)")
	case f.Cert == "" && f.Key == "":
		return nil, nil //nolint:nilnil // having none is not an error
	case f.Cert == "" || f.Key == "":
		return nil, errors.New("a TLS certificate and its key go together: name both (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY)")
	}
	c := &certificate{certFile: f.Cert, keyFile: f.Key}
	if _, err := c.reload(); err != nil {
		return nil, fmt.Errorf("%w (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY)", err)
	}
	return c, nil
}

// certificate is a pair of files that may change while it is in use. New handshakes get the newest pair that could be read;
// connections that are open keep theirs.
type certificate struct {
	certFile, keyFile string

	current atomic.Pointer[tls.Certificate]
	// cert and key are what the files held when they were last looked at. reload is for one goroutine at a time.
	cert, key []byte
}

// reload reads the files, and takes the pair when it is a new one. A pair that is broken is an error, once, and changes
// nothing.
func (c *certificate) reload() (changed bool, err error) {
	cert, err := readBounded(c.certFile, "TLS certificate")
	if err != nil {
		return false, err
	}
	key, err := readBounded(c.keyFile, "TLS key")
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
	return true, nil
}

func readBounded(path, what string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the file is the operator's choice
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, path, cause(err))
	}
	defer func() { _ = f.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(f, maxPEMBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", what, path, cause(err))
	case len(text) > maxPEMBytes:
		return nil, fmt.Errorf("%s %s: it has more than %d bytes", what, path, maxPEMBytes)
	}
	return text, nil
}

// watch reads the files again until ctx ends: every so often, and upon SIGHUP.
func (c *certificate) watch(ctx context.Context, every time.Duration, log *slog.Logger) {
	c.warn(ctx, log)
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-hup:
			said = ""
		}
		changed, err := c.reload()
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			log.LogAttrs(ctx, slog.LevelError, "the new TLS certificate is of no use: the old one stays", slog.Any("error", err))
		case changed:
			said = ""
			log.LogAttrs(ctx, slog.LevelInfo, "the TLS certificate was read again", slog.Time("not_after", c.expires()))
			c.warn(ctx, log)
		}
	}
}

// warn tells of a certificate that clients will refuse.
func (c *certificate) warn(ctx context.Context, log *slog.Logger) {
	if at := c.expires(); time.Now().After(at) {
		log.LogAttrs(ctx, slog.LevelWarn, "the TLS certificate has expired: clients refuse it", slog.Time("not_after", at))
	}
}

// expires is when the certificate in use ends.
func (c *certificate) expires() time.Time { return c.current.Load().Leaf.NotAfter }

// names are those that the certificate in use is for.
func (c *certificate) names() []string {
	leaf := c.current.Load().Leaf
	names := leaf.DNSNames
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	return names
}

// config is the TLS of a listener.
func (c *certificate) config() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current.Load(), nil },
	}
}
