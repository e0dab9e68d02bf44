package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// script is a Node process that executes requests. Only one goroutine may use it.
type script struct {
	name  string
	cmd   *exec.Cmd
	stop  context.CancelFunc
	in    io.WriteCloser
	out   *bufio.Scanner
	log   logTail
	ended bool
}

// scriptRequest is a request to the script, one line of JSON. node/main.mjs documents the fields.
type scriptRequest struct {
	Do            string `json:"do"`
	URL           string `json:"url,omitempty"`
	Token         string `json:"token,omitempty"`
	Topic         string `json:"topic,omitempty"`
	Subject       string `json:"subject,omitempty"`
	Stream        string `json:"stream,omitempty"`
	Group         string `json:"group,omitempty"`
	N             int    `json:"n,omitempty"`
	Size          int    `json:"size,omitempty"`
	Connections   int    `json:"connections,omitempty"`
	InFlight      int    `json:"inFlight,omitempty"`
	AckBatch      int    `json:"ackBatch,omitempty"`
	NoAsyncTraces bool   `json:"noAsyncTraces,omitempty"`
}

// sdkBuilt is the compiled TypeScript client, relative to the directory of the scripts.
var sdkBuilt = filepath.FromSlash("../../../../sdk/dist/esm/index.js")

// findNode returns an error with a remedy if the scripts in dir cannot run.
func findNode(dir string) error {
	if _, err := exec.LookPath("node"); err != nil {
		return fmt.Errorf("find node: %w; install Node 20 or newer", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "main.mjs")); err != nil {
		return fmt.Errorf("find the Node scripts: %w; run this command in a checkout of the sources, or set --scripts", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "node_modules")); err != nil {
		return fmt.Errorf("find the packages of the Node scripts: %w; run npm ci in %s", err, dir)
	}
	if _, err := os.Stat(filepath.Join(dir, sdkBuilt)); err != nil {
		return fmt.Errorf("find the TypeScript client: %w; run npm ci and npm run build in sdk", err)
	}
	return nil
}

// startScript starts the script in dir for a side.
func startScript(ctx context.Context, dir, via, kind string) (*script, error) {
	system := map[string]string{viaNode: "hub", viaSDK: "sdk", viaNATSJS: "nats"}[via]
	ctx, stop := context.WithCancel(ctx)
	s := &script{name: fmt.Sprintf("node main.mjs %s %s", system, kind), stop: stop}
	s.cmd = exec.CommandContext(ctx, "node", "main.mjs", system, kind) //nolint:gosec // the arguments are constants
	s.cmd.Dir, s.cmd.Env, s.cmd.Stderr = dir, childEnv(), &s.log
	s.cmd.SysProcAttr = endWithParent()
	in, err := s.cmd.StdinPipe()
	if err == nil {
		var out io.ReadCloser
		if out, err = s.cmd.StdoutPipe(); err == nil {
			s.in, s.out = in, bufio.NewScanner(out)
			err = s.cmd.Start()
		}
	}
	if err != nil {
		stop()
		return nil, fmt.Errorf("start %s: %w", s.name, err)
	}
	return s, nil
}

// ask sends a request and returns when the script has executed it. The script detects stalls
// itself.
func (s *script) ask(ctx context.Context, request *scriptRequest) error {
	line, err := json.Marshal(request)
	if err == nil {
		_, err = s.in.Write(append(line, '\n'))
	}
	if err == nil && !s.out.Scan() {
		err = errors.Join(io.ErrUnexpectedEOF, s.out.Err())
	}
	var answer struct{ Error string }
	if err == nil {
		err = json.Unmarshal(s.out.Bytes(), &answer)
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("%s, %s: %w: %s", s.name, request.Do, errors.Join(err, s.close()), s.log.text())
	case answer.Error != "":
		return fmt.Errorf("%s, %s: %s", s.name, request.Do, answer.Error)
	}
	return nil
}

// close ends the process and waits for it. It may be called more than once.
func (s *script) close() error {
	if s.ended {
		return nil
	}
	s.ended = true
	defer time.AfterFunc(stopTimeout, s.stop).Stop()
	defer s.stop()
	_ = s.in.Close() // tells the script to end
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}
