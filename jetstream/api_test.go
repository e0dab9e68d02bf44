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
// numbers of names and of methods.
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
	for _, name := range files {
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.FileExports(file)
		for _, decl := range file.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				decl.Body = nil
				if decl.Recv == nil {
					names++
				} else if ast.IsExported(receiver(decl)) {
					methods++
				} else {
					continue
				}
				show("", decl)
			case *ast.GenDecl:
				if decl.Tok == token.IMPORT {
					continue
				}
				for _, spec := range decl.Specs {
					names++
					if value, ok := spec.(*ast.ValueSpec); ok {
						names += len(value.Names) - 1
					}
					show(decl.Tok.String()+" ", spec)
				}
			}
		}
	}
	slices.Sort(decls)
	return strings.Join(decls, ""), names, methods
}

// receiver returns the name of the type of a method.
func receiver(method *ast.FuncDecl) string {
	of := method.Recv.List[0].Type
	for {
		switch x := of.(type) {
		case *ast.StarExpr:
			of = x.X
		case *ast.IndexExpr:
			of = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// TestAPI compares what the packages below jetstream export with testdata/api.txt. Those below
// internal are shown as well.
func TestAPI(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.ImportPath}}{{range .GoFiles}} {{$.Dir}}/{{.}}{{end}}", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if strings.Contains(fields[0], "/natstest") {
			continue // for tests of this repository
		}
		decls, names, methods := exported(t, fields[1:])
		fmt.Fprintf(&text, "package %s // %d names, %d methods\n\n%s\n", fields[0], names, methods, decls)
	}
	jetstream.Golden(t, "api.txt", text.String())
}
