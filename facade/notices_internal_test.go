package facade

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// noticed is a client of a hub in this process, which is told of what happened to its groups.
type noticed struct {
	t    *testing.T
	ctx  context.Context //nolint:containedctx // of the test, with its limit
	bus  *jetstream.Bus
	srv  *Server
	conn *websocket.Conn
}

func newNoticed(t *testing.T, rules ...topics.Rule) *noticed {
	t.Helper()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), MemoryStorage: true, Topics: rules})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := New(Config{Bus: JetStream(bus), Auth: StaticToken("token")})
	if err != nil {
		t.Fatal(err)
	}
	ws := httptest.NewServer(srv.WebSocket())
	t.Cleanup(func() {
		ws.Close()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := bus.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	conn, _, err := websocket.Dial(ctx, ws.URL, nil) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	return &noticed{t, ctx, bus, srv, conn}
}

// ask sends a frame, unless it is "", and reads frames that begin with those wanted.
func (n *noticed) ask(frame string, want ...string) {
	n.t.Helper()
	if frame != "" {
		if err := n.conn.Write(n.ctx, websocket.MessageText, []byte(frame)); err != nil {
			n.t.Fatal(err)
		}
	}
	for _, w := range want {
		_, got, err := n.conn.Read(n.ctx)
		if err != nil {
			n.t.Fatal(err)
		}
		if string(got[:min(len(got), len(w))]) != w {
			n.t.Fatalf("got  %s\nwant %s", got, w)
		}
	}
}

func (n *noticed) publish(events int) {
	n.t.Helper()
	for range events {
		if _, err := n.bus.Publish(n.ctx, "t", []byte("1"), jetstream.PublishOptions{}); err != nil {
			n.t.Fatal(err)
		}
	}
}

const frameOK = `{"op":"OK"`

// A group whose events were removed before it was given them learns of that before its next EVENT,
// if its client asked for that.
func TestEventsLost(t *testing.T) {
	n := newNoticed(t, topics.Rule{Pattern: "t", MaxMsgs: 10})
	const event = `{"op":"EVENT","topic":"t","group":"g","event":`
	const lost = `{"op":"ERR","code":"events_lost","msg":"t::g lost `
	overtake := func(frame string, want ...string) {
		t.Helper()
		n.ask(`{"op":"PAUSE","topic":"t","group":"g"}`, frameOK)
		n.publish(30)
		n.ask(frame, frameOK)
		n.ask(`{"op":"RESUME","topic":"t","group":"g"}`, append([]string{frameOK}, want...)...)
		for range 9 {
			n.ask("", event)
		}
	}
	n.ask(`{"op":"AUTH","token":"token"}`, frameOK)
	n.ask(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`, frameOK)
	n.publish(1)
	n.ask("", event)
	overtake(`{"op":"AUTH","token":"token"}`, event)
	overtake(`{"op":"AUTH","token":"token","caps":["events_lost"]}`, lost+`20 events stored since 2`, event)
	overtake(`{"op":"AUTH","token":"token","caps":["group_reset"]}`, event)
}

// TestGroupReset calls what the bus calls when a group had to start anew. Only a client whose last
// AUTH named the capability is told, with the names of its SUBSCRIBE, and before the next EVENT.
func TestGroupReset(t *testing.T) {
	n := newNoticed(t)
	n.ask(`{"op":"AUTH","token":"token"}`, frameOK)
	n.ask(`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"topics":["t.more"]}}`, frameOK)
	var s *session
	n.srv.mu.Lock()
	for s = range n.srv.sessions {
	}
	n.srv.mu.Unlock()
	s.mu.Lock()
	sub := s.subs["t\x00g"]
	s.mu.Unlock()
	reset := s.busOptions(&frame{}, sub).OnReset
	const event = `{"op":"EVENT","topic":"t","group":"g"`

	reset("t")
	n.publish(1)
	n.ask("", event)

	n.ask(`{"op":"AUTH","token":"token","caps":["events_lost","group_reset"]}`, frameOK)
	reset("t")
	n.publish(1)
	const told = `{"op":"ERR","code":"group_reset","msg":"t::g"}`
	n.ask("", told, event)
	reset("t.more")
	n.ask("", told)

	// A refused AUTH frame changes nothing; the next one without the capability takes it back.
	n.ask(`{"op":"AUTH","token":"token","caps":7}`, `{"op":"ERR","code":"bad_options"`)
	reset("t")
	n.ask("", told)
	n.ask(`{"op":"AUTH","token":"token"}`, frameOK)
	reset("t")
	n.publish(1)
	n.ask("", event)
}
