//go:build unix

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// eventhubCommand is the program, in a directory of its own and with few variables.
func eventhubCommand(ctx context.Context, t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, path)
	cmd.Args = append([]string{"eventhub"}, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=20"}, env...)
	cmd.Dir = t.TempDir()
	return cmd
}

// refusal runs a command that must end at once with an error, and returns what it says.
func refusal(t *testing.T, env []string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := eventhubCommand(ctx, t, env, args...).CombinedOutput()
	if err == nil || ctx.Err() != nil {
		t.Fatalf("eventhub %s: %v, %v:\n%s", strings.Join(args, " "), err, ctx.Err(), out)
	}
	return string(out)
}

// ports are flags with which hubs do not disturb each other.
var ports = []string{"--ws-port=0", "--http-port=0", "--ops-port=0"}

// refusalHere is refusal in this process.
func refusalHere(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var out, said strings.Builder
	if code := run(ctx, args, streams{in: strings.NewReader(""), out: &out, err: &said}); code == 0 || ctx.Err() != nil {
		t.Fatalf("eventhub %s: %d, %v:\n%s%s", strings.Join(args, " "), code, ctx.Err(), out.String(), said.String())
	}
	return said.String()
}

// TestDataDirThatOthersMayWrite plants what an attacker could, in data directories of hubs.
func TestDataDirThatOthersMayWrite(t *testing.T) {
	t.Parallel()
	write := func(path, text string, mode fs.FileMode) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		make func(dir string) error
		want string
	}{
		{"a directory for everybody", func(dir string) error { return os.Chmod(dir, 0o777) }, "can be written by other users (mode 0777)"},
		{"a directory of a group", func(dir string) error { return os.Chmod(dir, 0o770) }, "can be written by other users (mode 0770)"},
		{"a token that others may read", func(dir string) error { write(dir+"/token", "planted\n", 0o644); return nil }, "accessible by other users (mode 0644)"},
		{"a token that others may write", func(dir string) error { write(dir+"/token", "planted\n", 0o622); return nil }, "can be written by other users (mode 0622)"},
		{"a token elsewhere", func(dir string) error {
			write(dir+"/../planted", "planted\n", 0o600)
			return os.Symlink("../planted", dir+"/token")
		}, "token is not a regular file"},
		{"an outbox elsewhere", func(dir string) error { return os.Symlink("/etc/passwd", dir+"/outbox.db") }, "outbox.db is not a regular file"},
		{"a journal elsewhere", func(dir string) error { return os.Symlink("/etc/passwd", dir+"/outbox.db-wal") }, "outbox.db-wal is not a regular file"},
		{"an outbox that others may write", func(dir string) error { write(dir+"/outbox.db", "", 0o666); return nil }, "outbox.db can be written by other users (mode 0666)"},
		{"a token that is a pipe", func(dir string) error { return syscall.Mkfifo(dir+"/token", 0o600) }, "token is not a regular file"},
		{"streams elsewhere", func(dir string) error { return os.Symlink("..", dir+"/nats") }, "nats is not a directory but a link, which the hub does not follow; if you put the link there, keep its target"},
		{"streams that others may write", func(dir string) error {
			if err := os.Mkdir(dir+"/nats", 0o700); err != nil {
				return err
			}
			return os.Chmod(dir+"/nats", 0o777)
		}, "nats can be written by other users (mode 0777)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "data")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := c.make(dir); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{append([]string{"serve", "--data=" + dir}, ports...), {"serve", "--check", "--data=" + dir}} {
				if got := refusalHere(t, args...); !strings.Contains(got, c.want) || !strings.Contains(got, dir) {
					t.Errorf("%s: %s", args, got)
				}
			}
		})
	}
}

// owned is the information about a file of a given user.
type owned struct {
	fs.FileInfo
	uid uint32
}

func (o owned) Sys() any { return &syscall.Stat_t{Uid: o.uid} }

// TestFilesOfOtherUsers needs no second user: only what the system says about a file is made up.
func TestFilesOfOtherUsers(t *testing.T) {
	info, err := os.Stat(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	me := uint32(os.Geteuid())
	for uid, trusted := range map[uint32]bool{0: true, me: true, me + 1: false} {
		if err := checkOwner(owned{info, uid}); (err == nil) != trusted {
			t.Errorf("a file of user %d: %v", uid, err)
		}
	}
}

// TestSecretFilesThatOthersMayRead gives each flag that names a file with a secret such a file.
func TestSecretFilesThatOthersMayRead(t *testing.T) {
	t.Parallel()
	pair := newPairFiles(t)
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte("0123456789abcdef0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, pair.key} {
		if err := os.Chmod(name, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	check := []string{"serve", "--check"}
	for _, args := range [][]string{
		append(check, "--token-file="+file),
		append(check, "--jwt-secret-file="+file),
		append(check, "--nats-url=nats://127.0.0.1:4222", "--nats-creds="+file),
		append(check, "--nats-url=nats://127.0.0.1:4222", "--nats-nkey-seed="+file),
		append(check, "--nats-url=nats://127.0.0.1:4222", "--nats-tls-cert="+pair.cert, "--nats-tls-key="+pair.key),
		append(check, "--tls-cert="+pair.cert, "--tls-key="+pair.key),
		{"token", "--scope=publish:a", "--jwt-secret-file=" + file},
		{"pub", "a", "1", "--token-file=" + file},
	} {
		if got := refusalHere(t, args...); !strings.Contains(got, "is accessible by other users (mode 0640); run chmod 600 ") {
			t.Errorf("%s: %s", args, got)
		}
	}
}

// TestCertificateThatIsAPipe has a hub start with, and later reload, files that nobody writes.
func TestCertificateThatIsAPipe(t *testing.T) {
	t.Parallel()
	pair := newPairFiles(t)
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"--tls-cert=" + pipe, "--tls-key=" + pair.key},
		{"--tls-cert=" + pair.cert, "--tls-key=" + pipe},
		{"--nats-url=nats://127.0.0.1:4222", "--nats-tls-ca=" + pipe},
	} {
		if got := refusalHere(t, append(append([]string{"serve"}, ports...), args...)...); !strings.Contains(got, "pipe: not a regular file") {
			t.Errorf("%s: %s", args, got)
		}
	}
	hub := startNode(t, "--tls-cert="+pair.cert, "--tls-key="+pair.key)
	if err := os.Rename(pipe, pair.cert); err != nil {
		t.Fatal(err)
	}
	hub.signal(syscall.SIGHUP)
	waitFor(t, "the pipe is logged", func() bool { return strings.Contains(hub.log.String(), "not a regular file") })
	cert, key := pair.make()
	if err := os.Remove(pair.cert); err != nil {
		t.Fatal(err)
	}
	pair.write(cert, key)
	hub.signal(syscall.SIGHUP)
	waitFor(t, "the new certificate", func() bool { return pair.served(hub.url) == 2 })
	if err := os.Remove(pair.cert); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(pair.cert, 0o600); err != nil {
		t.Fatal(err)
	}
	hub.signal(syscall.SIGHUP)
	hub.terminate()
}

// A hub that drains goes on to drain while it is told to reload, until its last moment: a service
// manager may do both.
func TestReloadWhileItDrains(t *testing.T) {
	t.Parallel()
	pair := newPairFiles(t)
	for name, flags := range map[string][]string{
		"with a certificate":    {"--tls-cert=" + pair.cert, "--tls-key=" + pair.key},
		"without a certificate": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hub := startNodeWith(t, func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }, flags...)
			hub.signal(syscall.SIGTERM)
			waitFor(t, "the hub drains", func() bool { return strings.Contains(hub.log.String(), "draining") })
			reload := time.NewTicker(100 * time.Microsecond)
			defer reload.Stop()
			late := time.After(patience)
			for ended := false; !ended; {
				select {
				case <-hub.ended:
					ended = true
				case <-reload.C:
					hub.signal(syscall.SIGHUP)
				case <-late:
					t.Fatal("the hub does not end")
				}
			}
			if code := hub.cmd.ProcessState.ExitCode(); code != 0 {
				t.Errorf("the hub ended with exit code %d:\n%s", code, hub.log.String())
			}
		})
	}
}

// TestSessionsEndWithTheirCertificate resumes TLS sessions before and after the certificate
// changes.
func TestSessionsEndWithTheirCertificate(t *testing.T) {
	t.Parallel()
	pair := newPairFiles(t)
	hub := startNode(t, "--tls-cert="+pair.cert, "--tls-key="+pair.key, "--ops-tls")
	_, at, _ := strings.Cut(hub.http, "://")
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		config := &tls.Config{RootCAs: pair.roots, MinVersion: version, MaxVersion: version, ClientSessionCache: tls.NewLRUClientSessionCache(1)}
		ask := func() (resumed bool) {
			t.Helper()
			c, err := tls.Dial("tcp", at, config)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); err != nil { // with the ticket
				t.Fatal(err)
			}
			return c.ConnectionState().DidResume
		}
		ask()
		if !ask() {
			t.Fatalf("%s: no session was resumed", tls.VersionName(version))
		}
		before := pair.serial
		pair.write(pair.make())
		hub.signal(syscall.SIGHUP)
		waitFor(t, "the new certificate", func() bool { return pair.served(hub.http) == before+1 })
		if ask() {
			t.Errorf("%s: a session that began with the old certificate was resumed", tls.VersionName(version))
		}
		if !ask() {
			t.Errorf("%s: no session was resumed with the new certificate", tls.VersionName(version))
		}
	}
	hub.terminate()
}

// TestTwoLengths sends requests with two lengths, and a further one behind each, to every port. A
// proxy in front could take the further one for a part of the body.
func TestTwoLengths(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	_, ws, _ := strings.Cut(hub.url, "://")
	_, web, _ := strings.Cut(hub.http, "://")
	_, ops, _ := strings.Cut(hub.ops, "://")
	for _, at := range []string{ws, web, ops} {
		for _, path := range []string{"/livez", "/publish/a"} {
			for _, c := range []struct {
				name, before, length string
				piece                int // bytes of one write
			}{
				{"at once", "", "Content-Length", 1000},
				{"byte by byte", "", "content-lengtH", 1},
				{"behind another request", "GET /none HTTP/1.1\r\nHost: hub\r\n\r\n", "CONTENT-LENGTH", 1000},
			} {
				conn := dialRaw(t, at)
				text := fmt.Sprintf("%sPOST %s HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer %s\r\n%s: 6\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n"+
					"GET /smuggled HTTP/1.1\r\nHost: hub\r\n\r\n", c.before, path, nodeToken, c.length)
				for len(text) > 0 {
					n := min(c.piece, len(text))
					if _, err := io.WriteString(conn, text[:n]); err != nil {
						break // the hub has closed the connection
					}
					text = text[n:]
				}
				r := bufio.NewReader(conn)
				if c.before != "" {
					if _, closes := answerRaw(t, r); closes {
						continue
					}
				}
				if status, closes := answerRaw(t, r); !closes {
					t.Errorf("%s%s, %s: the answer %d does not close the connection", at, path, c.name, status)
				}
				if rest, _ := io.ReadAll(r); len(rest) > 0 {
					t.Errorf("%s%s, %s: after the answer came %s", at, path, c.name, rest)
				}
			}
		}
	}
}

// TestChunkedRequestsKeepTheirConnection sends requests without a length on one connection.
func TestChunkedRequestsKeepTheirConnection(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	_, web, _ := strings.Cut(hub.http, "://")
	conn := dialRaw(t, web)
	r := bufio.NewReader(conn)
	for i := range 3 {
		if _, err := fmt.Fprintf(conn, "POST /publish/a HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer %s\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n", nodeToken); err != nil {
			t.Fatal(err)
		}
		if status, closes := answerRaw(t, r); status != http.StatusOK || closes {
			t.Fatalf("request %d: %d, closes the connection: %v", i, status, closes)
		}
	}
}

// dialRaw connects for a test that writes HTTP by hand.
func dialRaw(t *testing.T, at string) net.Conn {
	t.Helper()
	c, err := net.DialTimeout("tcp", at, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// answerRaw reads an answer, with its body, and reports whether it closes the connection.
func answerRaw(t *testing.T, r *bufio.Reader) (status int, closes bool) {
	t.Helper()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return resp.StatusCode, resp.Close
}

// Kubernetes grants the group of a volume (fsGroup) access to all files at each start. The hub
// takes its own files back, and accepts a volume that root shares with the group.
func TestVolumeOfAGroup(t *testing.T) {
	groups := ownGroups
	t.Cleanup(func() { ownGroups = groups })
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.MkdirAll(filepath.Join(dir, "nats"), 0o700); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte("t\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// The files' group is that of the test, since only root can give files to other groups.
	group, _ := ownGroups()
	ownGroups = func() (first int, further []int) { return -1, nil }
	for path, mode := range map[string]fs.FileMode{dir: 0o770 | fs.ModeSetgid, filepath.Join(dir, "nats"): 0o770 | fs.ModeSetgid, token: 0o660} {
		if err := os.Chown(path, -1, group); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := checkDataDir(dir); err == nil || !strings.Contains(err.Error(), "can be written by other users") {
		t.Errorf("of a group that is not the hub's: %v", err)
	}
	ownGroups = func() (first int, further []int) { return -1, []int{group} }
	if err := checkDataDir(dir); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, filepath.Join(dir, "nats"), token} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v, %v", path, info.Mode(), err)
		}
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := checkDataDir(dir); err == nil {
		t.Error("a directory for everybody is accepted")
	}
}
