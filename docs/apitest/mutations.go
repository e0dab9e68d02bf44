package apitest

import (
	"encoding/json"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
)

// wrongValues are values of each kind, so that some of them are wrong for any member.
var wrongValues = []string{`null`, `true`, `"x"`, `""`, `-1`, `1e400`, `{}`, `{"x":[]}`, `[]`, `[null]`, `["x"]`}

// Mutations returns texts that differ from a JSON object in one place: a member is left out, of
// each kind, or there twice, members of objects within included, or the text is no object.
func Mutations(tb testing.TB, object string) (all []string) {
	tb.Helper()
	all = []string{``, ` `, `{}`, `null`, `[]`, `"x"`, `1`, object[:len(object)-1], `{"":1}`}
	var members map[string]json.RawMessage
	if err := json.Unmarshal([]byte(object), &members); err != nil {
		tb.Fatalf("%s: %v", object, err)
	}
	names := slices.Sorted(maps.Keys(members))
	for _, name := range names {
		member := func(name, value string) string { return `"` + name + `":` + value }
		with := func(values ...string) {
			var text []string
			for _, other := range names {
				if other != name {
					text = append(text, member(other, string(members[other])))
				}
			}
			for _, value := range values {
				text = append(text, member(name, value))
			}
			all = append(all, "{"+strings.Join(text, ",")+"}")
		}
		with()
		for _, wrong := range wrongValues {
			with(wrong)
		}
		with(string(members[name]), wrongValues[0])
		with(wrongValues[1], string(members[name]))
		if members[name][0] == '{' {
			for _, within := range Mutations(tb, string(members[name])) {
				with(within)
			}
		}
	}
	return all
}

// Queries returns queries with each parameter of the operation in turn empty, wrong, or there
// twice, and with all of them. required are the parameters without which the operation answers
// nothing.
func (at Route) Queries(required url.Values) (all []string) {
	add := func(name string, values ...string) {
		query := maps.Clone(required)
		if query == nil {
			query = make(url.Values)
		}
		query[name] = values
		all = append(all, "?"+query.Encode())
	}
	every := maps.Clone(required)
	if every == nil {
		every = make(url.Values)
	}
	for _, parameters := range []openapi3.Parameters{at.item.Parameters, at.operation.Parameters} {
		for _, p := range parameters {
			if p.Value.In != openapi3.ParameterInQuery {
				continue
			}
			every.Set(p.Value.Name, "1")
			for _, wrong := range []string{"", "x", "-1", "1e400", "1", "true", `{"x":1}`, "\x00\xff", strings.Repeat("9", 400)} {
				add(p.Value.Name, wrong)
			}
			add(p.Value.Name)
			add(p.Value.Name, "1", "1")
		}
	}
	return append(all, "", "?=", "?x", "?%", "?"+every.Encode())
}
