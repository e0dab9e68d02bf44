package main

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestVisible(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, text, want string }{
		{"text", "Grüße, \"日本\u3000語\" \\u202e\tC:\\x 👍 e\u0301 \u00a0\ufffd\n", "Grüße, \"日本\u3000語\" \\u202e\tC:\\x 👍 e\u0301 \u00a0\ufffd\n"},
		{"control characters", "\x00\a\b\v\f\r\x1b[2J\x7f", `\u0000\u0007\u0008\u000b\u000c\u000d\u001b[2J\u007f`},
		{"control characters beyond ASCII", "\u0080\u009b31m\u009f", `\u0080\u009b31m\u009f`},
		{"their bytes alone", "\x80\x9b31m\x9f", `\x80\x9b31m\x9f`},
		{"directions", "\u061c\u200e\u200f\u202a\u202e\u2066\u2069", `\u061c\u200e\u200f\u202a\u202e\u2066\u2069`},
		{"separators of lines", "\u2028\u2029", `\u2028\u2029`},
		{"what has no width", "\u00ad\u200b\u200d\u2060\ufeff", `\u00ad\u200b\u200d\u2060\ufeff`},
		{"fillers and selectors", "\u034f\u115f\u3164\uffa0\ufe0f", `\u034f\u115f\u3164\uffa0\ufe0f`},
		{"tags", "\U000e0041\U000e0100", `\udb40\udc41\udb40\udd00`},
		{"what Unicode does not define", "\ue000\uffff\U0010ffff", `\ue000\uffff\udbff\udfff`},
		{"not UTF-8", "\xff\xc0\xaf\xed\xa0\x80 \xe2\x80", `\xff\xc0\xaf\xed\xa0\x80 \xe2\x80`},
	} {
		if got := string(visible([]byte(c.text))); got != c.want {
			t.Errorf("%s: %q is shown as %s, want %s", c.name, c.text, got, c.want)
		}
	}
}

func FuzzVisible(f *testing.F) {
	for _, text := range []string{"", "a\n\tb", `{"a":"\u2028` + "\u2028\u007f\u009b\U000e0041\"}", "\x1b[2J\r", "\xe2\x80", "\xe2\x80\u202e\xf0\x9f\x91", "\xed\xa0\x80\x9b"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		text = text[:min(len(text), 100)] // each place to cut it is tried
		shown := visible(text)
		if !utf8.Valid(shown) {
			t.Fatalf("%q is shown as %q, which is not UTF-8", text, shown)
		}
		for _, r := range string(shown) {
			if r != '\n' && r != '\t' && (!unicode.IsGraphic(r) || unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)) {
				t.Fatalf("%q is shown with %U", text, r)
			}
		}
		if again := visible(shown); !bytes.Equal(again, shown) {
			t.Fatalf("%q is safe, and is shown as %q", shown, again)
		}
		for at := range len(text) + 1 {
			if got := written(t, text[:at], text[at:]); !bytes.Equal(got, shown) {
				t.Fatalf("%q and %q are shown as %q, want %q", text[:at], text[at:], got, shown)
			}
		}
		if got := written(t, bytes.SplitAfter(text, nil)...); !bytes.Equal(got, shown) {
			t.Fatalf("%q, character by character, is shown as %q, want %q", text, got, shown)
		}
		// Between the tokens of JSON, the carriage return is the only character that is escaped.
		if want, ok := decoded(text); ok && utf8.Valid(text) && !bytes.ContainsRune(text, '\r') {
			if got, _ := decoded(shown); !reflect.DeepEqual(got, want) {
				t.Fatalf("the JSON %s is shown as %s", text, shown)
			}
		}
	})
}

// written returns what a terminal shows of several writes.
func written(t *testing.T, parts ...[]byte) []byte {
	t.Helper()
	var screen bytes.Buffer
	out := &terminal{screen: &screen}
	for _, part := range parts {
		if n, err := out.Write(part); n != len(part) || err != nil {
			t.Fatalf("wrote %d of %d bytes: %v", n, len(part), err)
		}
		if len(out.tail) >= utf8.UTFMax {
			t.Fatalf("%d bytes are held back", len(out.tail))
		}
	}
	flush(out)
	return screen.Bytes()
}

func decoded(text []byte) (value any, ok bool) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return value, json.Valid(text) && d.Decode(&value) == nil
}
