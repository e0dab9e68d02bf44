package records

import "testing"

// Two hubs note gaps in the book of their group.
func TestBookOfAGroupThatIsNumberedAgain(t *testing.T) {
	t.Parallel()
	var book LossBook
	for _, c := range []struct {
		why         string
		after       uint64
		order, seq  uint64
		lost, newly uint64
	}{
		{"16 to 29 are gone", 15, 16, 30, 14, 14},
		{"31 went to the other hub", 15, 18, 40, 22, 8},
		{"a leader that knows up to 14 numbers again", 30, 15, 50, 19, 9},
		{"nothing is gone since", 40, 16, 51, 10, 0},
		{"52 is gone", 51, 17, 53, 1, 1},
	} {
		w := Gap{After: c.after, Order: c.order, Seq: c.seq, Lost: c.lost}
		n, _ := book.newly(w, w.Seq)
		if n != c.newly {
			t.Errorf("%s: %d are newly lost, want %d", c.why, n, c.newly)
		}
		if n > 0 {
			book.add(w, n)
		}
	}
}
