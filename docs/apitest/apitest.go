// Package apitest holds what a hub says in tests against its documents: answers against
// docs/openapi.yaml, and frames against docs/asyncapi.yaml. What a document does not have fails the
// test. Only tests import this package.
package apitest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

// schemas compiles the schemas of a document once. Its methods may be called concurrently.
type schemas struct {
	url string

	mu       sync.Mutex
	compiler *jsonschema.Compiler
	compiled map[string]*jsonschema.Schema
}

// newSchemas returns the schemas of a document. If they are closed, an object has no fields but
// those that its schema names: the documents leave objects open for clients, which must accept
// fields of later versions.
func newSchemas(name string, text []byte, closed bool) (*schemas, error) {
	tree, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("docs/%s: %w", name, err)
	}
	if closed {
		closeObjects(tree)
	}
	s := &schemas{url: "file:///" + name, compiler: jsonschema.NewCompiler(), compiled: make(map[string]*jsonschema.Schema)}
	s.compiler.DefaultDraft(jsonschema.Draft2020)
	if err := s.compiler.AddResource(s.url, tree); err != nil {
		return nil, fmt.Errorf("docs/%s: %w", name, err)
	}
	return s, nil
}

// parse returns a YAML document as what its JSON would be.
func parse(text []byte) (any, error) {
	var tree any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		return nil, err
	}
	asJSON, err := json.Marshal(tree)
	if err != nil {
		return nil, err
	}
	return jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
}

// closeObjects adds additionalProperties: false to every schema with properties that says nothing
// of others.
func closeObjects(node any) {
	switch node := node.(type) {
	case map[string]any:
		_, object := node["properties"].(map[string]any)
		if _, said := node["additionalProperties"]; object && !said {
			node["additionalProperties"] = false
		}
		for name, child := range node {
			switch name {
			case "if", "then", "else", "not": // conditions, which name only what they are about
			default:
				closeObjects(child)
			}
		}
	case []any:
		for _, child := range node {
			closeObjects(child)
		}
	}
}

// check says how a value differs from the schema at a place of the document, such as
// "#/components/schemas/Error".
func (s *schemas) check(place string, value any) error {
	schema, err := s.at(place)
	if err != nil {
		return err
	}
	return schema.Validate(value)
}

func (s *schemas) at(place string) (*jsonschema.Schema, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.compiled[place]; known != nil {
		return known, nil
	}
	schema, err := s.compiler.Compile(s.url + place)
	if err != nil {
		return nil, err
	}
	s.compiled[place] = schema
	return schema, nil
}

// decode reads a JSON value. Numbers keep their text.
func decode(text []byte) (any, error) { return jsonschema.UnmarshalJSON(bytes.NewReader(text)) }

// brief shortens a text for a message.
func brief(text string) string {
	const limit = 300
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "…"
}

// names returns the keys of a map in order, for a message.
func names[V any](m map[string]V) string {
	return strings.Join(slices.Sorted(maps.Keys(m)), ", ")
}
