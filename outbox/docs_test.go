package outbox_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// sample is the SQL of docs/outbox.md below a heading.
func sample(t *testing.T, heading string) string {
	t.Helper()
	text, err := os.ReadFile("../docs/outbox.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n### "+heading+"\n")
	_, rest, begun := strings.Cut(rest, "```sql\n")
	code, _, ended := strings.Cut(rest, "```")
	if !found || !begun || !ended {
		t.Fatalf("docs/outbox.md has no SQL below %s", heading)
	}
	return code
}

// What the documentation prints adds events, with ids where it gives none.
func TestSamplesOfTheDocumentation(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	for heading, dialect := range map[string]outbox.Dialect{"SQLite": outbox.SQLite, "PostgreSQL": outbox.PostgreSQL} {
		t.Run(heading, func(t *testing.T) {
			cfg := outbox.SQLConfig{Dialect: dialect}
			if dialect == outbox.SQLite {
				_, cfg.DB = newSQLite(t)
			} else {
				cfg.DB = openDB(t, "pgx", address+"&default_query_exec_mode=simple_protocol")
			}
			s := sqlStore(t, cfg)
			exec := func(query string) {
				t.Helper()
				if _, err := cfg.DB.ExecContext(t.Context(), query); err != nil {
					t.Fatal(err)
				}
			}
			exec("CREATE TABLE orders (number INTEGER, customer INTEGER)")
			began := time.Now().Add(-time.Minute)
			code := sample(t, heading)
			exec(code)
			exec(strings.ReplaceAll(code, "order-1-mail", "order-2-mail"))
			bus := openBus(t, jetstream.Config{})
			r := newRig(t, sqlHarness(s, cfg.DB), bus)
			if did := r.drain(nil); did.Published != 4 || did.Parked+did.Failed > 0 {
				t.Fatalf("got %+v, want 4 published", did)
			}
			events := func(topic string) (list []*jetstream.Event) {
				t.Helper()
				if err := bus.History(topic).Scan(t.Context(), jetstream.ScanOptions{}, func(e *jetstream.Event) error { list = append(list, e); return nil }); err != nil {
					t.Fatal(err)
				}
				return list
			}
			placed := events("orders.placed")
			if len(placed) != 2 || placed[0].ID == placed[1].ID {
				t.Fatalf("placed are %+v", placed)
			}
			for _, e := range placed {
				id, err := uuid.Parse(e.ID)
				if err != nil || id.Version() != 7 || id.Variant() != uuid.RFC4122 {
					t.Errorf("id %q: %v; want a UUIDv7", e.ID, err)
				}
				if sec, nsec := id.Time().UnixTime(); time.Unix(sec, nsec).Before(began) || time.Unix(sec, nsec).After(time.Now().Add(time.Minute)) {
					t.Errorf("id %s is of %v", e.ID, time.Unix(sec, nsec))
				}
				if e.Key != "customer:7" || strings.ReplaceAll(string(e.Payload), " ", "") != `{"order":1,"customer":7}` || e.TS < began.UnixMilli() {
					t.Errorf("got %+v", e)
				}
			}
			mails := events("mails")
			if len(mails) != 2 {
				t.Fatalf("mails are %+v", mails)
			}
			e := mails[0]
			if !strings.HasSuffix(e.ID, "-mail") || mails[1].ID == e.ID || e.Key != "" || string(e.Payload) != `{"order":1}` || e.Headers["type"] != "OrderPlaced" || e.Headers["x-tenant"] != "7" ||
				e.SID != "shop" || len(e.Tags) != 1 || len(e.CausedBy) != 1 || e.TS != 1795199112223 {
				t.Errorf("got %+v", e)
			}
		})
	}
}
