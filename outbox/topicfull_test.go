package outbox_test

import (
	"fmt"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/outbox"
)

// A topic that is full takes its records later: they wait, whatever the number of attempts, and
// those of other topics go on.
func TestFullTopicsKeepTheirRecords(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	bus := openBus(t, jetstream.Config{URL: natstest.Run(t).ClientURL(), Topics: []topics.Rule{{Pattern: "strict", MaxMsgs: 3, OnFull: topics.OnFullReject}}})
	got := make(chan *jetstream.Held, 100)
	sub, err := bus.Subscribe(t.Context(), "strict", "slow", jetstream.SubscribeOptions{MaxInFlight: 1}, func(h *jetstream.Held) { got <- h })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Stop(t.Context()) })
	r := newRig(t, sqlHarness(s, db), bus)
	for range 6 {
		r.add("strict", "k")
	}
	r.add("other", "")
	r.start(func(cfg *outbox.Config) { cfg.MaxAttempts, cfg.RetryFirst = 2, time.Millisecond })
	eventually(t, "the others are published", func() bool { st := r.stats(); return st.Pending+st.Claimed == 3 })
	outlast(t, time.Second)
	if st := r.stats(); st.Errors > 0 || st.Pending+st.Claimed != 3 {
		t.Fatalf("while the topic is full: %+v", st)
	}
	for i := range 6 { // the topic does not keep them all
		d, ok := (<-got).Begin()
		if want := fmt.Sprintf("id-%06d", i+1); !ok || d.Event.ID != want || d.Ack() != nil {
			t.Fatalf("got %+v, want %s", d, want)
		}
	}
	r.empty()
}
