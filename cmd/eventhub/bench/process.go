package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Limits of a started process.
const (
	startTimeout = 30 * time.Second
	// A server writes the state of each group, which took 33 s with 2,450 of them.
	stopTimeout = time.Minute
	keepLog     = 16 << 10 // maximum size of the log shown in an error, in bytes
)

// process is a started server. It ends with close. On Linux, it also ends if this process dies.
type process struct {
	name string
	cmd  *exec.Cmd
	stop context.CancelFunc
	log  logTail
	// said holds the lines "name value" that the process printed before it was ready.
	said  map[string]string
	ended chan struct{} // closed when the process has ended; err is then set
	err   error
}

// startProcess runs binary with env added to the basic environment, and waits for the output line
// that begins with last.
func startProcess(ctx context.Context, name, binary string, env []string, last string, args ...string) (*process, error) {
	p, ready, err := beginProcess(ctx, name, binary, env, last, args...)
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case <-ready:
		return p, nil
	case <-p.ended:
		p.stop()
		return nil, fmt.Errorf("%s ended during startup: %s", name, p.log.text())
	case <-timer.C:
		err = fmt.Errorf("%s was not ready after %v: %s", name, startTimeout, p.log.text())
	case <-ctx.Done():
		err = ctx.Err()
	}
	return nil, errors.Join(err, p.close())
}

// runProcess runs binary with env added to the basic environment. The caller finds out when it is
// ready.
func runProcess(ctx context.Context, name, binary string, env []string, args ...string) (*process, error) {
	p, _, err := beginProcess(ctx, name, binary, env, "", args...)
	return p, err
}

// beginProcess starts a process. ready is closed at the output line that begins with last.
func beginProcess(ctx context.Context, name, binary string, env []string, last string, args ...string) (_ *process, ready chan struct{}, err error) {
	ctx, stop := context.WithCancel(ctx)
	p := &process{name: name, stop: stop, said: make(map[string]string), ended: make(chan struct{})}
	p.cmd = exec.CommandContext(ctx, binary, args...) //nolint:gosec // this program, or one that the user named
	p.cmd.Env = append(childEnv(), env...)
	p.cmd.Stderr = &p.log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = stopTimeout
	p.cmd.SysProcAttr = endWithParent()
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		stop()
		return nil, nil, fmt.Errorf("start %s: %w", name, err)
	}
	ready = make(chan struct{})
	go func() { // owned by close, which waits for ended
		defer close(p.ended)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			field, value, _ := strings.Cut(strings.TrimSpace(lines.Text()), " ")
			p.said[field] = strings.TrimSpace(value)
			if last != "" && field == last {
				close(ready)
				break
			}
		}
		_, _ = io.Copy(io.Discard, out) // until the process ends
		p.err = p.cmd.Wait()
	}()
	return p, ready, nil
}

// close ends the process in order and waits for it.
func (p *process) close() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s ended unexpectedly (%v): %s", p.name, p.cmd.ProcessState, p.log.text())
	default:
	}
	p.stop()
	<-p.ended
	if p.cmd.ProcessState.Success() {
		return nil
	}
	return fmt.Errorf("%s failed during shutdown (%v): %s", p.name, p.cmd.ProcessState, p.log.text())
}

// childEnv returns the environment without variables that configure a hub. The flags specify the
// whole configuration.
func childEnv() []string {
	var env []string
	for _, pair := range os.Environ() {
		name, _, _ := strings.Cut(pair, "=")
		switch {
		case name == "PATH", name == "HOME", name == "TMPDIR", name == "GORACE", name == "SystemRoot",
			strings.HasPrefix(name, "GO") && strings.ToUpper(name) == name:
			env = append(env, pair)
		}
	}
	return env
}

// logTail keeps the end of a log. Its methods may be called concurrently.
type logTail struct {
	mu   sync.Mutex
	kept []byte
}

func (l *logTail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, p...)
	if over := len(l.kept) - keepLog; over > 0 {
		l.kept = append(l.kept[:0], l.kept[over:]...)
	}
	return len(p), nil
}

func (l *logTail) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.kept) == 0 {
		return "(empty log)"
	}
	return strings.TrimSpace(string(l.kept))
}
