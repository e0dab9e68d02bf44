package schema

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

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

const (
	// maxProperties bounds the properties that a program tells apart: a bit each.
	maxProperties = 64
	// fewProperties are compared one after the other; more are looked up.
	fewProperties = 8
	// exactDigits is how many decimal digits a float64 always keeps apart.
	exactDigits = 15
)

// node is the program of a schema. A nil node takes every value.
type node struct {
	judge  func(value []byte) bool // by the library, if the program does not know the subschema
	types  types
	values map[string]bool // the texts of enum and const; nil: any
	min    bound
	max    bound
	// multiple is of multipleOf; 0: none.
	multiple         int64
	minLen, maxLen   int // in code points; maxLen -1: no bound
	minItems         int
	maxItems         int // -1: no bound
	items            *node
	props            []property
	byName           map[string]int // of more than fewProperties
	required         uint64         // bits of props
	rest             *node          // of members that are no props
	closed           bool           // there must be none
	countsLength     bool           // minLen or maxLen is set
	numbers, objects bool           // there is something to check
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

// newProgram makes the program of a schema, or returns nil if the schema has more than programs
// know. library compiles a subschema at a place, a JSON pointer: what programs do not know of one
// member is left to the library for the value of that member alone.
func newProgram(doc any, library func(at string) *jsonschema.Schema, judge func(*jsonschema.Schema, []byte) bool) (_ *node, nodes int) {
	c := compiler{root: doc, open: make(map[string]bool), judge: judge}
	if !has(doc, "$id", "$anchor", "$dynamicAnchor") && !has(doc, scoped...) {
		c.library = library
	}
	n, ok := c.node(doc, "")
	if !ok {
		return nil, 0
	}
	if n == nil {
		n = &node{types: allTypes, maxLen: -1, maxItems: -1}
	}
	return n, c.nodes
}

// compiler makes programs.
type compiler struct {
	root  any
	open  map[string]bool // references that lead here
	nodes int
	// library is nil where a subschema does not mean the same alone.
	library func(at string) *jsonschema.Schema
	judge   func(*jsonschema.Schema, []byte) bool
}

// maxNodes bounds the size of a program, as a reference is copied to where it applies.
const maxNodes = 10_000

// scoped are keywords that see what other subschemas have found, or which of them led here.
var scoped = []string{"$dynamicRef", "unevaluatedItems", "unevaluatedProperties"}

// has reports whether a schema has one of the keywords.
func has(doc any, keywords ...string) bool {
	switch doc := doc.(type) {
	case map[string]any:
		for keyword, member := range doc {
			if slices.Contains(keywords, keyword) || has(member, keywords...) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(doc, func(element any) bool { return has(element, keywords...) })
	}
	return false
}

// node returns the program of a subschema at a place. ok is false if there is none.
func (c *compiler) node(doc any, at string) (n *node, ok bool) {
	if c.nodes++; c.nodes > maxNodes {
		return nil, false
	}
	switch doc := doc.(type) {
	case bool:
		return nil, doc // false takes nothing, which only the library says
	case map[string]any:
		if to, has := doc["$ref"]; has {
			n, ok = c.reference(to, doc)
		} else {
			n, ok = c.object(doc, at)
		}
		if !ok && at != "" && c.library != nil && !strings.ContainsFunc(at, oddPlace) {
			if library := c.library(at); library != nil {
				return &node{judge: func(v []byte) bool { return c.judge(library, v) }}, true
			}
		}
	}
	return n, ok
}

// plainPlace has the characters that a reference to a place need not escape.
const plainPlace = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/$_-."

// oddPlace reports whether a reference to a place would have to escape a character.
func oddPlace(r rune) bool { return !strings.ContainsRune(plainPlace, r) }

// reference returns the program of what a $ref leads to, if the $ref stands alone and does not lead
// to itself.
func (c *compiler) reference(to any, doc map[string]any) (n *node, ok bool) {
	name, ok := to.(string)
	if !ok || c.open[name] {
		return nil, false
	}
	for keyword := range doc {
		if keyword != "$ref" && !annotations[keyword] {
			return nil, false
		}
	}
	target, ok := resolve(c.root, name)
	if !ok {
		return nil, false
	}
	c.open[name] = true
	defer delete(c.open, name)
	return c.node(target, strings.TrimPrefix(name, "#"))
}

// annotations are keywords that refuse no value. $id and anchors are not among them: they change
// where references lead.
var annotations = map[string]bool{
	"$schema": true, "$comment": true, "$defs": true, "title": true, "description": true, "default": true, "examples": true,
	"deprecated": true, "readOnly": true, "writeOnly": true, "format": true, "contentEncoding": true, "contentMediaType": true,
}

func (c *compiler) object(doc map[string]any, at string) (*node, bool) {
	n := &node{types: allTypes, maxLen: -1, maxItems: -1}
	for _, keyword := range sortedNames(doc) {
		if annotations[keyword] {
			continue
		}
		if !c.keyword(n, keyword, doc[keyword], at) {
			return nil, false
		}
	}
	if !c.members(n, doc, at) {
		return nil, false
	}
	n.numbers = n.min.set || n.max.set || n.multiple > 0
	n.countsLength = n.minLen > 0 || n.maxLen >= 0
	n.objects = len(n.props) > 0 || n.closed || n.rest != nil
	return n, true
}

// keyword adds a keyword to a node. It returns false for one that programs do not know.
func (c *compiler) keyword(n *node, keyword string, v any, at string) (ok bool) {
	switch keyword {
	case "type":
		n.types, ok = typesOf(v)
	case "enum":
		list, _ := v.([]any)
		return n.oneOf(list)
	case "const":
		return n.oneOf([]any{v})
	case "minimum", "exclusiveMinimum":
		return n.min.add(v, keyword == "exclusiveMinimum", func(a, b float64) bool { return a > b })
	case "maximum", "exclusiveMaximum":
		return n.max.add(v, keyword == "exclusiveMaximum", func(a, b float64) bool { return a < b })
	case "multipleOf":
		of, fits := count(v)
		n.multiple, ok = int64(of), fits && of > 0
	case "minLength":
		n.minLen, ok = count(v)
	case "maxLength":
		n.maxLen, ok = count(v)
	case "minItems":
		n.minItems, ok = count(v)
	case "maxItems":
		n.maxItems, ok = count(v)
	case "items":
		n.items, ok = c.node(v, at+"/items")
	case "uniqueItems":
		ok = v == false
	case "properties", "required", "additionalProperties":
		ok = true // see members
	}
	return ok
}

// members adds what a schema says of the members of an object.
func (c *compiler) members(n *node, doc map[string]any, at string) (ok bool) {
	switch rest := doc["additionalProperties"].(type) {
	case nil:
	case bool:
		n.closed = !rest
	default:
		if n.rest, ok = c.node(rest, at+"/additionalProperties"); !ok {
			return false
		}
	}
	properties, _ := doc["properties"].(map[string]any)
	for _, name := range sortedNames(properties) {
		p := property{name: name}
		if p.node, ok = c.node(properties[name], at+"/properties/"+strings.NewReplacer("~", "~0", "/", "~1").Replace(name)); !ok || odd(name) {
			return false
		}
		n.props = append(n.props, p)
	}
	required, _ := doc["required"].([]any)
	for _, v := range required {
		name, _ := v.(string)
		i := slices.IndexFunc(n.props, func(p property) bool { return p.name == name })
		if i < 0 {
			if n.closed || odd(name) {
				return false // if closed, no object is valid
			}
			i = len(n.props)
			n.props = append(n.props, property{name, n.rest})
		}
		if i < maxProperties {
			n.required |= 1 << i
		}
	}
	if len(n.props) > maxProperties {
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

func sortedNames(doc map[string]any) []string {
	names := make([]string, 0, len(doc))
	for name := range doc {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func typesOf(v any) (t types, ok bool) {
	list, many := v.([]any)
	if !many {
		list = []any{v}
	}
	for _, v := range list {
		switch v {
		case "null":
			t |= isNull
		case "boolean":
			t |= isBool
		case "integer":
			t |= isInteger
		case "number":
			t |= isInteger | isNumber
		case "string":
			t |= isString
		case "array":
			t |= isArray
		case "object":
			t |= isObject
		default:
			return 0, false
		}
	}
	return t, true
}

// oneOf lets a node take values of which a text in this spelling is known. Other spellings are for
// the library.
func (n *node) oneOf(list []any) bool {
	if n.values != nil {
		return false // enum and const
	}
	n.values = make(map[string]bool, len(list))
	for _, v := range list {
		switch v := v.(type) {
		case nil, bool:
			text, _ := json.Marshal(v)
			n.values[string(text)] = true
		case json.Number:
			n.values[v.String()] = true
		case string:
			if !odd(v) {
				n.values[`"`+v+`"`] = true
			}
		default:
			return false
		}
	}
	return true
}

// odd reports that a JSON string never has this text as it is.
func odd(text string) bool {
	return strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == '"' || r == '\\' })
}

// add adds a bound; tighter tells which of two counts.
func (b *bound) add(v any, exclusive bool, tighter func(a, b float64) bool) bool {
	text, ok := v.(json.Number)
	if !ok {
		return false
	}
	end, _, at, _, ok := exact([]byte(text), 0)
	if !ok || end != len(text) {
		return false
	}
	if !b.set || tighter(at, b.at) || at == b.at && exclusive {
		*b = bound{set: true, exclusive: exclusive, at: at}
	}
	return true
}

// count reads a number of items or code points.
func count(v any) (n int, ok bool) {
	text, isNumber := v.(json.Number)
	if !isNumber {
		return 0, false
	}
	i, err := strconv.ParseInt(text.String(), 10, 32)
	return int(i), err == nil && i >= 0
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

// accepts reports that a payload is valid. After false, it may be valid all the same.
func (n *node) accepts(doc []byte) bool {
	i := n.run(doc, skipBlanks(doc, 0))
	return i >= 0 && skipBlanks(doc, i) == len(doc)
}

// run returns the index behind the value at i if the value is valid, and -1 if that is not sure.
func (n *node) run(doc []byte, i int) int {
	if uint(i) >= uint(len(doc)) {
		return -1
	}
	if n == nil {
		return skip(doc, i)
	}
	if n.judge != nil {
		end := skip(doc, i)
		if end < 0 || !n.judge(doc[i:end]) {
			return -1
		}
		return end
	}
	switch c := doc[i]; c {
	case '{':
		if n.types&isObject == 0 || n.values != nil {
			return -1
		}
		if !n.objects {
			return skip(doc, i)
		}
		return n.object(doc, i+1)
	case '[':
		if n.types&isArray == 0 || n.values != nil {
			return -1
		}
		return n.array(doc, i+1)
	case '"':
		end := skipString(doc, i)
		if end < 0 || n.types&isString == 0 || n.values != nil && !n.values[string(doc[i:end])] ||
			n.countsLength && !n.fits(doc[i+1:end-1]) {
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
	return length >= n.minLen && (n.maxLen < 0 || length <= n.maxLen)
}

// array is run behind the bracket of an array.
func (n *node) array(doc []byte, i int) int {
	i = skipBlanks(doc, i)
	count := 0
	if uint(i) < uint(len(doc)) && doc[i] == ']' {
		return n.ends(i, count)
	}
	for {
		if i = n.items.run(doc, i); i < 0 {
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
	if count < n.minItems || n.maxItems >= 0 && count > n.maxItems {
		return -1
	}
	return i + 1
}

// object is run behind the brace of an object.
func (n *node) object(doc []byte, i int) int {
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
		if i = of.run(doc, i); i < 0 {
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
