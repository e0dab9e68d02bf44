package bench

import (
	"encoding/json"
	"testing"

	"eventhub/jetstream/schema"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/topicfile"
)

// The topics file of the ways can be read, their schemas take the payload by the way that they
// name, and the cast makes version 2 of it.
func TestSchemaWays(t *testing.T) {
	t.Parallel()
	if _, err := topicfile.Parse("topics.yaml", []byte(schemaTopics())); err != nil {
		t.Fatal(err)
	}
	payload := newPayload(268)
	stamp(payload, 7, 1)
	compile := func(doc any) *schema.Schema {
		text, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		s, err := schema.Compile(text)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, w := range schemaWays {
		s := compile(payloadSchema(w.also))
		if v := s.Validate(payload); v != nil {
			t.Errorf("%s: %v", w.name, v)
		}
		if s.Fast() == (w.name == "fallback") {
			t.Errorf("%s has a program: %v", w.name, s.Fast())
		}
	}
	second := secondVersion()
	up, _ := second["up"].(json.RawMessage)
	c, err := upcast.Compile(up, nil)
	if err != nil {
		t.Fatal(err)
	}
	cast, err := upcast.NewChain(1, c).Cast(t.Context(), payload, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	if v := compile(second["schema"]).Validate(cast); v != nil {
		t.Errorf("%s: %v", cast, v)
	}
}
