//go:build unix

package natstest

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Freeze stops the server's process by SIGSTOP, and returns when it stands still. Its connections
// stay: the kernel goes on to take what is sent to it.
func (s *Server) Freeze() {
	s.tb.Helper()
	s.child.Freeze()
}

// Thaw lets a frozen server go on.
func (s *Server) Thaw() {
	s.tb.Helper()
	s.child.Thaw()
}

// Freeze stops the child by SIGSTOP, and returns when it stands still.
func (c *Child) Freeze() {
	c.tb.Helper()
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		c.tb.Fatal(err)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for {
		state, err := exec.CommandContext(c.tb.Context(), "ps", "-o", "state=", "-p", strconv.Itoa(c.cmd.Process.Pid)).Output() //nolint:gosec // a number
		if err != nil {
			c.tb.Fatal(err)
		}
		if strings.HasPrefix(string(state), "T") {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			c.tb.Fatalf("child process %s does not stand still", c.role)
		}
	}
}

// Thaw lets a frozen child go on.
func (c *Child) Thaw() {
	c.tb.Helper()
	if err := c.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		c.tb.Fatal(err)
	}
}
