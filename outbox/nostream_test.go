package outbox_test

import (
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/outbox"
)

// What nobody can make a stream for is parked with the reason, and not tried for ever: at once
// where the server says that it never will, and after the attempts that every record has where the
// hub knows as many streams as it may.
func TestTopicsWithoutAStreamAreParked(t *testing.T) {
	t.Parallel()
	nats := natstest.Run(t).ClientURL()
	family := openBus(t, jetstream.Config{URL: nats, Topics: []topics.Rule{{Pattern: "taken.**", Family: "taken"}}})
	for _, topic := range []string{"taken.a", "one"} {
		if _, err := family.Publish(t.Context(), topic, []byte("1"), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		topic, reason string
		attempts      int
		limits        jetstream.Limits
	}{
		{"taken.b", "subjects overlap", 1, jetstream.Limits{}},
		{"two", "which is its limit", 3, jetstream.Limits{Topics: 1}},
	} {
		s, db := newSQLite(t)
		bus := openBus(t, jetstream.Config{URL: nats, Limits: c.limits})
		if _, err := bus.Publish(t.Context(), "one", []byte("1"), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
		r := newRig(t, sqlHarness(s, db), bus)
		r.add(c.topic, "")
		r.add(c.topic, "k")
		d := r.start(func(cfg *outbox.Config) { cfg.MaxAttempts, cfg.RetryFirst = 3, time.Millisecond })
		eventually(t, "both are parked", func() bool { return r.stats().Errors == 2 })
		if err := d.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		list, err := s.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if r.Topic != c.topic || r.Attempts != c.attempts || !strings.Contains(r.LastErr, c.reason) {
				t.Errorf("parked is %s after %d attempts: %s", r.Topic, r.Attempts, r.LastErr)
			}
		}
	}
}
