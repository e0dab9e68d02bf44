// Command module renames the module of this checkout: go run .ci/module.go PATH
//
// It rewrites go.mod, the imports of all Go files, and the rules of the linter.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: go run .ci/module.go PATH, such as example.com/you/eventhub")
		os.Exit(2)
	}
	if err := rename(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "renaming the module:", err)
		os.Exit(1)
	}
}

// modulePath is stricter than Go: it is what can be published.
var modulePath = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9.-]*\.[A-Za-z]+(/[A-Za-z0-9][A-Za-z0-9._~-]*)+$`)

func rename(to string) error {
	if !modulePath.MatchString(to) {
		return fmt.Errorf("%q is no path to publish a module at: give HOST/PATH, such as example.com/you/eventhub", to)
	}
	out, err := exec.Command("go", "list", "-m").Output()
	if err != nil {
		return fmt.Errorf("go list -m: %w: run this in the root of the checkout", err)
	}
	from := strings.TrimSpace(string(out))
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" || d.Name() == "dist"):
			return filepath.SkipDir
		case filepath.Ext(path) == ".go" && d.Type().IsRegular():
			return edit(path, func(text []byte) ([]byte, error) { return renameImports(text, from, to) })
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := edit(".golangci.yml", func(text []byte) ([]byte, error) { return renameRules(text, from, to) }); err != nil {
		return err
	}
	if out, err := exec.Command("go", "mod", "edit", "-module", to).CombinedOutput(); err != nil {
		return fmt.Errorf("go mod edit: %w: %s", err, out)
	}
	fmt.Printf("the module %s is now called %s\n", from, to)
	return nil
}

// edit rewrites a file if that changes it.
func edit(path string, change func([]byte) ([]byte, error)) error {
	before, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	after, err := change(before)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if bytes.Equal(before, after) {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, after, info.Mode().Perm())
}

func renameImports(text []byte, from, to string) ([]byte, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, parser.ImportsOnly)
	if err != nil {
		return nil, err
	}
	var out []byte
	done := 0
	for _, spec := range file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return nil, err
		}
		rest, ours := strings.CutPrefix(path, from)
		if !ours || rest != "" && rest[0] != '/' {
			continue
		}
		at := files.Position(spec.Path.Pos()).Offset
		out = append(append(out, text[done:at]...), strconv.Quote(to+rest)...)
		done = at + len(spec.Path.Value)
	}
	return append(out, text[done:]...), nil
}

// renameRules rewrites the module's path where the linter's settings hold one.
func renameRules(text []byte, from, to string) ([]byte, error) {
	setting := regexp.MustCompile(`(?m)^.*\b(allow|pkg|module-path): .*$`)
	path := regexp.MustCompile(`([\[ ])` + regexp.QuoteMeta(from) + `([\],/} ]|$)`)
	found := false
	text = setting.ReplaceAllFunc(text, func(line []byte) []byte {
		before, comment, commented := bytes.Cut(line, []byte(" #"))
		after := path.ReplaceAll(before, []byte("${1}"+to+"${2}"))
		// Neighbours share a separator, so one pass leaves every second one out.
		after = path.ReplaceAll(after, []byte("${1}"+to+"${2}"))
		found = found || !bytes.Equal(before, after)
		if commented {
			after = append(append(after, " #"...), comment...)
		}
		return after
	})
	if !found {
		return nil, errors.New("the rules of the linter do not name the module")
	}
	return text, nil
}
