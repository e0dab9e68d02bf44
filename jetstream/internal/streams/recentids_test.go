package streams

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"eventhub/jetstream/event"
)

// Publishes are confirmed in any order, and others publish meanwhile.
func TestIDsThatAreConfirmedInAnyOrder(t *testing.T) {
	t.Parallel()
	count := newRecentCount(&Config{Limits: Limits{IDsKnown: 3_000}, Obs: event.NopObserver{}})
	rnd := rand.New(rand.NewPCG(3, 4))
	s := &Stream{Recent: &recentIDs{count: count}}
	for round := range 50 {
		first := s.Recent.to + 1 + uint64(rnd.IntN(3))
		order := rnd.Perm(rnd.IntN(1500))
		for _, i := range order {
			if seq := first + uint64(i); rnd.IntN(700) > 0 { // else it is somebody else's
				s.Published(seq, fmt.Sprint("id ", seq))
			}
		}
		r := s.Recent
		for range min(100, r.to) {
			seq := r.from + uint64(rnd.IntN(int(r.to-r.from)+2))
			from, to, seqs := r.Among(fmt.Sprint("id ", seq), 1, r.to)
			if want := seq >= r.from && seq <= r.to; want != (len(seqs) == 1 && seqs[0] == seq) || from < r.from || to > r.to {
				t.Fatalf("round %d: id %d is at %v of %d..%d, and %d..%d is known", round, seq, seqs, from, to, r.from, r.to)
			}
		}
		if n := count.IDs.Load(); n != int64(len(r.seqs)) || n > 3_000 || len(r.ahead) > maxAhead {
			t.Fatalf("round %d: %d ids are counted, %d are kept, %d are beyond a gap", round, n, len(r.seqs), len(r.ahead))
		}
	}
	s.Recent.Drop()
	s.Published(1, "late")
	if n := count.IDs.Load(); n != 0 {
		t.Errorf("%d ids are counted of a stream that is gone", n)
	}
}
