package broadcast

import (
	"hash/maphash"
	"sync"
)

const (
	// firstChunk and lastChunk are how much memory a ring takes at a time, in bytes: at first, and
	// after it has doubled that as often as it does.
	firstChunk = 16 << 10
	lastChunk  = 256 << 10
	// firstFrames is how many frames a ring has room for at first. It doubles as well.
	firstFrames = 64
)

// keySeed seeds the hashes by which frames are conflated.
var keySeed = maphash.MakeSeed()

// chunk is a piece of the memory of a ring. What was written stays as it is: readers use it without
// a lock, also after the ring has dropped it.
type chunk struct {
	buf    []byte
	frames int // of the ring, that lie in it
}

// frame is one message for all sockets.
type frame struct {
	in         *chunk
	start, end int
	text       int    // where the text begins, behind the header of the WebSocket
	seq        uint64 // of the event
	key        uint64 // the hash of the key; 0 for none
}

// ring holds the newest frames of a topic, numbered from 0. All methods may be called concurrently.
type ring struct {
	maxFrames, maxBytes int
	memory              *memory

	mu     sync.Mutex
	frames []frame // a circle, whose size is a power of two
	first  uint64  // number of the oldest frame that is left
	next   uint64  // number of the next frame
	chunks []*chunk
	bytes  int    // of all chunks
	grown  int    // size of the next chunk
	before uint64 // the sequence of the last event before the oldest frame
	head   uint64 // the sequence of the newest event
	ended  bool
}

// memory is what all rings of a hub share, in bytes.
type memory struct {
	mu   sync.Mutex
	left int
}

// take takes n bytes. With force, it takes them also when they are not there.
func (m *memory) take(n int, force bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > m.left && !force {
		return false
	}
	m.left -= n
	return true
}

func (m *memory) give(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.left += n
}

// newRing makes a ring whose frames come behind the sequence head.
func newRing(maxFrames, maxBytes int, m *memory, head uint64) *ring {
	return &ring{maxFrames: maxFrames, maxBytes: maxBytes, memory: m, before: head, head: head, grown: firstChunk}
}

// append adds a copy of a frame, whose text begins at text, and drops the oldest frames that there
// is no room for.
func (r *ring) append(message []byte, text int, seq uint64, key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	if n := uint64(len(r.frames)); r.next-r.first == n {
		if int(n) < r.maxFrames { //nolint:gosec // far below
			r.widenLocked()
		} else {
			r.dropLocked()
		}
	}
	in := r.roomLocked(len(message))
	f := frame{in: in, start: len(in.buf), text: len(in.buf) + text, seq: seq}
	in.buf = append(in.buf, message...)
	f.end = len(in.buf)
	if key != "" {
		f.key = maphash.String(keySeed, key) | 1
	}
	in.frames++
	*r.at(r.next) = f
	r.next++
	r.head = seq
}

// at is the place of a frame in the circle.
func (r *ring) at(n uint64) *frame { return &r.frames[n&uint64(len(r.frames)-1)] } //nolint:gosec // not negative

func (r *ring) widenLocked() {
	wider := make([]frame, max(firstFrames, 2*len(r.frames)))
	for n := r.first; n < r.next; n++ {
		wider[n&uint64(len(wider)-1)] = *r.at(n) //nolint:gosec // not negative
	}
	r.frames = wider
}

// dropLocked drops the oldest frame.
func (r *ring) dropLocked() {
	f := r.at(r.first)
	f.in.frames--
	r.before = f.seq
	*f = frame{}
	r.first++
	if len(r.chunks) > 1 && r.chunks[0].frames == 0 {
		r.freeLocked()
	}
}

// freeLocked gives the oldest chunk back, whose frames were dropped.
func (r *ring) freeLocked() {
	n := cap(r.chunks[0].buf)
	r.chunks[0] = nil
	r.chunks = r.chunks[1:]
	r.bytes -= n
	r.memory.give(n)
}

// roomLocked returns a chunk with room for size bytes. A ring always gets one chunk, whatever the
// others hold.
func (r *ring) roomLocked(size int) *chunk {
	if n := len(r.chunks); n > 0 && cap(r.chunks[n-1].buf)-len(r.chunks[n-1].buf) >= size {
		return r.chunks[n-1]
	}
	want := max(r.grown, size)
	for len(r.chunks) > 0 && (r.bytes+want > r.maxBytes || !r.memory.take(want, false)) {
		oldest := r.chunks[0]
		for oldest.frames > 0 {
			f := r.at(r.first)
			oldest.frames--
			r.before = f.seq
			*f = frame{}
			r.first++
		}
		r.freeLocked()
	}
	if len(r.chunks) == 0 {
		r.memory.take(want, true)
	}
	c := &chunk{buf: make([]byte, 0, want)}
	r.chunks = append(r.chunks, c)
	r.bytes += want
	r.grown = min(2*r.grown, lastChunk)
	return c
}

// batch is what a reader gets at a time.
type batch struct {
	frames []byte // back to back; not to be changed
	next   uint64 // the frame behind them
	last   uint64 // the sequence of the last event
	more   bool   // there are further frames
}

// read returns frames from a number on that lie side by side, at most limit bytes of them, or one.
// ok is false when the ring has dropped that frame.
func (r *ring) read(from uint64, limit int) (b batch, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from < r.first {
		return batch{}, false
	}
	b.next, b.last = from, r.head
	if from == r.next {
		return b, true
	}
	f := r.at(from)
	in, start, end := f.in, f.start, f.end
	b.next, b.last = from+1, f.seq
	for b.next < r.next {
		f = r.at(b.next)
		if f.in != in || f.end-start > limit {
			break
		}
		end = f.end
		b.next, b.last = b.next+1, f.seq
	}
	b.frames, b.more = in.buf[start:end:end], b.next < r.next
	return b, true
}

// conflated is read without the frames that a newer one of the same key follows. It appends them to
// dst, and uses seen.
func (r *ring) conflated(from uint64, limit int, dst []byte, seen map[uint64]uint64) (out []byte, b batch, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from < r.first {
		return dst, batch{}, false
	}
	clear(seen)
	for n := from; n < r.next; n++ {
		if key := r.at(n).key; key != 0 {
			seen[key] = n
		}
	}
	start := len(dst)
	b.next, b.last = from, r.head
	for ; b.next < r.next && len(dst)-start < limit; b.next++ {
		f := r.at(b.next)
		b.last = f.seq
		if f.key == 0 || seen[f.key] == b.next {
			dst = append(dst, f.in.buf[f.start:f.end]...)
		}
	}
	b.frames, b.more = dst[start:], b.next < r.next
	return dst, b, true
}

// place returns the number of the next frame, and the sequence of the newest event before it.
func (r *ring) place() (next, head uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next, r.head
}

// behind returns the number of the first frame of an event behind a sequence. ok is false when the
// ring may have dropped such a frame.
func (r *ring) behind(seq uint64) (n uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if seq >= r.head {
		return r.next, true
	}
	low, high := r.first, r.next
	for low < high {
		middle := low + (high-low)/2
		if r.at(middle).seq > seq {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low, seq >= r.before
}

// end frees the memory. Frames that were read stay valid.
func (r *ring) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.ended = true
	r.memory.give(r.bytes)
	r.chunks, r.frames, r.bytes, r.first, r.before = nil, nil, 0, r.next, r.head
}

// back returns the sequence before the last n frames, if the ring has them all.
func (r *ring) back(n int) (seq uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch have := r.next - r.first; {
	case have < uint64(n): //nolint:gosec // not negative
		return 0, false
	case have == uint64(n): //nolint:gosec // not negative
		return r.before, true
	default:
		return r.at(r.next - uint64(n) - 1).seq, true //nolint:gosec // not negative
	}
}
