package outbox_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox/pgtest"
)

// A transaction that holds a lock on a row while the row is published, such as one that is about to
// delete the row, does not hold up other topics.
func TestLockedRowHoldsUpNoOther(t *testing.T) {
	s, db := newPostgres(t, pgtest.Start(t))
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	table := fmt.Sprintf("outbox_test_%d", tables)
	locked := r.add("orders", "k")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	r.bus.set(func(_ context.Context, _ string, o jetstream.PublishOptions) error {
		if o.ID == locked {
			_, err := tx.ExecContext(t.Context(), "SELECT 1 FROM "+table+" WHERE id = '"+locked+"' FOR UPDATE")
			return err
		}
		return nil
	}, nil)
	r.start(nil)
	eventually(t, "the row is published", func() bool { return r.seen.published.Load() == 1 })
	began := time.Now()
	r.add("mails", "k")
	eventually(t, "another topic's row is published", func() bool { return r.seen.published.Load() == 2 })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("a row of another topic waited for %v", took)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	r.empty()
	r.exactly()
}
