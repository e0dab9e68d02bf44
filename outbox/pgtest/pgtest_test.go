package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestStart(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), Start(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	var one int
	if err := conn.QueryRow(t.Context(), "SELECT 1").Scan(&one); err != nil || one != 1 {
		t.Fatalf("got %d, %v", one, err)
	}
}

// What was committed is there when all processes were killed.
func TestKill(t *testing.T) {
	c := StartDurable(t)
	exec := func(query string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), c.DSN())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(t.Context()) }()
		if _, err := conn.Exec(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	exec("CREATE TABLE a (n INTEGER)")
	for range 2 {
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
		if conn, err := pgx.Connect(t.Context(), c.DSN()); err == nil {
			_ = conn.Close(t.Context())
			t.Fatal("it answers")
		}
		if err := c.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		exec("INSERT INTO a VALUES (1)")
	}
}
