package conn

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// TestHooks breaks a connection that waits for an answer, and lets the connection come back.
func TestHooks(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	again := natstest.Again(server)
	p := New(t.Context(), Config{
		URL: server.ClientURL(), Connections: 1, Margin: 5 * time.Second,
		Log: slog.New(slog.DiscardHandler), Obs: event.NopObserver{}, Clock: NewClock(time.Now, time.Second),
	})
	called := make(chan string, 10)
	note := func(hook string) {
		l := p.Links[0]
		l.mu.Lock()
		down := l.down
		l.mu.Unlock()
		called <- fmt.Sprintf("%s: up %v, down %v", hook, l.Up.Load(), down)
	}
	p.Hooks.Cut = func(*Link) { note("cut") }
	p.Hooks.Lost = func(*Link) { note("lost") }
	p.Hooks.Returning = func(*Link, int64) { note("returning") }
	p.Hooks.Back = func(*Link) { note("back") }
	if err := p.Connect(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(context.Background()) })
	l := p.Links[0]
	nobody := nats.NewInbox()
	_, err := l.NC.SubscribeSync(nobody) // so that the question has no answer
	if err == nil {
		err = l.Ask(&nats.Msg{Subject: nobody}, p.Clock.Now(), AskerFunc(func(_ *nats.Msg, err error) { note(err.Error()) }))
	}
	if err != nil {
		t.Fatal(err)
	}
	server.Shutdown()
	server.WaitForShutdown()
	natstest.Run(t, again)
	for _, want := range []string{
		"cut: up false, down false",
		ErrCut.Error() + ": up false, down true",
		"lost: up false, down true",
		"returning: up false, down false",
		"back: up true, down false",
	} {
		if got := <-called; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
