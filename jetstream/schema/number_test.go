package schema

import (
	"math"
	"math/big"
	"math/rand/v2"
	"strconv"
	"testing"
)

// Numbers compare, divide and are whole as fractions are, whatever their spelling is.
func TestNumbers(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(7, 7))
	number := func() string {
		n := random.IntN(40)
		if random.IntN(3) == 0 {
			n = random.IntN(3)
		}
		text := strconv.Itoa(n)
		if random.IntN(2) == 0 {
			text = "-" + text
		}
		if random.IntN(2) == 0 {
			text += "." + strconv.Itoa(random.IntN(60)*random.IntN(2))
		}
		if random.IntN(8) == 0 {
			text += "0000000000000000000000000000000000001"[random.IntN(30):]
		}
		if random.IntN(3) == 0 {
			text += []string{"e0", "E1", "e-1", "e+2", "e-30", "e25"}[random.IntN(6)]
		}
		return text
	}
	for range 100_000 {
		a, b := number(), number()
		x, isX := new(big.Rat).SetString(a)
		y, isY := new(big.Rat).SetString(b)
		if !isX || !isY {
			t.Fatalf("%s, %s", a, b)
		}
		if got, want := parse(a).compare(parse(b)), x.Cmp(y); got != want || (parse(a) == parse(b)) != (want == 0) {
			t.Fatalf("%s and %s compare as %d, want %d", a, b, got, want)
		}
		if got, want := parse(a).whole(), x.IsInt(); got != want {
			t.Fatalf("%s is whole: %v", a, got)
		}
		if back := ofRat(x); back != parse(a) {
			t.Fatalf("%s became %v, want %v", a, back, parse(a))
		}
		if y.Sign() <= 0 {
			continue
		}
		if got, want := newDivisor(parse(b)).divides(parse(a)), new(big.Rat).Quo(x, y).IsInt(); got != want {
			t.Fatalf("%s is a multiple of %s: %v", a, b, got)
		}
	}
}

// A schema and a payload with many numbers are compared by value, in a few steps for each number of
// the payload.
func TestManyNumbersInAnEnum(t *testing.T) {
	t.Parallel()
	s := compile(t, `{"items":{"enum":[`+repeated(30_000, "#.5")+`]}}`)
	v := decode([]byte("["+repeated(400, "#50e-2")+"]"), nil)
	j := judge{left: maxSteps}
	if !j.takes(s.rule, v) || maxSteps-j.left > 400*20 {
		t.Errorf("%d steps were taken, and then %s: %s", maxSteps-j.left, j.pointer, j.keyword)
	}
	j = judge{left: math.MaxInt}
	if j.takes(s.rule, decode([]byte("[0.5,0.25]"), nil)) || string(j.pointer) != "/1" || j.keyword != "enum" {
		t.Errorf("%s: %s", j.pointer, j.keyword)
	}
}
