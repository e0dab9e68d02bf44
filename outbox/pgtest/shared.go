package pgtest

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// server is what the tests of a process share: a cluster, or the server that EVENTHUB_TEST_POSTGRES
// names.
type server struct {
	dsn   string
	log   string   // a file; "": there is none
	alive *os.File // the cluster ends when this is closed, at the latest with the process
}

var (
	sharedMu sync.Mutex
	shared   *server
	made     atomic.Int64 // databases
)

// sharedServer starts the cluster when it is first asked for.
func sharedServer(ctx context.Context) (*server, error) {
	sharedMu.Lock()
	defer sharedMu.Unlock()
	if shared != nil {
		return shared, nil
	}
	if dsn := os.Getenv("EVENTHUB_TEST_POSTGRES"); dsn != "" {
		shared = &server{dsn: dsn}
		return shared, nil
	}
	postgres, err := binary("postgres")
	if err != nil {
		return nil, err
	}
	c, err := prepare(ctx)
	if err != nil {
		return nil, err
	}
	s := &server{dsn: c.DSN(), log: filepath.Join(c.dir, "log")}
	if err := s.keep(c, postgres); err != nil {
		return nil, err
	}
	if err := awaitServer(ctx, s.dsn); err != nil {
		_ = s.alive.Close()
		return nil, err
	}
	shared = s
	return shared, nil
}

// keeper runs the server until its own input ends, which is when this process has ended, however it
// ended. Then it removes the directory.
const keeper = `dir=$1; shift; cd /
"$@" >"$dir/log" 2>&1 </dev/null &
read -r _
kill -QUIT $!
wait $!
rm -rf "$dir"`

func (s *server) keep(c *Cluster, postgres string) error {
	in, alive, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	cmd := exec.Command("/bin/sh", "-c", keeper, "sh", c.dir, postgres, "-D", c.data(), "-c", "listen_addresses=", "-c", "unix_socket_directories="+c.dir, //nolint:gosec,noctx // a fixed program, which ends with this one
		"-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=400")
	// a session of its own: an interrupt from the terminal is for this process
	cmd.Dir, cmd.Stdin, cmd.SysProcAttr = c.dir, in, &syscall.SysProcAttr{Credential: c.cred, Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = alive.Close()
		return err
	}
	s.alive = alive
	return nil
}

// database makes a database, which ends with end.
func (s *server) database(ctx context.Context) (dsn string, end func() error, err error) {
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), made.Add(1))
	if err := s.exec(ctx, "CREATE DATABASE "+name); err != nil {
		return "", nil, err
	}
	dsn, err = inDatabase(s.dsn, name)
	return dsn, func() error { return s.exec(context.WithoutCancel(ctx), "DROP DATABASE "+name+" WITH (FORCE)") }, err
}

func (s *server) exec(ctx context.Context, query string) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, query); err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	return nil
}

// inDatabase is the address of another database of the same server.
func inDatabase(dsn, name string) (string, error) {
	if !strings.Contains(dsn, "://") {
		return dsn + " dbname=" + name, nil
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return "", err
	}
	u.Path = "/" + name
	return u.String(), nil
}

func (s *server) logSize() int64 {
	info, err := os.Stat(s.log)
	if err != nil {
		return 0
	}
	return info.Size()
}

// logSince is what the log has got since it had a size, for all tests that ran meanwhile.
func (s *server) logSince(size int64) []byte {
	text, err := os.ReadFile(s.log)
	if err != nil {
		return []byte(err.Error())
	}
	return text[min(size, int64(len(text))):]
}
