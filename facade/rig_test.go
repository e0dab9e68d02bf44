package facade_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/docs"
	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/facade/hubtest"
	"eventhub/jetstream"
)

// rigPatience is how long a test waits for what must happen.
const rigPatience = time.Minute

const rigToken = "open sesame"

// rig is a hub on loopback: a bus with its embedded server, and a facade on two listeners.
type rig struct {
	bus  *jetstream.Bus
	srv  *facade.Server
	ws   site
	http site
	seen *record
}

// site is a listener of a hub.
type site struct {
	URL    string // http://
	client *http.Client
}

func (s site) addr() string { return strings.TrimPrefix(s.URL, "http://") }

// Client is an HTTP client for the time of the test.
func (s site) Client() *http.Client { return s.client }

// newRig starts a hub that ends with the test. change may be nil.
func newRig(t *testing.T, change func(*facade.Config)) *rig {
	t.Helper()
	return newRigOn(t, jetstream.Config{}, change)
}

// newRigOn is newRig with a bus of this configuration, in memory where that names no NATS.
func newRigOn(t *testing.T, on jetstream.Config, change func(*facade.Config)) *rig {
	t.Helper()
	if on.AckWait == 0 {
		on.AckWait = 2 * rigPatience // no event comes again for the end of its lease
	}
	r := &rig{seen: &record{closed: make(chan int, 100), counts: make(map[string]int)}}
	hub := hubtest.New(t, hubtest.Token(rigToken), hubtest.Bus(func(cfg *jetstream.Config) { *cfg = on }), hubtest.Facade(func(cfg *facade.Config) {
		cfg.Observer, cfg.Documents = r.seen, docs.Handlers()
		if change != nil {
			change(cfg)
		}
	}))
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	r.bus, r.srv = hub.Bus, hub.Server
	r.ws = site{"http" + strings.TrimPrefix(hub.WebSocket, "ws"), &http.Client{Transport: transport}}
	r.http = site{hub.HTTP, &http.Client{Transport: apitest.Transport(t, apitest.Clients, transport)}}
	return r
}

// record is an Observer that tells tests what it saw.
type record struct {
	closed chan int
	mu     sync.Mutex
	counts map[string]int
}

func (r *record) add(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[what]++
}

func (r *record) count(what string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts[what]
}

// await waits until what has been counted n times.
func (r *record) await(tb testing.TB, what string, n int) {
	tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(rigPatience)
	for r.count(what) < n {
		select {
		case <-tick.C:
		case <-timeout:
			tb.Fatalf("%s was counted %d times, want %d", what, r.count(what), n)
		}
	}
}

// ConnectionClosed does not block: a test that looks at codes has few connections.
func (r *record) ConnectionClosed(c int) {
	select {
	case r.closed <- c:
	default:
	}
}

func (r *record) ConnectionOpened()        { r.add("opened") }
func (r *record) FrameReceived(op string)  { r.add("op " + op) }
func (r *record) ErrorSent(code string)    { r.add("error " + code) }
func (r *record) LimitReached(name string) { r.add("limit " + name) }
func (r *record) RequestServed(int)        { r.add("request") }
func (r *record) EventsRead(int)           {}
func (r *record) Consumers(kind string, delta int) {
	r.add("consumer " + kind + map[bool]string{true: " begins", false: " ends"}[delta > 0])
}
func (r *record) StreamClosed(c int) { r.add("stream closed " + strconv.Itoa(c)) }
func (r *record) Settled(op, result string, n int) {
	for range n {
		r.add("settled " + op + " " + result)
	}
}

// peer is a WebSocket client that sends and expects texts.
type peer struct {
	t      *testing.T
	conn   *websocket.Conn
	frames *apitest.Frames
}

// try connects, or says with which status the hub refused.
func (r *rig) try(t *testing.T, header http.Header) (conn *websocket.Conn, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
	defer cancel()
	conn, res, err := websocket.Dial(ctx, r.ws.URL, &websocket.DialOptions{HTTPHeader: header})
	if res == nil {
		t.Fatal(err)
	}
	if res.Body != nil {
		_ = res.Body.Close()
	}
	if conn != nil {
		conn.SetReadLimit(-1)
		t.Cleanup(func() { _ = conn.CloseNow() })
	}
	return conn, res.StatusCode
}

// dial connects and says nothing.
func (r *rig) dial(t *testing.T) *peer {
	t.Helper()
	conn, status := r.try(t, nil)
	if conn == nil {
		t.Fatalf("refused with %d", status)
	}
	return &peer{t: t, conn: conn, frames: apitest.NewFrames(t)}
}

// login connects and authenticates.
func (r *rig) login(t *testing.T) *peer {
	t.Helper()
	p := r.dial(t)
	p.send(`{"op":"AUTH","token":"` + rigToken + `"}`)
	p.want(`{"op":"OK"}`)
	return p
}

func (p *peer) send(frames ...string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
	defer cancel()
	for _, f := range frames {
		p.frames.Sent(f)
		if err := p.conn.Write(ctx, websocket.MessageText, []byte(f)); err != nil {
			p.t.Fatalf("sending %.80s: %v", f, err)
		}
	}
}

// read returns the next frame.
func (p *peer) read() string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
	defer cancel()
	_, b, err := p.conn.Read(ctx)
	if err != nil {
		p.t.Fatalf("reading: %v", err)
	}
	p.frames.Received(string(b))
	return string(b)
}

// want expects exactly this frame.
func (p *peer) want(frame string) {
	p.t.Helper()
	if got := p.read(); got != frame {
		p.t.Fatalf("got  %.300s\nwant %s", got, frame)
	}
}

// reply is what tests look at in frames that hold an id or a message.
type reply struct {
	Op, Topic, Group, Code, Msg, ID string
	Corr                            any
	Event                           struct {
		ID      string
		Payload json.RawMessage
	}
	Ctx struct{ Attempt int }
}

// next reads a frame of this op, and of this code if it is an ERR.
func (p *peer) next(op, code string) reply {
	p.t.Helper()
	got := p.any()
	if got.Op != op || got.Code != code {
		p.t.Fatalf("got %+v, want %s %s", got, op, code)
	}
	return got
}

// any reads a frame.
func (p *peer) any() reply {
	p.t.Helper()
	text := p.read()
	var got reply
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		p.t.Fatalf("%.300s: %v", text, err)
	}
	return got
}

// readEvents reads EVENTs of first attempts, until there are n, or the hub closes the connection.
func (p *peer) readEvents(n int) (got int, closed websocket.StatusCode) {
	p.t.Helper()
	for ; got < n; got++ {
		ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
		_, b, err := p.conn.Read(ctx)
		cancel()
		if err != nil {
			return got, websocket.CloseStatus(err)
		}
		if !bytes.HasPrefix(b, []byte(`{"op":"EVENT"`)) || !bytes.Contains(b, []byte(`"attempt":1`)) {
			p.t.Fatalf("%.300s", b)
		}
	}
	return got, 0
}

// wantClose reads until the hub closes the connection with this code.
func (p *peer) wantClose(code websocket.StatusCode) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
	defer cancel()
	for {
		_, _, err := p.conn.Read(ctx)
		if err == nil {
			continue
		}
		if got := websocket.CloseStatus(err); got != code {
			p.t.Fatalf("closed with %d (%v), want %d", got, err, code)
		}
		return
	}
}

// wantClosed expects that the hub has seen a connection end with this code.
func (r *rig) wantClosed(t *testing.T, code int) {
	t.Helper()
	select {
	case got := <-r.seen.closed:
		if got != code {
			t.Fatalf("the hub closed with %d, want %d", got, code)
		}
	case <-time.After(rigPatience):
		t.Fatal("the hub did not close the connection")
	}
}

// eventually asks until the answer is yes.
func eventually(tb testing.TB, what string, ask func() bool) {
	tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(rigPatience)
	for !ask() {
		select {
		case <-tick.C:
		case <-end:
			tb.Fatalf("did not happen: %s", what)
		}
	}
}

// answer is what the HTTP API answered.
type answer struct {
	status int
	header http.Header
	text   string
	// From a JSON object.
	ID, Error, Code string
}

// post sends a POST to the HTTP API. headers are name, value, and so on.
func (r *rig) post(t *testing.T, path, body string, headers ...string) answer {
	t.Helper()
	return r.ask(t, http.MethodPost, path, body, headers...)
}

// ask sends a request to the HTTP API. headers are name, value, and so on.
func (r *rig) ask(t *testing.T, method, path, body string, headers ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, r.http.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	if req.Header["Authorization"] == nil {
		req.Header.Set("Authorization", "Bearer "+rigToken)
	}
	res, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	got := answer{status: res.StatusCode, header: res.Header, text: string(b)}
	if res.Header.Get("Content-Type") == "application/json" && bytes.HasPrefix(b, []byte("{")) && res.Header.Get("Content-Encoding") == "" {
		got.parse(t, b)
	}
	return got
}

func (a *answer) parse(t *testing.T, b []byte) {
	t.Helper()
	if err := json.Unmarshal(b, a); err != nil {
		t.Fatalf("%q: %v", b, err)
	}
}

func parseAnswer(t *testing.T, text string) (a answer) {
	t.Helper()
	a.parse(t, []byte(text))
	return a
}

// stored returns the events of a topic.
func (r *rig) stored(t *testing.T, topic string) []*jetstream.Event {
	t.Helper()
	var list []*jetstream.Event
	err := r.bus.History(topic).Scan(t.Context(), jetstream.ScanOptions{From: jetstream.FromEarliest}, func(e *jetstream.Event) error {
		list = append(list, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// stream begins an NDJSON request. feed sends one line; the answers are to be scanned, and nil
// where the token is refused.
func (r *rig) stream(t *testing.T, path, token string) (answers *bufio.Scanner, feed func(line string)) {
	t.Helper()
	body, sender := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/x-ndjson")
	res, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = sender.Close()
		_ = res.Body.Close()
	})
	if res.StatusCode == http.StatusUnauthorized {
		return nil, nil
	}
	return bufio.NewScanner(res.Body), func(line string) {
		t.Helper()
		if _, err := io.WriteString(sender, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
}
