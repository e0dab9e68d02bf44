package examples

import (
	"flag"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

var moduleServer = flag.Bool("module.server", false, "run a program with a bus and a server against the renamed module, which takes a minute to compile, instead of a smaller one")

// foreignSmall and foreignServer are programs of another module.
const (
	foreignSmall = `package main

import (
	"fmt"
	"time"

	"eventhub/acl"
)

func main() {
	if _, err := acl.Sign([]byte("a secret of more than thirty-two bytes"), acl.Grant{Subject: "shop", Scopes: []string{"publish:orders"}, TTL: time.Minute}); err != nil {
		panic(err)
	}
	fmt.Println("a token was signed")
}
`
	foreignServer = `package main

import (
	"context"
	"fmt"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
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
`
)

// TestRenamedModule renames a copy of the module as CONTRIBUTING.md says, and runs a program of
// another module against it.
func TestRenamedModule(t *testing.T) {
	t.Parallel()
	const path = "example.com/you/eventhub"
	copied := filepath.Join(t.TempDir(), "eventhub")
	copyModule(t, "../..", copied)
	rename := filepath.Join(t.TempDir(), "rename")
	goBuild(t, copied, "-o", rename, ".ci/module.go")
	if out, err := call(t, copied, rename, "no module"); err == nil || !strings.Contains(out, "HOST/PATH") {
		t.Errorf("a path that is none: %v: %s", err, out)
	}
	if out, err := call(t, copied, rename, path); err != nil || !strings.Contains(out, path) {
		t.Fatalf("renaming: %v: %s", err, out)
	}
	checkImports(t, copied, path)
	rules, err := os.ReadFile(filepath.Join(copied, ".golangci.yml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"allow: [" + path + "/facade, " + path + "/acl, " + path + "/jetstream]", "{pkg: " + path + ",", "module-path: " + path + " #"} {
		if !strings.Contains(string(rules), want) {
			t.Errorf("the linter's rules have no %q", want)
		}
	}

	program, prints := foreignSmall, "a token was signed"
	if *moduleServer {
		program, prints = foreignServer, "the bus was opened and closed"
	}
	foreign := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module example.com/shop\n\ngo 1.26.0\n\nrequire " + path + " v0.0.0\n\nreplace " + path + " => " + copied + "\n",
		"main.go": strings.ReplaceAll(program, "eventhub/", path+"/"),
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
	goBuild(t, foreign, "-mod=mod", "-o", "shop", ".")
	if out, err := call(t, foreign, filepath.Join(foreign, "shop")); err != nil || !strings.Contains(out, prints) {
		t.Errorf("the foreign program: %v: %s", err, out)
	}
}

// goBuild compiles, however long that takes.
func goBuild(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"build", "-ldflags=-s -w"}, args...)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build %v: %v: %s", args, err, out)
	}
}

// checkImports wants each import of a file of Go in the module, tests and other systems included,
// to be of a folder that exists, or of another module.
func checkImports(t *testing.T, root, module string) {
	t.Helper()
	files, ours := 0, 0
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(file) != ".go" {
			return err
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		files++
		for _, spec := range parsed.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if name == "eventhub" || strings.HasPrefix(name, "eventhub/") {
				t.Errorf("%s still imports %s", file, name)
			}
			if folder, mine := strings.CutPrefix(name, module+"/"); mine {
				ours++
				if _, err := os.Stat(filepath.Join(root, filepath.FromSlash(folder))); err != nil {
					t.Errorf("%s imports %s: %v", file, name, err)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 500 || ours < files/2 {
		t.Errorf("%d files were read, with %d imports of the module", files, ours)
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
