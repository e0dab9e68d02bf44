// Package topicfile reads the rules of topics from a YAML file and finds everything that is wrong
// with it in one go, each fault with its line and what to do. docs/topics.yaml is a sample of all
// that such a file may contain.
package topicfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"eventhub/jetstream/topics"
)

// Bounds of a file.
const (
	maxBytes  = 1 << 20
	maxRules  = 1_000
	maxFaults = 100 // listed ones
)

// Error is one fault of a file.
type Error struct {
	File string
	// Line and Column are where it is, counted from 1.
	Line, Column int
	// Msg names the fault and a remedy.
	Msg string
}

// Error returns the fault as compilers write it, after FILE:LINE:COLUMN.
func (e *Error) Error() string { return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Msg) }

// Errors are all faults of a file, in its order.
type Errors []*Error

// Error has a line for each fault.
func (e Errors) Error() string { return errors.Join(e.Unwrap()...).Error() }

// Unwrap gives the faults, each an *Error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, fault := range e {
		errs[i] = fault
	}
	return errs
}

// Load reads the file at path. It returns the error of Parse, or why the file cannot be read.
func Load(path string) ([]topics.Rule, error) {
	f, err := os.Open(path) //nolint:gosec // the file is the operator's choice
	if err != nil {
		return nil, fmt.Errorf("topics file %s: %w", path, cause(err))
	}
	defer func() { _ = f.Close() }() // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("topics file %s: %w", path, cause(err))
	}
	return Parse(path, data)
}

// cause returns the cause in an error of a file, without the path.
func cause(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// Parse reads the rules in data: at most 1,000 rules in at most 1 MiB. name is the name of the file
// in faults. The error is of type Errors. It lists all faults, except those after the hundredth, or
// after a line that is not YAML.
func Parse(name string, data []byte) ([]topics.Rule, error) {
	p := &parser{file: name}
	if len(data) > maxBytes {
		p.fault(nodeAt(1, 1), "file exceeds %d bytes; use patterns instead of many rules", maxBytes)
		return nil, p.faults
	}
	p.checkTabs(data)
	root := p.document(data)
	var rules []*rule
	if root != nil {
		rules = p.root(root)
	}
	result := make([]topics.Rule, len(rules))
	for i, r := range rules {
		result[i] = r.Rule
	}
	if !p.full() {
		p.checkRules(rules, result)
	}
	if len(p.faults) > 0 {
		slices.SortStableFunc(p.faults, func(a, b *Error) int {
			if a.Line != b.Line {
				return a.Line - b.Line
			}
			return a.Column - b.Column
		})
		return nil, p.faults
	}
	return result, nil
}

// parser collects the faults of a file.
type parser struct {
	file   string
	faults Errors
	// seen keeps a fault of an anchor from being listed as often as the anchor is used.
	seen map[Error]bool
}

func (p *parser) full() bool { return len(p.faults) >= maxFaults }

func (p *parser) fault(at *yaml.Node, format string, args ...any) {
	e := Error{File: p.file, Line: max(at.Line, 1), Column: max(at.Column, 1), Msg: fmt.Sprintf(format, args...)}
	if p.full() || p.seen[e] {
		return
	}
	if p.seen == nil {
		p.seen = make(map[Error]bool)
	}
	p.seen[e] = true
	if len(p.faults) == maxFaults-1 {
		e.Msg += " (further faults are not listed)"
	}
	p.faults = append(p.faults, &e)
}

func nodeAt(line, column int) *yaml.Node { return &yaml.Node{Line: line, Column: column} }

// checkTabs finds tabs that indent, all of them: the YAML reader would end at the first and say
// less.
func (p *parser) checkTabs(data []byte) {
	line := 0
	for text := range bytes.Lines(data) {
		line++
		rest := bytes.TrimLeft(text, " \t")
		if tab := bytes.IndexByte(text[:len(text)-len(rest)], '\t'); tab >= 0 && len(bytes.TrimSpace(rest)) > 0 && rest[0] != '#' {
			p.fault(nodeAt(line, tab+1), "tab in the indentation; YAML allows only spaces")
		}
	}
}

// document returns the one value of the file, or nil after a fault.
func (p *parser) document(data []byte) *yaml.Node {
	lines := &lineReader{data: data}
	reader := yaml.NewDecoder(lines)
	var first, second yaml.Node
	switch err := reader.Decode(&first); {
	case errors.Is(err, io.EOF):
		p.fault(nodeAt(1, 1), "file is empty; add a list of rules under topics:")
		return nil
	case err != nil:
		p.syntax(data, lines.read, err)
		return nil
	}
	switch err := reader.Decode(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		p.syntax(data, lines.read, err)
	default:
		p.fault(&second, "file has a second document; remove the ---")
	}
	if first.Kind != yaml.DocumentNode || len(first.Content) != 1 {
		p.fault(&first, "file is empty; add a list of rules under topics:")
		return nil
	}
	return first.Content[0]
}

// How the YAML reader says where an error is.
var (
	atLine        = regexp.MustCompile(`^yaml: line (\d+): (.*)$`)
	unknownAnchor = regexp.MustCompile(`^yaml: unknown anchor '(.*)' referenced$`)
)

// lineReader gives a line at a time, so that it is known how far somebody has read.
type lineReader struct {
	data []byte
	read int // lines
}

func (r *lineReader) Read(to []byte) (int, error) {
	if len(r.data) == 0 {
		return 0, io.EOF
	}
	n := copy(to, r.data[:bytes.IndexByte(r.data, '\n')+1])
	if n == 0 {
		n = copy(to, r.data)
	}
	if r.data[n-1] == '\n' || n == len(r.data) {
		r.read++
	}
	r.data = r.data[n:]
	return n, nil
}

// syntax reports what keeps the file from being YAML. read is how many lines it took to see that: a
// better line than that of an error that is about a whole list or mapping, which is where that
// begins.
func (p *parser) syntax(data []byte, read int, err error) {
	if len(p.faults) > 0 {
		return // tabs
	}
	text := strings.ReplaceAll(err.Error(), "\n", " ")
	if found := atLine.FindStringSubmatch(text); found != nil {
		line, _ := strconv.Atoi(found[1]) // digits; 0 if there are too many
		if strings.Contains(found[2], "did not find expected") {
			line = read
		}
		hint := ""
		if strings.Contains(found[2], "expected alphabetic or numeric character") { // of an alias
			hint = `; a value that begins with * needs quotes, as in pattern: "**"`
		}
		p.fault(nodeAt(line, 1), "invalid YAML, here or just before: %s%s", found[2], hint)
		return
	}
	if found := unknownAnchor.FindStringSubmatch(text); found != nil {
		before := data[:max(bytes.Index(data, []byte("*"+found[1])), 0)]
		p.fault(nodeAt(bytes.Count(before, []byte("\n"))+1, len(before)-bytes.LastIndexByte(before, '\n')),
			"alias *%s is undefined; no earlier value has the anchor &%s", found[1], found[1])
		return
	}
	p.fault(nodeAt(read, 1), "invalid YAML: %s", strings.TrimPrefix(text, "yaml: "))
}

// checkRules finds what is wrong with rules that could be read: in themselves and between them.
func (p *parser) checkRules(rules []*rule, all []topics.Rule) {
	for _, e := range topics.Validate(all) {
		r := rules[e.Rule]
		if r.brokenIn(e.Fields) || e.Other >= 0 && rules[e.Other].brokenIn(e.Fields) {
			continue // it may be no more than what follows from another fault
		}
		at := r.at[e.Fields[0]]
		if at == nil {
			at = r.node
		}
		if e.Other >= 0 {
			p.fault(at, "%s (the other rule is in line %d)", e.Msg, rules[e.Other].node.Line)
		} else {
			p.fault(at, "%s", e.Msg)
		}
	}
}
