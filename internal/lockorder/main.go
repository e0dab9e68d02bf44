// Lockorder runs a command, such as a test, in whose builds each sync.Mutex and sync.RWMutex of
// this module records which others are taken while it is held, and compares them with order.txt:
//
//	go run ./internal/lockorder [-update] COMMAND...
//
// It fails when locks are taken in an order that the file does not have, when the file has a
// circle, and when the file names a lock that does not exist. Channels, WaitGroups and the locks of
// other modules do not count.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"eventhub/internal/lockorder/held"
)

const orderFile = "internal/lockorder/order.txt"

func main() {
	update := flag.Bool("update", false, "add what was seen to "+orderFile+", and remove what other lines imply")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: go run ./internal/lockorder [-update] COMMAND...")
		os.Exit(2)
	}
	if err := run(*update, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "lockorder:", err)
		os.Exit(1)
	}
}

func run(update bool, command []string) error {
	text, err := os.ReadFile(orderFile)
	if err != nil {
		return fmt.Errorf("%w: run this at the root of the repository", err)
	}
	o, err := readOrder(string(text))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "lockorder")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	overlay, locks, err := writeOverlay(dir)
	if err != nil {
		return err
	}
	seenFile := filepath.Join(dir, "seen")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // it is the caller's own command
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = append(os.Environ(), "GOFLAGS="+os.Getenv("GOFLAGS")+" '-overlay="+overlay+"'", held.File+"="+seenFile)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	failed := cmd.Run()
	text, err = os.ReadFile(seenFile) //nolint:gosec // the name is of this program
	switch {
	case errors.Is(err, fs.ErrNotExist): // no lock was taken while another was held
	case err != nil:
		return err
	}
	seen := readSeen(string(text))
	if update {
		o.add(seen)
		if err := os.WriteFile(orderFile, []byte(o.String()), 0o600); err != nil {
			return err
		}
	}
	faults := append(o.check(locks), o.compare(seen)...)
	for _, fault := range faults {
		fmt.Fprintln(os.Stderr, fault)
	}
	fmt.Fprintf(os.Stderr, "%d pairs of locks were seen of %d locks; %s has %d lines\n", len(seen), len(locks), orderFile, o.pairs())
	switch {
	case failed != nil:
		return fmt.Errorf("%s: %w", command[0], failed)
	case len(faults) > 0:
		return fmt.Errorf("%d faults in the order of locks", len(faults))
	}
	return nil
}
