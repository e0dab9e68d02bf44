package main

import (
	_ "embed"
	"fmt"
	"math"
	"strings"
)

// What a test and a package may take in .ci/run, in seconds on the usual machine, unless slow.txt
// says more. Only a test that is beyond its bound also alone fails the run.
const (
	testSeconds    = 15
	packageSeconds = 90
)

//go:embed slow.txt
var slowList string

// limitKey names a test of a package, or the package itself where test is empty.
type limitKey struct{ pkg, test string }

// limits are the seconds that listed tests and packages may take. The zero key is for all of them.
type limits map[limitKey]float64

// anyTime are the limits beside a load: how long a test takes says nothing there.
func anyTime() limits { return limits{{}: math.Inf(1)} }

// of returns the bound of a test. That of a listed test holds for its subtests.
func (l limits) of(r *result) float64 {
	top, _, _ := strings.Cut(r.test, "/")
	return max(testSeconds, l[limitKey{short(r.pkg), top}], l[limitKey{}])
}

// ofPackage returns the aim for a package.
func (l limits) ofPackage(p *pkg) float64 {
	return max(packageSeconds, l[limitKey{pkg: short(p.pkg)}], l[limitKey{}])
}

// readLimits reads rows of "PACKAGE TEST DURATION REASON"; TEST is - for the package itself.
func readLimits(text string) (limits, error) {
	l := make(limits)
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 4 {
			return nil, fmt.Errorf("line %d: want PACKAGE TEST DURATION REASON, have %q", i+1, line)
		}
		most, err := seconds(fields[2])
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		key := limitKey{pkg: fields[0], test: strings.TrimPrefix(fields[1], "-")}
		if _, twice := l[key]; twice {
			return nil, fmt.Errorf("line %d: %s %s stands in the list twice", i+1, fields[0], fields[1])
		}
		l[key] = most
	}
	return l, nil
}
