package outbox_test

import (
	"testing"

	"eventhub/jetstream"
)

// A row of SQLite whose topic or id contains a NUL, at which SQL text functions stop, is parked.
// It does not keep other topics from being published.
func TestNULInNamesOfSQLite(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]string{
		"topic":           "'i', 'orders' || char(0) || 'x', 'k'",
		"topic, no key":   "'i', 'orders' || char(0) || 'x', ''",
		"topic and slash": "'i', 'orders' || char(0) || '/x', 'k'",
		"id":              "'id-000001' || char(0) || 'x', 'orders', 'k'",
		"id, no key":      "'id-000001' || char(0) || 'x', 'orders', ''",
	} {
		t.Run(name, func(t *testing.T) {
			s, db := newSQLite(t)
			r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ("+row+", '1')"); err != nil {
				t.Fatal(err)
			}
			for _, topic := range []string{"a", "orders", "orders.late", "orders-x", "z"} {
				r.add(topic, "")
				r.add(topic, "key")
			}
			if did := r.drain(nil); did.Published != 10 || did.Parked != 1 {
				t.Errorf("got %+v, want 10 published and 1 parked", did)
			}
			if st := r.stats(); st.Pending+st.Claimed > 0 || st.Errors != 1 {
				t.Errorf("left are %+v", st)
			}
			r.exactly()
		})
	}
}
