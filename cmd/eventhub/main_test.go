package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"eventhub/jetstream/natstest"
)

// patience bounds what a script waits for. Reaching it is a failure.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	natstest.RunChild(nil)
	// The scripts run this binary again under the name of the program: just what ships.
	testscript.Main(leakChecked{m}, map[string]func(){"eventhub": main, parentName: ephemeralParent, attackName: attackProcess, shellName: shellProcess})
}

// leakChecked fails a run that leaves goroutines behind.
type leakChecked struct{ *testing.M }

func (l leakChecked) Run() int {
	code := l.M.Run()
	if err := stopChromium(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	if code != 0 {
		return code
	}
	if err := goleak.Find(natstest.Leaks()...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// scene is what a script has started.
type scene struct {
	hubs  map[string]*hubProcess
	shell *shell // nil before the first command
}

// hubProcess is a hub that a script has started.
type hubProcess struct {
	cmd    *exec.Cmd
	stderr tail
	ended  chan struct{} // closed when it has ended
}

// tail keeps what a process writes, and tells when there is more.
type tail struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{}
}

func (w *tail) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.more != nil {
		close(w.more)
		w.more = nil
	}
	return w.text.Write(p)
}

// read returns what was written, and what is closed when there is more.
func (w *tail) read() (string, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.more == nil {
		w.more = make(chan struct{})
	}
	return w.text.String(), w.more
}

// startHub starts a hub on free ports and waits until it is ready: hub NAME [FLAG...] It sets
// EVENTHUB_URL, HTTP_URL, OPS_URL, WS_PORT and NATS_ADDR, and writes what the hub printed to the
// file NAME.out.
func startHub(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: hub NAME [FLAG...]")
	}
	name := args[0]
	path := ""
	for _, dir := range filepath.SplitList(ts.Getenv("PATH")) {
		if candidate := filepath.Join(dir, "eventhub"); path == "" {
			if _, err := os.Stat(candidate); err == nil {
				path = candidate
			}
		}
	}
	p := &hubProcess{ended: make(chan struct{})}
	p.cmd = exec.Command(path, append([]string{"serve", "--ws-port=0", "--http-port=0", "--ops-port=0"}, args[1:]...)...)
	p.cmd.Dir = ts.MkAbs(".")
	p.cmd.Env = append(os.Environ(), "WS_TOKEN="+ts.Getenv("WS_TOKEN"), "EVENTHUB_DATA="+ts.Getenv("EVENTHUB_DATA"), "GORACE="+ts.Getenv("GORACE"))
	p.cmd.Stderr = &p.stderr
	stdout, err := p.cmd.StdoutPipe()
	ts.Check(err)
	ts.Check(p.cmd.Start())
	var out bytes.Buffer
	lines := bufio.NewScanner(stdout)
	timer := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	for lines.Scan() {
		out.WriteString(lines.Text() + "\n")
		field, value, _ := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		value = strings.TrimSpace(value)
		switch field {
		case "websocket":
			ts.Setenv("EVENTHUB_URL", value)
			ts.Setenv("WS_PORT", value[strings.LastIndex(value, ":")+1:])
		case "http":
			ts.Setenv("HTTP_URL", value)
		case "ops":
			ts.Setenv("OPS_URL", value)
		case "nats":
			ts.Setenv("NATS_ADDR", strings.TrimPrefix(value, "nats://"))
		}
		if field == "token" {
			break // the last line
		}
	}
	timer.Stop()
	go func() {
		defer close(p.ended)
		_, _ = io.Copy(io.Discard, stdout)
		_ = p.cmd.Wait()
	}()
	ts.Defer(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	ts.Check(os.WriteFile(ts.MkAbs(name+".out"), out.Bytes(), 0o600))
	if !strings.HasPrefix(out.String(), "eventhub is ready\n") {
		<-p.ended
		log, _ := p.stderr.read()
		ts.Fatalf("the hub did not start:\n%s%s", out.String(), log)
	}
	hubs(ts)[name] = p
}

func hubs(ts *testscript.TestScript) map[string]*hubProcess {
	return ts.Value("scene").(*scene).hubs //nolint:errcheck // set by Setup
}

// signalHub sends a signal: signal NAME TERM|INT|KILL
func signalHub(ts *testscript.TestScript, _ bool, args []string) {
	signals := map[string]os.Signal{"TERM": syscall.SIGTERM, "INT": os.Interrupt, "KILL": os.Kill}
	ts.Check(hubs(ts)[args[0]].cmd.Process.Signal(signals[args[1]]))
}

// hubEnded waits until a hub has ended, and compares how, such as "exit status 0": ended NAME HOW
func hubEnded(ts *testscript.TestScript, _ bool, args []string) {
	p := hubs(ts)[args[0]]
	select {
	case <-p.ended:
	case <-time.After(10 * time.Second):
		log, _ := p.stderr.read()
		ts.Fatalf("the hub has not ended after 10 s:\n%s", log)
	}
	if got := p.cmd.ProcessState.String(); got != args[1] {
		log, _ := p.stderr.read()
		ts.Fatalf("the hub ended with %q, want %q:\n%s", got, args[1], log)
	}
}

// hubLogged waits until a hub has logged what matches: logged NAME PATTERN
func hubLogged(ts *testscript.TestScript, _ bool, args []string) {
	p := hubs(ts)[args[0]]
	pattern := regexp.MustCompile(args[1])
	timeout := time.After(patience)
	for {
		text, more := p.stderr.read()
		if pattern.MatchString(text) {
			return
		}
		select {
		case <-more:
		case <-timeout:
			ts.Fatalf("the hub has not logged %q:\n%s", args[1], text)
		}
	}
}

// fetch asks until status and body are as wanted: fetch URL STATUS [PATTERN]. BEARER is its token.
func fetch(ts *testscript.TestScript, _ bool, args []string) {
	pattern := regexp.MustCompile(strings.Join(args[2:], " "))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var last string
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, args[0], nil)
		ts.Check(err)
		if token := ts.Getenv("BEARER"); token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		if resp, err := client.Do(req); err != nil {
			if ctx.Err() == nil {
				last = err.Error()
			}
		} else {
			body, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			last = fmt.Sprintf("%d %s", resp.StatusCode, body)
			if strconv.Itoa(resp.StatusCode) == args[1] && pattern.Match(body) {
				return
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			ts.Fatalf("%s answers:\n%s", args[0], last)
		}
	}
}

// post sends a body once, and compares status and answer: post URL STATUS BODY PATTERN
// [HEADER:VALUE...]. BEARER is its token.
func post(ts *testscript.TestScript, _ bool, args []string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, args[0], strings.NewReader(args[2]))
	ts.Check(err)
	req.Header.Set("Authorization", "Bearer "+ts.Getenv("BEARER"))
	for _, header := range args[4:] {
		name, value, _ := strings.Cut(header, ":")
		req.Header.Set(name, value)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	ts.Check(err)
	body, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if strconv.Itoa(resp.StatusCode) != args[1] || !regexp.MustCompile(args[3]).Match(body) {
		ts.Fatalf("%s answers:\n%d %s", args[0], resp.StatusCode, body)
	}
}

// oneLine wants the last command's error stream to be one line of this form: oneline PATTERN
func oneLine(ts *testscript.TestScript, _ bool, args []string) {
	text, ended := strings.CutSuffix(ts.ReadFile("stderr"), "\n")
	if !ended || strings.Contains(text, "\n") || !regexp.MustCompile("^eventhub: .*"+args[0]).MatchString(text) {
		ts.Fatalf("want one line that matches %q, have:\n%s", args[0], text)
	}
}

// fileMode compares a file's permissions: mode FILE 0600
func fileMode(ts *testscript.TestScript, _ bool, args []string) {
	info, err := os.Stat(ts.MkAbs(args[0]))
	ts.Check(err)
	if got := fmt.Sprintf("%04o", info.Mode().Perm()); got != args[1] {
		ts.Fatalf("%s has mode %s, want %s", args[0], got, args[1])
	}
}
