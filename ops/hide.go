package ops

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"eventhub/acl"
	"eventhub/jetstream/jsonpointer"
	"eventhub/jetstream/native"
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
	var all []jsonpointer.Pointer
	headers = maps.Clone(headers)
	for _, m := range masks {
		all = append(all, pointers(m, nil)...)
		if strings.HasPrefix(topic, "dlq.") {
			original, _ := jsonpointer.Pointer{"original"}.Find(payload)
			all = append(all, recordPointers(m, original, "original")...)
		}
		for name := range headers {
			if m.Hides(name) {
				headers[name] = "***"
			}
		}
	}
	return jsonpointer.Hide(payload, all, stars), headers
}

// pointers returns the pointers of a mask into a payload that lies at a pointer.
func pointers(m *acl.Mask, at jsonpointer.Pointer) (all []jsonpointer.Pointer) {
	for _, text := range m.Pointers {
		p, err := jsonpointer.Parse(text)
		if err != nil {
			p = nil // cannot happen, as acl has checked the form; it hides the whole payload
		}
		// a snapshot holds the payload of its event in payload
		all = append(all, slices.Concat(at, p), slices.Concat(at, jsonpointer.Pointer{"payload"}, p))
	}
	return all
}

// hideFrame returns the EVENT frame of a broadcast of a topic without what the masks name, as hide
// does. It does not change frame.
func hideFrame(masks []*acl.Mask, topic string, frame []byte) []byte {
	if len(masks) == 0 {
		return frame
	}
	event, _ := jsonpointer.Pointer{"event"}.Find(frame)
	var all []jsonpointer.Pointer
	for _, m := range masks {
		all = append(all, recordPointers(m, event, "event")...)
		if strings.HasPrefix(topic, "dlq.") {
			original, _ := jsonpointer.Pointer{"payload", "original"}.Find(event)
			all = append(all, recordPointers(m, original, "event", "payload", "original")...)
		}
	}
	return jsonpointer.Hide(frame, all, stars)
}

// recordPointers returns the pointers to what a mask names of a record that lies at a pointer. A
// mask names headers in any case. The payload is hidden whole if the mask names a part of it and it
// was not JSON when it was published: the record has it as a string then.
func recordPointers(m *acl.Mask, record []byte, at ...string) (all []jsonpointer.Pointer) {
	payload := append(slices.Clone(at), "payload")
	all = pointers(m, payload)
	var r struct {
		Headers map[string]json.RawMessage `json:"headers"`
	}
	if json.Unmarshal(record, &r) != nil {
		return append(all, append(slices.Clone(at), "headers")) // whatever they are
	}
	for name := range r.Headers {
		if m.Hides(name) {
			all = append(all, append(slices.Clone(at), "headers", name))
		}
		if name == native.HeaderEncoding && len(m.Pointers) > 0 {
			all = append(all, payload)
		}
	}
	return all
}
