package typescript

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the types anew")

// declarations is where the tests of the TypeScript client compile the types.
const declarations = "../../../sdk/test/topics.ts"

var topics = []Topic{
	{"hosts", []byte(`{"description":"What a host says\nof itself. */","type":"object","required":["host","state"],"properties":{
		"host":{"type":"string","description":"The name."},"state":{"enum":["up","down",null,7,true]},"port":{"type":"integer","minimum":1},
		"tags":{"type":"array","items":{"type":["string","number"]}},"pair":{"type":"array","prefixItems":[{"type":"string"},{"type":"boolean"}],"items":false},
		"a-b":{"const":"x\"y"},"any":true,"none":false,"labels":{"type":"object","additionalProperties":{"type":"string"}},
		"empty":{"type":"object","additionalProperties":false}},"additionalProperties":false}`)},
	{"carts.paid", []byte(`{"type":"object","required":["cart","by"],"properties":{"cart":{"type":"integer"},"cents":{"type":"number"},
		"by":{"$ref":"#/$defs/payer"},"parent":{"$ref":"#"}},"$defs":{"payer":{"oneOf":[
		{"type":"object","required":["kind","card"],"properties":{"kind":{"const":"card"},"card":{"type":"string"}}},
		{"type":"object","required":["kind"],"properties":{"kind":{"const":"cash"}}}]}}}`)},
	{"carts-paid", []byte(`{"allOf":[{"type":"object","required":["a"],"properties":{"a":{"type":"string"}}},{"type":"object","properties":{"b":{"type":["null","integer"]}},"additionalProperties":true}]}`)},
	{"7.things", []byte(`{"type":"array","items":{"anyOf":[{"type":"string"},{"type":"array","items":{"type":"null"}}]}}`)},
	{"open", []byte(`{}`)},
}

// TestDeclarations compares the types with those that the tests of the TypeScript client compile.
func TestDeclarations(t *testing.T) {
	got, err := Declarations(topics)
	if err != nil {
		t.Fatal(err)
	}
	got = append([]byte("// Written by `go test ./jetstream/schema/typescript -update`.\n"), got...)
	if *update {
		if err := os.WriteFile(declarations, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(declarations)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the types are\n%s\nwant\n%s\nrun go test ./jetstream/schema/typescript -update, and npm test in sdk", got, want)
	}
}

// TestDeclarationsEnd has schemas that lead to themselves, or nowhere.
func TestDeclarationsEnd(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat(`{"type":"array","items":`, 100) + "{}" + strings.Repeat("}", 100)
	for _, text := range []string{`{"$ref":"#"}`, `{"$ref":"#/$defs/none"}`, `{"$ref":"https://example.org/x"}`, `{"allOf":[{"$ref":"#"}]}`, deep} {
		if _, err := Declarations([]Topic{{"t", []byte(text)}}); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := Declarations([]Topic{{"t", []byte(`{`)}}); err == nil {
		t.Error("taken, and not JSON")
	}
}

func ExampleDeclarations() {
	text, err := Declarations([]Topic{{"carts.paid", []byte(`{"type":"object","required":["cart"],"properties":{"cart":{"type":"integer"},"cents":{"type":"integer"}}}`)}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(string(text))
	// Output:
	// export type Topics = {
	//   "carts.paid": CartsPaid;
	// };
	// export type CartsPaid = {
	//   cart: number;
	//   cents?: number;
	// };
}
