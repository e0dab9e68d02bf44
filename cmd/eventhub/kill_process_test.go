//go:build unix

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

// Events that a hub had fetched and not written when it was killed were nobody's failure: they come
// again, and none is dead-lettered, although members give up after one attempt.
func TestKilledHubDeadLettersNothing(t *testing.T) {
	t.Parallel()
	const fetched = 64
	url := runNATS(t)
	flags := []string{"--nats-url=" + url, "--ack-wait=2s"}
	killed, other := startNode(t, flags...), startNode(t, flags...)
	b := other.dial()
	dead := subscribeTo(t, b, "dlq.unwritten", "d", wire.SubscribeOptions{From: "earliest"})

	// A client that never reads: beyond what the kernel takes, events stay in the hub.
	silent := dialSilent(t, killed.url)
	for _, frame := range []string{
		`{"op":"AUTH","token":"` + nodeToken + `"}`,
		`{"op":"SUBSCRIBE","topic":"unwritten","group":"g","opts":{"from":"earliest","maxInFlight":64,"batchSize":64,"maxAttempts":1}}`,
	} {
		if err := silent.Write(t.Context(), websocket.MessageText, []byte(frame)); err != nil {
			t.Fatal(err)
		}
	}
	big := strings.Repeat("x", 100_000)
	for i := range fetched {
		publishTo(t, b, "unwritten", fmt.Sprintf(`{"n":%d,"x":%q}`, i, big))
	}
	waitForPending(t, url, "unwritten", "g", fetched)
	killed.kill()

	one := 1
	in := subscribeTo(t, b, "unwritten", "g", wire.SubscribeOptions{MaxAttempts: &one})
	seen := map[string]int{}
	for range fetched {
		e := in.next()
		seen[e.ID]++
		if e.Attempt < 2 {
			t.Errorf("event %s has attempt %d", e.ID, e.Attempt)
		}
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != fetched {
		t.Errorf("%d events came, not %d", len(seen), fetched)
	}
	in.onlyMarker(b, "unwritten")
	dead.onlyMarker(b, "dlq.unwritten")
}

// dialSilent connects without ever reading, with as little room in the kernel as it gives.
func dialSilent(t *testing.T, url string) *websocket.Conn {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		if tcp, ok := conn.(*net.TCPConn); ok {
			err = tcp.SetReadBuffer(1)
		}
		return conn, err
	}}
	ws, _, err := websocket.Dial(t.Context(), url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}}) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ws.CloseNow() })
	return ws
}

// waitForPending asks NATS until so many events of a group are delivered and not acknowledged.
func waitForPending(t *testing.T, url, stream, consumer string, want int) {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := js.Consumer(ctx, stream, consumer)
		if err == nil && c.CachedInfo().NumAckPending == want {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%d events were not fetched: %v", want, err)
		}
	}
}

// settledFor is how old an acknowledgement must be to survive a killed server: 200 ms by the
// protocol, and what a busy machine adds.
const settledFor = 600 * time.Millisecond

// A hub with its embedded server is killed under load and started again on the same data: what was
// answered OK is there exactly once, what was not acknowledged comes again, what was acknowledged a
// moment ago does not.
func TestKillUnderLoad(t *testing.T) {
	t.Parallel()
	data := "--data=" + t.TempDir()
	hub := startNode(t, data)
	load := startLoad(t, hub)
	load.waitFor(t, 1000)
	killedAt := time.Now()
	hub.kill()
	load.wait()

	hub = startNode(t, data)
	c := hub.dial()
	publishTo(t, c, "load", "-1")
	stored := map[int]int{}
	audit := subscribeTo(t, c, "load", "audit", wire.SubscribeOptions{From: "earliest", MaxInFlight: 10_000})
	for {
		e := audit.next()
		n := number(t, e)
		if n == -1 {
			break
		}
		stored[n]++
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	for n, times := range stored {
		if times != 1 {
			t.Errorf("event %d is there %d times", n, times)
		}
	}
	for n := range load.confirmed {
		if stored[n] == 0 {
			t.Errorf("event %d was answered OK and is lost", n)
		}
	}

	never := 0
	worker := subscribeTo(t, c, "load", "worker", wire.SubscribeOptions{From: "latest", MaxInFlight: 10_000, MaxAttempts: &never})
	stored[-1] = 1
	missing := map[int]bool{}
	for n := range stored {
		if _, acked := load.acked[n]; !acked {
			missing[n] = true
		}
	}
	again := 0
	for len(missing) > 0 {
		e := worker.next()
		n := number(t, e)
		if at, acked := load.acked[n]; acked {
			again++
			if at.Before(killedAt.Add(-settledFor)) {
				t.Errorf("event %d came again, acknowledged %v before the end", n, killedAt.Sub(at))
			}
		} else if !missing[n] {
			t.Errorf("event %d came twice", n)
		}
		delete(missing, n)
		if err := e.AckWait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d stored, %d answered OK, %d acknowledged, %d of them came again", len(stored), len(load.confirmed), len(load.acked), again)
}

func number(t *testing.T, e wire.Event) int {
	t.Helper()
	n, err := strconv.Atoi(string(e.Payload))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// load publishes numbers as fast as it may, and acknowledges every other event that comes, until
// its hub is gone.
type load struct {
	mu        sync.Mutex
	confirmed map[int]bool
	acked     map[int]time.Time // when the OK came
	enough    chan struct{}
	target    int
	wg        sync.WaitGroup
}

func startLoad(t *testing.T, hub *node) *load {
	t.Helper()
	l := &load{confirmed: map[int]bool{}, acked: map[int]time.Time{}, enough: make(chan struct{})}
	publisher, worker := hub.dial(), hub.dial()
	never := 0
	work := make(chan wire.Event, 100_000)
	_, err := worker.Subscribe(t.Context(), "load", "worker", wire.SubscribeOptions{MaxInFlight: 10_000, MaxAttempts: &never}, func(e wire.Event) { work <- e })
	if err != nil {
		t.Fatal(err)
	}
	l.wg.Go(func() {
		for {
			select {
			case e := <-work:
				if n := number(t, e); n%2 == 0 && e.AckWait(context.Background()) == nil {
					l.mu.Lock()
					l.acked[n] = time.Now()
					l.mu.Unlock()
				}
			case <-worker.Done():
				return
			}
		}
	})
	l.wg.Go(func() {
		for n := 0; ; n++ {
			err := publisher.PublishAsync("load", strconv.AppendInt(nil, int64(n), 10), wire.PublishOptions{}, func(_ string, err error) { l.confirm(n, err) })
			if err != nil {
				return // the hub is gone
			}
		}
	})
	return l
}

func (l *load) confirm(n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		return
	}
	l.confirmed[n] = true
	if len(l.confirmed) == l.target {
		close(l.enough)
	}
}

// waitFor waits until n publishes were answered OK, and some were acknowledged long enough ago to
// be held to it.
func (l *load) waitFor(t *testing.T, n int) {
	t.Helper()
	l.mu.Lock()
	l.target = max(n, len(l.confirmed)+1)
	l.mu.Unlock()
	select {
	case <-l.enough:
	case <-time.After(patience):
		t.Fatalf("%d publishes were not answered", n)
	}
	<-time.After(2 * settledFor) // the load goes on meanwhile
}

func (l *load) wait() { l.wg.Wait() }
