package facade

import (
	"crypto/sha256"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream/quota"
)

func TestBucket(t *testing.T) {
	p := newPace(10, 3)
	var b bucket
	now := time.Hour
	for i := range 3 {
		if !b.take(p, now) {
			t.Fatal("refused within the burst", i)
		}
	}
	if b.take(p, now) || b.take(p, now+99*time.Millisecond) || !b.take(p, now+100*time.Millisecond) || b.take(p, now+101*time.Millisecond) {
		t.Fatal("a token comes each 100 ms")
	}
	now += time.Hour
	if wait := b.spend(p, 2, now); wait > 0 {
		t.Fatal(wait)
	}
	if wait := b.spend(p, 5, now); wait != 400*time.Millisecond {
		t.Fatal(wait)
	}
	if b.take(p, now+400*time.Millisecond) || !b.take(p, now+500*time.Millisecond) {
		t.Fatal("what was spent is not paid back")
	}
	var none bucket
	for range 100 {
		if !none.take(newPace(NoLimit, 0), now) || none.spend(newPace(NoLimit, 0), 1000, now) > 0 {
			t.Fatal("there is a limit")
		}
	}
	if limit := newPace(1, 1<<62); limit.burst <= 0 {
		t.Fatal(limit)
	}
}

// someone is a Principal whose name is all there is.
type someone string

func (s someone) Name() string                       { return string(s) }
func (s someone) Key() string                        { return string(s) }
func (s someone) Allows(Action, string, string) bool { return true }
func (s someone) Expires() time.Time                 { return time.Time{} }

func TestBearersAreBoundedAndFresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBearers(10)
		hash := func(i int) [sha256.Size]byte { return sha256.Sum256([]byte(strconv.Itoa(i))) }
		for i := range 100 {
			if full := b.keep(hash(i), someone(strconv.Itoa(i)), time.Now()); full != (i >= 10) {
				t.Fatal(i, full)
			}
			if len(b.known) > 10 {
				t.Fatalf("%d are known", len(b.known))
			}
			if got := b.find(hash(i), time.Now()); got != someone(strconv.Itoa(i)) {
				t.Fatal(got)
			}
		}
		<-time.After(bearerFresh - time.Second)
		if b.find(hash(99), time.Now()) == nil {
			t.Error("forgotten too early")
		}
		<-time.After(time.Second)
		if b.find(hash(99), time.Now()) != nil {
			t.Error("taken without being verified again")
		}
		b.keep(hash(99), nil, time.Now())
		if _, ok := b.known[hash(99)]; ok {
			t.Error("one that was refused is known")
		}
	})
}

func TestHeadcountForgets(t *testing.T) {
	h := headcount{byKey: make(map[string]int)}
	if !h.move("", "a", 1) || h.move("", "a", 1) || !h.move("a", "a", 1) || !h.move("a", "b", 1) || !h.move("", "a", 1) || !h.move("", "a", NoLimit) {
		t.Fatal(h.byKey)
	}
	h.remove("a")
	h.remove("a")
	h.remove("b")
	h.remove("")
	if len(h.byKey) != 0 {
		t.Fatal(h.byKey)
	}
}

func TestPagesThatFindNoPlaceToBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{cfg: Config{Observer: nopObserver{}}, reading: quota.NewPlaces(3, 2)}
		// others have all places but one of mine
		for _, who := range []string{"me", "other", "third"} {
			if !s.reading.Enter(t.Context(), who, principalWaits, func() { t.Error("there was a place") }) {
				t.Fatal("there was no place")
			}
		}
		began := time.Now()
		ask := func() *fault {
			_, _, fail := s.readPage(httptest.NewRequest(http.MethodGet, "/snap/t", nil), "me", "t", &pageQuery{limit: 1})
			return fail
		}
		for range principalWaits - 1 {
			go func() {
				if fail := ask(); fail == nil || fail.code != codeOverloaded || time.Since(began) != callTimeout {
					t.Errorf("got %+v after %v", fail, time.Since(began))
				}
			}()
		}
		synctest.Wait()
		if fail := ask(); fail == nil || fail.code != codeOverloaded || time.Since(began) != 0 {
			t.Errorf("one more: got %+v after %v", fail, time.Since(began))
		}
		time.Sleep(callTimeout)
		synctest.Wait()
		for _, who := range []string{"me", "other", "third"} {
			s.reading.Leave(who)
		}
		if n := s.reading.Names(); n != 0 {
			t.Error(n)
		}
	})
}

func TestShare(t *testing.T) {
	type step struct {
		who      string
		n        int
		ok, mine bool
	}
	for _, c := range []struct {
		all, own int
		steps    []step
	}{
		{10, 6, []step{{"a", 4, true, false}, {"a", 3, false, true}, {"b", 5, false, true}, {"b", 3, true, false}, {"a", 2, false, true}, {"c", 1, true, false}, {"d", 3, false, false}}},
		{10, 10, []step{{"a", 9, true, false}, {"b", 1, true, false}, {"a", 1, false, false}, {"a", 2, false, true}, {"c", 1, false, false}}},
	} {
		s := newShare(c.all, c.own)
		held := make(map[string]int)
		for i, step := range c.steps {
			ok, mine := s.take(step.who, step.n)
			if ok != step.ok || mine != step.mine {
				t.Errorf("%d of %d, step %d: %v, %v", c.own, c.all, i, ok, mine)
			}
			if ok {
				held[step.who] += step.n
			}
		}
		for who, n := range held {
			s.give(who, n)
		}
		if s.used != 0 || len(s.byKey) != 0 {
			t.Error(s.used, s.byKey)
		}
	}
}

// TestShareOfManyPrincipals has principals take all that they get, and give some back from time to
// time.
func TestShareOfManyPrincipals(t *testing.T) {
	const all = 512
	random := rand.New(rand.NewPCG(1, 2))
	for n := 1; n <= 40; n++ {
		s := newShare(all, all/4)
		grab := func() {
			for got := true; got; {
				got = false
				for i := range n {
					ok, _ := s.take(strconv.Itoa(i), 1)
					got = got || ok
				}
			}
		}
		for range 200 {
			grab()
			for i := range n {
				if held := s.byKey[strconv.Itoa(i)]; held > 0 {
					s.give(strconv.Itoa(i), random.IntN(held)+1)
				}
			}
		}
		grab()
		if free := all - s.used; free < all/(n+1)/2 {
			t.Errorf("%d principals left %d of %d", n, free, all)
		}
		if ok, _ := s.take("newcomer", 1); !ok {
			t.Errorf("%d principals left nothing to another", n)
		}
	}
}

func TestBudget(t *testing.T) {
	b := budget{max: 10}
	if !b.take(6) || b.take(5) || !b.take(4) || b.take(1) {
		t.Fatal("it is not held to")
	}
	b.give(6)
	if !b.take(6) || b.take(1) {
		t.Fatal("what was given back is not there")
	}
}
