package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// event is a line of "go test -json" (see "go doc test2json"), or of the build before it.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Elapsed    float64 // seconds, without the time in which a parallel test waited for its turn
	Output     string
}

// result is what became of a test, or of a package where test is empty.
type result struct {
	pkg, test string
	action    string // pass, fail or skip; "" as long as it runs
	seconds   float64
	output    []string // of a test that did not pass
	kept      int      // bytes of output
}

func (r *result) String() string { return strings.TrimSpace(short(r.pkg) + " " + r.test) }

// short is a package's path within the module.
func short(pkg string) string {
	_, rest, inside := strings.Cut(pkg, "/")
	if !inside {
		return pkg
	}
	return rest
}

// A test keeps its last maxOutput bytes.
const maxOutput = 4 << 20

func (r *result) say(text string) {
	r.output = append(r.output, text)
	r.kept += len(text)
	for r.kept > maxOutput {
		r.kept -= len(r.output[0])
		r.output = r.output[1:]
	}
}

// pkg is what became of a package.
type pkg struct {
	result
	tests map[string]*result
	seed  string // of -shuffle
}

// suite is one run of the tests. Only one goroutine uses it.
type suite struct {
	dir      string // the root of the module; "" for the current directory
	out      io.Writer
	verbose  bool
	cpuFile  string         // where test binaries note their CPU time; "" if they do not
	slowdown func() float64 // how many times slower than usual the machine computes
	packages map[string]*pkg
	builds   map[string][]string // what the compiler said
	wall     time.Duration
}

// printf prints for whoever runs the suite. That they no longer read is no reason to end.
func (s *suite) printf(format string, args ...any) { _, _ = fmt.Fprintf(s.out, format, args...) }

// run runs "go test" with args. A failed test is no error.
func (s *suite) run(ctx context.Context, args []string) error {
	begun := time.Now()
	all := []string{"test", "-json"}
	if s.cpuFile != "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		root, err := filepath.Abs(s.dir)
		if err != nil {
			return err
		}
		all = append(all, "-exec", fmt.Sprintf("%q %s %q %q", self, measureCommand, root, s.cpuFile))
	}
	cmd := exec.CommandContext(ctx, "go", append(all, args...)...) //nolint:gosec // runs what its caller says
	cmd.Dir = s.dir
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := s.read(stdout)
	err = cmd.Wait()
	s.wall = time.Since(begun)
	s.endAll()
	switch {
	case readErr != nil:
		return readErr
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && s.failed() == 0:
		return fmt.Errorf("go test: %w", err) // such as an unknown flag
	case len(s.packages) == 0:
		return fmt.Errorf("go test %s: no package was tested", strings.Join(args, " "))
	}
	return nil
}

// read follows the events of a run to their end.
func (s *suite) read(from io.Reader) error {
	s.packages = make(map[string]*pkg)
	s.builds = make(map[string][]string)
	scanner := bufio.NewScanner(from)
	scanner.Buffer(nil, 64<<20)
	for scanner.Scan() {
		var e event
		if json.Unmarshal(scanner.Bytes(), &e) != nil || e.Action == "" {
			s.printf("%s\n", scanner.Text()) // go itself says something
			continue
		}
		s.note(e)
	}
	return scanner.Err()
}

func (s *suite) note(e event) {
	if e.ImportPath != "" { // of a build
		// A test's variant is called "path [path.test]".
		path, _, _ := strings.Cut(e.ImportPath, " ")
		if e.Action == "build-output" {
			s.builds[path] = append(s.builds[path], e.Output)
		}
		return
	}
	p := s.packages[e.Package]
	if p == nil {
		p = &pkg{result: result{pkg: e.Package}, tests: make(map[string]*result)}
		s.packages[e.Package] = p
	}
	r := &p.result
	if e.Test != "" {
		if r = p.tests[e.Test]; r == nil {
			r = &result{pkg: e.Package, test: e.Test}
			p.tests[e.Test] = r
		}
	}
	switch e.Action {
	case "output":
		if s.verbose {
			s.printf("%s", e.Output)
		}
		if seed, ok := strings.CutPrefix(e.Output, "-test.shuffle "); ok {
			p.seed = strings.TrimSpace(seed)
		}
		r.say(e.Output)
	case "pass", "fail", "skip":
		r.action, r.seconds = e.Action, e.Elapsed
		if e.Action == "pass" {
			r.output, r.kept = nil, 0
		}
		if e.Test == "" {
			s.ended(p)
		}
	}
}

// endAll makes packages fail whose process ended in the middle of the tests, or with status 0 after
// a test that failed.
func (s *suite) endAll() {
	for _, p := range s.sorted() {
		failed := slices.ContainsFunc(mapValues(p.tests), func(r *result) bool { return r.action == "" || r.action == "fail" })
		if p.action == "" || p.action == "pass" && failed {
			p.action = "fail"
			p.say("the process of the tests ended with status 0 too early, or after a test that failed\n")
			s.ended(p)
		}
	}
}

// ended prints the line of a package, and what its failed tests said.
func (s *suite) ended(p *pkg) {
	if p.action == "skip" { // it has no tests
		return
	}
	top := 0
	for _, r := range p.tests {
		if r.action == "" { // the process ended before the test did
			r.action = "fail"
		}
		if !strings.Contains(r.test, "/") {
			top++
		}
	}
	word := map[string]string{"pass": "ok  ", "fail": "FAIL"}[p.action]
	s.printf("%s %-32s %7.1f s %5d tests\n", word, short(p.pkg), p.seconds, top)
	for _, r := range s.failuresOf(p) {
		s.printf("\n--- FAIL: %s\n%s\n", r, r.text(64<<10))
	}
}

// text returns the last bytes of what a test said, without the normal log of hubs.
func (r *result) text(most int) string {
	var b strings.Builder
	for _, line := range r.output {
		trimmed := strings.TrimSpace(line)
		logged := strings.HasPrefix(trimmed, "time=") || strings.Contains(trimmed, ".go:") && strings.Contains(trimmed, ": time=")
		if logged && !strings.Contains(trimmed, "level=WARN") && !strings.Contains(trimmed, "level=ERROR") {
			continue
		}
		if strings.HasPrefix(trimmed, "=== ") {
			continue
		}
		b.WriteString(line)
	}
	text := b.String()
	if len(text) > most {
		text = "...\n" + text[len(text)-most:]
	}
	return text
}

// failuresOf returns the failed tests of a package: of a test with failed subtests only these. A
// package that failed without a failed test stands for itself.
func (s *suite) failuresOf(p *pkg) (failed []*result) {
	if p.action != "fail" {
		return nil
	}
	for _, r := range p.tests {
		below := func(o *result) bool { return o.action == "fail" && strings.HasPrefix(o.test, r.test+"/") }
		if r.action != "fail" || slices.ContainsFunc(mapValues(p.tests), below) {
			continue
		}
		failed = append(failed, r)
	}
	if len(failed) == 0 {
		p.output = append(p.output, s.builds[p.pkg]...)
		failed = append(failed, &p.result)
	}
	slices.SortFunc(failed, func(a, b *result) int { return strings.Compare(a.test, b.test) })
	return failed
}

func mapValues(m map[string]*result) []*result {
	all := make([]*result, 0, len(m))
	for _, r := range m {
		all = append(all, r)
	}
	return all
}

// failures returns what failed in all packages.
func (s *suite) failures() (failed []*result) {
	for _, p := range s.sorted() {
		failed = append(failed, s.failuresOf(p)...)
	}
	return failed
}

func (s *suite) failed() int { return len(s.failures()) }

// sorted returns the packages by name.
func (s *suite) sorted() []*pkg {
	all := make([]*pkg, 0, len(s.packages))
	for _, p := range s.packages {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *pkg) int { return strings.Compare(a.pkg, b.pkg) })
	return all
}
