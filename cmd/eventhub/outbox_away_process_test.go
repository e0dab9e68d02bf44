//go:build unix

package main

import (
	"database/sql"
	"io"
	"math"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/outbox/pgtest"
	"eventhub/sdk/go/wire"
)

// get returns the status and the body of a page.
func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}

// noticed bounds how long a hub may take to say how it is.
const noticed = time.Minute

// shows waits until a page answers with a status and has a text.
func shows(t *testing.T, url string, status int, text string) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(noticed)
	for {
		got, body := get(t, url)
		if got == status && strings.Contains(body, text) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s does not answer %d %q within %v, but %d:\n%s", url, status, text, noticed, got, body)
		}
	}
}

// A hub starts while the database of OUTBOX_DSN is away, serves everybody, says what waits, and
// publishes when the database comes. The same holds when the database goes and comes again.
func TestHubStartsWithoutTheDatabaseOfItsOutbox(t *testing.T) {
	t.Parallel()
	cluster := pgtest.StartDurable(t)
	call(t, "outbox", "migrate", "--dsn="+cluster.DSN())
	db, err := sql.Open("pgx", cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	add := func(id string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ('"+id+"', 'orders', 'k', '1')"); err != nil {
			t.Fatal(err)
		}
	}
	restart := func() {
		t.Helper()
		if err := cluster.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	add("one")
	if err := cluster.Kill(); err != nil {
		t.Fatal(err)
	}

	n := startNode(t, "--outbox-dsn="+cluster.DSN())
	c := n.dial()
	publishTo(t, c, "others", `"served"`)
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"waiting for its database"`)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_outbox_waiting{outbox="database"} 1`)
	const said = "outbox database is unavailable; retrying"
	if log := n.log.String(); strings.Count(log, said) != 1 || !strings.Contains(log, "connection refused") {
		t.Errorf("the log does not say once that the outbox waits, and why:\n%s", log)
	}

	restart()
	events := subscribeTo(t, c, "orders", "g", wire.SubscribeOptions{From: "earliest"})
	wants := func(id string) {
		t.Helper()
		if e := events.next(); e.ID != id {
			t.Errorf("event %q came, want %q", e.ID, id)
		}
	}
	wants("one")
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"ok"`)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_outbox_waiting{outbox="database"} 0`)

	if err := cluster.Kill(); err != nil {
		t.Fatal(err)
	}
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"waiting for its database"`)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_outbox_waiting{outbox="database"} 1`)
	restart()
	eventually(t, "the database takes rows", func() bool { return db.PingContext(t.Context()) == nil })
	add("two")
	wants("two")
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"ok"`)
	n.terminate()
}

// A database that takes connections and never answers holds up neither the start of a hub nor its
// end.
func TestDatabaseOfTheOutboxThatNeverAnswers(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	began := time.Now()
	n := startNode(t, "--outbox-dsn=postgres://user:secret@"+silent.Addr().String()+"/db")
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("the hub took %v to start", took)
	}
	publishTo(t, n.dial(), "others", `"served"`)
	shows(t, n.ops+"/readyz", http.StatusOK, `"outbox":"waiting for its database"`)
	n.terminate()
	if log := n.log.String(); !strings.Contains(log, "outbox database does not answer") || strings.Contains(log, "secret") {
		t.Errorf("the log does not say that the database is silent, or says too much:\n%s", log)
	}
}

// A hub measures how far the clock of the database is from that of NATS, and warns when that is
// more than is allowed.
func TestHubSaysThatClocksAreApart(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Start(t)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for _, query := range []string{
		"CREATE SCHEMA ahead", // a function of the test takes the place of PostgreSQL's
		"CREATE FUNCTION ahead.statement_timestamp() RETURNS TIMESTAMPTZ STABLE LANGUAGE SQL AS $$ SELECT pg_catalog.statement_timestamp() + INTERVAL '1 hour' $$",
	} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	flag := "--outbox-dsn=" + dsn + "&search_path=ahead,pg_catalog,public"
	warning := regexp.MustCompile(`clock skew between the outbox and NATS exceeds.* nats_ahead=-(1h0m0|59m59)[^ ]* allowed=1m0s`)
	for _, test := range []struct {
		flags []string
		warns bool
	}{{nil, true}, {[]string{"--outbox-clock-skew=61m"}, false}} {
		n := startNode(t, append(test.flags, flag)...)
		var skew float64
		eventually(t, "the skew is measured", func() bool {
			_, body := get(t, n.ops+"/metrics")
			_, rest, _ := strings.Cut(body, `eventhub_outbox_clock_skew_seconds{outbox="database"} `)
			line, _, _ := strings.Cut(rest, "\n")
			skew, _ = strconv.ParseFloat(line, 64)
			return skew != 0
		})
		if math.Abs(skew+3_600) > 10 {
			t.Errorf("%q: the clocks are said to be %v s apart", test.flags, skew)
		}
		n.terminate()
		if log := n.log.String(); warning.MatchString(log) != test.warns {
			t.Errorf("%q: the log warns, or does not:\n%s", test.flags, log)
		}
	}
}
