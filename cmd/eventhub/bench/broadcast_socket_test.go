package bench

import "testing"

// A socket that has had a message and a ping has no further message: what it got counts at once.
func TestAPingIsNoFurtherMessage(t *testing.T) {
	event := appendFrame(nil, []byte("event"))
	ping := []byte{0x80 | opPing, 0}
	for name, c := range map[string]struct {
		behind []byte
		more   bool
	}{
		"nothing":           {nil, false},
		"a message":         {event, true},
		"half a message":    {event[:3], false},
		"a ping":            {ping, false},
		"a ping, a message": {append(append([]byte(nil), ping...), event...), false},
	} {
		s := &rawSocket{buf: append(append([]byte(nil), event...), c.behind...)}
		if m, err := s.next(); err != nil || string(m) != "event" {
			t.Fatalf("%s: next is %q, %v", name, m, err)
		}
		if got := s.more(); got != c.more {
			t.Errorf("%s behind a message: more is %v", name, got)
		}
	}
}
