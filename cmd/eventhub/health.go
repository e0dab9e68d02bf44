package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"eventhub/ops"
)

// maxHealthAnswer is the number of bytes that are read of the answer to a probe.
const maxHealthAnswer = 64 << 10

// healthCmd is `eventhub health`.
type healthCmd struct {
	Live    bool          `help:"Ask only whether the process answers (/livez), not whether it can work (/readyz)."`
	Timeout time.Duration `default:"3s" help:"How long to wait for the answer, 1ms to 1m."`

	OpsURL string `name:"ops-url" env:"EVENTHUB_OPS_URL" help:"URL of the hub's operations port. Default: that of a hub with the same environment: EVENTHUB_OPS_BIND, OPS_PORT, and EVENTHUB_OPS_TLS."`
	// The operations port of a hub that is started in the same environment.
	OpsBind string `env:"EVENTHUB_OPS_BIND" hidden:"" default:"127.0.0.1"`
	OpsPort uint16 `env:"OPS_PORT" hidden:"" default:"8082"`
	OpsTLS  bool   `env:"EVENTHUB_OPS_TLS" hidden:""`
}

// Help explains the exit codes.
func (healthCmd) Help() string {
	return "The exit code is 0 if the hub is healthy, and 1 otherwise. The command needs no token."
}

// Run asks the hub once.
func (cmd *healthCmd) Run(ctx context.Context, std streams) error {
	if cmd.Timeout < time.Millisecond || cmd.Timeout > time.Minute {
		return fmt.Errorf("timeout %v: must be 1ms to 1m (--timeout)", cmd.Timeout)
	}
	at, err := checkURL(cmd.address(), "http", "https")
	if err != nil {
		return fmt.Errorf("invalid address of the hub: %w; use http://HOST:PORT or https://HOST:PORT (--ops-url, EVENTHUB_OPS_URL; EVENTHUB_OPS_BIND, OPS_PORT)", err)
	}
	ctx, cancel := context.WithTimeout(ctx, cmd.Timeout)
	defer cancel()
	status, answer, err := cmd.ask(ctx, at)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("hub at %s: no answer within %v", at.Redacted(), cmd.Timeout)
	}
	if err != nil {
		return fmt.Errorf("hub at %s: %w; check that the hub runs (eventhub serve) and that the address is right (--ops-url, EVENTHUB_OPS_URL)", at.Redacted(), reason(err))
	}
	if status == http.StatusOK {
		_, err := fmt.Fprintln(std.out, "ok")
		return err
	}
	var said struct{ Checks map[string]string }
	if json.Unmarshal(answer, &said) != nil || len(said.Checks) == 0 {
		return fmt.Errorf("hub at %s: unexpected answer with status %d; is this the operations port of a hub (--ops-url, EVENTHUB_OPS_URL)?", at.Redacted(), status)
	}
	var wrong []string
	for _, name := range slices.Sorted(maps.Keys(said.Checks)) {
		if state := said.Checks[name]; state != ops.PartOK {
			wrong = append(wrong, name+": "+state)
		}
	}
	return fmt.Errorf("hub at %s is not ready: %s", at.Redacted(), strings.Join(wrong, "; "))
}

// address returns the URL of the operations port.
func (cmd *healthCmd) address() string {
	if cmd.OpsURL != "" {
		return cmd.OpsURL
	}
	host, scheme := cmd.OpsBind, "http"
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	if cmd.OpsTLS {
		scheme = "https"
	}
	return scheme + "://" + net.JoinHostPort(host, strconv.Itoa(int(cmd.OpsPort)))
}

// ask sends a probe and returns the answer.
func (cmd *healthCmd) ask(ctx context.Context, at *url.URL) (status int, answer []byte, err error) {
	path := "/readyz"
	if cmd.Live {
		path = "/livez"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.JoinPath(path).String(), http.NoBody)
	if err != nil {
		return 0, nil, err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	if cmd.OpsURL == "" {
		// The certificate is for the name by which clients know the hub, which is not this address.
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // nothing secret is sent
	}
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = res.Body.Close() }() // read-only
	answer, err = io.ReadAll(io.LimitReader(res.Body, maxHealthAnswer))
	return res.StatusCode, answer, err
}
