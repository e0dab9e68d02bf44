package upcast

import (
	"bytes"
	"slices"
	"strconv"

	"eventhub/jetstream/jsonscan"
)

// value is a part of a document. It keeps its text until an operation reaches into it.
type value struct {
	raw    []byte // nil once it was opened
	object bool
	parts  []part // members or elements, once it was opened
}

// part is a member or an element.
type part struct {
	key  []byte // with quotes, as it was written; nil in an array
	name string
	of   *value
}

// open reads the members or elements of a value, at most some. has is false for a value that has
// none, and fits for one that has more.
func (v *value) open(most int) (has, fits bool) {
	if v.raw == nil {
		return true, true
	}
	text := bytes.TrimLeft(v.raw, " \t\r\n")
	if len(text) == 0 || text[0] != '{' && text[0] != '[' {
		return false, true
	}
	v.object = text[0] == '{'
	byName := make(map[string]int)
	for w := jsonscan.Walk(text, 0); w.Next(); {
		p := part{key: w.Key, of: &value{raw: w.Value}}
		if v.object {
			name, _ := jsonscan.Unquote(w.Key, nil)
			p.name = string(name)
			if i, twice := byName[p.name]; twice {
				v.parts[i].of = nil
			}
			byName[p.name] = len(v.parts)
		}
		if len(v.parts) == most {
			v.parts = nil
			return true, false
		}
		v.parts = append(v.parts, p)
	}
	if len(byName) < len(v.parts) && v.object {
		v.parts = slices.DeleteFunc(v.parts, func(p part) bool { return p.of == nil })
	}
	v.raw = nil
	return true, true
}

// find returns the index of a member or an element, or -1.
func (v *value) find(name string) int {
	if v.object {
		return slices.IndexFunc(v.parts, func(p part) bool { return p.name == name })
	}
	i, err := strconv.Atoi(name)
	if err != nil || i < 0 || i >= len(v.parts) || strconv.Itoa(i) != name {
		return -1
	}
	return i
}

// appendTo appends the text of a value.
func (v *value) appendTo(dst []byte) []byte {
	if v.raw != nil {
		return append(dst, v.raw...)
	}
	left, right := byte('['), byte(']')
	if v.object {
		left, right = '{', '}'
	}
	dst = append(dst, left)
	for i := range v.parts {
		if i > 0 {
			dst = append(dst, ',')
		}
		if v.object {
			dst = append(append(dst, v.parts[i].key...), ':')
		}
		dst = v.parts[i].of.appendTo(dst)
	}
	return append(dst, right)
}

// size returns the bytes of the text of a value.
func (v *value) size() int {
	if v.raw != nil {
		return len(v.raw)
	}
	n := 2 + len(v.parts)
	for i := range v.parts {
		n += len(v.parts[i].key) + 1 + v.parts[i].of.size()
	}
	return n
}
