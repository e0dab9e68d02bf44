package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

var ephemeralHubs = flag.Int("ephemeral.hubs", 12, "how many hubs TestEphemeralHubsOfKilledParents starts")

// parentName is the name of this test binary when it is the parent of an ephemeral hub.
const parentName = "ephemeral-parent"

// hubOfParent is the hub of ephemeralParent. The garbage collector closes the pipe to the standard
// input of a command that nothing refers to.
var hubOfParent *exec.Cmd

// ephemeralParent starts an ephemeral hub as a test in any language would, passes its line on, and
// waits for ever.
func ephemeralParent() {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	path, err := os.Executable()
	if err != nil {
		fail(err)
	}
	hub := exec.Command(path)
	hubOfParent = hub
	hub.Args = []string{"eventhub", "serve", "--ephemeral", "--log-level=warn"}
	hub.Stderr = os.Stderr
	if _, err := hub.StdinPipe(); err != nil { // it closes when this process ends
		fail(err)
	}
	out, err := hub.StdoutPipe()
	if err != nil {
		fail(err)
	}
	if err := hub.Start(); err != nil {
		fail(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		fail(err)
	}
	_, _ = os.Stdout.WriteString(line)
	select {}
}

// runEphemeral starts a program of this test binary whose standard error, which its children share,
// is the writer of a pipe: the pipe ends when the last of them has.
func runEphemeral(t *testing.T, dir string, args ...string) (cmd *exec.Cmd, told ephemeral, stdin io.Closer, gone <-chan string) {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command(path)
	cmd.Args, cmd.Dir = args, dir
	// What a developer has set is no matter of tests.
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, natstest.RaceEnv(), "WS_PORT=1", "EVENTHUB_DATA=data", "EVENTHUB_BIND=0.0.0.0", "EVENTHUB_NATS_LISTEN=0.0.0.0:1")
	log, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = writer
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = writer.Close()
	ended := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(log)
		ended <- string(text)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = log.Close()
	})
	late := time.AfterFunc(2*patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		decoder := json.NewDecoder(bytes.NewReader(line))
		decoder.DisallowUnknownFields()
		err = decoder.Decode(&told)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		t.Fatalf("%q: %v: %s", line, err, <-ended)
	}
	return cmd, told, in, ended
}

// getWith asks with a token, and returns the status.
func getWith(t *testing.T, at, token string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	return res.StatusCode
}

// An ephemeral hub says where it is in one line, works at all addresses, writes nothing, and ends
// with its input.
func TestEphemeralHub(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	empty := func(when string) {
		t.Helper()
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("%s: %v, %v", when, entries, err)
		}
	}
	cmd, told, stdin, gone := runEphemeral(t, dir, "eventhub", "serve", "--ephemeral")
	c, err := wire.Dial(t.Context(), told.WebSocket, wire.Options{Token: told.Token})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Publish(t.Context(), "process.state", []byte("1"), wire.PublishOptions{Key: "k"}); err != nil {
		t.Error(err)
	}
	nc, err := nats.Connect(told.NATS, nats.Token(told.Token))
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
	for _, at := range []string{told.HTTP + "/snap/process.state/k", told.Ops + "/readyz"} {
		if status := getWith(t, at, told.Token); status != 200 {
			t.Errorf("%s answers %d", at, status)
		}
	}
	empty("it runs")
	_ = stdin.Close()
	select {
	case log := <-gone:
		if !strings.Contains(log, "standard input is closed; the ephemeral hub ends") {
			t.Errorf("the log has no reason:\n%s", log)
		}
	case <-time.After(patience):
		t.Fatal("the hub does not end with its input")
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ends with %v", err)
	}
	empty("it has ended")
}

// Parents that are killed, all at once, leave no hub behind, and nothing on disk.
func TestEphemeralHubsOfKilledParents(t *testing.T) {
	dir, n := t.TempDir(), *ephemeralHubs
	parents := make([]*exec.Cmd, n)
	all := make([]ephemeral, n)
	gone := make([]<-chan string, n)
	began := time.Now()
	for i := range n {
		parents[i], all[i], _, gone[i] = runEphemeral(t, dir, parentName)
	}
	t.Logf("%d hubs run after %v", n, time.Since(began))
	tokens := make(map[string]bool)
	for _, h := range all {
		tokens[h.Token] = true
		if status := getWith(t, h.Ops+"/readyz", h.Token); status != 200 {
			t.Errorf("%s answers %d", h.Ops, status)
		}
	}
	if len(tokens) != n {
		t.Errorf("%d hubs have %d tokens", n, len(tokens))
	}
	began = time.Now()
	for _, p := range parents {
		if err := p.Process.Kill(); err != nil {
			t.Error(err)
		}
	}
	late, left := time.After(2*patience), 0
	for i, h := range all {
		select {
		case <-gone[i]:
		case <-late:
			left++
			late = time.After(time.Millisecond)
			continue
		}
		for _, at := range []string{h.WebSocket, h.HTTP, h.Ops, h.NATS} {
			u, err := url.Parse(at)
			if err != nil {
				t.Fatal(err)
			}
			if conn, err := net.Dial("tcp", u.Host); err == nil {
				_ = conn.Close()
				t.Errorf("somebody listens at %s", at)
			}
		}
	}
	t.Logf("%d of %d hubs are left; the last ended %v after the kill", left, n, time.Since(began))
	if left > 0 {
		t.Errorf("%d hubs are left", left)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("they left %v, %v", entries, err)
	}
}

// An ephemeral hub takes no row out of a database: its events are gone with it, and a developer's
// environment may name an outbox that is in use.
func TestEphemeralHubLeavesDatabasesAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shop.db")
	dsn := "sqlite:" + path
	call(t, "outbox", "migrate", "--dsn="+dsn)
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ('one', 'orders', 'k', '1')")
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	waiting := func() bool { return strings.HasPrefix(call(t, "outbox", "stats", "--dsn="+dsn), `{"pending":1,`) }
	if !waiting() {
		t.Fatal("there is no row to begin with")
	}
	t.Setenv("OUTBOX_DSN", dsn)
	in, end := io.Pipe()
	var out, log bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- run(context.Background(), []string{"serve", "--ephemeral"}, streams{in: in, out: &out, err: &log})
	}()
	code := -1
	eventually(t, "the hub refuses, or takes the row", func() bool {
		select {
		case code = <-ended:
			return true
		default:
			return !waiting()
		}
	})
	_ = end.Close()
	if code < 0 {
		code = <-ended
	}
	if !waiting() {
		t.Error("the row was published to a hub that is gone")
	}
	if code != 1 || out.Len() > 0 || !strings.Contains(log.String(), "OUTBOX_DSN") {
		t.Errorf("the hub ended with %d and printed %q, %s", code, out.String(), log.String())
	}
}

// The reason is said when the input is closed already, as with </dev/null: nothing is wrong with
// NATS.
func TestEphemeralHubWithoutInput(t *testing.T) {
	t.Parallel()
	var out, log bytes.Buffer
	code := run(t.Context(), []string{"serve", "--ephemeral"}, streams{in: strings.NewReader(""), out: &out, err: &log})
	if code == 0 && out.Len() > 0 {
		return // the hub was ready before the end of the input was noticed
	}
	if code != 1 || !strings.Contains(log.String(), "eventhub: standard input") || strings.Contains(log.String(), "JetStream") {
		t.Errorf("it ended with %d:\n%s", code, log.String())
	}
}
