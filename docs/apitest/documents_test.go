package apitest

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"eventhub/docs"
)

// tree is a document as JSON values.
func tree(t *testing.T, text []byte) map[string]any {
	t.Helper()
	parsed, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	fields, ok := parsed.(map[string]any)
	if !ok {
		t.Fatal("the document is no object")
	}
	return fields
}

// at returns the object at a path of names.
func at(t *testing.T, node map[string]any, path ...string) map[string]any {
	t.Helper()
	for _, name := range path {
		next, ok := node[name].(map[string]any)
		if !ok {
			t.Fatalf("there is no object %s", strings.Join(path, "."))
		}
		node = next
	}
	return node
}

// TestSharedSchemas compares the schemas that both documents have.
func TestSharedSchemas(t *testing.T) {
	web, frames := at(t, tree(t, docs.OpenAPI), "components", "schemas"), at(t, tree(t, docs.AsyncAPI), "components", "schemas")
	shared := 0
	for name, schema := range frames {
		other, both := web[name]
		if !both {
			continue
		}
		shared++
		if !reflect.DeepEqual(schema, other) {
			t.Errorf("the schema %s differs between docs/openapi.yaml and docs/asyncapi.yaml: make both equal", name)
		}
	}
	if shared < 8 {
		t.Errorf("the documents share %d schemas; Event and PublishOptions should be among them", shared)
	}
}

// TestErrorCodes compares the codes of both documents with testdata/errors.json: the values of
// ErrorCode, and the tables.
func TestErrorCodes(t *testing.T) {
	text, err := os.ReadFile("../../testdata/errors.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Codes []struct {
			Code, Meaning string
			Status        int
			Retry         bool
		}
		Closes []struct {
			Code          int
			Name, Meaning string
			Reconnect     bool
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	pick := func(yes bool, a, b string) string {
		if yes {
			return a
		}
		return b
	}
	var values []any
	var codes, closes strings.Builder
	codes.WriteString("| code | HTTP | retry | meaning |\n|---|---|---|---|\n")
	closes.WriteString("| code | reason | then | meaning |\n|---|---|---|---|\n")
	for _, c := range file.Codes {
		if !slices.Contains(values, any(c.Code)) {
			values = append(values, c.Code)
		}
		fmt.Fprintf(&codes, "| `%s` | %d | %s | %s |\n", c.Code, c.Status, pick(c.Retry, "yes", "no"), c.Meaning)
	}
	for _, c := range file.Closes {
		fmt.Fprintf(&closes, "| %d | `%s` | %s | %s |\n", c.Code, c.Name, pick(c.Reconnect, "reconnect", "give up"), c.Meaning)
	}
	frames := tree(t, docs.AsyncAPI)
	for name, doc := range map[string]map[string]any{"openapi.yaml": tree(t, docs.OpenAPI), "asyncapi.yaml": frames} {
		schema := at(t, doc, "components", "schemas", "ErrorCode")
		if !reflect.DeepEqual(schema["enum"], values) {
			t.Errorf("docs/%s: components.schemas.ErrorCode.enum is %v, the table of codes in facade/code.go has %v", name, schema["enum"], values)
		}
		if said, _ := schema["description"].(string); !strings.Contains(said, codes.String()) {
			t.Errorf("docs/%s: the table in components.schemas.ErrorCode.description must be\n%s", name, codes.String())
		}
	}
	if said, _ := at(t, frames, "servers", "hub")["description"].(string); !strings.Contains(said, closes.String()) {
		t.Errorf("docs/asyncapi.yaml: the table in servers.hub.description must be\n%s", closes.String())
	}
}

// TestContentHasNamedSchemas checks that every body of docs/openapi.yaml has a schema of
// components.schemas, which is what answers are held against, and that every operation has an
// x-permission.
func TestContentHasNamedSchemas(t *testing.T) {
	a, err := load()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, port := range []Port{Clients, Operators} {
		for _, route := range a.routes(port) {
			if route.Permission == "" {
				t.Errorf("docs/openapi.yaml: %s %s has no x-permission", route.Method, route.Path)
			}
			for status, response := range route.operation.Responses.Map() {
				for kind, content := range response.Value.Content {
					seen++
					if !strings.HasPrefix(content.Schema.Ref, "#/components/schemas/") {
						t.Errorf("docs/openapi.yaml: the schema of %s %s %s %s must be a $ref into components.schemas", route.Method, route.Path, status, kind)
					} else if _, err := a.schemas.at(content.Schema.Ref); err != nil {
						t.Errorf("docs/openapi.yaml: %v", err)
					}
				}
			}
		}
	}
	if seen == 0 {
		t.Error("the document has no bodies")
	}
}

// TestFrameExamples checks that each example of docs/asyncapi.yaml fits its own message only.
func TestFrameExamples(t *testing.T) {
	set, err := loadFrames()
	if err != nil {
		t.Fatal(err)
	}
	messages := at(t, tree(t, docs.AsyncAPI), "components", "messages")
	for _, from := range []side{fromClient, fromHub} {
		for _, name := range set.messages[from] {
			examples, _ := at(t, messages, name)["examples"].([]any)
			if len(examples) == 0 {
				t.Errorf("the message %s has no example", name)
			}
			for _, example := range examples {
				fields, _ := example.(map[string]any)
				text, err := json.Marshal(fields["payload"])
				if err != nil {
					t.Fatal(err)
				}
				if fits, why := set.match(from, string(text)); !slices.Equal(fits, []string{name}) {
					t.Errorf("the example %s of %s fits the messages %q: %v", text, name, fits, why)
				}
			}
		}
	}
	letters := at(t, messages, "EVENT")["examples"].([]any) //nolint:errcheck,forcetypeassert // checked above
	for _, example := range letters {
		fields, _ := example.(map[string]any)
		if fields["name"] != "dead letter" {
			continue
		}
		payload := at(t, fields, "payload", "event", "payload")
		if err := set.closed.check("#/components/schemas/DeadLetter", payload); err != nil {
			t.Errorf("the dead letter among the examples: %v", err)
		}
		return
	}
	t.Error("no example of EVENT is called dead letter")
}
