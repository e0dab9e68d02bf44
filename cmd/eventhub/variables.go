package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/alecthomas/kong"
)

// variablePrefix begins the variables that are the hub's alone.
const variablePrefix = "EVENTHUB_"

// serviceVariable matches the variables that Kubernetes sets in the pods of a namespace for
// services named eventhub or eventhub-NAME. The value of those that end in _PORT is an address.
var serviceVariable = regexp.MustCompile(`^EVENTHUB(_[A-Z0-9_]+)?_(SERVICE_HOST=|SERVICE_PORT(_[A-Z0-9_]+)?=|PORT=[a-z]+://|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=)`)

// unknownVariables returns an error for each variable of the environment that begins like those of
// the hub and is read by no command.
func unknownVariables(parser *kong.Kong) (faults []error) {
	var known []string
	_ = kong.Visit(parser.Model, func(node kong.Visitable, next kong.Next) error {
		if flag, ok := node.(*kong.Flag); ok {
			known = append(known, flag.Envs...)
		}
		return next(nil)
	})
	for _, pair := range os.Environ() {
		name, _, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, variablePrefix) || slices.Contains(known, name) || serviceVariable.MatchString(pair) {
			continue
		}
		hint := "remove it"
		if near := nearest(name, known); near != "" {
			hint = "did you mean " + near + "?"
		}
		faults = append(faults, fmt.Errorf("unknown variable %s; %s", name, hint))
	}
	slices.SortFunc(faults, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return faults
}

// nearest returns the name that differs from a given one in the fewest letters, or "" if all differ
// in at least half of them.
func nearest(given string, names []string) (near string) {
	least := (len(given)-len(variablePrefix))/2 + 1
	for _, name := range names {
		if d := levenshtein.ComputeDistance(given, name); d < least {
			near, least = name, d
		}
	}
	return near
}
