package facade

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"eventhub/docs"
	"eventhub/jetstream"
)

// pageTable is a table of docs/protocol.md: its header, and its rows cell by cell.
type pageTable struct {
	under string // the heading above
	head  []string
	rows  [][]string
}

// readPage returns the tables of docs/protocol.md.
func readPage(t *testing.T) (tables []pageTable) {
	t.Helper()
	text, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	heading, inTable := "", false
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if title, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
			heading = title
		}
		if !strings.HasPrefix(line, "|") {
			inTable = false
			continue
		}
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		switch {
		case !inTable:
			tables = append(tables, pageTable{under: heading, head: cells})
		case strings.HasPrefix(cells[0], "---"):
		default:
			last := &tables[len(tables)-1]
			last.rows = append(last.rows, cells)
		}
		inTable = true
	}
	return tables
}

// pageTableOf returns the table whose header begins with these cells, under a heading, or under any
// if that is "".
func pageTableOf(t *testing.T, under string, head ...string) pageTable {
	t.Helper()
	for _, table := range readPage(t) {
		if (under == "" || table.under == under) && len(table.head) >= len(head) && slices.Equal(table.head[:len(head)], head) {
			return table
		}
	}
	t.Fatalf("docs/protocol.md has no table %q under %q", head, under)
	return pageTable{}
}

// TestProtocolPageCodes compares the tables of error and close codes with testdata/errors.json.
func TestProtocolPageCodes(t *testing.T) {
	text, err := os.ReadFile("../testdata/errors.json")
	if err != nil {
		t.Fatal(err)
	}
	var file errorsFile
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	say := func(yes bool, a, b string) string {
		if yes {
			return a
		}
		return b
	}
	var codes, closes []string
	for _, c := range file.Codes {
		codes = append(codes, fmt.Sprintf("`%s` %d %s", c.Code, c.Status, say(c.Retry, "yes", "no")))
	}
	for _, c := range file.Closes {
		closes = append(closes, fmt.Sprintf("%d `%s` %s", c.Code, c.Name, say(c.Reconnect, "reconnect", "give up")))
	}
	for _, c := range []struct {
		table pageTable
		want  []string
	}{
		{pageTableOf(t, "Error codes", "code", "HTTP", "retry", "meaning"), codes},
		{pageTableOf(t, "Close codes", "code", "reason", "then", "meaning"), closes},
	} {
		var got []string
		for _, row := range c.table.rows {
			got = append(got, strings.Join(row[:3], " "))
			if len(row) != 4 || row[3] == "" {
				t.Errorf("the row of %s has no meaning", row[0])
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("under %q the page has\n%s\nwant\n%s", c.table.under, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
}

// TestProtocolPageOps checks that each op of a client has a heading and a table of its fields, and
// is shown in a conversation; and that the frames of the hub are there.
func TestProtocolPageOps(t *testing.T) {
	text, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	for o, name := range opNames {
		if op(o) == opUnknown {
			continue
		}
		if !strings.Contains(string(text), `→ {"op":"`+name+`"`) {
			t.Errorf("no conversation of the page has %s", name)
		}
		if !regexp.MustCompile(`(?m)^### (\w+ and )?` + name + `\b`).Match(text) {
			t.Errorf("the page has no heading for %s", name)
		}
	}
	var frames []string
	for _, row := range pageTableOf(t, "Frames from the hub", "frame", "fields").rows {
		frames = append(frames, strings.Trim(row[0], "`"))
	}
	if !slices.Equal(frames, []string{"OK", "ERR", "EVENT", "ASSIGN", "GAP", "SNAPSHOT", "PRESENCE"}) {
		t.Errorf("the page has the hub's frames %q", frames)
	}
}

// optionNames returns the cases of the switch over an option's name in a function of options.go.
func optionNames(t *testing.T, function string) (names []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "options.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Name.Name != function {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			clause, ok := n.(*ast.CaseClause)
			if !ok {
				return true
			}
			for _, e := range clause.List {
				if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					name, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatal(err)
					}
					names = append(names, name)
				}
			}
			return true
		})
	}
	if len(names) == 0 {
		t.Fatalf("options.go has no options in %s", function)
	}
	return names
}

// optionOf is an opts object with one option, and with what that one needs.
func optionOf(name, value string) []byte {
	if name == "slots" {
		return []byte(`{"ordered":"key","slots":` + value + `}`)
	}
	return []byte(`{"` + name + `":` + value + `}`)
}

// TestProtocolPageOptions checks that the page has every option and no other, and that the bounds
// it gives are those of the hub: what is on a bound is taken, what is beyond it is refused.
func TestProtocolPageOptions(t *testing.T) {
	publish := func(opts []byte) bool {
		var o jetstream.PublishOptions
		return publishOptions(&o, opts) == nil && o.Validate() == nil
	}
	subscribe := func(opts []byte) bool {
		var o jetstream.SubscribeOptions
		return subscribeOptions(&o, opts) == nil
	}
	for _, c := range []struct {
		head, function string
		takes          func(opts []byte) bool
	}{
		{"PUBLISH option", "publishOptions", publish},
		{"SUBSCRIBE option", "subscribeOptions", subscribe},
	} {
		var names []string
		for _, row := range pageTableOf(t, "", c.head, "type", "default", "bounds").rows {
			name := strings.Trim(row[0], "`")
			names = append(names, name)
			checkBounds(t, name, row[1], row[3], func(value string) bool {
				return c.takes(optionOf(name, value))
			})
			if row[2] == "" {
				t.Errorf("%s %s has no default", c.head, name)
			}
		}
		want := optionNames(t, c.function)
		slices.Sort(want)
		slices.Sort(names)
		if !slices.Equal(names, want) {
			t.Errorf("the page has the %ss %q, want %q", c.head, names, want)
		}
	}
}

// TestProtocolPageFields does the same for fields of frames with bounds of their own.
func TestProtocolPageFields(t *testing.T) {
	decodes := func(msg string) (*frame, bool) {
		f := new(frame)
		return f, f.cut([]byte(msg)) == nil && f.decode() == nil
	}
	for _, c := range []struct{ op, field, frame string }{
		{"ACK", "ids", `{"op":"ACK","topic":"t","group":"g","ids":%s}`},
		{"NACK", "delay_ms", `{"op":"NACK","topic":"t","group":"g","id":"i","delay_ms":%s}`},
	} {
		row := fieldRow(t, c.op, c.field)
		checkBounds(t, c.field, row[1], row[3], func(value string) bool {
			_, ok := decodes(fmt.Sprintf(c.frame, value))
			return ok
		})
	}

	row := fieldRow(t, "MODACK", "extend_ms")
	bounds := boundsPattern.FindStringSubmatch(row[3])
	for i, beyond := range []string{"1", "99999999999"} {
		f, ok := decodes(`{"op":"MODACK","topic":"t","group":"g","id":"i","extend_ms":` + beyond + `}`)
		if got := strconv.FormatInt(f.extend.Milliseconds(), 10); !ok || got != bounds[i+1] {
			t.Errorf("an extend_ms of %s counts as %s, the page has the bound %s", beyond, got, bounds[i+1])
		}
	}

	row = fieldRow(t, "AUTH", "caps")
	if want := fmt.Sprintf("at most %d, each at most %d bytes", maxCaps, maxCap); row[3] != want {
		t.Errorf("the page has the bounds %q for caps, want %q", row[3], want)
	}
}

// TestProtocolPagePull does the same for the body of a pull, also in docs/openapi.yaml.
func TestProtocolPagePull(t *testing.T) {
	takes := func(body string) bool {
		q := pullRequest{frame: new(frame)}
		return q.parse([]byte(body)) == nil
	}
	d := describedIn(t, "openapi.yaml", docs.OpenAPI)
	var fields []string
	for _, row := range pageTableOf(t, "Pulling", "field of a pull", "type", "default", "bounds").rows {
		name := strings.Trim(row[0], "`")
		fields = append(fields, name)
		if row[1] == "object" {
			continue
		}
		field := func(value string) bool { return takes(`{"` + name + `":` + value + `}`) }
		checkBounds(t, name, row[1], row[3], field)
		kind, cell := d.bounds(t, d.schema(t, "Pull").Properties[name])
		if cell != row[3] || kind != row[1] {
			t.Errorf("docs/openapi.yaml has %s of %s for %s, the page has %s of %s", cell, kind, name, row[3], row[1])
		}
	}
	slices.Sort(fields)
	if want := slices.Sorted(maps.Keys(d.schema(t, "Pull").Properties)); !slices.Equal(fields, want) {
		t.Errorf("the page has the fields %q, docs/openapi.yaml %q", fields, want)
	}
}

func fieldRow(t *testing.T, op, field string) []string {
	t.Helper()
	for _, row := range pageTableOf(t, op, "field", "type", "default", "bounds").rows {
		if row[0] == "`"+field+"`" {
			return row
		}
	}
	t.Fatalf("the page has no field %s of %s", field, op)
	return nil
}

// boundsPattern finds the first N..M of a cell.
var boundsPattern = regexp.MustCompile(`(\d+)\.\.(\d+)`)

// checkBounds tries values of a type on the bounds of a cell and beyond. A cell without bounds must
// say something else.
func checkBounds(t *testing.T, name, kind, cell string, takes func(value string) bool) {
	t.Helper()
	found := boundsPattern.FindStringSubmatch(cell)
	if found == nil {
		if kind == "integer" || cell == "" {
			t.Errorf("%s has the bounds %q on the page", name, cell)
		}
		return
	}
	var bounds [2]int
	for i := range bounds {
		n, err := strconv.Atoi(found[i+1])
		if err != nil {
			t.Fatal(err)
		}
		bounds[i] = n
	}
	make := map[string]func(n int) string{
		"integer": strconv.Itoa,
		"string":  func(n int) string { return `"` + strings.Repeat("x", n) + `"` },
		"array of strings": func(n int) string {
			if strings.HasPrefix(cell, "each") {
				return `["` + strings.Repeat("x", n) + `"]`
			}
			return "[" + strings.TrimSuffix(strings.Repeat(`"x",`, n), ",") + "]"
		},
		"object of strings": func(n int) string {
			var members []string
			for i := range n {
				members = append(members, fmt.Sprintf(`"x%d":"y"`, i))
			}
			return "{" + strings.Join(members, ",") + "}"
		},
	}[kind]
	if make == nil {
		t.Errorf("%s has bounds, and the type %q", name, kind)
		return
	}
	for _, at := range bounds {
		if !takes(make(at)) {
			t.Errorf("%s: %d is refused, the page has the bounds %s", name, at, found[0])
		}
	}
	beyond := []int{bounds[1] + 1}
	if bounds[0] > 0 || kind == "integer" {
		beyond = append(beyond, bounds[0]-1)
	}
	for _, at := range beyond {
		if takes(make(at)) {
			t.Errorf("%s: %d is taken, the page has the bounds %s", name, at, found[0])
		}
	}
}
