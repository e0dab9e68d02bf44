//go:build unix

package main

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"

	"eventhub/outbox/pgtest"
)

// postgres is the PostgreSQL whose databases the tests share that do not stop it. It lives until
// all tests have ended.
var postgres struct {
	mu        sync.Mutex
	dsn       string
	end       func() error
	databases int
}

// database makes an empty database of the test's own, and returns its address.
func database(t *testing.T) (dsn string) {
	t.Helper()
	postgres.mu.Lock()
	defer postgres.mu.Unlock()
	if postgres.end == nil {
		dsn, end, err := pgtest.Temporary(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		postgres.dsn, postgres.end = dsn, end
	}
	db, err := sql.Open("pgx", postgres.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	postgres.databases++
	name := fmt.Sprint("test", postgres.databases)
	if _, err := db.ExecContext(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	return strings.Replace(postgres.dsn, "/postgres?", "/"+name+"?", 1)
}

// stopPostgres ends the server, if there is one.
func stopPostgres() error {
	postgres.mu.Lock()
	defer postgres.mu.Unlock()
	if postgres.end == nil {
		return nil
	}
	return postgres.end()
}
