// Command suite runs the tests of the module, prints a line a package, and says what the tests
// cost:
//
//	go run ./internal/suite [flags] [-- flags and packages of go test]
//
// It ends with status 1 when a test fails and, with -strict, when a test is skipped or takes longer
// than it may. A test that took longer beside the others is measured again alone, which decides;
// for this, flags of go test that have a value are written -name=value. On a machine that computes
// at half the usual speed, half of the computing counts. With -load, no test is too slow. The last
// line counts: "N passed, N failed, N skipped".
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

func main() {
	other(os.Args[1:])
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// other does what this program is started for beside running tests, and ends it.
func other(args []string) {
	switch {
	case len(args) > 3 && args[0] == measureCommand:
		os.Exit(measure(args[1:]))
	case len(args) == 1 && args[0] == burnCommand:
		burn()
	}
}

// command runs the suite once, or as often as -repeat says, and returns whether all was well.
func command(ctx context.Context, args []string) (bool, error) {
	flags := flag.NewFlagSet("suite", flag.ExitOnError)
	strict := flags.Bool("strict", false, "fail for a skipped test, and for one that alone takes longer than slow.txt allows")
	slowest := flags.Int("slowest", 0, "print the packages, and so many of the slowest tests, with their times")
	repeat := flags.Int("repeat", 1, "how often to run")
	load := flags.Int("load", 0, "how many busy processes compute meanwhile")
	logs := flags.String("logs", "", "directory for the output of each failed test; by default none is kept")
	verbose := flags.Bool("v", false, "print all that the tests print")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	limits, err := readLimits(slowList)
	if err != nil {
		return false, fmt.Errorf("slow.txt: %w", err)
	}
	if *load > 0 {
		limits = anyTime()
	}
	end, err := startLoad(ctx, *load)
	if err != nil {
		return false, err
	}
	defer end()
	ok := true
	var failures []string
	for i := range *repeat {
		s := &suite{out: os.Stdout, verbose: *verbose, slowdown: slowdown}
		if *slowest > 0 {
			if s.cpuFile, err = newCPUFile(); err != nil {
				return false, err
			}
		}
		if err := s.run(ctx, flags.Args()); err != nil {
			return false, err
		}
		if *strict {
			if err := s.measureAgain(ctx, flags.Args(), limits); err != nil {
				return false, err
			}
		}
		s.printFailures()
		if *logs != "" {
			if err := s.writeLogs(*logs, i+1); err != nil {
				return false, err
			}
		}
		if *slowest > 0 {
			if err := s.printTimes(*slowest); err != nil {
				return false, err
			}
		}
		good := s.failed() == 0
		if *strict && !s.checkStrict(limits) {
			good = false
		}
		s.printf("%s\n", s.counts())
		ok = ok && good
		if *repeat > 1 {
			for _, r := range s.failures() {
				failures = append(failures, fmt.Sprintf("run %d, -shuffle=%s: %s", i+1, s.packages[r.pkg].seed, r))
			}
			s.printf("run %d of %d ended; failures so far: %d\n%s", i+1, *repeat, len(failures), lines(failures))
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	return ok, nil
}

func lines(all []string) string {
	var b strings.Builder
	for _, line := range all {
		b.WriteString("  " + line + "\n")
	}
	return b.String()
}
