package broadcast

import (
	"bytes"
	"math/rand/v2"
	"strconv"
	"testing"
)

// A random run of appends and reads gives each reader what a list of all frames has, as long as the
// ring has it, and the ring stays within its bounds.
func TestRing(t *testing.T) {
	t.Parallel()
	const maxFrames, maxBytes, all = 512, 640 << 10, 800 << 10
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // a test
		m := &memory{left: all}
		r := newRing(maxFrames, maxBytes, m, 0)
		var frames [][]byte // all that were appended
		var at uint64       // of a reader
		for range 2_000 {
			if random.IntN(3) > 0 {
				seq := uint64(len(frames)) + 1
				f := append([]byte(strconv.FormatUint(seq, 10)+":"), bytes.Repeat([]byte{'x'}, random.IntN(3_000))...)
				frames = append(frames, f)
				r.append(f, 0, seq, "")
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
			if n := r.next - r.first; n > maxFrames || len(frames) > 0 && n == 0 || r.bytes > maxBytes || m.left != all-r.bytes {
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
		r.append([]byte(strconv.Itoa(i)), 0, uint64(i)+1, key)
	}
	for from, want := range map[uint64]string{0: "13456", 3: "3456", 6: "6", 7: ""} {
		_, b, ok := r.conflated(from, 1<<10, nil, make(map[uint64]uint64))
		if !ok || string(b.frames) != want || b.next != 7 || b.more {
			t.Errorf("from %d: %q, want %q", from, b.frames, want)
		}
	}
}
