package jsonpointer_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"eventhub/jetstream/jsonpointer"
)

const stars = `"***"`

func pointers(tb testing.TB, texts ...string) (all []jsonpointer.Pointer) {
	tb.Helper()
	for _, text := range texts {
		p, err := jsonpointer.Parse(text)
		if err != nil {
			tb.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

func TestHide(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		text, want string
		at         []string
	}{
		{`{"a":1, "b": [ 2 ]}`, `{"a":"***", "b": [ 2 ]}`, []string{"/a"}},
		{`{"a":1,"b":[2, 3 ]}`, `{"a":1,"b":[2, "***" ]}`, []string{"/b/1"}},
		{`{"a":1,"a":2,"\u0061":{"x":3}}`, `{"a":"***","a":"***","\u0061":"***"}`, []string{"/a"}},
		{`{"a":{"x":1,"y":2},"c":{}}`, `{"a":{"x":"***","y":"***"},"c":{}}`, []string{"/a/x", "/a/y", "/c/x"}},
		{`{"a":{"x":1},"z":[]}`, `{"a":"***","z":[]}`, []string{"/a/x", "/a", "/z/0"}},
		{` { "a/b" : "~" , "m~n" : null } `, ` { "a/b" : "***" , "m~n" : "***" } `, []string{"/a~1b", "/m~0n"}},
		{`[{"a":1},{"a":2}]`, `[{"a":1},{"a":"***"}]`, []string{"/1/a", "/01/a", "/-/a"}},
		{`{"0":1}`, `{"0":"***"}`, []string{"/0"}},
		{`{"":{"":1}}`, `{"":{"":"***"}}`, []string{"//"}},
		{`17`, `17`, []string{"/a"}},
		{`{"a":1}`, `"***"`, []string{""}},
		{`{"a":1`, `"***"`, []string{"/b"}},
		{`{"a":1`, `{"a":1`, nil},
		{`{}`, `{}`, []string{"/a"}},
	} {
		if got := jsonpointer.Hide([]byte(test.text), pointers(t, test.at...), stars); string(got) != test.want {
			t.Errorf("%s without %q became\n%s, want\n%s", test.text, test.at, got, test.want)
		}
	}
}

// What is hidden is not found, and the rest is as it was.
func FuzzHide(f *testing.F) {
	f.Add(`{"a":{"b":[1,{"c":2}]},"a":3}`, "/a/b/1/c", "/a")
	f.Add(`[[1,2],[3]]`, "/0/1", "/1")
	f.Fuzz(func(t *testing.T, text, first, second string) {
		p, err := jsonpointer.Parse(first)
		q, errQ := jsonpointer.Parse(second)
		if err != nil || errQ != nil {
			return
		}
		got := jsonpointer.Hide([]byte(text), []jsonpointer.Pointer{p, q}, stars)
		if !json.Valid(got) {
			t.Fatalf("%q became %q", text, got)
		}
		for _, hidden := range []jsonpointer.Pointer{p, q} {
			if value, ok := hidden.Find(got); ok && string(bytes.TrimSpace(value)) != stars {
				t.Errorf("%q became %q, which has %s at %q", text, got, value, hidden)
			}
		}
		if again := jsonpointer.Hide(got, []jsonpointer.Pointer{p, q}, stars); !bytes.Equal(again, got) {
			t.Errorf("%q became %q, and then %q", text, got, again)
		}
	})
}
