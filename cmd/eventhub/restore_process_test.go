//go:build unix

package main

import (
	"archive/zip"
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

var migrateEvents = flag.Int("migrate.events", 2_000, "events that TestMigrate moves")

// tool runs a command in this process, and returns what it prints and its exit code.
func tool(ctx context.Context, args ...string) (out, errs string, code int) {
	var stdout, stderr bytes.Buffer
	code = run(ctx, args, streams{in: strings.NewReader(""), out: &stdout, err: &stderr})
	return stdout.String(), stderr.String(), code
}

// backupOf makes a backup of a hub.
func backupOf(t *testing.T, hub *node) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "hub.backup")
	out, errs, code := tool(t.Context(), "backup", file, "--ops-url="+hub.ops, "--token="+nodeToken)
	if code != 0 || !strings.Contains(out, "backed up ") {
		t.Fatalf("backup: %d\n%s%s", code, out, errs)
	}
	return file
}

// While clients publish, settle, and overwrite keys, a backup has all that was confirmed before it
// began, and no group misses anything: what a member has not settled by then comes again.
func TestBackupOfABusyHub(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	hub := startNode(t, append(redriveLimits, "--data="+filepath.Join(dir, "old"))...)
	const keys = 50
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	confirmed := make(map[string]bool) // orders
	settled := make(map[string]bool)   // by the group, with a copy published before
	states := make(map[string]int)
	var working sync.WaitGroup
	publisher := hub.dial()
	working.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if _, err := publisher.Publish(ctx, "orders", []byte(strconv.Itoa(i)), wire.PublishOptions{}); err != nil {
				return
			}
			mu.Lock()
			confirmed[strconv.Itoa(i)] = true
			mu.Unlock()
		}
	})
	overwriter := hub.dial()
	working.Go(func() {
		for i := 1; ctx.Err() == nil; i++ {
			key := strconv.Itoa(i % keys)
			if _, err := overwriter.Publish(ctx, "process.state", []byte(strconv.Itoa(i)), wire.PublishOptions{Key: key}); err != nil {
				return
			}
			mu.Lock()
			states[key] = i
			mu.Unlock()
		}
	})
	// a worker: what it has settled it has handed on before
	worker := hub.dial()
	events := subscribeTo(t, worker, "orders", "worker", wire.SubscribeOptions{From: "earliest"})
	working.Go(func() {
		for ctx.Err() == nil {
			select {
			case e := <-events.events:
				if _, err := worker.Publish(ctx, "done", e.Payload, wire.PublishOptions{}); err != nil {
					return
				}
				if err := e.AckWait(ctx); err != nil {
					return
				}
				mu.Lock()
				settled[string(e.Payload)] = true
				mu.Unlock()
			case <-ctx.Done():
			}
		}
	})
	eventually(t, "traffic", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(settled) > 200 && len(states) == keys
	})
	mu.Lock()
	before, statesBefore := len(confirmed), make(map[string]int)
	for key, v := range states {
		statesBefore[key] = v
	}
	mu.Unlock()
	file := backupOf(t, hub)
	cancel()
	working.Wait()
	hub.kill()

	data := filepath.Join(dir, "new")
	if out, errs, code := tool(t.Context(), "restore", file, "--data="+data); code != 0 {
		t.Fatalf("restore: %d\n%s%s", code, out, errs)
	}
	hub = startNode(t, "--data="+data)
	stored := make(map[string]bool)
	for _, payload := range payloadsOf(t, hub, "orders") {
		stored[payload] = true
	}
	for i := range before {
		if !stored[strconv.Itoa(i)] {
			t.Fatalf("order %d was confirmed before the backup, and is missing", i)
		}
	}
	for key, v := range statesBefore {
		text := hub.get("/snap/process.state/" + key)
		_, rest, _ := strings.Cut(text, `"payload":`)
		got, err := strconv.Atoi(rest[:strings.IndexAny(rest, ",}")])
		if err != nil || got < v {
			t.Errorf("key %s has %s, want %d or newer", key, text, v)
		}
	}
	// every order was handed on before, or comes again
	handed := make(map[string]bool)
	for _, payload := range payloadsOf(t, hub, "done") {
		handed[payload] = true
	}
	c := hub.dial()
	events = subscribeTo(t, c, "orders", "worker", wire.SubscribeOptions{MaxInFlight: 1000})
	publishTo(t, c, "orders", `"marker"`)
	for seen := false; !seen; {
		e := events.next()
		handed[string(e.Payload)] = true
		seen = string(e.Payload) == `"marker"`
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	// those that were refused or leased may come after the marker
	eventually(t, "all orders", func() bool {
		select {
		case e := <-events.events:
			handed[string(e.Payload)] = true
			_ = e.Ack()
		default:
		}
		for payload := range stored {
			if !handed[payload] {
				return false
			}
		}
		return true
	})
}

func payloadsOf(t *testing.T, hub *node, topic string) (payloads []string) {
	t.Helper()
	for line := range strings.Lines(hub.get("/export?topic=" + topic + "&ndjson=1")) {
		_, rest, found := strings.Cut(line, `"payload":`)
		if !found {
			t.Fatal(line)
		}
		payloads = append(payloads, rest[:strings.IndexAny(rest, ",}")])
	}
	return payloads
}

// middleOfAnEntry returns the place of a byte of the largest entry. Readers of zip files ignore
// some bytes between entries, such as a second copy of their times.
func middleOfAnEntry(t *testing.T, file []byte) int64 {
	t.Helper()
	z, err := zip.NewReader(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	largest := slices.MaxFunc(z.File, func(a, b *zip.File) int { return cmp.Compare(a.CompressedSize64, b.CompressedSize64) })
	begin, err := largest.DataOffset()
	if err != nil {
		t.Fatal(err)
	}
	return begin + int64(largest.CompressedSize64/2)
}

// A command about a backup that cannot be carried out says what is wrong, and leaves nothing.
func TestBackupsThatFail(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	hub := startNode(t, "--data="+filepath.Join(dir, "old"))
	c := hub.dial()
	publishNumbers(t, c, "orders", 100)
	subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{From: "earliest"})
	file := backupOf(t, hub)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	put := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	damaged := bytes.Clone(text)
	damaged[middleOfAnEntry(t, text)] ^= 1
	full := filepath.Join(dir, "full")
	if err := os.MkdirAll(filepath.Join(full, "nats"), 0o700); err != nil {
		t.Fatal(err)
	}
	var newer bytes.Buffer
	z := zip.NewWriter(&newer)
	if w, err := z.Create("manifest.json"); err != nil {
		t.Fatal(err)
	} else if _, err := w.Write([]byte(`{"format":9}`)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	nats := runNATS(t)
	other := startNode(t, "--nats-url="+nats)
	other.terminate()
	ops := []string{"--ops-url=" + hub.ops, "--token=" + nodeToken}
	into := "--data=" + filepath.Join(dir, "into")
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"cut off", []string{"restore", put("cut", text[:len(text)/2]), into}, "is no backup, or was cut off"},
		{"damaged", []string{"restore", put("damaged", damaged), into}, "the file is damaged"},
		{"a newer format", []string{"restore", put("newer", newer.Bytes()), into}, "reads format 1; restore it with the version that made it"},
		{"no backup", []string{"restore", put("text", []byte("hello")), into}, "is no backup"},
		{"missing", []string{"restore", filepath.Join(dir, "missing"), into}, "no such file"},
		{"a full directory", []string{"restore", file, "--data=" + full}, "is not empty: it has nats"},
		{"a full NATS", []string{"restore", file, into, "--nats-url=" + nats}, "is not empty"},
		{"no NATS", []string{"restore", file, into, "--nats-url=nats://127.0.0.1:1"}, "check that the server runs"},
		{"an existing file", append([]string{"backup", file}, ops...), "choose another name"},
		{"no directory", append([]string{"backup", filepath.Join(dir, "none", "b")}, ops...), "no such file"},
		{"a token without rights", []string{"backup", filepath.Join(dir, "b"), ops[0], "--token=wrong"}, "set its token"},
		{"no hub", []string{"backup", filepath.Join(dir, "b"), "--ops-url=http://127.0.0.1:1", ops[1]}, "check that the hub runs"},
		{"a hub that runs", []string{"migrate", "--data=" + filepath.Join(dir, "old"), "--nats-url=" + runNATS(t)}, "another hub is using it"},
		{"nothing to migrate", []string{"migrate", into, "--nats-url=" + nats}, "is not that of a hub with NATS inside"},
		{"nowhere to migrate", []string{"migrate", "--data=" + filepath.Join(dir, "old")}, "the address of the new NATS is missing"},
	} {
		out, errs, code := tool(t.Context(), c.args...)
		if code == 0 || !strings.Contains(errs, c.want) || out != "" {
			t.Errorf("%s: exit code %d, %s%s", c.name, code, out, errs)
		}
	}
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if strings.Contains(n.Name(), ".part") || strings.Contains(n.Name(), "into") || n.Name() == "b" {
			t.Errorf("%s is left", n.Name())
		}
	}
	// a hub beside NATS is not backed up this way
	other = startNode(t, "--nats-url="+nats)
	if _, errs, code := tool(t.Context(), "backup", filepath.Join(dir, "c"), "--ops-url="+other.ops, ops[1]); code == 0 || !strings.Contains(errs, "nats account backup") {
		t.Errorf("a hub beside NATS: %d %s", code, errs)
	}
}

// A command that is interrupted, and a NATS that goes away in the middle of a restore, leave
// nothing behind, or what they leave is named.
func TestRestoreThatIsInterrupted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	data := filepath.Join(dir, "old")
	hub := startNode(t, "--data="+data)
	c := hub.dial()
	for i := range 40 {
		publishTo(t, c, "t"+strconv.Itoa(i), `"x"`)
	}
	file := backupOf(t, hub)
	hub.terminate()

	server := natstest.Start(t)
	store, err := jetstream.OpenStore(t.Context(), jetstream.Config{URL: server.URL()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	backup, err := jetstream.OpenBackup(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = backup.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	err = store.Restore(ctx, backup, jetstream.RestoreOptions{Progress: func(uint64, uint64) {
		if n++; n == 20 {
			cancel()
		}
	}})
	if err == nil || !strings.Contains(err.Error(), "nothing was restored") {
		t.Errorf("interrupted: %v", err)
	}
	if err := store.CheckEmpty(t.Context()); err != nil {
		t.Error(err)
	}
	n = 0
	ctx, cancel = context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = store.Restore(ctx, backup, jetstream.RestoreOptions{Progress: func(uint64, uint64) {
		if n++; n == 20 {
			server.Kill()
			time.AfterFunc(time.Second, cancel) // as somebody who loses patience
		}
	}})
	if err == nil || !strings.Contains(err.Error(), "nats stream rm") {
		t.Errorf("without NATS: %v", err)
	}
	server.Start()
	err = nil
	eventually(t, "NATS again", func() bool {
		err = store.CheckEmpty(t.Context())
		return err != nil && strings.Contains(err.Error(), "EVENTHUB_RESTORE")
	})
	if out, errs, code := tool(t.Context(), "serve", "--nats-url="+server.URL(), "--ws-port=0", "--http-port=0", "--ops-port=0", "--data="+filepath.Join(dir, "x")); code == 0 || !strings.Contains(errs, "a restore is running, or was killed") {
		t.Errorf("a hub beside half a restore: %d %s%s", code, out, errs)
	}
}

// A hub that is stopped moves to a NATS of its own with its groups, leases, delayed events and dead
// letters: each event comes once more to those who have not settled it.
func TestMigrate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	hub := startNode(t, append(redriveLimits, "--data="+data)...)
	c := hub.dial()
	n := *migrateEvents
	var wg sync.WaitGroup
	slots := make(chan struct{}, 1000)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if _, err := c.Publish(t.Context(), "orders", []byte(strconv.Itoa(i)), wire.PublishOptions{Key: strconv.Itoa(i % 100)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	events := subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{From: "earliest", MaxInFlight: 1000})
	done := make(map[string]bool)
	for range n / 2 {
		e := events.next()
		done[string(e.Payload)] = true
		if err := e.AckWait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	refused := events.next()
	if err := refused.Nack("later", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Publish(t.Context(), "late", []byte(`"late"`), wire.PublishOptions{DelayMS: 3_600_000, ID: "late"}); err != nil {
		t.Fatal(err)
	}
	hub.terminate()

	url := runNATS(t)
	began := time.Now()
	out, errs, code := tool(t.Context(), "migrate", "--data="+data, "--nats-url="+url)
	if code != 0 {
		t.Fatalf("migrate: %d\n%s%s", code, out, errs)
	}
	t.Logf("%s in %v", strings.TrimSpace(out), time.Since(began))
	hub = startNode(t, append(redriveLimits, "--data="+data, "--nats-url="+url)...)
	c = hub.dial()
	events = subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{MaxInFlight: 1000})
	for range n - n/2 {
		e := events.next()
		if done[string(e.Payload)] {
			t.Fatalf("event %s was settled before the move", e.Payload)
		}
		if e.ID == refused.ID && e.Attempt < 2 {
			t.Errorf("the event that was refused has attempt %d", e.Attempt)
		}
		done[string(e.Payload)] = true
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if len(done) != n {
		t.Errorf("the group got %d events, want %d", len(done), n)
	}
	events.onlyMarker(c, "orders")
	if out := fmt.Sprint(tool(t.Context(), "delayed", "list", "late", "--ops-url="+hub.ops, "--token="+nodeToken)); !strings.Contains(out, "late") {
		t.Errorf("delayed events: %s", out)
	}
	// what was moved stays where it was
	if _, errs, code := tool(t.Context(), "migrate", "--data="+data, "--nats-url="+url); code == 0 || !strings.Contains(errs, "is not empty") {
		t.Errorf("a second move: %d %s", code, errs)
	}
}
