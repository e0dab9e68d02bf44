package schema

import (
	"encoding/json"
	"fmt"
	"regexp/syntax"
)

const (
	// maxExponent is the largest power of ten of a number in a schema: the library computes with
	// all digits of a number, so that 1e1000000 would take it milliseconds, and 1e10000000 makes it
	// panic.
	maxExponent = 400
	// maxDigits is how many digits a number in a schema has.
	maxDigits = 1_000
)

// checkNumbers refuses schemas with numbers that the library could not compute with.
func checkNumbers(doc any) error {
	switch doc := doc.(type) {
	case json.Number:
		n := parse(doc.String())
		if len(n.digits) > maxDigits || n.scale > maxExponent+1 || n.scale < -maxExponent {
			return fmt.Errorf("has a number beyond 1e%d, or closer to 0 than 1e-%d, or with more than %d digits", maxExponent, maxExponent, maxDigits)
		}
	case map[string]any:
		for _, member := range doc {
			if err := checkNumbers(member); err != nil {
				return err
			}
		}
	case []any:
		for _, element := range doc {
			if err := checkNumbers(element); err != nil {
				return err
			}
		}
	}
	return nil
}

// instructions is how many instructions a pattern has, 0 if it is none: then the compiler says what
// is wrong. A pattern of a few bytes may have a million.
func instructions(pattern string) int {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return 0
	}
	prog, err := syntax.Compile(re.Simplify())
	if err != nil {
		return 0
	}
	return len(prog.Inst)
}

// checkPatterns refuses schemas whose patterns have too many instructions, each counted once.
func checkPatterns(doc any) error {
	total, known := 0, make(map[string]bool)
	count := func(pattern string) {
		if !known[pattern] && total <= MaxPattern {
			known[pattern] = true
			total += instructions(pattern)
		}
	}
	var walk func(doc any)
	walk = func(doc any) {
		switch doc := doc.(type) {
		case map[string]any:
			if pattern, is := doc["pattern"].(string); is {
				count(pattern)
			}
			patterns, _ := doc["patternProperties"].(map[string]any)
			for pattern := range patterns {
				count(pattern)
			}
			for _, member := range doc {
				walk(member)
			}
		case []any:
			for _, element := range doc {
				walk(element)
			}
		}
	}
	walk(doc)
	if total > MaxPattern {
		return fmt.Errorf("its patterns have more than %d instructions: make them shorter, with fewer and smaller repetitions", MaxPattern)
	}
	return nil
}
