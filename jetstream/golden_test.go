package jetstream

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// Golden compares a text with a file in testdata, or writes it there with -update.
func Golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	have, want := strings.Split(text, "\n"), strings.Split(string(file), "\n")
	first := 0
	for first < min(len(have), len(want)) && have[first] == want[first] {
		first++
	}
	if first == len(have) && first == len(want) {
		return
	}
	last := 0
	for last < min(len(have), len(want))-first && have[len(have)-1-last] == want[len(want)-1-last] {
		last++
	}
	t.Errorf("%s:%d differs; if that is meant, run go test ./jetstream -run %s -update, and read what changed\nhave:\n%s\nwant:\n%s",
		path, first+1, t.Name(), strings.Join(have[first:len(have)-last], "\n"), strings.Join(want[first:len(want)-last], "\n"))
}
