package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"eventhub/internal/lockorder/held"
)

var heldPackage = reflect.TypeFor[held.Named]().PkgPath()

// rig reports whether a package is for tests, so that no hub takes its locks.
func rig(path string) bool {
	return path == heldPackage || strings.HasSuffix(path, "/jetstream/natstest")
}

// writeOverlay writes copies of the files that have locks, and the file for go build -overlay that
// names them, to dir. It returns the path of that file and the names of all locks.
func writeOverlay(dir string) (overlay string, locks []string, err error) {
	out, err := exec.Command("go", "list", "-f", "{{.Module.Path}}\t{{.ImportPath}}{{range .GoFiles}}\t{{$.Dir}}/{{.}}{{end}}", "./...").Output() //nolint:noctx // it ends
	if err != nil {
		return "", nil, fmt.Errorf("go list: %w", err)
	}
	replace := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSpace(line), "\t")
		module, path := fields[0], fields[1]
		if rig(path) {
			continue
		}
		short := strings.TrimPrefix(path, module+"/")
		for _, name := range fields[2:] {
			source, err := os.ReadFile(name) //nolint:gosec // go list names the file
			if err != nil {
				return "", nil, err
			}
			text, found, err := rewrite(name, short, source)
			if err != nil {
				return "", nil, err
			}
			if len(found) == 0 {
				continue
			}
			locks = append(locks, found...)
			to := filepath.Join(dir, strconv.Itoa(len(replace))+".go")
			if err := os.WriteFile(to, text, 0o600); err != nil { //nolint:gosec // to is in a directory of this program
				return "", nil, err
			}
			replace[name] = to
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", nil, err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, locks, errors.Join(os.WriteFile(overlay, text, 0o600), unique(locks))
}

func unique(locks []string) error {
	slices.Sort(locks)
	for i, name := range locks[min(1, len(locks)):] {
		if name == locks[i] {
			return fmt.Errorf("two locks have the name %s", name)
		}
	}
	return nil
}

var notInNames = regexp.MustCompile(`\W`)

// rewrite returns the text of a file in which the types of its locks are those of package held, on
// the same lines, and the names of the locks. A name is the package, the type or function, and the
// field or variable: jetstream/Subscription.mu.
func rewrite(name, short string, source []byte) (text []byte, locks []string, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	for _, spec := range file.Imports {
		if spec.Path.Value == `"sync"` && spec.Name != nil {
			return nil, nil, fmt.Errorf("%s: package sync has to be imported by its own name", name)
		}
	}
	var kinds bytes.Buffer
	end := 0
	at := func(p token.Pos) int { return files.Position(p).Offset }
	var stack []ast.Node
	ast.Inspect(file, func(n ast.Node) bool {
		if n == nil {
			stack = stack[:len(stack)-1]
			return true
		}
		stack = append(stack, n)
		s, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := s.X.(*ast.Ident); !ok || x.Name != "sync" || s.Sel.Name != "Mutex" && s.Sel.Name != "RWMutex" {
			return true
		}
		lock := short + "/" + path(stack)
		if strings.Contains(lock, ",") {
			err = fmt.Errorf("%s: %s: give each lock a line of its own", files.Position(s.Pos()), lock)
		}
		if field, ok := stack[len(stack)-2].(*ast.Field); ok && len(field.Names) == 0 {
			err = fmt.Errorf("%s: a lock has to have a name", files.Position(s.Pos()))
		}
		locks = append(locks, lock)
		kind := "lockorder_" + notInNames.ReplaceAllString(filepath.Base(name), "_") + strconv.Itoa(len(locks))
		fmt.Fprintf(&kinds, "\ntype %s struct{}\n\nfunc (%s) LockName() string { return %q }\n", kind, kind, lock)
		text = append(text, source[end:at(s.Pos())]...)
		text = append(text, "lockorderheld.Lock["+kind+"]"...)
		end = at(s.End())
		return true
	})
	if err != nil || len(locks) == 0 {
		return nil, nil, err
	}
	text = append(text, source[end:]...)
	clause := at(file.Name.End())
	imports := fmt.Sprintf("; import lockorderheld %q", heldPackage)
	text = slices.Concat(text[:clause:clause], []byte(imports), text[clause:], []byte("\nvar _ sync.Mutex\n"), kinds.Bytes())
	return text, locks, nil
}

// path names a lock by the declarations around it, the innermost last.
func path(stack []ast.Node) string {
	var names []string
	for _, n := range stack {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if n.Recv != nil {
				names = append(names, strings.TrimPrefix(types.ExprString(n.Recv.List[0].Type), "*"))
			}
			names = append(names, n.Name.Name)
		case *ast.TypeSpec:
			names = append(names, n.Name.Name)
		case *ast.Field:
			names = append(names, list(n.Names))
		case *ast.ValueSpec:
			names = append(names, list(n.Names))
		}
	}
	return strings.Join(names, ".")
}

func list(names []*ast.Ident) string {
	var b strings.Builder
	for i, name := range names {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(name.Name)
	}
	return b.String()
}
