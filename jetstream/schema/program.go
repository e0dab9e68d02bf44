package schema

import (
	"bytes"
	"maps"
	"slices"
	"strconv"
	"strings"

	"eventhub/jetstream/jsonscan"
)

// types are kinds of values, as bits.
type types uint8

const (
	isNull types = 1 << iota
	isBool
	isInteger // a number that is written without a fraction and an exponent
	isNumber  // any other number
	isString
	isArray
	isObject

	allTypes types = 1<<iota - 1
)

// typeNames are the types of schemas.
var typeNames = map[string]types{
	"null": isNull, "boolean": isBool, "integer": isInteger, "number": isInteger | isNumber, "string": isString, "array": isArray, "object": isObject,
}

const (
	// maxProperties bounds the properties that a program tells apart: a bit each.
	maxProperties = 64
	// fewProperties are compared one after the other; more are looked up.
	fewProperties = 8
	// exactDigits is how many decimal digits a float64 always keeps apart.
	exactDigits = 15
)

// node is the program of a rule. A nil node takes every value.
type node struct {
	rule     *rule // which a judge knows, if programs do not
	types    types
	values   map[string]bool // the texts of enum and const; nil: any
	min      bound
	max      bound
	multiple int64 // of multipleOf; 0: none
	length   span  // in code points
	pattern  *pattern
	elements span
	items    *node
	props    []property
	byName   map[string]int // of more than fewProperties
	required uint64         // bits of props
	rest     *node          // of members that are no props
	closed   bool           // there must be none

	countsLength, numbers, objects bool // there is something to check
}

// property is a member that the schema names.
type property struct {
	name string
	node *node
}

// bound is a minimum or a maximum.
type bound struct {
	set, exclusive bool
	at             float64
}

// newProgram makes the program of a schema, or returns nil if programs do not know its keywords.
// What they do not know of a member or an element is left to a judge of that value alone, so the
// rules must not ask which other rules led to them.
func newProgram(root *rule) (_ *node, nodes int) {
	c := compiler{nodes: make(map[*rule]*node)}
	n := c.node(root)
	switch {
	case n == nil:
		n = &node{types: allTypes, length: anySpan, elements: anySpan}
	case n.rule != nil:
		return nil, 0
	}
	return n, len(c.nodes)
}

// compiler makes programs.
type compiler struct {
	nodes map[*rule]*node
}

// node returns the program of a rule.
func (c *compiler) node(r *rule) *node {
	for hops := 0; r.ref != nil && r.onlyRefers() && hops < straight; hops++ {
		r = r.ref
	}
	if r.always {
		return nil
	}
	n, known := c.nodes[r]
	if !known {
		n = &node{}
		c.nodes[r] = n
		if !c.fill(n, r) {
			*n = node{rule: r}
		}
	}
	return n
}

// fill adds the keywords of a rule to a node. It returns false if there is one that programs do not
// know.
func (c *compiler) fill(n *node, r *rule) (ok bool) {
	if r.never || r.combines || r.constant != nil && r.enum != nil ||
		len(r.dependents)+len(r.patterns)+len(r.prefix) > 0 || r.names != nil || r.unevaluated != nil || r.members != anySpan ||
		r.contains != nil || r.unevaluatedItems != nil || r.unique {
		return false
	}
	n.types = allTypes
	if r.types != 0 {
		n.types = r.types
	}
	n.length, n.pattern, n.elements = r.length, r.pattern, r.elements
	if r.items != nil {
		n.items = c.node(r.items)
	}
	ok = n.oneOf(r.constant) && n.oneOf(r.enum) &&
		n.min.add(r.minimum, false, -1) && n.min.add(r.exclusiveMin, true, -1) &&
		n.max.add(r.maximum, false, 1) && n.max.add(r.exclusiveMax, true, 1) && c.members(n, r)
	if d := r.multipleOf; d != nil {
		if d.small == 0 || d.exponent < 0 || d.exponent > 9 || d.small > 1e9 {
			return false
		}
		n.multiple = int64(d.small * tenTo[d.exponent]) //nolint:gosec // at most 1e18
	}
	n.numbers = r.numbers
	n.countsLength = r.length != anySpan
	n.objects = len(n.props) > 0 || n.closed || n.rest != nil
	return ok
}

// members adds what a rule says of the members of an object.
func (c *compiler) members(n *node, r *rule) bool {
	n.closed = r.closed
	if r.additional != nil && !r.closed {
		n.rest = c.node(r.additional)
	}
	for _, name := range slices.Sorted(maps.Keys(r.properties)) {
		n.props = append(n.props, property{name, c.node(r.properties[name])})
	}
	for _, name := range r.required {
		i := slices.IndexFunc(n.props, func(p property) bool { return p.name == name })
		if i < 0 {
			if n.closed {
				return false // no object is valid
			}
			i = len(n.props)
			n.props = append(n.props, property{name, n.rest})
		}
		if i >= maxProperties {
			return false
		}
		n.required |= 1 << i
	}
	if len(n.props) > maxProperties || slices.ContainsFunc(n.props, func(p property) bool { return odd(p.name) }) {
		return false
	}
	if len(n.props) > fewProperties {
		n.byName = make(map[string]int, len(n.props))
		for i := range n.props {
			n.byName[n.props[i].name] = i
		}
	}
	return true
}

// oneOf lets a node take values of which a text in this spelling is known. Other spellings are for
// a judge.
func (n *node) oneOf(values set) bool {
	if values == nil {
		return true
	}
	n.values = make(map[string]bool, len(values))
	for i := range values {
		switch v := &values[i]; {
		case v.container != nil:
			return false
		case v.kind != isString:
			n.values[v.text] = true
		case !odd(v.text):
			n.values[`"`+v.text+`"`] = true
		}
	}
	return true
}

// odd reports that a JSON string never has this text as it is.
func odd(text string) bool {
	return strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == '"' || r == '\\' })
}

// add adds a bound, nil for none. It counts if it is the tighter one of two: on the given side of
// the other one, or exclusive. It returns false for a bound that programs do not compare exactly.
func (b *bound) add(n *number, exclusive bool, side float64) bool {
	if n == nil {
		return true
	}
	fraction := len(n.digits) - n.scale
	if len(n.digits) > exactDigits || n.scale > exactDigits || fraction > exactDigits {
		return false
	}
	at, _ := strconv.ParseFloat(n.digits, 64)
	if fraction > 0 {
		at /= powers[fraction]
	} else if n.digits != "" {
		at *= powers[-fraction]
	}
	if n.negative {
		at = -at
	}
	if !b.set || side*at < side*b.at || at == b.at && exclusive {
		*b = bound{set: true, exclusive: exclusive, at: at}
	}
	return true
}

// powers are the powers of ten that a float64 has exactly.
var powers = [...]float64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15}

// exact reads the number at i if it has at most 15 digits and no exponent: two such numbers compare
// as their float64 do. whole is its value if it is an integer. end is the index behind the number.
func exact(doc []byte, i int) (end int, is types, f float64, whole int64, ok bool) {
	negative := false
	if uint(i) < uint(len(doc)) && doc[i] == '-' {
		i, negative = i+1, true
	}
	first := i
	for ; uint(i) < uint(len(doc)) && doc[i]-'0' <= 9; i++ {
		whole = whole*10 + int64(doc[i]-'0')
	}
	digits := i - first
	if digits == 0 || digits > exactDigits || doc[first] == '0' && digits > 1 {
		return 0, 0, 0, 0, false
	}
	is = isInteger
	scale := 0
	if uint(i) < uint(len(doc)) && doc[i] == '.' {
		is = isNumber
		point := i
		for i++; uint(i) < uint(len(doc)) && doc[i]-'0' <= 9 && digits <= exactDigits; i++ {
			whole = whole*10 + int64(doc[i]-'0')
			digits++
		}
		if scale = i - point - 1; scale == 0 || digits > exactDigits {
			return 0, 0, 0, 0, false
		}
	}
	if uint(i) < uint(len(doc)) && doc[i]|0x20 == 'e' {
		return 0, 0, 0, 0, false
	}
	if negative {
		whole = -whole
	}
	if f = float64(whole); scale > 0 {
		f /= powers[scale]
	}
	return i, is, f, whole, true
}

// accepts reports that a payload is valid. After false, the payload may be valid all the same.
func (n *node) accepts(doc []byte, m *matching) bool {
	i := n.run(doc, skipBlanks(doc, 0), m)
	return i >= 0 && skipBlanks(doc, i) == len(doc)
}

// matching are the steps that patterns may still take.
type matching struct {
	left int
	// timed has matches count for the time that they take, and judges of parts for their steps. A
	// single match may cost BriefSteps.
	timed bool
	spent bool // there were too few
}

// run returns the index behind the value at i if the value is valid, and -1 if that is not sure.
func (n *node) run(doc []byte, i int, m *matching) int {
	if uint(i) >= uint(len(doc)) {
		return -1
	}
	if n == nil {
		return skip(doc, i)
	}
	if n.rule != nil {
		return n.judge(doc, i, m)
	}
	switch c := doc[i]; c {
	case '{':
		if n.types&isObject == 0 || n.values != nil {
			return -1
		}
		if !n.objects {
			return skip(doc, i)
		}
		return n.object(doc, i+1, m)
	case '[':
		if n.types&isArray == 0 || n.values != nil {
			return -1
		}
		return n.array(doc, i+1, m)
	case '"':
		end := skipString(doc, i)
		if end < 0 || n.types&isString == 0 || n.values != nil && !n.values[string(doc[i:end])] ||
			n.countsLength && !n.fits(doc[i+1:end-1]) || n.pattern != nil && !n.matches(doc[i+1:end-1], m) {
			return -1
		}
		return end
	case 't', 'f', 'n':
		end := skip(doc, i)
		is := isBool
		if c == 'n' {
			is = isNull
		}
		if end < 0 || n.types&is == 0 || n.values != nil && !n.values[string(doc[i:end])] {
			return -1
		}
		return end
	default:
		return n.number(doc, i)
	}
}

// skip returns the index behind the value at i, or -1 if there is none.
func skip(doc []byte, i int) int {
	end, err := jsonscan.Value(doc, i)
	if err != nil {
		return -1
	}
	return end
}

// skipString is skip for a string.
func skipString(doc []byte, i int) int {
	for end := i + 1; uint(end) < uint(len(doc)); end++ {
		switch c := doc[end]; {
		case c == '"':
			return end + 1
		case c < ' ' || c == '\\' || c >= 0x80:
			return skip(doc, i)
		}
	}
	return -1
}

func skipBlanks(doc []byte, i int) int {
	for i < len(doc) && (doc[i] == ' ' || doc[i] == '\n' || doc[i] == '\t' || doc[i] == '\r') {
		i++
	}
	return i
}

// number is run for a number.
func (n *node) number(doc []byte, i int) int {
	end, is, f, whole, ok := exact(doc, i)
	if !ok {
		if n.numbers {
			return -1
		}
		if end = skip(doc, i); end < 0 {
			return -1
		}
		is = isInteger
		if bytes.ContainsAny(doc[i:end], ".eE") {
			is = isNumber
		}
	}
	switch {
	case n.types&is == 0, n.values != nil && !n.values[string(doc[i:end])]:
		return -1
	case !n.numbers:
		return end
	case n.min.set && (f < n.min.at || n.min.exclusive && f == n.min.at), n.max.set && (f > n.max.at || n.max.exclusive && f == n.max.at),
		n.multiple > 0 && (is != isInteger || whole%n.multiple != 0):
		return -1
	}
	return end
}

// fits reports whether the text of a valid string has a length within the bounds.
func (n *node) fits(text []byte) bool {
	length := 0
	for i := 0; i < len(text); length++ {
		switch c := text[i]; {
		case c == '\\' && text[i+1] == 'u':
			if text[i+2]|0x20 == 'd' && text[i+3] >= '8' {
				return false // a surrogate
			}
			i += 6
		case c == '\\':
			i += 2
		case c < 0x80:
			i++
		case c < 0xE0:
			i += 2
		case c < 0xF0:
			i += 3
		default:
			i += 4
		}
	}
	return !n.length.few(length) && !n.length.many(length)
}

// matches reports whether the text of a valid string matches the pattern, as far as that can be
// seen without its escapes.
func (n *node) matches(text []byte, m *matching) bool {
	cost, most := n.pattern.cost(len(text)), m.left
	if m.timed && most > 0 {
		most = max(most, BriefSteps)
	}
	if m.spent = m.spent || cost > most; m.spent || bytes.IndexByte(text, '\\') >= 0 {
		return false
	}
	if !m.timed {
		m.left -= cost
		return n.pattern.Match(text)
	}
	ok, took := timed(cost, func() bool { return n.pattern.Match(text) })
	m.left -= took
	return ok
}

// judgedAByte is how many steps judges within a program have for a byte of the payload.
const judgedAByte = 4

// judge is run by a judge, who has a share of the steps for the payload.
func (n *node) judge(doc []byte, i int, m *matching) int {
	end := skip(doc, i)
	if end < 0 {
		return -1
	}
	share := min(BriefSteps, judgedAByte*len(doc)) * (end - i) / len(doc)
	if m.timed {
		share = min(share, max(m.left, 0))
	}
	j := judge{left: share, quiet: 1}
	ok := j.takes(n.rule, decode(doc[i:end], nil))
	if m.timed { // what is not taken is for a judge of the whole payload
		m.left -= share - j.left - j.saved + (end-i)/decoding
	}
	if !ok {
		return -1
	}
	return end
}

// array is run behind the bracket of an array.
func (n *node) array(doc []byte, i int, m *matching) int {
	i = skipBlanks(doc, i)
	count := 0
	if uint(i) < uint(len(doc)) && doc[i] == ']' {
		return n.ends(i, count)
	}
	for {
		if i = n.items.run(doc, i, m); i < 0 {
			return -1
		}
		count++
		if i = skipBlanks(doc, i); uint(i) >= uint(len(doc)) {
			return -1
		}
		switch doc[i] {
		case ',':
			i = skipBlanks(doc, i+1)
		case ']':
			return n.ends(i, count)
		default:
			return -1
		}
	}
}

func (n *node) ends(i, count int) int {
	if n.elements.few(count) || n.elements.many(count) {
		return -1
	}
	return i + 1
}

// object is run behind the brace of an object.
func (n *node) object(doc []byte, i int, m *matching) int {
	i = skipBlanks(doc, i)
	var seen uint64
	if uint(i) < uint(len(doc)) && doc[i] == '}' {
		if n.required != 0 {
			return -1
		}
		return i + 1
	}
	next := 0 // members often come in the order of the schema
	for {
		if uint(i) >= uint(len(doc)) || doc[i] != '"' {
			return -1
		}
		at, end := n.find(doc, i, next)
		if end < 0 {
			return -1
		}
		i = skipBlanks(doc, end)
		if uint(i) >= uint(len(doc)) || doc[i] != ':' {
			return -1
		}
		i = skipBlanks(doc, i+1)
		of := n.rest
		switch {
		case at >= 0:
			if seen&(1<<at) != 0 {
				return -1 // the last one of several counts
			}
			seen |= 1 << at
			of, next = n.props[at].node, at+1
		case n.closed:
			return -1
		}
		if i = of.run(doc, i, m); i < 0 {
			return -1
		}
		if i = skipBlanks(doc, i); uint(i) >= uint(len(doc)) {
			return -1
		}
		switch doc[i] {
		case ',':
			i = skipBlanks(doc, i+1)
		case '}':
			if n.required&^seen != 0 {
				return -1
			}
			return i + 1
		default:
			return -1
		}
	}
}

// find returns the index of the property whose name is the string at i, or -1, and the index behind
// the string. next is the property that it may be. end is -1 if that is not sure.
func (n *node) find(doc []byte, i, next int) (at, end int) {
	i++
	if next < len(n.props) {
		name := n.props[next].name
		if end = i + len(name); end < len(doc) && doc[end] == '"' && string(doc[i:end]) == name {
			return next, end + 1
		}
	}
	if end = skipString(doc, i-1); end < 0 {
		return 0, -1
	}
	name := doc[i : end-1]
	if bytes.IndexByte(name, '\\') >= 0 {
		return 0, -1 // it may be the name of a property in another spelling
	}
	if n.byName != nil {
		if at, ok := n.byName[string(name)]; ok {
			return at, end
		}
		return -1, end
	}
	for at := range n.props {
		if n.props[at].name == string(name) {
			return at, end
		}
	}
	return -1, end
}
