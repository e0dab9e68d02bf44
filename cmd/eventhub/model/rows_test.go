//go:build unix

package model

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"time"

	"eventhub/outbox"
)

// rows is a service with an outbox, which the hubs of the rig drain. Its rows have few keys, and
// some of its transactions are rolled back.
type rows struct {
	rig   *rig
	count *counters
	db    *sql.DB
	store *outbox.SQLStore
}

// openRows makes the table.
func openRows(r *rig, count *counters, path string) *rows {
	r.Helper()
	db, err := sql.Open("sqlite", sqliteAddress(path))
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = db.Close() })
	w := &rows{rig: r, count: count, db: db}
	if w.store, err = outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, DB: db}); err != nil {
		r.Fatal(err)
	}
	if _, err := w.store.Migrate(r.Context()); err != nil {
		r.Fatal(err)
	}
	return w
}

func rowsPath(r *rig) string { return filepath.Join(r.TempDir(), "outbox.db") }

// run adds rows until ctx ends.
func (w *rows) run(ctx context.Context, rnd *rand.Rand) {
	for ctx.Err() == nil {
		wait(ctx, time.Duration(10+rnd.IntN(90))*time.Millisecond)
		w.transaction(rnd)
	}
}

// transaction adds one to three rows. A hub that is frozen may hold the lock for as long as that.
func (w *rows) transaction(rnd *rand.Rand) {
	ctx, cancel := context.WithTimeout(w.rig.Context(), patience)
	defer cancel()
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return
	}
	defer func() { _ = tx.Rollback() }()
	var added []string
	for range 1 + rnd.IntN(3) {
		n := w.count.payloads.Add(1)
		r := &outbox.Record{ID: fmt.Sprintf("row-%d", n), Topic: w.rig.plan.topics[rnd.IntN(len(w.rig.plan.topics))], Payload: fmt.Appendf(nil, `{"n":%d}`, n)}
		if k := rnd.IntN(4); k > 0 {
			r.Key = "row:" + strconv.Itoa(k)
		}
		if err := w.store.Add(ctx, tx, r); err != nil {
			break
		}
		w.rig.rec.add(0, kindRow, asJSON(row{ID: r.ID, Topic: r.Topic, Key: r.Key, Payload: r.Payload}))
		added = append(added, r.ID)
	}
	fate := "commit"
	if rnd.IntN(6) == 0 {
		fate = "rollback"
		err = tx.Rollback()
	} else {
		err = tx.Commit()
	}
	if err != nil {
		return // nobody knows
	}
	for _, id := range added {
		w.rig.rec.add(0, kindDone, id+" "+fate)
	}
}

// empty waits until all rows are sent.
func (w *rows) empty() {
	w.rig.Helper()
	done := w.rig.within(patience, func(ctx context.Context) bool {
		s, err := w.store.Stats(ctx)
		return err == nil && s.Pending+s.Claimed == 0
	})
	if !done {
		w.rig.rec.add(0, kindNote, "the outbox is not empty") // its rule says more
	}
}
