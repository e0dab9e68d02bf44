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
	"strings"
	"syscall"
	"time"

	"eventhub/facade/client"
)

// dialTimeout bounds one try to connect.
const dialTimeout = 10 * time.Second

// Between tries to connect again a command waits backoffFirst, doubled each time up to backoffMax,
// less up to a half by chance, so that the clients of a hub that restarts do not all come at the
// same moment.
const (
	backoffFirst = 100 * time.Millisecond
	backoffMax   = 5 * time.Second
)

// hubFlags say which hub a command talks to, and with which credential.
type hubFlags struct {
	URL       string `env:"EVENTHUB_URL" default:"ws://127.0.0.1:8090" help:"The hub's WebSocket."`
	Token     string `env:"WS_TOKEN" help:"A token that the hub takes. Default: for a hub on this host, the token file in its data directory."`
	TokenFile string `name:"token-file" env:"WS_TOKEN_FILE" placeholder:"FILE" help:"File that holds the token."`
	Data      string `env:"EVENTHUB_DATA" default:"./eventhub-data" help:"The data directory of the hub on this host."`
}

// dial connects to the hub. The caller closes the client.
func (f hubFlags) dial(ctx context.Context) (*client.Client, error) {
	token, err := f.token()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := client.Dial(ctx, f.URL, client.Options{Token: token})
	if err == nil {
		return c, nil
	}
	if refused, ok := errors.AsType[*client.Error](err); ok {
		return nil, fmt.Errorf("hub at %s: %s: give its token (--token, WS_TOKEN)", f.URL, strings.TrimSuffix(refused.Error(), "."))
	}
	if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, fmt.Errorf("hub at %s: %w: is it running (eventhub serve), and is the address right (--url, EVENTHUB_URL)?", f.URL, reason(err))
	}
	return nil, err
}

// reason is the part of a failed connection that people want to read.
func reason(err error) error {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns
	}
	return err
}

// token finds the credential. That of the hub on this host is not sent to another.
func (f hubFlags) token() (string, error) {
	u, err := url.Parse(f.URL)
	if err != nil || u.Host == "" || u.Scheme != "ws" && u.Scheme != "wss" {
		return "", fmt.Errorf("hub at %q: that is no address: give ws://HOST:PORT or wss://HOST:PORT (--url, EVENTHUB_URL)", f.URL)
	}
	if token, err := (tokenFlags{f.Token, f.TokenFile}).configured(); err != nil || token != "" {
		return token, err
	}
	if !isLoopback(u.Hostname()) {
		return "", fmt.Errorf("hub at %s: no token: give it with --token or WS_TOKEN", f.URL)
	}
	token, err := readToken(f.Data)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(f.Data); err != nil {
			return "", fmt.Errorf("no token: the data directory %s does not exist: run this where the hub runs, say where its data is (--data, EVENTHUB_DATA), or give the token (--token, WS_TOKEN)", f.Data)
		}
		return "", fmt.Errorf("no token: there is no file %s: say where the hub's data is (--data, EVENTHUB_DATA), or give the token (--token, WS_TOKEN)", filepath.Join(f.Data, tokenName))
	}
	return token, err
}

// session is one connection to the hub: it works on c until it is done, and returns nil then. What it returns else
// decides whether it is worth another connection.
type session func(ctx context.Context, c *client.Client) error

// keep runs sessions until one is done, ctx ends (both give nil), or trying again makes no sense. The first connection
// must succeed. say is told of the others.
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
			return nil //nolint:nilerr // being asked to end is no failure
		}
		if !passes(err) {
			return err
		}
		pause := wait/2 + rand.N(wait/2) //nolint:gosec // no secret
		say(fmt.Sprintf("%v; connecting again in %v", err, pause.Round(time.Millisecond)))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		wait = min(2*wait, backoffMax)
	}
}

// passes reports whether a failure may be over when the same is tried later.
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

// outputError is a failure to write what a command prints.
type outputError struct{ err error }

func (e *outputError) Error() string { return "standard output: " + e.err.Error() }
func (e *outputError) Unwrap() error { return e.err }

// isLoopback reports whether only this host reaches a listener there.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
