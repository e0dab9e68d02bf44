package embedded_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

var _ jetstream.Server = (*embedded.Server)(nil)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

func start(t *testing.T, cfg embedded.Config) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// A program that connects to a NATS links no server.
func TestClientsLinkNoServer(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "eventhub/outbox", "eventhub/jetstream", "eventhub/projections", "eventhub/facade").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	packages := strings.Fields(string(out))
	if len(packages) < 100 {
		t.Fatalf("only %d packages: %s", len(packages), out)
	}
	for _, p := range packages {
		// archive is the format of snapshots, and links nothing else.
		if strings.Contains(p, "nats-server") && !strings.HasSuffix(p, "/server/archive") || p == "eventhub/jetstream/embedded" {
			t.Errorf("%s is linked", p)
		}
	}
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	running := start(t, embedded.Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Token: "t"})
	taken := strings.TrimPrefix(running.ClientURL(), "nats://")
	used := t.TempDir()
	start(t, embedded.Config{DataDir: used})
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  embedded.Config
		is   error
		want string
	}{
		"no token":     {embedded.Config{Listen: "127.0.0.1:0"}, nil, "needs either a token or an auth callout to listen"},
		"no port":      {embedded.Config{Listen: "127.0.0.1", Token: "t"}, embedded.ErrListen, "give HOST:PORT"},
		"no number":    {embedded.Config{Listen: "127.0.0.1:http", Token: "t"}, embedded.ErrListen, "no number"},
		"taken":        {embedded.Config{Listen: taken, Token: "t"}, embedded.ErrListen, taken + ": address already in use"},
		"sync":         {embedded.Config{SyncInterval: -1}, nil, "positive"},
		"used":         {embedded.Config{DataDir: used}, embedded.ErrInUse, used + ": another hub is using it: stop that one"},
		"no directory": {embedded.Config{DataDir: filepath.Join(file, "data")}, embedded.ErrDataDir, "not a directory: choose"},
	} {
		s, err := embedded.Start(t.Context(), c.cfg)
		if err == nil {
			_ = s.Close()
			t.Errorf("%s: it starts", name)
			continue
		}
		if !strings.Contains(err.Error(), c.want) || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// A server in memory leaves nothing on disk, not even while it runs.
func TestServerInMemory(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: start(t, embedded.Config{}), Topics: []topics.Rule{{Pattern: "state", Compaction: true, Storage: topics.StorageFile}}})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := bus.Publish(t.Context(), "state", []byte("1"), jetstream.PublishOptions{Key: "k"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := bus.Group("state", "g").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	left := func(when string) {
		t.Helper()
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) > 0 {
			t.Errorf("%s: %v, %v", when, entries, err)
		}
	}
	left("it runs")
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}
	left("it has ended")
}

func TestServerThatListensWantsItsToken(t *testing.T) {
	s := start(t, embedded.Config{Listen: "127.0.0.1:0", Token: "t"})
	if nc, err := nats.Connect(s.ClientURL()); err == nil {
		nc.Close()
		t.Error("it takes clients without a token")
	}
	nc, err := nats.Connect(s.ClientURL(), nats.Token("t"))
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
}

// A bus that does not open closes its server.
func TestFailedOpenClosesTheServer(t *testing.T) {
	dir := t.TempDir()
	for _, cfg := range []jetstream.Config{{Replicas: 3}, {Limits: jetstream.Limits{MaxPayload: embedded.MaxMessage}}} {
		cfg.Server = start(t, embedded.Config{DataDir: dir}) // not, while the last one has it
		if _, err := jetstream.Open(t.Context(), cfg); err == nil {
			t.Errorf("%+v opens", cfg)
		}
	}
}
