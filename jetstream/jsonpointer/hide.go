package jsonpointer

import (
	"bytes"
	"encoding/json"

	"eventhub/jetstream/jsonscan"
)

// Hide returns text with each value that one of the pointers leads to replaced by with, which must
// be JSON. It replaces each of several members of an object that have the same name. The rest of
// the text stays byte for byte. If text is not JSON, or a pointer is empty, Hide returns with. Hide
// does not change text, and returns it if no pointer leads to a value.
func Hide(text []byte, pointers []Pointer, with string) []byte {
	if len(pointers) == 0 {
		return text
	}
	if !jsonscan.Valid(text) {
		return []byte(with)
	}
	h := hider{text: text, with: with}
	h.value(skipBlanks(text, 0), pointers)
	if h.done == 0 {
		return text
	}
	return append(h.out, text[h.done:]...)
}

// hider copies a valid text and replaces values.
type hider struct {
	text []byte
	with string
	out  []byte
	done int // how much of text is in out
}

// value hides in the value at i what the pointers lead to, and returns the index after the value.
func (h *hider) value(i int, pointers []Pointer) (end int) {
	end, err := jsonscan.Value(h.text, i)
	if err != nil {
		return len(h.text) // cannot happen: the text is valid
	}
	for _, p := range pointers {
		if len(p) == 0 {
			h.out = append(append(h.out, h.text[h.done:i]...), h.with...)
			h.done = end
			return end
		}
	}
	switch h.text[i] {
	case '{':
		h.members(i, func(name string, _ int) []Pointer { return below(pointers, name, -1) })
	case '[':
		h.members(i, func(_ string, n int) []Pointer { return below(pointers, "", n) })
	}
	return end
}

// members visits the members of the object or array at i.
func (h *hider) members(i int, of func(name string, n int) []Pointer) {
	object := h.text[i] == '{'
	for n := 0; ; n++ {
		i = skipBlanks(h.text, i+1)
		if c := h.text[i]; c == '}' || c == ']' {
			return // of an empty object or array
		}
		name := ""
		if object {
			end, err := jsonscan.Value(h.text, i)
			if err != nil || json.Unmarshal(h.text[i:end], &name) != nil {
				return // cannot happen: the text is valid
			}
			i = skipBlanks(h.text, end) // the colon
			i = skipBlanks(h.text, i+1)
		}
		if next := of(name, n); len(next) > 0 {
			i = h.value(i, next)
		} else if end, err := jsonscan.Value(h.text, i); err == nil {
			i = end
		}
		if i = skipBlanks(h.text, i); h.text[i] != ',' {
			return
		}
	}
}

// below returns the rests of the pointers that lead through a member.
func below(pointers []Pointer, name string, n int) (next []Pointer) {
	for _, p := range pointers {
		at, err := index(p[0])
		if n < 0 && p[0] == name || n >= 0 && err == nil && at == n {
			next = append(next, p[1:])
		}
	}
	return next
}

// skipBlanks returns the index of the first byte from i that is not a blank.
func skipBlanks(text []byte, i int) int {
	return len(text) - len(bytes.TrimLeft(text[i:], " \t\r\n"))
}
