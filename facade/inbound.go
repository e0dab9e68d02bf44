package facade

import "sync/atomic"

// budget is memory that many share. Its methods may be called concurrently.
type budget struct {
	max  int64
	used atomic.Int64
}

// take reports whether n bytes more are within the budget, and counts them if so.
func (b *budget) take(n int) bool {
	if b.used.Add(int64(n)) > b.max {
		b.give(n)
		return false
	}
	return true
}

func (b *budget) give(n int) { b.used.Add(-int64(n)) }

// takeBuffer returns a buffer for the next message; returnBuffer ends its use.
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

// grow makes buf longer, up to the given length. It reports whether the budget allows that.
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

// returnBuffer is for the end of a message.
func (s *session) returnBuffer(b *[]byte) {
	if s.receiving > 0 {
		s.srv.inbound.give(s.receiving)
		s.receiving = 0
	}
	putBuffer(b)
}
