package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/outbox"
)

// An order service: the order and its event are one transaction of its own database. A drainer
// publishes the event.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "outbox-example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()

	// The service's database. The busy timeout lets the service and the drainer wait for each
	// other.
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "orders.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	store, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, DB: db})
	if err != nil {
		panic(err)
	}
	if _, err := store.Migrate(ctx); err != nil {
		panic(err)
	}
	if _, err := db.ExecContext(ctx, "CREATE TABLE orders (number INTEGER PRIMARY KEY, customer TEXT NOT NULL)"); err != nil {
		panic(err)
	}

	// place stores an order, and the event that tells of it: both or neither.
	place := func(number int, customer string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // of no effect after the commit
		if err := store.Add(ctx, tx, &outbox.Record{
			Topic: "orders.placed", Key: "customer:" + customer, Payload: fmt.Appendf(nil, `{"order":%d}`, number),
		}); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO orders (number, customer) VALUES (?, ?)", number, customer); err != nil {
			return err
		}
		return tx.Commit()
	}
	for _, number := range []int{1, 2, 2} { // the last one is refused: it exists
		if err := place(number, "7"); err != nil {
			fmt.Println("order", number, "is not placed")
		}
	}

	// The drainer, here or in any process that reaches the database. The bus may be away until now.
	server, err := embedded.Start(ctx, embedded.Config{}) // or jetstream.Config.URL
	if err != nil {
		panic(err)
	}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: server})
	if err != nil {
		panic(err)
	}
	defer func() { _ = bus.Close() }()
	drainer, err := outbox.NewDrainer(outbox.Config{Store: store, Bus: outbox.JetStream(bus)})
	if err != nil {
		panic(err)
	}
	done, err := drainer.Drain(ctx) // a service uses Start and Stop
	if err != nil {
		panic(err)
	}
	fmt.Println(done.Published, "published")
	if err := bus.History("orders.placed").Scan(ctx, jetstream.ScanOptions{}, func(e *jetstream.Event) error {
		fmt.Printf("%s %s\n", e.Key, e.Payload)
		return nil
	}); err != nil {
		panic(err)
	}
	// Output:
	// order 2 is not placed
	// 2 published
	// customer:7 {"order":1}
	// customer:7 {"order":2}
}
