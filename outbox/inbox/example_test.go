package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/outbox"
	"eventhub/outbox/inbox"
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

// A billing service adds each order to an account in its own SQLite database. The acknowledgement
// of the first delivery is lost, so the event comes again, and the account has the order once.
func ExampleSQL_Handle() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "inbox-example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "billing.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, "CREATE TABLE accounts (customer TEXT PRIMARY KEY, cents INTEGER NOT NULL)"); err != nil {
		panic(err)
	}
	store, err := inbox.NewSQL(inbox.SQLConfig{Dialect: outbox.SQLite, DB: db})
	if err != nil {
		panic(err)
	}
	if err := store.Migrate(ctx); err != nil {
		panic(err)
	}

	bill := store.Handle("billing", func(ctx context.Context, tx *sql.Tx, e *jetstream.Event) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO accounts (customer, cents) VALUES (?, ?) ON CONFLICT (customer) DO UPDATE SET cents = cents + excluded.cents",
			e.Key, string(e.Payload))
		return err
	})
	settled := make(chan int, 1)
	sub, err := bus.Consume(ctx, "orders.placed", "billing", jetstream.SubscribeOptions{}, func(ctx context.Context, d *jetstream.Delivery) error {
		if err := bill(ctx, d); err != nil {
			return err
		}
		if d.Attempt == 1 {
			return errors.New("pretend that the acknowledgement is lost")
		}
		settled <- d.Attempt
		return nil
	})
	if err != nil {
		panic(err)
	}
	defer func() { _ = sub.Stop(ctx) }()
	if _, err := bus.Publish(ctx, "orders.placed", []byte("950"), jetstream.PublishOptions{ID: "order-1", Key: "ann"}); err != nil {
		panic(err)
	}
	attempt := <-settled
	var cents int
	if err := db.QueryRowContext(ctx, "SELECT cents FROM accounts WHERE customer = 'ann'").Scan(&cents); err != nil {
		panic(err)
	}
	fmt.Printf("%d cents after attempt %d\n", cents, attempt)
	// Output:
	// 950 cents after attempt 2
}

// A service without a database sends mails, and remembers in NATS which it has sent.
func ExampleKV_Handle() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()
	store, err := inbox.OpenKV(ctx, inbox.KVConfig{Bus: bus})
	if err != nil {
		panic(err)
	}
	send := store.Handle("mailer", func(_ context.Context, e *jetstream.Event) error {
		fmt.Printf("mail to %s, idempotency key %s\n", e.Payload, e.ID)
		return nil
	})
	settled := make(chan int, 1)
	sub, err := bus.Consume(ctx, "mails", "mailer", jetstream.SubscribeOptions{}, func(ctx context.Context, d *jetstream.Delivery) error {
		if err := send(ctx, d); err != nil {
			return err
		}
		if d.Attempt == 1 {
			return errors.New("pretend that the acknowledgement is lost")
		}
		settled <- d.Attempt
		return nil
	})
	if err != nil {
		panic(err)
	}
	defer func() { _ = sub.Stop(ctx) }()
	if _, err := bus.Publish(ctx, "mails", []byte(`"ann"`), jetstream.PublishOptions{ID: "mail-1"}); err != nil {
		panic(err)
	}
	fmt.Println("settled in attempt", <-settled)
	// Output:
	// mail to "ann", idempotency key mail-1
	// settled in attempt 2
}
