package jetstream

import (
	"context"
	"fmt"
	"testing"
	"time"
	"log/slog"
	"sync/atomic"
)

func TestSmoke(t *testing.T) {
	ctx := t.Context()
	b, err := Open(ctx, Config{DataDir: t.TempDir(), Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for i := range 10 {
		r, err := b.Publish(ctx, "a.b", []byte(fmt.Sprint(i)), PublishOptions{Key: "k:1"})
		if err != nil {
			t.Fatal(err)
		}
		t.Log(r)
	}
	ch := make(chan *Delivery, 100)
	s, err := b.Subscribe(ctx, "a.b", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 2}, func(d *Delivery) { ch <- d })
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	for range 10 {
		select {
		case d := <-ch:
			t.Log(d.Begin(), string(d.Event.AppendRecord(nil)), d.Attempt)
			if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
		case <-time.After(2 * time.Second):
			t.Fatal("nothing")
		}
	}
	s.Stop(ctx)
	c, err := b.Cursor(ctx, "a.b", "g")
	t.Log(c, err)
	err = b.Scan(ctx, "a.b", ScanOptions{}, func(e *Event) error { t.Log(e.ID, string(e.Payload)); return nil })
	if err != nil { t.Fatal(err) }
	e, err := b.LatestByKey(ctx, "a.b", "k:1")
	t.Log(e, err)
}

func BenchmarkPublish(b *testing.B) {
	bus, err := Open(context.Background(), Config{DataDir: b.TempDir()})
	if err != nil { b.Fatal(err) }
	defer bus.Close()
	payload := []byte(`{"a":"` + fmt.Sprintf("%0240d", 1) + `"}`)
	ps := []*Publisher{bus.NewPublisher(), bus.NewPublisher()}
	bus.Publish(context.Background(), "x", payload, PublishOptions{})
	var fails atomic.Int64
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if err := ps[i%2].Publish(context.Background(), "x", payload, nil, func(_ Receipt, err error) { if err != nil { fails.Add(1) } }); err != nil { b.Fatal(err) }
	}
	for _, p := range ps { p.Flush(context.Background()) }
	if fails.Load() > 0 { b.Fatal(fails.Load()) }
}

func BenchmarkConsume(b *testing.B) {
	bus, err := Open(context.Background(), Config{DataDir: b.TempDir()})
	if err != nil { b.Fatal(err) }
	defer bus.Close()
	payload := []byte(`{"a":"` + fmt.Sprintf("%0240d", 1) + `"}`)
	p := bus.NewPublisher()
	for range b.N {
		if err := p.Publish(context.Background(), "x", payload, nil, func(_ Receipt, err error) { if err != nil { panic(err) } }); err != nil { b.Fatal(err) }
	}
	p.Flush(context.Background())
	done := make(chan bool)
	n := 0
	ch := make(chan *Delivery, 256)
	b.ReportAllocs()
	b.ResetTimer()
	s, _ := bus.Subscribe(context.Background(), "x", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 256}, func(d *Delivery) { ch <- d })
	s.Start()
	go func() { for d := range ch { d.BeginRelease(); d.Ack(); if n++; n == b.N { close(done); return } } }()
	<-done
	s.Stop(context.Background())
}
