package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// The test binary measures and computes under the words of the program.
func TestMain(m *testing.M) {
	other(os.Args[1:])
	os.Exit(m.Run())
}

// A module with a package of each kind of outcome.
var outcomes = map[string]string{
	"go.mod": "module sample\n\ngo 1.26\n",
	"good/good_test.go": `package good
import "testing"
func TestGood(t *testing.T) { t.Run("part", func(*testing.T) {}) }
func TestSkipped(t *testing.T) { t.Skip("no such program") }
`,
	"bad/bad_test.go": `package bad
import "testing"
func TestBad(t *testing.T) {
	t.Log("time=now level=DEBUG msg=normal")
	t.Log("time=now level=WARN msg=odd")
	t.Run("one", func(t *testing.T) { t.Error("one is wrong") })
	t.Run("two", func(*testing.T) {})
}
func TestLater(*testing.T) {}
`,
	"panics/panics_test.go": `package panics
import "testing"
func TestPanics(*testing.T) { panic("out of luck") }
`,
	"exits/exits_test.go": `package exits
import ("fmt"; "os"; "testing")
func TestMain(m *testing.M) { m.Run(); fmt.Println("left behind"); os.Exit(1) }
func TestGood(*testing.T) {}
`,
	"leaves/leaves_test.go": `package leaves
import ("syscall"; "testing")
func TestLeaves(*testing.T) { syscall.Exit(0) }
func TestNever(t *testing.T) { t.Error("never") }
`,
	"loses/loses_test.go": `package loses
import ("os"; "testing")
func TestMain(m *testing.M) { m.Run(); os.Exit(0) }
func TestLost(t *testing.T) { t.Error("lost") }
`,
	"empty/empty_test.go": `package empty
import "testing"
func TestMain(*testing.M) {}
func TestGood(*testing.T) {}
`,
	"broken/broken_test.go": `package broken
func missing() { undefined() }
`,
	"none/none.go": "package none\n",
}

// sample runs the tests of packages of outcomes.
func sample(t *testing.T, s *suite, packages ...string) string {
	t.Helper()
	s.dir = t.TempDir()
	for name, text := range outcomes {
		path := filepath.Join(s.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	s.out = &out
	if err := s.run(t.Context(), append([]string{"-shuffle=7"}, packages...)); err != nil {
		t.Fatal(err)
	}
	s.printFailures()
	return out.String()
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	file, err := newCPUFile()
	if err != nil {
		t.Fatal(err)
	}
	s := &suite{cpuFile: file}
	out := sample(t, s, "./...")
	var failed []string
	for _, r := range s.failures() {
		failed = append(failed, r.String())
	}
	if want := []string{"bad TestBad/one", "broken", "exits", "leaves", "loses TestLost", "panics TestPanics"}; !slices.Equal(failed, want) {
		t.Errorf("failed: %q, want %q\n%s", failed, want, out)
	}
	if got := s.counts(); got != "6 passed, 6 failed, 1 skipped" {
		t.Errorf("the counts are %q", got)
	}
	for _, want := range []string{"one is wrong", "out of luck", "left behind", "undefined: undefined", "ok   good", "FAIL bad", "-shuffle=7"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in the output:\n%s", want, out)
		}
	}
	for _, unwanted := range []string{"msg=normal", "none"} {
		if strings.Contains(out, unwanted) {
			t.Errorf("%q is in the output:\n%s", unwanted, out)
		}
	}
	dir := t.TempDir()
	if err := s.writeLogs(dir, 3); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "run-3-bad-TestBad-one.log")); err != nil || !strings.Contains(string(text), "one is wrong") {
		t.Errorf("the log of a failed test is %q, %v", text, err)
	}
	used, err := readCPU(file)
	if err != nil || used["good"] <= 0 || used["bad"] <= 0 {
		t.Errorf("the test binaries took %v of CPU time, %v", used, err)
	}
}

func TestTimes(t *testing.T) {
	t.Parallel()
	file, err := newCPUFile()
	if err != nil {
		t.Fatal(err)
	}
	// The directory of this test is "suite".
	if err := noteCPU(filepath.Dir(mustGetwd(t)), file, 3e9); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	s := &suite{out: &out, cpuFile: file}
	tests := map[string]*result{
		"TestA":   {pkg: "m/suite", test: "TestA", seconds: 4},
		"TestA/b": {pkg: "m/suite", test: "TestA/b", seconds: 9},
		"TestC":   {pkg: "m/suite", test: "TestC", seconds: 5},
	}
	s.packages = map[string]*pkg{"m/suite": {result: result{pkg: "m/suite", seconds: 7}, tests: tests}}
	if err := s.printTimes(1); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| suite | 7 | 3 | 9 | 2 |\n", "| suite TestC | 5.0 |\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the times lack %q:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "TestA |") {
		t.Errorf("more tests than asked for:\n%s", &out)
	}
}

func mustGetwd(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// The load computes, and ends when it is told to.
func TestLoad(t *testing.T) {
	t.Parallel()
	end, err := startLoad(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	end()
	end()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	one := exec.CommandContext(ctx, self, burnCommand)
	if err := one.Run(); ctx.Err() == nil || one.ProcessState.UserTime() < 20*time.Millisecond {
		t.Errorf("the load computed for %v, and ended with %v", one.ProcessState.UserTime(), err)
	}
}

// With -strict, a skipped test and a slow one that is not listed are refused.
func TestStrict(t *testing.T) {
	t.Parallel()
	s := &suite{}
	sample(t, s, "./good")
	var out bytes.Buffer
	s.out = &out
	if s.checkStrict(nil) || !strings.Contains(out.String(), "skipped: good TestSkipped") || !strings.Contains(out.String(), "no such program") {
		t.Errorf("a skipped test passed:\n%s", &out)
	}
	s.packages["sample/empty"] = &pkg{result: result{pkg: "sample/empty", action: "pass"}}
	if s.checkStrict(nil) || !strings.Contains(out.String(), "empty: package empty ran no test") {
		t.Errorf("a package without a test passed:\n%s", &out)
	}
	delete(s.packages, "sample/empty")
	delete(s.packages["sample/good"].tests, "TestSkipped")
	out.Reset()
	if !s.checkStrict(nil) || out.Len() > 0 {
		t.Errorf("good tests were refused:\n%s", &out)
	}
	slow := s.packages["sample/good"].tests["TestGood/part"]
	slow.seconds = testSeconds + 1
	if s.checkStrict(nil) || !strings.Contains(out.String(), "slow: good TestGood/part took 16.0 s, and") {
		t.Errorf("a slow test passed:\n%s", &out)
	}
	listed := limits{{"good", "TestGood"}: 40}
	if !s.checkStrict(listed) {
		t.Error("a listed test was refused")
	}
	slow.seconds = 41
	if s.checkStrict(listed) {
		t.Error("a listed test passed beyond its bound")
	}
	if !s.checkStrict(anyTime()) {
		t.Error("a slow test was refused beside a load")
	}
}

// A test that took too long beside others is measured again alone.
func TestMeasureAgain(t *testing.T) {
	t.Parallel()
	s := &suite{slowdown: func() float64 { return 1 }}
	sample(t, s, "./good", "./bad")
	good, bad := s.packages["sample/good"], s.packages["sample/bad"]
	good.tests["TestGood/part"].seconds = testSeconds + 1
	good.tests["TestSkipped"].seconds = 0
	bad.tests["TestLater"].seconds = testSeconds + 1
	bad.tests["TestBad/two"].seconds = testSeconds + 1
	var out bytes.Buffer
	s.out = &out
	// TestBad fails again, as it did before; had it passed before, the second failure would count.
	bad.tests["TestBad/one"].action = "pass"
	if err := s.measureAgain(t.Context(), []string{"-shuffle=7", "./good", "./bad"}, limits{{"bad", "TestBad"}: testSeconds}); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*result{good.tests["TestGood/part"], bad.tests["TestLater"], bad.tests["TestBad/two"]} {
		if r.seconds >= testSeconds {
			t.Errorf("%s took %v s again", r, r.seconds)
		}
	}
	for _, want := range []string{"once more, alone: good TestGood\n", "good TestGood/part: 16.0 s, and 0.0 s alone; 0.0 s on the usual machine"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in the output:\n%s", want, &out)
		}
	}
	if failed := s.failures(); len(failed) != 1 || failed[0].test != "TestBad/one" {
		t.Errorf("failed: %q", failed)
	}
	bad.tests["TestLater"].seconds = 4*testSeconds + 1
	if err := s.measureAgain(t.Context(), nil, nil); err != nil || bad.tests["TestLater"].seconds < testSeconds {
		t.Errorf("a test that stood still was measured again: %v", err)
	}
	if n := len(good.tests); n != 3 {
		t.Errorf("%d tests are left of a package with 3", n)
	}
}

// What a slow machine adds to computing is no fault of a test. Waiting takes as long anywhere.
func TestUsualSeconds(t *testing.T) {
	t.Parallel()
	for _, one := range []struct{ wall, cpu, slowdown, want float64 }{
		{wall: 20, cpu: 19, slowdown: 1, want: 20},
		{wall: 20, cpu: 0, slowdown: 2, want: 20},
		{wall: 20, cpu: 10, slowdown: 2, want: 15},
		{wall: 20, cpu: 20, slowdown: 2, want: 10},
		{wall: 20, cpu: 40, slowdown: 2, want: 10}, // two cores
	} {
		if got := usualSeconds(one.wall, one.cpu, one.slowdown); got != one.want {
			t.Errorf("%+v: got %v", one, got)
		}
	}
	if got := slowdown(); got < 1 {
		t.Errorf("the machine is %v times slower than usual", got)
	}
}

func TestNoPackage(t *testing.T) {
	t.Parallel()
	s := &suite{dir: t.TempDir(), out: &bytes.Buffer{}}
	if err := s.run(t.Context(), []string{"-nonsense"}); err == nil {
		t.Error("a wrong flag is no error")
	}
}

// The list names tests that there are, each in its package.
func TestListedTestsExist(t *testing.T) {
	t.Parallel()
	l, err := readLimits(slowList)
	if err != nil {
		t.Fatal(err)
	}
	for key := range l {
		dir := filepath.Join("..", "..", filepath.FromSlash(key.pkg))
		files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("slow.txt: there is no package %s with tests", key.pkg)
			continue
		}
		found := key.test == ""
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			found = found || bytes.Contains(text, []byte("func "+key.test+"("))
		}
		if !found {
			t.Errorf("slow.txt: package %s has no %s", key.pkg, key.test)
		}
	}
}

func TestListOfLimits(t *testing.T) {
	t.Parallel()
	l, err := readLimits("# why\n\nfacade TestA 20s a reason\nfacade - 2m a reason\n")
	if want := (limits{{"facade", "TestA"}: 20, {"facade", ""}: 120}); err != nil || fmt.Sprint(l) != fmt.Sprint(want) {
		t.Errorf("the list is %v, %v; want %v", l, err, want)
	}
	for _, text := range []string{"facade TestA 20s", "facade TestA 20 a reason", "facade TestA 20s a reason\nfacade TestA 30s a reason"} {
		if _, err := readLimits(text); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}
