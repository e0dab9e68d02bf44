package broadcast

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
)

// A random run of appends and reads gives each reader what a list of all frames has, as long as the
// ring has it, and the ring stays within its bounds.
func TestRing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		// Every second ring is smaller than a chunk of a large one.
		maxFrames, maxBytes, all := 512, 640<<10, 800<<10
		if seed%2 == 1 {
			maxFrames, maxBytes, all = 100, 60<<10, 70<<10
		}
		random := rand.New(rand.NewPCG(seed, 1))
		m := &memory{left: all}
		r := newRing(maxFrames, maxBytes, m, 0)
		var frames [][]byte // all that were appended
		var at uint64       // of a reader
		for range 2_000 {
			if random.IntN(3) > 0 {
				seq := uint64(len(frames)) + 1
				f := append([]byte(strconv.FormatUint(seq, 10)+":"), bytes.Repeat([]byte{'x'}, random.IntN(3_000))...)
				frames = append(frames, f)
				r.append(f, seq, "")
			} else {
				limit := random.IntN(20_000)
				b, ok := r.read(at, limit)
				if ok != (at >= r.first) {
					t.Fatalf("seed %d: read(%d) is %v, and the oldest frame is %d", seed, at, ok, r.first)
				}
				if !ok {
					if _, covered := r.behind(at); covered {
						t.Fatalf("seed %d: frame %d is gone, and the ring says that it has it", seed, at)
					}
					at = r.first
					continue
				}
				want := bytes.Join(frames[at:b.next], nil)
				if !bytes.Equal(b.frames, want) || b.last != b.next || b.more != (b.next < uint64(len(frames))) {
					t.Fatalf("seed %d: read(%d) has %d bytes to %d, want %d", seed, at, len(b.frames), b.next, len(want))
				}
				if b.next > at+1 && len(b.frames) > limit || b.next == at && at < uint64(len(frames)) {
					t.Fatalf("seed %d: read(%d) with the limit %d has %d bytes", seed, at, limit, len(b.frames))
				}
				at = b.next
			}
			n := int(r.next - r.first)
			if n > maxFrames || len(frames) > 0 && n == 0 || r.bytes > maxBytes || m.left != all-r.bytes-len(r.frames)*frameSize || m.left < 0 {
				t.Fatalf("seed %d: the ring has %d frames and %d bytes, %d are left", seed, n, r.bytes, m.left)
			}
		}
		if b, ok := r.read(r.next, 1); !ok || len(b.frames) > 0 || b.more {
			t.Errorf("seed %d: behind the end is %d bytes", seed, len(b.frames))
		}
		if r.end(); m.left != all {
			t.Errorf("seed %d: the end keeps %d bytes", seed, all-m.left)
		}
	}
}

// Only the newest frame of a key is left, and frames without a key stay.
func TestRingConflates(t *testing.T) {
	t.Parallel()
	r := newRing(64, 1<<20, &memory{left: 1 << 20}, 0)
	for i, key := range []string{"a", "", "b", "a", "", "b", "c"} {
		r.append([]byte(strconv.Itoa(i)), uint64(i)+1, key)
	}
	for from, want := range map[uint64]string{0: "13456", 3: "3456", 6: "6", 7: ""} {
		b, ok := r.conflated(from, 1<<10, nil)
		if !ok || string(b.frames) != want || b.next != 7 || b.more {
			t.Errorf("from %d: %q, want %q", from, b.frames, want)
		}
	}
}

// In a random run, a reader of conflated frames gets each frame that has no newer one of its key,
// and the ring remembers no more keys than it has frames.
func TestRingConflatesAtRandom(t *testing.T) {
	t.Parallel()
	for seed := range uint64(30) {
		random := rand.New(rand.NewPCG(seed, 2))
		r := newRing(128, 1<<20, &memory{left: 1 << 20}, 0)
		var keys []string
		var at uint64
		for range 3_000 {
			if random.IntN(8) > 0 {
				key := ""
				if n := random.IntN(300); n > 0 {
					key = strconv.Itoa(n * n / 300)
				}
				keys = append(keys, key)
				r.append([]byte{byte(len(keys))}, uint64(len(keys)), key)
				continue
			}
			limit := 1 + random.IntN(100)
			b, ok := r.conflated(at, limit, nil)
			if !ok {
				at = r.first
				continue
			}
			var want []byte
			next := at
			for ; next < r.next && len(want) < limit; next++ {
				if key := keys[next]; key == "" || !slices.Contains(keys[next+1:], key) {
					want = append(want, byte(next+1))
				}
			}
			if !bytes.Equal(b.frames, want) || b.next != next || b.more != (next < r.next) {
				t.Fatalf("seed %d: from %d came %v to %d, want %v to %d", seed, at, b.frames, b.next, want, next)
			}
			at = b.next
		}
		if len(r.newest) == 0 || uint64(len(r.newest)) > r.next-r.first {
			t.Errorf("seed %d: %d keys of %d frames", seed, len(r.newest), r.next-r.first)
		}
	}
}

// A frame that is larger than the ring is kept alone.
func TestRingKeepsALargeFrame(t *testing.T) {
	t.Parallel()
	m := &memory{left: 1 << 20}
	r := newRing(64, 4<<10, m, 0)
	for i, size := range []int{100, 100_000, 100} {
		r.append(make([]byte, size), uint64(i)+1, "")
		b, ok := r.read(r.next-1, 1)
		if !ok || len(b.frames) != size {
			t.Errorf("%d bytes of %d", len(b.frames), size)
		}
		if r.bytes > max(4<<10, size) {
			t.Errorf("the ring has %d bytes for a frame of %d", r.bytes, size)
		}
	}
}
