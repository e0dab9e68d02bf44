package facade

import "sync/atomic"

// budget bounds memory that many users share. Its methods may be called concurrently.
type budget struct {
	max  int64
	used atomic.Int64
}

// take reserves n bytes and reports whether the budget allows them.
func (b *budget) take(n int) bool {
	if b.used.Add(int64(n)) > b.max {
		b.give(n)
		return false
	}
	return true
}

func (b *budget) give(n int) { b.used.Add(-int64(n)) }

// takeBuffer returns a buffer for the next message; returnBuffer releases it.
func (s *session) takeBuffer() *[]byte {
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

// grow doubles buf, up to limit bytes. It reports whether the budget allows that.
func (s *session) grow(buf *[]byte, limit int) bool {
	size := min(2*len(*buf), limit)
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

// returnBuffer releases the buffer of a message and its share of the budget.
func (s *session) returnBuffer(b *[]byte) {
	if s.receiving > 0 {
		s.srv.inbound.give(s.receiving)
		s.receiving = 0
	}
	putBuffer(b)
}
