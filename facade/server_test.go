package facade_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade"
	"eventhub/jetstream"
)

// masked appends a client's text message. The mask is zero, so the payload can be read in a dump.
func masked(dst []byte, text string) []byte {
	dst = append(dst, 0x81)
	switch {
	case len(text) < 126:
		dst = append(dst, 0x80|byte(len(text)))
	case len(text) < 1<<16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0x80|126), uint16(len(text)))
	default:
		dst = binary.BigEndian.AppendUint64(append(dst, 0x80|127), uint64(len(text)))
	}
	return append(append(dst, 0, 0, 0, 0), text...)
}

func unmasked(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		t.Fatal(err)
	}
	if head[0] != 0x81 || head[1] >= 126 {
		t.Fatalf("not a short text message: %x", head)
	}
	text := make([]byte, head[1])
	if _, err := io.ReadFull(r, text); err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestFirstFramesInTheSegmentOfTheUpgrade(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	// More than net/http's buffer holds, so that a part is read from it and a part from the socket.
	for _, size := range []int{1, 3000, 5000, 20_000} {
		t.Run(strconv.Itoa(size), func(t *testing.T) {
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.ws.addr())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(rigPatience))
			out := []byte("GET / HTTP/1.1\r\nHost: hub\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
				"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n")
			out = masked(out, `{"op":"AUTH","token":"`+rigToken+`","corr":"a"}`)
			out = masked(out, `{"op":"NO`+strings.Repeat("x", size)+`","corr":"b"}`)
			out = masked(out, `{"op":"ACK","topic":"t","group":"g","id":"i","corr":"c"}`)
			if _, err := conn.Write(out); err != nil {
				t.Fatal(err)
			}
			in := bufio.NewReader(conn)
			res, err := http.ReadResponse(in, nil)
			if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
				t.Fatal(res, err)
			}
			_ = res.Body.Close()
			if got := unmasked(t, in); got != `{"op":"OK","corr":"a"}` {
				t.Fatal(got)
			}
			if got := unmasked(t, in); !strings.Contains(got, `"unknown_op"`) || !strings.Contains(got, `"corr":"b"`) {
				t.Fatal(got)
			}
			if got := unmasked(t, in); !strings.Contains(got, `"not_subscribed"`) || !strings.Contains(got, `"corr":"c"`) {
				t.Fatal(got)
			}
		})
	}
}

func TestOversizeMessages(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.Skip = 16 << 20 })
	p := r.login(t)
	publish := func(corr string, size int) string {
		return `{"op":"PUBLISH","topic":"big","corr":"` + corr + `","payload":"` + strings.Repeat("x", size-2) + `"}`
	}
	limit := r.bus.MaxPayload()

	p.send(publish("fits", limit))
	if got := p.next("OK", ""); got.Corr != "fits" {
		t.Fatal(got)
	}
	p.send(publish("over", limit+1))
	if got := p.next("ERR", "publish_failed"); got.Corr != "over" || !strings.Contains(got.Msg, strconv.Itoa(limit)) {
		t.Fatal(got)
	}
	p.send(publish("skipped", 5*limit+4<<20))
	if got := p.next("ERR", "publish_failed"); got.Corr != nil || !strings.Contains(got.Msg, strconv.Itoa(limit)) {
		t.Fatal(got)
	}
	// The connection lives on.
	p.send(`{"op":"PUBLISH","topic":"big","payload":1,"corr":"small"}`)
	if got := p.next("OK", ""); got.Corr != "small" {
		t.Fatal(got)
	}
	if got := len(r.stored(t, "big")); got != 2 {
		t.Fatalf("%d events are stored, want 2", got)
	}

	// Writing may fail once the hub has closed.
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
		defer cancel()
		_ = p.conn.Write(ctx, websocket.MessageText, []byte(publish("flood", 17<<20)))
	}()
	p.wantClose(4102)
	r.wantClosed(t, 4102)
}

func TestProtocolOffenders(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Limits.Faults = 3
		cfg.Limits.AuthTries = 2
		cfg.Limits.AuthTimeout = 300 * time.Millisecond
	})
	t.Run("binary", func(t *testing.T) {
		p := r.login(t)
		if err := p.conn.Write(t.Context(), websocket.MessageBinary, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		p.wantClose(4100)
		r.wantClosed(t, 4100)
	})
	t.Run("faults in a row", func(t *testing.T) {
		p := r.login(t)
		p.send("{", "[]", `{"op":"X"}`, `{"op":"ACK","topic":"t","group":"g","id":"i"}`, "{", "{", "{", "{")
		p.next("ERR", "bad_json")
		p.next("ERR", "bad_frame")
		p.next("ERR", "unknown_op")
		p.next("ERR", "not_subscribed")
		for range 4 {
			p.next("ERR", "bad_json")
		}
		p.wantClose(4101)
		r.wantClosed(t, 4101)
	})
	t.Run("no auth", func(t *testing.T) {
		p := r.dial(t)
		p.send(`{"op":"PUBLISH","corr":""}`)
		p.want(`{"op":"ERR","code":"unauthorized","msg":"Call AUTH first.","corr":""}`)
		p.wantClose(4002)
		r.wantClosed(t, 4002)
	})
	t.Run("auth refused", func(t *testing.T) {
		p := r.dial(t)
		p.send(`{"op":"AUTH"}`, `{"op":"AUTH","token":"x"}`, `{"op":"AUTH","token":"y"}`)
		p.next("ERR", "no_token")
		p.next("ERR", "bad_token")
		p.next("ERR", "bad_token")
		p.wantClose(4103)
		r.wantClosed(t, 4103)
	})
	t.Run("clean close", func(t *testing.T) {
		p := r.login(t)
		if err := p.conn.Close(websocket.StatusNormalClosure, "bye"); err != nil {
			t.Fatal(err)
		}
		r.wantClosed(t, 1000)
	})
	t.Run("lost", func(t *testing.T) {
		_ = r.login(t).conn.CloseNow()
		r.wantClosed(t, 1006)
	})
}

func TestOrigins(t *testing.T) {
	t.Parallel()
	open, listed := newRig(t, nil), newRig(t, func(cfg *facade.Config) {
		cfg.Origins = []string{"https://app.example.com", "https://*.example.org", "http://localhost:*", "http://[::1]:8000"}
	})
	for _, c := range []struct {
		rig    *rig
		origin string
		status int
	}{
		{open, "https://evil.test", 101},
		{listed, "", 101},
		{listed, "https://APP.example.com", 101},
		{listed, "https://a.example.org", 101},
		{listed, "http://a.example.org", 403},
		{listed, "https://evil.test", 403},
		{listed, listed.ws.URL, 403}, // a page that was rebound to this address
		{listed, "null", 403},
		{listed, "http://localhost:8080", 101},
		{listed, "http://localhost", 403},
		{listed, "http://[::1]:8000", 101},
		{listed, "https://evil.test#.example.org", 403},
		{listed, "https://evil.test?.example.org", 403},
		{listed, "https://evil.test:443.example.org", 403},
		{listed, "https://me@evil.test\\.example.org", 403},
		{listed, "https://user@a.example.org", 403},
		{listed, "https://a.example.org:444", 403},
		{listed, "https://a.example.org/", 403},
	} {
		h := http.Header{}
		if c.origin != "" {
			h.Set("Origin", c.origin)
		}
		if _, status := c.rig.try(t, h); status != c.status {
			t.Errorf("%q: %d, want %d", c.origin, status, c.status)
		}
	}
	for _, bad := range []string{"app.example.com", "https://", "https://a/b", "https://[a", "https://a b", "https://a:x", "https://a#b"} {
		if _, err := facade.New(facade.Config{Bus: facade.JetStream(open.bus), Auth: facade.StaticToken("x"), Origins: []string{bad}}); err == nil {
			t.Errorf("origin %q was taken", bad)
		}
	}
}

func TestConnectionsLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.Connections = 1 })
	p := r.login(t)
	if _, status := r.try(t, nil); status != http.StatusServiceUnavailable {
		t.Fatal(status)
	}
	_ = p.conn.CloseNow()
	r.wantClosed(t, 1006)
	eventually(t, "the place is free", func() bool {
		conn, _ := r.try(t, nil)
		return conn != nil
	})
}

func TestOrderAndSettling(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	p := r.login(t)
	// Everything at once: the subscription must not see what was published before it.
	p.send(
		`{"op":"PUBLISH","topic":"o","payload":"before","corr":1}`,
		`{"op":"SUBSCRIBE","topic":"o","group":"g","corr":2}`,
		`{"op":"SUBSCRIBE","topic":"o","group":"g","corr":3}`,
		`{"op":"PUBLISH","topic":"o","payload":{"n":12345678901234567890, "s":"\u00e9"},"corr":4}`,
	)
	if got := p.read(); !strings.Contains(got, `"corr":1`) {
		t.Fatal(got)
	}
	p.want(`{"op":"OK","corr":2}`)
	p.want(`{"op":"ERR","code":"already_subscribed","msg":"o::g","corr":3}`)
	// The event may overtake the answer to its publish.
	a, b := p.read(), p.read()
	if strings.Contains(a, `"OK"`) {
		a, b = b, a
	}
	if !strings.Contains(b, `"corr":4`) || !strings.Contains(a, `"payload":{"n":12345678901234567890, "s":"\u00e9"}`) ||
		!strings.Contains(a, `"ctx":{"attempt":1,"ack_deadline_ms":30000}`) {
		t.Fatal(a, b)
	}
	id := strings.Split(strings.Split(a, `"event":{"id":"`)[1], `"`)[0]

	p.send(`{"op":"MODACK","topic":"o","group":"g","id":"`+id+`","extend_ms":5000,"corr":5}`,
		`{"op":"MODACK","topic":"o","group":"g","id":"other","corr":6}`,
		`{"op":"NACK","topic":"o","group":"g","id":"`+id+`","delay_ms":0,"corr":7}`)
	p.want(`{"op":"OK","corr":5}`)
	p.next("ERR", "unknown_id")
	p.want(`{"op":"OK","corr":7}`)
	if got := p.next("EVENT", ""); got.Ctx.Attempt != 2 || got.Event.ID != id {
		t.Fatal(got)
	}
	p.send(`{"op":"ACK","topic":"o","group":"g","ids":["`+id+`","none"],"corr":8}`,
		`{"op":"PAUSE","topic":"o","group":"g","corr":9}`,
		`{"op":"PUBLISH","topic":"o","corr":10}`)
	p.want(`{"op":"OK","corr":8}`)
	p.want(`{"op":"OK","corr":9}`)
	if got := p.read(); !strings.Contains(got, `"corr":10`) {
		t.Fatal(got)
	}
	p.send(`{"op":"RESUME","topic":"o","group":"g","corr":11}`)
	p.want(`{"op":"OK","corr":11}`)
	if got := p.next("EVENT", ""); string(got.Event.Payload) != "null" {
		t.Fatal(got)
	}
	p.send(`{"op":"UNSUBSCRIBE","topic":"o","group":"g","corr":12}`, `{"op":"UNSUBSCRIBE","topic":"o","group":"g","corr":13}`)
	p.want(`{"op":"OK","corr":12}`)
	p.want(`{"op":"ERR","code":"not_subscribed","msg":"o::g","corr":13}`)
}

// policies is an Authenticator whose tokens are the policies: topics separated by commas, and after
// a | how long the token is valid.
type policies struct{}

type policy struct {
	topics []string
	until  time.Time
}

func (policies) Authenticate(_ context.Context, token string) (facade.Principal, error) {
	topics, life, limited := strings.Cut(token, "|")
	p := policy{topics: strings.Split(topics, ",")}
	if topics == "" {
		return nil, &facade.AuthError{Code: "jwt_invalid", Msg: "no topics"}
	}
	if topics == "broken" {
		return nil, errors.New("the key server at 10.0.0.1 is down")
	}
	if limited {
		d, err := time.ParseDuration(life)
		if err != nil {
			return nil, err
		}
		p.until = time.Now().Add(d)
	}
	return p, nil
}

func (p policy) Name() string       { return strings.Join(p.topics, ",") }
func (p policy) Key() string        { return p.Name() }
func (p policy) Expires() time.Time { return p.until }
func (p policy) Allows(_ facade.Action, topic, _ string) bool {
	return slices.Contains(p.topics, topic)
}

func TestPolicyOfTheConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Auth = policies{} })
	p := r.dial(t)
	p.send(`{"op":"AUTH","token":"a,b"}`,
		`{"op":"SUBSCRIBE","topic":"a","group":"g"}`,
		`{"op":"SUBSCRIBE","topic":"b","group":"g"}`,
		`{"op":"SUBSCRIBE","topic":"a","group":"h","opts":{"topics":["c"]}}`,
		`{"op":"PUBLISH","topic":"c"}`,
		`{"op":"PUBLISH","topic":"c.>"}`)
	p.want(`{"op":"OK"}`)
	p.want(`{"op":"OK"}`)
	p.want(`{"op":"OK"}`)
	p.next("ERR", "forbidden")
	p.next("ERR", "forbidden")
	p.next("ERR", "bad_topic")

	// A new policy keeps what it allows.
	p.send(`{"op":"AUTH","token":"b,c","corr":"again"}`, `{"op":"PUBLISH","topic":"a"}`, `{"op":"PUBLISH","topic":"b","payload":1}`)
	if got := p.next("ERR", "forbidden"); got.Corr != nil || !strings.Contains(got.Msg, "a::g") {
		t.Fatal(got)
	}
	p.want(`{"op":"OK","corr":"again"}`)
	p.next("ERR", "forbidden")
	ops := []string{p.any().Op, p.any().Op}
	slices.Sort(ops)
	if !slices.Equal(ops, []string{"EVENT", "OK"}) {
		t.Fatal(ops)
	}

	// A failed one ends everything: the event goes to others at once.
	p.send(`{"op":"AUTH","token":"broken"}`, `{"op":"ACK","topic":"b","group":"g","id":"x"}`)
	if got := p.next("ERR", "internal"); strings.Contains(got.Msg, "10.0.0.1") {
		t.Fatal(got)
	}
	p.next("ERR", "unauthorized")
	q := r.dial(t)
	q.send(`{"op":"AUTH","token":"b"}`, `{"op":"SUBSCRIBE","topic":"b","group":"g"}`)
	q.want(`{"op":"OK"}`)
	q.want(`{"op":"OK"}`)
	if got := q.next("EVENT", ""); got.Ctx.Attempt != 2 {
		t.Fatal(got)
	}

	// A token that expires is told, then closed.
	q.send(`{"op":"AUTH","token":"b|300ms"}`)
	q.want(`{"op":"OK"}`)
	if got := q.next("ERR", "token_expired"); got.Corr != nil {
		t.Fatal(got)
	}
	q.wantClose(4003)
}

func TestSlowReaderDelaysItselfOnly(t *testing.T) {
	t.Parallel()
	const events, size = 40, 256 << 10
	payload := `"` + strings.Repeat("x", size) + `"`
	var r *rig
	var slow, quick *peer
	for stall := 2 * time.Second; ; stall *= 2 {
		r = newRig(t, func(cfg *facade.Config) { cfg.Limits.WriteStall, cfg.Limits.CloseGrace = stall, rigPatience })
		slow, quick = r.login(t), r.login(t)
		for _, p := range []*peer{slow, quick} {
			// The groups differ, so each gets all.
			group := map[*peer]string{slow: "slow", quick: "quick"}[p]
			p.send(`{"op":"SUBSCRIBE","topic":"s","group":"` + group + `","opts":{"maxInFlight":1000,"maxAttempts":1}}`)
			p.want(`{"op":"OK"}`)
		}
		published := make(chan error, 1)
		go func() { // while the quick one reads
			for range events {
				if _, err := r.bus.Publish(t.Context(), "s", []byte(payload), jetstream.PublishOptions{}); err != nil {
					published <- err
					return
				}
			}
			published <- nil
		}()
		got, closed := quick.readEvents(events)
		if err := <-published; err != nil {
			t.Fatal(err)
		}
		if got == events {
			break
		}
		// A machine that is busy enough makes any reader slow, but not with ever more time.
		if stall >= 8*time.Second {
			t.Fatalf("the quick one got %d of %d events, and was closed with %d", got, events, closed)
		}
	}
	// The slow one reads when it is too late to go on, but not too late to be told why.
	eventually(t, "the slow one's events are given up", func() bool { return r.seen.count("limit write_stall") == 1 })
	got, closed := slow.readEvents(events + 1)
	if closed != 4001 {
		t.Fatalf("after %d events, the slow one was closed with %d", got, closed)
	}
	r.wantClosed(t, 4001)
	if got == 0 || got == events {
		t.Fatalf("the slow one got %d of %d", got, events)
	}
	// What it never got has no failed attempt, though one would be enough for the dead letters.
	if _, err := r.bus.Publish(t.Context(), "s", []byte("1"), jetstream.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	quick.next("EVENT", "")
	next := r.login(t)
	next.send(`{"op":"SUBSCRIBE","topic":"s","group":"slow","opts":{"maxInFlight":1000}}`)
	next.want(`{"op":"OK"}`)
	left := 0
	for {
		f := next.next("EVENT", "")
		left++
		if string(f.Event.Payload) == "1" {
			break
		}
	}
	if left < events-got-1 {
		t.Fatalf("%d of %d events came again after %d were read", left, events, got)
	}
}

func TestDrain(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.DrainGrace = 300 * time.Millisecond })
	p, idle := r.login(t), r.dial(t)
	p.send(`{"op":"SUBSCRIBE","topic":"d","group":"g","opts":{"maxInFlight":2,"maxAttempts":1}}`)
	p.want(`{"op":"OK"}`)
	p.send(`{"op":"PUBLISH","topic":"d","payload":1}`, `{"op":"PUBLISH","topic":"d","payload":2}`, `{"op":"PUBLISH","topic":"d","payload":3}`)
	var first string
	for held := 0; held < 2; {
		text := p.read()
		if strings.HasPrefix(text, `{"op":"EVENT"`) {
			if held++; held == 1 {
				first = strings.Split(strings.Split(text, `"event":{"id":"`)[1], `"`)[0]
			}
		}
	}
	drained := make(chan error, 1)
	go func() { drained <- r.srv.Drain(context.Background()) }()
	eventually(t, "new connections are refused", func() bool {
		_, status := r.try(t, nil)
		return status == http.StatusServiceUnavailable
	})
	if got := r.post(t, "/publish/d", "1"); got.status != http.StatusServiceUnavailable {
		t.Fatal(got)
	}
	p.send(`{"op":"ACK","topic":"d","group":"g","id":"`+first+`","corr":"settled"}`,
		`{"op":"PUBLISH","topic":"d","payload":4,"corr":"last"}`,
		`{"op":"SUBSCRIBE","topic":"e","group":"g","corr":"new"}`)
	seen := map[string]string{}
	for len(seen) < 3 {
		got := p.any()
		if corr, ok := got.Corr.(string); ok {
			seen[corr] = got.Op + got.Code
		}
	}
	if seen["settled"] != "OK" || seen["last"] != "OK" || seen["new"] != "ERRoverloaded" {
		t.Fatal(seen)
	}
	p.wantClose(4000)
	idle.wantClose(4000)
	if err := <-drained; err != nil {
		t.Fatal(err)
	}
	if n := len(r.stored(t, "dlq.d")); n != 0 {
		t.Fatalf("%d dead letters", n)
	}
	if n := len(r.stored(t, "d")); n != 4 {
		t.Fatalf("%d events, want 4", n)
	}
}

// TestSilentPeerIsClosed closes a client that does not answer pings, and not one that does. On a
// machine so busy that an answer takes longer than PongTimeout, it tries a longer one.
func TestSilentPeerIsClosed(t *testing.T) {
	t.Parallel()
	for pong := 600 * time.Millisecond; ; pong *= 2 {
		err := besideASilentPeer(t, pong)
		if websocket.CloseStatus(err) == 4000 {
			return
		}
		if websocket.CloseStatus(err) != 4004 || pong > 10*time.Second {
			t.Fatalf("with %v for an answer, the client that answers was closed: %v", pong, err)
		}
	}
}

// besideASilentPeer waits until a silent client is closed, ends the hub, and returns how the
// connection of a client ended that answers pings.
func besideASilentPeer(t *testing.T, pong time.Duration) error {
	t.Helper()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.PingInterval, cfg.Limits.PongTimeout = 100*time.Millisecond, pong })
	// A client answers pings only while it reads.
	silent, alive := r.login(t), r.login(t)
	read := make(chan error, 1)
	go func() {
		_, _, err := alive.conn.Read(context.Background())
		read <- err
	}()
	r.wantClosed(t, 4004)
	silent.wantClose(4004)
	if err := r.srv.Close(); err != nil {
		t.Fatal(err)
	}
	return <-read
}
