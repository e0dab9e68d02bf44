//go:build unix

package model

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestEffectsAreDocumented wants a row of docs/operations.md for each fault that the rig makes.
func TestEffectsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, found := strings.Cut(string(page), "\n## What clients see of faults\n")
	if !found {
		t.Fatal("there is no such part")
	}
	part, _, _ = strings.Cut(part, "\n## ")
	rows := map[string]bool{}
	for line := range strings.Lines(part) {
		if cells := strings.Split(line, "|"); len(cells) == 8 {
			rows[strings.TrimSpace(cells[1])] = !slices.ContainsFunc(cells[2:7], func(c string) bool { return strings.TrimSpace(c) == "" })
		}
	}
	// What the rig only notices: a consequence, or the machine's own doing.
	noticed := []string{"cut", "stall-hub", "stall-harness"}
	kinds := []string{silentKind}
	for _, a := range allowances {
		if !slices.Contains(noticed, a.kind) {
			kinds = append(kinds, a.kind)
		}
	}
	for _, kind := range kinds {
		at := slices.IndexFunc(shown, func(s struct{ kind, row string }) bool { return s.kind == kind })
		if at < 0 || !rows[shown[at].row] {
			t.Errorf("the fault %s has no row, or one with an empty cell", kind)
		}
	}
}
