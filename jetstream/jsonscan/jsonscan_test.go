package jsonscan_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"eventhub/jetstream/jsonscan"
)

// object is a 256-byte JSON object of the kind that heartbeats are.
const object = `{"host":"web-17.eu-central.example","pid":48121,"name":"eventhub","cpu":12.75,"rss":184549376,` +
	`"started":1731936000123,"state":"running","tags":["prod","blue"],"parent":null,"alive":true,` +
	`"limits":{"open_files":65536,"threads":512},"note":"steady, nothing t"}`

var valid = []string{
	`0`, `-0`, `-1.5e+10`, `1E3`, `1e-3`, `123456789012345678901234567890`, `true`, `false`, `null`, `""`, `"a"`,
	`"a longer string, well over eight bytes"`, `"\"\\\/\b\f\n\r\t\u00e9\uD83D\uDE00"`, `"\ud800"`, `"\ud800\u0041"`,
	`"é 漢字 😀 and more"`, `"12345678é"`, "\"\x7f\"", `[]`, `{}`, `[ ]`, `{ }`, `[1,2, 3 ]`, `{"a":1}`, `{"a":{"b":[{}]}}`,
	" \t\r\n[1 , {\"a\" : 2 , \"b\":[ ] } ] \n", `{"":0}`, `[[],{},[{}],{"a":[]}]`, object,
	strings.Repeat("[", 64) + strings.Repeat("]", 64),
	strings.Repeat(`{"a":`, 65) + "1" + strings.Repeat("}", 65),
	strings.Repeat(`[{"a":`, 200) + "[1]" + strings.Repeat("},2]", 200),
	strings.Repeat("[", jsonscan.MaxDepth) + strings.Repeat("]", jsonscan.MaxDepth),
}

var invalid = []string{
	``, ` `, `x`, `tru`, `trux`, `nul`, `falsy`, `+1`, `-`, `-x`, `01`, `1.`, `.5`, `1e`, `1e+`, `1.e3`, `0x10`, `NaN`, `"`, `"a`, `"\`,
	`"\x"`, `"\u12"`, `"\u12g4"`, "\"\n\"", "\"1234567\x00\"", `[`, `]`, `[1`, `[1,`, `[1,]`, `[,1]`, `[1 2]`, `[1}`, `{`, `}`, `{"a"`, `{"a":`,
	`{"a":1`, `{"a":1,`, `{"a":1,}`, `{"a" 1}`, `{a:1}`, `{1:1}`, `{"a":1]`, `{,}`, `{"a"::1}`, `[]]`, `{}{}`, `1 2`, `'a'`, "\u00a01", "\ufeff1", "\v1",
	strings.Repeat("[", jsonscan.MaxDepth+1) + strings.Repeat("]", jsonscan.MaxDepth+1),
	strings.Repeat("[", 65) + strings.Repeat("]", 64) + "}",
}

// Texts that encoding/json takes and a text message cannot carry.
var badUTF8 = []string{
	"\"\xff\"", "\"abc\xc3\"", "\"\xed\xa0\x80\"", "\"\xc0\xaf\"", "\"\xf4\x90\x80\x80\"", "\"12345678\xe6\xbc\"", "{\"\x80\":1}",
}

func TestValid(t *testing.T) {
	for _, s := range valid {
		if !jsonscan.Valid([]byte(s)) || !json.Valid([]byte(s)) {
			t.Errorf("Valid(%.60q) = false", s)
		}
	}
	for _, s := range invalid {
		if jsonscan.Valid([]byte(s)) || json.Valid([]byte(s)) {
			t.Errorf("Valid(%.60q) = true", s)
		}
	}
	for _, s := range badUTF8 {
		if jsonscan.Valid([]byte(s)) || !json.Valid([]byte(s)) {
			t.Errorf("Valid(%.60q) = true", s)
		}
	}
}

// Every prefix and every change of one byte of a text is judged as encoding/json judges it: this
// walks all the word boundaries of the string scanner.
func TestValidNearMisses(t *testing.T) {
	for _, s := range valid {
		if len(s) > 300 {
			continue
		}
		for n := range len(s) {
			same(t, []byte(s[:n]))
			for _, c := range []byte("\x00\x1f \"\\{}[],:0-.eu\x7f\x80\xc3\xff") {
				b := []byte(s)
				b[n] = c
				same(t, b)
			}
		}
	}
}

func same(t *testing.T, b []byte) {
	t.Helper()
	if got, want := jsonscan.Valid(b), json.Valid(b) && utf8.Valid(b); got != want {
		t.Errorf("Valid(%q) = %v, want %v", b, got, want)
	}
}

func TestValidWithin(t *testing.T) {
	b := []byte("[[1]]")
	if !jsonscan.ValidWithin(b, jsonscan.MaxDepth-2) || jsonscan.ValidWithin(b, jsonscan.MaxDepth-1) {
		t.Error("ValidWithin does not count the levels around the value")
	}
}

func TestValueOffsets(t *testing.T) {
	for _, c := range []struct {
		in         string
		start, end int // end < 0: complement of the fault's offset
	}{
		{`1,2`, 0, 1},
		{`[1,2]x`, 0, 5},
		{`xx"a\"b"yy`, 2, 8},
		{`01`, 0, 1},
		{`truetrue`, 0, 4},
		{`{} `, 0, 2},
		{`[1,x]`, 0, ^3},
		{`"abc`, 0, ^4},
		{`"ab` + "\n" + `"`, 0, ^3},
		{`trve`, 0, ^2},
		{`"\u00g0"`, 0, ^5},
		{`1.x`, 0, ^2},
		{``, 0, ^0},
		{`[`, 0, ^1},
		{`{"a"}`, 0, ^4},
		{"\"aé\xff\"", 0, ^4},
	} {
		end, err := jsonscan.Value([]byte(c.in), c.start)
		if c.end >= 0 {
			if err != nil || end != c.end {
				t.Errorf("Value(%q, %d) = %d, %v, want %d", c.in, c.start, end, err, c.end)
			}
			continue
		}
		if syntax, ok := errors.AsType[*jsonscan.SyntaxError](err); !ok || syntax.Offset != ^c.end {
			t.Errorf("Value(%q, %d) = %d, %v, want a fault at %d", c.in, c.start, end, err, ^c.end)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	b := []byte(object)
	dst := make([]byte, 0, 1024)
	for name, f := range map[string]func(){
		"Valid":        func() { jsonscan.Valid(b) },
		"AppendString": func() { dst = jsonscan.AppendString(dst[:0], object) },
		"Unquote":      func() { _, dst = jsonscan.Unquote([]byte(`"a\nb"`), dst[:0]) },
		"Walk": func() {
			w := jsonscan.Walk(b, 0)
			for w.Next() {
			}
		},
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func FuzzValid(f *testing.F) {
	for _, list := range [][]string{valid, invalid, badUTF8} {
		for _, s := range list {
			if len(s) < 4096 {
				f.Add([]byte(s))
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		want := json.Valid(b) && utf8.Valid(b)
		if got := jsonscan.Valid(b); got != want {
			t.Fatalf("Valid(%q) = %v, want %v", b, got, want)
		}

		// Value ends where a Decoder says that the first value ends.
		start := len(b) - len(bytes.TrimLeft(b, " \t\r\n"))
		end, err := jsonscan.Value(b, start)
		if err == nil {
			d := json.NewDecoder(bytes.NewReader(b))
			var raw json.RawMessage
			if derr := d.Decode(&raw); derr != nil || int(d.InputOffset()) != end {
				t.Fatalf("Value(%q) = %d, the decoder says %d, %v", b, end, d.InputOffset(), derr)
			}
		} else if want {
			t.Fatalf("Value(%q): %v", b, err)
		}

		// A Walker takes exactly the objects and arrays.
		w := jsonscan.Walk(b, 0)
		for w.Next() {
			if !jsonscan.Valid(w.Value) || w.Key != nil && !jsonscan.Valid(w.Key) {
				t.Fatalf("Walk(%q) gives %q: %q", b, w.Key, w.Value)
			}
		}
		container := start < len(b) && (b[start] == '{' || b[start] == '[')
		if got := w.Err() == nil; got != (want && container) {
			t.Fatalf("Walk(%q): %v", b, w.Err())
		}
	})
}

func BenchmarkValid(b *testing.B) {
	long := `"` + strings.Repeat("plain text ", 400) + `"`
	japanese := `"` + strings.Repeat("漢字かな", 400) + `"`
	for _, c := range []struct{ name, text string }{
		{"object256", object}, {"text4400", long}, {"kanji4800", japanese}, {"id", `"019343c2-7f4e-7c1a-9d0b-5f2f6f1e8a11"`},
	} {
		in := []byte(c.text)
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if !jsonscan.Valid(in) {
					b.Fatal("refused")
				}
			}
		})
		b.Run(c.name+"/encoding_json", func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				if !json.Valid(in) {
					b.Fatal("refused")
				}
			}
		})
	}
}
