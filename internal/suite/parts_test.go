package main

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// The workflow runs each part of .ci/run, and the three parts of the race suite are the whole.
func TestPartsOfTheWorkflow(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "../../.ci/run", "--parts").Output()
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Fields(string(out))
	text, err := os.ReadFile("../../.github/workflows/ci.yml")
	if err != nil {
		t.Fatal(err)
	}
	var workflow struct {
		Jobs map[string]struct {
			Strategy struct{ Matrix struct{ Part []string } }
			Steps    []struct{ Run string }
		}
	}
	if err := yaml.Unmarshal(text, &workflow); err != nil {
		t.Fatal(err)
	}
	job := workflow.Jobs["run"]
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
	// Without arguments all parts run, of the race suite in one go.
	if want := "'') set -- lint documents race clients figures ;;"; !strings.Contains(string(script), want) {
		t.Errorf(".ci/run lacks %q", want)
	}
	for _, part := range parts {
		if !strings.Contains(string(script), "\npart_"+part+"() {") {
			t.Errorf(".ci/run has no part_%s", part)
		}
	}
}
