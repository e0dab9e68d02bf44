package schema

import (
	"encoding/json"
	"strconv"
	"strings"

	"eventhub/jetstream/jsonscan"
)

// maxExponent is the largest power of ten of a number in a schema. The library computes with all
// digits of a number, so 1e1000000 would take it milliseconds, and 1e10000000 makes it panic.
// Numbers in payloads that are larger, or closer to 0, are taken as beyond all of those.
const maxExponent = 400

// maxDigits is how many digits of a number the library gets: for those of a megabyte it takes
// seconds, and with more than a million behind the point it panics. Numbers of schemas have no
// more.
const maxDigits = 1_000

// decoder makes values of a valid JSON text, as the library takes them. encoding/json takes twice
// as long.
type decoder struct {
	text []byte
	at   int
}

// decode returns the value of a valid JSON text.
func decode(text []byte) any {
	d := decoder{text: text}
	return d.value()
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

func (d *decoder) value() any {
	switch d.next() {
	case '{':
		d.at++
		object := make(map[string]any)
		for d.next() != '}' {
			if d.text[d.at] == ',' {
				d.at++
				d.next()
			}
			name := d.string()
			d.next()
			d.at++ // the colon
			object[name] = d.value()
		}
		d.at++
		return object
	case '[':
		d.at++
		array := []any{}
		for d.next() != ']' {
			if d.text[d.at] == ',' {
				d.at++
			}
			array = append(array, d.value())
		}
		d.at++
		return array
	case '"':
		return d.string()
	case 't':
		d.at += len("true")
		return true
	case 'f':
		d.at += len("false")
		return false
	case 'n':
		d.at += len("null")
		return nil
	}
	return d.number()
}

func (d *decoder) string() string {
	start := d.at
	for d.at++; d.text[d.at] != '"'; d.at++ {
		if d.text[d.at] == '\\' {
			d.at++
		}
	}
	d.at++
	plain, _ := jsonscan.Unquote(d.text[start:d.at], nil)
	return string(plain)
}

func (d *decoder) number() any {
	start := d.at
	for d.at < len(d.text) && strings.IndexByte("+-.0123456789Ee", d.text[d.at]) >= 0 {
		d.at++
	}
	number, _ := tame(string(d.text[start:d.at]))
	return json.Number(number)
}

// tame returns a number with at most maxDigits digits, or one that is beyond all numbers of schemas
// as well, if the number is. The result compares with numbers of schemas as the number does, and is
// whole if the number is. changed says that it is another text.
func tame(number string) (_ string, changed bool) {
	mantissa, exponent, _ := strings.Cut(strings.ToLower(number), "e")
	if len(number) <= maxExponent && exponent == "" {
		return number, false
	}
	sign := ""
	if strings.HasPrefix(mantissa, "-") {
		sign, mantissa = "-", mantissa[1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	// The number is 0.DIGITS times ten to the power of scale.
	digits, scale := strings.Trim(whole+fraction, "0"), len(whole)
	if digits == "" {
		return "0", false
	}
	scale -= len(whole) + len(fraction) - len(strings.TrimLeft(whole+fraction, "0"))
	if exponent != "" {
		e, err := strconv.Atoi(exponent)
		switch {
		case err != nil && strings.HasPrefix(exponent, "-"):
			e = -1 << 40
		case err != nil:
			e = 1 << 40
		}
		scale += e
	}
	switch {
	case scale > maxExponent+1:
		return sign + "1e" + strconv.Itoa(maxExponent+1), true
	case scale < -maxExponent:
		return sign + "1e-" + strconv.Itoa(maxExponent+1), true
	case len(digits) > maxDigits: // what is cut off is a fraction, and not 0
		return sign + "0." + digits[:maxDigits] + "1e" + strconv.Itoa(scale), true
	case len(number) > maxDigits: // most of it are zeros
		return sign + "0." + digits + "e" + strconv.Itoa(scale), false
	}
	return number, false
}
