//go:build unix

package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/native"
	"eventhub/sdk/go/wire"
)

// TestNativePackageWithAToken lets a token with a policy publish, and be a member of a group, by
// the package native: its handler fails until the event is dead-lettered.
func TestNativePackageWithAToken(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t))
	c := hub.dial()
	sub, err := c.Subscribe(t.Context(), "orders", "g", wire.SubscribeOptions{}, func(wire.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	letters := subscribeTo(t, c, "dlq.orders", "letters", wire.SubscribeOptions{})
	_, js := dialNative(t, hub.nats, scoped(t, "shop", "publish:orders", "publish:dlq.orders", "subscribe:orders", "subscribe:dlq.orders"))
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	member := native.New(js)
	group, err := member.Group(ctx, "orders", "g", native.GroupOptions{MaxAttempts: 2})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := member.Publish(ctx, "orders", []byte("1"), native.Fields{ID: "one"}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	ctx, end := context.WithCancel(ctx)
	attempts := make(chan int, 10)
	go func() {
		ended <- group.Consume(ctx, func(_ context.Context, d *native.Delivery) error {
			attempts <- d.Attempt
			return errors.New("no")
		})
	}()
	for want := 1; want <= 2; want++ {
		select {
		case got := <-attempts:
			if got != want {
				t.Errorf("attempt %d, want %d", got, want)
			}
		case <-time.After(patience):
			t.Fatalf("no attempt %d", want)
		}
	}
	if e := letters.next(); e.Topic != "dlq.orders" {
		t.Errorf("the letter is %s", e.Record)
	}
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestNativePackageWithOneGroup lets tokens that may not look at a stream publish with ids, and be
// a member of the one group that they may join, also after it was moved.
func TestNativePackageWithOneGroup(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t))
	c := hub.dial()
	sub, err := c.Subscribe(t.Context(), "orders", "g", wire.SubscribeOptions{}, func(wire.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	silent := nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})
	_, js := dialNative(t, hub.nats, scoped(t, "till", "publish:orders"), silent)
	publisher := native.New(js)
	for _, duplicate := range []bool{false, true} {
		ack, err := publisher.Publish(ctx, "orders", []byte("1"), native.Fields{ID: "one"})
		if err != nil || ack.Duplicate != duplicate {
			t.Fatalf("publish: %+v, %v", ack, err)
		}
	}
	_, js = dialNative(t, hub.nats, scoped(t, "till", "publish:orders"), silent)
	if _, err := native.New(js).Group(ctx, "orders", "g", native.GroupOptions{}); !errors.Is(err, native.ErrNotPermitted) {
		t.Errorf("a group that the token may not join: %v", err)
	}
	for _, moved := range []bool{false, true} {
		if moved {
			runCommand(t, "group", "seek", "orders", "g", "--to=earliest", "--yes", "--ops-url="+hub.ops, "--token="+nodeToken)
		}
		_, js = dialNative(t, hub.nats, scoped(t, "mailer", "subscribe:orders::g"), silent)
		group, err := native.New(js).Group(ctx, "orders", "g", native.GroupOptions{})
		if err != nil {
			t.Fatal(err)
		}
		consuming, end := context.WithCancel(ctx)
		err = group.Consume(consuming, func(_ context.Context, d *native.Delivery) error {
			if d.Event.ID != "one" {
				t.Errorf("event %s came", d.Event.ID)
			}
			end()
			return nil
		})
		end()
		if err != nil || ctx.Err() != nil {
			t.Fatalf("moved %v: %v, %v", moved, err, ctx.Err())
		}
	}
}
