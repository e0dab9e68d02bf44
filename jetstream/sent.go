package jetstream

import "slices"

// sentMarks is how many moments of the time of AckWait are remembered for each group.
const sentMarks = 64

// sentTimes tell when the server sent a delivery at the latest. The server numbers the deliveries
// of a consumer. A delivery that arrives behind one with a higher number was sent before that one
// arrived, however long the delivery then waited on its way between servers, or at another
// connection of the pool. The server may have given its event to another member since.
type sentTimes struct {
	marks []sentMark // both numbers rise; bounded by sentMarks
}

// sentMark says that deliveries up to a number were sent before a moment.
type sentMark struct {
	order uint64
	at    int64
}

// arrived returns when the delivery of the given number was sent at the latest.
func (s *sentTimes) arrived(order uint64, now, ackWait int64) int64 {
	last := len(s.marks) - 1
	switch {
	case last < 0:
		s.marks = append(s.marks, sentMark{order, now})
		return now
	case order <= s.marks[last].order:
		i, _ := slices.BinarySearchFunc(s.marks, order, func(m sentMark, order uint64) int {
			if m.order <= order {
				return -1
			}
			return 1
		})
		if i > last {
			return now
		}
		return s.marks[i].at
	case now-s.marks[last].at < ackWait/sentMarks:
		s.marks[last].order = order // as if it had come with the one before
		return now
	}
	old := 0
	for old < last && (s.marks[old+1].at <= now-ackWait || last-old >= sentMarks-1) {
		old++
	}
	s.marks = append(slices.Delete(s.marks, 0, old), sentMark{order, now})
	return now
}

// check compares the marks with what the server said when it was asked: the number of its last
// delivery. A server that was killed may count from an older number.
func (s *sentTimes) check(asked int64, delivered uint64, ackWait int64) {
	for i := len(s.marks) - 1; i >= 0; i-- {
		if s.marks[i].at+ackWait/sentMarks > asked {
			continue // its number may be newer than the answer
		}
		if s.marks[i].order > delivered {
			s.marks = nil
		}
		return
	}
}
