package wire

import (
	"bytes"
	"encoding/json"
	"testing"
)

func FuzzEachField(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"a":1}`, ` { "a" : "b\"}" , "c" : [1,{"d":"]"}] } `, `{"a":-1e400,"b":null,"":{}}`,
		`{"a":1,"a":2}`, `{"a"`, `{"a":}`, `[1]`, `{"a":1}}`, `"`, `{"\u0061":"\\"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got := map[string]string{}
		err := eachField(b, func(name, value []byte) error {
			quoted := append(append([]byte{'"'}, name...), '"')
			var s string
			if json.Unmarshal(quoted, &s) == nil {
				got[s] = string(value)
			}
			return nil
		})
		var want map[string]json.RawMessage
		if json.Unmarshal(b, &want) != nil || bytes.Equal(bytes.TrimSpace(b), []byte("null")) {
			return // whatever is not JSON must only not panic
		}
		if err != nil {
			t.Fatalf("%q: %v", b, err)
		}
		if len(got) != len(want) {
			t.Fatalf("%q: fields %v, want %v", b, got, want)
		}
		for name, value := range want {
			if got[name] != string(value) {
				t.Errorf("%q: field %q is %s, want %s", b, name, got[name], value)
			}
		}
	})
}

func TestAppendString(t *testing.T) {
	for _, s := range []string{"", "plain", `quo"te`, `back\slash`, "line\nfeed", "žluť", "\x7f", "bad\xff"} {
		var got string
		if err := json.Unmarshal(appendString(nil, s), &got); err != nil {
			t.Errorf("%q: %v", s, err)
		}
		if want := string(bytes.ToValidUTF8([]byte(s), []byte("\uFFFD"))); got != want {
			t.Errorf("%q came back as %q", s, got)
		}
	}
}
