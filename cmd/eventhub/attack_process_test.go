//go:build unix

package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/acl"
	"eventhub/sdk/go/wire"
)

// attackFor is how long each flood and each attack lasts: short in everyday runs, as long as one
// likes with -attack.for=30s.
var attackFor = flag.Duration("attack.for", 500*time.Millisecond, "how long each flood of TestFloods and each attack of TestAttacks lasts")

const (
	// floodConnections and floodWaiting are limits of the hub that is flooded, low enough to be
	// reached by a test.
	floodConnections = 1500
	floodWaiting     = 512
	// neighbourEvery is the pace of the neighbour's events, and neighbourPatience what its 99th
	// percentile may be, though attackers and neighbour run on the same cores as the hub.
	neighbourEvery    = 10 * time.Millisecond
	neighbourPatience = time.Second
	// newcomerTries is how often somebody may have to connect to a hub that is flooded.
	newcomerTries = 5
)

// floodFrame is what attackers send many of.
const floodFrame = `{"op":"PUBLISH","topic":"flood.frames","payload":"xyzzy"}`

const upgradeRequest = "GET / HTTP/1.1\r\nHost: hub\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
	"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"

// floodedHub is the hub under attack, its neighbour, and a token of the attacker's own.
type floodedHub struct {
	hub        *node
	address    string
	secret     []byte
	dir        string // of the hub's data, where the test gave one
	topics     string // the topics file, likewise
	secretFile string
	token      string
	neighbour  *neighbour
}

func newFloodedHub(t *testing.T, flags ...string) *floodedHub {
	t.Helper()
	f := &floodedHub{secret: []byte("0123456789abcdef0123456789abcdef")}
	f.secretFile = filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(f.secretFile, f.secret, 0o600); err != nil {
		t.Fatal(err)
	}
	f.hub = startNode(t, append([]string{"--jwt-secret-file=" + f.secretFile, "--log-level=debug"}, flags...)...)
	f.address = strings.TrimPrefix(f.hub.url, "ws://")
	f.token = f.sign(t, "eve", "*:flood.**")
	f.neighbour = startNeighbour(t, f)
	return f
}

// sign makes a token of the hub's.
func (f *floodedHub) sign(t *testing.T, subject string, scopes ...string) string {
	t.Helper()
	token, err := acl.Sign(f.secret, acl.Grant{Subject: subject, Scopes: scopes, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// pass lets time pass.
func (f *floodedHub) pass(d time.Duration) { <-time.After(d) }

// memory is the resident set of the hub's process, in MiB.
func (f *floodedHub) memory(t *testing.T) int {
	t.Helper()
	m, err := residentSet(f.hub)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// residentSet returns that of the process of a hub, in MiB.
func residentSet(n *node) (int, error) {
	p, err := psutil.NewProcess(int32(n.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	m, err := p.MemoryInfo()
	if err != nil {
		return 0, err
	}
	return int(m.RSS >> 20), nil
}

// watchMemory looks at the memory until peak is called, which returns the most that was seen.
func (f *floodedHub) watchMemory(t *testing.T) (peak func() int) {
	t.Helper()
	stop, ended := make(chan struct{}), make(chan struct{})
	most := 0
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			if m, err := residentSet(f.hub); err == nil {
				most = max(most, m)
			}
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	}()
	return func() int {
		close(stop)
		<-ended
		return most
	}
}

// neighbour publishes an event every neighbourEvery on one connection and consumes them on another,
// with a token of its own.
type neighbour struct {
	t          *testing.T
	topic      string
	stopped    chan struct{}
	ended      chan struct{}
	requests   paced // over HTTP
	joins      paced
	requesting sync.WaitGroup

	mu    sync.Mutex
	due   []time.Time     // when the events were to be published
	took  []time.Duration // from then until they came; 0 for those that have not
	fault error           // of a publish
}

func startNeighbour(t *testing.T, f *floodedHub) *neighbour {
	t.Helper()
	n := &neighbour{t: t, topic: "neighbour", stopped: make(chan struct{}), ended: make(chan struct{})}
	token := f.sign(t, "neighbour", "*:neighbour.**")
	publisher, consumer := f.hub.dialWith(token), f.hub.dialWith(token)
	_, err := consumer.Subscribe(t.Context(), n.topic, "g", wire.SubscribeOptions{}, func(e wire.Event) {
		i, err := strconv.Atoi(string(e.Payload))
		if err == nil {
			n.came(i)
			err = e.Ack()
		}
		if err != nil {
			n.fail(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	go n.run(publisher)
	web := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: requesters}}
	t.Cleanup(web.CloseIdleConnections)
	n.requesting.Go(func() {
		n.requests.run(requesters, requestEvery, n.stopped, func(ctx context.Context, _, i int) error {
			return requestInTurn(ctx, web, f.hub.http, token, i)
		})
	})
	var joining [joiners]*wire.Conn
	for i := range joining {
		joining[i] = f.hub.dialWith(token)
	}
	n.requesting.Go(func() {
		n.joins.run(joiners, joinEvery, n.stopped, func(ctx context.Context, worker, _ int) error { return join(ctx, joining[worker]) })
	})
	t.Cleanup(n.stop)
	return n
}

func (n *neighbour) run(publisher *wire.Conn) {
	defer close(n.ended)
	timer := time.NewTimer(0)
	defer timer.Stop()
	// What was delayed is published as soon as it can be, and counts from when it was due.
	for due := time.Now(); ; due = due.Add(neighbourEvery) {
		timer.Reset(time.Until(due))
		select {
		case <-timer.C:
		case <-n.stopped:
			return
		}
		n.mu.Lock()
		i := len(n.due)
		n.due, n.took = append(n.due, due), append(n.took, 0)
		n.mu.Unlock()
		err := publisher.PublishAsync(n.topic, strconv.AppendInt(nil, int64(i), 10), wire.PublishOptions{}, func(_ string, err error) { n.fail(err) })
		n.fail(err)
	}
}

func (n *neighbour) stop() {
	select {
	case <-n.stopped:
	default:
		close(n.stopped)
	}
	<-n.ended
	n.requesting.Wait()
}

func (n *neighbour) came(i int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.took[i] == 0 {
		n.took[i] = max(time.Since(n.due[i]), 1)
	}
}

func (n *neighbour) fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fault == nil {
		n.fault = err
	}
}

// latency is from the moment an event was to be published until it came.
type latency struct {
	events   int
	p50, p99 time.Duration
	slowest  time.Duration
}

func (l latency) String() string {
	round := func(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
	return fmt.Sprintf("p50 %v, p99 %v, most %v (%d events)", round(l.p50), round(l.p99), round(l.slowest), l.events)
}

// during waits for all events that were due while what ran.
func (n *neighbour) during(what func()) latency {
	n.t.Helper()
	count := func() int {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.due)
	}
	from := count()
	what()
	to := count()
	var took []time.Duration
	waitFor(n.t, "the neighbour's events", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.fault != nil {
			n.t.Fatalf("the neighbour: %v", n.fault)
		}
		took = slices.Clone(n.took[from:to])
		return !slices.Contains(took, 0)
	})
	if len(took) == 0 {
		n.t.Fatal("the neighbour did nothing")
	}
	return latencyOf(took)
}

func latencyOf(took []time.Duration) latency {
	slices.Sort(took)
	return latency{events: len(took), p50: took[len(took)/2], p99: took[len(took)*99/100], slowest: took[len(took)-1]}
}

// flooder is a connection of a flood. It sends bytes as they are below the WebSocket.
type flooder struct {
	t   *testing.T
	ws  *websocket.Conn
	raw net.Conn
}

// flooder opens a connection. Connections of the flood before may still wait at the hub, which then
// lets newcomers in after some tries.
func (f *floodedHub) flooder(t *testing.T) (a *flooder, err error) {
	t.Helper()
	for range newcomerTries {
		if a, err = f.tryFlooder(t); err == nil {
			break
		}
		<-time.After(neighbourEvery)
	}
	return a, err
}

func (f *floodedHub) tryFlooder(t *testing.T) (*flooder, error) {
	t.Helper()
	a := &flooder{t: t}
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		a.raw = conn
		return conn, err
	}}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, f.hub.url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}}) //nolint:bodyclose // the library closes it
	if err != nil {
		return nil, err
	}
	ws.SetReadLimit(-1)
	a.ws = ws
	t.Cleanup(func() { _ = ws.CloseNow() })
	return a, nil
}

// enter authenticates and does not wait for the answer.
func (a *flooder) enter(token string) { a.text(`{"op":"AUTH","token":"` + token + `"}`) }

func (a *flooder) text(frame string) {
	a.t.Helper()
	if err := a.ws.Write(a.t.Context(), websocket.MessageText, []byte(frame)); err != nil {
		a.t.Fatal(err)
	}
}

// pour writes chunk again and again until the end, or until nothing is taken any more. It returns
// how often it did.
func (a *flooder) pour(chunk []byte, end time.Time) (n int) {
	_ = a.raw.SetWriteDeadline(end)
	for time.Now().Before(end) {
		if _, err := a.raw.Write(chunk); err != nil {
			return n
		}
		n++
	}
	return n
}

// answers are what a hub said to a flooder.
type answers struct{ ok, limited, other atomic.Int64 }

// read counts answers until the connection ends.
func (a *flooder) read(count *answers) {
	for {
		_, b, err := a.ws.Read(context.Background())
		text := string(b)
		switch {
		case err != nil:
			return
		case strings.HasPrefix(text, `{"op":"OK"`):
			count.ok.Add(1)
		case strings.Contains(text, `"rate_limited"`):
			count.limited.Add(1)
		default:
			count.other.Add(1)
		}
	}
}

// clientFrame is one frame of a client. The mask is zero.
func clientFrame(first byte, payload string) []byte {
	switch n := len(payload); {
	case n < 126:
		return append([]byte{first, 0x80 | byte(n), 0, 0, 0, 0}, payload...)
	default:
		return append([]byte{first, 0x80 | 126, byte(n >> 8), byte(n), 0, 0, 0, 0}, payload...)
	}
}

// crowd runs n flooders at a time and waits for them.
func crowd(n int, each func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { each(i) })
	}
	wg.Wait()
}

// floodFrames publishes at full speed. The hub refuses frames beyond the rate, and the connections
// live on.
func floodFrames(t *testing.T, f *floodedHub) {
	t.Helper()
	const connections, each = 4, 500
	chunk := slices.Concat(slices.Repeat([][]byte{clientFrame(0x81, floodFrame)}, each)...)
	var got answers
	var frames atomic.Int64
	begun := time.Now()
	end := begun.Add(*attackFor)
	crowd(connections, func(int) {
		a, err := f.flooder(t)
		if err != nil {
			t.Error(err)
			return
		}
		a.enter(f.token)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			a.read(&got)
		}()
		frames.Add(int64(each * a.pour(chunk, end)))
		select {
		case <-ended:
			t.Error("the hub has ended the connection")
		default:
			_ = a.ws.CloseNow()
			<-ended
		}
	})
	took := time.Since(begun)
	t.Logf("%d frames in %v: %d OK, %d rate_limited", frames.Load(), took.Round(time.Millisecond), got.ok.Load(), got.limited.Load())
	most := int64(connections * (2000 + 10_000*(took.Seconds()+1)))
	if got.other.Load() > 0 || got.ok.Load() == 0 || got.ok.Load() > most {
		t.Errorf("%d were answered OK, at most %d may be; %d otherwise", got.ok.Load(), most, got.other.Load())
	}
}

// floodUnauthorized sends frames before AUTH, and AUTH that is refused.
func floodUnauthorized(t *testing.T, f *floodedHub) {
	t.Helper()
	publish := slices.Repeat([][]byte{clientFrame(0x81, floodFrame)}, 500)
	auth := slices.Repeat([][]byte{clientFrame(0x81, `{"op":"AUTH","token":"`+f.token+`x"}`)}, 100)
	var got answers
	var connections atomic.Int64
	end := time.Now().Add(*attackFor)
	crowd(4, func(i int) {
		for time.Now().Before(end) {
			a, err := f.flooder(t)
			if err != nil {
				continue // it is no wonder, while others do the same
			}
			connections.Add(1)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				a.read(&got)
			}()
			a.pour(slices.Concat([][][]byte{publish, auth}[i%2]...), end)
			_ = a.ws.CloseNow()
			<-ended
		}
	})
	t.Logf("%d connections, %d frames refused", connections.Load(), got.other.Load())
	if got.ok.Load() > 0 {
		t.Errorf("%d frames were answered OK", got.ok.Load())
	}
}

// floodConnects opens WebSockets and drops them.
func floodConnects(t *testing.T, f *floodedHub) {
	t.Helper()
	var opened, failed atomic.Int64
	end := time.Now().Add(*attackFor)
	crowd(8, func(int) {
		for time.Now().Before(end) {
			if conn, status := f.upgrade(); conn != nil && status == http.StatusSwitchingProtocols {
				opened.Add(1)
				drop(conn)
			} else {
				failed.Add(1)
				drop(conn)
			}
		}
	})
	t.Logf("%d opened and dropped, %d refused", opened.Load(), failed.Load())
	if opened.Load() == 0 {
		t.Error("none was opened")
	}
}

// upgrade opens a WebSocket the short way. conn is nil when there is none.
func (f *floodedHub) upgrade() (conn net.Conn, status int) {
	conn, err := net.DialTimeout("tcp", f.address, patience)
	if err != nil {
		return nil, 0
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, upgradeRequest); err != nil {
		return conn, 0
	}
	var line [len("HTTP/1.1 101")]byte
	if _, err := io.ReadFull(conn, line[:]); err != nil {
		return conn, 0
	}
	status, _ = strconv.Atoi(string(line[len(line)-3:]))
	return conn, status
}

// drop closes a connection without leaving its port behind.
func drop(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
		_ = tcp.Close()
	}
}

// floodHeld opens as many WebSockets as the hub takes, and keeps them without AUTH. Places get free
// by themselves.
func floodHeld(t *testing.T, f *floodedHub) {
	t.Helper()
	var mu sync.Mutex
	var held []net.Conn
	refused := 0
	crowd(8, func(int) {
		for {
			conn, status := f.upgrade()
			mu.Lock()
			held = append(held, conn)
			if status != http.StatusSwitchingProtocols {
				refused++
			}
			enough := refused > 50 || len(held) > 3*floodConnections
			mu.Unlock()
			if enough {
				return
			}
		}
	})
	t.Logf("%d held, %d refused, memory %d MiB", len(held)-refused, refused, f.memory(t))
	begun := time.Now()
	tries := newcomer(t, f)
	t.Logf("a newcomer came in after %v, at try %d", time.Since(begun).Round(time.Millisecond), tries)
	if tries > newcomerTries { // those who do not authenticate make room for each other only
		t.Errorf("a newcomer had to try %d times", tries)
	}
	for _, conn := range held {
		drop(conn)
	}
}

// newcomer connects and authenticates, however often it has to try.
func newcomer(t *testing.T, f *floodedHub) (tries int) {
	t.Helper()
	waitFor(t, "a newcomer is let in", func() bool {
		tries++
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := wire.Dial(ctx, f.hub.url, wire.Options{Token: nodeToken})
		if err != nil {
			return false
		}
		c.Abort()
		return true
	})
	return tries
}

// floodHalfOpen makes TCP connections that send nothing, or a header that does not end, faster than
// there is room.
func floodHalfOpen(t *testing.T, f *floodedHub) {
	t.Helper()
	const workers, each = 16, 2 * floodWaiting / 16
	end := time.Now().Add(*attackFor)
	var opened atomic.Int64
	done := make(chan struct{})
	tries := 0
	go func() {
		defer close(done)
		<-time.After(*attackFor / 2)
		tries = newcomer(t, f)
	}()
	crowd(workers, func(w int) {
		held := make([]net.Conn, each)
		for i := 0; time.Now().Before(end); i = (i + 1) % each {
			drop(held[i])
			conn, err := net.DialTimeout("tcp", f.address, patience)
			if err != nil {
				continue
			}
			opened.Add(1)
			held[i] = conn
			if w%2 == 0 {
				_, _ = io.WriteString(conn, upgradeRequest[:1])
				if other := held[(i+each/2)%each]; other != nil {
					_, _ = io.WriteString(other, upgradeRequest[1:2]) // a byte more now and then
				}
			}
		}
		for _, conn := range held {
			drop(conn)
		}
	})
	<-done
	t.Logf("%d opened; a newcomer came in at try %d", opened.Load(), tries)
}

// floodFragments sends messages in fragments of one byte, which do not end.
func floodFragments(t *testing.T, f *floodedHub) {
	t.Helper()
	chunk := slices.Concat(slices.Repeat([][]byte{clientFrame(0x00, "x")}, 4000)...)
	var fragments atomic.Int64
	end := time.Now().Add(*attackFor)
	crowd(16, func(int) {
		a, err := f.flooder(t)
		if err != nil {
			t.Error(err)
			return
		}
		a.enter(f.token)
		if _, err := a.raw.Write(clientFrame(0x01, `{"op":"PUBLISH","topic":"flood.fragments","payload":"`)); err != nil {
			t.Error(err)
		}
		fragments.Add(int64(4000 * a.pour(chunk, end)))
		_ = a.ws.CloseNow()
	})
	t.Logf("%d fragments", fragments.Load())
}

// floodUnfinished sends messages of nearly the largest size that is kept, and not their ends.
func floodUnfinished(t *testing.T, f *floodedHub) {
	t.Helper()
	unfinished(t, f, 240, 4<<20, f.token)
}

// floodUnfinishedAuth is the same without a token, over all the connections there are.
func floodUnfinishedAuth(t *testing.T, f *floodedHub) {
	t.Helper()
	unfinished(t, f, floodConnections-100, 64<<10, "")
}

func unfinished(t *testing.T, f *floodedHub, connections, size int, token string) {
	t.Helper()
	begin := binary.BigEndian.AppendUint64([]byte{0x81, 0x80 | 127}, uint64(size))
	begin = append(begin, 0, 0, 0, 0)
	body := make([]byte, size-1)
	end := time.Now().Add(patience)
	crowd(8, func(int) {
		for range connections / 8 {
			a, err := f.flooder(t)
			if err != nil {
				t.Error(err)
				return
			}
			if token != "" {
				a.enter(token)
			}
			_ = a.raw.SetWriteDeadline(end)
			if _, err := a.raw.Write(begin); err == nil {
				_, _ = a.raw.Write(body) // the hub may be right to end it
			}
		}
	})
}

// floodPings sends pings and reads the pongs.
func floodPings(t *testing.T, f *floodedHub) {
	t.Helper()
	pings(t, f, true)
}

// floodPingsUnread sends pings and does not read.
func floodPingsUnread(t *testing.T, f *floodedHub) {
	t.Helper()
	pings(t, f, false)
}

func pings(t *testing.T, f *floodedHub, read bool) {
	t.Helper()
	chunk := slices.Concat(slices.Repeat([][]byte{clientFrame(0x89, strings.Repeat("p", 125))}, 500)...)
	var sent, pongs atomic.Int64
	end := time.Now().Add(*attackFor)
	crowd(8, func(int) {
		a, err := f.flooder(t)
		if err != nil {
			t.Error(err)
			return
		}
		a.enter(f.token)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if read {
				n, _ := io.Copy(io.Discard, a.raw)
				pongs.Add(n / 127)
			}
		}()
		sent.Add(int64(500 * a.pour(chunk, end)))
		_ = a.raw.Close()
		<-ended
		_ = a.ws.CloseNow()
	})
	t.Logf("%d pings, %d pongs", sent.Load(), pongs.Load())
}

// floodUnread subscribes to many megabytes, publishes on, and never reads: many connections with
// one subscription each.
func floodUnread(t *testing.T, f *floodedHub) {
	t.Helper()
	unread(t, f, 8, 1)
}

// floodUnreadGroups is the same over one connection with as many subscriptions as it may have.
func floodUnreadGroups(t *testing.T, f *floodedHub) {
	t.Helper()
	unread(t, f, 1, 256)
}

func unread(t *testing.T, f *floodedHub, connections, groups int) {
	t.Helper()
	const events, size = 40, 500_000
	c := f.hub.dial()
	topic := fmt.Sprintf("flood.big-%d", connections)
	for range events {
		publishTo(t, c, topic, `"`+strings.Repeat("xyzzy", size/5)+`"`)
	}
	end := time.Now().Add(*attackFor)
	var frames atomic.Int64
	crowd(connections, func(i int) {
		a := &flooder{t: t, ws: dialSilent(t, f.hub.url)}
		a.enter(f.token)
		for g := range groups {
			a.text(fmt.Sprintf(`{"op":"SUBSCRIBE","topic":%q,"group":"g%d-%d","opts":{"from":"earliest","maxInFlight":10000,"batchSize":10000}}`, topic, i, g))
		}
		ctx, cancel := context.WithDeadline(t.Context(), end)
		defer cancel()
		for a.ws.Write(ctx, websocket.MessageText, []byte(floodFrame)) == nil {
			frames.Add(1)
		}
		<-ctx.Done()
	})
	t.Logf("%d frames were taken", frames.Load())
}
