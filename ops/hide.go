package ops

import (
	"encoding/json"
	"maps"
	"strings"

	"eventhub/acl"
	"eventhub/jetstream/jsonpointer"
)

// stars is the JSON that stands for what is hidden.
const stars = `"***"`

// hide returns a payload and headers of a topic's event without what the masks name. Each mask is
// of a rule that lets the operator see the topic. In a dead letter, a mask applies to the event
// that failed as well. hide changes neither payload nor headers. A payload that is not JSON is
// hidden whole if a mask names a part of it.
func hide(masks []*acl.Mask, topic string, payload []byte, headers map[string]string) ([]byte, map[string]string) {
	if len(masks) == 0 {
		return payload, headers
	}
	letter := strings.HasPrefix(topic, "dlq.")
	var pointers []jsonpointer.Pointer
	headers = maps.Clone(headers)
	for _, m := range masks {
		for _, text := range m.Pointers {
			p, err := jsonpointer.Parse(text)
			if err != nil {
				return []byte(stars), nil // cannot happen: acl has checked the form
			}
			pointers = append(pointers, p)
			if letter {
				pointers = append(pointers, append(jsonpointer.Pointer{"original", "payload"}, p...))
			}
		}
		for name := range headers {
			if m.Hides(name) {
				headers[name] = "***"
			}
		}
		if letter {
			pointers = append(pointers, originalHeaders(m, payload)...)
		}
	}
	return jsonpointer.Hide(payload, pointers, stars), headers
}

// originalHeaders points to the headers of the event in a dead letter that a mask names, in
// whatever case they are written.
func originalHeaders(m *acl.Mask, letter []byte) (pointers []jsonpointer.Pointer) {
	var l struct {
		Original struct {
			Headers map[string]json.RawMessage `json:"headers"`
		} `json:"original"`
	}
	if json.Unmarshal(letter, &l) != nil {
		return nil // not a letter of the hub; the pointers of the mask apply
	}
	for name := range l.Original.Headers {
		if m.Hides(name) {
			pointers = append(pointers, jsonpointer.Pointer{"original", "headers", name})
		}
	}
	return pointers
}
