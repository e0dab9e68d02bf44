package topicfile

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"
	"go.yaml.in/yaml/v3"
)

// kind names what a value is.
func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!null":
			return "nothing"
		case "!!bool":
			return n.Value
		case "!!int", "!!float":
			return "the number " + shorten(n.Value)
		}
		return strconv.Quote(shorten(n.Value))
	case yaml.DocumentNode, yaml.AliasNode:
	}
	return "something else"
}

// shorten keeps a message readable.
func shorten(s string) string {
	const most = 60
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}

// The readers of values return what is wrong with a value, or "".

func text(n *yaml.Node, to *string) string {
	if n.Kind != yaml.ScalarNode {
		return "expected a name, not " + kind(n)
	}
	if n.ShortTag() != "!!str" {
		return "expected a name, not " + kind(n) + "; put it in quotes"
	}
	if n.Value == "" {
		return "name is empty; add one, or remove the field"
	}
	*to = n.Value
	return ""
}

func boolean(n *yaml.Node, to *bool) string {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" {
		return "expected true or false, not " + kind(n)
	}
	*to = strings.EqualFold(n.Value, "true")
	return ""
}

func number(n *yaml.Node, to *int64) string {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" {
		return "expected a whole number such as 1000000, not " + kind(n)
	}
	v, err := strconv.ParseInt(strings.ReplaceAll(n.Value, "_", ""), 10, 64)
	if err != nil {
		return "number " + shorten(n.Value) + " is too large or not decimal"
	}
	*to = v
	return ""
}

// size reads bytes: a number, or one with a unit.
func size(n *yaml.Node, to *int64) string {
	wrong := "expected a size such as 10GiB, 512MiB, 64KiB or a number of bytes, not " + kind(n)
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" && n.ShortTag() != "!!str" {
		return wrong
	}
	digits, unit := n.Value, int64(1)
	for _, u := range []struct {
		name string
		size int64
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}} {
		if rest, ok := strings.CutSuffix(n.Value, u.name); ok {
			digits, unit = rest, u.size
		}
	}
	v, err := strconv.ParseInt(strings.ReplaceAll(digits, "_", ""), 10, 64)
	switch {
	case err != nil:
		return wrong
	case v > math.MaxInt64/unit || v < math.MinInt64/unit:
		return "size " + n.Value + " is too large"
	}
	*to = v * unit
	return ""
}

// duration reads a time as Go writes it, with d for days before all else.
func duration(n *yaml.Node, to *time.Duration) string {
	wrong := "expected a time such as 7d, 36h, 2m or 30s, not " + kind(n)
	if n.Kind != yaml.ScalarNode || n.ShortTag() == "!!int" && n.Value != "0" {
		if n.Kind == yaml.ScalarNode {
			return wrong + "; add a unit"
		}
		return wrong
	}
	sum, rest := time.Duration(0), n.Value
	if days, after, ok := strings.Cut(n.Value, "d"); ok {
		v, err := strconv.ParseFloat(days, 64)
		if err != nil || math.IsNaN(v) {
			return wrong
		}
		if v *= float64(24 * time.Hour); math.Abs(v) >= math.MaxInt64/2 {
			return "time " + shorten(n.Value) + " is too long"
		}
		if sum, rest = time.Duration(v), after; rest == "" {
			rest = "0"
		}
	}
	d, err := time.ParseDuration(rest)
	if err != nil {
		return wrong
	}
	if sum+d < sum && d > 0 {
		return "time " + shorten(n.Value) + " is too long"
	}
	*to = sum + d
	return ""
}

// nearest is the known name that was probably meant, or "".
func nearest(name string, known []string) string {
	const longest = 30 // longer than all known names
	if len(name) > longest {
		return ""
	}
	best, least := "", 3
	for _, k := range known {
		if d := levenshtein.ComputeDistance(name, k); d < least && d <= len(k)/2 {
			best, least = k, d
		}
	}
	return best
}
