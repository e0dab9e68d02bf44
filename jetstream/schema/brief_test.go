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

// TestBriefCountsParts has a program hand parts of a payload to a judge, whose steps count.
func TestBriefCountsParts(t *testing.T) {
	var all []string
	for i := range 60 {
		all = append(all, fmt.Sprintf(`{"not":{"const":%d}}`, i+2))
	}
	list := "[" + strings.Join(all, ",") + "]"
	s, err := Compile([]byte(`{"properties":{"a":{"items":{"allOf":` + list + `},"allOf":[{"items":{"allOf":` + list + `}}]}}}`))
	if err != nil {
		t.Fatal(err)
	}
	const n = 100
	_, steps, _ := s.Brief([]byte(`{"a":[`+strings.Repeat("1,", n-1)+`1],"b":"`+strings.Repeat("x", 10_000)+`"}`), BriefSteps)
	if least := n * 60; steps < least {
		t.Errorf("%d steps, and there are %d comparisons", steps, least)
	}
}
