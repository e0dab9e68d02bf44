package facade

import "sync/atomic"

// inbound is the memory of messages that are being received, over all connections and beyond preAuthFrame each: clients
// that begin large messages and do not end them would fill the hub with them. Its methods may be called concurrently.
type inbound struct {
	most int64
	used atomic.Int64
}

// take reports whether there is room for n bytes more, and counts them if so.
func (i *inbound) take(n int) bool {
	if i.used.Add(int64(n)) > i.most {
		i.give(n)
		return false
	}
	return true
}

func (i *inbound) give(n int) { i.used.Add(-int64(n)) }

// room returns a buffer for the next message; it is given back with leave.
func (s *session) room() *[]byte {
	b, _ := buffers.Get().(*[]byte)
	if cap(*b) > preAuthFrame+1 {
		if !s.srv.inbound.take(cap(*b)) {
			*b = make([]byte, 0, 4<<10)
			return b
		}
		s.receiving = cap(*b)
	}
	return b
}

// grow makes buf longer, up to the given length. It reports whether there is room for that.
func (s *session) grow(buf *[]byte, most int) bool {
	size := min(2*len(*buf), most)
	if size > preAuthFrame+1 {
		if !s.srv.inbound.take(size) {
			return false
		}
		s.srv.inbound.give(s.receiving)
		s.receiving = size
	}
	grown := make([]byte, size)
	copy(grown, *buf)
	*buf = grown
	return true
}

// leave is for the end of a message.
func (s *session) leave(b *[]byte) {
	if s.receiving > 0 {
		s.srv.inbound.give(s.receiving)
		s.receiving = 0
	}
	putBuffer(b)
}
