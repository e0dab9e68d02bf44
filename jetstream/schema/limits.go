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

// checkPatterns returns how many instructions the patterns of a schema have, those of a $ref
// counted as often as they apply. It refuses too many, each counted once: a pattern of a few bytes
// may have a million.
func checkPatterns(doc any) (n int, err error) {
	total, known := 0, make(map[string]int)
	count := func(pattern string) int {
		if n, seen := known[pattern]; seen {
			return n
		}
		n := 0
		// Of a pattern that is none, the compiler says what is wrong.
		if re, err := syntax.Parse(pattern, syntax.Perl); err == nil {
			if prog, err := syntax.Compile(re.Simplify()); err == nil {
				n = len(prog.Inst)
			}
		}
		known[pattern] = n
		total += n
		return n
	}
	w := &stepCounter{root: doc, most: maxMatching, known: make(map[string]int), open: make(map[string]bool), weigh: func(keyword string, v any) (n int) {
		switch v := v.(type) {
		case string:
			if keyword == "pattern" {
				n = count(v)
			}
		case map[string]any:
			if keyword == "patternProperties" {
				for pattern := range v {
					n += count(pattern)
				}
			}
		}
		return n
	}}
	n = w.count(doc)
	// Definitions that no $ref leads to are compiled, too.
	for _, list := range []string{"$defs", "definitions"} {
		if object, is := doc.(map[string]any); is {
			if defs, is := object[list].(map[string]any); is {
				for _, def := range defs {
					w.count(def)
				}
			}
		}
	}
	if total > MaxPattern {
		return 0, fmt.Errorf("its patterns have more than %d instructions: make them shorter, with fewer and smaller repetitions", MaxPattern)
	}
	return n, nil
}
