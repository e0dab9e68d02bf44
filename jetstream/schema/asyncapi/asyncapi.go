// Package asyncapi describes topics and the versions of their schemas as an AsyncAPI 3.0 document.
//
// Each topic is a channel, and each version of its schema a message. References inside a schema
// lead to places in the document, as tools for AsyncAPI expect it, and mean what they meant before.
package asyncapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
)

// Format is the format of payloads: JSON Schema 2020-12.
const Format = "application/schema+json;version=draft-2020-12"

// Topic is a topic with all versions of its schema, from 1 on.
type Topic struct {
	Name     string
	Versions []Version
}

// Version is a version of a schema.
type Version struct {
	Schema      json.RawMessage
	Description string
}

type object map[string]any

type document struct {
	AsyncAPI           string            `json:"asyncapi"`
	Info               object            `json:"info"`
	DefaultContentType string            `json:"defaultContentType"`
	Channels           map[string]object `json:"channels"`
	Operations         map[string]object `json:"operations"`
}

// Document returns the document as JSON. The error names the topic and the version that cannot be
// described. The names must be well-formed topics, each given once.
func Document(topics []Topic) ([]byte, error) {
	doc := document{
		AsyncAPI: "3.0.0", DefaultContentType: "application/json",
		Info:     object{"title": "Topics of eventhub", "version": "1.0.0"},
		Channels: make(map[string]object), Operations: make(map[string]object),
	}
	for _, t := range topics {
		channel := "#/channels/" + t.Name
		messages := make(object, len(t.Versions))
		refs := make([]object, 0, len(t.Versions))
		for i, v := range t.Versions {
			number := strconv.Itoa(i + 1)
			at := channel + "/messages/v" + number
			schema, err := embed(v.Schema, at+"/payload/schema")
			if err != nil {
				return nil, fmt.Errorf("schema of %s, version %s: %w", t.Name, number, err)
			}
			message := object{
				"name": t.Name + ".v" + number, "contentType": "application/json",
				"headers": object{"type": "object", "properties": object{"x-schema-version": object{"type": "string", "const": number}}},
				"payload": object{"schemaFormat": Format, "schema": schema},
			}
			if v.Description != "" {
				message["description"] = v.Description
			}
			messages["v"+number] = message
			refs = append(refs, object{"$ref": at})
		}
		doc.Channels[t.Name] = object{"address": t.Name, "messages": messages}
		for _, action := range []string{"send", "receive"} {
			doc.Operations[action+"."+t.Name] = object{"action": action, "channel": object{"$ref": channel}, "messages": refs}
		}
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(doc); err != nil {
		return nil, fmt.Errorf("write the document: %w", err)
	}
	return out.Bytes(), nil
}
