package records

import (
	"encoding/json"
	"testing"
	"time"

	"eventhub/jetstream/native"
)

// TestGenerationIsStoredAsNativeClientsReadIt wants nothing in the bucket but what package native
// knows.
func TestGenerationIsStoredAsNativeClientsReadIt(t *testing.T) {
	t.Parallel()
	shared := native.Generation{Number: 3, Consumer: "g~3-ab", Stream: time.Unix(1, 0).UTC(), Durable: true, After: 7}
	want, err := json.Marshal(shared)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(Generation{Generation: shared, Revision: 9})
	if err != nil || string(got) != string(want) {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
}
