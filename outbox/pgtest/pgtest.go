// Package pgtest gives tests a PostgreSQL of their own: a private cluster, made from the installed binaries, in a temporary
// directory, reached over a socket there.
package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// startWait bounds how long a cluster may take to start.
const startWait = 60 * time.Second

// Start starts a cluster for the time of the test and returns its address. With EVENTHUB_TEST_POSTGRES set, that address is
// returned instead, of a database that the tests may do with as they like. A test without a PostgreSQL fails.
func Start(tb testing.TB) (dsn string) {
	tb.Helper()
	if dsn := os.Getenv("EVENTHUB_TEST_POSTGRES"); dsn != "" {
		return dsn
	}
	c, err := start(tb.Context())
	if err != nil {
		tb.Fatalf("PostgreSQL: %v: install it (apt-get install postgresql), or set EVENTHUB_TEST_POSTGRES to the address of a database for tests", err)
	}
	tb.Cleanup(func() {
		if err := c.stop(); err != nil {
			tb.Errorf("PostgreSQL: %v", err)
		}
	})
	return c.dsn()
}

// cluster is a running server.
type cluster struct {
	dir string
	cmd *exec.Cmd
	log bytes.Buffer
}

func (c *cluster) dsn() string { return "postgres:///postgres?user=eventhub&host=" + c.dir }

func start(ctx context.Context) (*cluster, error) {
	initdb, err := binary("initdb")
	if err != nil {
		return nil, err
	}
	postgres, err := binary("postgres")
	if err != nil {
		return nil, err
	}
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	// Not tb.TempDir: the path of a socket may have about 100 bytes.
	dir, err := os.MkdirTemp("", "pg")
	if err != nil {
		return nil, err
	}
	c := &cluster{dir: dir}
	if err := c.run(ctx, initdb, postgres, cred); err != nil {
		return nil, errors.Join(err, c.stop())
	}
	return c, nil
}

func (c *cluster) run(ctx context.Context, initdb, postgres string, cred *syscall.Credential) error {
	if cred != nil {
		if err := os.Chown(c.dir, int(cred.Uid), int(cred.Gid)); err != nil {
			return err
		}
	}
	data := filepath.Join(c.dir, "data")
	cmd := exec.CommandContext(ctx, initdb, "-D", data, "-U", "eventhub", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C") //nolint:gosec // a fixed program
	cmd.Dir, cmd.SysProcAttr = c.dir, &syscall.SysProcAttr{Credential: cred}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	c.cmd = exec.Command(postgres, "-D", data, "-c", "listen_addresses=", "-c", "unix_socket_directories="+c.dir, "-c", "fsync=off") //nolint:gosec,noctx // a fixed program; stop ends it
	c.cmd.Dir, c.cmd.SysProcAttr = c.dir, &syscall.SysProcAttr{Credential: cred}
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	if err := c.cmd.Start(); err != nil {
		return err
	}
	return c.await(ctx)
}

// await waits until the server answers.
func (c *cluster) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, c.dsn())
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w", err)
		}
	}
}

// stop ends the server, and removes what it had.
func (c *cluster) stop() error {
	if c.cmd != nil && c.cmd.Process != nil {
		_ = c.cmd.Process.Signal(syscall.SIGINT) // fast shutdown; one that has ended is no error
		_ = c.cmd.Wait()
	}
	return os.RemoveAll(c.dir)
}

// binary finds a program of PostgreSQL: Debian keeps those of the server out of the path.
func binary(name string) (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if len(found) > 0 {
		slices.Sort(found)
		return found[len(found)-1], nil
	}
	return exec.LookPath(name)
}

// unprivileged is the user to run as: the server refuses to be root.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("there is no user postgres or nobody to run the server as")
}
