package pgtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// helper is what TestClusterEndsWithItsProcess starts and kills.
const helper = "PGTEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helper) == "" {
		os.Exit(m.Run())
	}
	dsn, _, err := Temporary(context.Background())
	if err != nil {
		panic(err)
	}
	fmt.Println(dsn)
	<-time.After(startWait) // it is killed before
}

// Tests have databases of their own, which are empty at first and gone at the end.
func TestStart(t *testing.T) {
	var addresses []string
	t.Run("databases", func(t *testing.T) {
		for range 2 {
			address := Start(t)
			addresses = append(addresses, address)
			conn, err := pgx.Connect(t.Context(), address)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close(t.Context()) }()
			if _, err := conn.Exec(t.Context(), "CREATE TABLE a (n INTEGER)"); err != nil {
				t.Errorf("the database is not empty: %v", err)
			}
		}
	})
	for _, address := range addresses {
		if conn, err := pgx.Connect(t.Context(), address); err == nil {
			_ = conn.Close(t.Context())
			t.Error("it is there after the test")
		}
	}
}

// The shared cluster ends with the process that started it, even when that is killed, and leaves
// nothing behind.
func TestClusterEndsWithItsProcess(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helper+"=1", "EVENTHUB_TEST_POSTGRES=")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	_, dir, found := strings.Cut(strings.TrimSpace(line), "host=")
	if err != nil || !found {
		t.Fatalf("it said %q, %v", line, err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(startWait); ; {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s is still there", dir)
		}
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
