package facade

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/coder/websocket"
)

var update = flag.Bool("update", false, "rewrite the files in testdata from the code")

// errorsFile is what testdata/errors.json holds: the two tables of code.go, for other languages.
type errorsFile struct {
	// Codes are sorted by code, then status. A code that stands there twice differs over HTTP by
	// its status.
	Codes []codeEntry `json:"codes"`
	// Closes are sorted by code.
	Closes []closeEntry `json:"closes"`
}

type codeEntry struct {
	Code    code   `json:"code"`
	Status  int    `json:"status"`
	Retry   bool   `json:"retry"`
	Meaning string `json:"meaning"`
}

type closeEntry struct {
	Code      websocket.StatusCode `json:"code"`
	Name      string               `json:"name"`
	Reconnect bool                 `json:"reconnect"`
	Meaning   string               `json:"meaning"`
}

func TestErrorsFile(t *testing.T) {
	file := errorsFile{Codes: []codeEntry{
		{codePublishFailed, tooLarge.status, tooLarge.retry, tooLarge.meaning},
		{codeSubscribeFailed, otherOrder.status, otherOrder.retry, otherOrder.meaning},
	}}
	for c, r := range rules {
		file.Codes = append(file.Codes, codeEntry{c, r.status, r.retry, r.meaning})
	}
	slices.SortFunc(file.Codes, func(a, b codeEntry) int {
		if a.Code != b.Code {
			return bytes.Compare([]byte(a.Code), []byte(b.Code))
		}
		return a.Status - b.Status
	})
	for c, cl := range closings {
		file.Closes = append(file.Closes, closeEntry{c, cl.name, c < closeGiveUp, cl.meaning})
	}
	slices.SortFunc(file.Closes, func(a, b closeEntry) int { return int(a.Code - b.Code) })

	want, err := json.MarshalIndent(file, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')

	path := filepath.Join("..", "testdata", "errors.json")
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs from the tables in code.go: run go test ./facade -run TestErrorsFile -update", path)
	}
}

func TestRules(t *testing.T) {
	statuses := []int{
		http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusConflict,
		http.StatusRequestEntityTooLarge, http.StatusTooManyRequests, http.StatusServiceUnavailable,
		http.StatusGone, http.StatusInsufficientStorage, http.StatusUnprocessableEntity,
	}
	later := []int{http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusInsufficientStorage}
	for c, r := range rules {
		if !slices.Contains(statuses, r.status) {
			t.Errorf("%s has status %d, which the protocol does not have", c, r.status)
		}
		if retry := slices.Contains(later, r.status); r.retry != retry {
			t.Errorf("%s: retry is %v at status %d", c, r.retry, r.status)
		}
	}
	if got := code("no such code").rule(); got != rules[codeInternal] {
		t.Errorf("an unknown code has the rule %+v", got)
	}
	if got := (&fault{code: codePublishFailed}).rule(); got.status != http.StatusServiceUnavailable {
		t.Errorf("publish_failed has the rule %+v", got)
	}
	if got := (&fault{code: codePublishFailed, tooLarge: true}).rule(); got.status != http.StatusRequestEntityTooLarge || got.retry {
		t.Errorf("a publish_failed over the size limit has the rule %+v", got)
	}
	if got := (&fault{code: codeSubscribeFailed, permanent: true}).rule(); got.status != http.StatusConflict || got.retry {
		t.Errorf("a subscribe_failed of a group of the other order has the rule %+v", got)
	}
}

func TestClosings(t *testing.T) {
	names := make(map[string]bool)
	for c, cl := range closings {
		if c < 4000 || c >= 4200 {
			t.Errorf("close code %d is outside both ranges", c)
		}
		if len(cl.name) > 123 || cl.name == "" || names[cl.name] {
			t.Errorf("close code %d has the name %q", c, cl.name)
		}
		names[cl.name] = true
	}
}
