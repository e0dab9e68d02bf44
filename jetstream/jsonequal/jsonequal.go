// Package jsonequal compares JSON texts by what they mean.
package jsonequal

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"eventhub/jetstream/jsonscan"
)

// Equal reports whether two JSON texts are equal: the order of members, blanks, and the spelling of
// strings and numbers do not matter. Texts that are not JSON are equal to none.
func Equal(a, b []byte) bool {
	if !json.Valid(a) || !json.Valid(b) {
		return false
	}
	return Values(Decode(a), Decode(b))
}

// Decode reads a JSON text for Values. Numbers keep their text.
func Decode(text []byte) any {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return nil
	}
	return v
}

// Scalar returns the only spelling of a JSON text that is a string, a number, true, false or null:
// those of equal texts are equal. It returns false for an object and an array. text must be JSON.
func Scalar(text []byte) (spelling string, ok bool) {
	text = bytes.Trim(text, " \t\r\n")
	if len(text) == 0 {
		return "", false
	}
	switch c := text[0]; {
	case c == '{' || c == '[':
		return "", false
	case c == '"':
		plain, _ := jsonscan.Unquote(text, nil)
		return `"` + string(plain), true
	case c == '-' || c >= '0' && c <= '9':
		return decimal(string(text)), true
	}
	return string(text), true
}

// Values is Equal for what Decode returned.
func Values(a, b any) bool {
	switch a := a.(type) {
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for name, v := range a {
			if w, ok := b[name]; !ok || !Values(v, w) {
				return false
			}
		}
		return true
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, Values)
	case json.Number:
		b, ok := b.(json.Number)
		return ok && (a == b || decimal(a.String()) == decimal(b.String()))
	default:
		return a == b
	}
}

// decimal is the one spelling of a number: its digits without zeros around them, and the exponent
// of the last one. A number whose exponent is beyond 30 bits stays as it is.
func decimal(number string) string {
	text, exp, _ := strings.Cut(strings.ToLower(number), "e")
	text, negative := strings.CutPrefix(text, "-")
	whole, fraction, _ := strings.Cut(text, ".")
	e := 0
	if exp != "" {
		var err error
		if e, err = strconv.Atoi(exp); err != nil || e > 1<<30 || e < -1<<30 {
			return number
		}
	}
	digits := strings.TrimLeft(whole+fraction, "0")
	if digits == "" {
		return "0"
	}
	trimmed := strings.TrimRight(digits, "0")
	e += len(digits) - len(trimmed) - len(fraction)
	if negative {
		trimmed = "-" + trimmed
	}
	return trimmed + "e" + strconv.Itoa(e)
}
