package pgtest

import (
	"strings"
	"testing"
)

func TestInDatabase(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres:///postgres?user=u&host=/tmp/pg": "postgres:///x?user=u&host=/tmp/pg",
		"postgres://u:p@db:5432/a?sslmode=disable": "postgres://u:p@db:5432/x?sslmode=disable",
		"host=db user=u dbname=a":                  "host=db user=u dbname=a dbname=x",
	} {
		if got, err := inDatabase(dsn, "x"); got != want || err != nil {
			t.Errorf("%s: got %q, %v", dsn, got, err)
		}
	}
	if _, err := inDatabase("postgres://a b", "x"); err == nil {
		t.Error("a wrong address was taken")
	}
}

func TestLogOfAServerElsewhere(t *testing.T) {
	s := new(server)
	if n := s.logSize(); n != 0 {
		t.Errorf("its log has %d bytes", n)
	}
	if got := string(s.logSince(0)); !strings.Contains(got, "no such file") {
		t.Errorf("got %q", got)
	}
}
