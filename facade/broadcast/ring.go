package broadcast

import (
	"hash/maphash"
	"sync"
	"unsafe"
)

const (
	// firstChunk and lastChunk are how much memory a ring takes at a time, in bytes: at first, and
	// after it has doubled that as often as it does. A small ring takes less, so that it never
	// drops more than one of leastChunks parts at a time.
	firstChunk  = 16 << 10
	lastChunk   = 256 << 10
	leastChunks = 8
	// firstFrames is how many frames a ring has room for at first. It doubles as well.
	firstFrames = 64
	// frameSize is what the list of frames costs for each frame, in bytes.
	frameSize = int(unsafe.Sizeof(frame{}))
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
	start, end uint32
	seq        uint64 // of the event
	key        uint64 // the hash of the key; 0 for none
	stale      bool   // a newer frame has the key; kept up once newest is
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
	most   int    // size of the largest chunk for more than one frame
	before uint64 // the sequence of the last event before the oldest frame
	head   uint64 // the sequence of the newest event
	ended  bool
	// newest is the number of the newest frame of each key that the ring has; nil until somebody
	// wants conflated frames.
	newest map[uint64]uint64
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
	most := min(max(maxBytes/leastChunks, 1), lastChunk)
	return &ring{maxFrames: maxFrames, maxBytes: maxBytes, memory: m, before: head, head: head, grown: min(firstChunk, most), most: most}
}

// append adds a copy of a frame, and drops the oldest frames that there is no room for.
func (r *ring) append(message []byte, seq uint64, key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	switch have := int(r.next - r.first); { //nolint:gosec // at most maxFrames
	case have >= r.maxFrames || have > 0 && have == len(r.frames) && !r.memory.take(have*frameSize, false):
		r.dropLocked()
	case have == 0 && len(r.frames) == 0:
		r.memory.take(firstFrames*frameSize, true)
		r.frames = make([]frame, firstFrames)
	case have == len(r.frames):
		r.widenLocked()
	}
	in := r.roomLocked(len(message))
	f := frame{in: in, start: uint32(len(in.buf)), seq: seq} //nolint:gosec // messages are far smaller
	in.buf = append(in.buf, message...)
	f.end = uint32(len(in.buf)) //nolint:gosec // messages are far smaller
	if key != "" {
		f.key = maphash.String(keySeed, key) | 1
	}
	in.frames++
	*r.at(r.next) = f
	if r.newest != nil {
		r.noteLocked(r.next)
	}
	r.next++
	r.head = seq
}

// at is the place of a frame in the circle.
func (r *ring) at(n uint64) *frame { return &r.frames[n&uint64(len(r.frames)-1)] } //nolint:gosec // not negative

// widenLocked doubles the list of frames.
func (r *ring) widenLocked() {
	wider := make([]frame, 2*len(r.frames))
	for n := r.first; n < r.next; n++ {
		wider[n&uint64(len(wider)-1)] = *r.at(n) //nolint:gosec // not negative
	}
	r.frames = wider
}

// noteLocked notes that a frame is the newest of its key.
func (r *ring) noteLocked(n uint64) {
	key := r.at(n).key
	if key == 0 {
		return
	}
	if before, ok := r.newest[key]; ok {
		r.at(before).stale = true
	}
	r.newest[key] = n
}

// forgetLocked forgets the oldest frame.
func (r *ring) forgetLocked() {
	f := r.at(r.first)
	f.in.frames--
	r.before = f.seq
	if f.key != 0 && !f.stale {
		delete(r.newest, f.key)
	}
	*f = frame{}
	r.first++
}

// dropLocked drops the oldest frame.
func (r *ring) dropLocked() {
	r.forgetLocked()
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
		for oldest := r.chunks[0]; oldest.frames > 0; {
			r.forgetLocked()
		}
		r.freeLocked()
	}
	if len(r.chunks) == 0 {
		r.memory.take(want, true)
	}
	c := &chunk{buf: make([]byte, 0, want)}
	r.chunks = append(r.chunks, c)
	r.bytes += want
	r.grown = min(2*r.grown, r.most)
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
		if f.in != in || int(f.end-start) > limit {
			break
		}
		end = f.end
		b.next, b.last = b.next+1, f.seq
	}
	b.frames, b.more = in.buf[start:end:end], b.next < r.next
	return b, true
}

// conflated is read without the frames that a newer one of the same key follows. It appends the
// frames to dst.
func (r *ring) conflated(from uint64, limit int, dst []byte) (b batch, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from < r.first {
		return batch{}, false
	}
	if r.newest == nil {
		r.newest = make(map[uint64]uint64)
		for n := r.first; n < r.next; n++ {
			r.noteLocked(n)
		}
	}
	start := len(dst)
	b.next, b.last = from, r.head
	for ; b.next < r.next && len(dst)-start < limit; b.next++ {
		f := r.at(b.next)
		b.last = f.seq
		if !f.stale {
			dst = append(dst, f.in.buf[f.start:f.end]...)
		}
	}
	b.frames, b.more = dst, b.next < r.next
	return b, true
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
	r.memory.give(r.bytes + len(r.frames)*frameSize)
	r.chunks, r.frames, r.newest, r.bytes, r.first, r.before = nil, nil, nil, 0, r.next, r.head
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
