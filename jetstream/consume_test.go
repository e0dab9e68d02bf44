package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// lockedBuffer is a log that a test reads while others write.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// TestConsumeSurvivesPanics has a handler that panics at one event for good, and at another one
// once.
func TestConsumeSurvivesPanics(t *testing.T) {
	t.Parallel()
	const secret = "secret of the process"
	var log lockedBuffer
	b, err := Open(t.Context(), Config{Server: natstest.Embed(t, t.TempDir()), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	publishAll(t, b, "work", `"bad"`, `"once"`, "1", "2")
	letters := make(chan []byte, 10)
	_, err = b.Consume(t.Context(), "dlq.work", "undertaker", SubscribeOptions{From: FromEarliest}, func(_ context.Context, d *Delivery) error {
		letters <- bytes.Clone(d.Event.Payload)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var bad, once atomic.Int64
	handled := make(chan string, 10)
	s, err := b.Consume(t.Context(), "work", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 3}, func(_ context.Context, d *Delivery) error {
		switch payload := string(d.Event.Payload); {
		case payload == `"bad"`:
			bad.Add(1)
			panic(secret)
		case payload == `"once"` && once.Add(1) == 1:
			panic(errors.New(secret))
		default:
			handled <- payload
			return nil
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case <-handled:
		case <-time.After(wait):
			t.Fatal("the other events are not handled")
		}
	}
	select {
	case payload := <-letters:
		var l struct {
			Err      string `json:"err"`
			Attempts int    `json:"attempts"`
		}
		if err := json.Unmarshal(payload, &l); err != nil || l.Err != "handler panicked: the log has the stack" || l.Attempts != 3 || bad.Load() != 3 {
			t.Errorf("after %d tries the dead letter is %s (%v)", bad.Load(), payload, err)
		}
	case <-time.After(wait):
		t.Fatal("there is no dead letter")
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	// the first of four panics, and the count of the others
	if text := log.String(); strings.Count(text, secret) != 2 || !strings.Contains(text, "not_logged=3") || !strings.Contains(text, "TestConsumeSurvivesPanics.func") {
		t.Errorf("the log lacks a panic, or its stack:\n%s", text)
	}
}

// A handler that ends its goroutine, as the FailNow of a test does, fails its event, and the
// subscription goes on.
func TestConsumeSurvivesGoexit(t *testing.T) {
	t.Parallel()
	b, err := Open(t.Context(), Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	publishAll(t, b, "work", "1", "2")
	handled := make(chan string, 10)
	s, err := b.Consume(t.Context(), "work", "g", SubscribeOptions{From: FromEarliest}, func(_ context.Context, d *Delivery) error {
		if string(d.Event.Payload) == "1" && d.Attempt < 3 {
			runtime.Goexit()
		}
		handled <- string(d.Event.Payload)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		select {
		case <-handled:
		case <-time.After(wait):
			t.Fatal("the handler is not called any more")
		}
	}
	if err := s.Drain(t.Context()); err != nil {
		t.Error(err)
	}
}

// An error about options speaks of them as a Go program does: what it says is allowed is taken, and
// means that.
func TestOptionErrorsSpeakGo(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		opts   SubscribeOptions
		has    []string
		hasNot string
	}{
		// 0 is the default, 5
		{SubscribeOptions{MaxAttempts: -2}, []string{"MaxAttempts", "NeverGiveUp"}, "0 (never"},
		{SubscribeOptions{AckTimeout: 10 * time.Microsecond}, []string{"AckTimeout", "10µs", "1s"}, "Ms"},
		{SubscribeOptions{GroupTTL: 10 * time.Microsecond}, []string{"GroupTTL", "10µs", "1s"}, "Ms"},
		{SubscribeOptions{MaxInFlight: -1}, []string{"MaxInFlight", "-1"}, "maxInFlight"},
		{SubscribeOptions{BatchSize: -1}, []string{"BatchSize", "-1"}, "batchSize"},
	} {
		err := c.opts.validate()
		if err == nil {
			t.Errorf("%+v is taken", c.opts)
			continue
		}
		for _, part := range c.has {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q lacks %q", err, part)
			}
		}
		if strings.Contains(err.Error(), c.hasNot) {
			t.Errorf("%q has %q", err, c.hasNot)
		}
	}
}
