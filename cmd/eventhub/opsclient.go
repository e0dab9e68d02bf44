package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Bounds of a request to the operations port.
const (
	// opsWait is the timeout of a request, unless the command has a shorter one.
	opsWait = 30 * time.Second
	// maxOpsAnswer is the number of bytes that are read of an answer.
	maxOpsAnswer = 16 << 20
)

// opsFlags select the operations port that a command asks, and the credential.
type opsFlags struct {
	credentialFlags

	OpsURL string `name:"ops-url" env:"EVENTHUB_OPS_URL" help:"URL of the hub's operations port. Default: OPS_PORT of this host, or http://127.0.0.1:8082."`
	// OpsPort is the port of a hub that is started in the same environment.
	OpsPort uint16 `env:"OPS_PORT" hidden:"" default:"8082"`
}

// opsHub asks the operations port of a hub.
type opsHub struct {
	base   *url.URL
	token  string
	client *http.Client
}

// hub returns the hub of the flags. The caller must close it.
func (f opsFlags) hub() (*opsHub, error) {
	at := cmp.Or(f.OpsURL, "http://127.0.0.1:"+strconv.Itoa(int(f.OpsPort)))
	u, err := checkURL(at, "http", "https")
	if err != nil {
		return nil, fmt.Errorf("invalid address of the hub: %w; use http://HOST:PORT or https://HOST:PORT (--ops-url, EVENTHUB_OPS_URL; OPS_PORT)", err)
	}
	token, err := f.find(u)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout, ResponseHeaderTimeout: answerWait,
	}
	return &opsHub{base: u, token: token, client: &http.Client{Transport: transport}}, nil
}

// close closes idle connections.
func (h *opsHub) close() { h.client.CloseIdleConnections() }

// opsCall is a request to the operations port.
type opsCall struct {
	method string
	// path has the segments of the path, not encoded.
	path  []string
	query url.Values
	// body, if not nil, is sent as JSON.
	body any
	// needs says what the token must grant, such as "admin on orders.placed".
	needs string
}

// call asks the hub, and stores the answer in the value that into points to. A nil into ignores the
// answer. An error of the hub wraps an *httpError.
func (h *opsHub) call(ctx context.Context, c opsCall, into any) error {
	ctx, cancel := context.WithTimeout(ctx, opsWait)
	defer cancel()
	res, err := h.send(ctx, c, "application/json")
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read-only
	text, err := io.ReadAll(io.LimitReader(res.Body, maxOpsAnswer+1))
	if err != nil {
		return fmt.Errorf("hub at %s: the answer was cut off: %w", h.base.Redacted(), reason(err))
	}
	if len(text) > maxOpsAnswer {
		return fmt.Errorf("hub at %s: the answer has more than the %d bytes that are read; ask for less, or ask with curl", h.base.Redacted(), maxOpsAnswer)
	}
	if into == nil || len(text) == 0 {
		return nil
	}
	return h.read(text, into)
}

// lines asks the hub for an answer in lines, which takes as long as it takes, and calls each for
// every line.
func (h *opsHub) lines(ctx context.Context, c opsCall, each func(line []byte) error) error {
	res, err := h.send(ctx, c, "application/x-ndjson")
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read-only
	in := bufio.NewScanner(res.Body)
	for in.Scan() {
		if err := each(in.Bytes()); err != nil {
			return err
		}
	}
	switch err := in.Err(); {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("hub at %s: the answer was cut off: %w", h.base.Redacted(), reason(err))
	}
	return nil
}

// read decodes an answer.
func (h *opsHub) read(text []byte, into any) error {
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("hub at %s: the answer cannot be read: %w; is this the operations port of a hub of this version (--ops-url, EVENTHUB_OPS_URL)?", h.base.Redacted(), err)
	}
	return nil
}

// send asks the hub, and returns an answer that is no error. The caller closes its body.
func (h *opsHub) send(ctx context.Context, c opsCall, accept string) (*http.Response, error) {
	at := h.base.JoinPath(escaped(c.path)...)
	at.RawQuery = c.query.Encode()
	var body io.Reader = http.NoBody
	if c.body != nil {
		text, err := json.Marshal(c.body)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, c.method, at.String(), body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+h.token)
	req.Header.Set("Accept", accept)
	res, err := h.client.Do(req)
	if err != nil {
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("hub at %s: %w; check that the hub runs (eventhub serve) and that the address is right (--ops-url, EVENTHUB_OPS_URL)", h.base.Redacted(), reason(err))
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }() // read-only
	text, err := io.ReadAll(io.LimitReader(res.Body, maxOpsAnswer))
	if err != nil {
		return nil, fmt.Errorf("hub at %s: the answer was cut off: %w", h.base.Redacted(), reason(err))
	}
	return nil, h.refused(res.StatusCode, text, c.needs)
}

// refused returns the error that an answer reports, with a hint.
func (h *opsHub) refused(status int, text []byte, needs string) error {
	var said struct{ Error, Code string }
	if json.Unmarshal(text, &said) != nil || said.Code == "" {
		return fmt.Errorf("hub at %s: unexpected answer with status %d; is this the operations port of a hub (--ops-url, EVENTHUB_OPS_URL)?", h.base.Redacted(), status)
	}
	err := &httpError{status, said.Code, strings.TrimSuffix(said.Error, ".")}
	switch {
	case status == http.StatusUnauthorized:
		return fmt.Errorf("hub at %s: %w; set its token (--token, EVENTHUB_TOKEN; WS_TOKEN)", h.base.Redacted(), err)
	case status == http.StatusForbidden && needs != "":
		return fmt.Errorf("hub at %s: %w; the token needs %s (--token, EVENTHUB_TOKEN)", h.base.Redacted(), err, needs)
	default:
		return fmt.Errorf("hub at %s: %w", h.base.Redacted(), err)
	}
}

// escaped returns path segments, percent-encoded. JoinPath would take segments of dots for
// directions.
func escaped(segments []string) []string {
	out := make([]string, len(segments))
	for i, s := range segments {
		if out[i] = url.PathEscape(s); s == "." || s == ".." {
			out[i] = strings.ReplaceAll(s, ".", "%2E")
		}
	}
	return out
}

// yesFlag answers the question of confirm.
type yesFlag struct {
	Yes bool `short:"y" help:"Do not ask."`
}

// confirm asks whether to do what cannot be undone. It returns nil for yes. what completes
// "eventhub is about to", such as "delete the group billing of orders.placed".
func (f yesFlag) confirm(std streams, what string) error {
	if f.Yes {
		return nil
	}
	_, _ = fmt.Fprintf(std.err, "eventhub: about to %s. Go on? [y/N] ", what)
	line, err := bufio.NewReader(io.LimitReader(std.in, 1<<10)).ReadString('\n')
	switch strings.ToLower(strings.TrimSpace(line)) {
	case "y", "yes":
		return nil
	case "":
		if err != nil {
			_, _ = fmt.Fprintln(std.err)
			return errors.New("nothing was changed, because nobody answered; add --yes to go on without a question")
		}
	}
	return errors.New("nothing was changed")
}
