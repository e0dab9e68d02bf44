package outbox_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// A transaction that holds a lock on a row while the row is published, such as one that is about to
// delete the row, does not hold up other topics.
func TestLockedRowHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	s, db := newPostgres(t, pgtest.Start(t))
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	table := tableOf(db)
	began := time.Now()
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
	usual := time.Since(began) // from before the drainer's start
	began = time.Now()
	r.add("mails", "k")
	eventually(t, "another topic's row is published", func() bool { return r.seen.published.Load() == 2 })
	if took := time.Since(began); took > 5*time.Second+10*usual {
		t.Errorf("a row of another topic waited for %v", took)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	r.empty()
	if took := time.Since(began); took > 15*time.Second+10*usual {
		t.Errorf("the row was settled %v after it was unlocked, want less than a lease", took)
	}
	r.exactly()
}

// Settling and renewing skip locked rows and name them. The rows are settled once they are
// unlocked.
func TestLockedRowsAreSettledLater(t *testing.T) {
	t.Parallel()
	s, db := newPostgres(t, pgtest.Start(t))
	table := tableOf(db)
	// three to settle as sent and three as failed: locked, not locked, and deleted by the other
	const rows = 6
	for i := range rows {
		if err := s.Add(t.Context(), db, &outbox.Record{ID: fmt.Sprint("id-", i), Topic: "orders", Key: strconv.Itoa(i)}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := s.Claim(t.Context(), outbox.ClaimOptions{Worker: "w", Limit: rows, Lease: time.Hour})
	if err != nil || len(c.Records) != rows {
		t.Fatalf("claimed %d, %v", len(c.Records), err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	for _, q := range []string{"SELECT 1 FROM " + table + " WHERE id IN ('id-0', 'id-3') FOR UPDATE", "DELETE FROM " + table + " WHERE id IN ('id-2', 'id-5')"} {
		if _, err := tx.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	lost, err := s.Renew(ctx, "w", time.Hour, c.Records)
	if slices.Sort(lost); err != nil || !slices.Equal(lost, []string{"id-0", "id-2", "id-3", "id-5"}) {
		t.Errorf("not renewed are %q, %v", lost, err)
	}
	st := outbox.Settlement{Sent: c.Records[:3]}
	for _, r := range c.Records[3:] {
		st.Failed = append(st.Failed, outbox.Failure{Record: r, Counts: true, Err: "no"})
	}
	want := func(what string, left outbox.Unsettled, err error, sent, failed []*outbox.Record) {
		t.Helper()
		var got []*outbox.Record
		for _, f := range left.Locked.Failed {
			got = append(got, f.Record)
		}
		if err != nil || !slices.Equal(left.Locked.Sent, sent) || !slices.Equal(got, failed) || len(left.Failed) > 0 {
			t.Errorf("%s: left are %+v, %v", what, left, err)
		}
	}
	left, err := s.Settle(ctx, "w", st)
	want("while they are locked", left, err, []*outbox.Record{c.Records[0], c.Records[2]}, []*outbox.Record{c.Records[3], c.Records[5]})
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	left, err = s.Settle(ctx, "w", left.Locked)
	want("after that", left, err, nil, nil)
	list, err := s.List(ctx, outbox.ListOptions{Status: outbox.Pending})
	if err != nil || len(list) != 2 || list[0].ID != "id-3" || list[0].Attempts != 1 || list[1].ID != "id-4" || list[1].Attempts != 1 {
		t.Errorf("pending are %+v, %v", list, err)
	}
	if list, err = s.List(ctx, outbox.ListOptions{Status: outbox.Sent}); err != nil || len(list) != 2 {
		t.Errorf("sent are %+v, %v", list, err)
	}
}
