package facade_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// listen opens a broadcast of a topic over HTTP, and returns its first message.
func (r *rig) listen(t *testing.T, topic, query string, headers ...string) (*sse, castFrame) {
	t.Helper()
	s, a := r.tryStream(t, "/broadcast/"+topic+"?"+query, headers...)
	if s == nil {
		t.Fatalf("broadcast: %d %s", a.status, a.text)
	}
	f, m := s.frame("subscribed")
	if snapshot := strings.Contains(query, "snapshot"); f.Op != "OK" || snapshot && m.id != "" || !snapshot && m.id != f.Pos {
		t.Errorf("got %+v", m)
	}
	return s, f
}

// frame is the next message, which must have this name.
func (s *sse) frame(name string) (f castFrame, m message) {
	s.t.Helper()
	m, ok := s.next()
	if !ok || m.name != name {
		s.t.Fatalf("got %.300v, want a message %s", m, name)
	}
	if err := json.Unmarshal([]byte(m.data), &f); err != nil {
		s.t.Fatalf("%.300s: %v", m.data, err)
	}
	return f, m
}

// wantCast reads events of a broadcast with these payloads, and returns the pos of the last one.
func (s *sse) wantCast(payloads ...string) (pos string) {
	s.t.Helper()
	for _, want := range payloads {
		f, m := s.frame("event")
		if string(f.Event.Payload) != want || m.id != f.Ctx.Pos || m.id == "" {
			s.t.Fatalf("got %.300v, want %s", m, want)
		}
		pos = m.id
	}
	return pos
}

// A stream has the frames of a WebSocket, and goes on behind any of them.
func TestBroadcastStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s, ok := r.listen(t, "t", "")
	if !ok.Recovered || s.res.Header.Get("Content-Type") != "text/event-stream" {
		t.Errorf("got %+v, %v", ok, s.res.Header)
	}
	p := r.login(t)
	p.follow("t", "")
	pos := []string{ok.Pos}
	for i := range 60 {
		payload := strconv.Itoa(i)
		if i%20 == 7 {
			payload = `"` + strings.Repeat("x", i*5_000) + `"`
		}
		r.put(t, "t", payload)
		f, m := s.frame("event")
		if text := p.read(); text != m.data {
			t.Fatalf("the stream has %.300s, the socket %.300s", m.data, text)
		}
		pos = append(pos, f.Ctx.Pos)
	}
	r.put(t, "t", "{\"a\":\r\n1}")
	if f, _ := s.frame("event"); string(f.Event.Payload) != "{\"a\":  1}" {
		t.Errorf("got %q", f.Event.Payload)
	}
	r.puts(t, "u", span(0, 99)...)
	u, _ := r.listen(t, "u", "history=100")
	places := make([]string, 0, 100)
	for i := range 100 {
		places = append(places, u.wantCast(strconv.Itoa(i)))
	}
	for range 10 {
		from := rand.IntN(len(places) - 1)
		// The query is that of the first request, as a browser repeats it.
		s, ok := r.listen(t, "u", "history=5", "Last-Event-ID", places[from])
		if !ok.Recovered || ok.Pos != places[from] {
			t.Errorf("from %d: %+v", from, ok)
		}
		s.wantCast(span(from+1, 99)...)
		_ = s.body.Close()
	}
	if s, ok := r.listen(t, "t", "from=pos&pos="+pos[50]); !ok.Recovered {
		t.Errorf("got %+v", ok)
	} else {
		s.wantCast(span(50, 59)...)
	}
	if _, ok := r.listen(t, "t", "", "Last-Event-ID", places[3]); ok.Recovered || ok.Reason != "stream_changed" {
		t.Errorf("with a pos of another topic: %+v", ok)
	}
}

// The events of a snapshot have no id: a browser that loses the stream among them gets a new
// snapshot.
func TestBroadcastStreamSnapshot(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "state", Compaction: true}}}, nil)
	for i := range 60 {
		r.put(t, "state", strconv.Itoa(i), "Event-Key", "k"+strconv.Itoa(i%20))
	}
	eventually(t, "the snapshot has all events", func() bool {
		upTo, err := r.bus.Keys("state").Snapshot(t.Context(), func(*jetstream.Event) error { return nil })
		return err == nil && upTo == 60
	})
	s, _ := r.listen(t, "state", "snapshot=true")
	seen := make(map[string]bool)
	for range 20 {
		f, m := s.frame("event")
		if m.id != "" || seen[f.Event.Key] {
			t.Errorf("got %+v", m)
		}
		seen[f.Event.Key] = true
	}
	end, m := s.frame("snapshot")
	if m.id != end.Pos || m.id == "" {
		t.Errorf("the snapshot ends with %+v", m)
	}
	r.put(t, "state", "60", "Event-Key", "k0")
	at := s.wantCast("60")
	behind, _ := r.listen(t, "state", "", "Last-Event-ID", end.Pos)
	behind.wantCast("60")
	r.put(t, "state", "61", "Event-Key", "k0")
	again, _ := r.listen(t, "state", "", "Last-Event-ID", at)
	again.wantCast("61")
}

// A client that does not read loses what the ring drops, and is told which events those are.
func TestBroadcastStreamSlow(t *testing.T) {
	t.Parallel()
	for _, slow := range []string{"skip", "catchup", "close"} {
		t.Run(slow, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(cfg *facade.Config) { cfg.Limits.RingFrames, cfg.Limits.WriteStall = 16, 10*time.Minute })
			transport := new(http.Transport)
			smallWindow(transport)
			r.http.Client().Transport = apitest.Transport(t, apitest.Clients, transport)
			s, ok := r.listen(t, "t", "slow="+slow)
			const n = 120 // more than the kernel and the ring hold
			fill := `"` + strings.Repeat("x", 75_000) + `"`
			for range n {
				r.put(t, "t", fill)
			}
			last, got, missed := ok.Pos, 0, 0
			for got+missed < n {
				m, more := s.next()
				if !more {
					t.Fatalf("the stream ended after %d events, and %d missed ones", got, missed)
				}
				if m.name == "close" && slow == "close" && strings.Contains(m.data, `"code":4001,`) {
					return
				}
				var f castFrame
				if err := json.Unmarshal([]byte(m.data), &f); err != nil {
					t.Fatalf("%.300v: %v", m, err)
				}
				switch {
				case m.name == "event":
					got++
				case m.name == "gap" && slow == "skip" && f.From == last && f.To == m.id:
					missed += f.Missed
				default:
					t.Fatalf("got %.300v behind %s", m, last)
				}
				last = m.id
			}
			if slow == "close" || slow == "skip" && missed == 0 {
				t.Errorf("%d events, %d missed", got, missed)
			}
			r.put(t, "t", "1")
			s.wantCast("1")
		})
	}
}

// A stream has the options of a socket: presence and conflated events. Comments keep it alive.
func TestBroadcastStreamOptions(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: roomRules}, func(cfg *facade.Config) {
		cfg.Auth, cfg.Limits.StreamBeat = facade.Tokens(newVerifier(t)), time.Millisecond
	})
	bearer := func(name string) string { return "Bearer " + grant(t, name, "*:**") }
	s, _ := r.listen(t, "room.1", "presence=true&conflate=key&minIntervalMs=1000", "Authorization", bearer("ann"))
	var f presenceFrame
	present := func(count int) {
		t.Helper()
		for f.Count != count {
			m, ok := s.next()
			if err := json.Unmarshal([]byte(m.data), &f); !ok || err != nil || m.name != "presence" || m.id != "" || f.Topic != "room.1" {
				t.Fatalf("got %.300v, %v", m, err)
			}
		}
	}
	present(1)
	p := r.dial(t)
	p.auth(grant(t, "ben", "subscribe:**"))
	p.follow("room.1", "")
	present(2)
	_ = p.conn.CloseNow()
	present(1)
	const n = 60
	for i := range n {
		r.put(t, "room.1", strconv.Itoa(i), "Event-Key", "k", "Authorization", bearer("ann"))
	}
	last, seen := -1, 0
	for last < n-1 {
		f, _ := s.frame("event")
		now, err := strconv.Atoi(string(f.Event.Payload))
		if err != nil || now <= last {
			t.Fatalf("%s after %d", f.Event.Payload, last)
		}
		last = now
		seen++
	}
	if seen > n/2 {
		t.Errorf("%d events of %d were sent", seen, n)
	}
	late := time.AfterFunc(rigPatience, func() { _ = s.body.Close() })
	defer late.Stop()
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			t.Fatal("no comment came: ", err)
		}
		if line[0] == ':' {
			break
		}
	}
}

// A request that is wrong is refused before a stream begins.
func TestBroadcastStreamRefusals(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.Streams = 1 })
	for path, code := range map[string]string{
		"t?mode=broadcast":          "bad_options",
		"t?history=1001":            "bad_options",
		"t?history=x":               "bad_options",
		"t?history=1&history=2":     "bad_options",
		"t?history=1&snapshot=true": "bad_options",
		"t?snapshot=1":              "bad_options",
		"t?from=pos":                "bad_options",
		"t?from=pos&pos=1":          "bad_options",
		"t?slow=stop":               "bad_options",
		"t?conflate=id":             "bad_options",
		"t?minIntervalMs=-1":        "bad_options",
		"t?presence=true":           "bad_options",
		"t?snapshot=true":           "bad_topic",
		"a..b":                      "bad_topic",
		"t?from=afterId&afterId=1":  "unknown_id",
		"t?history=%zz":             "bad_options",
	} {
		if s, a := r.tryStream(t, "/broadcast/"+path); s != nil || a.Code != code {
			t.Errorf("%s: %d %s, want %s", path, a.status, a.text, code)
		}
	}
	if s, a := r.tryStream(t, "/broadcast/t", "Last-Event-ID", "x"); s != nil || a.Code != "bad_options" {
		t.Errorf("got %d %s", a.status, a.text)
	}
	r.listen(t, "t", "")
	if s, a := r.tryStream(t, "/broadcast/t"); s != nil || a.Code != "rate_limited" {
		t.Errorf("beyond the limit of streams: %d %s", a.status, a.text)
	}
}

// The policy decides as it does for a socket, and the end of the token ends the stream.
func TestBroadcastStreamAsksThePolicy(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	for scope, status := range map[string]int{
		"subscribe:t": http.StatusOK, "subscribe:t::*": http.StatusForbidden, "presence:t": http.StatusForbidden,
	} {
		s, a := r.tryStream(t, "/broadcast/t", "Authorization", "Bearer "+grant(t, "eve", scope))
		if got := a.status; s == nil && got != status || s != nil && status != http.StatusOK {
			t.Errorf("with %s: %d %s", scope, a.status, a.text)
		}
	}
	var s *sse
	shortLived(t, func(token string) bool {
		s, _ = r.tryStream(t, "/broadcast/t", "Authorization", "Bearer "+token)
		return s != nil
	}, "subscribe:t")
	s.frame("subscribed")
	if f, _ := s.frame("error"); f.Code != "token_expired" {
		t.Errorf("got %+v", f)
	}
	s.wantEnd(message{name: "close", data: `{"code":4003,"reason":"token_expired"}`})
}

// A topic that is deleted ends its streams.
func TestBroadcastStreamOfADeletedTopic(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s, _ := r.listen(t, "t", "")
	if err := r.bus.Admin().Topic("t").Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if f, _ := s.frame("error"); f.Code != "not_subscribed" || f.Msg != "t" {
		t.Errorf("got %+v", f)
	}
	s.wantEnd()
}

// A hub that shuts down says when to come again.
func TestBroadcastStreamDrains(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s, _ := r.listen(t, "t", "")
	ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
	defer cancel()
	drained := make(chan error, 1)
	var draining sync.WaitGroup
	draining.Go(func() { drained <- r.srv.Drain(ctx) })
	defer draining.Wait()
	s.wantEnd(message{name: "close", data: `{"code":4000,"reason":"draining","retry_after_ms":0}`})
	if s.retry != "1000" {
		t.Errorf("retry is %q", s.retry)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
}
