// Command consumer prints orders as they are placed. All consumers of the group share the orders;
// one that comes back goes on where the group was.
//
//	go run ./docs/examples/orders-go/consumer -token-file eventhub-data/token
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"eventhub/facade/client"
)

func main() {
	url := flag.String("url", "ws://127.0.0.1:8090", "the hub's WebSocket")
	tokenFile := flag.String("token-file", "eventhub-data/token", "file that holds the token")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *url, *tokenFile); err != nil {
		fmt.Fprintln(os.Stderr, "consumer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, url, tokenFile string) error {
	token, err := os.ReadFile(tokenFile) //nolint:gosec // the file is the choice of whoever runs it
	if err != nil {
		return err
	}
	c, err := client.Dial(ctx, url, client.Options{Token: strings.TrimSpace(string(token))})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_, err = c.Subscribe(ctx, "orders.placed", "printer", client.SubscribeOptions{From: "earliest"}, handle)
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-c.Done(): // a client does not reconnect by itself
		return c.Err()
	}
}

// handle prints an order, and acknowledges it. An order whose acknowledgement is lost comes again,
// so what is done with one must bear being done twice.
func handle(e client.Event) {
	var order struct {
		Order    int    `json:"order"`
		Customer string `json:"customer"`
	}
	if err := json.Unmarshal(e.Payload, &order); err != nil {
		_ = e.Nack("no order: "+err.Error(), -1) // it ends as a dead letter
		return
	}
	if _, err := fmt.Fprintf(os.Stdout, "order %d of %s\n", order.Order, order.Customer); err != nil {
		return // it comes again
	}
	_ = e.Ack()
}
