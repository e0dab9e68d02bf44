package cloudevents

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Prefix begins the headers that are attributes, in any case.
const Prefix = "ce-"

// contentTypeHeader is datacontenttype in the HTTP binding. The NATS binding names it like all
// other attributes.
const contentTypeHeader = "content-type"

// SetHeaders adds the attributes as headers of the NATS binding. It sets content-type as well,
// which clients of HTTP read, and some of NATS that do not follow the binding.
func (e *Event) SetHeaders(headers map[string]string) {
	for name, value := range e.Attributes {
		headers[Prefix+name] = Encode(value)
		if name == ContentType && printable(value) {
			headers[contentTypeHeader] = value
		}
	}
}

// HasAttributes reports whether headers say that they are attributes of an event. Names are
// compared in any case.
func HasAttributes(headers map[string]string) bool {
	for name := range headers {
		if strings.EqualFold(name, Prefix+Version) {
			return true
		}
	}
	return false
}

// FromHeaders reads the attributes from headers of the HTTP or the NATS binding. Names are compared
// in any case. The error names a header whose value cannot be decoded, or that is given in several
// cases of letters.
func FromHeaders(headers map[string]string) (map[string]string, error) {
	attributes := make(map[string]string, len(headers))
	kind := ""
	for name, value := range headers {
		lower := strings.ToLower(name)
		if lower == contentTypeHeader {
			if kind != "" {
				return nil, errors.New("content-type is given more than once")
			}
			kind = value
			continue
		}
		attribute, ok := strings.CutPrefix(lower, Prefix)
		if !ok {
			continue
		}
		decoded, err := Decode(value)
		if err != nil {
			return nil, fmt.Errorf("%s%s %w", Prefix, attribute, err)
		}
		if _, twice := attributes[attribute]; twice {
			return nil, fmt.Errorf("%s%s is given more than once", Prefix, attribute)
		}
		attributes[attribute] = decoded
	}
	if _, given := attributes[ContentType]; !given && kind != "" {
		attributes[ContentType] = kind
	}
	return attributes, nil
}

// printable reports whether a value can be a header as it is.
func printable(value string) bool {
	return !strings.ContainsFunc(value, func(c rune) bool { return c < ' ' || c >= 0x7f }) && strings.TrimSpace(value) == value
}

const upperHex = "0123456789ABCDEF"

// Encode percent-encodes the value of an attribute for a header: blanks, double quotes, percent
// signs, and all but printable ASCII.
func Encode(value string) string {
	plain := func(c byte) bool { return c > ' ' && c < 0x7f && c != '"' && c != '%' }
	n := 0
	for i := range len(value) {
		if !plain(value[i]) {
			n++
		}
	}
	if n == 0 {
		return value
	}
	out := make([]byte, 0, len(value)+2*n)
	for i := range len(value) {
		if c := value[i]; plain(c) {
			out = append(out, c)
		} else {
			out = append(out, '%', upperHex[c>>4], upperHex[c&15])
		}
	}
	return string(out)
}

var errNotUTF8 = errors.New("does not decode to UTF-8")

// Decode returns what the value of a header stands for: a double-quoted value is unquoted, and then
// percent-decoded. A percent sign without two hexadecimal digits stands for itself, because not all
// publishers encode.
func Decode(value string) (string, error) {
	if len(value) >= 2 && value[0] == '"' && value[len(value)-1] == '"' {
		value = unquote(value[1 : len(value)-1])
	}
	if strings.IndexByte(value, '%') >= 0 {
		out := make([]byte, 0, len(value))
		for i := 0; i < len(value); i++ {
			if value[i] == '%' && i+2 < len(value) {
				if c, err := hex.DecodeString(value[i+1 : i+3]); err == nil {
					out = append(out, c[0])
					i += 2
					continue
				}
			}
			out = append(out, value[i])
		}
		value = string(out)
	}
	if !utf8.ValidString(value) {
		return "", errNotUTF8
	}
	return value, nil
}

// unquote resolves the backslashes of a quoted string (RFC 9110, section 5.6.4).
func unquote(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
		}
		out = append(out, s[i])
	}
	return string(out)
}
