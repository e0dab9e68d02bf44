package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"eventhub/facade/client"
)

// dialTimeout is the timeout of one connection attempt.
const dialTimeout = 10 * time.Second

// Delay between connection attempts. It starts at backoffFirst and doubles up to backoffMax. Jitter
// shortens each delay by up to half, so that the clients of a restarted hub do not all reconnect at
// once.
const (
	backoffFirst = 100 * time.Millisecond
	backoffMax   = 5 * time.Second
)

// hubFlags select the hub that a command connects to, and the credential.
type hubFlags struct {
	credentialFlags

	URL string `env:"EVENTHUB_URL" help:"WebSocket URL of the hub. Default: WS_PORT of this host, or ws://127.0.0.1:8090."`
	// WSPort is the port of a hub that is started in the same environment.
	WSPort uint16 `name:"ws-port" env:"WS_PORT" hidden:"" default:"8090"`
}

// credentialFlags select the token that a command shows to a hub.
type credentialFlags struct {
	Token     string `env:"EVENTHUB_TOKEN" help:"Token for the hub. Default: WS_TOKEN, or for a hub on this host the token file in its data directory."`
	TokenFile string `name:"token-file" env:"EVENTHUB_TOKEN_FILE" placeholder:"FILE" help:"File with the token. Default: WS_TOKEN_FILE."`
	Data      string `env:"EVENTHUB_DATA" default:"./eventhub-data" help:"Data directory of the hub on this host."`

	// The token of a hub that is started in the same environment.
	HubToken     string `env:"WS_TOKEN" hidden:""`
	HubTokenFile string `env:"WS_TOKEN_FILE" hidden:""`
}

// address returns the WebSocket URL of the hub.
func (f hubFlags) address() string {
	if f.URL == "" {
		return "ws://127.0.0.1:" + strconv.Itoa(int(f.WSPort))
	}
	return f.URL
}

// dial connects to the hub. The caller must close the client.
func (f hubFlags) dial(ctx context.Context) (*client.Client, error) {
	token, err := f.token()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := client.Dial(ctx, f.address(), client.Options{Token: token})
	if err == nil {
		return c, nil
	}
	if refused, ok := errors.AsType[*client.Error](err); ok {
		return nil, fmt.Errorf("connect to hub at %s: %s; set its token (EVENTHUB_TOKEN; --token, WS_TOKEN)", f.address(), strings.TrimSuffix(refused.Error(), "."))
	}
	if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, fmt.Errorf("connect to hub at %s: %w; check that the hub runs (eventhub serve) and that the address is right (--url, EVENTHUB_URL)", f.address(), reason(err))
	}
	return nil, err
}

// reason returns the part of a connection error that is useful to people.
func reason(err error) error {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns
	}
	return err
}

// token returns the credential for the hub.
func (f hubFlags) token() (string, error) {
	u, err := checkURL(f.address(), "ws", "wss")
	if err != nil {
		return "", fmt.Errorf("invalid hub address %q; use ws://HOST:PORT or wss://HOST:PORT: %w (--url, EVENTHUB_URL; WS_PORT)", f.address(), err)
	}
	return f.find(u)
}

// find returns the credential for the hub at u. The token of the hub on this host is never sent to
// another host.
func (f credentialFlags) find(u *url.URL) (string, error) {
	token, err := tokenFlags{f.Token, f.TokenFile}.configured()
	if err != nil {
		return "", fmt.Errorf("%w (EVENTHUB_TOKEN, EVENTHUB_TOKEN_FILE)", err)
	}
	if token == "" {
		token, err = tokenFlags{f.HubToken, f.HubTokenFile}.configured()
	}
	if err != nil || token != "" {
		return token, err
	}
	if !isLoopback(u.Hostname()) {
		return "", fmt.Errorf("no token for the hub at %s; set --token or WS_TOKEN, or EVENTHUB_TOKEN", u.Redacted())
	}
	token, err = readToken(f.Data)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(f.Data); err != nil {
			return "", fmt.Errorf("no token: data directory %s does not exist; run this command where the hub runs, set the hub's data directory (--data, EVENTHUB_DATA), or set the token (EVENTHUB_TOKEN; --token, WS_TOKEN)", f.Data)
		}
		return "", fmt.Errorf("no token: file %s does not exist; set the hub's data directory (--data, EVENTHUB_DATA) or the token (EVENTHUB_TOKEN; --token, WS_TOKEN)", filepath.Join(f.Data, tokenName))
	}
	return token, err
}

// session is the work on one connection to the hub. It returns nil when the command is done. An
// error decides whether the command reconnects.
type session func(ctx context.Context, c *client.Client) error

// keep runs sessions until one is done, ctx ends (both return nil), or an error makes a retry
// pointless. The first connection must succeed. say receives a message before each reconnection.
func (f hubFlags) keep(ctx context.Context, say func(string), work session) error {
	wait := backoffFirst
	for first := true; ; first = false {
		c, err := f.dial(ctx)
		if err == nil {
			wait = backoffFirst
			err = work(ctx, c)
			if closeErr := c.Close(); err == nil {
				return closeErr
			}
		} else if first && ctx.Err() == nil {
			return err
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end of ctx is a normal stop
		}
		if !passes(err) {
			return err
		}
		pause := wait/2 + rand.N(wait/2) //nolint:gosec // not security-relevant
		say(fmt.Sprintf("%v; reconnecting in %v", err, pause.Round(time.Millisecond)))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		wait = min(2*wait, backoffMax)
	}
}

// passes reports whether a retry may succeed after this error.
func passes(err error) bool {
	if refused, ok := errors.AsType[*client.Error](err); ok {
		switch refused.Code {
		case "subscribe_failed", "publish_failed", "rate_limited", "overloaded", "internal":
			return true
		}
		return false
	}
	if closed, ok := errors.AsType[*client.CloseError](err); ok {
		return closed.Reconnect()
	}
	if _, ok := errors.AsType[*outputError](err); ok {
		return false
	}
	return true
}

// outputError is an error of writing to standard output.
type outputError struct{ err error }

func (e *outputError) Error() string { return "standard output: " + e.err.Error() }
func (e *outputError) Unwrap() error { return e.err }

// isLoopback reports whether only this host can reach a listener at the given host.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
