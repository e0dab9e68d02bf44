package examples

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"eventhub/jetstream/natstest"
)

const backupToken = "backup-token"

// askHub sends a request to the HTTP port of a hub, and returns the answer.
func askHub(t *testing.T, method, url, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+backupToken)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s %s %v", url, res.Status, text, err)
	}
	return string(text)
}

// TestBackupExample backs a hub up, starts a hub on what the backup has, and moves the first hub to
// a NATS server.
func TestBackupExample(t *testing.T) {
	t.Parallel()
	scripts, err := filepath.Abs("backup")
	if err != nil {
		t.Fatal(err)
	}
	dir, backups := t.TempDir(), t.TempDir()
	env := []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "WS_TOKEN=" + backupToken, "WS_PORT=0", "HTTP_PORT=0", "OPS_PORT=0"}
	serve := func(name string, args ...string) (hub *program, api, ops string) {
		t.Helper()
		hub = start(t, dir, env, name, args...)
		api = strings.Fields(hub.line("http "))[1]
		ops = strings.Fields(hub.line("ops "))[1]
		hub.line("token") // the last line
		return hub, api, ops
	}
	hub, api, ops := serve(filepath.Join(bin, "eventhub"), "serve")
	askHub(t, http.MethodPost, api+"/publish/orders", `"before"`)
	run := exec.CommandContext(t.Context(), filepath.Join(scripts, "backup.sh"), backups)
	run.Env = append(append(os.Environ(), env...), "EVENTHUB_OPS_URL="+ops)
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	askHub(t, http.MethodPost, api+"/publish/orders", `"after"`)
	hub.stop()
	files, err := filepath.Glob(filepath.Join(backups, "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("backups: %v, %v", files, err)
	}
	if out, err := call(t, dir, filepath.Join(bin, "eventhub"), "restore", files[0], "--data=restored"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	hub, api, _ = serve(filepath.Join(bin, "eventhub"), "serve", "--data=restored")
	if text := askHub(t, http.MethodGet, api+"/export?topic=orders&ndjson=1", ""); !strings.Contains(text, "before") || strings.Contains(text, "after") {
		t.Errorf("the backup has %s", text)
	}
	hub.stop()

	_, api, _ = serve(filepath.Join(scripts, "move.sh"), filepath.Join(dir, "eventhub-data"), natstest.Run(t).ClientURL())
	if text := askHub(t, http.MethodGet, api+"/export?topic=orders&ndjson=1", ""); !strings.Contains(text, "before") || !strings.Contains(text, "after") {
		t.Errorf("the new NATS has %s", text)
	}
}
