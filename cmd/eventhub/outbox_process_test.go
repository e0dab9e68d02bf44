//go:build unix

package main

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/outbox/pgtest"
	"eventhub/sdk/go/wire"
)

// call runs a command and returns what it prints.
func call(t *testing.T, args ...string) string {
	t.Helper()
	var out, log bytes.Buffer
	if code := run(t.Context(), args, streams{in: strings.NewReader(""), out: &out, err: &log}); code != 0 {
		t.Fatalf("%q ended with %d:\n%s", args, code, log.String())
	}
	return out.String()
}

// eventually waits until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// Rows of a PostgreSQL database become events: by the command, and by a hub, which survives the
// loss of its connections.
func TestOutboxInPostgres(t *testing.T) {
	t.Parallel()
	const table = "outbox_of_hub"
	dsn, nats := pgtest.Start(t), runNATS(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	exec := func(query string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	outbox := func(command string, flags ...string) string {
		t.Helper()
		return call(t, append([]string{"outbox", command, "--dsn=" + dsn, "--table=" + table}, flags...)...)
	}
	add := func(id string) {
		t.Helper()
		exec("INSERT INTO " + table + " (id, aggregatetype, aggregateid, payload) VALUES ('" + id + "', 'orders', 'k', '1')")
	}

	if got := outbox("migrate"); !strings.Contains(got, "from version 0 to ") {
		t.Errorf("migrate printed %q", got)
	}
	add("one")
	exec("BEGIN; INSERT INTO " + table + " (id, aggregatetype, payload) VALUES ('never', 'orders', '1'); ROLLBACK")
	if got := outbox("stats"); !strings.HasPrefix(got, `{"pending":1,"claimed":0,"error":0,`) {
		t.Errorf("stats printed %q", got)
	}
	if got := outbox("drain", "--nats-url="+nats); got != "published 1, failed 0, parked 0; 0 left\n" {
		t.Errorf("drain printed %q", got)
	}

	add("two")
	if got := call(t, "serve", "--check", "--outbox-dsn="+dsn, "--outbox-table="+table); strings.Contains(got, "would start and retry") {
		t.Errorf("the check of a hub whose outbox is there printed %s", got)
	}
	if got := call(t, "serve", "--check", "--outbox-dsn="+dsn, "--outbox-table=no_such", "--no-outbox-migrate"); !strings.Contains(got, "run eventhub outbox migrate (the hub would start and retry)") {
		t.Errorf("the check of a hub whose table is missing printed %s", got)
	}
	n := startNode(t, "--nats-url="+nats, "--outbox-dsn="+dsn, "--outbox-table="+table, "--no-outbox-migrate")
	events := subscribeTo(t, n.dial(), "orders", "g", wire.SubscribeOptions{From: "earliest"})
	wants := func(id string) {
		t.Helper()
		if e := events.next(); e.ID != id {
			t.Errorf("event %q came, want %q", e.ID, id)
		} else if err := e.Ack(); err != nil {
			t.Error(err)
		}
	}
	wants("one")
	wants("two")
	listens := func() bool {
		var n int
		query := "SELECT count(*) FROM pg_stat_activity WHERE (query LIKE 'LISTEN \"" + table + "\";%' OR query LIKE 'SELECT pg_try_advisory_lock%') AND datname = current_database()"
		return db.QueryRowContext(t.Context(), query).Scan(&n) == nil && n == 1
	}
	eventually(t, "the hub listens", listens)
	exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
	add("three")
	wants("three")
	eventually(t, "the hub listens again", listens)
	n.terminate()
	if got := outbox("list", "--status=sent"); strings.Count(got, "\n") != 3 || !strings.Contains(got, `"id":"three"`) {
		t.Errorf("list printed %q", got)
	}
	if got := outbox("purge", "--older-than=0s"); got != "3 deleted\n" {
		t.Errorf("purge printed %q", got)
	}
}

// Paths are taken as they are, though SQLite's driver wants them in a URL.
func TestOutboxFilesOfAnyName(t *testing.T) {
	for _, name := range []string{"a b.db", "a%20b#c&d.db", "ü:.db"} {
		path := filepath.Join(t.TempDir(), name)
		call(t, "outbox", "migrate", "--dsn=sqlite:"+path)
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
		if got := call(t, "outbox", "migrate", "--dsn=sqlite://"+path); !strings.Contains(got, " already") {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// What cannot be read says how it should be, and shows nothing of what was given.
func TestBadDSNs(t *testing.T) {
	for _, dsn := range []string{
		"postgres://u:se/cret@h/db", "postgres://u:se cret@h/db", "postgres://u:se%zzcret@h/db", "postgres:u:secret@h", "postgres://u:secret@h:port/db",
		"postgresql://u:secret@h/db?sslmode=cret", "mysql://u:secret@h/db", "host=h password=secret", "secret", "sqlite:", "sqlite::memory:", "sqlite:a?secret=1",
	} {
		_, err := parseOutbox(dsn)
		if err == nil || strings.Contains(err.Error(), "cret") {
			t.Errorf("%s: %v", dsn, err)
		}
		if errors.Unwrap(err) != nil {
			t.Errorf("%s: the cause can be reached: %v", dsn, errors.Unwrap(err))
		}
	}
}

// What POST /outbox has answered with 202 is published, once, though the hub is killed meanwhile.
func TestKilledHubKeepsItsOutbox(t *testing.T) {
	t.Parallel()
	data := "--data=" + t.TempDir()
	n := startNode(t, data)
	var mu sync.Mutex
	accepted := make(map[string]int)
	const clients, enough = 8, 100
	reached := make(chan struct{})
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			for ctx := t.Context(); ; {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, n.http+"/outbox/orders", strings.NewReader("1"))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Authorization", "Bearer "+nodeToken)
				req.Header.Set("Event-Key", strconv.Itoa(i))
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					return // it is killed
				}
				var got struct{ ID string }
				err = json.NewDecoder(resp.Body).Decode(&got)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusAccepted {
					return
				}
				mu.Lock()
				if accepted[got.ID]++; len(accepted) == enough {
					close(reached)
				}
				mu.Unlock()
			}
		})
	}
	<-reached
	n.kill()
	all.Wait()

	n = startNode(t, data)
	events := subscribeTo(t, n.dial(), "orders", "g", wire.SubscribeOptions{From: "earliest"})
	for left := len(accepted); left > 0; {
		e := events.next()
		seen, mine := accepted[e.ID]
		switch {
		case seen == 1:
			accepted[e.ID]++
			left--
		case mine:
			t.Fatalf("event %s came twice", e.ID)
		}
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
}
