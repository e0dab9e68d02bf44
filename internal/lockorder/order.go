package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// pair is a lock that was taken while another was held, and where that was.
type pair struct{ outer, inner, outerAt, innerAt string }

func readSeen(text string) (seen []pair) {
	known := make(map[[2]string]bool)
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 4 || known[[2]string{f[0], f[1]}] {
			continue
		}
		known[[2]string{f[0], f[1]}] = true
		seen = append(seen, pair{f[0], f[1], f[2], f[3]})
	}
	return seen
}

// order is which locks may be taken while one is held: those of its lines, and those that may be
// taken under these. It keeps the comments at the head of its file.
type order struct {
	head  string
	under map[string]map[string]bool
}

// readOrder reads lines of the form "OUTER > INNER".
func readOrder(text string) (*order, error) {
	o := &order{under: make(map[string]map[string]bool)}
	n := 0
	for line := range strings.Lines(text) {
		n++
		switch {
		case strings.HasPrefix(line, "#"):
			o.head += line
			continue
		case strings.TrimSpace(line) == "":
			continue
		}
		outer, inner, ok := strings.Cut(strings.TrimSpace(line), " > ")
		if !ok {
			return nil, fmt.Errorf("%s:%d: not of the form OUTER > INNER: %q", orderFile, n, line)
		}
		o.allow(outer, inner)
	}
	return o, nil
}

func (o *order) allow(outer, inner string) {
	if o.under[outer] == nil {
		o.under[outer] = make(map[string]bool)
	}
	o.under[outer][inner] = true
}

// leads reports whether inner may be taken while outer is held.
func (o *order) leads(outer, inner string) bool {
	visited := make(map[string]bool)
	var visit func(string) bool
	visit = func(at string) bool {
		for next := range o.under[at] {
			if next == inner {
				return true
			}
			if !visited[next] {
				visited[next] = true
				if visit(next) {
					return true
				}
			}
		}
		return false
	}
	return visit(outer)
}

// check returns what is wrong with the order itself.
func (o *order) check(locks []string) (faults []string) {
	for _, outer := range slices.Sorted(maps.Keys(o.under)) {
		for _, inner := range slices.Sorted(maps.Keys(o.under[outer])) {
			for _, name := range []string{outer, inner} {
				if !slices.Contains(locks, name) {
					faults = append(faults, fmt.Sprintf("%s: there is no lock %s", orderFile, name))
				}
			}
			if outer != inner && o.leads(inner, outer) {
				faults = append(faults, fmt.Sprintf("%s has a circle: %s may be taken while %s is held, and the other way round", orderFile, inner, outer))
			}
		}
	}
	return faults
}

// compare returns the pairs that the order does not allow.
func (o *order) compare(seen []pair) (faults []string) {
	for _, p := range seen {
		if !o.leads(p.outer, p.inner) {
			faults = append(faults, fmt.Sprintf("%s does not allow %s > %s: the second was taken at %s, while the first was held since %s", orderFile, p.outer, p.inner, p.innerAt, p.outerAt))
		}
	}
	return faults
}

// add allows the pairs, and removes those that others imply, where there is no circle.
func (o *order) add(seen []pair) {
	for _, p := range seen {
		o.allow(p.outer, p.inner)
	}
	for outer, inners := range o.under {
		for inner := range inners {
			if o.leads(inner, inner) || o.leads(outer, outer) {
				continue
			}
			delete(inners, inner)
			if !o.leads(outer, inner) {
				inners[inner] = true
			}
		}
	}
}

func (o *order) pairs() (n int) {
	for _, inners := range o.under {
		n += len(inners)
	}
	return n
}

func (o *order) String() string {
	var b strings.Builder
	b.WriteString(o.head)
	for _, outer := range slices.Sorted(maps.Keys(o.under)) {
		for _, inner := range slices.Sorted(maps.Keys(o.under[outer])) {
			fmt.Fprintf(&b, "%s > %s\n", outer, inner)
		}
	}
	return b.String()
}
