package projections_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	_ "modernc.org/sqlite"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
	"eventhub/projections"
)

// openExample opens a bus with an embedded server of its own, and with rules for topics.
func openExample(rules ...topics.Rule) (bus *jetstream.Bus, end func()) {
	server, err := embedded.Start(context.Background(), embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	bus, err = jetstream.Open(context.Background(), jetstream.Config{Server: server, Topics: rules})
	if err != nil {
		panic(err)
	}
	return bus, func() { _ = bus.Close() }
}

// publish publishes an event with a key.
func publish(bus *jetstream.Bus, topic, key, payload string) {
	if _, err := bus.Publish(context.Background(), topic, []byte(payload), jetstream.PublishOptions{Key: key}); err != nil {
		panic(err)
	}
}

// run runs f in a goroutine. The returned function ends f and waits for it.
func run(f func(context.Context) error) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			panic(err)
		}
	}
}

// until calls f every few milliseconds until f returns true.
func until(f func() bool) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		<-tick.C
	}
}

// A projection keeps the balance of each account up to date with its payments.
func Example() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	balances := projections.Projection{
		Name:  "balances",
		Topic: "payments", Group: "balances",
		From: jetstream.FromEarliest,
		// The state of an account is its balance as text. An event is a payment.
		Apply: func(_ context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
			var payment struct{ Amount int }
			if err := json.Unmarshal(e.Payload, &payment); err != nil {
				return nil, projections.Permanent(err) // the event becomes a dead letter
			}
			balance := 0
			if state != nil {
				var err error
				if balance, err = strconv.Atoi(string(state)); err != nil {
					return nil, err
				}
			}
			return strconv.AppendInt(nil, int64(balance+payment.Amount), 10), nil
		},
	}
	// Any number of processes may run the projection. Each payment counts once.
	stop := run(func(ctx context.Context) error {
		return projections.Run(ctx, projections.JetStream(bus), balances)
	})
	defer stop()

	publish(bus, "payments", "ann", `{"amount": 30}`)
	publish(bus, "payments", "bob", `{"amount": 5}`)
	publish(bus, "payments", "ann", `{"amount": -10}`)

	view, err := projections.OpenView(ctx, projections.JetStream(bus), "balances")
	if err != nil {
		panic(err)
	}
	for account, want := range map[string]string{"ann": "20", "bob": "5"} {
		until(func() bool { // a projection follows its topic within milliseconds
			state, err := view.Get(ctx, account)
			if err != nil {
				panic(err)
			}
			return string(state.Value) == want
		})
		fmt.Println(account, "has", want)
	}
	// Unordered output:
	// ann has 20
	// bob has 5
}

// A mirror holds the newest event of each key of a compacted topic in memory.
func ExampleMirror() {
	bus, end := openExample(topics.Rule{Pattern: "prices", Compaction: true})
	defer end()
	ctx := context.Background()
	publish(bus, "prices", "apple", "3")
	publish(bus, "prices", "pear", "4")

	changes := make(chan string, 10)
	prices := projections.NewMirror(projections.MirrorConfig{
		Bus:     projections.JetStream(bus),
		Topic:   "prices",
		Changed: func(e *jetstream.Event) { changes <- fmt.Sprintf("%s costs %s", e.Key, e.Payload) },
	})
	stop := run(prices.Run)
	defer stop()

	<-prices.Ready() // the mirror contains everything that was stored when Run began
	fmt.Println(<-changes)
	fmt.Println(<-changes)
	apple, err := prices.Get(ctx, "apple") // from memory
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s costs %s, from %d keys in memory\n", apple.Key, apple.Payload, prices.Len())

	publish(bus, "prices", "apple", "2") // the mirror follows the topic
	fmt.Println(<-changes)
	// Output:
	// apple costs 3
	// pear costs 4
	// apple costs 3, from 2 keys in memory
	// apple costs 2
}

// A changelog copies a topic into a table of an SQL database: a row for each key.
func ExampleChangelog() {
	bus, end := openExample(topics.Rule{Pattern: "prices", Compaction: true})
	defer end()
	ctx := context.Background()

	dir, err := os.MkdirTemp("", "changelog-example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	// The database may also be PostgreSQL. OpenSQLTable creates the table.
	table, err := projections.OpenSQLTable(ctx, projections.SQLTableConfig{DB: db, Dialect: projections.SQLite, Table: "prices"})
	if err != nil {
		panic(err)
	}

	publish(bus, "prices", "apple", "3")
	publish(bus, "prices", "pear", "4")
	publish(bus, "prices", "apple", "2")
	if _, err := bus.Publish(ctx, "prices", nil, jetstream.PublishOptions{Key: "pear", Tombstone: true}); err != nil {
		panic(err) // a tombstone removes the row
	}
	stop := run(projections.Changelog{
		Bus:   projections.JetStream(bus),
		Topic: "prices", Group: "shop-table",
		From: jetstream.FromEarliest,
		Into: table,
	}.Run)
	defer stop()

	// The checkpoint is committed together with the rows.
	until(func() bool {
		checkpoint, err := table.Checkpoint(ctx)
		if err != nil {
			panic(err)
		}
		return checkpoint.Sequence == 4 // the fourth event of the topic
	})
	rows, err := db.QueryContext(ctx, "SELECT key, payload FROM prices ORDER BY key")
	if err != nil {
		panic(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var key, payload string
		if err := rows.Scan(&key, &payload); err != nil {
			panic(err)
		}
		fmt.Println(key, "costs", payload)
	}
	if err := rows.Err(); err != nil {
		panic(err)
	}
	// Output: apple costs 2
}

// A DualWrite keeps a copy of a topic in an earlier version of its schema, for consumers that
// cannot ask for a version.
func ExampleDualWrite() {
	bus, end := openExample(topics.Rule{Pattern: "orders", Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Mirrors: []int{1}}})
	defer end()
	ctx := context.Background()

	for _, draft := range []schemas.Draft{
		{Schema: json.RawMessage(`{"type":"object","properties":{"host":{"type":"string"}}}`)},
		{
			Schema: json.RawMessage(`{"type":"object","properties":{"hostname":{"type":"string"}}}`),
			Up:     json.RawMessage(`[{"rename":{"at":"/host","to":"hostname"}}]`),
			Down:   json.RawMessage(`[{"rename":{"at":"/hostname","to":"host"}}]`),
			Force:  true, // a document may have both names
		},
	} {
		if _, _, err := bus.Schemas().Register(ctx, "orders", draft); err != nil {
			panic(err)
		}
	}
	stop := run(projections.NewDualWrite(projections.DualWriteConfig{
		Bus:   projections.JetStream(bus),
		Topic: "orders", Versions: []int{1},
	}).Run)
	defer stop()

	publish(bus, "orders", "7", `{"hostname":"a"}`) // of the latest version
	copies := bus.Keys(topics.Mirror("orders", 1))
	until(func() bool {
		e, err := copies.Get(ctx, "7")
		if err != nil {
			return false
		}
		fmt.Printf("%s %s\n", e.Headers["x-schema-version"], e.Payload)
		return true
	})
	// Output: 1 {"host":"a"}
}
