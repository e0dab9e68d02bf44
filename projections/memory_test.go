package projections

import (
	"bytes"
	"strconv"
	"testing"
)

// TestCacheIsBounded counts the bytes too, and keeps one state that is larger than all of it.
func TestCacheIsBounded(t *testing.T) {
	t.Parallel()
	full := 0
	c := newCache(10, 10_000, func() { full++ })
	for i := range 100 {
		c.put("k"+strconv.Itoa(i%20), cached{state: State{Value: bytes.Repeat([]byte("x"), 100*(i%7))}})
		if c.lru.Len() > 10 || c.bytes > 10_000 {
			t.Fatalf("it holds %d keys, %d bytes", c.lru.Len(), c.bytes)
		}
	}
	c.put("large", cached{state: State{Value: make([]byte, 20_000)}})
	if _, ok := c.get("large"); !ok || c.lru.Len() != 1 {
		t.Errorf("of a state that is too large for the cache it keeps %d (%v)", c.lru.Len(), ok)
	}
	c.drop("large")
	if c.bytes != 0 || full == 0 {
		t.Errorf("an empty cache counts %d bytes; it was full %d times", c.bytes, full)
	}
}
