//go:build unix

package main

import (
	"database/sql"
	"flag"
	"os"
	"testing"
	"time"

	"eventhub/outbox/pgtest"
)

var migrateFor = flag.Duration("migrate.for", 4*time.Second, "how long a hub tries to migrate beside writers")

// While a long transaction, such as a dump, keeps a hub from migrating the table, writers continue:
// the attempts of the hub do not hold them up for most of the time. Only the machine holds up a
// writer of another table.
func TestHubThatCannotMigrateYetLetsWritersWork(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Start(t)
	db, err := sql.Open("pgx", dsn+"&default_query_exec_mode=simple_protocol")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	script, err := os.ReadFile("../../outbox/testdata/version2.postgres.sql")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), string(script)); err != nil {
		t.Fatal(err)
	}
	dump, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dump.Rollback() }()
	if _, err := dump.ExecContext(t.Context(), "SELECT COUNT(*) FROM outbox"); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE other (id text)"); err != nil {
		t.Fatal(err)
	}
	n := startNode(t, "--outbox-dsn="+dsn)
	during := *migrateFor
	const tells = 250 * time.Millisecond
	var waited, longest, machine time.Duration
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < during; <-tick.C {
		wrote := time.Now()
		if _, err := db.ExecContext(t.Context(), "INSERT INTO other (id) VALUES (gen_random_uuid()::text)"); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(wrote); took > tells {
			machine += took
		}
		wrote = time.Now()
		if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload) VALUES (gen_random_uuid()::text, 'orders', '1')"); err != nil {
			t.Fatal(err)
		}
		took := time.Since(wrote)
		if longest = max(longest, took); took > tells {
			waited += took
		}
	}
	t.Logf("of %v, a writer waited for %v, for %v at most at a time, and one of another table for %v", during, waited, longest, machine)
	if waited > (during-machine)/2+machine {
		t.Errorf("of %v, a writer waited for %v, and one of another table for %v", during, waited, machine)
	}
	n.terminate()
}
