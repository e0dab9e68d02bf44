//go:build unix

package main

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"eventhub/jetstream/embedded"
	"eventhub/jetstream/natstest"
)

// health runs `eventhub health` in an environment and returns its exit code and what it printed.
func health(t *testing.T, environ []string, flags ...string) (code int, out, errs string) {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path)
	cmd.Args = append([]string{"eventhub", "health"}, flags...)
	cmd.Env = append(append(os.Environ(), natstest.RaceEnv()), environ...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

// A hub whose NATS is away lives and is not ready. The command says why.
func TestHealthOfAHubWithoutNATS(t *testing.T) {
	t.Parallel()
	nats := natstest.Run(t)
	hub := startNode(t, "--nats-url="+nats.ClientURL())
	eventually(t, "the hub is ready", func() bool {
		code, _, _ := health(t, nil, "--ops-url="+hub.ops)
		return code == 0
	})
	embedded.Shutdown(nats)
	eventually(t, "the hub is not ready", func() bool {
		code, _, errs := health(t, nil, "--ops-url="+hub.ops)
		return code == 1 && errs == "eventhub: hub at "+hub.ops+" is not ready: bus: unavailable\n"
	})
	if code, out, errs := health(t, nil, "--ops-url="+hub.ops, "--live"); code != 0 || out != "ok\n" {
		t.Errorf("the hub does not live: %d %q %q", code, out, errs)
	}
}

// The environment of the hub is all that the command needs, also with TLS on the operations port.
func TestHealthOverTLS(t *testing.T) {
	t.Parallel()
	files := newPairFiles(t)
	hub := startNode(t, "--tls-cert="+files.cert, "--tls-key="+files.key, "--ops-tls")
	_, port, err := net.SplitHostPort(strings.TrimPrefix(hub.ops, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	environ := []string{"EVENTHUB_OPS_TLS=true", "EVENTHUB_OPS_BIND=0.0.0.0", "OPS_PORT=" + port}
	if code, out, errs := health(t, environ); code != 0 || out != "ok\n" {
		t.Errorf("%d %q %q", code, out, errs)
	}
	// An address that was given is an address to verify.
	if code, _, errs := health(t, environ, "--ops-url="+hub.ops); code != 1 || !strings.Contains(errs, "certificate") {
		t.Errorf("%d %q", code, errs)
	}
}

// A port that takes connections and does not answer is not healthy.
func TestHealthWithoutAnAnswer(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	at := "http://" + silent.Addr().String()
	if code, _, errs := health(t, nil, "--ops-url="+at, "--timeout=100ms"); code != 1 || errs != "eventhub: hub at "+at+": no answer within 100ms\n" {
		t.Errorf("%d %q", code, errs)
	}
}
