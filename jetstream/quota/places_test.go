package quota_test

import (
	"context"
	"testing"

	"eventhub/jetstream/quota"
)

// A name whose users wait leaves the other places to others.
func TestPlacesOfOneName(t *testing.T) {
	p := quota.NewPlaces(3, 2)
	none := func() {}
	for range 2 {
		if !p.Enter(t.Context(), "me", 10, none) {
			t.Fatal("there was no place")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p.Enter(ctx, "me", 10, none) {
		t.Error("a third place for one name")
	}
	if !p.Enter(ctx, "other", 10, none) {
		t.Error("no place for another name")
	}
	p.Leave("me")
	if !p.Enter(ctx, "me", 10, none) {
		t.Error("a place that was left is not free")
	}
}
