//go:build unix

package main

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"eventhub/sdk/go/wire"
)

// tar runs the commands of docs/operations.md that save and restore the data of a hub.
func tar(t *testing.T, verb, archive, data string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "\ntar "+verb+" ")
	line, _, _ := strings.Cut(rest, "\n")
	if !found {
		t.Fatalf("docs/operations.md has no tar %s", verb)
	}
	script := "tar " + verb + " " + strings.NewReplacer("eventhub.tar.gz", archive, "/var/lib/eventhub", data).Replace(line)
	if out, err := exec.CommandContext(t.Context(), "sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// get asks the hub over HTTP.
func (n *node) get(path string) string {
	n.t.Helper()
	req, err := http.NewRequestWithContext(n.t.Context(), http.MethodGet, n.http+path, http.NoBody)
	if err != nil {
		n.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+nodeToken)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		n.t.Fatalf("%s: %s %s %v", path, resp.Status, body, err)
	}
	return string(body)
}

// A hub that is started on a restored copy has the events, the latest records, and the positions
// of groups that the copy has. What came later is gone, and what was acknowledged later comes
// again.
func TestRestoreFromABackup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	data, archive := filepath.Join(dir, "data"), filepath.Join(dir, "backup")
	hub := startNode(t, "--data="+data)
	c := hub.dial()
	publishNumbers(t, c, "orders", 10)
	events := subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{From: "earliest"})
	ackAll(t, events.take(10)[:4])
	if _, err := c.Publish(t.Context(), "process.state", []byte(`"old"`), wire.PublishOptions{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	hub.terminate()
	tar(t, "--create", archive, data)

	hub = startNode(t, "--data="+data)
	c = hub.dial()
	events = subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{})
	ackAll(t, events.take(6))
	publishTo(t, c, "orders", `"later"`)
	if _, err := c.Publish(t.Context(), "process.state", []byte(`"new"`), wire.PublishOptions{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	hub.terminate()

	if err := os.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	tar(t, "--extract", archive, data)
	hub = startNode(t, "--data="+data)
	if text := hub.get("/export?topic=orders&ndjson=1"); strings.Count(text, "\n") != 10 || strings.Contains(text, "later") {
		t.Errorf("the restored topic has %s", text)
	}
	if text := hub.get("/snap/process.state/k"); !strings.Contains(text, `"old"`) {
		t.Errorf("the latest record is %s", text)
	}
	c = hub.dial()
	events = subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{})
	for i, e := range events.take(6) {
		if want := string(rune('4' + i)); string(e.Payload) != want {
			t.Errorf("event %d of the group is %s, want %s", i, e.Payload, want)
		}
		if err := e.Ack(); err != nil {
			t.Error(err)
		}
	}
	events.onlyMarker(c, "orders")
}
