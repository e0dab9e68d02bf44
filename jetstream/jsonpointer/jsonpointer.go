// Package jsonpointer finds values in JSON texts by JSON pointers (RFC 6901).
package jsonpointer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Pointer is a JSON pointer: the names and indexes that lead to a value. The zero value points to
// the whole text.
type Pointer []string

var unescape = strings.NewReplacer("~1", "/", "~0", "~")

// Parse reads a pointer such as /a/b~1c/0. The error says what is wrong with it.
func Parse(text string) (Pointer, error) {
	if text == "" {
		return nil, nil
	}
	if text[0] != '/' {
		return nil, errors.New("must begin with /, as in /id")
	}
	for rest := text; ; {
		_, after, found := strings.Cut(rest, "~")
		if !found {
			break
		}
		if after == "" || after[0] != '0' && after[0] != '1' {
			return nil, errors.New("~ must be followed by 0 or 1; ~0 means ~ and ~1 means /")
		}
		rest = after
	}
	names := strings.Split(text[1:], "/")
	for i, name := range names {
		names[i] = unescape.Replace(name)
	}
	return names, nil
}

// Find returns the value in text that the pointer leads to, as it is written there. ok is false
// when there is none, or when text is not JSON.
func (p Pointer) Find(text []byte) (value json.RawMessage, ok bool) {
	value = text
	for _, name := range p {
		if value, ok = child(value, name); !ok {
			return nil, false
		}
	}
	return value, len(p) > 0 || json.Valid(text)
}

// child is the value of a name in an object, or at an index of an array.
func child(text []byte, name string) (json.RawMessage, bool) {
	var object map[string]json.RawMessage
	if json.Unmarshal(text, &object) == nil {
		value, ok := object[name]
		return value, ok
	}
	i, err := index(name)
	if err != nil {
		return nil, false
	}
	var array []json.RawMessage
	if json.Unmarshal(text, &array) != nil || i >= len(array) {
		return nil, false
	}
	return array[i], true
}

// index reads the index of an array: digits without a leading zero.
func index(name string) (int, error) {
	if len(name) > 1 && name[0] == '0' || strings.ContainsAny(name, "+-") {
		return 0, fmt.Errorf("%q is not an index", name)
	}
	return strconv.Atoi(name)
}
