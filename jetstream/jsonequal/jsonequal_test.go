package jsonequal

import "testing"

func TestEqual(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		a, b string
		want bool
	}{
		{`{"a":1,"b":[1.0,"x"]}`, ` {"b":[1,"\u0078"],"a":10e-1} `, true},
		{`{"a":1}`, `{"a":1,"b":null}`, false},
		{`[1,2]`, `[2,1]`, false},
		{`0.0`, `-0e5`, true},
		{`1e999999999999`, `1e999999999999`, true},
		{`1e999999999999`, `1e999999999998`, false},
		{`120`, `1.2e2`, true},
		{`12`, `120`, false},
		{`"1"`, `1`, false},
		{`null`, `false`, false},
		{`x`, `x`, false},
		{`-5`, `5`, false},
	} {
		if got := Equal([]byte(test.a), []byte(test.b)); got != test.want {
			t.Errorf("%s and %s are equal: %v", test.a, test.b, got)
		}
	}
}
