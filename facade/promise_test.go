package facade_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// The promise tests hold the hub to what protocol.md says of deliveries, where servers, hubs or
// clients do what is inconvenient: restart, freeze, change leaders, do not read.

// patientWriter keeps clients that do not read connected for as long as the test runs.
func patientWriter(cfg *facade.Config) { cfg.Limits.WriteStall = 2 * time.Minute }

// narrow serves the hub's WebSocket on another port, with as little room in the kernel for what is
// sent as it gives.
func narrow(h *testHub) (url string) {
	h.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		h.t.Fatal(err)
	}
	srv := &http.Server{Handler: h.server.WebSocket(), ReadHeaderTimeout: waitLimit, ConnState: func(c net.Conn, s http.ConnState) {
		if tcp, ok := c.(*net.TCPConn); ok && s == http.StateNew {
			_ = tcp.SetWriteBuffer(32 << 10)
		}
	}}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l)
	}()
	h.t.Cleanup(func() {
		_ = srv.Close()
		<-served
	})
	return "ws://" + l.Addr().String()
}

// sluggardAttempts is how often an event is given to a sluggard before it becomes a dead letter.
const sluggardAttempts = 3

// sluggard is a WebSocket client that reads only when it is told to. It counts the frames that it
// gets of each event.
type sluggard struct {
	t      testing.TB
	ws     *websocket.Conn
	topic  string
	credit int            // maxInFlight
	frames map[string]int // of each event, by its id
	order  []string       // the ids in the order of their first frames
	faults map[string]int // attempts that are not the number of the frame
	last   int            // the newest corr
}

// dialSluggard connects a sluggard, which subscribes to the topic as group g.
func dialSluggard(h *testHub, topic string, maxInFlight int) *sluggard {
	h.t.Helper()
	s := &sluggard{t: h.t, topic: topic, credit: maxInFlight, frames: map[string]int{}, faults: map[string]int{}}
	ctx, cancel := context.WithTimeout(h.t.Context(), waitLimit)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, narrow(h), nil) //nolint:bodyclose // the library closes it
	if err != nil {
		h.t.Fatal(err)
	}
	ws.SetReadLimit(-1)
	h.t.Cleanup(func() { _ = ws.CloseNow() })
	s.ws = ws
	s.write(`{"op":"AUTH","token":"` + testToken + `"}`)
	s.readTo("")
	s.subscribe()
	s.readTo(s.corr())
	return s
}

func (s *sluggard) write(frame string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), waitLimit)
	defer cancel()
	if err := s.ws.Write(ctx, websocket.MessageText, []byte(frame)); err != nil {
		s.t.Fatal(err)
	}
}

// say sends a frame of the subscription, and does not wait for the answer.
func (s *sluggard) say(op, more string) {
	s.t.Helper()
	s.last++
	s.write(`{"op":"` + op + `","topic":"` + s.topic + `","group":"g","corr":"` + s.corr() + `"` + more + `}`)
}

func (s *sluggard) corr() string { return strconv.Itoa(s.last) }

func (s *sluggard) subscribe() {
	s.t.Helper()
	n := strconv.Itoa(s.credit)
	s.say("SUBSCRIBE", `,"opts":{"maxInFlight":`+n+`,"batchSize":`+n+`,"maxAttempts":`+strconv.Itoa(sluggardAttempts)+`}`)
}

func (s *sluggard) settle(op, id, more string) {
	s.t.Helper()
	s.say(op, `,"id":"`+id+`"`+more)
}

// read takes a frame. It counts events, and compares the attempt with the number of the frame.
func (s *sluggard) read(ctx context.Context) (got reply, err error) {
	_, text, err := s.ws.Read(ctx)
	if err != nil {
		return got, err
	}
	if err := json.Unmarshal(text, &got); err != nil {
		return got, err
	}
	if got.Op == "EVENT" {
		if s.frames[got.Event.ID]++; s.frames[got.Event.ID] == 1 {
			s.order = append(s.order, got.Event.ID)
		}
		if n := s.frames[got.Event.ID]; got.Ctx.Attempt != n {
			s.faults["frame "+strconv.Itoa(n)+" says attempt "+strconv.Itoa(got.Ctx.Attempt)]++
		}
	}
	return got, nil
}

// listen reads from now on, until the test or the connection ends.
func (s *sluggard) listen() <-chan reply {
	ctx, cancel := context.WithCancel(context.Background())
	frames, ended := make(chan reply, 10_000), make(chan struct{})
	go func() {
		defer close(ended)
		defer close(frames)
		for {
			got, err := s.read(ctx)
			if err != nil {
				return
			}
			frames <- got
		}
	}()
	s.t.Cleanup(func() {
		cancel()
		<-ended
	})
	return frames
}

// readTo reads up to the answer with this corr, which must be OK; "" is that of AUTH.
func (s *sluggard) readTo(corr string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), waitLimit)
	defer cancel()
	for {
		got, err := s.read(ctx)
		if err != nil {
			s.t.Fatalf("reading: %v", err)
		}
		if got.Op == "EVENT" {
			continue
		}
		text, _ := got.Corr.(string)
		if got.Op != "OK" {
			s.t.Fatalf("refused: %+v", got)
		}
		if text == corr {
			return
		}
	}
}

// publishBig publishes n events of size bytes each, pipelined, and returns when all are stored.
func publishBig(t *testing.T, h *testHub, topic string, n, size int) {
	t.Helper()
	c := h.dial()
	var wg sync.WaitGroup
	for i := range n {
		wg.Add(1)
		payload := strconv.AppendQuote(nil, strconv.Itoa(i)+strings.Repeat("x", size))
		err := c.PublishAsync(topic, payload, wire.PublishOptions{}, func(_ string, err error) {
			if err != nil {
				t.Error(err)
			}
			wg.Done()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

// endless makes a subscription that never dead-letters, with so many leases at most.
func endless(maxInFlight int) wire.SubscribeOptions {
	never := 0
	return wire.SubscribeOptions{MaxInFlight: maxInFlight, MaxAttempts: &never}
}

// restartable starts a hub on a directory. The test ends it in order with end, and may start
// another one there.
func restartable(t *testing.T, dir string, change ...func(*jetstream.Config)) (hub *testHub, end func()) {
	t.Helper()
	cfg := jetstream.Config{Server: natstest.Embed(t, dir)}
	for _, f := range change {
		f(&cfg)
	}
	bus, err := jetstream.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	hub = startHub(t, bus, unthrottled, patientWriter, func(cfg *facade.Config) { cfg.Limits.CloseGrace = 300 * time.Millisecond })
	end = sync.OnceFunc(func() {
		if err := hub.server.Close(); err != nil {
			t.Error(err)
		}
		if err := bus.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return hub, end
}
