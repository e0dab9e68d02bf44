package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// answerWait is how long the hub may take to begin an answer.
const answerWait = 30 * time.Second

// httpFlags select the hub that a command asks over HTTP.
type httpFlags struct {
	hubFlags

	HTTPURL string `name:"http-url" env:"EVENTHUB_HTTP_URL" help:"HTTP URL of the hub. Default: HTTP_PORT, or 8081, of the host of --url."`
	// HTTPPort is the port of a hub that is started in the same environment.
	HTTPPort uint16 `name:"http-port" env:"HTTP_PORT" hidden:"" default:"8081"`
}

// httpHub asks a hub over HTTP.
type httpHub struct {
	base   string
	token  string
	client *http.Client
}

// hub returns the hub of the flags. packed lets it compress its answers.
func (f httpFlags) hub(packed bool) (*httpHub, error) {
	base := f.HTTPURL
	if base == "" {
		ws, err := checkURL(f.address(), "ws", "wss")
		if err != nil {
			return nil, fmt.Errorf("invalid hub address %q; use ws://HOST:PORT or wss://HOST:PORT: %w (--url, EVENTHUB_URL; WS_PORT)", f.address(), err)
		}
		base = "http" + strings.TrimPrefix(ws.Scheme, "ws") + "://" + net.JoinHostPort(ws.Hostname(), strconv.Itoa(int(f.HTTPPort)))
	}
	u, err := checkURL(base, "http", "https")
	if err != nil {
		return nil, fmt.Errorf("invalid HTTP address %q; use http://HOST:PORT or https://HOST:PORT: %w (--http-url, EVENTHUB_HTTP_URL; HTTP_PORT)", base, err)
	}
	token, err := f.find(u)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout, ResponseHeaderTimeout: answerWait, DisableCompression: !packed,
		ReadBufferSize: 64 << 10,
	}
	return &httpHub{base: u.Scheme + "://" + u.Host, token: token, client: &http.Client{Transport: transport}}, nil
}

// close closes idle connections.
func (h *httpHub) close() { h.client.CloseIdleConnections() }

// httpError is an answer that is an error.
type httpError struct {
	status    int
	code, msg string
}

func (e *httpError) Error() string { return e.code + ": " + e.msg }

// get asks for a path and its query. The caller closes the body.
func (h *httpHub) get(ctx context.Context, method, path string, query url.Values) (*http.Response, error) {
	return h.send(ctx, method, path+"?"+query.Encode(), nil)
}

// send asks for a path, with a body that may be nil. The caller closes the body of the answer.
func (h *httpHub) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, h.base+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+h.token)
	res, err := h.client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("connect to hub at %s: %w; check that the hub runs (eventhub serve) and that the address is right (--http-url, EVENTHUB_HTTP_URL)", h.base, reason(err))
	}
	if res.StatusCode == http.StatusOK || res.StatusCode == http.StatusCreated {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	var said struct{ Error, Code string }
	if json.Unmarshal(text, &said) != nil || said.Code == "" {
		return nil, fmt.Errorf("hub at %s: unexpected answer with status %d; check the address (--http-url, EVENTHUB_HTTP_URL)", h.base, res.StatusCode)
	}
	return nil, &httpError{res.StatusCode, said.Code, said.Error}
}

// mayPass reports whether the same request may succeed later.
func mayPass(err error) bool {
	if refused, ok := errors.AsType[*httpError](err); ok {
		return refused.status == http.StatusTooManyRequests || refused.status == http.StatusServiceUnavailable
	}
	_, ok := errors.AsType[*outputError](err)
	return !ok
}

// backoff is the pause between tries, as hubFlags.keep has it.
type backoff struct{ next time.Duration }

// pause says why there is another try, and waits. It returns false when ctx ended.
func (b *backoff) pause(ctx context.Context, say func(string), why error) bool {
	wait := max(b.next, backoffFirst)
	b.next = min(2*wait, backoffMax)
	wait = wait/2 + rand.N(wait/2) //nolint:gosec // not security-relevant
	say(fmt.Sprintf("%v; going on in %v", why, wait.Round(time.Millisecond)))
	select {
	case <-ctx.Done():
		return false
	case <-time.After(wait):
		return true
	}
}
