package jsonscan_test

import (
	"encoding/json"
	"strings"
	"testing"

	"eventhub/jetstream/jsonscan"
)

func TestAppendString(t *testing.T) {
	for in, want := range map[string]string{
		"":                         `""`,
		"plain":                    `"plain"`,
		"12345678":                 `"12345678"`,
		"a\"b\\c/d":                `"a\"b\\c/d"`,
		"\n\r\t\b\x00\x1f":         `"\n\r\t\u0008\u0000\u001f"`,
		"<é漢😀>&\u2028\x7f":         "\"<é漢😀>&\u2028\x7f\"",
		"a\xffb\xc3":               "\"a\uFFFDb\uFFFD\"",
		"\xed\xa0\x80":             "\"\uFFFD\uFFFD\uFFFD\"",
		"eight by\"tes and more\n": `"eight by\"tes and more\n"`,
	} {
		if got := string(jsonscan.AppendString([]byte("x"), in)); got != "x"+want {
			t.Errorf("AppendString(%q) = %s, want %s", in, got[1:], want)
		}
	}
}

func TestUnquote(t *testing.T) {
	for raw, want := range map[string]string{
		`""`:                    "",
		`"plain é"`:             "plain é",
		`"\"\\\/\b\f\n\r\t"`:    "\"\\/\b\f\n\r\t",
		`"a\u0041\u00e9\u6F22"`: "aAé漢",
		`"\ud83d\uDE00!"`:       "😀!",
		`"\ud83d"`:              "\uFFFD",
		`"\ude00\ud83d"`:        "\uFFFD\uFFFD",
		`"\ud83d\u0041"`:        "\uFFFDA",
		`"\ud83d\ud83d\ude00"`:  "\uFFFD😀",
		`"\ud83d\n"`:            "\uFFFD\n",
	} {
		buf := []byte("before")
		got, grown := jsonscan.Unquote([]byte(raw), buf)
		if string(got) != want {
			t.Errorf("Unquote(%s) = %q, want %q", raw, got, want)
		}
		copied := strings.Contains(raw, `\`)
		if !strings.HasPrefix(string(grown), "before") || copied != (string(grown) == "before"+want && len(grown) > len(buf)) {
			t.Errorf("Unquote(%s) leaves the buffer %q", raw, grown)
		}
	}
}

func FuzzString(f *testing.F) {
	for _, s := range []string{"", "a", "\xff", "a\"b", `"\ud800"`, `"\ud83d\ude00"`, `"\u0000"`, "12345678\n", "é漢😀"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		// What AppendString writes, encoding/json reads back, and so does Unquote.
		token := jsonscan.AppendString(nil, s)
		var back string
		if err := json.Unmarshal(token, &back); err != nil || !jsonscan.Valid(token) {
			t.Fatalf("AppendString(%q) = %s: %v", s, token, err)
		}
		if want := string([]rune(s)); back != want {
			t.Fatalf("AppendString(%q) means %q, want %q", s, back, want)
		}
		if got, _ := jsonscan.Unquote(token, nil); string(got) != back {
			t.Fatalf("Unquote(%s) = %q, want %q", token, got, back)
		}

		// A token given from outside means to Unquote what it means to encoding/json.
		if len(s) > 0 && s[0] == '"' && jsonscan.Valid([]byte(s)) {
			raw := strings.TrimRight(s, " \t\r\n")
			if err := json.Unmarshal([]byte(raw), &back); err != nil {
				t.Fatal(err)
			}
			if got, _ := jsonscan.Unquote([]byte(raw), nil); string(got) != back {
				t.Fatalf("Unquote(%s) = %q, want %q", raw, got, back)
			}
		}
	})
}

func BenchmarkAppendString(b *testing.B) {
	dst := make([]byte, 0, 1024)
	for _, s := range []string{"019343c2-7f4e-7c1a-9d0b-5f2f6f1e8a11", object} {
		b.Run("", func(b *testing.B) {
			b.SetBytes(int64(len(s)))
			for b.Loop() {
				dst = jsonscan.AppendString(dst[:0], s)
			}
		})
	}
}
