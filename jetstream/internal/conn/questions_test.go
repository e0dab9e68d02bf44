package conn

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestQuestionsAgainstAMap compares with the obvious form: numbers that were answered, or were
// never given, find nobody.
func TestQuestionsAgainstAMap(t *testing.T) {
	t.Parallel()
	type waits struct {
		who      Asker
		deadline int64
	}
	var q questions
	model := map[uint64]waits{}
	var given []uint64
	r := rand.New(rand.NewPCG(1, 2))
	for now := range int64(20_000) {
		switch k := r.IntN(100); {
		case k < 50 && len(model) < 500:
			var w waits
			w.who, w.deadline = &sentinel{now}, now+r.Int64N(2000)
			n := q.add(w.who, w.deadline)
			if _, twice := model[n]; twice {
				t.Fatal("a number was given twice")
			}
			model[n] = w
			given = append(given, n)
		case k < 99 && len(given) > 0:
			n := given[r.IntN(len(given))]
			if got := q.take(n); got != model[n].who {
				t.Fatalf("number %d: got %v, want %v", n, got, model[n].who)
			}
			delete(model, n)
		default:
			for _, who := range q.takeUntil(now) {
				for n, w := range model {
					if w.who == who && w.deadline <= now {
						delete(model, n)
					}
				}
			}
			for _, w := range model {
				if w.deadline <= now {
					t.Fatal("a late one was left")
				}
			}
		}
		if q.waiting() != len(model) {
			t.Fatalf("%d wait, want %d", q.waiting(), len(model))
		}
	}
	if len(q.entries) > 500 {
		t.Errorf("%d places for 500 questions", len(q.entries))
	}
	if q.take(math.MaxUint64) != nil || q.take(0) != nil {
		t.Error("a number that was never given found somebody")
	}
}

type sentinel struct{ int64 }

func (*sentinel) Answer(*nats.Msg, error) {}
