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
