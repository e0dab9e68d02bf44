package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// openExample opens a bus with an embedded server of its own. A service that has a NATS server uses
// jetstream.Config.URL instead.
func openExample() (bus *jetstream.Bus, end func()) {
	server, err := embedded.Start(context.Background(), embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	bus, err = jetstream.Open(context.Background(), jetstream.Config{Server: server})
	if err != nil {
		panic(err)
	}
	return bus, func() { _ = bus.Close() }
}

// An order service stores an order and its event in one transaction of its own SQLite database. A
// drainer publishes the event.
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

	// place stores an order and its event: both or neither.
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

	// The drainer may run in any process that reaches the database. Until here, the service does
	// not need the bus.
	bus, end := openExample()
	defer end()
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

// The same with PostgreSQL and pgx. The drainer runs all the time; each commit wakes it.
func Example_postgreSQL() {
	ctx := context.Background()
	address, end, err := pgtest.Temporary(ctx) // postgres://shop:secret@db.example.com/shop
	if err != nil {
		panic(err)
	}
	defer func() { _ = end() }()

	// The service uses pgx. The drainer uses database/sql, without prepared statements.
	pool, err := pgxpool.New(ctx, address)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	config, err := pgx.ParseConfig(address)
	if err != nil {
		panic(err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	db := stdlib.OpenDB(*config)
	defer func() { _ = db.Close() }()
	store, err := outbox.NewSQLStore(outbox.SQLConfig{
		Dialect: outbox.PostgreSQL,
		DB:      db,
		Listen: outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) {
			return pgx.Connect(ctx, address)
		}),
	})
	if err != nil {
		panic(err)
	}
	if _, err := store.Migrate(ctx); err != nil {
		panic(err)
	}
	if _, err := pool.Exec(ctx, "CREATE TABLE orders (number INTEGER PRIMARY KEY)"); err != nil {
		panic(err)
	}

	bus, closeBus := openExample()
	defer closeBus()
	drainer, err := outbox.NewDrainer(outbox.Config{Store: store, Bus: outbox.JetStream(bus)})
	if err != nil {
		panic(err)
	}
	drainer.Start()
	defer func() { _ = drainer.Stop(ctx) }()

	// The order and its event are one transaction.
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (number) VALUES (7)"); err != nil {
			return err
		}
		return store.Add(ctx, outbox.Pgx(tx), &outbox.Record{Topic: "orders.placed", Payload: []byte(`{"order":7}`)})
	})
	if err != nil {
		panic(err)
	}

	received := make(chan string)
	_, err = bus.Consume(ctx, "orders.placed", "printer", jetstream.SubscribeOptions{From: jetstream.FromEarliest},
		func(_ context.Context, d *jetstream.Delivery) error {
			received <- string(d.Event.Payload)
			return nil
		})
	if err != nil {
		panic(err)
	}
	fmt.Println(<-received)
	// Output: {"order":7}
}

// A service without a database keeps its outbox in a KV bucket of NATS. Add is a write of its own.
func ExampleKVStore() {
	ctx := context.Background()
	bus, end := openExample()
	defer end()

	bucket, err := bus.Collections().Open(ctx, "mail_outbox")
	if err != nil {
		panic(err)
	}
	store, err := outbox.NewKVStore(outbox.KVConfig{Collection: bucket})
	if err != nil {
		panic(err)
	}
	for _, subject := range []string{"Welcome", "Your order"} {
		err := store.Add(ctx, &outbox.Record{Topic: "mails", Key: "ann", Payload: fmt.Appendf(nil, "%q", subject)})
		if err != nil {
			panic(err)
		}
	}
	stats, err := store.Stats(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(stats.Pending, "wait")

	drainer, err := outbox.NewDrainer(outbox.Config{Store: store, Bus: outbox.JetStream(bus)})
	if err != nil {
		panic(err)
	}
	drained, err := drainer.Drain(ctx) // a service uses Start and Stop
	if err != nil {
		panic(err)
	}
	fmt.Println(drained.Published, "published")
	err = bus.History("mails").Scan(ctx, jetstream.ScanOptions{}, func(e *jetstream.Event) error {
		fmt.Printf("%s %s\n", e.Key, e.Payload)
		return nil
	})
	if err != nil {
		panic(err)
	}
	// Output:
	// 2 wait
	// 2 published
	// ann "Welcome"
	// ann "Your order"
}
