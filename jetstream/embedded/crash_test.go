package embedded_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/embedded"
)

// A crash of the machine may leave any part of the first state of a consumer. The consumer then
// delivers again from its start, and loses nothing. A whole state is kept.
func TestTornStateOfAConsumer(t *testing.T) {
	const events, acked = 4000, 1000
	dir := t.TempDir()
	// with calls f with the server's stream, which has the events.
	with := func(log *bytes.Buffer, f func(js natsjs.JetStream)) {
		t.Helper()
		s := start(t, embedded.Config{DataDir: dir, Logger: slog.New(slog.NewTextHandler(log, nil))})
		url, options := s.Connection()
		nc, err := nats.Connect(url, options...)
		if err != nil {
			t.Fatal(err)
		}
		js, err := natsjs.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		f(js)
		nc.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	config := natsjs.ConsumerConfig{Durable: "c", AckPolicy: natsjs.AckExplicitPolicy, AckWait: time.Hour, MaxAckPending: -1}
	// first is the first event that a consumer has left, after those that are leased.
	first := func(js natsjs.JetStream, n int) (seq, attempts uint64) {
		t.Helper()
		c, err := js.CreateOrUpdateConsumer(t.Context(), "s", config)
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.Fetch(n, natsjs.FetchMaxWait(10*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		var again natsjs.Msg
		for m := range got.Messages() {
			about, err := m.Metadata()
			if err != nil {
				t.Fatal(err)
			}
			if seq == 0 {
				seq, attempts = about.Sequence.Stream, about.NumDelivered
			}
			if about.Sequence.Stream%2 == 0 && about.Sequence.Stream <= 2*acked {
				if err := m.DoubleAck(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if about.Sequence.Stream == 1 {
				again = m
			}
		}
		if err := got.Error(); err != nil {
			t.Fatal(err)
		}
		if again != nil { // so that the state has an event that comes again
			if err := again.Nak(); err != nil {
				t.Fatal(err)
			}
		}
		return seq, attempts
	}

	var log bytes.Buffer
	with(&log, func(js natsjs.JetStream) {
		if _, err := js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "s", Subjects: []string{"s"}}); err != nil {
			t.Fatal(err)
		}
		for i := range events {
			if _, err := js.PublishAsync("s", []byte(strconv.Itoa(i))); err != nil {
				t.Fatal(err)
			}
		}
		<-js.PublishAsyncComplete()
		first(js, events-2)
		if seq, attempts := first(js, 1); seq != 1 || attempts != 2 {
			t.Fatalf("event %d came in attempt %d", seq, attempts)
		}
	})
	path := filepath.Join(dir, "nats", "jetstream", "$G", "streams", "s", "obs", "c", "o.dat")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const page = 4096
	if len(whole) < 2*page {
		t.Fatalf("the state has %d bytes", len(whole))
	}
	zeros := func(from, to int) []byte {
		text := bytes.Clone(whole)
		clear(text[from:to])
		return text
	}
	for _, c := range []struct {
		name  string
		text  []byte
		first uint64
	}{
		{"whole", whole, events - 1},
		{"empty", nil, 1},
		{"one byte", whole[:1], 1},
		{"the header only", whole[:2], 1},
		{"without the first page", zeros(0, page), 1},
		{"without the second page", zeros(page, 2*page), 1},
		{"without the end", zeros(page, len(whole)), 1},
		{"the first page only", whole[:page], 1},
		{"without the last byte", whole[:len(whole)-1], 1},
		{"zeros only", make([]byte, len(whole)), 1},
	} {
		if err := os.WriteFile(path, c.text, 0o600); err != nil {
			t.Fatal(err)
		}
		log.Reset()
		with(&log, func(js natsjs.JetStream) {
			if seq, _ := first(js, 1); seq != c.first {
				t.Errorf("%s: the consumer goes on at %d, want %d", c.name, seq, c.first)
			}
		})
		said := strings.Contains(log.String(), "removed the state of a consumer")
		if want := c.name != "whole" && c.name != "empty"; said != want {
			t.Errorf("%s: said is %t, in %s", c.name, said, &log)
		}
	}
}
