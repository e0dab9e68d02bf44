package schema

import (
	"fmt"
	"strings"
	"testing"
)

// TestBrief compares payloads briefly. Where that is enough, the outcome is that of Validate, and
// where it is not, few steps were done.
func TestBrief(t *testing.T) {
	slow := "[" + strings.Repeat(`{"a":1},`, 2000) + `{"b":1}]`
	var branches []string
	for i := range 61 {
		branches = append(branches, fmt.Sprintf(`{"items":{"properties":{"b":{"const":%d}}}}`, i+2))
	}
	for _, tt := range []struct {
		schema, doc string
		done        bool
	}{
		{`{"type":"object","required":["a"]}`, `{"a":1}`, true},
		{`{"type":"object","required":["a"]}`, `{"b":1}`, true},
		{`{"type":"object"}`, `{`, true},
		{`{"anyOf":[{"type":"string"},{"minItems":1}]}`, `[1]`, true},
		{`{"anyOf":[{"type":"string"},{"minItems":1}]}`, `[]`, true},
		{`{"anyOf":[` + strings.Join(branches, ",") + `]}`, slow, false},
		{`{"anyOf":[` + strings.Join(branches, ",") + `]}`, `[1]`, true},
		{`{"pattern":"^(a|b|c|d){1,200}$"}`, `"` + strings.Repeat("a", 20_000) + `"`, false},
		{`{"pattern":"^(a|b|c|d){1,200}$"}`, `"` + strings.Repeat("a", 100) + `"`, true},
		{`{"items":{"pattern":"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}}`, "[" + strings.Repeat(`"web-17.example.com",`, 9) + `"a"]`, true},
		{`{"items":{"pattern":"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}}`, "[" + strings.Repeat(`"web-17.example.com",`, 1500) + `"a"]`, false},
		{`true`, `"` + strings.Repeat("a", bytesBrief*BriefSteps) + `"`, false},
	} {
		s, err := Compile([]byte(tt.schema))
		if err != nil {
			t.Fatal(err)
		}
		broken, steps, done := s.Brief([]byte(tt.doc), BriefSteps)
		if done != tt.done || steps > 2*BriefSteps {
			t.Errorf("%.60s, %.30s: done is %v after %d steps", tt.schema, tt.doc, done, steps)
		}
		if want := s.Validate([]byte(tt.doc)); done && fmt.Sprint(broken) != fmt.Sprint(want) {
			t.Errorf("%.60s, %.30s: %v, want %v", tt.schema, tt.doc, broken, want)
		}
	}
}
