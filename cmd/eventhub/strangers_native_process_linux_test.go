package main

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
)

// TestStrangersAtTheNATSListener has strangers connect, say nothing, and stay, far more than may.
// They take one descriptor each, displace one another only, and clients with a token come and go
// on.
func TestStrangersAtTheNATSListener(t *testing.T) {
	t.Parallel()
	const strangers, flood = 100, 1000
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--limit-unauthenticated="+strconv.Itoa(strangers))
	files := func() int {
		t.Helper()
		open, err := os.ReadDir("/proc/" + strconv.Itoa(hub.cmd.Process.Pid) + "/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(open)
	}
	early, _ := dialNative(t, hub.nats, nodeToken)
	publishTo(t, hub.dial(), "load", `1`)
	before := files()
	for i := range flood {
		conn, err := net.Dial("tcp", strings.TrimPrefix(hub.nats, "nats://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if i%400 != 399 {
			continue
		}
		late, _ := dialNative(t, hub.nats, nodeToken)
		if err := late.FlushTimeout(patience); err != nil {
			t.Fatalf("after %d strangers: %v", i, err)
		}
		late.Close()
	}
	// A quarter of them may come from one address. Some descriptors are the hub's own.
	waitFor(t, "a few strangers are left", func() bool { return files() <= before+strangers/4+20 })
	if err := early.FlushTimeout(patience); err != nil || early.Stats().Reconnects > 0 {
		t.Errorf("the client that came before: %v, %d reconnects", err, early.Stats().Reconnects)
	}
	waitFor(t, "the strangers count", func() bool {
		return metricOf(t, hub, `eventhub_limit_reached_total{limit="native_strangers"}`) >= flood-strangers/4-1
	})
}
