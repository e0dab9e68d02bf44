// Package pgtest gives each test a PostgreSQL database of its own. It runs the installed binaries
// on a temporary directory and listens on a Unix socket in that directory.
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
	psutil "github.com/shirou/gopsutil/v4/process"
)

// startWait is the timeout for starting or killing a cluster.
const startWait = 60 * time.Second

// Start makes an empty database that lives as long as the test and returns its address. The tests
// of a process share one cluster, which does not sync commits to disk. If EVENTHUB_TEST_POSTGRES is
// set, Start makes the database on the server at that address instead. Without PostgreSQL, the test
// fails.
func Start(tb testing.TB) (dsn string) {
	tb.Helper()
	s, err := sharedServer(tb.Context())
	if err != nil {
		tb.Fatalf("PostgreSQL: %v; install it (apt-get install postgresql), or set EVENTHUB_TEST_POSTGRES to the address of a test database", err)
	}
	said := s.logSize()
	dsn, end, err := s.database(tb.Context())
	if err != nil {
		tb.Fatalf("PostgreSQL: %v", err)
	}
	tb.Cleanup(func() {
		if err := end(); err != nil {
			tb.Errorf("PostgreSQL: %v", err)
		}
		if tb.Failed() {
			tb.Logf("PostgreSQL said meanwhile:\n%s", s.logSince(said))
		}
	})
	return dsn
}

// StartDurable starts a cluster that lives as long as the test and, unlike the cluster of Start,
// syncs commits to disk. It is always private, even if EVENTHUB_TEST_POSTGRES is set, so the test
// may kill it.
func StartDurable(tb testing.TB) *Cluster {
	tb.Helper()
	return begin(tb, "on")
}

// Temporary makes a database as Start does, for an example, which has no testing.TB. The database
// ends with end.
func Temporary(ctx context.Context) (dsn string, end func() error, err error) {
	s, err := sharedServer(ctx)
	if err != nil {
		return "", nil, fmt.Errorf("PostgreSQL: %w; install it (apt-get install postgresql)", err)
	}
	return s.database(ctx)
}

func begin(tb testing.TB, fsync string) *Cluster {
	tb.Helper()
	c, err := start(tb.Context(), fsync)
	if err != nil {
		tb.Fatalf("PostgreSQL: %v; install it (apt-get install postgresql), or set EVENTHUB_TEST_POSTGRES to the address of a test database", err)
	}
	tb.Cleanup(func() {
		if err := c.stop(); err != nil {
			tb.Errorf("PostgreSQL: %v", err)
		}
		if tb.Failed() {
			tb.Logf("PostgreSQL said:\n%s", c.log.Bytes())
		}
	})
	return c
}

// Cluster is a private PostgreSQL server of one test. Its methods must not be called concurrently.
type Cluster struct {
	dir   string
	fsync string
	cred  *syscall.Credential
	cmd   *exec.Cmd
	log   bytes.Buffer
}

// DSN returns the server's address, which survives a restart.
func (c *Cluster) DSN() string { return "postgres:///postgres?user=eventhub&host=" + c.dir }

func start(ctx context.Context, fsync string) (*Cluster, error) {
	c, err := prepare(ctx)
	if err != nil {
		return nil, err
	}
	c.fsync = fsync
	if err := c.Restart(ctx); err != nil {
		return nil, errors.Join(err, c.stop())
	}
	return c, nil
}

// prepare makes the directory of a cluster, without a server.
func prepare(ctx context.Context) (*Cluster, error) {
	initdb, err := binary("initdb")
	if err != nil {
		return nil, err
	}
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	// tb.TempDir is unsuitable: the path of a Unix socket is limited to about 100 bytes.
	dir, err := os.MkdirTemp("", "pg")
	if err != nil {
		return nil, err
	}
	c := &Cluster{dir: dir, cred: cred}
	if err := c.init(ctx, initdb); err != nil {
		return nil, errors.Join(err, c.stop())
	}
	return c, nil
}

func (c *Cluster) init(ctx context.Context, initdb string) error {
	if c.cred != nil {
		if err := os.Chown(c.dir, int(c.cred.Uid), int(c.cred.Gid)); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, initdb, "-D", c.data(), "-U", "eventhub", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C") //nolint:gosec // a fixed program
	cmd.Dir, cmd.SysProcAttr = c.dir, &syscall.SysProcAttr{Credential: c.cred}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	return nil
}

func (c *Cluster) data() string { return filepath.Join(c.dir, "data") }

// serve starts the server on the existing data directory and waits until it answers.
func (c *Cluster) serve(ctx context.Context, postgres string) error {
	c.cmd = exec.Command(postgres, "-D", c.data(), "-c", "listen_addresses=", "-c", "unix_socket_directories="+c.dir, "-c", "fsync="+c.fsync) //nolint:gosec,noctx // a fixed program; stop ends it
	c.cmd.Dir, c.cmd.SysProcAttr = c.dir, &syscall.SysProcAttr{Credential: c.cred}
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	if err := c.cmd.Start(); err != nil {
		return err
	}
	return c.await(ctx)
}

// Kill ends all processes of the server with SIGKILL and returns when they are gone.
func (c *Cluster) Kill() error {
	if c.cmd.ProcessState != nil {
		return nil
	}
	// Stop the postmaster first. Otherwise it could start further processes, or shut down in an
	// orderly way when it sees a child die.
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if err := awaitStop(c.cmd.Process.Pid); err != nil {
		return err
	}
	children, err := childrenOf(c.cmd.Process.Pid)
	if err != nil {
		return err
	}
	for _, p := range children {
		_ = p.Kill() // the child may have ended already
	}
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(startWait)
	for _, p := range children {
		for alive(p) {
			select {
			case <-tick.C:
			case <-deadline:
				return fmt.Errorf("process %d is still alive", p.Pid)
			}
		}
	}
	return nil
}

// awaitStop waits until a process that received SIGSTOP is stopped. Before that, the process may
// still start others.
func awaitStop(pid int) error {
	p, err := psutil.NewProcess(int32(pid)) //nolint:gosec // process ids fit
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(startWait)
	for {
		state, err := p.Status()
		if err != nil {
			return err
		}
		if slices.Contains(state, psutil.Stop) {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline:
			return fmt.Errorf("process %d did not stop", pid)
		}
	}
}

// childrenOf returns the child processes of a server. Each has a session of its own, so no single
// signal reaches all of them.
func childrenOf(pid int) ([]*psutil.Process, error) {
	p, err := psutil.NewProcess(int32(pid)) //nolint:gosec // process ids fit
	if err != nil {
		return nil, err
	}
	children, err := p.Children()
	if errors.Is(err, psutil.ErrorNoChildren) {
		return nil, nil
	}
	return children, err
}

// alive reports whether a process exists and is not a zombie.
func alive(p *psutil.Process) bool {
	status, err := p.Status()
	return err == nil && !slices.Contains(status, psutil.Zombie)
}

// Restart starts a killed server again and returns when it answers.
func (c *Cluster) Restart(ctx context.Context) error {
	postgres, err := binary("postgres")
	if err != nil {
		return err
	}
	return c.serve(ctx, postgres)
}

func (c *Cluster) await(ctx context.Context) error { return awaitServer(ctx, c.DSN()) }

// awaitServer waits until a server accepts a connection.
func awaitServer(ctx context.Context, dsn string) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("server does not answer: %w", err)
		}
	}
}

// stop ends the server and removes its directory.
func (c *Cluster) stop() error {
	if c.cmd != nil && c.cmd.Process != nil && c.cmd.ProcessState == nil {
		// immediate shutdown: nobody reads the data again; fails harmlessly if the server has ended
		_ = c.cmd.Process.Signal(syscall.SIGQUIT)
		_ = c.cmd.Wait()
	}
	return os.RemoveAll(c.dir)
}

// binary finds a PostgreSQL program. Debian does not put the server's programs on the PATH.
func binary(name string) (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if len(found) > 0 {
		slices.Sort(found)
		return found[len(found)-1], nil
	}
	return exec.LookPath(name)
}

// unprivileged returns the user to run the server as, or nil for the current one. PostgreSQL
// refuses to run as root.
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
	return nil, errors.New("no user postgres or nobody to run the server as")
}
