package schemas

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/cputime"
	"eventhub/jetstream/schema/upcast"
)

// TestDeadlinesAreForTheWait has the deadline of a cast pass after the cast has begun.
func TestDeadlinesAreForTheWait(t *testing.T) {
	t.Parallel()
	c := computing{cputime.New(time.Second, 2, 10, func(string) {})}
	removes, err := upcast.Compile(json.RawMessage("["+strings.Repeat(`{"remove":{"at":"/0"}},`, 39)+`{"remove":{"at":"/0"}}]`), nil)
	if err != nil {
		t.Fatal(err)
	}
	list := []byte("[" + strings.Repeat("1,", 20_000) + "1]")
	late, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	waits := upcast.New(func(doc []byte) ([]byte, error) {
		<-late.Done()
		return doc, nil
	}, nil)
	if _, err := c.castSlowly(late, upcast.NewChain(1, waits, removes), list, 1, 3, "client"); err != nil {
		t.Error(err)
	}
}
