package outbox_test

import (
	"fmt"
	"testing"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// A row that the database refuses to settle, for example because of a user's trigger, affects only
// its own lane.
func TestLaneThatCannotBeSettled(t *testing.T) {
	forSQL(t, func(t *sqlTest) {
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		statements := []string{"CREATE TRIGGER refuse BEFORE UPDATE ON " + t.table + " WHEN NEW.id = 'bad' AND NEW.status = 'sent' BEGIN SELECT RAISE(ABORT, 'not this one'); END"}
		allow := "DROP TRIGGER refuse"
		if t.dialect == outbox.PostgreSQL {
			statements = []string{
				"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$",
				"CREATE TRIGGER refuse BEFORE UPDATE ON " + t.table + " FOR EACH ROW WHEN (NEW.id = 'bad' AND NEW.status = 'sent') EXECUTE FUNCTION refuse()",
			}
			allow = "DROP FUNCTION refuse CASCADE"
		}
		for _, q := range append(statements, "INSERT INTO "+t.table+" (id, aggregatetype, aggregateid, payload) VALUES ('bad', 'orders', 'b', '1')") {
			if _, err := t.db.ExecContext(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		r.added["orders/b"] = []string{"bad"}
		for i := range 30 {
			r.add("orders", fmt.Sprint("c", i%3))
			r.add("mails", "")
		}
		r.start(nil)
		eventually(t, "all others are settled", func() bool { return r.left() == 1 })
		r.add("mails", "k")
		eventually(t, "another is published", func() bool { return r.seen.published.Load() >= 62 })
		eventually(t, "others that come later, too", func() bool { return r.left() == 1 })
		if _, err := t.db.ExecContext(t.Context(), allow); err != nil {
			t.Fatal(err)
		}
		r.empty()
		r.exactly()
	})
}
