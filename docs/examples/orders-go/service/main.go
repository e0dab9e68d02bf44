// Command service is an order service. It stores an order, and the event that tells of it, in one
// transaction of its own database: both are there, or neither is. A hub publishes the event, now or
// when it runs again.
//
//	go run ./docs/examples/orders-go/service orders.db 1 ann
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	_ "modernc.org/sqlite"

	"eventhub/outbox"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "service:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) != 3 {
		return errors.New("usage: service DATABASE NUMBER CUSTOMER")
	}
	number, err := strconv.Atoi(args[1])
	if err != nil {
		return fmt.Errorf("order number %q: it must be an integer", args[1])
	}
	s, err := open(ctx, args[0])
	if err != nil {
		return err
	}
	defer func() { _ = s.db.Close() }()
	if err := s.place(ctx, number, args[2]); err != nil {
		return fmt.Errorf("place order %d: %w", number, err)
	}
	_, err = fmt.Fprintf(os.Stdout, "order %d is placed\n", number)
	return err
}

// service is the order service.
type service struct {
	db     *sql.DB
	outbox *outbox.SQLStore
}

// open opens the database and makes the tables that it lacks. The busy timeout lets the service and
// the hub wait for each other; WAL lets them read beside each other.
func open(ctx context.Context, path string) (*service, error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		return nil, err
	}
	store, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, DB: db})
	if err == nil {
		_, err = store.Migrate(ctx)
	}
	if err == nil {
		_, err = db.ExecContext(ctx, "CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, customer TEXT NOT NULL)")
	}
	if err != nil {
		_ = db.Close()
		return nil, err
	}
	return &service{db, store}, nil
}

// place stores an order and its event. Events of one customer are published in the order of their
// transactions.
func (s *service) place(ctx context.Context, number int, customer string) error {
	payload, err := json.Marshal(map[string]any{"order": number, "customer": customer})
	if err != nil {
		return err
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // of no effect after the commit
	if err := s.outbox.Add(ctx, tx, &outbox.Record{Topic: "orders.placed", Key: customer, Payload: payload}); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO orders (number, customer) VALUES (?, ?)", number, customer); err != nil {
		return err
	}
	return tx.Commit()
}
