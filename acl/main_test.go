package acl_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixtures reads what all languages share.
func fixtures[T any](tb testing.TB, name string) []T {
	tb.Helper()
	text, err := os.ReadFile(filepath.Join("..", "testdata", "topics", name))
	if err != nil {
		tb.Fatal(err)
	}
	var all []T
	if err := json.Unmarshal(text, &all); err != nil {
		tb.Fatalf("%s: %v", name, err)
	}
	return all
}
