//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/ops"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
	"eventhub/sdk/go/wire"
)

// Claims that fail again and again, on a database that answers all else, show in the readiness
// probe and in a metric.
func TestClaimsThatFailAreShown(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Start(t)
	call(t, "outbox", "migrate", "--dsn="+dsn)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	exec := func(query string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	n := startNode(t, "--outbox-dsn="+dsn)
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"ok"`)
	exec("ALTER TABLE outbox RENAME COLUMN next_at TO later")
	exec("INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ('one', 'orders', 'k', '1')")
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"waiting for its database"`)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_outbox_waiting{outbox="database"} 1`)
	eventually(t, "claims that failed are counted", func() bool {
		return metricsOf(t, n)[`eventhub_outbox_claim_failures_total{outbox="database"}`] > 0
	})
	exec("ALTER TABLE outbox RENAME COLUMN later TO next_at")
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"ok"`)
	if e := subscribeTo(t, n.dial(), "orders", "g", wire.SubscribeOptions{From: "earliest"}).next(); e.ID != "one" {
		t.Errorf("event %q came, want one", e.ID)
	}
	n.terminate()
}

// unclaimable is a store whose claims fail, and nothing else.
type unclaimable struct{ outbox.Store }

func (unclaimable) Claim(context.Context, outbox.ClaimOptions) (outbox.Claim, error) {
	return outbox.Claim{}, errors.New("more than one row returned by a subquery")
}

func (unclaimable) RequeueExpired(context.Context) (int, error) { return 0, nil }

// What else succeeds meanwhile does not hide that claims fail.
func TestClaimsThatFailAreNotHidden(t *testing.T) {
	t.Parallel()
	h := &hub{log: slog.New(slog.DiscardHandler), metrics: ops.NewMetrics(prometheus.NewRegistry())}
	s := watchedStore{unclaimable{}, h.newOutboxState("test")}
	if _, err := s.Claim(t.Context(), outbox.ClaimOptions{}); err == nil {
		t.Fatal("it was claimed")
	}
	if _, err := s.RequeueExpired(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.state.String(); got == ops.PartOK {
		t.Errorf("the outbox is %s while no claim succeeds", got)
	}
}
