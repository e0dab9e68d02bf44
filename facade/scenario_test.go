package facade_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// scenario is one file of testdata/frames; the README there describes the format.
type scenario struct {
	Name   string         `json:"name"`
	Doc    string         `json:"doc"`
	Config scenarioConfig `json:"config"`
	Steps  []step         `json:"steps"`
}

type scenarioConfig struct {
	AuthTimeoutMS int `json:"auth_timeout_ms"`
	// Topics says, for those that run a hub of their own, which rules its topics have.
	Topics string `json:"topics"`
}

type step struct {
	Conn        string            `json:"conn"`
	Send        json.RawMessage   `json:"send"`
	SendAll     []json.RawMessage `json:"send_all"`
	SendBinary  *string           `json:"send_binary"`
	Expect      json.RawMessage   `json:"expect"`
	ExpectAll   []json.RawMessage `json:"expect_all"`
	ExpectClose *closeCode        `json:"expect_close"`
	Disconnect  bool              `json:"disconnect"`
}

type closeCode struct {
	Code   int    `json:"code"`
	Reason string `json:"reason"`
}

// parseScenario reads a file's text, and fails on whatever the format does not have.
func parseScenario(name string, b []byte) (*scenario, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var s scenario
	if err := dec.Decode(&s); err != nil {
		return nil, err
	}
	if dec.More() {
		return nil, errors.New("more than one value")
	}
	switch {
	case s.Name != name:
		return nil, fmt.Errorf("name is %q, the file's is %q", s.Name, name)
	case s.Doc == "":
		return nil, errors.New("doc is missing")
	case len(s.Steps) == 0:
		return nil, errors.New("there are no steps")
	}
	for i := range s.Steps {
		if err := s.Steps[i].check(); err != nil {
			return nil, fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return &s, nil
}

func (s *step) check() error {
	if s.Conn == "" {
		s.Conn = "main"
	}
	actions := 0
	for _, has := range []bool{
		s.Send != nil, s.SendAll != nil, s.SendBinary != nil, s.Expect != nil, s.ExpectAll != nil, s.ExpectClose != nil, s.Disconnect,
	} {
		if has {
			actions++
		}
	}
	if actions != 1 {
		return fmt.Errorf("has %d actions, not one", actions)
	}
	for _, frame := range append(slices.Clone(s.SendAll), s.Send) {
		if frame != nil && frame[0] != '{' && frame[0] != '"' {
			return fmt.Errorf("sends %s, which is neither an object nor a string", frame)
		}
	}
	for _, frame := range append(slices.Clone(s.ExpectAll), s.Expect) {
		if frame == nil {
			continue
		}
		if frame[0] != '{' {
			return fmt.Errorf("expects %s, which is no object", frame)
		}
		if err := checkPlaceholders(frame); err != nil {
			return err
		}
	}
	return nil
}

// checkPlaceholders finds those that do not exist, or are not made as they should be.
func checkPlaceholders(raw json.RawMessage) error {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return err
	}
	var walk func(any) error
	walk = func(v any) error {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				if err := walk(e); err != nil {
					return err
				}
			}
		case map[string]any:
			for name, e := range v {
				if strings.HasPrefix(name, "$") {
					if len(v) != 1 || placeholders[name] == nil {
						return fmt.Errorf("%v is no placeholder", v)
					}
					return placeholders[name](newNames(), "", mustJSON(e), json.RawMessage("null"), true)
				}
				if err := walk(e); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return walk(v)
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // v came out of JSON
	}
	return b
}

// names are the values that placeholders have bound.
type names struct {
	values map[string]string
}

func newNames() *names { return &names{values: map[string]string{}} }

func (n *names) clone() *names { return &names{values: maps.Clone(n.values)} }

var (
	refPattern    = regexp.MustCompile(`\{\s*"\$ref"\s*:\s*"(\w+)"\s*\}`)
	repeatPattern = regexp.MustCompile(`\{\s*"\$repeat"\s*:\s*\[\s*"([^"\\]+)"\s*,\s*(\d+)\s*\]\s*\}`)
	uuidV7        = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
)

// text is the message that a frame of send stands for.
func (n *names) text(frame json.RawMessage) (string, error) {
	out := string(frame)
	if frame[0] == '"' {
		if err := json.Unmarshal(frame, &out); err != nil {
			return "", err
		}
	}
	var missing error
	out = refPattern.ReplaceAllStringFunc(out, func(m string) string {
		name := refPattern.FindStringSubmatch(m)[1]
		value, ok := n.values[name]
		if !ok {
			missing = fmt.Errorf("nothing was bound to %q", name)
		}
		return string(mustJSON(value))
	})
	out = repeatPattern.ReplaceAllStringFunc(out, func(m string) string {
		parts := repeatPattern.FindStringSubmatch(m)
		times, err := strconv.Atoi(parts[2])
		missing = errors.Join(missing, err)
		return `"` + strings.Repeat(parts[1], times) + `"`
	})
	return out, missing
}

// placeholder compares got with what the placeholder's argument says. With checkOnly, only the
// argument is looked at.
type placeholder func(n *names, path string, arg, got json.RawMessage, checkOnly bool) error

var placeholders map[string]placeholder

func init() {
	placeholders = map[string]placeholder{
		"$uuidv7": func(n *names, path string, arg, got json.RawMessage, checkOnly bool) error {
			return bind(n, path, arg, got, checkOnly, uuidV7)
		},
		"$bind": func(n *names, path string, arg, got json.RawMessage, checkOnly bool) error {
			return bind(n, path, arg, got, checkOnly, regexp.MustCompile(""))
		},
		"$ref":      matchRef,
		"$int":      matchInt,
		"$now":      matchNow,
		"$any":      matchAny,
		"$contains": matchContains,
		"$raw":      matchRaw,
		"$repeat":   matchRepeat,
	}
}

func bind(n *names, path string, arg, got json.RawMessage, checkOnly bool, form *regexp.Regexp) error {
	var name, value string
	if err := json.Unmarshal(arg, &name); err != nil || checkOnly {
		return err
	}
	if err := json.Unmarshal(got, &value); err != nil || got[0] != '"' || !form.MatchString(value) {
		return fmt.Errorf("%s is %s, which has not the form of %s", path, brief(got), form)
	}
	n.values[name] = value
	return nil
}

func matchRef(n *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	var name, value string
	if err := json.Unmarshal(arg, &name); err != nil || checkOnly {
		return err
	}
	want, ok := n.values[name]
	if !ok {
		return fmt.Errorf("%s: nothing was bound to %q", path, name)
	}
	if err := json.Unmarshal(got, &value); err != nil || value != want {
		return fmt.Errorf("%s is %s, not %q", path, brief(got), want)
	}
	return nil
}

func integerOf(path string, got json.RawMessage) (int64, error) {
	n, err := strconv.ParseInt(string(got), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s is %s, which is no integer", path, brief(got))
	}
	return n, nil
}

func matchInt(_ *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	var bounds [2]int64
	if err := json.Unmarshal(arg, &bounds); err != nil || checkOnly {
		return err
	}
	n, err := integerOf(path, got)
	if err == nil && (n < bounds[0] || n > bounds[1]) {
		return fmt.Errorf("%s is %d, not within %v", path, n, bounds)
	}
	return err
}

func matchNow(_ *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	var within int64
	if err := json.Unmarshal(arg, &within); err != nil || checkOnly {
		return err
	}
	n, err := integerOf(path, got)
	if now := time.Now().UnixMilli(); err == nil && (n < now-within || n > now+within) {
		return fmt.Errorf("%s is %d, which is more than %d ms from %d", path, n, within, now)
	}
	return err
}

func matchAny(_ *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	var want string
	if err := json.Unmarshal(arg, &want); err != nil {
		return err
	}
	if !slices.Contains([]string{"string", "number", "boolean", "null", "object", "array"}, want) {
		return fmt.Errorf("%s is no type", want)
	}
	if is := typeOf(got); !checkOnly && is != want {
		return fmt.Errorf("%s is a value of type %s, not %s", path, is, want)
	}
	return nil
}

func matchContains(_ *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	var part, value string
	if err := json.Unmarshal(arg, &part); err != nil || checkOnly {
		return err
	}
	if err := json.Unmarshal(got, &value); err != nil || !strings.Contains(strings.ToLower(value), strings.ToLower(part)) {
		return fmt.Errorf("%s is %s, without %q in it", path, brief(got), part)
	}
	return nil
}

func matchRaw(_ *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	var want string
	if err := json.Unmarshal(arg, &want); err != nil || checkOnly {
		return err
	}
	if string(got) != want {
		return fmt.Errorf("%s is %s, not byte for byte %s", path, brief(got), want)
	}
	return nil
}

func matchRepeat(n *names, path string, arg, got json.RawMessage, checkOnly bool) error {
	text, err := n.text(json.RawMessage(`{"$repeat":` + string(arg) + `}`))
	if err != nil {
		return err
	}
	if text[0] != '"' {
		return fmt.Errorf("$repeat of %s", arg)
	}
	if checkOnly {
		return nil
	}
	return equal(n, path, json.RawMessage(text), got)
}

// typeOf names the JSON type of a valid value.
func typeOf(raw json.RawMessage) string {
	switch raw[0] {
	case '"':
		return "string"
	case '{':
		return "object"
	case '[':
		return "array"
	case 't', 'f':
		return "boolean"
	case 'n':
		return "null"
	}
	return "number"
}

// equal says where got differs from want, which may have placeholders.
func equal(n *names, path string, want, got json.RawMessage) error {
	want, got = bytes.TrimSpace(want), bytes.TrimSpace(got)
	if typeOf(want) == "object" {
		fields, err := fieldsOf(want)
		if err != nil {
			return err
		}
		for name, arg := range fields {
			if match := placeholders[name]; match != nil {
				return match(n, path, arg, got, false)
			}
		}
		return equalObjects(n, path, fields, got)
	}
	if a, b := typeOf(want), typeOf(got); a != b {
		return fmt.Errorf("%s is %s, not %s", path, brief(got), brief(want))
	}
	switch typeOf(want) {
	case "array":
		return equalArrays(n, path, want, got)
	case "string":
		var a, b string
		if err := errors.Join(json.Unmarshal(want, &a), json.Unmarshal(got, &b)); err != nil {
			return err
		}
		if a != b {
			return fmt.Errorf("%s is %s, not %s", path, brief(got), brief(want))
		}
	default:
		if !bytes.Equal(want, got) {
			return fmt.Errorf("%s is %s, not %s", path, brief(got), brief(want))
		}
	}
	return nil
}

func equalObjects(n *names, path string, want map[string]json.RawMessage, raw json.RawMessage) error {
	if typeOf(raw) != "object" {
		return fmt.Errorf("%s is %s, not an object", path, brief(raw))
	}
	got, err := fieldsOf(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		value, ok := got[name]
		if !ok {
			return fmt.Errorf("%s.%s is missing", path, name)
		}
		if err := equal(n, path+"."+name, want[name], value); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[name]; !ok {
			return fmt.Errorf("%s.%s should not be there: %s", path, name, brief(got[name]))
		}
	}
	return nil
}

func equalArrays(n *names, path string, want, got json.RawMessage) error {
	var a, b []json.RawMessage
	if err := errors.Join(json.Unmarshal(want, &a), json.Unmarshal(got, &b)); err != nil {
		return err
	}
	if len(a) != len(b) {
		return fmt.Errorf("%s has %d elements, not %d", path, len(b), len(a))
	}
	for i := range a {
		if err := equal(n, fmt.Sprintf("%s[%d]", path, i), a[i], b[i]); err != nil {
			return err
		}
	}
	return nil
}

// fieldsOf takes an object apart, and fails when a field occurs twice.
func fieldsOf(raw json.RawMessage) (map[string]json.RawMessage, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if _, err := dec.Token(); err != nil {
		return nil, err
	}
	fields := map[string]json.RawMessage{}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return nil, err
		}
		name := fmt.Sprint(token)
		if _, twice := fields[name]; twice {
			return nil, fmt.Errorf("field %q occurs twice in %s", name, brief(raw))
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, err
		}
		fields[name] = value
	}
	return fields, nil
}

func brief(raw []byte) string {
	if len(raw) > 300 {
		return string(raw[:300]) + "…"
	}
	return string(raw)
}

// loadScenarios reads every file of testdata/frames, with token and a fresh topic filled in.
func loadScenarios(t *testing.T, token string) []*scenario {
	t.Helper()
	files, err := filepath.Glob("../testdata/frames/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	var all []*scenario
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		text := strings.NewReplacer("${token}", token, "${topic}", freshTopic()).Replace(string(b))
		s, err := parseScenario(name, []byte(text))
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		all = append(all, s)
	}
	return all
}

func TestScenarioFormat(t *testing.T) {
	for why, text := range map[string]string{
		"no JSON":             `{`,
		"two values":          `{"name":"x","doc":"d","steps":[{"send":{}}]} {}`,
		"another name":        `{"name":"y","doc":"d","steps":[{"send":{}}]}`,
		"no doc":              `{"name":"x","steps":[{"send":{}}]}`,
		"no steps":            `{"name":"x","doc":"d","steps":[]}`,
		"an unknown field":    `{"name":"x","doc":"d","steps":[{"send":{},"expects":{}}]}`,
		"an unknown config":   `{"name":"x","doc":"d","config":{"y":1},"steps":[{"send":{}}]}`,
		"two actions":         `{"name":"x","doc":"d","steps":[{"send":{},"expect":{}}]}`,
		"no action":           `{"name":"x","doc":"d","steps":[{"conn":"a"}]}`,
		"a number to send":    `{"name":"x","doc":"d","steps":[{"send":5}]}`,
		"no placeholder":      `{"name":"x","doc":"d","steps":[{"expect":{"a":{"$uuid":"x"}}}]}`,
		"a placeholder and":   `{"name":"x","doc":"d","steps":[{"expect":{"a":{"$any":"string","b":1}}}]}`,
		"a type that is none": `{"name":"x","doc":"d","steps":[{"expect":{"a":{"$any":"text"}}}]}`,
		"bounds that are one": `{"name":"x","doc":"d","steps":[{"expect":{"a":{"$int":5}}}]}`,
	} {
		if _, err := parseScenario("x", []byte(text)); err == nil {
			t.Errorf("a scenario with %s was taken", why)
		}
	}
}

func TestScenarioEquality(t *testing.T) {
	for _, c := range []struct {
		want, got string
		same      bool
	}{
		{`{"a":1,"b":"x"}`, `{"b":"\u0078","a":1}`, true},
		{`{"a":1}`, `{"a":1.0}`, false},
		{`{"a":9223372036854775808}`, `{"a":9223372036854775809}`, false},
		{`{"a":1}`, `{"a":1,"b":2}`, false},
		{`{"a":1,"b":2}`, `{"a":1}`, false},
		{`{"a":1}`, `{"a":1,"a":1}`, false},
		{`{"a":null}`, `{}`, false},
		{`{"a":[1,{"b":null}]}`, `{"a":[1,{"b":null}]}`, true},
		{`{"a":[1]}`, `{"a":[1,1]}`, false},
		{`{"a":""}`, `{"a":null}`, false},
		{`{"a":{"$any":"null"}}`, `{"a":null}`, true},
		{`{"a":{"$any":"number"}}`, `{"a":"1"}`, false},
		{`{"a":{"$int":[1,5]}}`, `{"a":5}`, true},
		{`{"a":{"$int":[1,5]}}`, `{"a":6}`, false},
		{`{"a":{"$int":[1,5]}}`, `{"a":2.0}`, false},
		{`{"a":{"$raw":"[1, 2]"}}`, `{"a":[1, 2]}`, true},
		{`{"a":{"$raw":"[1, 2]"}}`, `{"a":[1,2]}`, false},
		{`{"a":{"$contains":"TOPIC"}}`, `{"a":"the topic is bad"}`, true},
		{`{"a":{"$uuidv7":"x"},"b":{"$ref":"x"}}`, `{"a":"0190a1b2-c3d4-7e5f-8a9b-0123456789ab","b":"0190a1b2-c3d4-7e5f-8a9b-0123456789ab"}`, true},
		{`{"a":{"$uuidv7":"x"}}`, `{"a":"0190a1b2-c3d4-4e5f-8a9b-0123456789ab"}`, false},
		{`{"a":{"$bind":"x"},"b":{"$ref":"x"}}`, `{"a":"1","b":"2"}`, false},
		{`{"a":{"$repeat":["ab",2]}}`, `{"a":"abab"}`, true},
		{`{"a":{"$repeat":["ab",2]}}`, `{"a":"abababab"}`, false},
		{`{"a":{"$now":1000}}`, `{"a":5}`, false},
	} {
		err := equal(newNames(), "frame", json.RawMessage(c.want), json.RawMessage(c.got))
		if (err == nil) != c.same {
			t.Errorf("%s and %s: %v", c.want, c.got, err)
		}
	}
}
