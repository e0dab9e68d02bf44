package jetstream

import (
	"testing"
	"time"

	"eventhub/jetstream/topics"
)

// A bookmark does not take an event for settled because a hub still holds another, which retention
// has removed.
func TestABookmarkBesideRetention(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "short", MaxMsgs: 3}}})
	publishAll(t, b, "short", "1", "2", "3")
	k := take(t, b, "short", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 3})
	k.next()
	k.next()
	if err := k.next().Nack("later", time.Hour); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "short", "4") // removes the first, which the member holds
	k.next()
	g := b.Group("short", "g")
	eventually(t, "the server does not wait for the first", func() bool {
		info, err := g.Info(t.Context())
		return err == nil && info.InFlight == 3 && info.Floor >= 1
	})
	if _, err := g.Bookmarks().Put(t.Context(), "here"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Move(t.Context(), AtBookmark("here")); err != nil {
		t.Fatal(err)
	}
	got := make(map[string]bool)
	for range 3 {
		got[string(k.next().Event.Payload)] = true
	}
	if !got["2"] || !got["3"] || !got["4"] {
		t.Errorf("got %v", got)
	}
}
