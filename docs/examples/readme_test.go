package examples

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestReadmeShowsTheWebPage compares the page that the README shows with the file that the tests
// run.
func TestReadmeShowsTheWebPage(t *testing.T) {
	file, err := os.ReadFile(clientFile(t, "greetings.html"))
	if err != nil {
		t.Fatal(err)
	}
	shown := slices.ContainsFunc(codeBlocks(t, "../../README.md"), func(b codeBlock) bool {
		return b.language == "html" && strings.TrimSpace(b.text) == strings.TrimSpace(string(file))
	})
	if !shown {
		t.Error("the README shows another page than docs/examples/clients/greetings.html")
	}
}
