package jsonpointer

import (
	"strings"
	"testing"
)

// rfc is the document of RFC 6901 section 5.
const rfc = `{"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "e^f": 3, "g|h": 4, "i\\j": 5, "k\"l": 6, " ": 7, "m~n": 8, "o": {"p": [[], {"q": null}]}}`

func TestFind(t *testing.T) {
	for pointer, want := range map[string]string{
		"": rfc, "/foo": `["bar", "baz"]`, "/foo/0": `"bar"`, "/": "0", "/a~1b": "1", "/c%d": "2", "/e^f": "3", "/g|h": "4",
		`/i\j`: "5", `/k"l`: "6", "/ ": "7", "/m~0n": "8", "/o/p/1/q": "null",
	} {
		p, err := Parse(pointer)
		if err != nil {
			t.Errorf("%q: %v", pointer, err)
		}
		if got, ok := p.Find([]byte(rfc)); !ok || string(got) != want {
			t.Errorf("%q leads to %s (%v), want %s", pointer, got, ok, want)
		}
	}
	for _, pointer := range []string{"/foo/2", "/foo/01", "/foo/-", "/foo/-1", "/foo/+1", "/foo/x", "/foo/", "/bar", "/foo/0/x", "//", "/o/q", "/foo/99999999999999999999"} {
		p, err := Parse(pointer)
		if err != nil {
			t.Errorf("%q: %v", pointer, err)
		}
		if got, ok := p.Find([]byte(rfc)); ok {
			t.Errorf("%q leads to %s", pointer, got)
		}
	}
	for _, text := range []string{"", "text", "{", `{"foo":`, "null", "7"} {
		if got, ok := (Pointer{"foo"}).Find([]byte(text)); ok {
			t.Errorf("in %q it finds %s", text, got)
		}
	}
	if _, ok := (Pointer{}).Find([]byte("text")); ok {
		t.Error("text counts as JSON")
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{"a": "must begin with /", "a/b": "must begin with /", "/a~": "~ must be followed by", "/~2": "~ must be followed by", "/~01~": "~ must be followed by"} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if p, err := Parse("/~01/~10"); err != nil || p[0] != "~1" || p[1] != "/0" {
		t.Errorf("got %q, %v", p, err)
	}
}
