package jetstream

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/natstest"
)

// TestLinkHooks breaks a connection that waits for an answer, and lets the connection come back.
func TestLinkHooks(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	again := natstest.Again(server)
	b, err := newBus(t.Context(), Config{URL: server.ClientURL(), Connections: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	called := make(chan string, 10)
	note := func(hook string) {
		l := b.conn.links[0]
		l.mu.Lock()
		down := l.down
		l.mu.Unlock()
		called <- fmt.Sprintf("%s: up %v, down %v", hook, l.up.Load(), down)
	}
	was := b.conn.hooks
	b.conn.hooks = linkHooks{
		cut:       func(l *link) { note("cut"); was.cut(l) },
		lost:      func(l *link) { note("lost"); was.lost(l) },
		returning: func(l *link, now int64) { note("returning"); was.returning(l, now) },
		back:      func(l *link) { was.back(l); note("back") },
		heard:     was.heard, changed: was.changed,
	}
	if err := b.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := b.conn.links[0]
	nobody := nats.NewInbox()
	_, err = l.nc.SubscribeSync(nobody) // so that the question has no answer
	if err == nil {
		err = l.ask(&nats.Msg{Subject: nobody}, b.clock.now(), askerFunc(func(_ *nats.Msg, err error) { note(err.Error()) }))
	}
	if err != nil {
		t.Fatal(err)
	}
	server.Shutdown()
	server.WaitForShutdown()
	natstest.Run(t, again)
	for _, want := range []string{
		"cut: up false, down false",
		errCut.Error() + ": up false, down true",
		"lost: up false, down true",
		"returning: up false, down false",
		"back: up true, down false",
	} {
		if got := <-called; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
