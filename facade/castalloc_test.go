package facade

import (
	"context"
	"io"
	"math"
	"net"
	"sync"
	"testing"
	"time"

	"eventhub/facade/broadcast"
	"eventhub/jetstream"
)

// handFed is a broadcast.Source whose events the test gives.
type handFed struct {
	feed chan func(*jetstream.Event) error
}

func (handFed) Place(context.Context, string, string) (jetstream.Place, error) {
	return jetstream.Place{Stream: "s", Made: time.Unix(1, 0), First: 1}, nil
}

func (h handFed) Follow(ctx context.Context, _ string, _ jetstream.Place, f func(*jetstream.Event) error) error {
	h.feed <- f
	<-ctx.Done()
	return ctx.Err()
}

// drain is a connection whose other end reads and forgets everything.
func drain(t *testing.T) net.Conn {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	var reading sync.WaitGroup
	reading.Go(func() {
		_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{other}, make([]byte, 64<<10))
	})
	t.Cleanup(func() {
		_ = conn.Close()
		reading.Wait()
		_ = other.Close()
	})
	return conn
}

// An event of a broadcast costs no allocation for each socket that gets it.
func TestAllocationsOfABroadcast(t *testing.T) {
	const sockets = 32
	source := handFed{make(chan func(*jetstream.Event) error, 1)}
	tails := broadcast.New(broadcast.Config{
		Source: source, Frame: frameStored, Linger: time.Second, Tails: 1, PrincipalTails: 1, RingFrames: 8192, RingBytes: 16 << 20, AllBytes: 16 << 20,
	})
	defer tails.Close()
	conn := drain(t)
	casts := make([]*cast, sockets)
	outs := make([]*writer, sockets)
	for i := range casts {
		s := hotSession(t)
		s.out.wire.Conn, s.out.wire.stall = conn, time.Minute
		tail, err := tails.Join(t.Context(), "t", "c", broadcast.Form{})
		if err != nil {
			t.Fatal(err)
		}
		defer tail.Leave()
		c := &cast{srv: s.srv, to: castSocket{s}, topic: "t", tail: tail}
		c.cursor = tail.NewCursor(c)
		if !c.cursor.Begin() {
			t.Fatal("the tail has ended")
		}
		defer c.cursor.End()
		c.live.Store(true)
		casts[i], outs[i] = c, s.out
	}
	give := <-source.feed
	e := &jetstream.Event{ID: "0190a1b2-c3d4-7e5f-8a9b-0123456789ab", Topic: "t", Payload: make([]byte, 0, 320)}
	e.Payload = append(e.Payload, '"')
	for len(e.Payload) < 319 {
		e.Payload = append(e.Payload, 'x')
	}
	e.Payload = append(e.Payload, '"')
	var seq uint64
	each := func() {
		seq++
		e.Sequence = seq
		if err := give(e); err != nil {
			t.Error(err)
		}
		for i, c := range casts {
			for c.cursor.Last() < seq {
				_, woken, _ := outs[i].take()
				if err := outs[i].flushWoken(woken); err != nil {
					t.Error(err)
					return
				}
			}
		}
	}
	got := testing.AllocsPerRun(2000, each)
	t.Logf("%v allocations for an event to %d sockets", got, sockets)
	// The ring takes its memory a piece at a time, once for many events, and widens its list of
	// frames: less than one allocation an event.
	if got >= 1 || math.IsNaN(got) {
		t.Errorf("%v allocations for an event to %d sockets", got, sockets)
	}
}
