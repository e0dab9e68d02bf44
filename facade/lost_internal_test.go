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

// A group whose events were removed before it was given them learns of that before its next EVENT,
// if its client asked for that.
func TestEventsLost(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{
		Server: natstest.Embed(t, t.TempDir()), MemoryStorage: true, Topics: []jetstream.TopicRule{{Pattern: "t", MaxMsgs: 10}},
	})
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
	const event = `{"op":"EVENT","topic":"t","group":"g","event":`
	publish := func(n int) {
		t.Helper()
		for range n {
			if _, err := bus.Publish(ctx, "t", []byte("1"), jetstream.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	const lost = `{"op":"ERR","code":"events_lost","msg":"t::g lost `
	overtake := func(frame string, want ...string) {
		t.Helper()
		ask(`{"op":"PAUSE","topic":"t","group":"g"}`, ok)
		publish(30)
		ask(frame, ok)
		ask(`{"op":"RESUME","topic":"t","group":"g"}`, append([]string{ok}, want...)...)
		for range 9 {
			ask("", event)
		}
	}
	ask(`{"op":"AUTH","token":"token"}`, ok)
	ask(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`, ok)
	publish(1)
	ask("", event)
	overtake(`{"op":"AUTH","token":"token"}`, event)
	overtake(`{"op":"AUTH","token":"token","caps":["events_lost"]}`, lost+`20 events stored since 2`, event)
	overtake(`{"op":"AUTH","token":"token","caps":["group_reset"]}`, event)
}
