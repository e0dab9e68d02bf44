package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/rogpeppe/go-internal/testscript"

	"eventhub/jetstream/natstest"
)

// shellName is this test binary when it runs the commands of a script, one after the other: with
// the race detector, a program takes as long to start as most commands take.
const shellName = "eventhub-shell"

// shellCommand is what the shell is asked to run, and shellAnswer what came of it.
type (
	shellCommand struct {
		Args []string
		Env  []string
		Dir  string
	}
	shellAnswer struct {
		Code     int
		Out, Err string
	}
)

// shellProcess runs commands until its input ends, each as main does.
func shellProcess() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	cover := os.Getenv("GOCOVERDIR") // is read when the process ends
	for {
		var c shellCommand
		if err := in.Decode(&c); err != nil {
			return
		}
		os.Clearenv()
		if cover != "" {
			c.Env = append(c.Env, "GOCOVERDIR="+cover)
		}
		for _, pair := range c.Env {
			name, value, _ := strings.Cut(pair, "=")
			if err := os.Setenv(name, value); err != nil {
				panic(err)
			}
		}
		if err := os.Chdir(c.Dir); err != nil {
			panic(err)
		}
		var stdout, stderr bytes.Buffer
		code := run(context.Background(), c.Args, streams{in: strings.NewReader(""), out: &stdout, err: &stderr})
		if err := out.Encode(shellAnswer{code, stdout.String(), stderr.String()}); err != nil {
			panic(err)
		}
	}
}

// shell is the shell of a script or a test.
type shell struct {
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
	log tail
	end func() error
}

func startShell() (*shell, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s := &shell{cmd: exec.Command(path)}
	s.cmd.Args = []string{shellName}
	s.cmd.Env = append(os.Environ(), natstest.RaceEnv())
	s.cmd.Stderr = &s.log
	in, err := s.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.in, s.out = json.NewEncoder(in), json.NewDecoder(out)
	s.end = func() error {
		_ = in.Close()
		_, _ = io.Copy(io.Discard, out)
		return s.failed(s.cmd.Wait())
	}
	return s, s.cmd.Start()
}

// failed adds to an error what the shell has written.
func (s *shell) failed(err error) error {
	if err == nil {
		return nil
	}
	log, _ := s.log.read()
	return fmt.Errorf("the shell: %w\n%s", err, log)
}

// run runs a command.
func (s *shell) run(c shellCommand) (answer shellAnswer, err error) {
	limit := time.AfterFunc(3*patience, func() { _ = s.cmd.Process.Kill() })
	defer limit.Stop()
	if err := s.in.Encode(c); err != nil {
		return answer, s.failed(err)
	}
	return answer, s.failed(s.out.Decode(&answer))
}

// variables are the names of what the program reads from its environment.
var variables = sync.OnceValue(func() []string {
	names := []string{"PATH", "HOME", "TMPDIR", "GOGC"}
	parser, err := kong.New(new(commands))
	if err != nil {
		panic(err)
	}
	var visit func(n *kong.Node)
	visit = func(n *kong.Node) {
		for _, flag := range n.Flags {
			names = append(names, flag.Envs...)
		}
		for _, arg := range n.Positional {
			if arg.Tag != nil {
				names = append(names, arg.Tag.Envs...)
			}
		}
		for _, child := range n.Children {
			visit(child)
		}
	}
	visit(parser.Model.Node)
	return names
})

// runCommandOf runs a command of the program in the script's shell: run COMMAND [ARG...] It is exec
// eventhub without a process of its own, and with an empty standard input.
func runCommandOf(ts *testscript.TestScript, neg bool, args []string) {
	scene := ts.Value("scene").(*scene) //nolint:errcheck // set by Setup
	if scene.shell == nil {
		sh, err := startShell()
		ts.Check(err)
		scene.shell = sh
		ts.Defer(func() { ts.Check(sh.end()) })
	}
	c := shellCommand{Args: args, Dir: ts.MkAbs(".")}
	for _, name := range variables() {
		if value := ts.Getenv(name); value != "" { // as in main
			c.Env = append(c.Env, name+"="+value)
		}
	}
	answer, err := scene.shell.run(c)
	ts.Check(err)
	_, _ = io.WriteString(ts.Stdout(), answer.Out)
	_, _ = io.WriteString(ts.Stderr(), answer.Err)
	switch {
	case answer.Code == 0 && neg:
		ts.Fatalf("eventhub %s succeeds", strings.Join(args, " "))
	case answer.Code != 0 && !neg:
		ts.Fatalf("eventhub %s: exit code %d", strings.Join(args, " "), answer.Code)
	}
}

// shellOf starts a shell for a test.
func shellOf(t *testing.T) *shell {
	t.Helper()
	s, err := startShell()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// check runs serve --check with variables, in a directory of its own, and returns what it says of a
// configuration that it refuses, or "".
func (s *shell) check(t *testing.T, env ...string) string {
	t.Helper()
	answer, err := s.run(shellCommand{Args: []string{"serve", "--check"}, Env: append(env, "PATH="+os.Getenv("PATH")), Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if answer.Code == 0 {
		return ""
	}
	return answer.Out + answer.Err
}
