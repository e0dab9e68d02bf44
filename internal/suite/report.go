package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// printFailures repeats the end of what each failed test said, for that is what a log viewer shows.
func (s *suite) printFailures() {
	for _, r := range s.failures() {
		s.printf("\nfailed: %s (-shuffle=%s)\n%s\n", r, cmp.Or(s.packages[r.pkg].seed, "off"), r.text(6<<10))
	}
}

// counts is the last line: tests and subtests that passed, failed, and were skipped.
func (s *suite) counts() string {
	passed, skipped := 0, 0
	for _, p := range s.packages {
		for _, r := range p.tests {
			switch r.action {
			case "pass":
				passed++
			case "skip":
				skipped++
			}
		}
	}
	return fmt.Sprintf("%d passed, %d failed, %d skipped", passed, s.failed(), skipped)
}

// checkStrict prints what -strict refuses, and returns whether there is nothing.
func (s *suite) checkStrict(limits limits) bool {
	ok := true
	for _, p := range s.sorted() {
		for _, r := range byTime(p.tests) {
			if r.action == "skip" {
				ok = false
				s.printf("skipped: %s: nothing may be skipped\n%s", r, r.text(2<<10))
			}
			if limit := limits.of(r); r.seconds > limit {
				ok = false
				s.printf("slow: %s took %.1f s, and may take %.0f s: make it faster, or give internal/suite/slow.txt a row with the reason\n", r, r.seconds, limit)
			}
		}
		if p.action == "pass" && len(p.tests) == 0 {
			ok = false
			s.printf("empty: package %s ran no test\n", short(p.pkg))
		}
		if p.seconds > limits.ofPackage(p) {
			s.printf("note: package %s took %.0f s, over the aim of %d s\n", short(p.pkg), p.seconds, packageSeconds)
		}
	}
	return ok
}

// measureAgain runs each test that took longer than it may once more, with no other beside it, and
// keeps the time that it would have taken alone on the usual machine: what other tests, and a
// machine that is slow today, add is no fault of a test. Beyond four times its bound, a test is not
// slowed down by others, but stands still.
func (s *suite) measureAgain(ctx context.Context, args []string, limits limits) error {
	flags := slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return !strings.HasPrefix(arg, "-") })
	slower := s.slowdown()
	for _, p := range s.sorted() {
		var names []string
		for _, r := range byTime(p.tests) {
			name, _, _ := strings.Cut(r.test, "/")
			if most := limits.of(r); r.seconds > most && r.seconds <= 4*most*slower && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		for _, name := range names {
			if err := s.measureAlone(ctx, flags, p, name, limits); err != nil {
				return err
			}
		}
	}
	return nil
}

// measureAlone runs one test of a package once more.
func (s *suite) measureAlone(ctx context.Context, flags []string, p *pkg, name string, limits limits) error {
	s.printf("\nonce more, alone: %s %s\n", short(p.pkg), name)
	file, err := newCPUFile()
	if err != nil {
		return err
	}
	alone := &suite{dir: s.dir, out: s.out, verbose: s.verbose, cpuFile: file}
	before := s.slowdown()
	if err := alone.run(ctx, append(slices.Clone(flags), "-parallel=1", "-run=^"+name+"$", p.pkg)); err != nil {
		return err
	}
	slower := max(before, s.slowdown())
	cpu, err := readCPU(file)
	if err != nil {
		return err
	}
	for _, r := range byTime(alone.packages[p.pkg].tests) {
		wall := r.seconds
		r.seconds = usualSeconds(wall, cpu[short(p.pkg)].Seconds(), slower)
		before := p.tests[r.test]
		if before != nil && before.seconds > limits.of(r) {
			s.printf("%s: %.1f s, and %.1f s alone; %.1f s on the usual machine (this one computes at 1/%.1f of its speed)\n",
				r, before.seconds, wall, r.seconds, slower)
		}
		if before == nil || before.action == "pass" {
			p.tests[r.test] = r
		}
	}
	if again := alone.packages[p.pkg]; again.action == "fail" {
		p.action, p.seed, p.output = again.action, again.seed, again.output
	}
	return nil
}

// byTime returns tests, the slowest first.
func byTime(tests map[string]*result) []*result {
	all := mapValues(tests)
	slices.SortFunc(all, func(a, b *result) int {
		return cmp.Or(cmp.Compare(b.seconds, a.seconds), strings.Compare(a.test, b.test))
	})
	return all
}

// printTimes prints what the packages and the n slowest tests cost, as tables of Markdown.
func (s *suite) printTimes(n int) error {
	cpu, err := readCPU(s.cpuFile)
	if err != nil {
		return err
	}
	s.printf("\n| package | wall s | CPU s | sum of its tests s | tests |\n|---|--:|--:|--:|--:|\n")
	all := s.sorted()
	slices.SortStableFunc(all, func(a, b *pkg) int { return cmp.Compare(b.seconds, a.seconds) })
	var wall, computed, sum float64
	var tests int
	top := make(map[string]*result)
	for _, p := range all {
		own, count := 0.0, 0
		for _, r := range p.tests {
			if !strings.Contains(r.test, "/") {
				own += r.seconds
				count++
				top[r.String()] = r
			}
		}
		if count == 0 {
			continue
		}
		used := cpu[short(p.pkg)].Seconds()
		wall, computed, sum, tests = wall+p.seconds, computed+used, sum+own, tests+count
		if p.seconds >= 1 {
			s.printf("| %s | %.0f | %.0f | %.0f | %d |\n", short(p.pkg), p.seconds, used, own, count)
		}
	}
	s.printf("| all, in %.0f s | %.0f | %.0f | %.0f | %d |\n", s.wall.Seconds(), wall, computed, sum, tests)
	s.printf("\n| test | s |\n|---|--:|\n")
	for i, r := range byTime(top) {
		if i == n {
			break
		}
		s.printf("| %s | %.1f |\n", r, r.seconds)
	}
	s.printf("\n")
	return nil
}

// writeLogs keeps the whole output of each failed test of a run in a directory.
func (s *suite) writeLogs(dir string, run int) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	for _, r := range s.failures() {
		name := strings.NewReplacer("/", "-", " ", "-").Replace(fmt.Sprintf("run-%d-%s.log", run, r))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Join(r.output, "")), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// seconds converts a duration that a person wrote.
func seconds(text string) (float64, error) {
	d, err := time.ParseDuration(text)
	return d.Seconds(), err
}
