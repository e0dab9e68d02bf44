package wire

import (
	"slices"
	"testing"
)

func TestAckManyIsOneFrame(t *testing.T) {
	ids := []string{"a", `q"uoted`, "ž"}
	got := make(chan sent, 1)
	c := connect(t, Options{}, func(h *hub) {
		h.ok(h.next()) // SUBSCRIBE
		got <- h.next()
		drain(h)
	})
	sub, err := c.Subscribe(t.Context(), "t", "g", SubscribeOptions{}, func(Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.AckMany(ids); err != nil {
		t.Fatal(err)
	}
	f := <-got
	if f.Op != "ACK" || f.Topic != "t" || f.Corr != "" || !slices.Equal(f.IDs, ids) {
		t.Errorf("frame %+v", f)
	}
}
