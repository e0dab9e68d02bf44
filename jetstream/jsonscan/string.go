package jsonscan

import (
	"bytes"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// AppendString appends s to dst as a JSON string. Invalid UTF-8 becomes U+FFFD. Only what JSON
// demands is escaped.
func AppendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0 // s[start:i] is plain and not yet appended
	for i := 0; i < len(s); {
		if i+8 <= len(s) {
			m := special(load64(s[i:]))
			if m == 0 {
				i += 8
				continue
			}
			i += bits.TrailingZeros64(m) >> 3
		}
		c := s[i]
		if c >= utf8.RuneSelf {
			_, n := utf8.DecodeRuneInString(s[i:])
			if n == 1 {
				dst = append(append(dst, s[start:i]...), "\uFFFD"...)
				start = i + 1
			}
			i += n
			continue
		}
		if c >= ' ' && c != '"' && c != '\\' {
			i++
			continue
		}
		dst = append(dst, s[start:i]...)
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
		i++
		start = i
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}

// load64 reads eight bytes; the compiler makes one load of it.
func load64(s string) uint64 {
	_ = s[7]
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}

// Unquote returns what the JSON string token raw, its quotes included, stands for. A token without
// escapes is not copied: s is then a part of raw. Otherwise the text is appended to buf, and s is a
// part of that. grown is buf with what was appended, to be passed to the next call. A lone
// surrogate becomes U+FFFD.
//
// raw must be a valid token, as Value and Walker deliver it.
func Unquote(raw, buf []byte) (s, grown []byte) {
	raw = raw[1 : len(raw)-1]
	k := bytes.IndexByte(raw, '\\')
	if k < 0 {
		return raw, buf
	}
	start := len(buf)
	for k >= 0 {
		buf = append(buf, raw[:k]...)
		raw = raw[k:]
		c, n := raw[1], 2
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		}
		if c != 'u' {
			buf = append(buf, c)
		} else {
			r := hex4(raw[2:])
			n = 6
			if utf16.IsSurrogate(r) {
				high := r
				r = utf8.RuneError
				if len(raw) >= 12 && raw[6] == '\\' && raw[7] == 'u' {
					if pair := utf16.DecodeRune(high, hex4(raw[8:])); pair != utf8.RuneError {
						r, n = pair, 12
					}
				}
			}
			buf = utf8.AppendRune(buf, r)
		}
		raw = raw[n:]
		k = bytes.IndexByte(raw, '\\')
	}
	buf = append(buf, raw...)
	return buf[start:len(buf):len(buf)], buf
}

// hex4 is the number that four hexadecimal digits stand for.
func hex4(b []byte) rune {
	return hexValue(b[0])<<12 | hexValue(b[1])<<8 | hexValue(b[2])<<4 | hexValue(b[3])
}
