package examples

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRenamedModule renames a copy of the module as CONTRIBUTING.md says, and runs a program of
// another module against it.
func TestRenamedModule(t *testing.T) {
	const path = "example.com/you/eventhub"
	copied := filepath.Join(t.TempDir(), "eventhub")
	copyModule(t, "../..", copied)
	if out, err := call(t, copied, "go", "run", ".ci/module.go", "no module"); err == nil || !strings.Contains(out, "HOST/PATH") {
		t.Errorf("a path that is none: %v: %s", err, out)
	}
	if out, err := call(t, copied, "go", "run", ".ci/module.go", path); err != nil || !strings.Contains(out, path) {
		t.Fatalf("renaming: %v: %s", err, out)
	}
	out, err := call(t, copied, "go", "list", "-deps", "-test", "./...")
	if err != nil {
		t.Fatalf("listing the packages of the copy: %v: %s", err, out)
	}
	for pkg := range strings.FieldsSeq(out) {
		if pkg == "eventhub" || strings.HasPrefix(pkg, "eventhub/") {
			t.Errorf("the copy still has the package %s", pkg)
		}
	}
	rules, err := os.ReadFile(filepath.Join(copied, ".golangci.yml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"allow: [" + path + "/facade, " + path + "/acl, " + path + "/jetstream]", "{pkg: " + path + ",", "module-path: " + path + " #"} {
		if !strings.Contains(string(rules), want) {
			t.Errorf("the linter's rules have no %q", want)
		}
	}

	foreign := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.com/shop\n\ngo 1.26.0\n\nrequire " + path + " v0.0.0\n\nreplace " + path + " => " + copied + "\n",
		"main.go": `package main

import (
	"context"
	"fmt"

	"` + path + `/jetstream"
	"` + path + `/jetstream/embedded"
)

func main() {
	ctx := context.Background()
	server, err := embedded.Start(ctx, embedded.Config{DataDir: "data"})
	if err != nil {
		panic(err)
	}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: server})
	if err != nil {
		panic(err)
	}
	if err := bus.Close(); err != nil {
		panic(err)
	}
	fmt.Println("the bus was opened and closed")
}
`,
	} {
		if err := os.WriteFile(filepath.Join(foreign, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sums, err := os.ReadFile(filepath.Join(copied, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(foreign, "go.sum"), sums, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := call(t, foreign, "go", "build", "-mod=mod", "-o", "shop", "."); err != nil {
		t.Fatalf("building the foreign module: %v: %s", err, out)
	}
	if out, err := call(t, foreign, filepath.Join(foreign, "shop")); err != nil || !strings.Contains(out, "opened and closed") {
		t.Errorf("the foreign program: %v: %s", err, out)
	}
}

// copyModule copies the module's files, without what is no source: .git, .tools, data and installed
// packages.
func copyModule(t *testing.T, from, to string) {
	t.Helper()
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch d.Name() {
		case ".git", ".tools", "eventhub-data", "node_modules", "dist":
			if d.IsDir() {
				return filepath.SkipDir
			}
			return nil // the .git of a worktree is a file
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, name), 0o700)
		}
		if !d.Type().IsRegular() {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, name), text, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
}
