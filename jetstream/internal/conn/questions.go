package conn

// question is one that waits for its reply, in nanoseconds of the bus's clock.
type question struct {
	Asker    // nil: the entry is free
	deadline int64
	number   uint64
}

// indexBits of a question's number are the index of its entry. The rest counts up, so that a late
// reply finds that the entry is another's by now.
const indexBits = 24

// questions are those that wait on one connection, in entries that are used again. They need a lock
// around them. There are as many as are asked at a time: publishes are bounded by the streams'
// slots, the rest by leases and workers.
type questions struct {
	entries []question
	free    []uint32
	asked   uint64
}

// add files a question and returns its number.
func (q *questions) add(who Asker, deadline int64) uint64 {
	var index uint32
	if n := len(q.free); n > 0 {
		index = q.free[n-1]
		q.free = q.free[:n-1]
	} else {
		index = uint32(len(q.entries)) //nolint:gosec // far fewer
		q.entries = append(q.entries, question{})
	}
	q.asked++
	number := q.asked<<indexBits | uint64(index)
	q.entries[index] = question{Asker: who, deadline: deadline, number: number}
	return number
}

// take returns who waits for the answer of that number, nil for nobody, and frees the entry.
func (q *questions) take(number uint64) Asker {
	index := number & (1<<indexBits - 1)
	if index >= uint64(len(q.entries)) || q.entries[index].Asker == nil || q.entries[index].number != number {
		return nil
	}
	who := q.entries[index].Asker
	q.entries[index] = question{}
	q.free = append(q.free, uint32(index))
	return who
}

// waiting is how many wait.
func (q *questions) waiting() int { return len(q.entries) - len(q.free) }

// takeUntil takes those whose deadline is not after now.
func (q *questions) takeUntil(now int64) []Asker {
	var late []Asker
	for i := range q.entries {
		if p := &q.entries[i]; p.Asker != nil && p.deadline <= now {
			late = append(late, q.take(p.number))
		}
	}
	return late
}
