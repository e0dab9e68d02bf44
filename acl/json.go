package acl

import (
	"bytes"
	"encoding/json"
	"errors"
)

// field is a member of a JSON object.
type field struct {
	name  string
	value json.RawMessage
}

// objectFields returns the members of a JSON object in order. Unlike encoding/json, it rejects
// duplicate names and compares names case-sensitively, so that every reader of a document sees the
// same policy.
func objectFields(data []byte) ([]field, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("is not a JSON object")
	}
	var fields []field
	seen := make(map[string]struct{})
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, errNotJSON
		}
		name, ok := t.(string)
		if !ok {
			return nil, errNotJSON
		}
		if _, twice := seen[name]; twice {
			return nil, errors.New("has a field twice")
		}
		seen[name] = struct{}{}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, errNotJSON
		}
		fields = append(fields, field{name, value})
	}
	if _, err := dec.Token(); err != nil || dec.InputOffset() != int64(len(bytes.TrimRight(data, " \t\r\n"))) {
		return nil, errNotJSON
	}
	return fields, nil
}

var errNotJSON = errors.New("is not valid JSON")

// decodeArray returns the elements of a JSON array.
func decodeArray(data []byte) ([]json.RawMessage, bool) {
	if len(data) == 0 || data[0] != '[' {
		return nil, false
	}
	var values []json.RawMessage
	return values, json.Unmarshal(data, &values) == nil
}

// decodeString decodes a JSON string.
func decodeString(data []byte) (text string, ok bool) {
	if len(data) == 0 || data[0] != '"' {
		return "", false
	}
	return text, json.Unmarshal(data, &text) == nil
}

// isNull reports whether a value is the JSON null.
func isNull(data []byte) bool { return string(data) == "null" }
