// Command consumer prints orders as they are placed. All consumers of the group share the orders;
// one that comes back goes on where the group was.
//
//	go run ./docs/examples/orders-go/consumer -token-file eventhub-data/token
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	eventhub "eventhub/sdk/go"
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
	hub, err := eventhub.Connect(ctx, url, eventhub.Options{Token: strings.TrimSpace(string(token))})
	if err != nil {
		return err
	}
	// Close lets the handler of an event end, so the order that it printed is acknowledged.
	defer func() { _ = hub.Close() }() //nolint:contextcheck // has a limit of its own
	orders := eventhub.TopicOf[order](hub, "orders.placed")
	sub, err := orders.Subscribe(context.WithoutCancel(ctx), "printer", eventhub.SubscribeOptions{From: eventhub.FromEarliest}, handle)
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-sub.Done(): // the hub has ended the subscription
		return sub.Err()
	}
}

// order is the payload of an event. What is no order ends as a dead letter.
type order struct {
	Order    int    `json:"order"`
	Customer string `json:"customer"`
}

// handle prints an order. Its end acknowledges the event. An order may come again, such as after a
// crash, so what is done with one must bear being done twice.
func handle(_ context.Context, o order, _ *eventhub.Delivery) error {
	_, err := fmt.Fprintf(os.Stdout, "order %d of %s\n", o.Order, o.Customer)
	return err
}
