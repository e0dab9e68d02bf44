package schema

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// Parts judges values by the subschemas of a schema. It is for one goroutine.
type Parts struct {
	linker *linker
	rules  map[string]*rule // by place; nil for what is no schema
}

// NewParts returns the parts of a schema that Compile takes.
func NewParts(text []byte) (*Parts, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("is not JSON: %w", err)
	}
	l, err := newLinker(doc)
	if err != nil {
		return nil, err
	}
	return &Parts{l, make(map[string]*rule)}, nil
}

// Takes reports whether the subschema at a JSON pointer takes a value, which encoding/json can
// write. known is false if there is no subschema, or the value takes it too many steps.
func (p *Parts) Takes(pointer string, value any) (valid, known bool) {
	r, tried := p.rules[pointer]
	if !tried {
		r, _ = p.linker.link(pointer) // an error is no schema
		p.rules[pointer] = r
	}
	text, err := json.Marshal(value)
	if r == nil || err != nil {
		return false, false
	}
	j := judge{left: maxSteps, quiet: 1}
	valid = j.takes(r, decode(text, nil))
	return valid, j.left >= 0
}
