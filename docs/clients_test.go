package docs

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// exampleFiles are the patterns of the examples of each client, in the order of the columns of
// clients.md.
var exampleFiles = []string{"sdk/examples/*", "sdk/go/example*_test.go", "sdk/python/examples/*.py"}

// TestClients checks the table of features in clients.md. Each feature has an example in each
// language that has examples, or says that it is not offered there; and each example belongs to a
// feature.
func TestClients(t *testing.T) {
	const page = "docs/clients.md"
	texts := textFiles(t, ".md", ".go")
	row := regexp.MustCompile(`(?m)^\| (.+?) \|(.*?)\|(.*?)\|(.*?)\|$`)
	rows := row.FindAllStringSubmatch(texts[page], -1)
	if len(rows) < 12 {
		t.Fatalf("%s has a table of %d rows", page, len(rows))
	}
	links := regexp.MustCompile(`\[([^]]+)\]\(\.\./([^)#]+)\)`)
	for column, pattern := range exampleFiles {
		found, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		unlisted := make(map[string]bool)
		for _, path := range found {
			name, err := filepath.Rel(root, path)
			if err != nil {
				t.Fatal(err)
			}
			unlisted[filepath.ToSlash(name)] = true
		}
		if column == 0 && len(found) == 0 {
			t.Errorf("there are no files of %s", pattern)
		}
		for _, cells := range rows[1:] { // the first is the head
			feature, cell := cells[1], strings.TrimSpace(cells[2+column])
			if feature == "---" {
				continue
			}
			examples := links.FindAllStringSubmatch(cell, -1)
			if len(found) > 0 && len(examples) == 0 && cell != "not offered" {
				t.Errorf("%s: %q has no example of %s: link to one, or write \"not offered\"", page, feature, pattern)
			}
			for _, m := range examples {
				text, file := strings.Trim(m[1], "`"), m[2]
				if same, err := filepath.Match(pattern, file); err != nil || !same {
					t.Errorf("%s: %q links to %s, which is not one of %s (%v)", page, feature, file, pattern, err)
				}
				// The text of a link is the name of a Go function, or that of the file.
				if strings.HasSuffix(file, ".go") && !strings.Contains(texts[file], "\nfunc "+text+"()") {
					t.Errorf("%s: %q links to the function %s, which %s does not have", page, feature, text, file)
				}
				delete(unlisted, file)
			}
		}
		for name := range unlisted {
			t.Errorf("%s does not list %s", page, name)
		}
	}
}
