package reading

import (
	"errors"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

func TestListingCursor(t *testing.T) {
	t.Parallel()
	c := newListingCursor("a.b", time.Unix(1, 2), 3)
	c.pos, c.last = 4, 5
	got, err := parseListingCursor(c.text(), "a.b")
	if err != nil || got != c {
		t.Errorf("got %+v, %v, want %+v", got, err, c)
	}
	for want, text := range map[string]string{"another topic": c.text(), "no cursor": c.text() + "="} {
		if _, err := parseListingCursor(text, "a.c"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	c.began -= 3_601
	if _, err := parseListingCursor(c.text(), "a.b"); err == nil || !strings.Contains(err.Error(), "more than an hour ago") {
		t.Errorf("an old one: %v", err)
	}
	if c.keyHash("k") == c.keyHash("l") {
		t.Error("two keys have one hash")
	}
	other := newListingCursor("a.b", time.Unix(1, 2), 3)
	if c.keyHash("k") == other.keyHash("k") {
		t.Error("a key has one hash in two listings")
	}
	if got := c.keyHash(strings.Repeat("k", 2*native.MaxKey)); got == 0 { // of a native publisher
		t.Error("a long key has no hash")
	}
}

// FuzzListingCursor wants a refusal, or a cursor that is written as it was read.
func FuzzListingCursor(f *testing.F) {
	c := newListingCursor("a", time.Now(), 7)
	f.Add(c.text())
	f.Add("")
	f.Add("\x00")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseListingCursor(text, "a")
		switch known, ok := errors.AsType[*event.Error](err); {
		case err == nil && c.text() != text:
			t.Errorf("%q is read as %q", text, c.text())
		case err != nil && (!ok || known.Code != event.CodeBadOptions):
			t.Errorf("%q: %v", text, err)
		}
	})
}
