package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	eventhub "eventhub/sdk/go"
)

// dialTimeout is the timeout of one connection attempt.
const dialTimeout = 10 * time.Second

// Delay between connection attempts. It starts at backoffFirst and doubles up to backoffMax.
const (
	backoffFirst = 100 * time.Millisecond
	backoffMax   = 5 * time.Second
)

// endTimeout is how long a command that was interrupted lets publishes finish.
const endTimeout = 2 * time.Second

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

// connect connects to the hub. The first attempt must succeed. Afterwards the client reconnects,
// and say receives a message about each break. The caller must end the client.
func (f hubFlags) connect(ctx context.Context, say func(string)) (*eventhub.Client, error) {
	token, err := f.token()
	if err != nil {
		return nil, err
	}
	first, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	var connected atomic.Bool
	c, err := eventhub.Connect(first, f.address(), eventhub.Options{
		Token: token, AttemptTimeout: dialTimeout, MinPause: backoffFirst, MaxPause: backoffMax,
		BufferEvents: maxUnanswered,
		Retry:        time.Nanosecond, // the user decides about what the hub refuses
		OnState: func(s eventhub.State, err error) {
			switch {
			case s == eventhub.StateReady:
				connected.Store(true)
			case s == eventhub.StateWaiting && connected.Load():
				say(fmt.Sprintf("%v; reconnecting in at most %v", err, backoffMax))
			case s == eventhub.StateWaiting:
				giveUp(err)
			}
		},
	})
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		return nil, err
	}
	if why := context.Cause(first); why != nil {
		err = why
	}
	failure, ok := errors.AsType[*eventhub.Error](err)
	switch {
	case ok && failure.Code != eventhub.CodeConnectionLost && failure.Code != eventhub.CodeConnectTimeout && failure.Code != eventhub.CodeGaveUp:
		return nil, fmt.Errorf("connect to hub at %s: %s; set its token (EVENTHUB_TOKEN; --token, WS_TOKEN)", f.address(), strings.TrimSuffix(err.Error(), "."))
	default:
		return nil, fmt.Errorf("connect to hub at %s: %w; check that the hub runs (eventhub serve) and that the address is right (--url, EVENTHUB_URL)", f.address(), reason(err))
	}
}

// closeClient closes a client. After the end of ctx it waits no longer than endTimeout for
// publishes.
func closeClient(ctx context.Context, c *eventhub.Client) error {
	if ctx.Err() == nil {
		return c.Close() //nolint:contextcheck // has a limit of its own
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_ = c.Drain(ctx) // the command was interrupted
	return nil
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
