package jetstream_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"eventhub/jetstream"
)

var blankLines = regexp.MustCompile(`\n\s*\n`)

// exported returns the exported declarations of a package, without comments and bodies, and the
// numbers of names and of methods. Names that repeat one of another package do not count. Methods
// that an exported type has from a type that it embeds, and that is not exported, are methods of
// that type.
func exported(t *testing.T, files []string) (text string, names, methods int) {
	t.Helper()
	set := token.NewFileSet()
	var decls []string
	show := func(before string, node any) {
		var b bytes.Buffer
		b.WriteString(before)
		if err := printer.Fprint(&b, set, node); err != nil {
			t.Fatal(err)
		}
		decls = append(decls, blankLines.ReplaceAllString(b.String(), "\n")+"\n")
	}
	var parsed []*ast.File
	embedded := make(map[string]bool) // types that exported types embed
	for _, name := range files {
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		parsed = append(parsed, file)
	}
	for more := true; more; {
		more = false
		for _, file := range parsed {
			ast.Inspect(file, func(n ast.Node) bool {
				spec, ok := n.(*ast.TypeSpec)
				if !ok || !spec.Name.IsExported() && !embedded[spec.Name.Name] {
					return true
				}
				if s, ok := spec.Type.(*ast.StructType); ok {
					for _, field := range s.Fields.List {
						if name := base(field.Type); len(field.Names) == 0 && !embedded[name] {
							embedded[name], more = true, true
						}
					}
				}
				return true
			})
		}
	}
	for _, file := range parsed {
		ast.FileExports(file)
		for _, decl := range file.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				decl.Body = nil
				if decl.Recv == nil {
					names++
				} else if of := base(decl.Recv.List[0].Type); ast.IsExported(of) || embedded[of] {
					methods++
				} else {
					continue
				}
				show("", decl)
			case *ast.GenDecl:
				if decl.Tok == token.IMPORT {
					continue
				}
				whole := false // constants that take their value from their place
				for _, spec := range decl.Specs {
					if !isAlias(spec) {
						names++
					}
					if value, ok := spec.(*ast.ValueSpec); ok {
						names += len(value.Names) - 1
						whole = whole || decl.Tok == token.CONST && len(value.Values) == 0
					}
				}
				if whole {
					show("", decl)
					continue
				}
				for _, spec := range decl.Specs {
					show(decl.Tok.String()+" ", spec)
				}
			}
		}
	}
	slices.Sort(decls)
	return strings.Join(decls, ""), names, methods
}

// isAlias reports whether a declaration repeats a name of another package: that package has the
// name, which counts once.
func isAlias(spec ast.Spec) bool {
	var name string
	var of ast.Expr
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		if !spec.Assign.IsValid() {
			return false
		}
		name, of = spec.Name.Name, spec.Type
	case *ast.ValueSpec:
		if len(spec.Names) != 1 || len(spec.Values) != 1 {
			return false
		}
		name, of = spec.Names[0].Name, spec.Values[0]
	}
	other, ok := of.(*ast.SelectorExpr)
	return ok && other.Sel.Name == name
}

// base returns the name of a type of this package, without what it is applied to.
func base(of ast.Expr) string {
	for {
		switch x := of.(type) {
		case *ast.StarExpr:
			of = x.X
		case *ast.IndexExpr:
			of = x.X
		case *ast.IndexListExpr:
			of = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// TestAPI compares what the packages below jetstream export, internal ones included, with
// testdata/api.txt.
func TestAPI(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Module.Path}} {{.ImportPath}}{{range .GoFiles}} {{$.Dir}}/{{.}}{{end}}", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		path := strings.TrimPrefix(fields[1], fields[0]+"/")
		if strings.Contains(path, "/natstest") {
			continue // for tests of this repository
		}
		decls, names, methods := exported(t, fields[2:])
		fmt.Fprintf(&text, "package %s // %d names, %d methods\n\n%s\n", path, names, methods, decls)
	}
	jetstream.Golden(t, "api.txt", text.String())
}
