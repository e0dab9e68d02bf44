package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"

	"eventhub/outbox"
)

// The hub's own outbox remembers the principal of each unsent record, and what the unsent records
// of each principal take, in two tables beside that of the records. Triggers keep both right
// whatever program changes a record. A sent record is kept for its id; its content is dropped
// unless it is small.

// ownOutboxOverhead is what a record takes besides its text, in bytes.
const ownOutboxOverhead = 512

// nobodyKnown stands for the principals of records that a hub of an earlier version stored. No key
// of a principal is the same.
const nobodyKnown = "unknown"

// ownOutboxTables creates the tables and triggers. The principal ” stands for all.
var ownOutboxTables = []string{
	`CREATE TABLE IF NOT EXISTS outbox_posts (seq INTEGER PRIMARY KEY, principal TEXT NOT NULL, bytes INTEGER NOT NULL) STRICT`,
	`CREATE TABLE IF NOT EXISTS outbox_usage (principal TEXT PRIMARY KEY, records INTEGER NOT NULL, bytes INTEGER NOT NULL, parked INTEGER NOT NULL DEFAULT 0) STRICT, WITHOUT ROWID`,
	`INSERT OR IGNORE INTO outbox_usage (principal, records, bytes) VALUES ('', 0, 0)`,
	`CREATE TRIGGER IF NOT EXISTS outbox_posts_added AFTER INSERT ON outbox_posts BEGIN
  INSERT INTO outbox_usage (principal, records, bytes) VALUES (NEW.principal, 1, NEW.bytes), ('', 1, NEW.bytes)
    ON CONFLICT (principal) DO UPDATE SET records = records + 1, bytes = bytes + excluded.bytes;
END`,
	`CREATE TRIGGER IF NOT EXISTS outbox_posts_gone AFTER DELETE ON outbox_posts BEGIN
  UPDATE outbox_usage SET records = records - 1, bytes = bytes - OLD.bytes WHERE principal IN (OLD.principal, '');
  DELETE FROM outbox_usage WHERE principal = OLD.principal AND records = 0;
END`,
	`CREATE TRIGGER IF NOT EXISTS outbox_post_sent AFTER UPDATE OF status ON outbox WHEN NEW.status = 'sent' AND OLD.status <> 'sent' BEGIN
  DELETE FROM outbox_posts WHERE seq = NEW.seq;
  UPDATE outbox SET payload = 'null', headers = '', attributes = ''
    WHERE seq = NEW.seq AND octet_length(payload) + octet_length(headers) + octet_length(attributes) > 512;
END`,
	`CREATE TRIGGER IF NOT EXISTS outbox_post_parked AFTER UPDATE OF status ON outbox WHEN (NEW.status = 'error') <> (OLD.status = 'error') BEGIN
  UPDATE outbox_usage SET parked = parked + (NEW.status = 'error') - (OLD.status = 'error') WHERE principal = '';
END`,
	`CREATE TRIGGER IF NOT EXISTS outbox_post_purged AFTER DELETE ON outbox BEGIN
  DELETE FROM outbox_posts WHERE seq = OLD.seq;
  UPDATE outbox_usage SET parked = parked - 1 WHERE principal = '' AND OLD.status = 'error';
END`,
	// of a hub of an earlier version
	fmt.Sprintf(`INSERT INTO outbox_posts (seq, principal, bytes)
SELECT o.seq, '%s', octet_length(o.payload) + octet_length(o.headers) + octet_length(o.attributes) + %d FROM outbox o
WHERE o.status <> 'sent' AND NOT EXISTS (SELECT 1 FROM outbox_posts p WHERE p.seq = o.seq)`, nobodyKnown, ownOutboxOverhead),
	`UPDATE outbox_usage SET parked = (SELECT COUNT(*) FROM outbox o WHERE o.status <> 'sent' AND o.status = 'error') WHERE principal = ''`,
}

// makeUsage creates what is missing of the tables.
func makeUsage(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // no effect after the commit
	for _, statement := range ownOutboxTables {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("create the tables of principals: %w", err)
		}
	}
	return tx.Commit()
}

// usage is what unsent records take.
type usage struct {
	records, bytes int64
	parked         int64 // of all principals
}

// querier is the part of *sql.DB and *sql.Tx that reads a row.
type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// readUsage returns the usage of a principal, or of all if principal is "".
func readUsage(ctx context.Context, db querier, principal string) (u usage, err error) {
	err = db.QueryRowContext(ctx, `SELECT COALESCE(SUM(records), 0), COALESCE(SUM(bytes), 0), COALESCE(SUM(parked), 0) FROM outbox_usage WHERE principal = ?`, principal).
		Scan(&u.records, &u.bytes, &u.parked)
	return u, err
}

// posterOf returns the principal that posted an unsent record.
func posterOf(ctx context.Context, db querier, topic, id string) (principal string, err error) {
	err = db.QueryRowContext(ctx, `SELECT p.principal FROM outbox o JOIN outbox_posts p ON p.seq = o.seq WHERE o.id = ? AND o.aggregatetype = ?`, id, topic).Scan(&principal)
	return principal, err
}

// size returns about how many bytes a record takes in the file.
func size(r *outbox.Record) int64 {
	n := ownOutboxOverhead + len(r.Payload) + len(r.SID)
	for name, value := range r.Headers {
		n += len(name) + len(value)
	}
	for _, list := range [][]string{r.Tags, r.CausedBy} {
		n += len(strings.Join(list, "   ")) // with quotes and commas
	}
	return int64(n)
}

// notePosters stores the principals of records that were just added.
func notePosters(ctx context.Context, tx *sql.Tx, added []*addition) error {
	if len(added) == 0 {
		return nil
	}
	list := make([][4]any, len(added))
	for i, a := range added {
		list[i] = [4]any{a.record.Topic, a.record.ID, a.principal, size(a.record)}
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	res, err := tx.ExecContext(ctx, `INSERT INTO outbox_posts (seq, principal, bytes)
SELECT o.seq, json_extract(j.value, '$[2]'), json_extract(j.value, '$[3]') FROM json_each(?) j
CROSS JOIN outbox o ON o.id = json_extract(j.value, '$[1]') AND o.aggregatetype = json_extract(j.value, '$[0]')`, string(text))
	if err != nil {
		return fmt.Errorf("note who posted: %w", err)
	}
	n, err := res.RowsAffected()
	if err == nil && int(n) != len(added) {
		err = fmt.Errorf("note who posted: %d of %d records were found", n, len(added))
	}
	return err
}

// purgeSent deletes sent records but the newest ones.
func purgeSent(ctx context.Context, db *sql.DB, keep int) error {
	for {
		res, err := db.ExecContext(ctx, `DELETE FROM outbox WHERE seq IN (SELECT o.seq FROM outbox o WHERE o.status = 'sent' ORDER BY o.sent_at DESC LIMIT ? OFFSET ?)`, purgeBatch, keep)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n < purgeBatch {
			return err
		}
	}
}
