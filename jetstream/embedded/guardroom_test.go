package embedded

import (
	"fmt"
	"testing"
	"time"
)

// TestGuardRoom has strangers and clients come and go in a room for 16 clients and 8 strangers, of
// whom two may come from one address.
func TestGuardRoom(t *testing.T) {
	r, now := newGuardRoom(16, 8), time.Now()
	enter := func(address string, wantLimit string) (c, over *guarded) {
		t.Helper()
		c = &guarded{address: address}
		over, limit := r.enter(c, now)
		if limit != wantLimit {
			t.Errorf("one from %s reaches %q, want %q", address, limit, wantLimit)
		}
		return c, over
	}
	first, _ := enter("10.0.0.1", "")
	enter("10.0.0.1", "")
	if c, over := enter("10.0.0.1", limitStrangers); over != c {
		t.Error("one that has not waited for long was displaced")
	}
	now = now.Add(fairWait)
	if _, over := enter("10.0.0.1", limitStrangers); over != first {
		t.Error("the oldest of the address was not displaced")
	}
	r.leave(first) // again, when its connection has ended
	for i := range 3 {
		enter(fmt.Sprintf("2001:db8::%d:0:0:0:1", i+1), "")
		enter(fmt.Sprintf("2001:db8::%d:ffff:0:0:2", i+1), "")
	}
	if _, over := enter("10.0.0.2", limitStrangers); over == nil || over.address != "10.0.0.1" {
		t.Error("the oldest of all was not displaced")
	}

	// Clients that have sent CONNECT are no strangers, and nobody displaces them.
	for range r.strangers {
		oldest := oldestOf(r.order)
		r.connected(oldest)
		if !r.admit(oldest, "eve") {
			t.Fatal("a client is not admitted")
		}
	}
	for i := range 8 {
		c, _ := enter(fmt.Sprintf("10.1.0.%d", i), "")
		r.connected(c)
		if ok := r.admit(c, "eve"); ok != (i < 4) { // three quarters
			t.Errorf("client %d of a principal: %v", 9+i, ok)
		}
		if i >= 4 && !r.admit(c, "bob") {
			t.Error("another principal is not admitted")
		}
	}
	if c, over := enter("10.0.0.3", limitClients); over != c {
		t.Error("a client that was admitted was displaced")
	}
	if len(r.owners) != 2 || r.all != 16 || len(r.addresses) != 0 {
		t.Errorf("%d owners, %d clients, %d addresses", len(r.owners), r.all, len(r.addresses))
	}
}
