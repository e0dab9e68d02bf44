package check

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
)

// image is what the last stage of the Dockerfile makes.
type image struct {
	t             *testing.T
	root          string // its root file system
	user          string
	env           []string
	command       []string
	health        []string
	volumes       []string
	stage, source string // the build stage, and the directory that stands for its WORKDIR
	workdir       string
}

// buildImage does what the Dockerfile says, without an engine: this machine stands for the image of
// the build stage, and a mount namespace for its directories.
func buildImage(t *testing.T) *image {
	t.Helper()
	text, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := parser.Parse(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	stages, args, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(stages) != 2 || len(args) != 0 || !strings.HasPrefix(stages[0].BaseName, "golang:") || stages[1].BaseName != "scratch" {
		t.Fatalf("the Dockerfile has other stages: %+v", stages)
	}
	m := &image{t: t, root: filepath.Join(t.TempDir(), "root"), stage: stages[0].Name, source: t.TempDir()}
	if err := os.Mkdir(m.root, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range stages[0].Commands {
		m.build(c)
	}
	m.env = nil // that of the build stage is not in the image
	for _, c := range stages[1].Commands {
		m.assemble(c)
	}
	return m
}

// build does a command of the build stage.
func (m *image) build(c instructions.Command) {
	m.t.Helper()
	switch c := c.(type) {
	case *instructions.WorkdirCommand:
		m.workdir = c.Path
	case *instructions.CopyCommand:
		if strings.Join(c.SourcePaths, " ") == "." {
			m.copyContext()
			return
		}
		for _, name := range c.SourcePaths {
			m.sh("../..", `cp "$0" "$1"`, name, filepath.Join(m.source, c.DestPath))
		}
	case *instructions.ArgCommand:
		m.env = append(m.env, "VERSION=0.0.0-check")
	case *instructions.RunCommand:
		m.sh(".", `exec unshare --mount sh -c 'mount -t tmpfs none "$(dirname "$0")" && mkdir "$0" && mount --bind "$1" "$0" && cd "$0" && exec sh -ec "$2"' "$0" "$1" "$2"`,
			m.workdir, m.source, strings.Join(c.CmdLine, " "))
	default:
		m.t.Fatalf("the build stage has %s, which this test does not know", c)
	}
}

// copyContext copies the files of the repository that the image is built from.
func (m *image) copyContext() {
	m.t.Helper()
	ignored, err := os.ReadFile("../Dockerfile.dockerignore")
	if err != nil {
		m.t.Fatal(err)
	}
	patterns, err := ignorefile.ReadAll(bytes.NewReader(ignored))
	if err != nil {
		m.t.Fatal(err)
	}
	matcher, err := patternmatcher.New(patterns)
	if err != nil {
		m.t.Fatal(err)
	}
	list := exec.CommandContext(m.t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = "../.."
	names, err := list.Output()
	if err != nil {
		m.t.Fatal(err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		out, err := matcher.MatchesOrParentMatches(name)
		if err != nil {
			m.t.Fatal(err)
		}
		if !out {
			m.sh("../..", `mkdir -p "$1/$(dirname "$0")" && cp -a "$0" "$1/$0"`, name, m.source)
		}
	}
}

// sh runs a script in a directory.
func (m *image) sh(dir, script string, args ...string) {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), "sh", append([]string{"-ec", script}, args...)...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), append(m.env, "GOFLAGS=")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("%s %q: %v\n%s", script, args, err, out)
	}
}

// assemble does a command of the last stage.
func (m *image) assemble(c instructions.Command) {
	m.t.Helper()
	switch c := c.(type) {
	case *instructions.CopyCommand:
		if c.From != m.stage || len(c.SourcePaths) != 1 {
			m.t.Fatalf("%s does not copy one thing from the build stage", c)
		}
		within, found := strings.CutPrefix(c.SourcePaths[0], m.workdir+"/")
		to := filepath.Join(m.root, c.DestPath)
		if !found {
			m.t.Fatalf("%s copies from elsewhere", c)
		}
		m.sh(".", `mkdir -p "$1" && cp -R "$0/." "$1"`, filepath.Join(m.source, within), to)
		if c.Chmod != "" {
			m.sh(".", `chmod "$0" "$1"`, c.Chmod, to)
		}
		m.sh(".", `chown -R "$0" "$1"`, map[bool]string{true: c.Chown, false: "0:0"}[c.Chown != ""], to)
	case *instructions.EnvCommand:
		for _, v := range c.Env {
			m.env = append(m.env, v.Key+"="+v.Value)
		}
	case *instructions.UserCommand:
		m.user = c.User
	case *instructions.VolumeCommand:
		m.volumes = append(m.volumes, c.Volumes...)
	case *instructions.EntrypointCommand:
		m.command = append(append([]string{}, c.CmdLine...), m.command...)
	case *instructions.CmdCommand:
		m.command = append(m.command, c.CmdLine...)
	case *instructions.HealthCheckCommand:
		m.health = c.Health.Test[1:]
	case *instructions.ExposeCommand, *instructions.StopSignalCommand:
	default:
		m.t.Fatalf("the last stage has %s, which this test does not know", c)
	}
}

// container returns a command in the image: with its user, a root that nobody can write to, and a
// volume.
func (m *image) container(volume string, environ, command []string) *exec.Cmd {
	script := `mount --bind "$0" "$0" && mount --bind "$1" "$0/data" && mount -o remount,bind,ro "$0" && root=$0 user=$2 && shift 2 &&
		exec chroot --userspec="$user" --groups= "$root" "$@"`
	cmd := exec.Command("unshare", append([]string{"--mount", "sh", "-ec", script, m.root, volume, m.user}, command...)...)
	// Without a PATH and a HOME, as an engine would run it.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, append(m.env, environ...)...)
	return cmd
}

func freePorts(t *testing.T, n int) (ports []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, port)
	}
	return ports
}

// The image serves as a user without rights on a root that it cannot write to, knows its health,
// and ends in order.
func TestImage(t *testing.T) {
	m := buildImage(t)
	if m.user != "65532:65532" || strings.Join(m.volumes, " ") != "/data" {
		t.Fatalf("the image has the user %s and the volumes %v", m.user, m.volumes)
	}
	volume := filepath.Join(t.TempDir(), "volume")
	// An engine gives a new volume the owner and the mode of the directory in the image.
	m.sh(".", `cp -a "$0" "$1"`, filepath.Join(m.root, "data"), volume)
	ports := freePorts(t, 3)
	environ := []string{"WS_PORT=" + ports[0], "HTTP_PORT=" + ports[1], "OPS_PORT=" + ports[2]}
	healthy := func() error {
		out, err := m.container(volume, environ, m.health).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}

	if err := healthy(); err == nil || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("before the start: %v", err)
	}
	if out, err := m.container(volume, environ, m.command).CombinedOutput(); err == nil || !strings.Contains(string(out), "no token is configured; set WS_TOKEN") {
		t.Errorf("without a token the hub says %q, %v", out, err)
	}
	environ = append(environ, "WS_TOKEN=a-token-that-nobody-guesses")
	if out, err := m.container(volume, environ, append(m.command, "--data=/elsewhere")).CombinedOutput(); err == nil || !strings.Contains(string(out), "read-only file system") {
		t.Errorf("outside of its volume the hub says %q, %v", out, err)
	}

	hub := m.container(volume, environ, m.command)
	var log bytes.Buffer
	hub.Stdout, hub.Stderr = &log, &log
	if err := hub.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- hub.Wait() }()
	defer func() { _ = hub.Process.Kill() }()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for err := errors.New("none"); err != nil; err = healthy() {
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatalf("the hub has ended: %v\n%s", err, log.String())
		case <-deadline:
			t.Fatalf("the hub is not healthy: %v", err)
		}
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", hub.Process.Pid))
	if err != nil || !strings.Contains(string(status), "\nUid:\t65532\t65532\t65532\t65532\n") || !strings.Contains(string(status), "\nCapEff:\t0000000000000000\n") {
		t.Errorf("the hub runs as %s, %v", status, err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://127.0.0.1:"+ports[1]+"/publish/greetings", strings.NewReader(`"hello"`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer a-token-that-nobody-guesses")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("the hub answers %s %s", resp.Status, answer)
	}
	if err := hub.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the hub ended with %v\n%s", err, log.String())
		}
	case <-time.After(15 * time.Second):
		t.Error("the hub does not end")
	}
}
