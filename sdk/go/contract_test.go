package eventhub

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"eventhub/sdk/go/wire"
)

// The codes are those of the hub, and say the same about another try.
func TestTheCodesAreTheHubs(t *testing.T) {
	text, err := os.ReadFile("../../testdata/errors.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Codes []struct {
			Code  string `json:"code"`
			Retry bool   `json:"retry"`
		} `json:"codes"`
		Closes []struct {
			Code      int  `json:"code"`
			Reconnect bool `json:"reconnect"`
		} `json:"closes"`
	}
	if err := json.Unmarshal(text, &table); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, c := range table.Codes {
		want[c.Code] = want[c.Code] || c.Retry
	}
	if !maps.Equal(hubCodes, want) {
		t.Errorf("the client has %v, the hub %v", hubCodes, want)
	}
	for code := range clientCodes {
		if _, ok := want[code]; ok {
			t.Errorf("%s is a code of the hub", code)
		}
	}
	for _, c := range table.Closes {
		if (&wire.CloseError{Code: c.Code}).Reconnect() != c.Reconnect {
			t.Errorf("close code %d: reconnect is not %v", c.Code, c.Reconnect)
		}
	}
	if len(table.Codes) == 0 || len(table.Closes) == 0 {
		t.Error("the table is empty")
	}
	if newError("a code of a newer hub", "", nil).Retryable || !newError("overloaded", "", nil).Retryable {
		t.Error("Retryable does not follow the table")
	}
}

// The capabilities that AUTH names are those that the hub has.
func TestTheCapabilitiesAreTheHubs(t *testing.T) {
	text, err := os.ReadFile("../../docs/asyncapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range caps {
		if !strings.Contains(string(text), name) {
			t.Errorf("docs/asyncapi.yaml does not have %s", name)
		}
	}
}

// A program that uses the client links no code of the hub: only the standard library,
// coder/websocket, and the two packages that hub and clients share.
func TestTheClientLinksNoHub(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	got := slices.DeleteFunc(strings.Fields(string(out)), func(path string) bool {
		return path == "github.com/coder/websocket" || strings.HasPrefix(path, "github.com/coder/websocket/internal/")
	})
	slices.Sort(got)
	module, err := exec.Command("go", "list", "-m").Output()
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, name := range []string{"facade/textmsg", "jetstream/jsonscan", "sdk/go", "sdk/go/wire"} {
		want = append(want, strings.TrimSpace(string(module))+"/"+name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the client links %q, want %q", got, want)
	}
}
