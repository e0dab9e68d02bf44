package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"eventhub/sdk/go/wire"
)

// A terminal that is closed ends a hub that was started in it, in good order: nothing is lost.
func TestClosedTerminalEndsTheHubInGoodOrder(t *testing.T) {
	t.Parallel()
	screen, keyboard := openTerminal(t)
	hub := startNodeWith(t, func(cmd *exec.Cmd) {
		cmd.Stdin = keyboard
		// its standard input becomes its terminal
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	})
	_ = keyboard.Close() // the hub has its own
	c := hub.dial()
	if _, err := c.Publish(t.Context(), "bye", []byte("1"), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := screen.Close(); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if closed, ok := errors.AsType[*wire.CloseError](c.Err()); !ok || closed.Reason != "draining" {
		t.Errorf("the client was told %v", c.Err())
	}
	<-hub.ended
	if code := hub.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the hub ended with exit code %d:\n%s", code, hub.log.String())
	}
}

// A hub that was started with SIGHUP ignored, as by nohup, outlives its terminal.
func TestClosedTerminalUnderNohup(t *testing.T) {
	t.Parallel()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	screen, keyboard := openTerminal(t)
	hub := startNodeWith(t, func(cmd *exec.Cmd) {
		cmd.Stdin = keyboard
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		cmd.Args = append([]string{bash, "-c", `trap "" HUP; exec -a eventhub "$0" "$@"`, cmd.Path}, cmd.Args[1:]...)
		cmd.Path = bash
	})
	_ = keyboard.Close() // the hub has its own
	c := hub.dial()
	if err := screen.Close(); err != nil {
		t.Fatal(err)
	}
	hub.signal(syscall.SIGHUP)
	for range 100 { // a hub that drains ends the connection
		publishTo(t, c, "still", "1")
	}
	hub.terminate()
}

// A service manager reloads a hub by SIGHUP. The hub goes on, even if it has no certificate to
// reload, and ends by SIGTERM.
func TestReloadKeepsAHubWithoutATerminal(t *testing.T) {
	t.Parallel()
	hub := startNodeWith(t, func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} })
	c := hub.dial()
	for i := range 2 {
		hub.signal(syscall.SIGHUP)
		eventually(t, "the hub says what it reloaded", func() bool {
			return strings.Count(hub.log.String(), "received SIGHUP; there is no TLS certificate to reload") == i+1
		})
		publishTo(t, c, "still", "1")
	}
	hub.terminate()
}

// openTerminal opens a new terminal: the end that a window has, and the end that programs have.
func openTerminal(t *testing.T) (screen, keyboard *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = screen.Close() })
	if err := unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	keyboard, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = keyboard.Close() })
	return screen, keyboard
}
