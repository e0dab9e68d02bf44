package jetstream

// question is one that waits for its reply, in nanoseconds of the bus's clock.
type question struct {
	asker    // nil: the place is free
	deadline int64
	number   uint64
}

// placeBits of a question's number are its place. The rest counts up, so that a late reply finds that its place is
// another's by now.
const placeBits = 24

// questions are those that wait on one connection, in places that are used again. They need a lock around them. There are
// as many as are asked at a time: publishes are bounded by the streams' slots, the rest by leases and workers.
type questions struct {
	places []question
	free   []uint32
	asked  uint64
}

// add files a question and returns its number.
func (q *questions) add(who asker, deadline int64) uint64 {
	var place uint32
	if n := len(q.free); n > 0 {
		place = q.free[n-1]
		q.free = q.free[:n-1]
	} else {
		place = uint32(len(q.places)) //nolint:gosec // far fewer
		q.places = append(q.places, question{})
	}
	q.asked++
	number := q.asked<<placeBits | uint64(place)
	q.places[place] = question{asker: who, deadline: deadline, number: number}
	return number
}

// take returns who waits for the answer of that number, nil for nobody, and frees the place.
func (q *questions) take(number uint64) asker {
	place := number & (1<<placeBits - 1)
	if place >= uint64(len(q.places)) || q.places[place].asker == nil || q.places[place].number != number {
		return nil
	}
	who := q.places[place].asker
	q.places[place] = question{}
	q.free = append(q.free, uint32(place))
	return who
}

// waiting is how many wait.
func (q *questions) waiting() int { return len(q.places) - len(q.free) }

// takeUntil takes those whose deadline is not after now.
func (q *questions) takeUntil(now int64) []asker {
	var late []asker
	for i := range q.places {
		if p := &q.places[i]; p.asker != nil && p.deadline <= now {
			late = append(late, q.take(p.number))
		}
	}
	return late
}
