package schema

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The long form, with the directory of a draft of
// https://github.com/json-schema-org/JSON-Schema-Test-Suite:
//
//	go test ./jetstream/schema -run TestSuite -schema.suite DIRECTORY
var suite = flag.String("schema.suite", "", "a directory with cases of JSON-Schema-Test-Suite, which TestSuite tries, too")

// says fails unless all ways to judge a payload say the same: the program, the judge, both
// together, and those of a schema that has the payload many times as elements of an array.
func says(t *testing.T, name string, schema, payload json.RawMessage, valid bool) {
	t.Helper()
	s := compile(t, string(schema))
	if s.program != nil && s.program.accepts(payload, &matching{left: maxSteps}) && !valid {
		t.Errorf("%s: the program takes %s", name, payload)
	}
	if v := s.judge(payload, nil); (v == nil) != valid {
		t.Errorf("%s: a judge says of %s: %v", name, payload, v)
	}
	if v := s.Validate(payload); (v == nil) != valid {
		t.Errorf("%s: %s: %v", name, payload, v)
	}
	of := schema
	if object := (map[string]json.RawMessage{}); json.Unmarshal(schema, &object) == nil && object["$id"] == nil {
		object["$id"] = json.RawMessage(`"https://example.com/case"`) // its references stay within
		of, _ = json.Marshal(object)
	}
	s = compile(t, `{"properties":{"all":{"items":`+string(of)+`}}}`)
	const times = 1_000
	if v := s.Validate([]byte(`{"all":[` + strings.Repeat(string(payload)+",", times) + string(payload) + `]}`)); (v == nil) != valid {
		t.Errorf("%s: %d times %s: %v", name, times, payload, v)
	}
}

// Payloads are judged as JSON Schema says, by every way to judge them.
func TestSuite(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var own []struct {
		Name           string
		Schema         json.RawMessage
		Valid, Invalid []json.RawMessage
	}
	if err := json.Unmarshal(text, &own); err != nil {
		t.Fatal(err)
	}
	for _, c := range own {
		for _, payload := range c.Valid {
			says(t, c.Name, c.Schema, payload, true)
		}
		for _, payload := range c.Invalid {
			says(t, c.Name, c.Schema, payload, false)
		}
	}
	if *suite == "" {
		return
	}
	files, _ := filepath.Glob(filepath.Join(*suite, "*.json"))
	tried := 0
	for _, file := range files {
		tried += trySuite(t, file)
	}
	if tried < 1_000 {
		t.Errorf("%s has %d cases", *suite, tried)
	}
}

// trySuite tries a file of JSON-Schema-Test-Suite, and returns how many cases it has whose schema
// needs no other document.
func trySuite(t *testing.T, file string) (tried int) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var groups []struct {
		Description string
		Schema      json.RawMessage
		Tests       []struct {
			Description string
			Data        json.RawMessage
			Valid       bool
		}
	}
	if err := json.Unmarshal(text, &groups); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for _, g := range groups {
		if _, err := Compile(g.Schema); err != nil {
			if !strings.Contains(err.Error(), errRemote.Error()) && !strings.Contains(err.Error(), "/$schema: must be") {
				t.Errorf("%s: %s: %v", filepath.Base(file), g.Description, err)
			}
			continue
		}
		for _, c := range g.Tests {
			says(t, filepath.Base(file)+": "+g.Description+": "+c.Description, g.Schema, c.Data, c.Valid)
			tried++
		}
	}
	return tried
}
