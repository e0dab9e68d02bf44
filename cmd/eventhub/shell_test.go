package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/rogpeppe/go-internal/testscript"
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
	for {
		var c shellCommand
		if err := in.Decode(&c); err != nil {
			return
		}
		os.Clearenv()
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

// shell is the shell of a script. It ends with the script.
type shell struct {
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
	log tail
}

func startShell(ts *testscript.TestScript) *shell {
	path, err := os.Executable()
	ts.Check(err)
	s := &shell{cmd: exec.Command(path)}
	s.cmd.Args = []string{shellName}
	s.cmd.Env = append(os.Environ(), "GORACE="+ts.Getenv("GORACE"))
	s.cmd.Stderr = &s.log
	in, err := s.cmd.StdinPipe()
	ts.Check(err)
	out, err := s.cmd.StdoutPipe()
	ts.Check(err)
	ts.Check(s.cmd.Start())
	s.in, s.out = json.NewEncoder(in), json.NewDecoder(out)
	ts.Defer(func() {
		_ = in.Close()
		_, _ = io.Copy(io.Discard, out)
		if err := s.cmd.Wait(); err != nil {
			log, _ := s.log.read()
			ts.Fatalf("the shell: %v\n%s", err, log)
		}
	})
	return s
}

// variables are the names of what the program reads from its environment.
func variables() []string {
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
}

// runCommandOf runs a command of the program in the script's shell: run COMMAND [ARG...] It is exec
// eventhub without a process of its own, and with an empty standard input.
func runCommandOf(ts *testscript.TestScript, neg bool, args []string) {
	scene := ts.Value("scene").(*scene) //nolint:errcheck // set by Setup
	if scene.shell == nil {
		scene.shell = startShell(ts)
	}
	c := shellCommand{Args: args, Dir: ts.MkAbs(".")}
	for _, name := range variables() {
		if value := ts.Getenv(name); value != "" { // as in main
			c.Env = append(c.Env, name+"="+value)
		}
	}
	ts.Check(scene.shell.in.Encode(c))
	limit := time.AfterFunc(3*patience, func() { _ = scene.shell.cmd.Process.Kill() })
	defer limit.Stop()
	var answer shellAnswer
	if err := scene.shell.out.Decode(&answer); err != nil {
		log, _ := scene.shell.log.read()
		ts.Fatalf("eventhub %s: %v\n%s", strings.Join(args, " "), err, log)
	}
	_, _ = io.WriteString(ts.Stdout(), answer.Out)
	_, _ = io.WriteString(ts.Stderr(), answer.Err)
	switch {
	case answer.Code == 0 && neg:
		ts.Fatalf("eventhub %s succeeds", strings.Join(args, " "))
	case answer.Code != 0 && !neg:
		ts.Fatalf("eventhub %s: exit code %d", strings.Join(args, " "), answer.Code)
	}
}
