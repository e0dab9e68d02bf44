package schema

import (
	"encoding/json"
	"fmt"
	"regexp/syntax"
)

// checkNumbers refuses schemas with numbers that the library could not compute with.
func checkNumbers(doc any) error {
	switch doc := doc.(type) {
	case json.Number:
		if _, beyond := tame(doc.String()); beyond {
			return fmt.Errorf("has a number beyond 1e%d, or closer to 0 than 1e-%d", maxExponent, maxExponent)
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

// checkPatterns returns how many instructions the patterns of a schema have, and refuses too many.
// A pattern of a few bytes may have a million.
func checkPatterns(doc any) (n int, err error) {
	count := func(pattern string) error {
		re, err := syntax.Parse(pattern, syntax.Perl)
		if err != nil {
			return nil //nolint:nilerr // the compiler says what is wrong
		}
		prog, err := syntax.Compile(re.Simplify())
		if err != nil {
			return nil //nolint:nilerr // as before
		}
		if n += len(prog.Inst); n > MaxPattern {
			return fmt.Errorf("its patterns have more than %d instructions: make them shorter, with fewer and smaller repetitions", MaxPattern)
		}
		return nil
	}
	var walk func(v any) error
	walk = func(v any) error {
		switch v := v.(type) {
		case map[string]any:
			for keyword, member := range v {
				if text, is := member.(string); is && keyword == "pattern" {
					if err := count(text); err != nil {
						return err
					}
				}
				if patterns, is := member.(map[string]any); is && keyword == "patternProperties" {
					for pattern := range patterns {
						if err := count(pattern); err != nil {
							return err
						}
					}
				}
				if err := walk(member); err != nil {
					return err
				}
			}
		case []any:
			for _, member := range v {
				if err := walk(member); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return n, walk(doc)
}
