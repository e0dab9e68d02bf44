//go:build unix

package model

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
)

var (
	mutationsFlag     = flag.String("mutations", "", "break the hub on purpose as the files of testdata/mutations whose names match this expression say, and let the model find it")
	mutationsFor      = flag.Duration("mutations.for", 5*time.Minute, "how long the model may take to find a mutation")
	mutationsSeed     = flag.Int64("mutations.seed", 1, "the first seed that each mutation is tried with")
	mutationsActive   = flag.Duration("mutations.active", 10*time.Second, "how long clients act for each seed")
	violationsPattern = regexp.MustCompile(`violations: map\[([^\]]*)\]`)
)

// mutation is a deliberate fault of the hub: a file of testdata/mutations in the form of txtar. Its
// comment says what is wrong, and perhaps "run: " with flags of TestModel. Each of its files is an
// edit of the source of that name: the text before the line "=======" becomes the text behind it.
type mutation struct {
	name, what string
	flags      []string
	edits      []edit
}

type edit struct{ file, before, after string }

func readMutations(tb testing.TB, dir string) []mutation {
	tb.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", dir, "*.txt"))
	if err != nil || len(paths) == 0 {
		tb.Fatalf("mutations: %v, %v", paths, err)
	}
	var all []mutation
	for _, path := range paths {
		archive, err := txtar.ParseFile(path)
		if err != nil {
			tb.Fatal(err)
		}
		m := mutation{name: strings.TrimSuffix(filepath.Base(path), ".txt")}
		for line := range strings.Lines(string(archive.Comment)) {
			if flags, ok := strings.CutPrefix(line, "run: "); ok {
				m.flags = strings.Fields(flags)
				continue
			}
			m.what += strings.TrimSpace(line)
		}
		for _, f := range archive.Files {
			before, after, ok := strings.Cut(string(f.Data), "=======\n")
			if !ok {
				tb.Fatalf("%s: the edit of %s has no line =======", path, f.Name)
			}
			m.edits = append(m.edits, edit{f.Name, before, after})
		}
		all = append(all, m)
	}
	return all
}

// apply returns the files that the mutation changes. Each edit must fit exactly once.
func (m *mutation) apply(root string) (map[string][]byte, error) {
	changed := map[string][]byte{}
	for _, e := range m.edits {
		path := filepath.Join(root, filepath.FromSlash(e.file))
		source := changed[path]
		if source == nil {
			var err error
			if source, err = os.ReadFile(path); err != nil {
				return nil, err
			}
		}
		if n := bytes.Count(source, []byte(e.before)); n != 1 {
			return nil, fmt.Errorf("%s: the text to be replaced is there %d times, not once:\n%s", e.file, n, e.before)
		}
		changed[path] = bytes.Replace(source, []byte(e.before), []byte(e.after), 1)
	}
	for path, source := range changed {
		if _, err := parser.ParseFile(token.NewFileSet(), path, source, parser.SkipObjectResolution); err != nil {
			return nil, err
		}
	}
	return changed, nil
}

// TestMutations wants each mutation to apply to the sources. With -mutations, it builds the model
// with each of those that match, and wants TestModel to find it in time: see `task mutations`.
func TestMutations(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	pick, err := regexp.Compile(*mutationsFlag)
	if err != nil {
		t.Fatal(err)
	}
	all := readMutations(t, "mutations")
	if len(all) < 15 {
		t.Errorf("there are %d mutations", len(all))
	}
	var rows []string
	for _, m := range all {
		changed, err := m.apply(root)
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if *mutationsFlag == "" || !pick.MatchString(m.name) {
			continue
		}
		found, after, err := m.run(t, changed)
		row := fmt.Sprintf("%-20s %-45s %4.0f s  %s", m.name, found, after.Seconds(), m.what)
		switch {
		case err != nil:
			t.Errorf("%s: %v", m.name, err)
		case found == "":
			t.Errorf("not found: %s", row)
		}
		t.Log(row)
		rows = append(rows, row)
	}
	t.Log("\n" + strings.Join(rows, "\n"))
}

// run lets the model look for a mutation, seed after seed. It returns the rules that found it first
// and how long that took, without the build.
func (m *mutation) run(t *testing.T, changed map[string][]byte) (found string, after time.Duration, err error) {
	t.Helper()
	dir := t.TempDir()
	binary := filepath.Join(dir, "model.test")
	list, err := overlay(dir, changed)
	if err != nil {
		return "", 0, err
	}
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", list, "-o", binary, ".")
	if out, err := build.CombinedOutput(); err != nil {
		return "", 0, fmt.Errorf("%w\n%s", err, out)
	}
	began := time.Now()
	for seed := *mutationsSeed; time.Since(began) < *mutationsFor; seed++ {
		ctx, cancel := context.WithTimeout(t.Context(), *mutationsFor)
		args := []string{"-test.run=^TestModel$", "-test.v", "-test.timeout=0", fmt.Sprint("-model.seed=", seed), fmt.Sprint("-model.active=", *mutationsActive), "-model.log=" + dir, "-model.with=" + strings.Join(sound, ",")}
		if (seed-*mutationsSeed)%2 == 0 { // most show without faults, and sooner
			args = append(args, "-model.faults=")
		} else {
			args = append(args, "-model.faults=kill,stop,freeze,delay")
		}
		out, err := exec.CommandContext(ctx, binary, append(args, m.flags...)...).CombinedOutput()
		late := ctx.Err() != nil
		cancel()
		rules := violationsPattern.FindSubmatch(out)
		switch {
		case err == nil:
		case late:
		case rules == nil, len(rules[1]) == 0:
			t.Logf("%s, seed %d: %v\n%s", m.name, seed, err, tail(out, 4_000))
			return "the test fails otherwise", time.Since(began), nil
		default:
			names := strings.Fields(string(rules[1]))
			for i := range names {
				names[i], _, _ = strings.Cut(names[i], ":")
			}
			slices.Sort(names)
			return strings.Join(names, ", "), time.Since(began), nil
		}
	}
	return "", time.Since(began), nil
}

// overlay writes changed files to a directory, and returns the path of a list of them for go build.
func overlay(dir string, changed map[string][]byte) (list string, err error) {
	all := struct{ Replace map[string]string }{map[string]string{}}
	for path, source := range changed {
		copied := filepath.Join(dir, fmt.Sprintf("%d.go", len(all.Replace)))
		if err := os.WriteFile(copied, source, 0o600); err != nil {
			return "", err
		}
		all.Replace[path] = copied
	}
	text, err := json.Marshal(all)
	if err != nil {
		return "", err
	}
	list = filepath.Join(dir, "overlay.json")
	return list, os.WriteFile(list, text, 0o600)
}

func tail(text []byte, n int) []byte { return text[max(0, len(text)-n):] }
