package docs

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

const (
	root     = ".."
	maxWidth = 100
	tabWidth = 4
)

// textFiles returns the files of the repository with one of these extensions, by their paths from
// the root.
func textFiles(t *testing.T, extensions ...string) map[string]string {
	t.Helper()
	files := make(map[string]string)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains([]string{".git", ".tools", "bin", "node_modules", "dist", "eventhub-data"}, d.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || !slices.Contains(extensions, filepath.Ext(path)) {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		files[filepath.ToSlash(name)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatalf("there are no files of %q", extensions)
	}
	return files
}

func width(line string) int {
	return utf8.RuneCountInString(strings.ReplaceAll(line, "\t", strings.Repeat(" ", tabWidth)))
}

// tooWide says whether a line of prose is wider than it may be, and could be broken.
func tooWide(line string) bool {
	marks := func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune("-*#/>", r) }
	return width(line) > maxWidth && strings.ContainsFunc(strings.TrimSpace(strings.TrimLeftFunc(line, marks)), unicode.IsSpace)
}

func TestProseIsNotWide(t *testing.T) {
	for name, text := range textFiles(t, ".md") {
		for n, line := range markdownProse(text) {
			if tooWide(line) && !strings.HasPrefix(strings.TrimSpace(line), "|") {
				t.Errorf("%s:%d has %d columns, at most %d are allowed", name, n, width(line), maxWidth)
			}
		}
	}
	for name, text := range textFiles(t, ".go") {
		for _, n := range wideComments(text) {
			t.Errorf("%s:%d: the comment ends beyond column %d", name, n, maxWidth)
		}
	}
	for name, text := range textFiles(t, "", ".yml", ".yaml", ".py", ".mjs", ".js", ".sh") {
		n := 0
		for line := range strings.Lines(text) {
			n++
			start := strings.TrimSpace(line)
			if (strings.HasPrefix(start, "# ") || strings.HasPrefix(start, "// ")) && tooWide(strings.TrimRight(line, "\n")) {
				t.Errorf("%s:%d: the comment has %d columns, at most %d are allowed", name, n, width(strings.TrimRight(line, "\n")), maxWidth)
			}
		}
	}
}

// markdownProse yields the lines outside of code blocks, by their numbers.
func markdownProse(text string) map[int]string {
	lines := make(map[int]string)
	code := false
	n := 0
	for line := range strings.Lines(text) {
		n++
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		} else if !code {
			lines[n] = strings.TrimRight(line, "\n")
		}
	}
	return lines
}

// wideComments returns the numbers of the lines whose comment ends beyond maxWidth. Directives
// cannot be broken.
func wideComments(text string) (numbers []int) {
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, []byte(text), nil, scanner.ScanComments)
	lines := strings.Split(text, "\n")
	for {
		at, kind, literal := s.Scan()
		if kind == token.EOF {
			return numbers
		}
		if kind != token.COMMENT || regexp.MustCompile(`^//(go:|nolint|[a-z]+:)`).MatchString(literal) {
			continue
		}
		first := files.Position(at).Line
		for n := first; n <= first+strings.Count(literal, "\n"); n++ {
			if tooWide(lines[n-1]) && !strings.HasPrefix(literal, "//\t") {
				numbers = append(numbers, n)
			}
		}
	}
}

func TestWideComments(t *testing.T) {
	wide := strings.Repeat("word ", 25)
	for text, want := range map[string]string{
		"package p // " + wide:                                     "[1]",
		"package p\n\n// short\n// " + wide + "\nvar x int":        "[4]",
		"package p\n\n/*\n" + wide + "\n*/":                        "[4]",
		"package p\n\nconst s = \"" + wide + "\"":                  "[]",
		"package p\n\n//\t" + wide:                                 "[]",
		"package p\n\n//nolint:all // " + wide:                     "[]",
		"package p\n\n// " + strings.Repeat("x", 200):              "[]",
		"package p\n\nfunc f() {\n\t\t\t\t// " + wide[:90] + "\n}": "[4]",
	} {
		if got := fmt.Sprint(wideComments(text)); got != want {
			t.Errorf("%q has wide comments at %s, want %s", text, got, want)
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`^#+ (.*)$`)
	noSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors returns the names that a page's headings have in links.
func anchors(text string) map[string]bool {
	names := make(map[string]bool)
	for _, line := range markdownProse(text) {
		if m := heading.FindStringSubmatch(line); m != nil {
			names[strings.ReplaceAll(noSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
		}
	}
	return names
}

// TestLinks checks that each link to a file of the repository, and to a heading there, leads
// somewhere.
func TestLinks(t *testing.T) {
	pages := textFiles(t, ".md")
	for name, text := range pages {
		for n, line := range markdownProse(text) {
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				target, anchor, _ := strings.Cut(m[1], "#")
				if strings.Contains(target, ":") {
					continue // elsewhere
				}
				page := name
				if target != "" {
					page = filepath.ToSlash(filepath.Join(filepath.Dir(name), target))
					if _, err := os.Stat(filepath.Join(root, page)); err != nil {
						t.Errorf("%s:%d links to %s, which does not exist", name, n, m[1])
						continue
					}
				}
				if anchor != "" && !anchors(pages[page])[anchor] {
					t.Errorf("%s:%d links to %s, and there is no such heading", name, n, m[1])
				}
			}
		}
	}
}

// TestSubjectsOfSentences checks that no sentence opens with Who or What (CONTRIBUTING.md).
func TestSubjectsOfSentences(t *testing.T) {
	opens := regexp.MustCompile(`(^|[.!:] +|^- )(Who|What) [^?]*$`)
	for name, text := range textFiles(t, ".md") {
		for n, line := range markdownProse(text) {
			if opens.MatchString(line) && !heading.MatchString(line) {
				t.Errorf("%s:%d: name the subject instead of Who or What: %s", name, n, line)
			}
		}
	}
}

// TestStories checks that the table of stories names each example function and each example
// program, and nothing that does not exist.
func TestStories(t *testing.T) {
	const page = "docs/examples/README.md"
	_, rest, found := strings.Cut(textFiles(t, ".md")[page], "\n## Stories\n")
	text, _, ended := strings.Cut(rest, "\n## ")
	if !found || !ended {
		t.Fatalf("%s has no section Stories", page)
	}
	// [`NAME`](FILE) is an example function in a file.
	listed := make(map[string]bool)
	for _, m := range regexp.MustCompile("\\[`(\\w+)`\\]\\(([^)]+)\\)").FindAllStringSubmatch(text, -1) {
		listed[filepath.ToSlash(filepath.Join(filepath.Dir(page), m[2]))+" "+m[1]] = true
	}
	function := regexp.MustCompile(`(?m)^func (Example\w*)\(\) \{`)
	for file, text := range textFiles(t, ".go") {
		for _, m := range function.FindAllStringSubmatch(text, -1) {
			name := file + " " + m[1]
			if !listed[name] {
				t.Errorf("the stories in %s do not list %s", page, name)
			}
			delete(listed, name)
		}
	}
	for name := range listed {
		t.Errorf("the stories in %s list %s, which does not exist", page, name)
	}
	programs, err := filepath.Glob(filepath.Join(root, "docs/examples/*/"))
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range programs {
		if info, err := os.Stat(program); err != nil || !info.IsDir() {
			continue
		}
		if name := filepath.Base(program); !strings.Contains(text, "]("+name+"/") {
			t.Errorf("the stories in %s do not link to %s", page, name)
		}
	}
}
