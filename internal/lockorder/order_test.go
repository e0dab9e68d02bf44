package main

import (
	"go/parser"
	"go/token"
	"slices"
	"strings"
	"testing"
)

func TestOrder(t *testing.T) {
	locks := []string{"a", "b", "c", "d"}
	for _, test := range []struct{ name, order, seen, faults string }{
		{"in the order", "a > b\nb > c\n", "a b", ""},
		{"over another", "a > b\nb > c\n", "a c", ""},
		{"not in the order", "a > b\n", "a c", "does not allow a > c"},
		{"the other way", "a > b\nb > c\n", "c a", "does not allow c > a"},
		{"two of a kind", "a > b\n", "a a", "does not allow a > a"},
		{"two of a kind, allowed", "a > a\n", "a a", ""},
		{"both orders in the file", "a > b\nb > c\nc > a\n", "", "a may be taken while c is held, and the other way round"},
		{"a lock that is gone", "a > x\n", "", "there is no lock x"},
	} {
		t.Run(test.name, func(t *testing.T) {
			o, err := readOrder(test.order)
			if err != nil {
				t.Fatal(err)
			}
			var seen []pair
			if outer, inner, ok := strings.Cut(test.seen, " "); ok {
				seen = []pair{{outer, inner, "here", "there"}}
			}
			faults := strings.Join(append(o.check(locks), o.compare(seen)...), "\n")
			if test.faults == "" && faults != "" || !strings.Contains(faults, test.faults) {
				t.Errorf("got %q, want %q", faults, test.faults)
			}
		})
	}
	if _, err := readOrder("a > b\na b\n"); err == nil || !strings.Contains(err.Error(), ":2:") {
		t.Errorf("a line that is no pair: %v", err)
	}
}

func TestUpdate(t *testing.T) {
	o, err := readOrder("# head\na > b\n")
	if err != nil {
		t.Fatal(err)
	}
	seen := readSeen("b\tc\tx.go:1\ty.go:2\na\tc\tx.go:3\ty.go:2\nb\tc\tx.go:9\ty.go:9\n")
	if len(seen) != 2 {
		t.Errorf("%v: want each pair once", seen)
	}
	o.add(seen)
	if got := o.String(); got != "# head\na > b\nb > c\n" {
		t.Errorf("got %q, want no line that others imply", got)
	}
	o.add([]pair{{outer: "c", inner: "a"}})
	if got := o.String(); !strings.Contains(got, "a > b\nb > c\nc > a\n") {
		t.Errorf("got %q, want all lines of the circle", got)
	}
}

func TestRewrite(t *testing.T) {
	const source = `package p // a comment

import "sync"

type bus struct {
	mu sync.Mutex // guards n
	n  int
	in struct{ mu sync.RWMutex }
	of [8]sync.Mutex
}

func (b *bus) count() {
	var mu sync.Mutex
	mu.Lock()
}
`
	text, locks, err := rewrite("/x/bus.go", "jetstream", []byte(source))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"jetstream/bus.mu", "jetstream/bus.in.mu", "jetstream/bus.of", "jetstream/bus.count.mu"}
	if !slices.Equal(locks, want) {
		t.Errorf("the locks are %q, want %q", locks, want)
	}
	if _, err := parser.ParseFile(token.NewFileSet(), "bus.go", text, 0); err != nil {
		t.Errorf("%v in\n%s", err, text)
	}
	for n, line := range strings.Split(source, "\n") {
		if got := strings.Split(string(text), "\n")[n]; strings.Fields(line + " x")[0] != strings.Fields(got + " x")[0] && n > 0 {
			t.Errorf("line %d is %q, was %q", n+1, got, line)
		}
	}
	for _, test := range []struct{ old, new, want string }{
		{"struct{ mu sync", "struct{ mu, other sync", "/x/bus.go:8:"},
		{"struct{ mu sync", "struct{ sync", "/x/bus.go:8:"},
		{`import "sync"`, `import s "sync"`, "/x/bus.go:"},
	} {
		text := strings.Replace(source, test.old, test.new, 1)
		if _, _, err := rewrite("/x/bus.go", "jetstream", []byte(text)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", test.new, err)
		}
	}
	if text, locks, err := rewrite("/x/no.go", "jetstream", []byte("package p\n")); text != nil || locks != nil || err != nil {
		t.Errorf("a file without locks: %q, %q, %v", text, locks, err)
	}
}
