package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// documented is a row of docs/settings.md.
type documented struct{ flags, value string }

// readSettings returns the rows of docs/settings.md by variable.
func readSettings(t *testing.T) map[string]documented {
	t.Helper()
	text, err := os.ReadFile("../../docs/settings.md")
	if err != nil {
		t.Fatal(err)
	}
	settings, limits, found := strings.Cut(string(text), "\n## Limits\n")
	if !found {
		t.Fatal("docs/settings.md has no limits")
	}
	rows := make(map[string]documented)
	names := regexp.MustCompile("`([A-Z][A-Z_]+)`")
	read := func(text, prefix string, flags, value int) {
		for line := range strings.Lines(text) {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
			values := []string(nil)
			if len(cells) > value {
				values = strings.Split(strings.TrimSpace(cells[value]), ", ")
			}
			for i, m := range names.FindAllStringSubmatch(cells[0], -1) {
				if values == nil {
					continue // prose
				}
				row := documented{value: values[min(i, len(values)-1)]}
				if flags > 0 {
					row.flags = cells[flags]
				}
				rows[prefix+m[1]] = row
			}
		}
	}
	read(settings, "", 1, 2)
	read(limits, "EVENTHUB_LIMIT_", 0, 1)
	return rows
}

// inWords are defaults that the page says in another way.
var inWords = map[string]string{
	"EVENTHUB_LIMIT_INBOUND_BYTES": "256 MiB", "EVENTHUB_LIMIT_HELD_BYTES": "128 MiB", "EVENTHUB_LIMIT_PAGE_BYTES": "16 MiB",
	"EVENTHUB_LIMIT_DEAD_LETTER_SHARE": "1 GiB",
}

// TestSettingsAreDocumented compares docs/settings.md with the flags of serve: no variable is
// missing, none is made up, and the defaults are those.
func TestSettingsAreDocumented(t *testing.T) {
	rows := readSettings(t)
	parser, err := kong.New(new(commands))
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, command := range parser.Model.Children {
		for _, flag := range command.Flags {
			for _, name := range flag.Envs {
				known[name] = true
				if command.Name != "serve" {
					continue
				}
				row, there := rows[name]
				want := flag.Default
				if s, said := inWords[name]; said {
					want = s
				}
				switch {
				case !there:
					t.Errorf("%s is not in docs/settings.md", name)
				case row.flags != "" && !strings.Contains(row.flags, flag.Name) && !strings.Contains(row.flags, "…"):
					t.Errorf("%s: the page has the flag %s, it is --%s", name, row.flags, flag.Name)
				case want != "" && want != "true" && row.value != want:
					t.Errorf("%s: the page has the default %q, it is %q", name, row.value, want)
				}
			}
		}
	}
	// Commands of commands read variables too.
	_ = kong.Visit(parser.Model, func(node kong.Visitable, next kong.Next) error {
		if flag, ok := node.(*kong.Flag); ok {
			for _, name := range flag.Envs {
				known[name] = true
			}
		}
		return next(nil)
	})
	for name := range rows {
		if !known[name] {
			t.Errorf("docs/settings.md has %s, which no flag reads", name)
		}
	}
}
