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
	psutil "github.com/shirou/gopsutil/v4/process"
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
	return begin(tb, "off").DSN()
}

// StartDurable starts a cluster for the time of the test that writes to the disk what it commits, unlike that of Start. It is
// a private one also with EVENTHUB_TEST_POSTGRES set: it can be killed.
func StartDurable(tb testing.TB) *Cluster {
	tb.Helper()
	return begin(tb, "on")
}

func begin(tb testing.TB, fsync string) *Cluster {
	tb.Helper()
	c, err := start(tb.Context(), fsync)
	if err != nil {
		tb.Fatalf("PostgreSQL: %v: install it (apt-get install postgresql), or set EVENTHUB_TEST_POSTGRES to the address of a database for tests", err)
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

// Cluster is a server of the test's own. Its methods are for one goroutine at a time.
type Cluster struct {
	dir   string
	fsync string
	cred  *syscall.Credential
	cmd   *exec.Cmd
	log   bytes.Buffer
}

// DSN is its address, which stays the same when it is restarted.
func (c *Cluster) DSN() string { return "postgres:///postgres?user=eventhub&host=" + c.dir }

func start(ctx context.Context, fsync string) (*Cluster, error) {
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
	c := &Cluster{dir: dir, fsync: fsync, cred: cred}
	if err := c.run(ctx, initdb, postgres); err != nil {
		return nil, errors.Join(err, c.stop())
	}
	return c, nil
}

func (c *Cluster) run(ctx context.Context, initdb, postgres string) error {
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
	return c.serve(ctx, postgres)
}

func (c *Cluster) data() string { return filepath.Join(c.dir, "data") }

// serve starts the server on what there is, and waits until it answers.
func (c *Cluster) serve(ctx context.Context, postgres string) error {
	c.cmd = exec.Command(postgres, "-D", c.data(), "-c", "listen_addresses=", "-c", "unix_socket_directories="+c.dir, "-c", "fsync="+c.fsync) //nolint:gosec,noctx // a fixed program; stop ends it
	c.cmd.Dir, c.cmd.SysProcAttr = c.dir, &syscall.SysProcAttr{Credential: c.cred}
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	if err := c.cmd.Start(); err != nil {
		return err
	}
	return c.await(ctx)
}

// Kill ends all processes of the server by SIGKILL, and returns when they are gone.
func (c *Cluster) Kill() error {
	if c.cmd.ProcessState != nil {
		return nil
	}
	// The postmaster is stopped first, so that it starts no others meanwhile, nor ends in better order when it sees one die.
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
		_ = p.Kill() // it may have ended
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
				return fmt.Errorf("process %d is still there", p.Pid)
			}
		}
	}
	return nil
}

// childrenOf are the processes of a server but for the first. They have sessions of their own, so that no signal reaches all.
// awaitStop waits until a process that was told to stop does nothing any more: until then it may start others.
func awaitStop(pid int) error {
	p, err := psutil.NewProcess(int32(pid)) //nolint:gosec // it is a process id
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
			return fmt.Errorf("process %d does not stop", pid)
		}
	}
}

func childrenOf(pid int) ([]*psutil.Process, error) {
	p, err := psutil.NewProcess(int32(pid)) //nolint:gosec // it is a process id
	if err != nil {
		return nil, err
	}
	children, err := p.Children()
	if errors.Is(err, psutil.ErrorNoChildren) {
		return nil, nil
	}
	return children, err
}

// alive says that a process is there, and is not only waiting for its parent to take note of its end.
func alive(p *psutil.Process) bool {
	status, err := p.Status()
	return err == nil && !slices.Contains(status, psutil.Zombie)
}

// Restart starts a server again that was killed, and returns when it answers.
func (c *Cluster) Restart(ctx context.Context) error {
	postgres, err := binary("postgres")
	if err != nil {
		return err
	}
	return c.serve(ctx, postgres)
}

// await waits until the server answers.
func (c *Cluster) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, c.DSN())
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
func (c *Cluster) stop() error {
	if c.cmd != nil && c.cmd.Process != nil && c.cmd.ProcessState == nil {
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
