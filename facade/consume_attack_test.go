package facade_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// socket opens a connection that holds little on either side, and sends a request.
func (r *rig) socket(t *testing.T, request string) net.Conn {
	t.Helper()
	hub := httptest.NewUnstartedServer(r.srv.HTTP())
	hub.Config.ConnState = func(conn net.Conn, state http.ConnState) {
		if tcp, ok := conn.(*net.TCPConn); ok && state == http.StateNew {
			if err := tcp.SetWriteBuffer(64 << 10); err != nil {
				t.Error(err)
			}
		}
	}
	hub.Start()
	t.Cleanup(hub.Close)
	var d net.Dialer
	conn, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(hub.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if tcp, ok := conn.(*net.TCPConn); ok {
		if err := tcp.SetReadBuffer(64 << 10); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	return conn
}

// trickle reads an answer so slowly that it takes longer than any test waits.
func trickle(t *testing.T, conn net.Conn) {
	t.Helper()
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(600 * time.Millisecond)
		defer tick.Stop()
		piece := make([]byte, 16<<10)
		for {
			if _, err := io.ReadFull(conn, piece); err != nil {
				return
			}
			select {
			case <-tick.C:
			case <-done:
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(done)
		_ = conn.Close()
		<-ended
	})
}

const (
	streamRequest = "GET /subscribe?topic=t&group=g&from=earliest&ackTimeoutMs=3600000 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "
	pullBody      = `{"opts":{"from":"earliest","maxAttempts":1,"ackTimeoutMs":3600000}}`
)

func pullRequestOf(token string) string {
	return "POST /groups/t/g/pull HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + token +
		"\r\nContent-Length: " + strconv.Itoa(len(pullBody)) + "\r\n\r\n" + pullBody
}

// A client that takes a little of an answer now and then does not keep a hub from ending.
func TestCloseBesideSlowReaders(t *testing.T) {
	t.Parallel()
	for name, request := range map[string]string{"stream": streamRequest + rigToken + "\r\n\r\n", "pull": pullRequestOf(rigToken)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(cfg *facade.Config) {
				cfg.Limits.WriteStall, cfg.Limits.AnswerStall, cfg.Limits.CloseGrace = time.Hour, time.Hour, time.Second
			})
			r.large(t, "t")
			conn := r.socket(t, request)
			// the answer has begun
			if _, err := io.ReadFull(conn, make([]byte, 32<<10)); err != nil {
				t.Fatal(err)
			}
			trickle(t, conn)
			closed := make(chan error, 1)
			go func() { closed <- r.srv.Close() }()
			select {
			case err := <-closed:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(rigPatience):
				_ = conn.Close()
				<-closed
				t.Error("the hub waited for the client")
			}
		})
	}
}

// A client that reads slowly gets no more after its token has ended.
func TestSlowStreamEndsWithToken(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) {
		cfg.Limits.WriteStall, cfg.Limits.CloseGrace = time.Hour, time.Second
	})
	all := "Bearer " + grant(t, "all", "publish:**")
	payload := `"` + strings.Repeat("x", 900<<10) + `"`
	for range 4 {
		r.put(t, "t", payload, "Authorization", all)
	}
	var conn net.Conn
	shortLived(t, func(token string) bool {
		conn = r.socket(t, streamRequest+token+"\r\n\r\n")
		head := make([]byte, 32<<10)
		// A refusal is shorter, and does not end the connection.
		_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, err := io.ReadFull(conn, head)
		_ = conn.SetReadDeadline(time.Time{})
		return err == nil && bytes.Contains(head, []byte("event: event"))
	}, "subscribe:t")
	trickle(t, conn)
	r.seen.await(t, "stream closed 4003", 1)
}

// A pull whose answer nobody takes gives its events back, and long before their leases end. None
// has a failed attempt, whatever part of the answer went out: no client can read half an answer.
func TestUnreadPull(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	impatient := newRigOn(t, jetstream.Config{URL: url}, func(cfg *facade.Config) { cfg.Limits.AnswerStall = 200 * time.Millisecond })
	r := newRigOn(t, jetstream.Config{URL: url}, nil)
	n := r.large(t, "t")
	impatient.socket(t, pullRequestOf(rigToken))
	impatient.seen.await(t, "consumer pull ends", 1)
	got := make(map[string]int)
	for end := time.Now().Add(time.Minute); len(got) < n; { // the leases are of an hour
		if time.Now().After(end) {
			t.Fatalf("%d of %d events come to another member", len(got), n)
		}
		for _, e := range r.pull(t, "t", "g", `{"wait_ms":500}`) {
			got[e.Event.ID] = e.Ctx.Attempt
			r.wantSettled(t, "ack", "", e.Ack)
		}
	}
	for _, attempt := range got {
		if attempt != 1 {
			t.Errorf("the attempts are %v, want 1", got)
			break
		}
	}
}

// A stream has no body: the hub could not notice that a client leaves that still sends one.
func TestStreamWithBody(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, head := range []string{"Content-Length: 5", "Transfer-Encoding: chunked"} {
		conn := r.socket(t, streamRequest+rigToken+"\r\n"+head+"\r\n\r\n")
		if err := conn.SetReadDeadline(time.Now().Add(rigPatience)); err != nil {
			t.Fatal(err)
		}
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: got %s", head, res.Status)
		} else if b, _ := io.ReadAll(res.Body); !strings.Contains(string(b), `"bad_options"`) {
			t.Errorf("%s: got %s", head, b)
		}
		_ = res.Body.Close()
	}
}

// otherKey is a handle as another cluster would give it.
func otherKey(t *testing.T, text string, i int) string {
	t.Helper()
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	raw[1] ^= byte(1 + i%2) // of the id of the key
	raw[5] = byte(i)        // of the lease
	raw[6] = byte(i >> 8)
	return base64.RawURLEncoding.EncodeToString(raw)
}

// Many handles of hubs of another NATS, as a program has that was moved, are over at once, and the
// others of the request are settled.
func TestManyHandlesOfAnotherCluster(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.pull(t, "t", "g", `{"wait_ms":0}`)
	r.put(t, "t", "1")
	e := r.pullOne(t, "t", "g", "")
	handles := []string{e.Ack}
	for i := range 999 {
		handles = append(handles, otherKey(t, e.Ack, i))
	}
	a := r.settle(t, "ack", "", handles...)
	if a.status != http.StatusOK || !strings.HasPrefix(a.text, `{"settled":1,"failed":[{`) || strings.Count(a.text, `"code":"lease_over"`) != 999 {
		t.Errorf("got %d %.200s", a.status, a.text)
	}
}

// A NACK with a reason that NATS would not carry reaches another hub.
func TestLongReasonOverHubs(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	one, two := newRigOn(t, jetstream.Config{URL: url}, nil), newRigOn(t, jetstream.Config{URL: url}, nil)
	one.pull(t, "t", "g", `{"wait_ms":0}`)
	one.put(t, "t", "1")
	e := one.pullOne(t, "t", "g", `"maxAttempts":1`)
	body := `{"ack":["` + e.Ack + `"],"reason":"` + strings.Repeat("<", 900<<10) + `"}`
	if a := two.post(t, "/nack", body); a.status != http.StatusOK {
		t.Errorf("got %d %.200s", a.status, a.text)
	}
	letter := one.pullOne(t, "dlq.t", "d", `"from":"earliest"`)
	if len(letter.Event.Payload) > 10<<10 {
		t.Errorf("the letter has %d bytes", len(letter.Event.Payload))
	}
}

// A settlement has as many handles as the protocol says, whatever size events may have.
func TestManyHandlesOfSmallEvents(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Limits: jetstream.Limits{MaxPayload: 4 << 10}}, nil)
	topic := strings.Repeat("t", 250)
	group := strings.Repeat("g", 128)
	r.pull(t, topic, group, `{"wait_ms":0}`)
	const n = 1000
	for i := range 20 {
		r.put(t, topic, strconv.Itoa(i))
	}
	var handles []string
	eventually(t, "the events come", func() bool {
		for _, e := range r.pull(t, topic, group, "") {
			handles = append(handles, e.Ack)
		}
		return len(handles) == 20
	})
	for len(handles) < n {
		handles = append(handles, handles[0])
	}
	if a := r.settle(t, "ack", "", handles...); a.status != http.StatusOK || !strings.HasPrefix(a.text, `{"settled":`) {
		t.Errorf("got %d %.200s", a.status, a.text)
	}
}

// Old clients and tools speak HTTP/1.0: a stream is then one answer until the connection ends.
func TestStreamOverHTTP10(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	conn := r.socket(t, strings.Replace(streamRequest, "HTTP/1.1", "HTTP/1.0", 1)+rigToken+"\r\n\r\n")
	if err := conn.SetReadDeadline(time.Now().Add(rigPatience)); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK || len(res.TransferEncoding) != 0 {
		t.Fatalf("got %s, %v", res.Status, res.TransferEncoding)
	}
	s := &sse{t: t, body: res.Body, lines: bufio.NewReader(res.Body), res: res}
	r.put(t, "t", "1")
	r.wantSettled(t, "ack", "", s.event().Ack)
	_ = conn.Close()
	r.seen.await(t, "consumer stream ends", 1)
}

// The methods and headers of a page that reads a stream by fetch, and of one that asks for more
// than there is.
func TestStreamMethods(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Origins = []string{"https://app.example.com"} })
	ask := func(method, path string, headers ...string) (status int, header http.Header) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, r.http.URL+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		return res.StatusCode, res.Header
	}
	token := []string{"Authorization", "Bearer " + rigToken}
	if status, header := ask(http.MethodHead, "/subscribe?topic=t&group=g", token...); status != http.StatusMethodNotAllowed || header.Get("Allow") != "GET" {
		t.Errorf("HEAD: %d, Allow %q", status, header.Get("Allow"))
	}
	for _, path := range []string{"/subscribe?topic=t&group=g", "/groups/t/g/pull", "/ack", "/nack", "/modack"} {
		method := http.MethodPost
		if strings.HasPrefix(path, "/subscribe") {
			method = http.MethodGet
		}
		for origin, want := range map[string]string{"https://app.example.com": "https://app.example.com", "https://evil.example.com": ""} {
			status, header := ask(http.MethodOptions, path, "Origin", origin, "Access-Control-Request-Method", method,
				"Access-Control-Request-Headers", "authorization,content-type,last-event-id")
			if got := header.Get("Access-Control-Allow-Origin"); got != want || status >= 300 {
				t.Errorf("%s from %s: %d, origin %q", path, origin, status, got)
			}
			if want == "" {
				continue
			}
			// A browser does not take * for Authorization.
			allowed := strings.ToLower(header.Get("Access-Control-Allow-Headers"))
			if !strings.Contains(allowed, "authorization") || !strings.Contains(allowed, "last-event-id") {
				t.Errorf("%s: the headers %q are allowed", path, allowed)
			}
		}
	}
}

// Compression would keep events back: a stream comes as it is, whatever the client takes.
func TestStreamIsNotCompressed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.subscribe(t, "topic=t&group=g", "Accept-Encoding", "gzip, zstd, br")
	if got := s.res.Header.Get("Content-Encoding"); got != "" {
		t.Errorf("Content-Encoding: %s", got)
	}
	if got := s.res.Header.Get("Cache-Control"); !strings.Contains(got, "no-store") || !strings.Contains(got, "no-transform") {
		t.Errorf("Cache-Control: %s", got)
	}
	r.put(t, "t", "1")
	s.event()
}

// A group that is moved, repaired, paused or deleted while a client holds events: handles of before
// are over, and settle nothing of what comes again.
func TestHandlesOfAMovedGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.subscribe(t, "topic=t&group=g&from=earliest")
	r.pull(t, "t", "g", `{"wait_ms":0}`)
	r.put(t, "t", "1")
	held := s.event()
	group := r.bus.Group("t", "g")
	if _, err := group.Move(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	again := s.event()
	if again.Event.ID != held.Event.ID || again.Ack == held.Ack {
		t.Errorf("got %+v after %+v", again, held)
	}
	for _, op := range []string{"ack", "nack", "modack"} {
		r.wantOver(t, op, held.Ack)
	}
	r.wantSettled(t, "modack", "", again.Ack)

	// A pause stops what has not come, and lets clients settle what they hold.
	if err := group.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.wantSettled(t, "ack", "", again.Ack)
	r.put(t, "t", "2")
	if got := r.pull(t, "t", "g", `{"wait_ms":300}`); len(got) != 0 {
		t.Errorf("a paused group gave %+v", got)
	}
	if err := group.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	last := s.event()
	if err := group.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.wantEnd(message{name: "error", data: `{"op":"ERR","code":"not_subscribed","msg":"t::g"}`})
	r.wantOver(t, "ack", last.Ack)
}

// What clients of pulls hold is given back when a hub shuts down and they do not settle it, without
// a failed attempt that would make a dead letter.
func TestDrainOfUnsettledPulls(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	old := newRigOn(t, jetstream.Config{URL: url}, func(cfg *facade.Config) { cfg.DrainGrace = 100 * time.Millisecond })
	next := newRigOn(t, jetstream.Config{URL: url}, nil)
	old.pull(t, "t", "g", `{"wait_ms":0}`)
	old.put(t, "t", "1")
	e := old.pullOne(t, "t", "g", `"maxAttempts":1,"ackTimeoutMs":3600000`)
	ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
	defer cancel()
	if err := old.srv.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	again := next.pullOne(t, "t", "g", `"maxAttempts":1`)
	if again.Event.ID != e.Event.ID {
		t.Errorf("got %+v after %+v", again, e)
	}
	next.wantOver(t, "ack", e.Ack)
	next.wantSettled(t, "ack", "", again.Ack)
}

func compact(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, []byte(text)); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A handle that comes twice in a request is one event.
func TestHandleTwiceInARequest(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.pull(t, "t", "g", `{"wait_ms":0}`)
	r.put(t, "t", "1")
	e := r.pullOne(t, "t", "g", "")
	for _, op := range []string{"modack", "ack"} {
		if a := r.settle(t, op, "", e.Ack, e.Ack, e.Ack); a.status != http.StatusOK || compact(t, a.text) != `{"settled":1}` {
			t.Errorf("%s: got %d %s", op, a.status, a.text)
		}
	}
	a := r.settle(t, "nack", "", e.Ack, e.Ack)
	if a.status != http.StatusGone || strings.Count(a.text, `{"ack":`) != 1 {
		t.Errorf("got %d %s", a.status, a.text)
	}
}
