package bench

import (
	"errors"
	"testing"
)

func TestTallyCountsEachEventOnce(t *testing.T) {
	a, b := newTally(100), newTally(1)
	for i := range 100 {
		a.mark(i)
		a.mark(i / 2)
	}
	if got := a.again.Load(); got != 100 {
		t.Errorf("%d came again, want 100", got)
	}
	b.mark(0)
	if err := waitAll(t.Context(), nil, a, b); err != nil {
		t.Error(err)
	}
}

func TestTallyRefusesWhatWasNotPublished(t *testing.T) {
	a := newTally(2)
	a.mark(2)
	if err := waitAll(t.Context(), nil, a); err == nil {
		t.Error("event 2 of 2 was counted")
	}
	failure, failed := errors.New("lost"), make(chan error, 1)
	failed <- failure
	if err := waitAll(t.Context(), failed, newTally(1)); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}
