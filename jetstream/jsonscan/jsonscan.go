// Package jsonscan reads JSON without decoding it: it finds where values end, says whether they are
// valid, and writes strings. It is the bottom of the hot path, where payloads are cut out of one
// message and spliced into the next.
//
// All functions may be called concurrently; none keeps or changes its input, and none allocates
// unless it fails, grows a destination, or meets more than 64 levels of nesting.
package jsonscan

import (
	"encoding/binary"
	"math/bits"
	"strconv"
	"unicode/utf8"
)

// MaxDepth is how many arrays and objects may stand inside each other. It is the limit of
// encoding/json, so that Go clients can read whatever passes here.
const MaxDepth = 10_000

// SyntaxError says where a JSON text is wrong.
type SyntaxError struct {
	// Offset is the index of the first byte that cannot be part of a valid value; the length of the
	// text when the text ends too early.
	Offset int
}

// Error gives the offset.
func (e *SyntaxError) Error() string {
	return "jsonscan: invalid JSON at byte " + strconv.Itoa(e.Offset)
}

// Valid reports whether b is exactly one JSON value (blanks around it allowed) in valid UTF-8,
// nested no deeper than MaxDepth. It accepts what encoding/json accepts, less invalid UTF-8.
func Valid(b []byte) bool { return ValidWithin(b, 0) }

// ValidWithin is Valid for a value that will stand inside depth further levels: the whole must keep
// to MaxDepth.
func ValidWithin(b []byte, depth int) bool {
	end := value(b, skipBlanks(b, 0), depth)
	return end >= 0 && skipBlanks(b, end) == len(b)
}

// Value returns the index after the JSON value that starts at b[i] (which must not be a blank), or
// a *SyntaxError. What follows the value is not looked at.
func Value(b []byte, i int) (end int, err error) {
	end = value(b, i, 0)
	if end < 0 {
		return 0, &SyntaxError{Offset: ^end}
	}
	return end, nil
}

// value returns the index after the value at b[i], or the complement of the offset of its fault.
// depth is how many levels stand around it.
//
// Which kind of container each open level is takes one bit: 1 for an object. The innermost 64
// levels are in kinds, its lowest bit being the innermost; the words of the levels further out wait
// in outer.
func value(b []byte, i, depth int) int {
	var (
		kinds uint64
		outer []uint64
		level int
	)
	for {
		if kinds&1 == 1 { // inside an object a key precedes every value
			if uint(i) >= uint(len(b)) || b[i] != '"' {
				return ^i
			}
			if i = str(b, i+1); i < 0 {
				return i
			}
			if uint(i) < uint(len(b)) && b[i] != ':' {
				i = skipBlanks(b, i)
			}
			if uint(i) >= uint(len(b)) || b[i] != ':' {
				return ^i
			}
			i = skipBlanks(b, i+1)
		}

		if uint(i) >= uint(len(b)) {
			return ^i
		}
		switch c := b[i]; c {
		case '"':
			i = str(b, i+1)
		case '{', '[':
			if depth+level >= MaxDepth {
				return ^i
			}
			if level&63 == 0 && level > 0 {
				outer = append(outer, kinds)
			}
			level++
			kinds <<= 1
			if c == '{' {
				kinds |= 1
			}
			i = skipBlanks(b, i+1)
			// An empty container is closed below; c+2 is the closing bracket of either kind.
			if uint(i) >= uint(len(b)) || b[i] != c+2 {
				continue
			}
		case 't':
			i = literal(b, i, "true")
		case 'f':
			i = literal(b, i, "false")
		case 'n':
			i = literal(b, i, "null")
		default:
			i = number(b, i)
		}
		if i < 0 {
			return i
		}

		// A value has ended: close the containers that end here, up to a comma.
		for {
			if level == 0 {
				return i
			}
			if i = skipBlanks(b, i); i >= len(b) {
				return ^i
			}
			c := b[i]
			if c == ',' {
				i = skipBlanks(b, i+1)
				break
			}
			if c != ']'+byte(kinds&1)<<5 { // '}' is ']' + 32
				return ^i
			}
			i++
			level--
			kinds >>= 1
			if level&63 == 0 && level > 0 {
				kinds = outer[len(outer)-1]
				outer = outer[:len(outer)-1]
			}
		}
	}
}

// skipBlanks returns the index of the first byte from b[i] on that is no JSON blank.
func skipBlanks(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

const (
	ones  = 0x0101010101010101
	highs = 0x80 * ones
)

// special marks, by their high bits, the bytes of w that end a plain run in a string: quote,
// backslash, control characters and non-ASCII. A borrow can mark a byte wrongly, but only above one
// that is marked rightly, so the lowest mark can be relied on.
func special(w uint64) uint64 {
	return (w | (w - 0x20*ones) | ((w ^ '"'*ones) - ones) | ((w ^ '\\'*ones) - ones)) & highs
}

// str returns the index after the string whose opening quote is b[i-1], or the complement of a
// fault's offset.
func str(b []byte, i int) int {
	for {
		for i+8 <= len(b) {
			if m := special(binary.LittleEndian.Uint64(b[i:])); m != 0 {
				i += bits.TrailingZeros64(m) >> 3
				break
			}
			i += 8
		}
		if uint(i) >= uint(len(b)) {
			return ^i
		}
		switch c := b[i]; {
		case c == '"':
			return i + 1
		case c == '\\':
			if i = escape(b, i+1); i < 0 {
				return i
			}
		case c < 0x20:
			return ^i
		case c < utf8.RuneSelf:
			i++ // only in the last seven bytes of b
		default:
			for i < len(b) && b[i] >= utf8.RuneSelf {
				_, n := utf8.DecodeRune(b[i:])
				if n == 1 {
					return ^i
				}
				i += n
			}
		}
	}
}

// escape returns the index after the escape whose backslash is b[i-1], or the complement of a
// fault's offset.
func escape(b []byte, i int) int {
	if i >= len(b) {
		return ^i
	}
	switch b[i] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return i + 1
	case 'u':
		for k := i + 1; k < i+5; k++ {
			if k >= len(b) || hexValue(b[k]) < 0 {
				return ^k
			}
		}
		return i + 5
	}
	return ^i
}

// hexValue is the value of a hexadecimal digit, or -1.
func hexValue(c byte) rune {
	switch {
	case '0' <= c && c <= '9':
		return rune(c - '0')
	case 'a' <= c && c <= 'f':
		return rune(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return rune(c-'A') + 10
	}
	return -1
}

// literal returns the index after the word at b[i], or the complement of where b differs from it.
func literal(b []byte, i int, word string) int {
	if len(b)-i >= len(word) && string(b[i:i+len(word)]) == word {
		return i + len(word)
	}
	for k := 0; k < len(word) && i < len(b) && b[i] == word[k]; k++ {
		i++
	}
	return ^i
}

// number returns the index after the number at b[i], or the complement of a fault's offset.
func number(b []byte, i int) int {
	if b[i] == '-' {
		i++
	}
	switch {
	case i >= len(b):
		return ^i
	case b[i] == '0':
		i++
	default:
		start := i
		if i = digits(b, i); i == start {
			return ^i
		}
	}
	if i < len(b) && b[i] == '.' {
		start := i + 1
		if i = digits(b, start); i == start {
			return ^i
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		start := i
		if i = digits(b, i); i == start {
			return ^i
		}
	}
	return i
}

// digits returns the index of the first byte from b[i] on that is no digit.
func digits(b []byte, i int) int {
	for i < len(b) && b[i]-'0' <= 9 {
		i++
	}
	return i
}
