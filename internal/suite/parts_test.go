package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// workflow is all that the workflow of CI may have: a condition or a step that may fail is an
// unknown field.
type workflow struct {
	Name        string
	On          map[string]any
	Permissions map[string]string
	Concurrency map[string]any
	Jobs        map[string]struct {
		Name     string
		RunsOn   string `yaml:"runs-on"`
		Strategy struct {
			FailFast bool `yaml:"fail-fast"`
			Matrix   struct{ Part []string }
		}
		Container      map[string]string
		TimeoutMinutes int `yaml:"timeout-minutes"`
		Env            map[string]string
		Steps          []struct {
			Uses, Run string
			With      map[string]string
		}
	}
}

// The workflow runs each part of .ci/run, which tests each package once.
func TestPartsOfTheWorkflow(t *testing.T) {
	t.Parallel()
	lines := func(name string, args ...string) []string {
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = "../.."
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSpace(string(out)), "\n")
	}
	parts := lines(".ci/run", "--parts")
	text, err := os.ReadFile("../../.github/workflows/ci.yml")
	if err != nil {
		t.Fatal(err)
	}
	var flow workflow
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&flow); err != nil {
		t.Fatal(err)
	}
	job := flow.Jobs["run"]
	if !slices.Equal(job.Strategy.Matrix.Part, parts) {
		t.Errorf("the workflow runs %q, .ci/run has %q", job.Strategy.Matrix.Part, parts)
	}
	if last := job.Steps[len(job.Steps)-1].Run; last != ".ci/run ${{ matrix.part }}" {
		t.Errorf("the workflow ends with %q", last)
	}
	script, err := os.ReadFile("../../.ci/run")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		// Without arguments all parts run, of the race suite in one go.
		"'') set -- lint documents race clients figures ;;",
		"CI=true .ci/test --strict ",
	} {
		if !strings.Contains(string(script), want) {
			t.Errorf(".ci/run lacks %q", want)
		}
	}
	for _, part := range parts {
		if !strings.Contains(string(script), "\npart_"+part+"() {") {
			t.Errorf(".ci/run has no part_%s", part)
		}
	}
	var tested []string
	for _, line := range lines(".ci/run", "--packages") {
		part, pkg, _ := strings.Cut(line, " ")
		if !slices.Contains(parts, part) {
			t.Errorf("%s is tested by %q, which is no part", pkg, part)
		}
		tested = append(tested, pkg)
	}
	slices.Sort(tested)
	if all := lines("go", "list", "./..."); !slices.Equal(tested, all) {
		t.Errorf("the parts test %q, want %q", tested, all)
	}
}

// Tasks and scripts name tests that there are.
func TestNamedTestsExist(t *testing.T) {
	t.Parallel()
	quoted := regexp.MustCompile(`-run[= ]'?([^' ]+)'?`)
	named := 0
	known := make(map[string][]string) // tests by package
	for _, file := range []string{"../../Taskfile.yml", "../../.ci/long"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", "")) {
			run := quoted.FindStringSubmatch(line)
			pkg := regexp.MustCompile(`\./[a-z/]+`).FindString(line)
			if run == nil || run[1] == "^$" || pkg == "" {
				continue
			}
			if known[pkg] == nil {
				known[pkg] = declaredTests(t, filepath.Join("../..", pkg))
			}
			for _, one := range alternatives(run[1]) {
				named++
				matches := regexp.MustCompile(one).MatchString
				if !slices.ContainsFunc(known[pkg], matches) {
					t.Errorf("%s: %s has no test %s", file, pkg, one)
				}
			}
		}
	}
	if named < 40 {
		t.Errorf("only %d tests are named", named)
	}
}

// declaredTests returns the names of the tests in a directory.
func declaredTests(t *testing.T, dir string) (names []string) {
	t.Helper()
	sources, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if name, ok := strings.CutPrefix(line, "func Test"); ok {
				name, _, _ = strings.Cut(name, "(")
				names = append(names, "Test"+name)
			}
		}
	}
	return names
}

// alternatives splits an expression such as ^Test(A|B)$ or A|B.
func alternatives(expression string) []string {
	before, rest, grouped := strings.Cut(expression, "(")
	if !grouped {
		return strings.Split(expression, "|")
	}
	inner, after, _ := strings.Cut(rest, ")")
	var all []string
	for _, one := range strings.Split(inner, "|") {
		all = append(all, before+one+after)
	}
	return all
}
