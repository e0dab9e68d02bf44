package facade

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// TestGroupReset calls what the bus calls when a group had to start anew. Only a client whose last
// AUTH named the capability is told, with the names of its SUBSCRIBE, and before the next EVENT.
func TestGroupReset(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), MemoryStorage: true})
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
	defer cancel()
	conn, _, err := websocket.Dial(ctx, ws.URL, nil) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	ask := func(frame string, want ...string) {
		t.Helper()
		if frame != "" {
			if err := conn.Write(ctx, websocket.MessageText, []byte(frame)); err != nil {
				t.Fatal(err)
			}
		}
		for _, w := range want {
			_, got, err := conn.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if string(got[:min(len(got), len(w))]) != w {
				t.Fatalf("got  %s\nwant %s", got, w)
			}
		}
	}
	const ok = `{"op":"OK"`
	ask(`{"op":"AUTH","token":"token"}`, ok)
	ask(`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"topics":["t.more"]}}`, ok)
	var s *session
	srv.mu.Lock()
	for s = range srv.sessions {
	}
	srv.mu.Unlock()
	s.mu.Lock()
	sub := s.subs["t\x00g"]
	s.mu.Unlock()
	reset := s.busOptions(&frame{}, sub).OnReset
	publish := func() {
		t.Helper()
		if _, err := bus.Publish(ctx, "t", []byte("1"), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	const event = `{"op":"EVENT","topic":"t","group":"g"`

	reset("t")
	publish()
	ask("", event)

	ask(`{"op":"AUTH","token":"token","caps":["events_lost","group_reset"]}`, ok)
	reset("t")
	publish()
	const told = `{"op":"ERR","code":"group_reset","msg":"t::g"}`
	ask("", told, event)
	reset("t.more")
	ask("", told)

	// A refused AUTH frame changes nothing; the next one without the capability takes it back.
	ask(`{"op":"AUTH","token":"token","caps":7}`, `{"op":"ERR","code":"bad_options"`)
	reset("t")
	ask("", told)
	ask(`{"op":"AUTH","token":"token"}`, ok)
	reset("t")
	publish()
	ask("", event)
}
