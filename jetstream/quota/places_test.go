package quota_test

import (
	"context"
	"sync"
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

// TestTryEnter takes places that are there, and waits for none.
func TestTryEnter(t *testing.T) {
	p := quota.NewPlaces(2, 1)
	if !p.TryEnter("me") || p.TryEnter("me") || !p.TryEnter("other") || p.TryEnter("third") {
		t.Error("other places than one for each of two names")
	}
	p.Leave("me")
	if !p.TryEnter("third") {
		t.Error("a place that was left is not free")
	}
	if n := p.Names(); n != 2 {
		t.Errorf("%d names are known, want 2", n)
	}
}

// TestRest has somebody who has the only place for long rest from time to time. Others come in
// meanwhile, however often their turn comes.
func TestRest(t *testing.T) {
	p := quota.NewPlaces(1, 1)
	p.TryEnter("long")
	var came sync.WaitGroup
	for _, name := range []string{"a", "b"} {
		came.Go(func() {
			for range 10 {
				if !p.Enter(t.Context(), name, 1, func() {}) {
					t.Error("there was no place")
				}
				p.Leave(name)
			}
		})
	}
	others := make(chan struct{})
	go func() { came.Wait(); close(others) }()
	for ended := false; !ended; p.Rest() {
		select {
		case <-others:
			ended = true
		default:
		}
	}
	if p.TryEnter("a") {
		t.Error("a place was left that the first one has again")
	}
	p.Leave("long")
}
