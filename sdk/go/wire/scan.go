package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

var errFrame = errors.New("wire: read a frame of the hub")

// eachField calls f with the name and the raw value of each field of the JSON object b. It does not
// decode the values, so a payload's bytes stay as the hub sent them. It assumes that the hub's JSON
// is valid. If it cannot parse b, it returns an error, and never reads beyond b.
func eachField(b []byte, f func(name, value []byte) error) error {
	i := skipBlanks(b, 0)
	if i >= len(b) || b[i] != '{' {
		return fmt.Errorf("%w: not an object", errFrame)
	}
	i = skipBlanks(b, i+1)
	if i < len(b) && b[i] == '}' {
		return nil
	}
	for {
		name, next, err := scanName(b, i)
		if err != nil {
			return err
		}
		start := skipBlanks(b, next)
		end, err := skipValue(b, start)
		if err != nil {
			return err
		}
		if err := f(name, b[start:end]); err != nil {
			return err
		}
		i = skipBlanks(b, end)
		switch {
		case i < len(b) && b[i] == ',':
			i = skipBlanks(b, i+1)
		case i < len(b) && b[i] == '}':
			return nil
		default:
			return fmt.Errorf("%w: no end at byte %d", errFrame, i)
		}
	}
}

// scanName returns the name that starts at i, and the index at which its value may start.
func scanName(b []byte, i int) (name []byte, next int, err error) {
	end, err := skipString(b, i)
	if err != nil {
		return nil, 0, err
	}
	next = skipBlanks(b, end)
	if next >= len(b) || b[next] != ':' {
		return nil, 0, fmt.Errorf("%w: no colon at byte %d", errFrame, next)
	}
	return b[i+1 : end-1], next + 1, nil
}

func skipBlanks(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString returns the index after the string that starts at i.
func skipString(b []byte, i int) (int, error) {
	if i >= len(b) || b[i] != '"' {
		return 0, fmt.Errorf("%w: no string at byte %d", errFrame, i)
	}
	j := i + 1
	quote := bytes.IndexByte(b[j:], '"')
	if quote < 0 {
		return 0, fmt.Errorf("%w: a string does not end", errFrame)
	}
	escape := bytes.IndexByte(b[j:j+quote], '\\')
	if escape < 0 {
		return j + quote + 1, nil
	}
	for j += escape; j < len(b); j++ {
		switch b[j] {
		case '\\':
			j++
		case '"':
			return j + 1, nil
		}
	}
	return 0, fmt.Errorf("%w: a string does not end", errFrame)
}

// skipValue returns the index after the value that starts at i.
func skipValue(b []byte, i int) (int, error) {
	depth := 0
	for j := i; j < len(b); {
		switch b[j] {
		case '"':
			end, err := skipString(b, j)
			if err != nil {
				return 0, err
			}
			j = end
			if depth == 0 {
				return j, nil
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return scalarEnd(i, j)
			}
			depth--
			if depth == 0 {
				return j + 1, nil
			}
		case ',', ' ', '\n', '\t', '\r':
			if depth == 0 {
				return scalarEnd(i, j)
			}
		}
		j++
	}
	if depth != 0 {
		return 0, fmt.Errorf("%w: a value does not end", errFrame)
	}
	return scalarEnd(i, len(b))
}

func scalarEnd(start, end int) (int, error) {
	if start == end {
		return 0, fmt.Errorf("%w: no value at byte %d", errFrame, start)
	}
	return end, nil
}

// text decodes a JSON string.
func text(value []byte) (string, error) {
	if len(value) >= 2 && value[0] == '"' && bytes.IndexByte(value, '\\') < 0 {
		return string(value[1 : len(value)-1]), nil
	}
	var s string
	if err := json.Unmarshal(value, &s); err != nil {
		return "", fmt.Errorf("%w: %w", errFrame, err)
	}
	return s, nil
}
