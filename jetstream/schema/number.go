package schema

import (
	"cmp"
	"math"
	"math/big"
	"math/bits"
	"strconv"
	"strings"
)

// number is the value of a JSON number: 0.DIGITS times ten to the power of scale. A value has one
// form only, as its digits neither begin nor end with 0; 0 has no digits. Its cost is linear in the
// text, whatever the exponent is.
type number struct {
	negative bool
	digits   string
	scale    int
}

// farAway is the scale of numbers whose exponent has more digits than an int: these are all equal.
const farAway = math.MaxInt64 / 4

// parse returns the value of a valid JSON number.
func parse(text string) (n number) {
	mantissa, exponent := text, ""
	if i := strings.IndexAny(text, "eE"); i >= 0 {
		mantissa, exponent = text[:i], text[i+1:]
	}
	if strings.HasPrefix(mantissa, "-") {
		n.negative, mantissa = true, mantissa[1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	n.digits, n.scale = whole, len(whole)
	if fraction = strings.TrimRight(fraction, "0"); fraction != "" {
		n.digits = whole + fraction
	}
	before := len(n.digits)
	n.digits = strings.TrimLeft(n.digits, "0")
	n.scale -= before - len(n.digits)
	if n.digits = strings.TrimRight(n.digits, "0"); n.digits == "" {
		return number{}
	}
	if exponent != "" {
		e, err := strconv.Atoi(exponent)
		switch {
		case err == nil && -farAway < e && e < farAway:
			n.scale += e
		case exponent[0] == '-':
			n.scale = -farAway
		default:
			n.scale = farAway
		}
	}
	return n
}

// ofRat returns the value of a number of a schema as the library has it.
func ofRat(r *big.Rat) number {
	places, _ := r.FloatPrec()
	return parse(r.FloatString(places))
}

// whole reports whether a number is an integer.
func (n number) whole() bool { return n.scale >= len(n.digits) }

// compare compares two numbers as cmp.Compare does.
func (n number) compare(o number) int {
	switch a, b := n.sign(), o.sign(); {
	case a != b:
		return cmp.Compare(a, b)
	case a == 0:
		return 0
	}
	order := cmp.Compare(n.scale, o.scale)
	if order == 0 {
		order = cmp.Compare(n.digits, o.digits)
	}
	if n.negative {
		return -order
	}
	return order
}

func (n number) sign() int {
	switch {
	case n.digits == "":
		return 0
	case n.negative:
		return -1
	}
	return 1
}

// divisor is what a multipleOf asks for: factor times ten to the power of exponent. The factor does
// not end with 0.
type divisor struct {
	factor   *big.Int
	small    uint64 // the factor if it fits, else 0
	exponent int
}

func newDivisor(n number) *divisor {
	d := &divisor{factor: new(big.Int), exponent: n.scale - len(n.digits)}
	d.factor.SetString(n.digits, 10)
	if d.factor.IsUint64() {
		d.small = d.factor.Uint64()
	}
	return d
}

// cost is how many steps divides takes.
func (d *divisor) cost(n number) int {
	words := (d.factor.BitLen() + 63) / 64
	digits, power := 1+len(n.digits)/chunk, max(0, n.scale-len(n.digits)-d.exponent)
	if d.small > 0 {
		return digits + bits.Len(uint(power))/2
	}
	return digits*(4+words) + bits.Len(uint(power))*(2+words*words/16)
}

// chunk is how many digits divides takes at a time.
const chunk = 18

// divides reports whether a number is a multiple. Its cost is linear in the digits of the number
// times those of the factor.
func (d *divisor) divides(n number) bool {
	if n.digits == "" {
		return true
	}
	// The number has digits that do not end with 0, so a smaller power of ten cannot divide it.
	power := n.scale - len(n.digits) - d.exponent
	if power < 0 {
		return false
	}
	if d.small > 0 {
		rest := uint64(0)
		for digits := n.digits; digits != ""; {
			size := min(len(digits), chunk)
			part, _ := strconv.ParseUint(digits[:size], 10, 64)
			rest = (timesMod(rest, tenTo[size], d.small) + part%d.small) % d.small
			digits = digits[size:]
		}
		for square := 10 % d.small; power > 0; power >>= 1 {
			if power&1 == 1 {
				rest = timesMod(rest, square, d.small)
			}
			square = timesMod(square, square, d.small)
		}
		return rest == 0
	}
	rest, part := new(big.Int), new(big.Int)
	for digits := n.digits; digits != ""; {
		size := min(len(digits), chunk)
		more, _ := strconv.ParseUint(digits[:size], 10, 64)
		rest.Mul(rest, part.SetUint64(tenTo[size]))
		rest.Mod(rest.Add(rest, part.SetUint64(more)), d.factor)
		digits = digits[size:]
	}
	part.Exp(big.NewInt(10), big.NewInt(int64(power)), d.factor)
	return rest.Mod(rest.Mul(rest, part), d.factor).Sign() == 0
}

// tenTo are the powers of ten up to that of a chunk.
var tenTo = func() (all [chunk + 1]uint64) {
	all[0] = 1
	for i := range chunk {
		all[i+1] = 10 * all[i]
	}
	return all
}()

// timesMod returns a times b, modulo m.
func timesMod(a, b, m uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return bits.Rem64(high, low, m)
}
