package schema

import (
	"hash/maphash"
	"math/bits"
	"slices"
	"strings"

	"eventhub/jetstream/jsonscan"
)

// value is a JSON value. Which fields it has depends on its kind.
type value struct {
	kind types
	hash uint64 // 0: not known yet
	// text is that of a string. Of what is no string, array or object it is as it is written.
	text string
	*container
}

// container has what is in an array or an object.
type container struct {
	elements []value
	members  []member // in the order of their names, each name once
}

type member struct {
	name string
	value
}

// member returns the member with a name, or nil.
func (c *container) member(name string) *value {
	i, found := slices.BinarySearchFunc(c.members, name, func(m member, name string) int { return strings.Compare(m.name, name) })
	if !found {
		return nil
	}
	return &c.members[i].value
}

// search is how many comparisons of names the costs of member are like. These are more than there
// are among many members, which are far from each other in memory.
func (c *container) search() int {
	compared := bits.Len(uint(len(c.members)))
	return 4 + compared*compared/8
}

// decoder makes values of a valid JSON text. It counts them first, so that all are made at once.
type decoder struct {
	text       string
	at         int
	sizes      []int // of the containers, in the order in which they begin
	containers []container
	elements   []value
	members    []member
	rest       func()
	done       int // containers counted, and values made
}

// decode returns the value of a valid JSON text. It calls rest as often as a judge
// does, unless rest is nil.
func decode(text []byte, rest func()) *value {
	d := decoder{text: string(text), rest: rest}
	d.count()
	v := d.value()
	return &v
}

// count finds how much is in each container, and makes room for all of it.
func (d *decoder) count() {
	var open []int
	members, elements := 0, 0
	for d.at = 0; d.at < len(d.text); d.at++ {
		switch c := d.text[d.at]; c {
		case '"':
			d.skipString()
			d.at--
		case '{', '[':
			n := 1
			d.step()
			d.at++
			if next := d.next(); next == '}' || next == ']' {
				n = 0
			}
			d.at--
			open = append(open, len(d.sizes))
			d.sizes = append(d.sizes, n)
		case ',':
			d.sizes[open[len(open)-1]]++
		case '}':
			members += d.sizes[open[len(open)-1]]
			open = open[:len(open)-1]
		case ']':
			elements += d.sizes[open[len(open)-1]]
			open = open[:len(open)-1]
		}
	}
	d.at = 0
	d.containers, d.members, d.elements = make([]container, len(d.sizes)), make([]member, members), make([]value, elements)
}

// container returns the next container, and how much will be in it.
func (d *decoder) container() (c *container, n int) {
	c, n = &d.containers[0], d.sizes[0]
	d.containers, d.sizes = d.containers[1:], d.sizes[1:]
	return c, n
}

// next skips blanks, and returns the byte there.
func (d *decoder) next() byte {
	for {
		switch c := d.text[d.at]; c {
		case ' ', '\t', '\n', '\r':
			d.at++
		default:
			return c
		}
	}
}

// step rests from time to time.
func (d *decoder) step() {
	if d.done++; d.done%(restEvery/2) == 0 && d.rest != nil {
		d.rest()
	}
}

func (d *decoder) value() value {
	d.step()
	switch d.next() {
	case '{':
		return d.object()
	case '[':
		return d.array()
	case '"':
		return value{kind: isString, text: d.string()}
	case 't':
		d.at += len("true")
		return value{kind: isBool, text: "true"}
	case 'f':
		d.at += len("false")
		return value{kind: isBool, text: "false"}
	case 'n':
		d.at += len("null")
		return value{kind: isNull, text: "null"}
	}
	return d.number()
}

func (d *decoder) object() value {
	c, n := d.container()
	c.members, d.members = d.members[:n:n], d.members[n:]
	sorted := true
	for i := range c.members {
		d.next()
		d.at++ // a brace or a comma
		d.next()
		m := &c.members[i]
		m.name = d.string()
		d.next()
		d.at++ // the colon
		m.value = d.value()
		sorted = sorted && (i == 0 || c.members[i-1].name < m.name)
	}
	d.end(n)
	if !sorted {
		slices.SortStableFunc(c.members, func(a, b member) int { return strings.Compare(a.name, b.name) })
		last := 0 // the last one of several counts
		for i := range c.members {
			if c.members[i].name != c.members[last].name {
				last++
			}
			c.members[last] = c.members[i]
		}
		c.members = c.members[:last+1]
	}
	return value{kind: isObject, container: c}
}

func (d *decoder) array() value {
	c, n := d.container()
	c.elements, d.elements = d.elements[:n:n], d.elements[n:]
	for i := range c.elements {
		d.next()
		d.at++ // a bracket or a comma
		c.elements[i] = d.value()
	}
	d.end(n)
	return value{kind: isArray, container: c}
}

// end goes behind the end of a container of n values.
func (d *decoder) end(n int) {
	if n == 0 {
		d.at++
	}
	d.next()
	d.at++
}

// skipString goes behind a string, and reports whether it has escapes.
func (d *decoder) skipString() (escaped bool) {
	for d.at++; d.text[d.at] != '"'; d.at++ {
		if d.text[d.at] == '\\' {
			escaped = true
			d.at++
		}
	}
	d.at++
	return escaped
}

func (d *decoder) string() string {
	start := d.at
	if !d.skipString() {
		return d.text[start+1 : d.at-1]
	}
	plain, _ := jsonscan.Unquote([]byte(d.text[start:d.at]), nil)
	return string(plain)
}

func (d *decoder) number() value {
	start, kind := d.at, isInteger
scan:
	for ; d.at < len(d.text); d.at++ {
		switch c := d.text[d.at]; {
		case c >= '0' && c <= '9', c == '-', c == '+':
		case c == '.' || c == 'e' || c == 'E':
			kind = isNumber
		default:
			break scan
		}
	}
	return value{kind: kind, text: d.text[start:d.at]}
}

// size is how many members or elements a value has.
func (v *value) size() int {
	if v.container == nil {
		return 0
	}
	return len(v.elements) + len(v.members)
}

// seed makes hashes that nobody can foresee.
var seed = maphash.MakeSeed()

// sum returns the hash of a value. Equal values have the same one, whatever their spelling is. Each
// part of a payload is hashed once.
func (j *judge) sum(v *value) uint64 {
	if v.hash != 0 || !j.pay(2+len(v.text)/bytesAStep) {
		return v.hash
	}
	var h maphash.Hash
	h.SetSeed(seed)
	switch v.kind {
	case isInteger, isNumber:
		maphash.WriteComparable(&h, parse(v.text))
	case isArray:
		for i := range v.elements {
			maphash.WriteComparable(&h, j.sum(&v.elements[i]))
		}
	case isObject:
		for i := range v.members {
			m := &v.members[i]
			j.pay(len(m.name) / bytesAStep)
			maphash.WriteComparable(&h, m.name)
			maphash.WriteComparable(&h, j.sum(&m.value))
		}
	default:
		_, _ = h.WriteString(v.text)
	}
	kind := v.kind
	if kind == isNumber {
		kind = isInteger // which may be the same number
	}
	_ = h.WriteByte(byte(kind))
	v.hash = max(h.Sum64(), 1)
	return v.hash
}

// equal reports whether two values are equal that have been hashed.
func (j *judge) equal(v, o *value) bool {
	if v.hash != o.hash || !j.pay(1+len(v.text)/bytesAStep) {
		return false
	}
	switch {
	case v.kind&(isInteger|isNumber) != 0 && o.kind&(isInteger|isNumber) != 0:
		return parse(v.text) == parse(o.text)
	case v.kind != o.kind || v.text != o.text || v.size() != o.size():
		return false
	case v.container == nil:
		return true
	}
	for i := range v.elements {
		if !j.equal(&v.elements[i], &o.elements[i]) {
			return false
		}
	}
	for i := range v.members {
		if v.members[i].name != o.members[i].name || !j.equal(&v.members[i].value, &o.members[i].value) {
			return false
		}
	}
	return true
}
